"""Data sets: sources, transforms, the order of samples, and loading."""

from datasets.base import PADDING as PADDING
from datasets.base import Batch as Batch
from datasets.base import ImageDataset as ImageDataset
from datasets.loading.loader import TrainLoader as TrainLoader
from datasets.loading.loader import ValLoader as ValLoader
from datasets.loading.loader import Window as Window
from datasets.loading.loader import auto_workers as auto_workers
from datasets.loading.order import EpochOrder as EpochOrder
from datasets.loading.order import MicroBatch as MicroBatch
from datasets.loading.order import data_identity as data_identity
from datasets.loading.order import identity_of as identity_of
from datasets.loading.order import validation_batches as validation_batches
from datasets.registry import check_dataset as check_dataset
from datasets.registry import comes_unsplit as comes_unsplit
from datasets.registry import count_classes as count_classes
from datasets.registry import has_labels as has_labels
from datasets.registry import names as names
from datasets.registry import open_dataset as open_dataset
from datasets.registry import source_of as source_of
from datasets.registry import validates_on_test as validates_on_test
from datasets.registry import warn_of_splits as warn_of_splits
