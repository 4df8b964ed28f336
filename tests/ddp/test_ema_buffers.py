"""The EMA is validated with the batch norm's statistics that are saved with it, whatever the other processes have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import Result, metrics


@pytest.mark.slow
def test_ema_is_validated_as_it_is_saved(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    """Two processes have seen other images each; one process then finds the same metrics in what they saved."""
    sizes = [f"MODEL.{name}=null" for name in ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS")]
    done = vitamp(
        *("-cfg", tiny, "-dataset", "synthetic", "-output", tmp_path / "run", "-ngpus", 2, "MODEL.TYPE=other", *sizes),
        *("MODEL.NAME=resnet10t", "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3", "-batch_size", 4, "TRAIN.BASE_LR=0.1"),
        *("DATA.SYNTHETIC_TRAIN=32", "DATA.SYNTHETIC_VAL=32", "TRAIN.NUM_EPOCHS=1", "TRAIN.MODEL_EMA=true"),
        script="main_multi_gpu.py",
    )
    assert done.code == 0, done.text
    (wanted,) = metrics(tmp_path / "run", "val")
    done = vitamp("-eval", "-resume", tmp_path / "run", "-output", tmp_path / "eval")
    assert done.code == 0, done.text
    (found,) = metrics(tmp_path / "eval", "val")
    for key in ("loss", "ema_loss"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
