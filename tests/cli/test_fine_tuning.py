"""Fine-tuning from a run's EMA, with a new classifier, frozen weights and layer-wise learning rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.preflight import check
from tests.program import TINY_DIGITS, Vitamp, metrics, run_program
from utils.config import load_config
from utils.errors import UserError

TUNED = [
    *("MODEL.FREEZE=patch_embed,pos_embed,cls_token,blocks.0", "TRAIN.LAYER_DECAY=0.6"),
    *("MODEL.NEW_CLASSIFIER=true", "SEED=5", "MODEL.DROPOUT=0.1"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, `base`, which has an EMA."""
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "tiny.yaml").write_text(TINY_DIGITS.replace("DEPTH: 1", "DEPTH: 2"))
    words = ("TRAIN.NUM_EPOCHS=1", "TRAIN.MODEL_EMA=true")
    run_program("-cfg", folder / "tiny.yaml", "-output", folder / "base", *words, streams=folder, code=0)
    return folder


def command(place: Path, run: Path) -> tuple[object, ...]:
    return ("-cfg", place / "tiny.yaml", "-pretrained", place / "base", "-output", run, "-resume", "auto", *TUNED)


def test_a_pattern_that_matches_no_weight_is_refused_before_the_start(place: Path) -> None:
    with pytest.raises(UserError, match=r"MODEL\.FREEZE: 'blocks\.3\.\*' matches no weight"):
        check(load_config(str(place / "tiny.yaml"), words={"MODEL.FREEZE": "blocks.3.*"}).config)


@pytest.mark.slow
def test_sharded_fine_tuning_equals_one_process_and_may_be_thawed(vitamp: Vitamp, place: Path, tmp_path: Path) -> None:
    words = ("-batch_size", 16, "TRAIN.MODEL_EMA=true", "REPORT_FREQ=1")
    vitamp(*command(place, tmp_path / "one"), *words, "TRAIN.MAX_UPDATES=20", "-accum_iter", 2, code=0)
    sharded = (*command(place, tmp_path / "two"), *words, "-ngpus", 2, "DIST.STRATEGY=fsdp")
    vitamp(*sharded, "TRAIN.MAX_UPDATES=20", script="main_multi_gpu.py", code=0)
    alone, both = ([line["loss"] for line in metrics(tmp_path / name, "train")] for name in ("one", "two"))
    assert both == pytest.approx(alone, rel=1e-5)
    thawed = vitamp(*sharded, "MODEL.FREEZE=null", "TRAIN.MAX_UPDATES=25", script="main_multi_gpu.py", code=0)
    assert "trained from now on (MODEL.FREEZE): 16 tensors" in thawed.out
