"""Which training samples there are, and in which order epochs take them, in a few words to be compared."""

from __future__ import annotations

import hashlib

from datasets.base import ImageDataset
from datasets.images import samples_of
from datasets.loading.order import EpochOrder


def identity_of(dataset: ImageDataset, order: EpochOrder) -> dict[str, int | str]:
    """Alike on all processes, and wherever the data set lies."""
    # Where images are left out (DATA.EXCLUDE), the order depends on which.
    digest = hashlib.sha256(order.permutation(1).tobytes())
    if samples := samples_of(dataset):
        digest.update(samples.labels.tobytes())
    return {"number": order.samples, "updates": order.updates, "order": digest.hexdigest()}
