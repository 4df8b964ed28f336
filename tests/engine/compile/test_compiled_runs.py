"""Compiled runs as a user starts them, down to machine code. Compiling takes minutes on a CPU."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.program import Vitamp, metrics, run_program

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


@dataclass(frozen=True)
class Runs:
    """A compiled run and an eager one of the same recipe, and the words that both were started with."""

    words: tuple[object, ...]
    whole: Path
    eager: Path


@pytest.fixture(scope="module")
def runs(place: Path) -> Runs:
    words = ("-cfg", place / "tiny.yaml", *RANDOM, f"DATA.CACHE={place / 'cache'}")
    made = Runs(words, whole=place / "whole", eager=place / "eager")
    done = run_program(
        *words, "-output", made.whole, "TRAIN.COMPILE=whole", timeout=SLOW, slow_start=True, streams=place, code=0
    )
    assert "Compiling the forward and backward pass" in done.text
    assert f"cached in {place / 'cache' / 'compiled'}" in done.text
    run_program(*words, "-output", made.eager, streams=place, code=0)
    return made


@pytest.mark.every_slice
def test_compiled_run_is_the_eager_one_but_for_rounding(runs: Runs) -> None:
    """With the same random numbers, and the same names."""
    assert 0 < off(runs.whole, runs.eager) < 1e-3
    for name in FILES:
        names = [[*load_file(checkpoint(run, LAST) / name)] for run in (runs.whole, runs.eager)]
        assert names[0] == names[1]
    assert json.loads((checkpoint(runs.whole, LAST) / "meta.json").read_text())["choices"]["compile"] == "whole"


def test_resumed_compiled_run_is_the_uninterrupted_one(vitamp: Vitamp, runs: Runs, tmp_path: Path) -> None:
    """By `auto`, which on a CPU would not compile, but keeps what the run had."""
    words = (*runs.words, "-output", tmp_path / "stopped")
    vitamp(*words, "TRAIN.COMPILE=whole", f"TRAIN.MAX_UPDATES={MIDDLE}", timeout=SLOW, code=0)
    done = vitamp(*words, "-resume", "auto", timeout=SLOW, code=0)
    assert "compile    whole (as before the resume)" in done.text
    for name in FILES:
        assert torch.equal(weights(tmp_path / "stopped", name), weights(runs.whole, name)), name
    assert metrics(tmp_path / "stopped", "train")[-1] == metrics(runs.whole, "train")[-1]


def test_incomplete_files_of_the_compiler_are_named(vitamp: Vitamp, runs: Runs, tmp_path: Path) -> None:
    """What a kill while compiling leaves: libraries without content, which torch would load."""
    cache = tmp_path / "cache"
    shutil.copytree(runs.whole.parent / "cache", cache)
    for library in cache.rglob("*.so"):
        os.truncate(library, 0)
    words = (*runs.words, f"DATA.CACHE={cache}", "-output", tmp_path / "run", "TRAIN.COMPILE=whole")
    done = vitamp(*words, timeout=SLOW, code=2)
    assert f"remove the incomplete files in {cache}" in done.text


@pytest.mark.parametrize(("first", "then"), [("whole", "none"), ("none", "whole")])
def test_compiling_can_change_at_a_resume(vitamp: Vitamp, runs: Runs, tmp_path: Path, first: str, then: str) -> None:
    words = (*runs.words, "-output", tmp_path / "run")
    vitamp(*words, f"TRAIN.COMPILE={first}", f"TRAIN.MAX_UPDATES={MIDDLE}", timeout=SLOW, code=0)
    vitamp(*words, "-resume", "auto", f"TRAIN.COMPILE={then}", timeout=SLOW, code=0)
    assert off(tmp_path / "run", runs.eager) < 1e-3


def test_two_processes_compile_blocks(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    cache, until = f"DATA.CACHE={tmp_path / 'cache'}", f"TRAIN.MAX_UPDATES={MIDDLE}"
    words = ("-cfg", tiny, "-ngpus", 2, "DATA.BATCH_SIZE=16", until, cache)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    done = vitamp(*words, "-output", ours, "TRAIN.COMPILE=whole", script="main_multi_gpu.py", timeout=SLOW, code=0)
    assert "compile    blocks (one graph would delay the all-reduce of gradients" in done.text
    vitamp(*words, "-output", theirs, script="main_multi_gpu.py", timeout=SLOW, code=0)
    assert 0 < off(ours, theirs, MIDDLE) < 1e-3
