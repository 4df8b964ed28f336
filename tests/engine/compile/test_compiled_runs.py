"""Compiled runs as a user starts them, down to machine code. Compiling takes minutes on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.program import Result, metrics

Vitamp = Callable[..., Result]

RANDOM = ("MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1", "TRAIN.MODEL_EMA=true", "TRAIN.NUM_EPOCHS=1")
FILES = ("model.safetensors", "ema.safetensors")
LAST, MIDDLE = 44, 20
SLOW = 1500
"""Seconds that a test waits for the compiler."""

pytestmark = pytest.mark.slow


def checkpoint(run: Path, update: int) -> Path:
    return run / f"checkpoints/step-{update:09d}"


def weights(run: Path, name: str, update: int = LAST) -> torch.Tensor:
    tensors = load_file(checkpoint(run, update) / name)
    return torch.cat([tensors[key].flatten() for key in sorted(tensors)])


def off(ours: Path, theirs: Path, update: int = LAST) -> float:
    """How far the weights of two runs are apart, as a share of their size."""
    found, expected = (weights(run, FILES[0], update) for run in (ours, theirs))
    return float((found - expected).norm() / expected.norm())


def test_a_compiled_run_goes_on_as_if_it_had_never_stopped(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, *RANDOM, f"DATA.CACHE={tmp_path / 'cache'}")
    whole, stopped, written = tmp_path / "whole", tmp_path / "stopped", tmp_path / "written"

    done = vitamp(*words, "-output", whole, "TRAIN.COMPILE=whole", timeout=SLOW)
    assert done.code == 0, done.text
    assert "Compiling all from images to loss" in done.text
    assert f"kept in {tmp_path / 'cache' / 'compiled'}" in done.text

    # Stopped, and gone on with: by `auto`, which on a CPU would not compile, but keeps what the run had.
    half = f"TRAIN.MAX_UPDATES={MIDDLE}"
    assert vitamp(*words, "-output", stopped, "TRAIN.COMPILE=whole", half, timeout=SLOW).code == 0
    done = vitamp(*words, "-output", stopped, "-resume", "auto", timeout=SLOW)
    assert done.code == 0, done.text
    assert "compile    whole (as this run had it)" in done.text
    for name in FILES:
        assert torch.equal(weights(stopped, name), weights(whole, name)), name
    assert metrics(stopped, "train")[-1] == metrics(whole, "train")[-1]
    assert json.loads((checkpoint(whole, LAST) / "meta.json").read_text())["choices"]["compile"] == "whole"

    # As written: the same but for rounding, with the same random numbers, and the same names.
    assert vitamp(*words, "-output", written).code == 0
    assert 0 < off(whole, written) < 1e-3
    for name in FILES:
        assert [*load_file(checkpoint(whole, LAST) / name)] == [*load_file(checkpoint(written, LAST) / name)]

    # From compiled to written, and the reverse.
    there, back = tmp_path / "there", tmp_path / "back"
    for run, first, then in ((there, "whole", "none"), (back, "none", "whole")):
        assert vitamp(*words, "-output", run, f"TRAIN.COMPILE={first}", half, timeout=SLOW).code == 0
        done = vitamp(*words, "-output", run, "-resume", "auto", f"TRAIN.COMPILE={then}", timeout=SLOW)
        assert done.code == 0, done.text
        assert off(run, written) < 1e-3


def test_two_processes_compile_blocks(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    cache, until = f"DATA.CACHE={tmp_path / 'cache'}", f"TRAIN.MAX_UPDATES={MIDDLE}"
    words = ("-cfg", tiny, "-ngpus", 2, "DATA.BATCH_SIZE=16", until, cache)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    done = vitamp(*words, "-output", ours, "TRAIN.COMPILE=whole", script="main_multi_gpu.py", timeout=SLOW)
    assert done.code == 0, done.text
    assert "compile    blocks (ranks exchange gradients during the backward pass" in done.text
    assert vitamp(*words, "-output", theirs, script="main_multi_gpu.py", timeout=SLOW).code == 0
    assert 0 < off(ours, theirs, MIDDLE) < 1e-3
