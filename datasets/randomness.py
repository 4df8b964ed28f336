"""The random numbers of one sample: they depend on (seed, epoch, sample index) and on nothing else."""

from __future__ import annotations

import numpy as np

from utils.seeding import key, seed_host


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed python, numpy and torch for the transforms of one sample."""
    seed_host(seed, "sample", epoch, index)


def sample_table(seed: int, epoch: int, samples: int, columns: int) -> np.ndarray:
    """Uniform numbers in 0..1, a row a sample: for sources that transform whole batches at once."""
    generator = np.random.Generator(np.random.Philox(key=key(seed, "sample", epoch)))
    return generator.random((samples, columns))
