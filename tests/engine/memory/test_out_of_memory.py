"""Out of memory: the error message, and advice that helps."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.evaluation.evaluate import validate
from engine.machine.device import Run
from engine.machine.memory import IN_VALIDATION, is_out_of_memory
from engine.memory.out_of_memory import describe, ways_out
from tests.engine.small import CPU, build
from tests.program import ROOT, Result, Vitamp
from utils.config import load_config
from utils.distributed.world import ALONE

SmallDevice = Callable[..., Result]
GPU = torch.device("cuda")
# A device whose memory holds so many images, ABOVE in training, ABOVE_EVAL in validation; from a forward pass on.
SMALL_DEVICE = f"""
import os, runpy, sys, torch
import timm.models.vision_transformer as vit
whole, count = vit.VisionTransformer.forward, [0]
def forward(self, images):
    count[0] += self.training
    room = int(os.environ.get("ABOVE" if self.training else "ABOVE_EVAL", "1000"))
    here = os.environ.get("RANK", "0") == os.environ.get("ON_RANK", "0")
    if here and len(images) > room and count[0] >= int(os.environ.get("FROM", "1")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")
    return whole(self, images)
vit.VisionTransformer.forward = forward
if __name__ == "__main__":
    sys.path.insert(0, {str(ROOT)!r})
    runpy.run_path({str(ROOT / "main_single_gpu.py")!r}, run_name="__main__")
"""


@pytest.fixture
def small_device(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> SmallDevice:
    """Run the tiny recipe on a device with little memory: `small_device(words, code=2, ABOVE=16)`."""
    script = tmp_path / "small_device.py"
    script.write_text(SMALL_DEVICE)

    def call(*words: object, code: int, **env: object) -> Result:
        return vitamp("-cfg", tiny, *words, script=str(script), env={k: str(v) for k, v in env.items()}, code=code)

    return call


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ("mat1 and mat2 shapes cannot be multiplied", False),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False),
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
    ],
)
def test_errors_that_mean_out_of_memory(text: str, is_it: bool) -> None:
    assert is_out_of_memory(RuntimeError(text)) == is_it


def test_out_of_memory_is_reported_once_with_ways_out(small_device: SmallDevice, tmp_path: Path) -> None:
    run, words = tmp_path / "run", ["SAVE_FREQ=1", "REPORT_FREQ=1", "TRAIN.MAX_UPDATES=70"]
    done = small_device(*words, "-batch_size", 28, "-output", run, code=1, ABOVE=14, FROM=60)
    assert done.err.count("out of memory in update 60") == 1
    assert " on cpu (" in done.err
    assert "and 2.00 GiB more were requested.\n  28 images at a time, of 8 x 8 x 1.\nWays out:\n" in done.err
    for way in ("DATA.BATCH_SIZE=14 TRAIN.ACCUM_ITER=2", "TRAIN.GRAD_CHECKPOINT=blocks", "DATA.BATCH_SIZE=auto"):
        assert f"\n  {way}: " in done.err
    assert f"The last checkpoint is step-000000051: resume from it with -resume {run}" in done.err
    done = small_device("-output", tmp_path / "validating", code=1, ABOVE_EVAL=16)
    assert "The last checkpoint is step-000000044" in done.err, "saved though its validation failed"


def test_evaluation_with_auto_batch_advises_a_smaller_one(tiny: Path) -> None:
    error = torch.OutOfMemoryError("out of memory")
    error.add_note(IN_VALIDATION)
    config = load_config(str(tiny), words={"DATA.BATCH_SIZE": "auto"}).config
    told = describe(error, Run(config, ALONE, CPU, threads=1))
    assert "DATA.BATCH_SIZE_EVAL=N, smaller than the size that auto found" in told
    assert "DATA.BATCH_SIZE=auto" not in told


def test_out_of_memory_before_the_first_update_exits_with_2(small_device: SmallDevice, tmp_path: Path) -> None:
    done = small_device("-dry_run", code=2, ABOVE=16, FROM=1)
    assert "out of memory in update 1: " in done.err
    assert "DATA.BATCH_SIZE=16 TRAIN.ACCUM_ITER=2" in done.err
    done = small_device("-eval", "-output", tmp_path / "run", code=2, ABOVE_EVAL=16, FROM=0)
    assert f"out of memory {IN_VALIDATION}: " in done.err
    assert "DATA.BATCH_SIZE_EVAL=16" in done.err
    done = small_device("-output", tmp_path / "begun", code=1, ABOVE=16)
    assert "There is no checkpoint yet: start again with another -output and one of these." in done.err


@pytest.mark.slow  # two processes, and only what one of them says is new
def test_rank_out_of_memory_is_named_and_ends_the_others(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """Rank 1 of two has memory for only 8 images from its 13th update on."""
    (tmp_path / "sitecustomize.py").write_text(SMALL_DEVICE.partition("if __name__")[0])
    words = ("-cfg", tiny, "-ngpus", 2, "-output", tmp_path / "run", "-batch_size", 16, "REPORT_FREQ=5")
    small = {"PYTHONPATH": str(tmp_path), "ABOVE": "8", "FROM": "13", "ON_RANK": "1"}
    done = vitamp(*words, script="main_multi_gpu.py", env=small, code=1)
    assert done.err.count("out of memory in update 13") == 1
    assert "rank 1 on " in done.err
    assert "DATA.BATCH_SIZE=8 TRAIN.ACCUM_ITER=2" in done.err


def test_failed_validation_restores_training_mode(tiny: Path) -> None:
    full = build(tiny)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    full.model.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        validate(full, full.model, ALONE)
    assert full.model.training
    told = describe(caught.value, Run(load_config(str(tiny)).config, ALONE, CPU, threads=1), 7)
    peak = r"the peak was .+ on cpu \(.+\), of [\d.]+ GiB in total, and 20\.00 MiB more were requested\.\n"
    assert re.match(rf"out of memory {IN_VALIDATION} after update 6: {peak}", told), told


@pytest.mark.parametrize(
    ("validating", "words", "first"),
    [
        (False, {"DATA.BATCH_SIZE": "15"}, "DATA.BATCH_SIZE=5 TRAIN.ACCUM_ITER=3:"),
        (False, {"DATA.BATCH_SIZE": "32", "TRAIN.ACCUM_ITER": "3"}, "DATA.BATCH_SIZE=16 TRAIN.ACCUM_ITER=6:"),
        (False, {"DATA.BATCH_SIZE": "32", "TRAIN.GLOBAL_BATCH": "64"}, "DATA.BATCH_SIZE=16:"),
        (False, {"DATA.BATCH_SIZE": "7", "TRAIN.MIXUP_ALPHA": "0.8"}, "TRAIN.GRAD_CHECKPOINT=blocks:"),
        (False, {"DATA.BATCH_SIZE": "1", "TRAIN.GRAD_CHECKPOINT": "blocks"}, "-amp:"),
        (True, {"DATA.BATCH_SIZE": "100", "DATA.BATCH_SIZE_EVAL": "60"}, "DATA.BATCH_SIZE_EVAL=30:"),
        (True, {"DATA.BATCH_SIZE_EVAL": "3"}, "DATA.BATCH_SIZE_EVAL=1:"),
        (True, {"DATA.BATCH_SIZE_EVAL": "1"}, "-amp:"),
    ],
)
def test_ways_out_keep_the_images_of_an_update(tiny: Path, validating: bool, words: dict[str, str], first: str) -> None:
    ways = ways_out(load_config(str(tiny), words=words).config, validating, GPU)
    assert ways[0].startswith(first)
    if validating:
        assert not any("GRAD_CHECKPOINT" in way for way in ways), "a validation keeps nothing for a backward pass"


def test_the_smaller_batch_is_one_that_fits(tiny: Path) -> None:
    config = load_config(str(tiny), words={"DATA.BATCH_SIZE": "60"}).config
    first, *_ = ways_out(config, False, GPU, fits=lambda size: size <= 13)
    assert first.startswith("DATA.BATCH_SIZE=12 TRAIN.ACCUM_ITER=5:")
    first, *_ = ways_out(config, False, GPU, fits=lambda _size: False)
    assert first.startswith("TRAIN.GRAD_CHECKPOINT=blocks:"), "no smaller batch fits"


def test_ways_out_omit_what_is_in_use(tiny: Path) -> None:
    every = ways_out(load_config(str(tiny)).config, False, GPU)
    smaller = "DATA.BATCH_SIZE=16 TRAIN.ACCUM_ITER=2"
    others = ["TRAIN.GRAD_CHECKPOINT=blocks", "-amp", "DATA.BATCH_SIZE=auto"]
    assert [way.partition(":")[0] for way in every] == [smaller, *others]
    done = {"TRAIN.GRAD_CHECKPOINT": "blocks", "AMP.ENABLED": "true"}
    left = ways_out(load_config(str(tiny), words=done).config, False, GPU, batch_is_auto=True)
    assert left == [f"{smaller}: the same images per update, fewer at once"]


@pytest.mark.parametrize("gains", [True, False])
def test_ways_out_before_the_first_update(tiny: Path, monkeypatch: pytest.MonkeyPatch, gains: bool) -> None:
    """-amp is no way out on a CPU where it computes in fp32, and -amp bf16 is one for every model."""
    monkeypatch.setattr("engine.memory.out_of_memory.amp_may_gain", lambda _device: gains)
    smaller, fsdp = "a smaller MODEL.NAME or -batch_size", "DIST.STRATEGY=fsdp, which shards the weights"
    done = {"AMP.ENABLED": "true", "DIST.STRATEGY": "fsdp"}
    for words, ways in (({}, [*["-amp bf16"] * gains, smaller, fsdp]), (done, [smaller])):
        run = Run(load_config(str(tiny), words=words).config, ALONE, CPU, threads=1)
        told = describe(torch.OutOfMemoryError(""), run)
        assert told.startswith("out of memory before the first update: ")
        lines = told.partition("Ways out:\n")[2].splitlines()
        assert [line.strip().removesuffix(" over several devices") for line in lines] == ways
