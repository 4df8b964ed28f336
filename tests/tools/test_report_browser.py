"""The report in a browser: wide and narrow, light and dark."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from tests.program import Result, run_program, save_image
from tests.tools.browser import View, views_of
from tests.tools.made_runs import MISCHIEF
from tools.common.report_page.page import write_report

CLASSES = ("<script>alert(1)<", "'single' & \"double\"", "x" * 60)


def trained(folder: Path) -> Path:
    """A run on images whose classes have malicious names."""
    for part, count in (("train", 4), ("val", 3)):
        for label, name in enumerate(CLASSES):
            for number in range(count):
                save_image(folder / "images" / part / name / f"{number}.png", seed=10 * number + label)
    recipe = folder / "tiny.yaml"
    recipe.write_text(
        "DATA: {DATASET: imagefolder, IMAGE_SIZE: 16, BATCH_SIZE: 4, NUM_WORKERS: 0}\n"
        "MODEL: {TYPE: vit, NAME: tiny, NUM_CLASSES: 3, PATCH_SIZE: 8, EMBED_DIM: 16, NUM_HEADS: 2, DEPTH: 1}\n"
        "TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 0}\n"
        "REPORT_FREQ: 1\n"
    )
    words = "-cfg", recipe, "-data_path", folder / "images", "-output", folder / 'run\'s "folder"', f"TAG={MISCHIEF}"
    done: Result = run_program(*words, streams=folder)
    assert done.code == 0, done.text
    return folder / 'run\'s "folder"'


def brightness(view: View) -> float:
    return float(np.asarray(Image.open(io.BytesIO(view.picture)).convert("L")).mean())


def test_page_renders_in_a_browser(tmp_path: Path) -> None:
    page = write_report([trained(tmp_path)])
    views = [View(width, dark) for width in (1280, 360) for dark in (False, True)]
    for view in views_of(page, tmp_path, views):
        assert not view.complaints
        assert view.requests == [page.resolve().as_uri()], "only the page is loaded"
        assert view.dialogs == 0
        assert view.page_width <= view.width, "the page itself never scrolls sideways"
        for name in (*CLASSES, MISCHIEF, 'run\'s "folder"'):
            assert name in view.text, "names are shown unchanged"
        assert (brightness(view) < 80) == view.dark
        assert (brightness(view) > 180) != view.dark
