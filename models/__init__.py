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
from models.freeze import classifiers, frozen_weights, is_inside, unfreeze, weights_to_train
from models.shortcuts import Shortcuts

__all__ = [
    "Shortcuts",
    "build_model",
    "build_without_weights",
    "check_model",
    "classifiers",
    "count_parameters",
    "describe",
    "frozen_weights",
    "is_inside",
    "list_models",
    "timm_call",
    "unfreeze",
    "weights_to_train",
]
