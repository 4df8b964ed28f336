"""Loss scaling on the GPU, where an overflow is known there alone: a skipped update leaves no trace but a count."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.amp.low_precision import HalfCopy
from engine.amp.overflow import OverflowWatch
from engine.optim.ema import Ema
from engine.setup import ReadyToTrain
from engine.update import train_update
from tests.engine.small import build, windows
from tests.gpu.runs import KIND, PLACE, Train

TOO_LARGE_FOR_FP16 = 7e4


class Training:
    """Updates one at a time, some of which are made to overflow."""

    def __init__(self, small: Path, **words: object) -> None:
        fp16: dict[str, object] = {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1024}
        self.ready: ReadyToTrain = build(small, PLACE, **{**fp16, "TRAIN__MODEL_EMA": "true", **words})
        self.parts = self.ready.parts
        self.bias: nn.Parameter = self.ready.model.get_parameter("blocks.1.mlp.fc1.bias")
        self.source, self.done = windows(self.ready), 0

    def update(self, overflows: bool = False) -> float:
        """The loss scale after it."""
        before = self.bias.detach().clone()
        if overflows:
            nn.init.constant_(self.bias, TOO_LARGE_FOR_FP16)
        self.done += 1
        train_update(self.parts, next(self.source), self.done)
        if overflows:
            assert bool((self.bias == TOO_LARGE_FOR_FP16).all()), "a skipped update moves nothing"
            with torch.no_grad():
                self.bias.copy_(before)
            if copy := self.parts.callback(HalfCopy):
                copy.after_update(0, True)
        return float(self.parts.precision.scale_tensor())

    def reading(self) -> Any:
        return self.parts.meters.read(self.parts.precision.scale_tensor(), self.parts.schedule.last_rate())

    def state(self) -> list[Any]:
        """All that an update changes; the optimiser's own count of steps among it."""
        ema = self.parts.callback(Ema)
        assert ema is not None
        optimizer = self.parts.optimizer.state_dict()
        rates = [float(group["lr"]) for group in optimizer["param_groups"]]
        held = [self.ready.model.state_dict(), ema.module.state_dict(), optimizer["state"], rates]
        return copy.deepcopy([held, int(ema.updates), self.parts.schedule.stepped])


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_an_overflow_moves_nothing_and_is_counted(small: Path, level: str, optimizer: str) -> None:
    training = Training(small, AMP__LEVEL=level, TRAIN__OPTIMIZER__NAME=optimizer)
    if KIND == "cuda":
        assert getattr(training.parts.optimizer, "_step_supports_amp_scaling", False), "the fused one is meant"
    for _ in range(3):
        assert training.update() == 1024
    if level == "O2":  # a copy computes, and takes the bias over only after an update
        before = training.state()
        halved = training.parts.forward.get_parameter("blocks.1.mlp.fc1.bias")
        with torch.no_grad():
            halved.fill_(torch.inf)
        training.done += 1
        train_update(training.parts, next(training.source), training.done)
    else:
        before = training.state()
        training.update(overflows=True)
    assert equal(training.state(), before)
    reading = training.reading()
    assert (reading.skipped, reading.skipped_in_a_row, reading.scale, reading.first_bad) == (1, 1, 512, -1)
    assert training.update() == 512
    assert not equal(training.state(), before)
    reading = training.reading()
    assert (reading.skipped, reading.skipped_in_a_row) == (1, 0)
    assert training.parts.schedule.stepped == 4


@pytest.mark.parametrize("accumulated", [1, 3])
def test_what_overflowed_is_named_without_waiting_for_it(small: Path, accumulated: int) -> None:
    training = Training(small, TRAIN__ACCUM_ITER=accumulated)
    watch = training.parts.callback(OverflowWatch)
    assert watch is not None
    training.update()
    if KIND == "cuda":
        torch.cuda.synchronize()
    assert watch.take() == []
    nn.init.constant_(training.bias, TOO_LARGE_FOR_FP16)
    training.done += 1
    train_update(training.parts, next(training.source), training.done)
    if KIND == "cuda":
        torch.cuda.synchronize()
    (blame,) = watch.take()
    assert (blame.update, blame.module, blame.direction) == (2, "blocks.1.mlp.fc1", "forward")
    assert (blame.operation, blame.parameter, blame.dtype) == ("linear", "blocks.1.mlp.fc1.bias", "fp16")
    assert (blame.scale, len(blame.sample_indices)) == (1024, 32)
    assert all(torch.isfinite(weight).all() for weight in training.ready.model.parameters())


def test_the_replay_leaves_the_gpus_random_numbers_alone(small: Path) -> None:
    """Two runs with dropout, one of which looks at what overflowed."""
    states = []
    for watched in (True, False):
        training = Training(small, MODEL__DROPOUT=0.1, MODEL__DROPPATH=0.1, SPEED="-fused")
        if not watched:
            training.parts.leave_out(OverflowWatch)
        for overflows in (False, True, False, False):
            training.update(overflows)
            if KIND == "cuda":
                torch.cuda.synchronize()
        states.append(training.state())
    assert equal(*states)


def test_the_scale_follows_paddles_rules(small: Path) -> None:
    """It is cut by the second bad update in a row and grows by the third good one; each resets the other's count."""
    rules: dict[str, object] = {"AMP__INCR_EVERY_N_STEPS": 3, "AMP__DECR_EVERY_N_NAN_OR_INF": 2}
    training = Training(small, **rules)
    bad = [False, False, True, False, True, True, False, False, False]
    assert [training.update(overflows) for overflows in bad] == [*[1024] * 5, *[512] * 3, 1024]
    assert training.reading().skipped == 3


def test_a_scale_far_too_large_is_cut_until_it_fits(train: Train) -> None:
    run = train("run", "-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e9", "TRAIN.MODEL_EMA=true", updates=None)
    told = run.of("train")
    skipped = [line["skipped"] for line in told]
    assert skipped[-1] > 2
    assert told[-1]["scale"] == 1e9 * 0.5 ** skipped[-1]
    assert told[-1]["loss"] < told[0]["loss"]
    for before, now, then in zip([0, *skipped], skipped, range(1, len(told)), strict=False):
        moved = told[then]["lr"] != told[then - 1]["lr"]
        assert moved is (now == before), f"the rate of update {then + 1} after {'a skip' if now > before else 'a step'}"
    named = run.of("skip")
    assert named, "the first skips are replayed"
    assert named[0]["update"] == 1
    assert (named[0]["module"], named[0]["direction"]) == ("loss", "backward")
    assert "update 1 was skipped: " in run.text
