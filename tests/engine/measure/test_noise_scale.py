"""TRAIN.NOISE_SCALE: the gradient noise scale against gradients that are known, or recorded one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from datasets import Batch, Share
from engine.ability import Ability, Computing
from engine.amp.precision import Precision
from engine.fit.batch_trial import Trial
from engine.machine.memory import GIB, limited
from engine.measure.noise_scale import DECAY, NoiseScale
from engine.setup import ReadyToTrain
from engine.update import Parts, train_update
from tests.engine.small import BF16, CPU, FP16, OFF, build, parts_of, train, window_of
from tests.engine.test_no_host_copies import read_backs
from tests.program import Result, metrics
from utils.config import AmpConfig, TrainConfig, load_config
from utils.errors import UserError

ON = TrainConfig(NUM_EPOCHS=1, WARMUP_EPOCHS=0, BASE_LR=1.0, END_LR=1.0, ACCUM_ITER=4, NOISE_SCALE=True)
WORDS = {"TRAIN__NOISE_SCALE": "true", "TRAIN__ACCUM_ITER": 4, "DATA__BATCH_SIZE": 8}
LEVELS = {
    "fp32": {},
    "bf16": {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16"},
    "fp16": {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1024},
    "O2 fp16": {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1024, "AMP__LEVEL": "O2"},
    "NAIVE bf16": {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16", "AMP__LEVEL": "NAIVE"},
    "O3": {
        "AMP__ENABLED": "true",
        "AMP__DTYPE": "fp16",
        "AMP__INIT_LOSS_SCALING": 1024,
        "AMP__LEVEL": "O3",
        "TRAIN__OPTIMIZER__NAME": "SGD",  # AdamW makes fp16 weights overflow here
    },
}


class Sizes(NamedTuple):
    """What an update contributes: squared norms of its gradients, and the inverses of their sizes."""

    small: float
    large: float
    per_small: float
    per_large: float


def averages_by_hand(updates: Sequence[Sizes]) -> Sizes:
    """Averages in which the last update counts most."""
    shares = [DECAY ** (len(updates) - nth) for nth in range(1, len(updates) + 1)]
    fields = zip(*updates, strict=True)
    return Sizes(*(sum(x * share for x, share in zip(of_one, shares, strict=True)) / sum(shares) for of_one in fields))


def by_hand(updates: Sequence[Sizes]) -> float:
    """tr(S) / |G|^2."""
    mean = averages_by_hand(updates)
    variance = (mean.small - mean.large) / (mean.per_small - mean.per_large)
    squared_mean = (mean.per_small * mean.large - mean.per_large * mean.small) / (mean.per_small - mean.per_large)
    return variance / squared_mean


def averages_of(parts: Parts) -> list[float]:
    measured = parts.ability(NoiseScale)
    assert measured is not None
    *averages, total = measured.state()["noise_scale"].values()
    return [average / total for average in averages]


class Spy(Ability):
    """Records the unscaled gradient of each micro-batch, and of each update."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._shares: list[Share] = []
        self.updates: list[tuple[list[Tensor], list[Share]]] = []

    def attach(self, to: Computing) -> None:
        self._weights = list(to.model.parameters())

    def after_backward(self, share: Share, batch: Batch) -> None:
        if not self._shares:
            self._sums: list[Tensor] = []
        self._shares.append(share)
        self._sums.append(self._gradient())

    def before_step(self, update: int) -> None:
        self.updates.append(([*self._sums[:-1], self._gradient()], self._shares))
        self._shares = []

    def _gradient(self) -> Tensor:
        flat = torch.cat([weight.grad.flatten().double() for weight in self._weights if weight.grad is not None])
        return flat / self._precision.scale_tensor()

    def sizes(self) -> list[Sizes]:
        """Of the updates with several micro-batches."""
        return [
            Sizes(
                float((sums[0] / shares[0].weight).square().sum()),
                float(sums[-1].square().sum()),
                1 / len(shares[0].indices),
                sum(share.weight**2 / len(share.indices) for share in shares),
            )
            for sums, shares in self.updates
            if len(shares) > 1
        ]


def value_of(parts: Parts) -> float:
    return parts.figures()["noise_scale"].value


