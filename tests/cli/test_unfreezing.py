"""MODEL.FREEZE and MODEL.UNFREEZE_EPOCH through the command line: sharded and compiled runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddp.test_amp_ddp import FSDP_LEVELS
from tests.program import Vitamp, metrics

FROZEN = ("MODEL.FREEZE=backbone", "MODEL.UNFREEZE_EPOCH=2", "TRAIN.NUM_EPOCHS=3", "TRAIN.LAYER_DECAY=0.6")
RICH = (*FROZEN, "TRAIN.MODEL_EMA=true", "MODEL.DEPTH=2", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.2")


@pytest.mark.slow
@pytest.mark.parametrize("amp", [(), *(("-amp", "bf16", f"AMP.LEVEL={level}") for level in FSDP_LEVELS)])
def test_sharded_run_agrees_with_ddp_and_resumes(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, amp: tuple[object, ...]
) -> None:
    words = ("-cfg", tiny, *RICH, *amp, "-ngpus", 2, "KEEP_LAST=0")
    for name, how in (("ddp", ()), ("fsdp", ("DIST.STRATEGY=fsdp",))):
        vitamp("-output", tmp_path / name, *words, *how, script="main_multi_gpu.py", code=0)
    ddp, fsdp = (
        [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / name, "train")] for name in ("ddp", "fsdp")
    )
    close = 1e-2 if amp else 1e-4
    for ours, theirs in zip(fsdp, ddp, strict=True):
        assert ours == pytest.approx(theirs, rel=close)
    again = (*words, "DIST.STRATEGY=fsdp", "-output", tmp_path / "again", "-resume", "auto")
    for limit in (("TRAIN.MAX_UPDATES=22",), ("TRAIN.MAX_UPDATES=30",), ()):
        vitamp(*again, *limit, script="main_multi_gpu.py", code=0)
    assert metrics(tmp_path / "again", "train") == metrics(tmp_path / "fsdp", "train")


@pytest.mark.slow
def test_sharded_fine_tuning_equals_one_process_and_may_be_thawed(
    vitamp: Vitamp, tiny: Path, digits_run: Path, tmp_path: Path
) -> None:
    tuned = ("-cfg", tiny, "-pretrained", digits_run, "MODEL.NEW_CLASSIFIER=true", "MODEL.DROPOUT=0.1", "SEED=5")
    tuned += ("MODEL.FREEZE=patch_embed,pos_embed,cls_token", "TRAIN.LAYER_DECAY=0.6", "TRAIN.MODEL_EMA=true")
    words = (*tuned, "-batch_size", 16, "REPORT_FREQ=1", "TRAIN.MAX_UPDATES=20")
    vitamp(*words, "-output", tmp_path / "one", "-accum_iter", 2, code=0)
    sharded = (*words, "-output", tmp_path / "two", "-resume", "auto", "-ngpus", 2, "DIST.STRATEGY=fsdp")
    vitamp(*sharded, script="main_multi_gpu.py", code=0)
    alone, both = ([line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("one", "two"))
    assert both == pytest.approx(alone, rel=1e-5)
    thawed = vitamp(*sharded, "MODEL.FREEZE=null", "TRAIN.MAX_UPDATES=25", script="main_multi_gpu.py", code=0)
    assert "trained from now on (MODEL.FREEZE): 4 tensors" in thawed.out


@pytest.mark.slow
def test_compiled_run_compiles_again_and_resumes(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, *FROZEN, "TRAIN.COMPILE=blocks")
    done = vitamp("-output", tmp_path / "whole", *words, timeout=600, code=0)
    assert done.out.count("Compiling each block") == 2
    for limit in ("TRAIN.MAX_UPDATES=44",), ():
        vitamp("-output", tmp_path / "run", "-resume", "auto", *words, *limit, timeout=600, code=0)
    assert metrics(tmp_path / "run", "train") == metrics(tmp_path / "whole", "train")
    vitamp("-output", tmp_path / "eager", "-cfg", tiny, *FROZEN, code=0)
    losses = [[line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("whole", "eager")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
