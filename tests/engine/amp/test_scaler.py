"""The loss scale moves as Paddle describes it, and goes on where it stood."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.amp.loss_scaler import LossScaler
from engine.checkpoint.restore import restore
from engine.setup import ReadyToTrain
from tests.engine.amp.modes import amp
from tests.engine.checkpoint.test_restore import save
from tests.engine.small import build, train
from utils.config import AmpConfig
from vitamp.checkpoints import Checkpoint

INF = float("inf")


@dataclass
class PaddleScale:
    """Paddle's rule, written down plainly."""

    amp: AmpConfig
    scale: float = 0.0
    good: int = 0
    bad: int = 0

    def __post_init__(self) -> None:
        self.scale = self.amp.INIT_LOSS_SCALING

    def update(self, overflow: bool) -> float:
        if not self.amp.USE_DYNAMIC_LOSS_SCALING:
            return self.scale
        if overflow:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == self.amp.DECR_EVERY_N_NAN_OR_INF:
                self.scale, self.bad = max(1.0, self.scale * self.amp.DECR_RATIO), 0
        else:
            self.good, self.bad = self.good + 1, 0
            if self.good == self.amp.INCR_EVERY_N_STEPS:
                self.scale, self.good = self.scale * self.amp.INCR_RATIO, 0
        return self.scale


class Driven:
    """A scaler, and one weight with an optimiser, told which updates overflow."""

    def __init__(self, amp: AmpConfig, fused: bool = True) -> None:
        self.scaler = LossScaler("cpu", amp)
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.AdamW([self.weight], lr=1.0, weight_decay=0.0, fused=fused)

    def update(self, overflow: bool) -> float:
        self.scaler.scale(torch.ones(1))
        self.weight.grad = torch.full((1,), INF if overflow else 1.0)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("cut_after", [1, 2, 3])
@pytest.mark.parametrize("dynamic", [True, False])
def test_scale_follows_paddles_rule_for_random_overflows(dynamic: bool, cut_after: int, fused: bool) -> None:
    dice = random.Random(cut_after)
    for _ in range(12):
        settings = amp(
            INIT_LOSS_SCALING=dice.choice([2.0, 64.0, 32768.0]),
            INCR_EVERY_N_STEPS=dice.randint(1, 5),
            INCR_RATIO=dice.choice([2.0, 3.0]),
            DECR_RATIO=dice.choice([0.5, 0.25, 0.8]),
            DECR_EVERY_N_NAN_OR_INF=cut_after,
            USE_DYNAMIC_LOSS_SCALING=dynamic,
        )
        expected, driven = PaddleScale(settings), Driven(settings, fused)
        often = dice.choice([0.3, 0.6, 0.9])
        for step in range(40):
            if dice.random() < 0.1:  # saved, and gone on with by another process
                state = driven.scaler.state_dict()
                driven.scaler = LossScaler("cpu", settings)
                driven.scaler.load_state_dict(state)
            overflow = dice.random() < often
            before = driven.weight.item()
            assert driven.update(overflow) == pytest.approx(expected.update(overflow), rel=1e-5), (settings, step)
            assert (driven.weight.item() == before) is overflow, "an overflow moves no weight, all else does"


# ---- saved and gone on with

OVERFLOWING = {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 2.0**60}


def gone_on(tiny: Path, checkpoint: Checkpoint, **words: object) -> ReadyToTrain:
    ready = build(tiny, **words)
    restore(ready.parts, checkpoint, 44)
    ready.parts.assemble()
    return ready


@pytest.mark.parametrize(("first", "then"), [("O1", "O2"), ("O2", "O1"), ("O1", "O1"), ("NAIVE", "O2")])
def test_overflows_in_a_row_are_counted_across_resumes_and_levels(
    tiny: Path, tmp_path: Path, first: str, then: str
) -> None:
    words = {**OVERFLOWING, "AMP__DECR_EVERY_N_NAN_OR_INF": 3}
    ready = build(tiny, **words, AMP__LEVEL=first)
    train(ready, 2)
    assert ready.parts.precision.scaler.get_scale() == 2.0**60, "two of three"
    resumed = gone_on(tiny, save(ready, tmp_path, 2, (1, 2)), **words, AMP__LEVEL=then)
    scale = resumed.parts.precision.scaler.get_scale
    train(resumed, 1, done=2)
    assert scale() == 2.0**59, "the third"
    train(resumed, 2, done=3)
    assert scale() == 2.0**59
    reading = resumed.parts.meters.read(resumed.parts.precision.scale_tensor(), 0.0)
    assert (reading.skipped, reading.skipped_in_a_row) == (5, 5)


def test_fixed_scale_comes_from_the_settings_after_a_resume(tiny: Path, tmp_path: Path) -> None:
    """Whoever stopped for a scale that was too large goes on with a smaller one."""
    words = {**OVERFLOWING, "AMP__USE_DYNAMIC_LOSS_SCALING": "false"}
    ready = build(tiny, **words)
    train(ready, 2)
    resumed = gone_on(tiny, save(ready, tmp_path, 2, (1, 2)), **{**words, "AMP__INIT_LOSS_SCALING": 128})
    train(resumed, 1, done=2)
    assert resumed.parts.precision.scaler.get_scale() == 128
    assert resumed.parts.schedule.stepped == 1


def test_scale_grows_after_the_interval_was_shortened() -> None:
    before = Driven(amp(INIT_LOSS_SCALING=4, INCR_EVERY_N_STEPS=100))
    for _ in range(50):
        before.update(False)
    after = Driven(amp(INIT_LOSS_SCALING=4, INCR_EVERY_N_STEPS=10))
    after.scaler.load_state_dict(before.scaler.state_dict())
    assert [after.update(False) for _ in range(2)] == [8.0, 8.0]
