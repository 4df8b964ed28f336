"""Seeds derived from what the random numbers are for: no generator state is carried from one use to the next."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np


def key(*parts: int | str) -> int:
    """A 64-bit seed that depends on `parts` alone. Python's own `hash` differs from process to process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def generator_of(*parts: int | str) -> np.random.Generator:
    """Numpy's generator for one purpose, seeded from `parts`."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))


def seed_host(*parts: int | str) -> None:
    """Seed python, numpy and torch's CPU generator from `parts`."""
    import torch  # here, so that the order of samples can be computed without loading torch

    number = key(*parts)  # 64 bits
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # numpy takes 32 bits
    # Not torch.manual_seed: before CUDA starts, that queues one more call for the GPU at every use.
    torch.default_generator.manual_seed(number >> 1)  # 63 bits, because torch takes signed integers


def seed_all(*parts: int | str) -> None:
    """Seed every generator of this process from `parts`, the GPU's too once CUDA is initialised."""
    import torch

    seed_host(*parts)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(key(*parts) >> 1)


@contextlib.contextmanager
def fork_host_rng() -> Iterator[None]:
    """Restore python's, numpy's and torch's CPU generators afterwards, whatever the block seeds or draws."""
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
