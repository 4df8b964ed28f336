"""The GPU's memory: what fits, what is told when it ends, and what makes a run take less of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.runs import KIND, Train, apart, on_a_gpu_alone
from tests.program import ROOT

# Sixty-five tokens of an image through twelve blocks are about 8 MB an image.
DEEP = ("MODEL.PATCH_SIZE=1", "MODEL.EMBED_DIM=128", "MODEL.DEPTH=12", "MODEL.NUM_HEADS=4", "SPEED=+fused")
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
    assert "Traceback" not in run.text
    for part in (
        " on cuda:0 (",
        "more were requested",
        "256 images at a time, of 8 x 8 x 1.",
        "Allocations that take the most memory: ",
        "-batch_size 128 -accum_iter 2",
        "TRAIN.GRAD_CHECKPOINT=blocks",
        "-batch_size auto",
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
