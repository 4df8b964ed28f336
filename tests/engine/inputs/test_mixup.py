"""Random erasing, mixup and cutmix: as timm does it, the same in a replay, and never in validation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup
from timm.loss.cross_entropy import SoftTargetCrossEntropy
from torch import Tensor

from engine.amp.overflow import OverflowWatch
from engine.inputs.batches import TransformedBatch
from engine.inputs.mixing import Mixing, build_batch_transform
from engine.task.one import OneLabel
from tests.engine.small import CPU, build, train
from utils.config.train import TrainConfig
from utils.seeding import seed_all

CLASSES = 7
KINDS = {
    "mixup": {"MIXUP_ALPHA": 0.8},
    "cutmix": {"CUTMIX_ALPHA": 1.0},
    "both": {"MIXUP_ALPHA": 0.8, "CUTMIX_ALPHA": 1.0, "MIXUP_SWITCH_PROB": 0.4},
    "minmax": {"CUTMIX_MINMAX": (0.2, 1.0)},
    "seldom": {"MIXUP_ALPHA": 0.2, "CUTMIX_ALPHA": 1.0, "MIXUP_PROB": 0.5},
}
ALL_ON = {"TRAIN__MIXUP_ALPHA": 0.8, "TRAIN__CUTMIX_ALPHA": 1.0, "TRAIN__RANDOM_ERASE_PROB": 0.5}


def samples(count: int = 6, side: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=generator), torch.arange(count) % CLASSES


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_images_and_loss_equal_timms(kind: str, mode: str) -> None:
    """Labels and smoothing together too: ours smooths in the loss, timm before it mixes."""
    settings = TrainConfig.model_validate({**KINDS[kind], "MIXUP_MODE": mode, "SMOOTHING": 0.1})
    theirs = Mixup(
        settings.MIXUP_ALPHA,
        settings.CUTMIX_ALPHA,
        settings.CUTMIX_MINMAX,
        settings.MIXUP_PROB,
        settings.MIXUP_SWITCH_PROB,
        mode,
        label_smoothing=0.1,
        num_classes=CLASSES,
    )
    ours = Mixing(settings, OneLabel(CLASSES))
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(2))
    mixed = 0
    for seed in range(20):
        images, labels = samples()
        np.random.seed(seed)
        seen = ours.mixed(images, labels)
        np.random.seed(seed)
        expected, targets = theirs(images.clone(), labels)
        assert torch.allclose(seen.images, expected, atol=1e-6)
        loss = torch.nn.CrossEntropyLoss(label_smoothing=settings.SMOOTHING)(logits, seen.targets)
        assert float(loss) == pytest.approx(float(SoftTargetCrossEntropy()(logits, targets)), abs=1e-5)
        mixed += not torch.equal(seen.images, images)
    assert 3 < mixed < 20 if kind == "seldom" and mode == "batch" else mixed >= 18


@pytest.mark.parametrize("kind", KINDS)
def test_label_of_a_mixed_image_is_that_of_the_larger_weight(kind: str) -> None:
    mix = Mixing(TrainConfig.model_validate({**KINDS[kind], "MIXUP_MODE": "elem"}), OneLabel(CLASSES))
    images, labels = samples()
    np.random.seed(0)
    swapped = 0
    for _ in range(20):
        seen = mix.mixed(images, labels)
        assert torch.equal(seen.targets.gather(1, seen.labels[:, None])[:, 0], seen.targets.amax(1))
        swapped += int((seen.labels != labels).sum())
    assert 0 < swapped < 20 * len(labels)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_middle_image_of_an_odd_batch_is_not_mixed(kind: str, mode: str) -> None:
    """A last micro-batch may be of any size where DATA.DROP_LAST is off."""
    mix = Mixing(TrainConfig.model_validate({**KINDS[kind], "MIXUP_MODE": mode}), OneLabel(CLASSES))
    for count in (1, 5):
        images, labels = samples(count)
        np.random.seed(3)
        seen = mix.mixed(images, labels)
        middle = count // 2
        assert torch.allclose(seen.images[middle], images[middle], atol=1e-6)
        assert int(seen.labels[middle]) == int(labels[middle])
        assert float(seen.targets[middle, labels[middle]]) == pytest.approx(1.0)
        assert count == 1 or not torch.allclose(seen.images[0], images[0])
        assert torch.allclose(seen.targets.sum(1), torch.ones(count))


def erased(**settings: object) -> Tensor:
    """Which pixels of a batch of 40 images of ones were put out, and with what."""
    change = build_batch_transform(TrainConfig.model_validate(settings), OneLabel(CLASSES), CPU)
    seed_all(0, "erasing")
    return change(torch.ones(40, 3, 16, 16), torch.zeros(40, dtype=torch.int64)).images


def test_random_erasing_follows_its_settings() -> None:
    always = erased(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="const")
    assert set(always.unique().tolist()) == {0.0, 1.0}
    assert bool((always == 0).flatten(1).any(1).all())
    some = (erased(RANDOM_ERASE_PROB=0.25) != 1).flatten(1).any(1)
    assert 3 <= int(some.sum()) <= 18
    half = (erased(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_SPLIT=True) != 1).flatten(1).any(1)
    assert half.tolist() == [False] * 20 + [True] * 20
    several = erased(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="rand", RANDOM_ERASE_COUNT=4)
    shades = [len(image[0].unique()) for image in several]
    assert max(shades) > 2, "more than one box"
    assert [len(image[0].unique()) for image in erased(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="rand")] == [2] * 40
    assert len(erased(RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_MODE="pixel")[0].unique()) > 6


def test_replay_of_a_skipped_update_mixes_the_same_images(tiny: Path) -> None:
    ready = build(tiny, AMP__ENABLED="true", AMP__DTYPE="fp16", AMP__INIT_LOSS_SCALING=1e30, **ALL_ON)
    found, inner = list[TransformedBatch](), ready.parts.batch_transform
    ready.parts.batch_transform = lambda images, labels: found.append(inner(images, labels)) or found[-1]
    ready.parts.assemble()  # so that the replay is watched as well
    train(ready, 1)
    watch = ready.parts.callback(OverflowWatch)
    assert watch is not None
    assert len(watch.take()) == 1
    update, replay = found
    assert torch.equal(update.images, replay.images)
    assert torch.equal(update.targets, replay.targets)
    assert update.targets.shape == (32, 10)


def test_reported_accuracy_uses_the_labels_of_the_larger_weight(tiny: Path) -> None:
    ready = build(tiny)

    def always_right(images: Tensor, labels: Tensor) -> TransformedBatch:
        with torch.no_grad():
            return TransformedBatch(images, labels, ready.model(images).argmax(1))

    ready.parts.batch_transform = always_right
    train(ready, 1)
    assert ready.parts.meters.read(ready.parts.precision.scale_tensor(), 0.0).update.fields()["acc1"] == 100.0
