"""Muon through the command line: log, notes, refusals, and a killed run that is resumed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import ROOT, Result
from tests.waiting import until

Vitamp = Callable[..., Result]
MUON = ("TRAIN.OPTIMIZER.NAME=muon",)
FULL = (
    *(*MUON, "TRAIN.OPTIMIZER.MUON.ADAMW_LR=1e-3", "TRAIN.LAYER_DECAY=0.7", "TRAIN.MODEL_EMA=true", "-amp", "bf16"),
    *("AMP.LEVEL=O2", "TRAIN.ACCUM_ITER=2", "MODEL.DEPTH=2", "MODEL.DROPOUT=0.1", "SAVE_EVERY_UPDATES=5"),
)
UPDATES = 44


def weights(run: Path) -> list[bytes]:
    folder = run / "checkpoints" / f"step-{UPDATES:09d}"
    return [(folder / name).read_bytes() for name in ("model.safetensors", "ema.safetensors")]


def test_log_has_the_groups(vitamp: Vitamp, tiny: Path) -> None:
    done = vitamp("-cfg", tiny, "-dry_run", *MUON)
    assert done.code == 0, done.text
    assert "optimiser  Muon 4 tensors (3,072 parameters), 5 Newton-Schulz steps in fp32; AdamW 16 tensors" in done.out
    assert "muon (betas 0.9 and 0.999, momentum 0.95, nesterov, eps 1e-08)" in done.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            (*MUON, "DIST.STRATEGY=fsdp"),
            ["TRAIN.OPTIMIZER.NAME muon orthogonalises whole matrices, which is not possible with DIST.STRATEGY fsdp"],
        ),
        ((*MUON, "MODEL.FREEZE=backbone"), ["Muon finds no matrix to train in VisionTransformer", "Use AdamW"]),
        ((*MUON, "TRAIN.OPTIMIZER.MUON.ADAM_LR=1"), ["Did you mean", "TRAIN.OPTIMIZER.MUON.ADAMW_LR"]),
    ],
)
def test_refusals_come_before_training(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, words: tuple[str, ...], expected: list[str]
) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words)
    assert done.code == 2, done.text
    for text in expected:
        assert text in done.err, done.text
    assert "Traceback" not in done.text


def test_variant_of_timm_is_named(vitamp: Vitamp, tiny: Path) -> None:
    done = vitamp("-cfg", tiny, "-dry_run", "TRAIN.OPTIMIZER.NAME=NAdaMuon")
    assert "nadamuon is timm's: it orthogonalises a fused qkv as one matrix" in done.text


@pytest.mark.slow
def test_killed_and_resumed_run_equals_an_uninterrupted_one(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = vitamp("-cfg", tiny, "-output", whole, *FULL)
    assert done.code == 0, done.text
    command = [sys.executable, ROOT / "main_single_gpu.py", "-cfg", tiny, "-output", run, *FULL]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until(lambda: any((run / "checkpoints").glob("step-*")))
        process.kill()
    assert not (run / "checkpoints" / f"step-{UPDATES:09d}").exists()
    done = vitamp("-cfg", tiny, "-output", run, *FULL, "-resume", "auto")
    assert done.code == 0, done.text
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_two_processes_equal_one_that_accumulates(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    words = (*MUON, "TRAIN.MODEL_EMA=true")
    assert vitamp("-cfg", tiny, "-output", one, *words, "TRAIN.ACCUM_ITER=2").code == 0
    done = vitamp("-cfg", tiny, "-output", two, *words, "-ngpus", 2, script="main_multi_gpu.py")
    assert done.code == 0, done.text
    assert weights(two) == weights(one)
