"""Random numbers that follow from what they are for: no generator's state is ever carried from one use to the next."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np


def key(*parts: int | str) -> int:
    """64 bits that depend on `parts` alone. Python's own `hash` would differ from process to process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def seed_host(*parts: int | str) -> None:
    """Seed python, numpy and torch's CPU generator from `parts`."""
    import torch  # here, so that the order of samples can be computed without loading torch

    number = key(*parts)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    # Not torch.manual_seed: before CUDA starts, that queues one more call for the GPU at every use.
    torch.default_generator.manual_seed(number >> 1)


def seed_all(*parts: int | str) -> None:
    """Seed every generator of this process from `parts`, the GPU's too once it is in use."""
    import torch

    seed_host(*parts)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(key(*parts) >> 1)


@contextlib.contextmanager
def host_generators_kept() -> Iterator[None]:
    """Put python's, numpy's and torch's CPU generators back as they were, whatever the block seeds or draws."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
