"""Weights & Biases: metrics are sent once, and failures never end training. Needs no network."""

from __future__ import annotations

import json
import logging
import runpy
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import preflight
from engine.measure.meters import Best
from engine.report import trackers
from engine.report.trackers import TrackedRun
from tests.program import ROOT, Result, metrics
from utils.config import Config, load_config
from utils.errors import UserError


def records(file: Path) -> Iterator[Any]:
    """Records of an offline run: LevelDB's log format after a header of seven bytes."""
    protocol = import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left_of_block = 32768 - at % 32768
        if left_of_block < 7:
            at += left_of_block
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = protocol.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def kept(run: Path) -> list[list[Any]]:
    """The records of each offline run in the folder, the first one first."""
    return [list(records(file)) for file in sorted(run.glob("wandb/offline-run-*/*.wandb"))]


def points(found: list[Any], name: str) -> dict[int, float]:
    """Update -> value of a metric."""
    drawn: dict[int, float] = {}
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if name in items:
                assert items["update"] not in drawn, "sent twice"
                drawn[items["update"]] = items[name]
    return drawn


def only(found: list[Any], kind: str) -> Any:
    (record,) = (getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind)
    return record


@pytest.mark.slow
def test_resumed_run_continues_at_wandb_and_sends_nothing_twice(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    words = ("-cfg", tiny, "-amp", "bf16", "TAG=mine", "REPORT_FREQ=5", "SAVE_EVERY_UPDATES=10", "TRAIN.MAX_UPDATES=30")
    sent, env = ("-output", run, "WANDB=digits"), {"WANDB_MODE": "offline"}
    first = vitamp(*words, *sent, "TRAIN.NUM_EPOCHS=2", "TRAIN.MAX_UPDATES=25", env=env)
    assert first.code == 0, first.text
    for later in (20, 25):  # as if it had been killed before it saved them
        shutil.rmtree(run / "checkpoints" / f"step-{later:09d}")
    second = vitamp(*words, *sent, "-resume", run / "checkpoints" / "step-000000010", env=env)
    assert second.code == 0, second.text
    assert vitamp(*words, "-output", plain).code == 0
    assert metrics(run, "train") == metrics(plain, "train")

    before, after = kept(run)
    assert only(before, "run").run_id == only(after, "run").run_id == json.loads((run / "wandb.json").read_text())["id"]
    assert only(before, "run").project == "digits"
    assert list(only(before, "run").tags) == ["bf16", "mine"]
    config = {item.key: json.loads(item.value_json) for item in only(before, "run").config.update}
    assert config["precision"] == "bf16"
    assert config["TRAIN"]["MAX_UPDATES"] == 25
    told = {line["update"]: line["loss"] for line in metrics(plain, "train")}
    assert points(before, "train/loss") == {update: told[update] for update in (5, 10, 15, 20, 25)}
    assert points(after, "train/loss") == {30: told[30]}
    assert list(points(before, "val/acc1")) == [25]
    assert points(after, "val/acc1") == {30: metrics(run, "val")[-1]["acc1"]}
    summary = {
        item.key: json.loads(item.value_json)
        for record in after
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["best/acc1"] == max(line["acc1"] for line in metrics(run, "val"))
    assert only(after, "exit").exit_code == 0


class Service:
    """Replaces the package; `troubles` are the calls that fail."""

    def __init__(self, *troubles: str) -> None:
        self.troubles, self.calls, self.modes = troubles, list[str](), list[Any]()
        self.defined: dict[str, dict[str, str]] = {}
        self.summary, self.url, self.disabled = {}, "there", False
        self.Settings = SimpleNamespace

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.troubles:
            raise ConnectionResetError("Connection lost")

    def init(self, mode: str | None, **_: Any) -> Service:
        self.modes.append(mode)
        self._do(f"init {mode}")
        return self

    def teardown(self) -> None:
        self._do("teardown")

    def define_metric(self, name: str, **how: str) -> None:
        self.defined[name] = how

    def log(self, _: dict[str, Any]) -> None:
        self._do("log")

    def finish(self, exit_code: int) -> None:
        self._do(f"finish {exit_code}")


def warnings_in(said: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in said.records if record.levelno >= logging.WARNING]


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Service], TrackedRun]:
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def make(service: Service) -> TrackedRun:
        monkeypatch.setitem(sys.modules, "wandb", service)
        return TrackedRun(Config(WANDB="mine"), tmp_path, "fp32")

    return make


def test_lost_connection_is_logged_once(board: Callable[[Service], TrackedRun], said: pytest.LogCaptureFixture) -> None:
    service = Service("log")
    run = board(service)
    for update in (1, 2, 3):
        run.add("train", {"loss": 1.0}, update)
    run.ended(Best())
    run.close()
    assert service.calls == ["init online", "log"]
    assert warnings_in(said) == ["Weights & Biases no longer answers (Connection lost); the run is not affected."]


def test_metrics_are_kept_offline_when_wandb_is_unreachable(
    board: Callable[[Service], TrackedRun], said: pytest.LogCaptureFixture
) -> None:
    service = Service("init online")
    run = board(service)
    run.add("train", {"loss": 1.0}, 1)
    assert service.calls == ["init online", "teardown", "init offline", "log"]
    (warning,) = warnings_in(said)
    assert "cannot be used online (Connection lost)" in warning
    assert "`wandb sync`" in warning


def test_training_continues_without_wandb(
    board: Callable[[Service], TrackedRun], said: pytest.LogCaptureFixture
) -> None:
    run = board(Service("init online", "init offline"))
    run.add("train", {"loss": 1.0}, 1)
    run.close()
    assert "the run is not affected" in warnings_in(said)[-1]
    assert len(warnings_in(said)) == 2


def test_failed_run_is_reported_as_failed(board: Callable[[Service], TrackedRun]) -> None:
    service = Service()
    run = board(service)
    run.close()
    assert service.calls[-1] == "finish 1"
    run = board(service)
    run.ended(Best(97.5, "ema_acc1", 440, 10))
    run.close()
    assert service.calls[-1] == "finish 0"
    assert service.summary == {"best/ema_acc1": 97.5, "best/epoch": 10, "best/update": 440}


def test_wandb_mode_variable_is_respected(
    board: Callable[[Service], TrackedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    board(service)
    assert service.modes == [None]


def test_wandb_is_imported_only_when_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    runpy.run_path(str(ROOT / "engine" / "report" / "trackers.py"))


def test_missing_wandb_package_is_an_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(trackers, "version", missing)
    preflight.check(load_config(str(tiny)).config)
    preflight.check(load_config(str(tiny), words={"WANDB": "mine", "EVAL": "true"}).config)
    with pytest.raises(UserError, match=r"WANDB mine: the package wandb is not installed\. Run: pip install wandb"):
        preflight.check(load_config(str(tiny), words={"WANDB": "mine"}).config)


def test_the_summary_of_a_run_is_its_best_accuracy(board: Callable[[Service], Any]) -> None:
    """Otherwise wandb sorts runs by the last one."""
    service = Service()
    board(service)
    assert {name: how for name, how in service.defined.items() if "acc1" in name} == {
        name: {"step_metric": "update", "summary": "max"} for name in ("val/acc1", "val/ema_acc1")
    }
