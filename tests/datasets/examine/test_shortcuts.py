"""Properties of the files that show the class are found, and no others are."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from datasets.examine.findings import Shortcut
from datasets.examine.headers import look_at_headers
from datasets.examine.shortcuts import find_shortcuts
from datasets.sources.files import FileSamples
from tests.datasets.pictures import picture
from tests.program import TINY_DIGITS, Result, Vitamp
from utils.config.data import DataConfig

FILE = Callable[[Image.Image, Path, int, bool], None]
"""Writes a picture, with a number, as that of the class that has the shortcut or of the other"""


def plain(image: Image.Image, path: Path, number: int, has: bool) -> None:
    """Without a shortcut, whatever the class"""
    del has
    image.save(path / f"{number}.jpg", quality=80)


def of_size(image: Image.Image, path: Path, number: int, has: bool) -> None:
    plain(image.resize((40, 40) if has else (40 + number % 9, 44)), path, number, has)


def of_format(image: Image.Image, path: Path, number: int, has: bool) -> None:
    image.save(path / f"{number}.{'png' if has else 'bmp'}")


def of_quality(image: Image.Image, path: Path, number: int, has: bool) -> None:
    image.save(path / f"{number}.jpg", quality=50 if has else 80)


def of_camera(image: Image.Image, path: Path, number: int, has: bool) -> None:
    exif = Image.Exif()
    exif[0x10F] = "Maker" if has else "Other"
    image.save(path / f"{number}.jpg", quality=80, exif=exif)


def of_name(image: Image.Image, path: Path, number: int, has: bool) -> None:
    image.save(path / (f"IMG_{number}.jpg" if has else f"{number}-{number}.jpg"), quality=80)


def of_marker(image: Image.Image, path: Path, number: int, has: bool) -> None:
    if has:
        ImageDraw.Draw(image).rectangle((2, 2, 7, 7), fill=(255, 255, 255), outline=(0, 0, 0))
    plain(image, path, number, has)


def of_blur(image: Image.Image, path: Path, number: int, has: bool) -> None:
    """What the image shows differs: smooth images take fewer bytes."""
    plain(image.filter(ImageFilter.GaussianBlur(6)) if has else image, path, number, has)


def split_of(folder: Path, write: FILE, count: int = 160, seed: int = 0) -> FileSamples:
    """A split of two classes, `other` and `marked`, in which `write` gives the images of `marked` a shortcut."""
    names = []
    for name in ("other", "marked"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        write(picture(48, 44, 1000 * seed + number), folder / ("other", "marked")[number % 2], number, number % 2 == 1)
    names = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))
    return FileSamples(folder, names, np.array([int(name.startswith("marked")) for name in names]), ["other", "marked"])


def found_in(train: FileSamples, validation: FileSamples) -> list[Shortcut]:
    data = DataConfig(CHECK="full")
    images = look_at_headers("training", train, data)
    return find_shortcuts(images, lambda: look_at_headers("validation", validation, data), float("inf"))


def words_in(sentence: str) -> int:
    return sum(word != "%" for word in sentence.split())


@pytest.mark.parametrize(
    ("write", "properties"),
    [
        (of_size, "size and shape"),
        (of_format, "format, colour mode and JPEG settings"),
        (of_quality, "format, colour mode and JPEG settings"),
        (of_camera, "camera and date (EXIF)"),
        (of_name, "file names without numbers"),
        (of_marker, "edges and corners"),
    ],
)
def test_each_kind_of_shortcut_is_found(tmp_path: Path, write: FILE, properties: str) -> None:
    train = split_of(tmp_path / "train", write)
    shortcuts = found_in(train, split_of(tmp_path / "val", write, 40, seed=1))
    first = shortcuts[0]
    for shortcut in shortcuts:
        sentence, on_validation = shortcut.sentence.split(". ")
        assert words_in(sentence) <= 35
        assert words_in(on_validation) <= 20
        assert on_validation.startswith("Validation has it too: without the picture, ")
    assert first.properties == properties
    assert first.fact in first.sentence
    assert first.interval is not None
    assert first.interval.low < next(iter(first.classes.values())) <= first.interval.high + 0.001
    having, of_class, others_having, others = first.fact_counts
    assert of_class == others == 80
    assert abs(having - others_having) >= 60
    assert first.mistaken <= 10
    assert {one.properties for one in shortcuts} <= {properties, "bytes per pixel"}
    assert first.classes["marked"] >= 90
    assert first.in_validation
    assert first.validation_top1 is not None
    assert first.validation_top1 >= 85
    assert first.nearly_all == first.of_file == (properties not in ("file names without numbers", "edges and corners"))
    # Only what is sure to be no property of the shown makes an accuracy too high.
    assert first.points == (first.validation_top1 - 50 if first.of_file else None)


def test_a_validation_split_without_the_shortcut_is_named(tmp_path: Path) -> None:
    train = split_of(tmp_path / "train", of_size)
    shortcut = found_in(train, split_of(tmp_path / "val", plain, 40, seed=1))[0]
    assert shortcut.sentence == (
        "marked: size and shape alone recognise 100 % (95 to 100 %) of its 80 training images, mistaking 0 % of "
        "others; size 40 x 40: 80 of these, 0 of 80 others. "
        "Validation does not have it, so accuracy there does not profit from it"
    )
    assert not shortcut.in_validation
    assert shortcut.points is None


def test_of_two_classes_that_for_which_fewer_are_mistaken_is_named(tmp_path: Path) -> None:
    def half_in_another_format(image: Image.Image, path: Path, number: int, has: bool) -> None:
        image.save(path / f"{number}.{'png' if has and number % 4 == 1 else 'bmp'}")

    train = split_of(tmp_path / "train", half_in_another_format)
    shortcut = found_in(train, train)[0]
    assert list(shortcut.classes) == ["marked", "other"]
    assert "recognise 50 % (39 to 61 %) of its 80 training images, mistaking 0 % of others" in shortcut.sentence
    assert shortcut.fact_counts in ([40, 80, 0, 80], [40, 80, 80, 80])


def test_bytes_of_smooth_images_may_be_what_they_show(tmp_path: Path) -> None:
    train = split_of(tmp_path / "train", of_blur)
    shortcuts = {one.properties: one for one in found_in(train, train)}
    assert shortcuts["bytes per pixel"].advice.startswith("This may be what the images show. ")
    assert not shortcuts["bytes per pixel"].nearly_all


def test_labels_by_chance_and_few_groups_tell_nothing(tmp_path: Path) -> None:
    train = split_of(tmp_path / "train", of_size)
    train.groups = ["first", "second", "third", "fourth"] * 40
    assert found_in(train, train) == [], "four groups"
    train.groups = [f"{label}, {number % 3}" for number, label in enumerate(train.labels.tolist())]
    assert found_in(train, train) == [], "three series of each class, which may each be of one size"
    train.groups = None
    assert found_in(train, train)
    train.labels = np.random.default_rng(0).permutation(train.labels)
    assert found_in(train, train) == []


def test_class_names_within_file_names_are_no_shortcut(tmp_path: Path) -> None:
    def named_by_class(image: Image.Image, path: Path, number: int, has: bool) -> None:
        image.save(path / f"{'glass' if has else 'papers'}{number}.jpg", quality=80)

    train = split_of(tmp_path / "train", named_by_class)
    assert [one.properties for one in found_in(train, train)] == ["file names without numbers"]
    train.classes = ["paper", "glass"]
    assert found_in(train, train) == []


def trained_with(write: FILE, folder: Path, vitamp: Vitamp, *words: str) -> Result:
    """Train for two updates on images with a shortcut in both splits."""
    split_of(folder / "data/train", write)
    split_of(folder / "data/val", write, 40, seed=1)
    recipe = folder / "tiny.yaml"
    recipe.write_text(TINY_DIGITS, encoding="utf-8")
    images = ("-dataset", "imagefolder", "-data_path", folder / "data", "-num_classes", "2", "DATA.IMAGE_CHANNELS=3")
    of_run = ("-output", folder / "run", "-batch_size", "8", "TRAIN.MAX_UPDATES=2")
    return vitamp("-cfg", recipe, *images, *of_run, *words, code=0)


def test_training_warns_in_one_line(tmp_path: Path, vitamp: Vitamp) -> None:
    done = trained_with(of_size, tmp_path, vitamp)
    (line,) = [line for line in done.err.splitlines() if "Recognised without the picture" in line]
    assert "Recognised without the picture" not in done.out
    assert "without the picture, size and shape alone recognise 100.0 % of the validation images" in done.out
    start = "Recognised without the picture, of 160 training images looked at: marked by size and shape (100 %)"
    assert start in line
    assert ": a model may know the files instead of the pictures. `" in line
    (first, *_) = json.loads((tmp_path / "run/data.json").read_text())["shortcuts"]
    assert first["properties"] == "size and shape"
    assert first["validation_interval"][0] < first["validation_top1"] <= first["validation_interval"][1]


def test_training_only_notes_what_may_be_shown(tmp_path: Path, vitamp: Vitamp) -> None:
    done = trained_with(of_marker, tmp_path, vitamp)
    assert "Recognised without the picture, of 160 training images looked at: marked by edges and corners (" in done.out
    assert "its accuracy cannot show" not in done.text
    assert "without the picture" not in done.err


def test_no_image_is_examined_without_a_check(tmp_path: Path, vitamp: Vitamp) -> None:
    done = trained_with(of_size, tmp_path, vitamp, "DATA.CHECK=off")
    assert "without the picture" not in done.text
