"""Models built from settings. `models/weights` loads pretrained weights."""

from models.build import (
    build_model,
    build_without_weights,
    check_model,
    count_parameters,
    describe,
    list_models,
    timm_call,
)
from models.freeze import (
    base_weights,
    classifiers,
    frozen_weights,
    has_adapters,
    is_inside,
    unfreeze,
    weights_to_train,
)
from models.sizes import Shortcuts

__all__ = [
    "Shortcuts",
    "base_weights",
    "build_model",
    "build_without_weights",
    "check_model",
    "classifiers",
    "count_parameters",
    "describe",
    "frozen_weights",
    "has_adapters",
    "is_inside",
    "list_models",
    "timm_call",
    "unfreeze",
    "weights_to_train",
]
