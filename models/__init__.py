"""Models: building them from settings, and loading pretrained weights."""

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
from models.weights.find import check_pretrained, local_weights
from models.weights.fit import load_pretrained

__all__ = [
    "Shortcuts",
    "build_model",
    "build_without_weights",
    "check_model",
    "check_pretrained",
    "classifiers",
    "count_parameters",
    "describe",
    "frozen_weights",
    "is_inside",
    "list_models",
    "load_pretrained",
    "local_weights",
    "timm_call",
    "unfreeze",
    "weights_to_train",
]
