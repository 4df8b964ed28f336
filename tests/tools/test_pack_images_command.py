"""Packing and training as commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.program import Result, metrics, save_image


def test_training_reads_what_the_command_packed(tmp_path: Path, tiny: Path, vitamp: Callable[..., Result]) -> None:
    for k in range(12):
        save_image(tmp_path / "src" / ("val" if k > 7 else "train") / "ab"[k % 2] / f"{k}.jpg", k)
    words = ("-dataset=imagefolder", tmp_path / "src", tmp_path / "dst", "-short_side=20")
    done = vitamp(*words, script="scripts/pack_images.py")
    assert done.code == 0, done.text
    assert f"Train with: -dataset shards -data_path {tmp_path / 'dst'}" in done.out
    words = ("-dataset", "shards", "-data_path", tmp_path / "dst", "-num_classes", 2, "-batch_size", 4)
    done = vitamp("-cfg", tiny, *words, "-output", tmp_path / "run", "TRAIN.NUM_EPOCHS=1", "-num_workers", 1)
    assert done.code == 0, done.text
    assert metrics(tmp_path / "run", "val")
    assert "-short_side N" in vitamp("-h", script="scripts/pack_images.py").out
