"""Weights & Biases: metrics are sent once, and failures never end training. Needs no network."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import preflight
from engine.measure.meters import Best
from engine.report import trackers
from engine.report.trackers import TrackedRun
from tests.program import Vitamp, metrics
from utils.config import Config, load_config
from utils.errors import UserError


def test_resumed_run_continues_at_wandb(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """With the package itself, offline; training is not affected."""
    pytest.importorskip("wandb")
    words = ("-cfg", tiny, "-amp", "bf16", "REPORT_FREQ=5", "SAVE_EVERY_UPDATES=10")
    sent, env = ("-output", tmp_path / "run", "WANDB=digits", f"TAG={'long ' * 20}"), {"WANDB_MODE": "offline"}
    for more in (("TRAIN.MAX_UPDATES=10",), ("-resume", tmp_path / "run", "TRAIN.MAX_UPDATES=15")):
        done = vitamp(*words, *sent, *more, env=env, code=0)
        assert "Weights & Biases" not in done.err
    vitamp(*words, "-output", tmp_path / "plain", "TRAIN.MAX_UPDATES=15", code=0)
    assert metrics(tmp_path / "run", "train") == metrics(tmp_path / "plain", "train")
    name = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    assert len([*(tmp_path / "run").glob(f"wandb/offline-run-*/*-{name}.wandb")]) == 2


class Service:
    """Replaces the package; `troubles` are the calls that fail."""

    def __init__(self, *troubles: str) -> None:
        self.troubles, self.calls, self.sent = troubles, list[str](), list[dict[str, Any]]()
        self.defined: dict[str, dict[str, str]] = {}
        self.summary, self.url, self.disabled = {}, "there", False
        self.Settings, self.id = SimpleNamespace, "made"

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name in self.troubles:
            raise ConnectionResetError("Connection lost")

    def init(self, **_: Any) -> Service:
        self._do("init")
        return self

    def define_metric(self, name: str, **how: str) -> None:
        self.defined[name] = how

    def log(self, values: dict[str, Any]) -> None:
        self.sent.append(values)
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
        return TrackedRun("WANDB", Config(WANDB="mine"), tmp_path, "fp32")

    return make


def test_updates_that_were_sent_are_not_sent_again(board: Callable[[Service], TrackedRun], tmp_path: Path) -> None:
    first, second = Service(), Service()
    run = board(first)
    run.add("train", {"loss": 2.0, "lr": math.nan}, 5)
    run.close()
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "update": 5, "perf": {}}\n')
    again = board(second)
    for update in (4, 5, 6):
        again.add("train", {"loss": 1.0}, update)
    again.add("val", {"acc1": 9.0}, 5)
    assert first.sent == [{"update": 5, "train/loss": 2.0}]
    assert second.sent == [{"update": 6, "train/loss": 1.0}, {"update": 5, "val/acc1": 9.0}]


def test_lost_connection_is_logged_once(board: Callable[[Service], TrackedRun], said: pytest.LogCaptureFixture) -> None:
    service = Service("log")
    run = board(service)
    for update in (1, 2, 3):
        run.add("train", {"loss": 1.0}, update)
    run.ended(Best())
    run.close()
    assert service.calls == ["init", "log"]
    assert warnings_in(said) == ["Weights & Biases no longer answers (Connection lost); the run is not affected."]


def test_training_continues_without_wandb(
    board: Callable[[Service], TrackedRun], said: pytest.LogCaptureFixture
) -> None:
    run = board(Service("init"))
    run.add("train", {"loss": 1.0}, 1)
    run.close()
    (warning,) = warnings_in(said)
    assert "cannot be used; WANDB_MODE=offline keeps the metrics" in warning
    assert "(Connection lost); the run is not affected" in warning
    logged_out = Service()
    logged_out.disabled = True
    board(logged_out).add("train", {"loss": 1.0}, 1)
    assert logged_out.calls == ["init"]
    assert "nobody is logged in" in warnings_in(said)[-1]


def test_failed_run_is_reported_as_failed(board: Callable[[Service], TrackedRun]) -> None:
    service = Service()
    run = board(service)
    run.close()
    assert service.calls[-1] == "finish 1"
    run = board(service)
    run.ended(Best(figure=97.5, kind="ema_acc1", update=440, epoch=10))
    run.close()
    assert service.calls[-1] == "finish 0"
    assert service.summary == {"best/ema_acc1": 97.5, "best/epoch": 10, "best/update": 440}
    for name in ("val/acc1", "val/ema_acc1"):  # wandb sorts runs by their last value else
        assert service.defined[name] == {"step_metric": "update", "summary": "max"}


def test_missing_package_and_impossible_names_are_errors(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "versions", lambda *names: dict.fromkeys(names, "1"))
    for name in ("team/digits", 129 * "d"):
        with pytest.raises(UserError, match=f"WANDB {name}: name a project, with at most 128 characters and none of /"):
            preflight.check(load_config(str(tiny), words={"WANDB": name}).config)
    monkeypatch.setattr(trackers, "versions", lambda *_: {})
    preflight.check(load_config(str(tiny)).config)
    preflight.check(load_config(str(tiny), words={"WANDB": "mine", "EVAL": "true"}).config)
    with pytest.raises(UserError, match=r"WANDB mine: the package wandb is not installed\. Run: pip install wandb"):
        preflight.check(load_config(str(tiny), words={"WANDB": "mine"}).config)
