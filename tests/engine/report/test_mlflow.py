"""MLflow: metrics are sent once, to the same run after a resume, and failures never end training. Needs no network.

The command line is tried with mlflow if it is installed, otherwise with a fake package.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import preflight
from engine.measure.progress import Best
from engine.report import trackers
from engine.report.trackers import DEFAULTS, STORE, URI, TrackedRun, is_installed, open_trackers
from tests.engine.report import fake_mlflow
from tests.engine.report.fake_mlflow import MlflowClient
from tests.program import Result, metrics
from utils.config import Config, load_config
from utils.errors import UserError

MINE = Config(MLFLOW="mine", TAG="first")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URI, raising=False)
    for name in DEFAULTS:
        monkeypatch.setenv(name, "1")


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], TrackedRun]:
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow)

    def make(config: Config = MINE) -> TrackedRun:
        (found,) = open_trackers(config, tmp_path, "fp32")
        return found

    return make


def runs(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STORE).read_text())["runs"]


def test_settings_metrics_and_best_are_sent(board: Callable[[], TrackedRun], tmp_path: Path) -> None:
    run = board()
    run.add("train", {"loss": 1.5, "acc1": 10.0, "grad_norm": math.inf}, 20)
    run.add("val", {"acc1": 30.0}, 44)
    run.ended(Best(30.0, "ema_acc1", 44, 1))
    run.close()
    (sent,) = runs(tmp_path).values()
    assert (sent["experiment"], sent["name"], sent["status"]) == ("mine", tmp_path.name, "FINISHED")
    assert sent["tags"] == {"precision": "fp32", "tag": "first"}
    assert sent["params"]["TRAIN.OPTIMIZER.NAME"] == "AdamW"
    assert len(sent["params"]) > 150
    assert sent["metrics"] == {
        "train/loss": [[20, 1.5]],
        "train/acc1": [[20, 10.0]],
        "val/acc1": [[44, 30.0]],
        "best/ema_acc1": [[44, 30.0]],
        "best/epoch": [[44, 1]],
        "best/update": [[44, 44]],
    }


def test_resumed_run_continues_there_with_other_settings(board: Any, tmp_path: Path) -> None:
    first = board()
    first.add("train", {"loss": 2.0}, 20)
    first.close()
    assert [run["status"] for run in runs(tmp_path).values()] == ["FAILED"]
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "update": 20}\n')
    again = board(Config(MLFLOW="mine", SEED=5))
    assert [run["status"] for run in runs(tmp_path).values()] == ["RUNNING"]
    for update in (20, 40):
        again.add("train", {"loss": 1.0}, update)
    again.ended(Best())
    again.close()
    (sent,) = runs(tmp_path).values()
    assert sent["metrics"] == {"train/loss": [[20, 2.0], [40, 1.0]]}
    assert (sent["status"], sent["params"]["SEED"]) == ("FINISHED", "0")


def test_log_says_where_the_metrics_go(
    board: Callable[[], TrackedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    board()
    assert said.messages == [f"MLflow: the metrics go to the experiment mine in sqlite:///{tmp_path / STORE}"]
    said.clear()
    shared = tmp_path / "all.db"
    monkeypatch.setenv(URI, f"sqlite:///{shared}")
    (tmp_path / "mlflow.json").unlink()
    board()
    assert said.messages == [f"MLflow: the metrics go to the experiment mine in sqlite:///{shared}"]
    assert len(json.loads(shared.read_text())["runs"]) == 1


def test_unreachable_server_is_logged_once_and_without_its_password(
    board: Callable[[], TrackedRun], monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(URI, "https://me:secret@there/path")
    run = board()
    run.add("train", {"loss": 1.0}, 1)
    run.ended(Best())
    run.close()
    assert said.messages == ["MLflow cannot be used (no answer from https://***@there/path); the run is not affected."]


def test_store_that_fails_later_is_logged_once(
    board: Callable[[], TrackedRun], monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("database is locked")

    run = board()
    said.clear()
    monkeypatch.setattr(MlflowClient, "log_batch", fail)
    for update in (1, 2):
        run.add("train", {"loss": 1.0}, update)
    run.close()
    assert said.messages == ["MLflow no longer answers (database is locked); the run is not affected."]


def test_experiment_that_another_run_has_just_made_is_used(
    board: Callable[[], TrackedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = MlflowClient.create_experiment

    def too_late(self: MlflowClient, name: str) -> str:
        create(self, name)
        raise ValueError("RESOURCE_ALREADY_EXISTS")

    monkeypatch.setattr(MlflowClient, "create_experiment", too_late)
    board()
    assert len(runs(tmp_path)) == 1


def test_variables_of_the_user_are_respected(board: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    board()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_missing_packages_are_errors_reported_together(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return "1"

    def check(**words: str) -> None:
        preflight.check(load_config(str(tiny), words=words).config)

    monkeypatch.setattr(trackers, "version", version)
    check(MLFLOW="mine", EVAL="true")
    missing = "MLFLOW mine: the package mlflow is not installed. Run: pip install mlflow   or leave MLFLOW out."
    with pytest.raises(UserError) as error:
        check(MLFLOW="mine", WANDB="ours")
    assert str(error.value).splitlines()[1] == missing
    assert "WANDB ours: the package wandb is not installed" in str(error.value)
    installed.add("mlflow-skinny")
    with pytest.raises(UserError, match="mlflow-skinny can only send metrics to a server, and MLFL"):
        check(MLFLOW="mine")
    monkeypatch.setenv(URI, "http://there")
    check(MLFLOW="mine")
    monkeypatch.delenv(URI)
    installed.update({"sqlalchemy", "alembic"})
    check(MLFLOW="mine")


def test_one_tracker_fails_and_the_other_goes_on(
    board: Callable[[], TrackedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    assert board  # its stand-in is in place
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    both = open_trackers(Config(MLFLOW="mine", WANDB="ours"), tmp_path, "fp32")
    assert len(both) == 2
    for run in both:
        run.add("train", {"loss": 1.0}, 1)
    assert "Weights & Biases cannot be used" in said.text
    assert next(iter(runs(tmp_path).values()))["metrics"] == {"train/loss": [[1, 1.0]]}


def stand_in(place: Path) -> dict[str, str]:
    """Environment of a process that finds the stand-in as an installed package."""
    (place / "mlflow").mkdir(parents=True)
    shutil.copy(Path(str(fake_mlflow.__file__)), place / "mlflow" / "__init__.py")
    for name in ("mlflow", "sqlalchemy", "alembic"):
        about = place / f"{name}-3.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.0\n")
    return {"PYTHONPATH": str(place)}


def sent_by(run: Path, fake: bool) -> dict[str, list[tuple[int, float]]]:
    """Metrics of the only run in the store, and its status as the name of one."""
    if fake:
        (found,) = runs(run).values()
        return {found["status"]: [], **{key: [(s, v) for s, v in values] for key, values in found["metrics"].items()}}
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{run / STORE}")
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    histories = {key: client.get_metric_history(found.info.run_id, key) for key in found.data.metrics}
    values = {key: sorted((m.step, m.value) for m in history) for key, history in histories.items()}
    return {found.info.status: [], **values}


@pytest.mark.slow
def test_resumed_command_continues_its_run_and_sends_nothing_twice(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    fake, run = not is_installed("mlflow"), tmp_path / "run"
    options = {"env": stand_in(tmp_path / "packages") if fake else {}, "slow_start": fake}
    words = (
        "-cfg",
        tiny,
        "-output",
        run,
        "MLFLOW=digits",
        "SAVE_EVERY_UPDATES=10",
        "KEEP_LAST=0",
        "TRAIN.NUM_EPOCHS=1",
    )
    first = vitamp(*words, "TRAIN.MAX_UPDATES=25", **options)
    assert first.code == 0, first.text
    assert f"MLflow: the metrics go to the experiment digits in sqlite:///{run / STORE}" in first.out
    for later in (20, 25):  # as if it had been killed before it saved them
        shutil.rmtree(run / "checkpoints" / f"step-{later:09d}")
    second = vitamp(*words, "-resume", "auto", **options)
    assert second.code == 0, second.text
    sent = sent_by(run, fake)
    assert "FINISHED" in sent
    assert sent["train/loss"] == [(line["update"], line["loss"]) for line in metrics(run, "train")]
    assert [update for update, _ in sent["val/acc1"]] == [25, 44]
