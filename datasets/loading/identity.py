"""Fingerprint of a data set and of the order of its samples, by which a resumed run recognises its own."""

from __future__ import annotations

import hashlib

import numpy as np

from datasets.base import ImageDataset
from datasets.loading.order import EpochOrder


def data_identity(dataset: ImageDataset) -> str:
    """Hash of the names and labels of a split in their order, wherever the data set is.

    Contents are not read. Data sets in memory have labels only.
    """
    digest, samples, labels = hashlib.sha256(), dataset.single_images(), dataset.sample_labels()
    for part in samples.names() if samples is not None else ():
        digest.update(part)
    if labels is not None:
        digest.update(f"{labels.shape}".encode())
        digest.update(labels.astype(np.int64 if labels.ndim == 1 else np.uint8).tobytes())
    return digest.hexdigest()


def identity_of(dataset: ImageDataset, order: EpochOrder) -> dict[str, int | str]:
    """Fingerprint of the training split and its order, equal on all ranks, for meta.json."""
    # Checkpoints of older versions have this field alone, so it stays what it was: without the names.
    digest = hashlib.sha256(order.permutation(1).tobytes())
    if samples := dataset.single_images():
        digest.update(samples.labels.tobytes())
    return {
        "number": order.samples,
        "updates": order.updates,
        "order": digest.hexdigest(),
        "data": data_identity(dataset),
    }
