"""Checkpoints that a run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import Result, metrics
from utils.config import config_hash, load_config
from vitamp.checkpoints import inspect, read_index, verify


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def meta_of(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / name / "meta.json").read_text(encoding="utf-8"))


def test_meta_has_all_that_users_of_the_weights_need(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-output", run, "TRAIN.NUM_EPOCHS=1", "TRAIN.MODEL_EMA=true")
    assert done.code == 0, done.text
    (name,) = names(run)
    assert name == "step-000000044"
    meta = meta_of(run, name)
    assert (meta["format"], meta["epoch"], meta["update"], meta["num_classes"]) == (1, 1, 44, 10)
    assert meta["classes"] == [str(digit) for digit in range(10)]
    assert meta["config_hash"] == config_hash(load_config(str(run / "config.yaml")).config)
    data = meta["input"]
    assert (data["image_size"], data["channels"], data["mean"], data["std"]) == (8, 1, [0.5], [0.5])
    (val,) = metrics(run, "val")
    assert meta["metrics"] == {key: val[key] for key in val if key not in ("event", "epoch", "update")}
    assert set(meta["files"]) == {"model.safetensors", "ema.safetensors", "state.pt"}
    verify(inspect(run / "checkpoints" / name))
    assert read_index(run / "checkpoints") == {"last": name, "best": name}


def test_last_validation_after_a_save_can_become_the_best(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    """A checkpoint that was saved before the last validation is saved again with its metrics."""
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-output", run, "SAVE_EVERY_UPDATES=10", "TRAIN.MAX_UPDATES=10")
    assert done.code == 0, done.text
    (val,) = metrics(run, "val")
    name = "step-000000010"
    assert meta_of(run, name)["metrics"]["acc1"] == pytest.approx(val["acc1"])
    assert read_index(run / "checkpoints")["best"] == name
