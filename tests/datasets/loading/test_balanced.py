"""DATA.SAMPLER balanced: classes are equally frequent, whatever reads the samples."""

from collections import Counter

import numpy as np
import torch

from datasets import EpochOrder
from datasets.loading.order import BalancedOrder
from engine.setup import training_data
from tests.datasets.opened import CPU
from utils.config import load_config
from utils.distributed.world import ALONE

SIZES = (700, 200, 70, 25, 5)
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5) * 2, SIZES))  # the odd labels have no images


def order_of(labels: np.ndarray, repeated: int = 1) -> EpochOrder:
    return EpochOrder(len(labels), 8, 4, 0, 1, 3, False, repeated, BalancedOrder(labels, repeated))


def test_every_class_is_equally_frequent_in_an_epoch() -> None:
    for labels, repeated, counts in ((LABELS, 1, {200}), (LABELS[:-1], 1, {199, 200}), (LABELS, 2, {200})):
        drawn = order_of(labels, repeated).permutation(1)
        assert len(drawn) == len(labels)
        assert set(Counter(labels[drawn % len(labels)].tolist()).values()) == counts


def test_images_of_a_class_repeat_only_after_all_others() -> None:
    drawn = order_of(LABELS).permutation(1)
    copies, samples = np.divmod(drawn, len(LABELS))
    for label, size in zip(range(0, 10, 2), SIZES, strict=True):
        times = Counter(samples[LABELS[samples] == label].tolist())
        assert len(times) == min(size, 200)
        assert max(times.values()) - min(times.values()) <= 1
    assert len(set(drawn.tolist())) == len(drawn), "copies of a sample have different indices"
    assert copies.max() + 1 == BalancedOrder(LABELS).copies == 40


def test_repeated_augmentation_repeats_drawn_samples() -> None:
    repeated, order = order_of(LABELS, repeated=2).permutation(1), BalancedOrder(LABELS, 2)
    assert np.array_equal(repeated[::2] % len(LABELS), repeated[1::2] % len(LABELS))
    assert len(set(repeated.tolist())) == len(repeated)
    assert repeated.max() // len(LABELS) + 1 == order.copies == 40
    assert order.words().endswith("200 images of each of 5 classes per epoch, each image at most 40 times")
    assert "balanced: up to 200 images of each" in order.words(whole=False)


def test_copies_of_an_image_are_augmented_differently() -> None:
    given = {"DATA.DATASET": "digits", "DATA.IMAGE_SIZE": 8, "DATA.IMAGE_CHANNELS": 1, "MODEL.NUM_CLASSES": 10}
    given |= {"DATA.SAMPLER": "balanced", "DATA.BATCH_SIZE": 32, "DATA.SHIFT": 0.2}
    config = load_config(None, words={key: str(value) for key, value in given.items()}).config
    _, loader = training_data(config, ALONE, CPU)
    seen: dict[int, list[torch.Tensor]] = {}
    for window in loader.epoch(1):
        for _, batch in window:
            for index, pixels in zip(batch.indices.tolist(), batch.images, strict=True):
                seen.setdefault(index, []).append(pixels)
    twice = [copies for copies in seen.values() if len(copies) == 2]
    assert twice
    assert not any(torch.equal(*copies) for copies in twice)
