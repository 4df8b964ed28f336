"""MLflow: metrics are sent once, to the same run after a resume. The package itself is tried if it is installed."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.measure.meters import Best
from engine.report.trackers import TrackedRun
from tests.program import Vitamp
from utils.config import Config
from vitamp.files import parse_json


class Client:
    """Replaces mlflow.MlflowClient."""

    calls: list[tuple[Any, ...]]

    def __init__(self, uri: str) -> None:
        if "secret" in uri:
            raise ConnectionError(f"no answer from {uri}")

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        self.calls.append(("run", experiment, tags, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="made"))

    def log_batch(self, run: str, params: Sequence[Any] = (), metrics: Sequence[Any] = ()) -> None:
        assert len(params) <= 100
        self.calls += [(run, *one) for one in (*params, *metrics)]

    def update_run(self, run: str, status: str) -> None:
        self.calls.append((run, status))

    set_terminated = update_run


def test_settings_and_metrics_reach_one_run_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    entities = SimpleNamespace(Param=lambda *one: one, Metric=lambda name, value, _, step: (name, value, step))
    fake: Any = SimpleNamespace(MlflowClient=Client, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Client.calls = calls = []
    config = Config(MLFLOW="mine", TAG="first")
    run = TrackedRun("MLFLOW", config, tmp_path, "fp32")
    run.add("train", {"loss": 2.0, "grad_norm": float("inf")}, 20)
    run.close()
    assert calls[0] == ("run", "mine", {"precision": "fp32", "tag": "first"}, tmp_path.name)
    assert ("made", "TRAIN.OPTIMIZER.NAME", "AdamW") in calls
    assert calls[-2:] == [("made", "train/loss", 2.0, 20), ("made", "FAILED")]
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "update": 20, "perf": {}}\n')
    calls.clear()
    run = TrackedRun("MLFLOW", config, tmp_path, "fp32")
    for update in (20, 40):
        run.add("train", {"loss": 1.0}, update)
    run.ended(Best(figure=97.5, kind="acc1", update=40, epoch=2))
    run.close()
    assert calls[:2] == [("made", "RUNNING"), ("made", "train/loss", 1.0, 40)]
    assert ("made", "best/acc1", 97.5, 40) in calls
    assert calls[-1] == ("made", "FINISHED")
    assert f"MLflow: the metrics go to the experiment mine in sqlite:///{tmp_path}/mlflow.db" in said.text

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@there")
    TrackedRun("MLFLOW", config, tmp_path, "fp32").add("train", {"loss": 1.0}, 60)
    (warning,) = [one.getMessage() for one in said.records if one.levelno >= logging.WARNING]
    assert warning == "MLflow cannot be used (no answer from https://***@there); the run is not affected."


def test_a_run_is_tracked_by_mlflow_itself(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    run = tmp_path / "run"
    for updates in (10, 15):
        words = ("-cfg", tiny, "-output", run, "-resume", "auto", "MLFLOW=digits", "REPORT_FREQ=5")
        assert "MLflow cannot" not in vitamp(*words, f"TRAIN.MAX_UPDATES={updates}", code=0).text
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    name = parse_json((run / "mlflow.json").read_bytes())["id"]
    assert [one.step for one in client.get_metric_history(name, "train/loss")] == [5, 10, 15]
    assert client.get_run(name).info.status == "FINISHED"
