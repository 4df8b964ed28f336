"""Defaults of a run: those of its family, and the scaled learning rate."""

from pathlib import Path

import pytest

from tests.program import Vitamp, metrics

SWIN = """\
DATA: {DATASET: synthetic, SYNTHETIC_TRAIN: 16, SYNTHETIC_VAL: 8, IMAGE_SIZE: 32, BATCH_SIZE: 8, NUM_WORKERS: 0}
MODEL:
  TYPE: swin
  NAME: a_swin
  NUM_CLASSES: 4
  PATCH_SIZE: 2
  WINDOW_SIZE: 4
  EMBED_DIM: 8
  STAGE_DEPTHS: [1, 1]
  NUM_HEADS: [2, 2]
TRAIN: {NUM_EPOCHS: 2}
DEVICE: cpu
THREADS: 1
"""


@pytest.fixture
def swin(tmp_path: Path) -> Path:
    path = tmp_path / "swin.yaml"
    path.write_text(SWIN)
    return path


def test_run_uses_and_logs_the_defaults_of_its_family(vitamp: Vitamp, swin: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", swin, "-output", tmp_path / "run", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=1", code=0)
    assert "defaults of this family: " in done.text
    rate = "learning rate 7.81e-06 = BASE_LR 0.0005 x global batch 8 / LINEAR_SCALED_LR 512"
    assert rate in done.text
    assert "weight decay 0.05; gradient norm at most 5" in done.text
    assert metrics(tmp_path / "run", "train")[0]["lr"] == pytest.approx(7.8125e-6)
    assert "swin)" in vitamp("-cfg", swin, "-print_config").out


def test_scaled_learning_rate_is_logged_with_its_formula(vitamp: Vitamp, swin: Path) -> None:
    done = vitamp("-cfg", swin, "-dry_run", "TRAIN.BASE_LR=1e-3", "-batch_size", 4, "-accum_iter", 2, code=0)
    assert "learning rate 1.56e-05 = BASE_LR 0.001 x global batch 8 / LINEAR_SCALED_LR 512" in done.text
    assert "TRAIN.BASE_LR 0.001 (command line): multiplied by (global batch / 512)" in done.err
    done = vitamp("-cfg", swin, "-dry_run", "TRAIN.BASE_LR=1e-3", "TRAIN.LINEAR_SCALED_LR=null")
    assert "learning rate 0.001 after" in done.text
    assert "multiplied" not in done.text
