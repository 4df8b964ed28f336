"""The decorators for code of your own, in a file that `-use` names: `from vitamp import loss`. See docs/own_code.md."""

from utils.own.registry import augmentation, dataset, loss, model

__all__ = ["augmentation", "dataset", "loss", "model"]
