"""Links by which training and validation share images are reported at the start of a run, and by check_data.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import Result, save_image
from utils.text import counted

RECIPE = """\
DATA: {{DATASET: imagefolder, DATA_PATH: {path}, IMAGE_SIZE: 8, BATCH_SIZE: 4, NUM_WORKERS: 0}}
MODEL: {{NAME: tiny, NUM_CLASSES: 2, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}}
TRAIN: {{NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, MAX_UPDATES: 1}}
THREADS: 1
DEVICE: cpu
"""


def images(root: Path, numbers: range) -> None:
    for number in numbers:
        save_image(root / "ab"[number % 2] / f"{number}.jpg", number, (12, 12))


@pytest.mark.parametrize(
    ("kind", "links", "shared"), [("file", 1, 1), ("class", 1, 4), ("unsplit", 8, 8), ("own", 1, 0)]
)
def test_links_into_the_other_split_are_counted(
    vitamp: Callable[..., Result], tmp_path: Path, kind: str, links: int, shared: int
) -> None:
    root = tmp_path / "set"
    images(root if kind == "unsplit" else root / "train", range(8))
    if kind == "unsplit":  # each image is there twice; half of them validate
        for number in range(8):
            (root / "ab"[number % 2] / f"link{number}.jpg").symlink_to(f"{number}.jpg")
    else:
        images(root / "val", range(8, 12))
    if kind == "file":
        (root / "val" / "a" / "x.jpg").symlink_to(root / "train" / "a" / "0.jpg")
    elif kind == "class":
        for file in (root / "val" / "b").iterdir():
            file.unlink()
        (root / "val" / "b").rmdir()
        (root / "val" / "b").symlink_to(root / "train" / "b")
    elif kind == "own":
        (root / "train" / "a" / "x.jpg").symlink_to(root / "train" / "a" / "0.jpg")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(path=root))
    words = ("-cfg", tmp_path / "recipe.yaml", *(("DATA.VAL_FRACTION=0.5",) if kind == "unsplit" else ()))
    done = vitamp(*words, "-output", tmp_path / "run")
    assert done.code == 0, done.text
    checked = vitamp(*words, script="scripts/check_data.py")
    for text in (done.text, checked.text):
        if not shared:
            assert "validation images are the same files" not in text
        elif kind == "unsplit":
            assert f"Because of {counted(links, 'link')}, " in text
        else:
            assert f"Because of {counted(links, 'link')}, {shared} of " in text
            assert f"is {root}/train/" in text
