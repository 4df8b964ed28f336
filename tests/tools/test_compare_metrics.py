"""compare.py: metrics read from a run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.common.comparison.runs import fraction_done, is_finished, metrics_of
from utils.config import Config, to_yaml


def line(event: str, update: int, epoch: int = 1, perf: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"event": event, "epoch": epoch, "update": update, **fields, "perf": perf or {}}


def train(update: int, rate: float, loss: float | None = 1.0, memory: float = 2.0, epoch: int = 1) -> dict[str, Any]:
    perf = {"images_per_second": rate, "peak_memory_gb": memory}
    return line("train", update, epoch, perf, loss=loss, skipped=update // 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Config.model_validate({"DATA": {"BATCH_SIZE": 50}, "TRAIN": {"ACCUM_ITER": 2}})
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    about = {
        "choices": {"precision": "bf16", "world_size": 4},
        "samples": {"train": 4000, "val": 360},
        "device": "cpu: one",
        "versions": {},
        "started": "2026-01-02T03:04:05",
    }
    (tmp_path / "run.json").write_text(json.dumps(about), encoding="utf-8")
    return tmp_path


def write(folder: Path, *lines: dict[str, Any], rest: str = "") -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + rest
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_speed_excludes_the_first_report_after_each_start(folder: Path) -> None:
    write(
        folder,
        line("run", 0, what="start"),
        train(5, 1.0),
        train(10, 800.0, memory=2.5),
        line("epoch", 10, perf={"seconds": 90.0}),
        line("val", 10, loss=0.5, acc1=90.0, ema_acc1=97.0),
        line("run", 10, perf={"seconds": 100.0}, what="paused"),
        line("run", 10, what="resume"),
        train(15, 2.0, epoch=2),
        train(20, 1000.0, epoch=2),
        train(25, 1200.0, loss=0.5, epoch=2),
        line("epoch", 25, 2, perf={"seconds": 95.0}),
        line("epoch", 35, 3, perf={"seconds": 5.0}),
        line("val", 35, 3, loss=0.4, acc1=95.0, ema_acc1=96.0),
        line("run", 35, 3, perf={"seconds": 50.0}, what="end"),
    )
    results = metrics_of(folder)
    assert results["images_per_second"] == 1000.0
    assert results["seconds_per_update"] == pytest.approx(50 * 2 * 4 / 1000)
    assert results["seconds_per_epoch"] == 5.0
    assert not results["start_up_counted"]
    assert results["peak_memory_gb"] == 2.5
    assert (results["last_acc1"], results["best_acc1"], results["last_loss"]) == (95.0, 97.0, 0.4)
    assert (results["updates"], results["skipped"], results["starts"], results["seconds"]) == (35, 2, 2, 150.0)
    assert (results["precision"], results["validation_images"]) == ("bf16", 360)
    assert not results["diverged"]


def test_speed_of_a_single_report_includes_the_start(folder: Path) -> None:
    write(folder, line("run", 0, what="start"), train(5, 10.0), line("run", 5, perf={"seconds": 1.0}, what="end"))
    results = metrics_of(folder)
    assert (results["images_per_second"], results["start_up_counted"]) == (10.0, True)
    assert (results["seconds_per_epoch"], results["last_acc1"]) == (None, None)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [((2.3, 0.5), False), ((2.3, 2.31, 2.29), False), ((2.3, 4.0, 6.0, 9.0), True), ((2.3, 1.0, None), True)],
)
def test_divergence(folder: Path, losses: tuple[float | None, ...], diverged: bool) -> None:
    write(folder, *(train(nth, 10.0, loss) for nth, loss in enumerate(losses)))
    assert metrics_of(folder)["diverged"] is diverged


def test_fraction_done(folder: Path) -> None:
    assert fraction_done(folder, 4, None) == 0.0
    write(folder, line("run", 0, what="start"), line("epoch", 10), train(15, 1.0, epoch=2), rest='{"event": "tra')
    assert fraction_done(folder, 4, None) == 0.25
    assert fraction_done(folder, 4, 20) == 0.75
    assert not is_finished(folder)
    many = [train(nth, 1.0) for nth in range(1000)]
    write(folder, *many, line("epoch", 20, 2), rest="{")
    assert fraction_done(folder, 4, None) == 0.5
    write(folder, line("run", 40, 5, what="end"))
    assert fraction_done(folder, 4, None) == 1.0
    assert is_finished(folder)