def linear_parts(amp: AmpConfig = OFF, pixels: int = 4, train_config: TrainConfig = ON) -> Parts:
    """A model whose gradient for an image is the image."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 1, bias=False))
    parts = parts_of(model, torch.optim.SGD(model.parameters(), 1.0), amp, train_config=train_config)
    parts.assemble()
    return parts


def integers(*counts: int, seed: int) -> list[Tensor]:
    """Images of small integers, so that half precision has their means exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-2, 5, (count, 1, 2, 2), generator=generator).float() for count in counts]


def known(images: Sequence[Tensor], weights: Sequence[float]) -> Sizes:
    means = [micro.flatten(1).double().mean(0) for micro in images]
    total = sum((weight * mean for weight, mean in zip(weights, means, strict=True)), torch.zeros(()))
    return Sizes(
        float(means[0].square().sum()),
        float(total.square().sum()),
        1 / len(images[0]),
        sum(weight**2 / len(micro) for weight, micro in zip(weights, images, strict=True)),
    )


@pytest.mark.parametrize("amp", [OFF, BF16, FP16.model_copy(update={"INIT_LOSS_SCALING": 1024})], ids=lambda a: a.DTYPE)
def test_noise_scale_of_known_gradients(amp: AmpConfig) -> None:
    """With micro-batches of other sizes and weights, one that only keeps a rank in step, and an update of only one."""
    parts, updates = linear_parts(amp), []
    plans = [((4, 4, 4, 4), (0.25,) * 4), ((4, 2, 2), (0.5, 0.25, 0.25)), ((2, 2, 2), (0.5, 0.5, 0.0)), ((4,), (1.0,))]
    for update in range(1, 41):
        counts, weights = plans[update % 4]
        images = integers(*counts, seed=update)
        train_update(parts, window_of(*images, weights=weights), update)
        updates += [known(images, weights)] * (len(images) > 1)
    wanted = by_hand(updates)
    assert wanted > 0
    assert value_of(parts) == pytest.approx(wanted, rel=1e-5)


def test_noise_scale_estimates_that_of_the_images() -> None:
    """Independent pixels of mean 0.25 and variance 1: tr(S) is 64, |G|^2 is 4."""
    parts, generator = linear_parts(pixels=64), torch.Generator().manual_seed(0)
    for update in range(1, 501):
        images = [0.25 + torch.randn(4, 1, 8, 8, generator=generator) for _ in range(4)]
        train_update(parts, window_of(*images), update)
    assert value_of(parts) == pytest.approx(16, rel=0.1)


@pytest.mark.parametrize("level", [*LEVELS])
def test_noise_scale_of_a_model_equals_that_of_its_recorded_gradients(tiny: Path, level: str) -> None:
    ready = build(tiny, **WORDS, **LEVELS[level])
    spy = spied(ready)
    train(ready, 60)  # 45 per epoch, the last of fewer micro-batches
    assert {len(shares) for _, shares in spy.updates} == {4, 3}
    assert averages_of(ready.parts) == pytest.approx([*averages_by_hand(spy.sizes())], rel=1e-5)
    wanted, found = by_hand(spy.sizes()), value_of(ready.parts)
    assert found == pytest.approx(wanted, rel=1e-5) if wanted > 0 else math.isnan(found)


def spied(ready: ReadyToTrain) -> Spy:
    spy = Spy(ready.precision)
    ready.parts.abilities = (*ready.parts.abilities, spy)
    ready.parts.assemble()
    return spy


def test_skipped_updates_are_left_out() -> None:
    parts = linear_parts(FP16.model_copy(update={"INIT_LOSS_SCALING": 1024}))
    images = [integers(4, 4, seed=seed) for seed in range(3)]
    spoilt = [images[1][0], torch.full((4, 1, 2, 2), math.inf)]
    for update, window in enumerate((images[0], spoilt, images[2]), start=1):
        train_update(parts, window_of(*window), update)
    assert parts.schedule.moved == 2
    assert value_of(parts) == pytest.approx(by_hand([known(images[n], (0.5, 0.5)) for n in (0, 2)]), rel=1e-5)


