"""-dry_run makes real updates, keeps nothing, and reports memory, time and disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import engine.update
from datasets import Window
from engine.fit.dry_run import try_out
from engine.fit.dry_run_report import Costs, Memory, Speed, cost_lines
from engine.machine.context import Run
from engine.setup import build_for_training
from engine.update import Parts
from tests.program import Result
from utils.config import load_config
from utils.distributed.world import ALONE

MIB = 2**20
COSTS = Costs(
    memory=Memory(8 * MIB, {"weights": MIB, "gradients": MIB, "optimiser": 2 * MIB, "EMA": MIB}),
    total=10 * MIB,
    speed=Speed(updates=[9.0, 2.0, 2.0], loading=0.5, in_memory=False, faster="Do this", validation=100.0),
    checkpoint=4_000_000,
    place=Path("/"),
    updates=1000,
    per_epoch=100,
)


def words(tiny: Path, costs: Costs, device: str = "cuda", **settings: str) -> str:
    config = load_config(str(tiny), words={key.replace("__", "."): value for key, value in settings.items()}).config
    return "\n".join(cost_lines(config, costs, ALONE, torch.device(device)))


def test_dry_run_of_two_processes_leaves_no_files(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    more = ("-ngpus", 2, "-num_workers", 1, "-dry_run", "TRAIN.MODEL_EMA=true")
    done = vitamp("-cfg", tiny, *more, script="main_multi_gpu.py", cwd=place)
    assert done.code == 0, done.text
    assert done.out.count("First batch: (32, 1, 8, 8), loss 2.") == 1
    for part in ("weights", "gradients", "optimiser", "EMA", "activations and the rest"):
        assert re.search(rf"{part} [\d.]+ [KM]iB", done.out), part
    assert re.search(r"44 updates to go \(2.0 epochs\): about 0:\d\d:\d\d, until 20", done.out)
    assert f"free in {place}" in done.out
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


def test_frozen_weights_of_a_run_with_adapters_are_on_the_disk_once(tiny: Path) -> None:
    text = words(tiny, replace(COSTS, base=300_000_000), KEEP_LAST="3")
    assert "4.00 MB per checkpoint and 300.00 MB once for the frozen weights, up to 320.00 MB in all" in text


def test_dry_run_report_is_consistent(tiny: Path) -> None:
    text = words(tiny, COSTS, TRAIN__NUM_EPOCHS="10")
    assert "8.0 MiB of 10.0 MiB" in text
    assert "activations and the rest 3.0 MiB" in text
    assert "teacher" not in text
    assert "an epoch of 100 updates takes about 0:03:20" in text
    # 1,000 updates of 2 s, and 10 validations of 100 s
    assert "1,000 updates to go (10.0 epochs): about 0:50:00" in text
    # three, the best, and the one being written
    assert "4.00 MB per checkpoint, up to 20.00 MB in all (KEEP_LAST 3)" in text
    assert "not enough" not in text
    assert "nearly all" not in text


def test_dry_run_reports_the_teachers_weights(vitamp: Callable[..., Result], digits_run: Path, tiny: Path) -> None:
    done = vitamp("-cfg", tiny, "-dry_run", "TRAIN.DISTILLATION_TYPE=soft", f"TRAIN.TEACHER_MODEL={digits_run}")
    assert done.code == 0, done.text
    weights = next(digits_run.glob("checkpoints/step-*/ema.safetensors"))
    size = sum(4 * tensor.numel() for tensor in load_file(weights).values())
    found = re.search(r"optimiser .*, teacher ([\d.]+) KiB, activations and the rest", done.out)
    assert found, done.text
    assert float(found[1]) == pytest.approx(size / 1024, abs=0.06)


@pytest.mark.parametrize(
    ("loading", "answer"),
    [(0.5, "bound by the model"), (2.1, "bound by both"), (4.0, "bound by data. Do this")],
)
def test_dry_run_names_the_bottleneck(tiny: Path, loading: float, answer: str) -> None:
    assert answer in words(tiny, replace(COSTS, speed=replace(COSTS.speed, loading=loading)))


def test_dry_run_on_a_cpu_adds_the_time_of_loading(tiny: Path) -> None:
    assert "an epoch of 100 updates takes about 0:04:10" in words(tiny, COSTS, "cpu")


def test_dry_run_warns_about_too_little_memory_and_disk(tiny: Path) -> None:
    full = replace(COSTS, total=8 * MIB)
    everything = "nearly all memory; to save some: a smaller -batch_size, -amp or TRAIN.GRAD_CHECKPOINT=blocks"
    assert everything in words(tiny, full)
    done = {"DATA__BATCH_SIZE": "1", "AMP__ENABLED": "true", "TRAIN__GRAD_CHECKPOINT": "blocks"}
    assert "nearly all memory; to save some: a smaller MODEL.NAME" in words(tiny, full, **done)
    assert "not enough: name another -output" in words(tiny, replace(COSTS, checkpoint=2**60))


@pytest.mark.parametrize("step", [0, 4, 5])
def test_dry_run_does_not_measure_the_last_short_window(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """44 micro-batches are five windows of eight and one of four, which a resumed run may have before it."""
    config = load_config(str(tiny), words={"TRAIN.ACCUM_ITER": "8", "SAVE": str(tmp_path)}).config
    run = Run(config, ALONE, torch.device("cpu"), threads=1)
    ready = build_for_training(run, None)
    ready.choices["compile"], ready.position.step = "none", step
    measured: set[int] = set()
    update = engine.update.train_update

    def watched(parts: Parts, window: Window, number: int) -> None:
        measured.add(len(window.shares))
        update(parts, window, number)

    monkeypatch.setattr(engine.update, "train_update", watched)
    try_out(run, ready, 12 - step)
    assert measured == {8}
