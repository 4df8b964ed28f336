"""The GPU's memory: batch sizes that fit, out-of-memory errors, and settings that save memory; a run's measurements."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.measure.throughput import STAGES
from tests.gpu.runs import KIND, UPDATES, Train, apart, on_a_gpu_alone
from tests.program import ROOT

# Sixty-five tokens of an image through twelve blocks are about 8 MB an image.
DEEP = ("MODEL.PATCH_SIZE=1", "MODEL.EMBED_DIM=128", "MODEL.DEPTH=12", "MODEL.NUM_HEADS=4", "SPEED=+fused")
LARGER = ("MODEL.EMBED_DIM=256", "MODEL.DEPTH=6", "MODEL.NUM_HEADS=4", "DATA.BATCH_SIZE=96")
DESCENT = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.05")

# The entry script on a GPU of which torch may take so many GiB.
LITTLE = f"""
import os, runpy, sys, torch
if __name__ == "__main__":
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(float(os.environ["GIB"]) * 2**30 / total, 0)
    sys.path.insert(0, {str(ROOT)!r})
    runpy.run_path({str(ROOT / "main_single_gpu.py")!r}, run_name="__main__")
"""


@pytest.fixture
def with_little(train: Train, tmp_path: Path) -> Callable[..., object]:
    script = tmp_path / "little.py"
    script.write_text(LITTLE, encoding="utf-8")
    return lambda *words, gib, **more: train(*words, script=str(script), env={"GIB": str(gib)}, **more)


@on_a_gpu_alone
def test_where_memory_ends_it_is_told_what_helps(with_little: Train) -> None:
    run = with_little("run", *DEEP, "-batch_size", 256, "SAVE_FREQ=1", gib=1, updates=5, code=1)
    assert run.text.count("out of memory in update 1: ") == 1
    for part in (
        " on cuda:0 (",
        "more were requested",
        "256 images at a time, of 8 x 8 x 1.",
        "DATA.BATCH_SIZE=128 TRAIN.ACCUM_ITER=2",
        "TRAIN.GRAD_CHECKPOINT=blocks",
        "DATA.BATCH_SIZE=auto",
        "There is no checkpoint yet",
    ):
        assert part in run.text, part


@on_a_gpu_alone
def test_a_batch_is_found_that_fits(train: Train) -> None:
    found = []
    for gib in (0.25, 0.5):
        words = ("-batch_size", "auto", f"TRAIN.MEMORY_LIMIT={gib}")
        run = train(f"of{gib}", *DEEP, *words, "DATA.BATCH_SIZE_EVAL=8", updates=3)
        size = run.choices["batch_size"]
        assert f"DATA.BATCH_SIZE auto: {size} fits (" in run.text
        assert "with more, an epoch of" not in run.text, "memory is to be the limit"
        assert size % 8 == 0
        assert 0.4 * gib < run.perf[-1]["peak_memory_gb"] * 1e9 / 2**30 <= gib
        found.append(size)
    assert found[0] < found[1]


@on_a_gpu_alone
def test_recomputed_blocks_take_less_and_give_the_same(train: Train) -> None:
    kept, again = (
        train(how, "-batch_size", 128, *DEEP, *DESCENT, "MODEL.DROPOUT=0.1", f"TRAIN.GRAD_CHECKPOINT={how}", updates=4)
        for how in ("none", "blocks")
    )
    assert "12 of 12 blocks recomputed in the backward pass" in again.text
    assert apart(again.losses, kept.losses) < 1e-5
    assert again.perf[-1]["peak_memory_gb"] < 0.5 * kept.perf[-1]["peak_memory_gb"]


@pytest.mark.parametrize("amp", ["bf16", "off"])
def test_convolutions_have_their_channels_last_in_half_precision(train: Train, amp: str) -> None:
    sizes = [f"MODEL.{key}=null" for key in ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS")]
    # Small batches of batch norm blow rounding up, so the first losses alone are alike.
    words = (*sizes, "MODEL.TYPE=resnet", "MODEL.NAME=test_resnet", "DATA.IMAGE_SIZE=32")
    run = train("run", *words, "-amp", amp, *DESCENT, "TRAIN.MODEL_EMA=true", "SPEED=auto")
    last = run.choices["channels_last"]
    assert last is (amp == "bf16" and KIND == "cuda")
    assert ("channels last" in run.text) is last
    rows = train("rows", *words, "-amp", amp, *DESCENT, "TRAIN.MODEL_EMA=true", "SPEED=-channels_last")
    assert apart(run.losses[:3], rows.losses[:3]) < (0.02 if amp == "bf16" else 1e-4), "cuDNN may choose anew"
    on = train("run", *words, "-amp", amp, *DESCENT, "TRAIN.MODEL_EMA=true", "-resume", "auto", updates=14)
    assert on.choices["channels_last"] is last


@on_a_gpu_alone
@pytest.mark.timing
def test_the_stages_make_up_an_update(train: Train) -> None:
    """Work enough for the GPU to be the slower one, so that its time is the update's."""
    words = ("-amp", "bf16", "REPORT_STAGES=true", "REPORT_FREQ=5", "TRAIN.NUM_EPOCHS=5", "VALIDATE_FREQ=5")
    run = train("run", *words, *LARGER, updates=60)
    settled = run.perf[2:]
    assert all(f"{stage}_ms" in perf for perf in settled for stage in STAGES)
    for perf in settled:
        by_stage = {stage: perf[f"{stage}_ms"] for stage in STAGES}
        assert min(by_stage.values()) >= 0, by_stage
        assert min(by_stage[stage] for stage in ("forward", "backward", "optimiser")) > 0.01, by_stage
    told = sorted(sum(perf[f"{stage}_ms"] for stage in STAGES) for perf in settled)[len(settled) // 2]
    by_the_clock = sorted(96e3 / perf["images_per_second"] for perf in settled)[len(settled) // 2]
    assert told == pytest.approx(by_the_clock, rel=0.3)
    assert "Stages: data " in run.text


@on_a_gpu_alone
def test_the_peak_of_memory_is_the_tensors(train: Train) -> None:
    small, large = (train(f"b{batch}", *LARGER, f"DATA.BATCH_SIZE={batch}", updates=3) for batch in (32, 256))
    peaks = [run.perf[-1]["peak_memory_gb"] for run in (small, large)]
    assert 0.01 < peaks[0] < peaks[1] / 2
    assert f"Mem: {peaks[1]:.2f}GB" in large.text


@on_a_gpu_alone
def test_a_trace_holds_the_gpus_kernels(train: Train, tmp_path: Path) -> None:
    run = train("run", "-amp", "bf16", "-profile", 3, updates=UPDATES)
    assert "Profile written to" in run.text
    events = json.loads((tmp_path / "run" / "profile.json").read_text(encoding="utf-8"))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 100
    assert any("adam" in event["name"].lower() for event in kernels), "the fused optimiser's"
    assert sum(event.get("name", "").startswith("ProfilerStep#") and event["ph"] == "X" for event in events) >= 3
