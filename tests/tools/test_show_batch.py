"""scripts/show_batch.py draws the images that training sees."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.engine.small import build, windows
from tests.program import Vitamp
from tools.show_batch.command import main
from tools.show_batch.picture import Shown, draw, first_images
from utils.config import load_config

MIXED = {"TRAIN.MIXUP_ALPHA": "0.8", "TRAIN.MIXUP_MODE": "elem"}


def images(cfg: Path, count: int, **words: str) -> list[Shown]:
    return first_images(load_config(str(cfg), words=words).config, count)


def test_images_are_those_of_the_first_updates(tiny: Path) -> None:
    """Bit for bit the loaded pixels, across two micro-batches."""
    ready = build(tiny)
    first, second = (next(iter(window))[1] for window, _ in zip(windows(ready), range(2), strict=False))
    shown = images(tiny, 40)
    assert len(shown) == 40
    for one, pixels, label in zip(
        shown, [*first.images, *second.images], [*first.labels, *second.labels], strict=False
    ):
        assert np.array_equal(one.pixels, pixels.permute(1, 2, 0).numpy())
        assert one.labels == ((str(int(label)), 1.0),)
    growing = {"TRAIN.NUM_EPOCHS": "auto", "TRAIN.SIZE_SCHEDULE": "[[0, 4], [0.5, 8]]"}
    assert images(tiny, 1, **growing)[0].pixels.shape == (4, 4, 1)


def test_mixed_images_have_both_labels_with_fractions(tiny: Path) -> None:
    plain, mixed = images(tiny, 32), images(tiny, 32, **MIXED)
    assert not any(np.array_equal(one.pixels, two.pixels) for one, two in zip(plain[:4], mixed[:4], strict=True))
    two_labels = [one for one in mixed if len(one.labels) == 2]
    assert len(two_labels) > 10
    for row, one in enumerate(mixed):
        assert sum(share for _, share in one.labels) == pytest.approx(1, abs=0.01)
        assert one.labels[0][1] >= 0.5
        assert {name for name, _ in one.labels} <= {plain[row].labels[0][0], plain[31 - row].labels[0][0]}


def test_random_erasing_is_visible(tiny: Path) -> None:
    plain = images(tiny, 8)
    erased = images(tiny, 8, **{"TRAIN.RANDOM_ERASE_PROB": "1.0", "TRAIN.RANDOM_ERASE_MODE": "const"})
    for one, two in zip(plain, erased, strict=True):
        changed = two.pixels[one.pixels != two.pixels]
        assert set(changed.tolist()) <= {127, 128}, "a normalised 0 is the mean"
    assert sum(not np.array_equal(one.pixels, two.pixels) for one, two in zip(plain, erased, strict=True)) >= 7
    half = {"TRAIN.RANDOM_ERASE_PROB": "1.0", "DATA.BATCH_SIZE": "4"}
    given, found = (
        images(tiny, 8, **half, **{"TRAIN.ACCUM_ITER": "2"}),
        images(tiny, 8, **half, **{"TRAIN.GLOBAL_BATCH": "8"}),
    )
    assert all(np.array_equal(one.pixels, two.pixels) for one, two in zip(given, found, strict=True))


@pytest.mark.parametrize(("count", "channels"), [(1, 1), (5, 3)])
def test_picture_holds_any_number_of_images(tiny: Path, tmp_path: Path, count: int, channels: int) -> None:
    config = load_config(str(tiny)).config
    shown = [Shown(np.zeros((8, 8, channels), np.uint8), (("$10_$20", 0.7), ("gr\udcfcn", 0.3)))] * count
    draw(tmp_path / "sheet.png", config, shown)
    with Image.open(tmp_path / "sheet.png") as picture:
        assert min(picture.size) > 100


def test_command_writes_a_picture(imagenet: Path, tmp_path: Path, vitamp: Vitamp) -> None:
    out = tmp_path / "seen.png"
    recipe = ("-cfg", "configs/deit_tiny_patch16_224.yaml", "-data_path", imagenet, "-image_size", 32)
    words = ("-batch_size", 8, "-device", "cpu", "-num_workers", 1, "-out", out, "-count", 12)
    done = vitamp(*recipe, *words, script="scripts/show_batch.py", code=0)
    assert f"12 images as the model sees them: {out}" in done.out
    with Image.open(out) as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-count", "0"], ["-count 0", "from 1 to 256"]),
        (["-out", "seen.jpg"], ["-out seen.jpg", "seen.png"]),
        (["-eval"], ["-eval", "shows training images"]),
        (["TRAIN.AUGMENT=trivail"], ["TRAIN.AUGMENT", "Did you mean trivial?"]),
    ],
    ids=lambda value: str(value[0]),
)
def test_bad_command_lines_are_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]
) -> None:
    assert main(["-cfg", str(tiny), *words]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in said), told
