"""Where an update's time goes: that each stage gets its own, and that asking costs nothing."""

from __future__ import annotations

import json
import re
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from engine.measure.stages import EventStages, profiled
from engine.measure.throughput import (
    BACKWARD,
    COPY,
    DATA,
    FORWARD,
    OPTIMISER,
    OTHER,
    STAGES,
    TEACHER,
    Stages,
    StageTimes,
    Throughput,
)
from tests.engine.small import CPU, build, train
from tests.program import Vitamp, metrics

NAP = 0.08
ENDS = re.compile(r"Stages: data \d+% copy \d+% forward \d+% backward \d+% optimiser \d+% other \d+% of [\d.e+]+ ms$")


class Gpu:
    """A queue of work: an event happens when all that was asked for before it is done."""

    def __init__(self) -> None:
        self.queued = self.done = 0.0
        self.events = 0

    def work(self, milliseconds: float) -> None:
        self.queued += milliseconds

    def new_event(self) -> GpuEvent:
        self.events += 1
        return GpuEvent(self)


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, -1.0

    def record(self) -> None:
        self.at = self.gpu.queued

    def query(self) -> bool:
        return self.at <= self.gpu.done

    def elapsed_time(self, end_event: GpuEvent) -> float:
        assert self.query(), "not done: to ask would be an error"
        assert end_event.query(), "not done: to ask would be an error"
        return end_event.at - self.at


def update(gpu: Gpu, made: Stages) -> None:
    """Takes 1 ms of its stages, 2, 3, ..., 6 of what comes after."""
    made.begin()
    for takes, stage in enumerate((DATA, COPY, FORWARD, BACKWARD, OPTIMISER), start=1):
        gpu.work(takes)
        made.mark(stage)
    gpu.work(6)


def test_events_measure_device_time() -> None:
    gpu = Gpu()
    made = EventStages(gpu.new_event)
    for _ in range(3):
        update(gpu, made)
    gpu.done = gpu.queued
    found = made.take()
    assert found is not None
    # What comes after the third update is not over yet.
    expected = {DATA: 3, COPY: 6, FORWARD: 9, BACKWARD: 12, OPTIMISER: 15, OTHER: 12}
    assert found.seconds == pytest.approx({stage: ms / 1000 for stage, ms in expected.items()})
    assert found.updates == 3
    assert found.milliseconds()[FORWARD] == pytest.approx(3.0)
    assert sum(found.percent().values()) == pytest.approx(100)


def test_pending_events_are_reported_later() -> None:
    gpu = Gpu()
    made = EventStages(gpu.new_event)
    update(gpu, made)
    gpu.done = gpu.queued
    update(gpu, made)
    update(gpu, made)
    first = made.take()
    assert first is not None
    assert first.seconds[DATA] == pytest.approx(0.001)
    assert first.updates == 1
    gpu.done = gpu.queued
    rest = made.take()
    assert rest is not None
    assert rest.seconds[DATA] == pytest.approx(0.002)
    assert rest.updates == 2


def test_pauses_are_left_out() -> None:
    gpu = Gpu()
    made = EventStages(gpu.new_event)
    update(gpu, made)
    made.pause()
    gpu.work(1000)
    update(gpu, made)
    gpu.done = gpu.queued
    found = made.take()
    assert found is not None
    assert found.seconds[OTHER] == 0
    assert found.total == pytest.approx(0.030)


@pytest.mark.parametrize(
    ("part", "name", "stage"),
    [
        ("train_loader._fetch.dataset", "__getitems__", DATA),
        ("parts.model", "forward", FORWARD),
        ("parts", "criterion", FORWARD),
        ("parts.precision", "backward", BACKWARD),
        ("parts.optimizer", "step", OPTIMISER),
        ("parts.meters", "add", OTHER),
    ],
)
def test_slow_stage_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch, part: str, name: str, stage: str) -> None:
    """By a clock that only the slow part moves: a busy machine delays nothing."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    ready = build(tiny, REPORT_STAGES="true", TRAIN__ACCUM_ITER=2)
    owner = attrgetter(part)(ready)
    work = getattr(owner, name)

    def slow(*given: Any, **words: Any) -> Any:
        nonlocal now
        now += NAP
        return work(*given, **words)

    monkeypatch.setattr(owner, name, slow)
    train(ready, 2)
    ready.parts.stages.take()
    pace = Throughput(CPU, ready.parts.stages)
    train(ready, 3, done=2)
    found = pace.read(0.0).stages
    assert found is not None
    times = 1 if stage == OPTIMISER else 2
    expected = {name: 3 * times * NAP if name == stage else 0.0 for name in STAGES}
    assert found.seconds == pytest.approx(expected)


def test_stages_are_logged_and_do_not_change_training(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "TRAIN.NUM_EPOCHS=1", "REPORT_FREQ=20")
    off = vitamp(*words, "-output", tmp_path / "off", code=0)
    on = vitamp(*words, "-output", tmp_path / "on", "REPORT_STAGES=true", "-profile", 2, code=0)
    assert metrics(tmp_path / "off") == metrics(tmp_path / "on")

    assert "Stages:" not in off.out
    lines = [line for line in on.out.splitlines() if "Step[" in line]
    assert len(lines) == 4
    for line in lines:
        assert ENDS.search(line), line

    told = [json.loads(line) for line in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()]
    figures = [line["perf"] for line in told if line["event"] == "train"]
    assert all(set(perf) >= {f"{stage}_ms" for stage in STAGES} for perf in figures)
    assert all(perf["forward_ms"] > 0 and perf["backward_ms"] > 0 for perf in figures)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "on" / "tensorboard")).Reload()
    for name in ("data_ms", "optimiser_ms"):
        drawn = [point.value for point in board.Scalars(f"train/{name}")]
        assert drawn == pytest.approx([perf[name] for perf in figures], abs=1e-3)
    trace = json.loads((tmp_path / "on" / "profile.json").read_text())
    assert any("aten::addmm" in str(event.get("name")) for event in trace["traceEvents"])
    assert "no trace" not in on.text


def test_run_too_short_for_a_trace_says_how_many_updates_it_needs(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    with profiled(2, tmp_path) as step:
        for _ in range(4):
            step()
    assert "the run ended before 6 updates; no trace was written" in said.text


def test_a_stage_that_only_one_of_two_times_has_keeps_its_seconds() -> None:
    with_teacher, without = StageTimes(1, {FORWARD: 1.0, TEACHER: 2.0}), StageTimes(1, {FORWARD: 0.5})
    for both in (with_teacher + without, without + with_teacher):
        assert both == StageTimes(2, {FORWARD: 1.5, TEACHER: 2.0})
