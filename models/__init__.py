"""What is trained: settings in, `torch.nn.Module` out; and the way weights come in."""

from .build import build_model, build_without_weights, check_model, count_parameters, describe, list_models
from .shortcuts import Shortcuts
from .sources import check_pretrained
from .weights import load_pretrained

__all__ = [
    "Shortcuts",
    "build_model",
    "build_without_weights",
    "check_model",
    "check_pretrained",
    "count_parameters",
    "describe",
    "list_models",
    "load_pretrained",
]
