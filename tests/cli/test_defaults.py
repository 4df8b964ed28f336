"""Defaults of a run: those of its family, the scaled learning rate, and those that a resumed run keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import Result, change_settings, metrics
from utils.config import load_config

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
OLD = {"BASE_LR": "0.003", "WEIGHT_DECAY": "0.3", "LINEAR_SCALED_LR": "null", "GRAD_CLIP": "null", "END_LR": "0.0"}
AUGMENTED = ("SMOOTHING", "MIXUP_ALPHA", "CUTMIX_ALPHA", "RANDOM_ERASE_PROB", "COLOR_JITTER")
Vitamp = Callable[..., Result]


@pytest.fixture
def swin(tmp_path: Path) -> Path:
    path = tmp_path / "swin.yaml"
    path.write_text(SWIN)
    return path


def test_run_uses_and_logs_the_defaults_of_its_family(vitamp: Vitamp, swin: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", swin, "-output", tmp_path / "run", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=1")
    assert done.code == 0, done.text
    assert "defaults of this family: " in done.text
    rate = "learning rate 7.81e-06 = BASE_LR 0.0005 x global batch 8 / LINEAR_SCALED_LR 512"
    assert rate in done.text
    assert "weight decay 0.05; gradient norm at most 5" in done.text
    assert metrics(tmp_path / "run", "train")[0]["lr"] == pytest.approx(7.8125e-6)
    assert "swin)" in vitamp("-cfg", swin, "-print_config").out


def test_unknown_type_is_refused(vitamp: Vitamp, swin: Path) -> None:
    done = vitamp("-cfg", swin, "MODEL.TYPE=swinn")
    assert done.code == 2
    said = "MODEL.TYPE: 'swinn' cannot be built from sizes (MODEL.EMBED_DIM, ...); only vit, deit, swin, mae can: "
    assert f"{said}set TYPE to one of them. Did you mean swin?" in done.text


def test_scaled_learning_rate_is_logged_with_its_formula(vitamp: Vitamp, swin: Path) -> None:
    done = vitamp("-cfg", swin, "-dry_run", "TRAIN.BASE_LR=1e-3", "-batch_size", 4, "-accum_iter", 2)
    assert done.code == 0, done.text
    assert "learning rate 1.56e-05 = BASE_LR 0.001 x global batch 8 / LINEAR_SCALED_LR 512" in done.text
    assert "TRAIN.BASE_LR 0.001 (command line): multiplied by (global batch / 512)" in done.err
    done = vitamp("-cfg", swin, "-dry_run", "TRAIN.BASE_LR=1e-3", "TRAIN.LINEAR_SCALED_LR=null")
    assert "learning rate 0.001 after" in done.text
    assert "multiplied" not in done.text


def as_begun_earlier(run: Path) -> None:
    """Change the run to one of an earlier version: equal defaults for all families, values for the optimiser."""
    text = (run / "config.yaml").read_text()
    text = text.replace("EPS: null", "EPS: 1.0e-08").replace("BETAS: null", "BETAS: [0.9, 0.999]")
    (run / "config.yaml").write_text(text.replace("MOMENTUM: null", "MOMENTUM: 0.9"))
    optimizer = {"EPS": 1e-8, "BETAS": [0.9, 0.999], "MOMENTUM": 0.9}
    change_settings(run, {f"TRAIN.OPTIMIZER.{key}": value for key, value in optimizer.items()})


@pytest.mark.parametrize("what", ["run", "checkpoint"])
def test_resumed_run_keeps_the_defaults_it_started_with(vitamp: Vitamp, swin: Path, tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    words = [*(f"TRAIN.{key}={value}" for key, value in OLD.items()), *(f"TRAIN.{key}=0" for key in AUGMENTED)]
    more = ("TRAIN.RAND_AUGMENT=false", "TRAIN.OPTIMIZER.NAME=AdaBelief", "SAVE_FREQ=1")
    first = vitamp("-cfg", swin, "-output", run, *words, *more, "TRAIN.WARMUP_EPOCHS=0", "TRAIN.MAX_UPDATES=2")
    assert first.code == 0, first.text
    as_begun_earlier(run)
    place = run if what == "run" else next(run.glob("checkpoints/step-*"))
    done = vitamp(
        *("-cfg", swin, "-resume", place, "-output", run, "TRAIN.OPTIMIZER.NAME=AdaBelief", "TRAIN.WARMUP_EPOCHS=0"),
        "TRAIN.WEIGHT_DECAY=0.1",
    )
    assert done.code == 0, done.text
    kept = load_config(str(run / "config.yaml")).config.TRAIN
    assert (kept.BASE_LR, kept.LINEAR_SCALED_LR, kept.GRAD_CLIP, kept.MIXUP_ALPHA) == (0.003, None, None, 0)
    assert (kept.OPTIMIZER.EPS, kept.OPTIMIZER.BETAS) == (1e-8, (0.9, 0.999))
    assert kept.WEIGHT_DECAY == 0.1, "a value that is set now overrides it"
    (line,) = [line for line in done.text.splitlines() if "keeps the defaults it started with" in line]
    assert "TRAIN.BASE_LR 0.003 (0.0005 now)" in line
    assert "TRAIN.OPTIMIZER.EPS 1.0e-08 (null now)" in line
    assert "WEIGHT_DECAY" not in line
    changed = [
        line
        for line in done.text.splitlines()
        if "changed since: TRAIN" in line and "defaults it started with" not in line
    ]
    assert [line.split("TRAIN.")[1].split(":")[0] for line in changed] == ["WEIGHT_DECAY", "MAX_UPDATES"]


def test_resumed_run_without_cfg_keeps_all_settings(vitamp: Vitamp, swin: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert vitamp("-cfg", swin, "-output", run, "TRAIN.OPTIMIZER.NAME=AdaBelief").code == 0
    as_begun_earlier(run)
    done = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=3")
    assert done.code == 0, done.text
    assert "AdaBelief (betas 0.9 and 0.999, eps 1e-08)" in done.text


@pytest.mark.parametrize("saved", [25, 32])
def test_resumed_run_keeps_a_default_warmup_longer_than_itself(
    vitamp: Vitamp, swin: Path, tmp_path: Path, saved: int
) -> None:
    """The default was 32, saved as 25 by an earlier version; the family's default of today, 20, is not used."""
    run, length = tmp_path / "run", f"TRAIN.WARMUP_EPOCHS={saved}"
    first = vitamp("-cfg", swin, "-output", run, "TRAIN.NUM_EPOCHS=25", length, "TRAIN.MAX_UPDATES=2")
    assert first.code == 0, first.text
    words = ("TRAIN.NUM_EPOCHS=25", "TRAIN.MAX_UPDATES=3")
    done = vitamp("-cfg", swin, "-output", run, "-resume", "auto", *words)
    assert done.code == 0, done.text
    assert "TRAIN.WARMUP_EPOCHS 32 is more than TRAIN.NUM_EPOCHS 25: clipped to 25" in done.text
    assert "after 25 epochs of warm-up" in done.text
    assert load_config(str(run / "config.yaml")).config.TRAIN.WARMUP_EPOCHS == 32
