"""-dry_run makes ordinary updates and a validation, keeps nothing, and reports memory, time and disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.machine.device import Run
from engine.memory import dry_run
from engine.setup import build_for_training
from tests.program import Result
from utils.config import Config, load_config
from utils.distributed.world import ALONE

SPACE = r"[\d.]+ [kM]B per checkpoint, up to [\d.]+ [kM]B in all \(KEEP_LAST 3\); [\d.]+ \w+ free in "


def config_of(tiny: Path, **settings: object) -> Config:
    return load_config(str(tiny), words={key.replace("__", "."): str(value) for key, value in settings.items()}).config


def test_dry_run_of_two_processes_leaves_no_files(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    more = ("-ngpus", 2, "-num_workers", 1, "-dry_run", "TRAIN.MODEL_EMA=true")
    done = vitamp("-cfg", tiny, *more, script="main_multi_gpu.py", cwd=place)
    assert done.code == 0, done.text
    assert len(re.findall(r"^Epoch\[001/002\], Step\[0020/0022\], Lr: ", done.out, re.MULTILINE)) == 1
    assert done.out.count("----- Epoch[001/002], Validation Loss: ") == 2, "the model and its EMA"
    assert re.search(r"memory     [\d.]+ [GM]iB of [\d.]+ GiB at the peak, for each process", done.out)
    assert re.search(r"44 updates to go \(2.0 epochs\): about 0:\d\d:\d\d, until 20", done.out)
    assert re.search(SPACE + re.escape(str(place)), done.out)
    assert "Where the time went: " in done.out
    assert done.err == "", "no library warns, in no rank and no loading process"
    assert list(place.iterdir()) == []


def test_dry_run_of_an_evaluation_says_whether_weights_were_loaded(
    vitamp: Callable[..., Result], digits_run: Path, tiny: Path, tmp_path: Path
) -> None:
    ending = "Nothing was validated or written."
    for more, said in (
        (("-cfg", tiny), "no weights were loaded"),
        (("-cfg", tiny, "-pretrained", digits_run), "the weights match the model"),
        (("-resume", digits_run), "the weights match the model"),
    ):
        done = vitamp("-eval", "-dry_run", "-output", tmp_path / "run", *more)
        assert done.code == 0, done.text
        assert f"Dry run: {said}. {ending}" in done.out


def test_time_is_that_of_the_updates_left_and_of_validations(tiny: Path) -> None:
    lines = "\n".join(dry_run._time(config_of(tiny, VALIDATE_FREQ=2), 2.0, 100.0, 100, 1000))
    assert "2 s per update; an epoch of 100 updates takes about 0:03:20, a validation about 0:01:40" in lines
    assert "1,000 updates to go (10.0 epochs): about 0:41:40" in lines, "1,000 updates of 2 s, 5 validations of 100 s"
    assert "0 updates to go (0.0 epochs): about 0:00:00" in "\n".join(dry_run._time(Config(), 2.0, 100.0, 100, 0))


def test_dry_run_warns_about_too_little_memory_and_disk(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny, SAVE=tmp_path, KEEP_LAST=3)
    ready: Any = build_for_training(Run(config, ALONE, torch.device("cpu"), threads=1), None)
    monkeypatch.setattr(dry_run, "total_memory", lambda _: 1000)
    assert "nearly all memory; to save some: -batch_size 16 -accum_iter 2: " in "\n".join(
        dry_run._memory(config, ready)
    )
    monkeypatch.setattr(dry_run, "total_memory", lambda _: 2**60)
    assert "nearly" not in "\n".join(dry_run._memory(config, ready))
    (enough,) = dry_run._disk(config, ALONE, ready)
    assert re.search(SPACE, enough)
    one, five = map(float, re.findall(r"([\d.]+) kB", enough)[:2])
    assert five == pytest.approx(5 * one, abs=3), "three, the best, and the one being written"
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "not enough: name another -output or SAVE, or set KEEP_LAST=1" in "\n".join(
        dry_run._disk(config, ALONE, ready)
    )
    monkeypatch.setattr(dry_run, "base_weights", lambda _: torch.zeros(250_000))
    assert "and 1.00 MB once for the frozen weights" in next(dry_run._disk(config, ALONE, ready))
