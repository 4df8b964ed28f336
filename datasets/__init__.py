"""Data sets: sources, transforms, the order of samples, and loading."""

from datasets.base import PADDING, Batch, ImageDataset
from datasets.decoding.choice import decoder_of
from datasets.loading.identity import data_identity, identity_of
from datasets.loading.loader import TrainLoader, ValLoader, Window, auto_workers
from datasets.loading.order import EpochOrder, Share, validation_batches
from datasets.registry import (
    check_dataset,
    comes_unsplit,
    count_classes,
    has_labels,
    names,
    open_dataset,
    source_of,
    validates_on_test,
    warn_of_splits,
)

__all__ = [
    "PADDING",
    "Batch",
    "EpochOrder",
    "ImageDataset",
    "Share",
    "TrainLoader",
    "ValLoader",
    "Window",
    "auto_workers",
    "check_dataset",
    "comes_unsplit",
    "count_classes",
    "data_identity",
    "decoder_of",
    "has_labels",
    "identity_of",
    "names",
    "open_dataset",
    "source_of",
    "validates_on_test",
    "validation_batches",
    "warn_of_splits",
]
