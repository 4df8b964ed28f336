"""A run of an earlier version keeps the images that it trained and validated on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import Result, change_settings, metrics, save_image

RECIPE = """\
DATA: {{DATASET: imagefolder, DATA_PATH: {path}, IMAGE_SIZE: 8, BATCH_SIZE: 4, NUM_WORKERS: 0, LISTING: 1}}
MODEL: {{NAME: tiny, NUM_CLASSES: 2, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}}
TRAIN: {{NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 2e-3}}
THREADS: 1
DEVICE: cpu
"""


@pytest.mark.slow
def test_older_run_resumes_within_an_epoch_with_its_own_images(vitamp: Callable[..., Result], tmp_path: Path) -> None:
    """It validated on test/ although valid/ is there, and trained on an image in a hidden folder."""
    for split, each in (("train", 8), ("valid", 2), ("test", 3)):
        for number in range(each * 2):
            save_image(tmp_path / "set" / split / "ab"[number % 2] / f"{number}.jpg", number, (12, 12))
    save_image(tmp_path / "set" / "train" / "a" / ".ipynb_checkpoints" / "0.jpg", 0, (12, 12))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(path=tmp_path / "set"))
    for name in ("whole", "older"):
        more = ("TRAIN.MAX_UPDATES=2", "SAVE_EVERY_UPDATES=2") if name == "older" else ()
        done = vitamp("-cfg", tmp_path / "recipe.yaml", "-output", tmp_path / name, *more)
        assert done.code == 0, done.text
        assert "17 training and 6 validation images" in done.text
    change_settings(tmp_path / "older", {}, without="DATA.LISTING")
    done = vitamp(
        *("-eval", "-cfg", tmp_path / "older" / "config.yaml", "-pretrained", tmp_path / "older"),
        *("-output", tmp_path / "eval-pretrained"),
    )
    assert "test split: 6 images" in done.text
    done = vitamp("-resume", tmp_path / "older", "TRAIN.MAX_UPDATES=null")
    assert done.code == 0, done.text
    assert "17 training and 6 validation images" in done.text
    assert "keeps the defaults it started with, although they have changed since: DATA.LISTING 1 (2 now)" in done.text
    assert "  changed since: DATA.LISTING" not in done.text
    assert metrics(tmp_path / "older", "val")[-1] == metrics(tmp_path / "whole", "val")[-1]
    change_settings(tmp_path / "older", {}, without="DATA.LISTING")
    done = vitamp("-eval", "-resume", tmp_path / "older", "-output", tmp_path / "eval")
    assert done.code == 0, done.text
    assert "test split: 6 images" in done.text
    evaluated = vitamp(tmp_path / "older", script="scripts/evaluate.py")
    assert "test split: 6 images" in evaluated.out
    new = vitamp("-cfg", tmp_path / "recipe.yaml", "-output", tmp_path / "new", "DATA.LISTING=2")
    assert "16 training and 4 validation images" in new.text
