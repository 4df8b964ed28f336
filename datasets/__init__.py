"""Data sets: sources, transforms, the order of samples, and loading."""

from datasets.base import PADDING, Batch, ImageDataset
from datasets.loading.loader import TrainLoader, ValLoader, Window, auto_workers
from datasets.loading.order import EpochOrder, MicroBatch, data_identity, identity_of, validation_batches
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
    "MicroBatch",
    "TrainLoader",
    "ValLoader",
    "Window",
    "auto_workers",
    "check_dataset",
    "comes_unsplit",
    "count_classes",
    "data_identity",
    "has_labels",
    "identity_of",
    "names",
    "open_dataset",
    "source_of",
    "validates_on_test",
    "validation_batches",
    "warn_of_splits",
]
