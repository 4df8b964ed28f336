"""The branches that only a GPU takes, on a pretended one (tests/pretended_gpu.py)."""

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
AVERAGED = ("TRAIN.MODEL_EMA=true", "TRAIN.ACCUM_ITER=2")
OnGpu = Callable[..., Result]


@pytest.fixture
def on_gpu(vitamp: Vitamp, tiny: Path) -> OnGpu:
    def call(*words: object, code: int = 0, script: str = "main_single_gpu.py", **env: object) -> Result:
        options: Any = {"script": "tests/pretended_gpu.py", "code": code, "slow_start": "TRITON_INTERPRET" in env}
        options["env"] = {key: str(value) for key, value in env.items()}
        return vitamp(script, "-cfg", tiny, "-device", "cuda", *words, **options)

    return call


def losses(run: Path) -> list[float]:
    """Those of training and validation, and the learning rates."""
    rates = [1000 * line["lr"] for line in metrics(run, "train")]
    return [line["loss"] for event in ("train", "val") for line in metrics(run, event)] + rates


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), "fp32, TF32 off"),
        (("-amp", "bf16", *AVERAGED, *MIXED), "bf16 by autocast, no loss scaling needed (as asked for)"),
        ((*FP16, *AVERAGED, "REPORT_STAGES=true"), "fp16 by autocast, with loss scaling"),
        ((*FP16, "AMP.LEVEL=O2", *AVERAGED, *MIXED), "O2-fp16 copy of fp32 master weights"),
        ((*FP16, "TRAIN.OPTIMIZER.NAME=lamb"), "lamb (betas"),  # not fused: the host knows of skips
    ],
)
def test_gpu_trains_as_the_cpu_does(
    on_gpu: OnGpu, vitamp: Vitamp, tiny: Path, tmp_path: Path, words: tuple[str, ...], shown: str
) -> None:
    run = on_gpu(*FEW, *words, "SPEED=+fused", "-output", tmp_path / "gpu")
    vitamp("-cfg", tiny, *FEW, *words, "SPEED=+fused", "-output", tmp_path / "cpu", code=0)
    assert "cuda: Pretended GPU, 8 GiB, compute capability 9.0, CUDA " in run.out
    assert shown in run.out
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)
    assert "was skipped" not in run.out
    assert len(losses(tmp_path / "gpu")) >= 7


def test_loader_copies_images_by_a_stream(
    on_gpu: OnGpu, vitamp: Vitamp, tiny: Path, tmp_path: Path, imagenet: Path
) -> None:
    data = ("-dataset", "imagenet2012", "-data_path", imagenet, "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3")
    few = ("MODEL.NUM_CLASSES=4", "TRAIN.NUM_EPOCHS=1", "REPORT_FREQ=1", "DATA.BATCH_SIZE=8", "DATA.NUM_WORKERS=1")
    on_gpu(*data, *few, "SPEED=+fused", "-output", tmp_path / "gpu")
    vitamp("-cfg", tiny, *data, *few, "SPEED=+fused", "-output", tmp_path / "cpu", code=0)
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


def test_skipped_update_is_replayed_and_does_not_move_the_schedule(on_gpu: OnGpu, tmp_path: Path) -> None:
    scale = ("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e30", "TRAIN.MODEL_EMA=true")
    run = on_gpu(*FEW, *scale, "-output", tmp_path / "run")
    assert re.search(
        r"update 1 was skipped: .*, so the loss scale is too large; in a micro-batch of 64 samples", run.out
    )
    assert len({line["lr"] for line in metrics(tmp_path / "run", "train")}) == 1


def test_resumed_run_ends_as_one_that_was_not_stopped(on_gpu: OnGpu, tmp_path: Path) -> None:
    words = (*FEW, *FP16, "TRAIN.MODEL_EMA=true", "SPEED=+fused")
    on_gpu(*words, "TRAIN.MAX_UPDATES=4", "-output", tmp_path / "whole")
    on_gpu(*words, "TRAIN.MAX_UPDATES=2", "-output", tmp_path / "parts")
    on_gpu(*words, "TRAIN.MAX_UPDATES=4", "-output", tmp_path / "parts", "-resume", "auto")
    assert last_weights(tmp_path / "parts") == last_weights(tmp_path / "whole")


