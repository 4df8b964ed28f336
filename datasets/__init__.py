"""Where samples come from: sources, transforms, the order of samples, loading."""

from .base import PADDING, Batch, ImageDataset
from .decode import decoder_of
from .exclude import tell_unmatched
from .identity import identity_of
from .images import samples_of
from .loader import TrainLoader, ValLoader, Window, auto_workers
from .order import EpochOrder, Share, validation_batches
from .registry import check_dataset, names, open_dataset
from .repeated import Repeated
from .sized import Sized

__all__ = [
    "PADDING",
    "Batch",
    "EpochOrder",
    "ImageDataset",
    "Repeated",
    "Share",
    "Sized",
    "TrainLoader",
    "ValLoader",
    "Window",
    "auto_workers",
    "check_dataset",
    "decoder_of",
    "identity_of",
    "names",
    "open_dataset",
    "samples_of",
    "tell_unmatched",
    "validation_batches",
]
