"""Batch norm's statistics that differ between processes: those of rank 0 are validated and saved."""

from pathlib import Path

import pytest

from tests.program import Vitamp, metrics

# Loaded by every Python that has its folder in PYTHONPATH: one rank's images give infinite statistics.
INFINITE_ON = """
import os
if os.environ.get("RANK") == "{rank}":
    import torch
    forward = torch.nn.BatchNorm2d.forward
    def spoiling(self, images):
        output = forward(self, images)
        if self.training:
            self.running_var.data.fill_(float("inf"))
        return output
    torch.nn.BatchNorm2d.forward = spoiling
"""
SIZES = [f"MODEL.{name}=null" for name in ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS")]
RESNET = [
    *("-dataset", "synthetic", "-ngpus", 2, "MODEL.TYPE=other", *SIZES, "MODEL.NAME=resnet10t"),
    *("DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3", "-batch_size", 4, "TRAIN.NUM_EPOCHS=1"),
]


@pytest.mark.slow
def test_ema_is_validated_as_it_is_saved(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """Two processes have seen other images each; one process then finds the same metrics in what they saved."""
    words = ("TRAIN.BASE_LR=0.1", "DATA.SYNTHETIC_TRAIN=32", "DATA.SYNTHETIC_VAL=32", "TRAIN.MODEL_EMA=true")
    where = ("-cfg", tiny, "-output", tmp_path / "run")
    done = vitamp(*where, *RESNET, *words, script="main_multi_gpu.py", code=0)
    assert "Batch norm: each process normalises its own images (4 per process and micro-batch)" in done.text
    (wanted,) = metrics(tmp_path / "run", "val")
    vitamp("-eval", "-resume", tmp_path / "run", "-output", tmp_path / "eval", code=0)
    (found,) = metrics(tmp_path / "eval", "val")
    for key in ("loss", "ema_loss"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_infinite_statistics_end_all_ranks_or_none(vitamp: Vitamp, tiny: Path, tmp_path: Path, rank: int) -> None:
    """Rank 0's are saved, so all ranks end with the same error. Rank 1's are not, so all go on."""
    (tmp_path / "sitecustomize.py").write_text(INFINITE_ON.format(rank=rank))
    done = vitamp(
        *("-cfg", tiny, "-output", tmp_path / "run", *RESNET, "SAVE_EVERY_UPDATES=1", "REPORT_FREQ=1"),
        *("DATA.SYNTHETIC_TRAIN=24", "DATA.SYNTHETIC_VAL=8"),
        script="main_multi_gpu.py",
        env={"PYTHONPATH": str(tmp_path)},
    )
    logs = [(tmp_path / "run" / name).read_text() for name in ("log.txt", "ranks/1.log")]
    failed = ["update 1: the weights contain NaN or infinity" in log for log in logs]
    assert failed == [rank == 0] * 2, done.text
    assert done.code == int(rank == 0), done.text
    updates = [line["update"] for line in metrics(tmp_path / "run", "train")]
    assert updates == ([1] if rank == 0 else [1, 2, 3])
