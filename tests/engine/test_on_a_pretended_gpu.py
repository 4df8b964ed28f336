"""The branches that only a GPU takes, on a pretended one (tests/pretended_gpu.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import Result, Vitamp, last_weights, metrics

FEW = ("DATA.BATCH_SIZE=64", "TRAIN.MAX_UPDATES=3", "DATA.BATCH_SIZE_EVAL=360", "REPORT_FREQ=1")
DEEP = ("MODEL.EMBED_DIM=64", "MODEL.PATCH_SIZE=2", "DATA.BATCH_SIZE_EVAL=8", "TRAIN.MAX_UPDATES=2")
MIXED = ("TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1", "TRAIN.RANDOM_ERASE_PROB=0.5", "DATA.SHIFT=0.1")
FP16 = ("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1024")
OnGpu = Callable[..., Result]


@pytest.fixture
def on_gpu(vitamp: Vitamp, tiny: Path) -> OnGpu:
    """Train the tiny recipe on a pretended GPU."""

    def call(*words: object, mib: int = 8192, code: int = 0, script: str = "main_single_gpu.py") -> Result:
        given = ("-cfg", tiny, "-device", "cuda", *words)
        env = {"PRETENDED_MIB": str(mib)}
        return vitamp(script, *given, script="tests/pretended_gpu.py", env=env, code=code)

    return call


def losses(run: Path) -> list[float]:
    return [line["loss"] for event in ("train", "val") for line in metrics(run, event)]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), "fp32, TF32 off"),
        (("-amp", "bf16", "TRAIN.ACCUM_ITER=2", *MIXED), "bf16 by autocast, no loss scaling needed (as asked for)"),
        ((*FP16, "TRAIN.ACCUM_ITER=2", "TRAIN.MODEL_EMA=true", "REPORT_STAGES=true"), "fp16 by autocast, with loss"),
        ((*FP16, "AMP.LEVEL=O2", "TRAIN.MODEL_EMA=true", *MIXED), "O2-fp16 copy of fp32 master weights"),
    ],
)
def test_gpu_trains_as_the_cpu_does(
    on_gpu: OnGpu, vitamp: Vitamp, tiny: Path, tmp_path: Path, words: tuple[str, ...], shown: str
) -> None:
    run = on_gpu(*FEW, *words, "SPEED=+fused", "-output", tmp_path / "gpu")
    vitamp("-cfg", tiny, *FEW, *words, "SPEED=+fused", "-output", tmp_path / "cpu", code=0)
    assert "cuda: Pretended GPU, 8 GiB, compute capability 9.0, CUDA " in run.out
    assert shown in run.out
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-2)
    assert len(losses(tmp_path / "gpu")) >= 4


def test_loader_copies_images_by_a_stream(on_gpu: OnGpu, vitamp: Vitamp, tiny: Path, tmp_path: Path, imagenet: Path) -> None:
    data = ("DATA.DATASET=imagenet2012", "-data_path", imagenet, "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3", "MODEL.NUM_CLASSES=4")
    words = (*data, "DATA.BATCH_SIZE=8", "DATA.NUM_WORKERS=1", "REPORT_FREQ=1", "TRAIN.NUM_EPOCHS=1", "SPEED=+fused")
    on_gpu(*words, "-output", tmp_path / "gpu")
    vitamp("-cfg", tiny, *words, "-output", tmp_path / "cpu", code=0)
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_skipped_update_is_replayed_and_does_not_move_the_schedule(on_gpu: OnGpu, tmp_path: Path) -> None:
    run = on_gpu(*FEW, "-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e30", "TRAIN.MODEL_EMA=true", "-output", tmp_path / "run")
    assert "update 1 was skipped: " in run.text
    rates = [line["lr"] for line in metrics(tmp_path / "run", "train")]
    assert rates[0] == rates[-1]


def test_resumed_run_ends_as_one_that_was_not_stopped(on_gpu: OnGpu, tmp_path: Path) -> None:
    words = (*FEW, *FP16, "TRAIN.MODEL_EMA=true", "SPEED=+fused")
    on_gpu(*words, "TRAIN.MAX_UPDATES=4", "-output", tmp_path / "whole")
    on_gpu(*words, "TRAIN.MAX_UPDATES=2", "-output", tmp_path / "parts")
    on_gpu(*words, "TRAIN.MAX_UPDATES=4", "-output", tmp_path / "parts", "-resume", "auto")
    assert last_weights(tmp_path / "parts") == last_weights(tmp_path / "whole")


def test_attention_is_timed_and_kernels_that_fail_are_left_out(on_gpu: OnGpu, tmp_path: Path) -> None:
    run = on_gpu(*FEW, "-amp", "-output", tmp_path / "run")
    assert "fp16 by autocast, with loss scaling (Hopper (compute capability 9.0): tensor cores" in run.out
    assert re.search(r"attention \w+ \(.*timed", run.out)
    assert "SPEED auto leaves out fused_mlp: its kernels fail here" in run.out


def test_out_of_memory_says_what_helps(on_gpu: OnGpu, tmp_path: Path) -> None:
    run = on_gpu(*DEEP, "DATA.BATCH_SIZE=256", "SPEED=+fused", "-output", tmp_path / "run", mib=8, code=1)
    assert re.search(r"out of memory in update 1: the peak was .* MiB on cuda:0 \(Pretended GPU.* more were requested", run.err)
    assert "DATA.BATCH_SIZE=128 TRAIN.ACCUM_ITER=2" in run.err


def test_batch_is_found_that_fits(on_gpu: OnGpu, tmp_path: Path) -> None:
    sizes = []
    for mib in (6, 8):
        run = on_gpu(*DEEP, "-batch_size", "auto", "SPEED=+fused", "-output", tmp_path / str(mib), mib=mib)
        found = re.search(r"DATA.BATCH_SIZE auto: (\d+) fits \(([\d.]+) MiB of ([\d.]+) MiB\)", run.out)
        assert found, run.out
        assert float(found[2]) <= 0.95 * float(found[3])
        sizes.append(int(found[1]))
    assert 8 <= sizes[0] < sizes[1]


def test_more_processes_than_gpus_are_refused(on_gpu: OnGpu) -> None:
    run = on_gpu("-ngpus", 2, script="main_multi_gpu.py", code=2)
    assert "-ngpus 2: only 1 GPU(s) are visible" in run.err
