"""Data sets: sources, transforms, the order of samples, and loading."""

from datasets.base import PADDING, Batch, ImageDataset
from datasets.damage.exclude import warn_unmatched
from datasets.damage.links import warn_of_links
from datasets.decoding.reader import decoder_of
from datasets.loading.balanced import balanced_order
from datasets.loading.identity import data_identity, identity_of
from datasets.loading.loader import TrainLoader, ValLoader, Window, auto_workers
from datasets.loading.order import EpochOrder, Share, validation_batches
from datasets.recognise import recognise
from datasets.registry import (
    check_dataset,
    comes_unsplit,
    count_classes,
    names,
    open_dataset,
    source_of,
    validates_on_test,
)
from datasets.variants import Repeated, Sized

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
    "balanced_order",
    "check_dataset",
    "comes_unsplit",
    "count_classes",
    "data_identity",
    "decoder_of",
    "identity_of",
    "names",
    "open_dataset",
    "recognise",
    "source_of",
    "validates_on_test",
    "validation_batches",
    "warn_of_links",
    "warn_unmatched",
]