@pytest.mark.parametrize("moved", [False, torch.tensor(False), torch.tensor([0.0])])
def test_update_that_only_the_device_knows_to_be_skipped_is_left_out(moved: bool | Tensor) -> None:
    parts = linear_parts()
    measured = parts.ability(NoiseScale)
    assert measured is not None
    train_update(parts, window_of(*integers(4, 4, seed=1)), 1)
    before = measured.state()
    measured._now = torch.full((5,), math.nan, dtype=torch.float64)
    measured.after_update(2, moved)
    assert measured.state() == before


def test_noise_scale_without_a_mean_gradient_is_unknown() -> None:
    parts = linear_parts()
    figure = parts.figures()["noise_scale"]
    assert (math.isnan(figure.value), figure.words) == (True, "Noise scale: unknown")
    ones = torch.ones(4, 1, 2, 2)
    train_update(parts, window_of(ones, -ones), 1)
    assert math.isnan(value_of(parts))


@pytest.mark.parametrize("level", ["fp32", "fp16", "O2 fp16"])
def test_training_is_bit_equal_with_noise_scale(tiny: Path, level: str) -> None:
    runs = [build(tiny, **{**WORDS, **LEVELS[level], "TRAIN__NOISE_SCALE": on}) for on in ("false", "true")]
    for ready in runs:
        train(ready, 6)
    without, measured = (ready.parts.model.state_dict() for ready in runs)
    assert all(torch.equal(without[name], measured[name]) for name in without)
    assert runs[0].parts.figures() == {}


@pytest.mark.parametrize("level", ["fp32", "fp16"])
def test_measuring_copies_nothing_to_the_host(tiny: Path, level: str) -> None:
    assert read_backs(build(tiny, **WORDS, **LEVELS[level])) == set()


WHOLE = ("TRAIN.NOISE_SCALE=true", "TRAIN.ACCUM_ITER=4", "-amp", "fp16", "REPORT_FREQ=1", "TRAIN.MAX_UPDATES=16")


def test_resumed_run_reports_the_noise_scale_of_an_uninterrupted_one(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    whole = vitamp("-cfg", tiny, "-output", tmp_path / "whole", *WHOLE)
    assert whole.code == 0, whole.text
    for words in (["TRAIN.MAX_UPDATES=7"], ["-resume", "auto"]):
        done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *WHOLE, *words)
        assert done.code == 0, done.text
    wanted, found = metrics(tmp_path / "whole", "train"), metrics(tmp_path / "run", "train")
    assert found == wanted
    values = [line["noise_scale"] for line in wanted]
    assert len(set(values)) == 16
    assert f", Noise scale: {values[-1]:,.0f} images\n" in whole.out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ({}, "TRAIN.NOISE_SCALE: true needs TRAIN.ACCUM_ITER other than 1 or TRAIN.GLOBAL_BATCH"),
        ({"DIST.STRATEGY": "fsdp", "TRAIN.ACCUM_ITER": "2"}, "is not possible with DIST.STRATEGY fsdp"),
    ],
)
def test_settings_without_a_micro_batch_to_measure_are_refused(tiny: Path, words: dict[str, str], answer: str) -> None:
    with pytest.raises(UserError, match=re.escape(answer)):
        load_config(str(tiny), words={"TRAIN.NOISE_SCALE": "true", **words})
    load_config(str(tiny), words={"TRAIN.NOISE_SCALE": "true", "EVAL": "true", **words})


def test_global_batch_of_one_micro_batch_is_refused(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run", "TRAIN.NOISE_SCALE=true", "TRAIN.GLOBAL_BATCH=32")
    done = vitamp(*words)
    assert (done.code, done.text.count("(TRAIN.ACCUM_ITER 1). Use half of -batch_size with -accum_iter 2")) == (2, 1)
    assert not (tmp_path / "run").exists()
    done = vitamp(*words, "-batch_size", 16, "-accum_iter", 2, "TRAIN.MAX_UPDATES=2")
    assert done.code == 0, done.text


def test_batch_size_auto_is_tried_before_the_global_batch_sets_the_accumulation(tiny: Path) -> None:
    words = {"TRAIN.NOISE_SCALE": "true", "TRAIN.GLOBAL_BATCH": "64", "DATA.BATCH_SIZE": "auto"}
    with limited(CPU, GIB) as peak:
        assert Trial(load_config(str(tiny), words=words).config, True, CPU, peak, each=64).fits(8)
