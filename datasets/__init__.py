"""Data sets: sources, transforms, the order of samples, and loading."""

# ruff: noqa: F401 - imported from here

from datasets.base import PADDING, Batch, ImageDataset
from datasets.loading.loader import TrainLoader, ValLoader, Window, auto_workers
from datasets.loading.order import (
    BalancedOrder,
    EpochOrder,
    MicroBatch,
    OrderByMachine,
    data_identity,
    identity_of,
    validation_batches,
)
from datasets.registry import (
    check_dataset,
    comes_unsplit,
    count_classes,
    has_labels,
    has_test,
    names,
    open_dataset,
    open_test,
    source_of,
    validates_on_test,
    warn_of_splits,
)