def test_attention_is_timed_and_kernels_that_fail_are_left_out(on_gpu: OnGpu, tmp_path: Path) -> None:
    run = on_gpu(*FEW, "-amp", "MODEL.EMBED_DIM=20", "-output", tmp_path / "run")
    assert "fp16 by autocast, with loss scaling (Hopper (compute capability 9.0): tensor cores" in run.out
    assert re.search(r"attention \w+ \(.*timed", run.out)
    assert "SPEED auto leaves out fused_mlp: its kernels fail here" in run.out
    assert "Mixed precision is fastest with sizes that are multiples of 8, unlike MODEL.EMBED_DIM 20" in run.out


@pytest.mark.slow
@pytest.mark.every_slice
def test_own_kernels_train_as_torchs_do(on_gpu: OnGpu, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    few = ("-dataset", "synthetic", "DATA.SYNTHETIC_TRAIN=8", "DATA.SYNTHETIC_VAL=4", "MODEL.EMBED_DIM=64")
    words = (*few, *FP16, "DATA.BATCH_SIZE=4", "TRAIN.NUM_EPOCHS=1", "REPORT_FREQ=1")
    run = on_gpu(*words, "SPEED=+packed,+fused_mlp", "-output", tmp_path / "ours", TRITON_INTERPRET=1)
    assert "attention packed (as asked for); patches by a matrix product; bias and GELU in one kernel" in run.out
    on_gpu(*words, "SPEED=+fused,-fused_mlp", "-output", tmp_path / "torchs")
    assert losses(tmp_path / "ours") == pytest.approx(losses(tmp_path / "torchs"), rel=2e-3)


@pytest.mark.parametrize(
    ("speed", "mib", "code", "way"),
    [("+fused", 8, 1, "DATA.BATCH_SIZE=128 TRAIN.ACCUM_ITER=2"), ("auto", 4, 2, "a smaller MODEL.NAME or -batch_size")],
)
def test_out_of_memory_says_what_helps(
    on_gpu: OnGpu, tmp_path: Path, speed: str, mib: int, code: int, way: str
) -> None:
    words = (*DEEP, "DATA.BATCH_SIZE=256", f"SPEED={speed}", "-output", tmp_path / "run")
    run = on_gpu(*words, PRETENDED_MIB=mib, code=code)
    assert re.search(r"out of memory .*: the peak was .* MiB on cuda:0 \(Pretended GPU.* more were requested", run.err)
    assert way in run.err


def test_batch_is_found_that_fits(on_gpu: OnGpu, tmp_path: Path) -> None:
    sizes = []
    for mib in (6, 8):
        words = (*DEEP, "-batch_size", "auto", "SPEED=+fused", "-output", tmp_path / str(mib))
        run = on_gpu(*words, PRETENDED_MIB=mib)
        found = re.search(r"DATA.BATCH_SIZE auto: (\d+) fits \(([\d.]+) MiB of ([\d.]+) MiB\)", run.out)
        assert found, run.out
        assert 0.8 < float(found[2]) / float(found[3]) <= 0.95
        sizes.append(int(found[1]))
    assert 8 <= sizes[0] < sizes[1]


def test_dry_run_and_number_of_gpus(on_gpu: OnGpu, vitamp: Vitamp, tiny: Path) -> None:
    assert re.search(r"memory +\S+ KiB of 8\.0 GiB at the peak", on_gpu("-dry_run", *FP16).out)
    multi = "main_multi_gpu.py"
    assert "-ngpus 2: only 1 GPU(s) are visible" in on_gpu("-ngpus", 2, script=multi, code=2).err
    none = vitamp("-cfg", tiny, "-device", "cuda", "-ngpus", 2, script=multi, env={"CUDA_VISIBLE_DEVICES": ""}, code=2)
    assert none.text.count("sees no GPU here (CUDA_VISIBLE_DEVICES is '')") == 1
