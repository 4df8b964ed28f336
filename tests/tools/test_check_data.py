"""scripts/check_data.py reports planted defects and nothing else."""

import csv
import io
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont
from safetensors.torch import save_file

from datasets.base import Samples
from datasets.examine.copies import find_copies
from datasets.sources.files import FileSamples
from tests.datasets.pictures import picture
from tests.datasets.shards.tar_files import write_tar
from tests.program import Result, Vitamp, save_image
from tools.check_data.command import fractions
from tools.check_data.near import MOST_BITS, SIDE, Thumbnails, near_pairs
from tools.check_data.scan import scan_split
from utils.config.data import DataConfig
from utils.errors import TrainingError

SCRIPT = "scripts/check_data.py"
CLASSES = ("ant", "bee", "cat")
OF_SHARDS = ("crane (label 0)", "bee", "crane (label 2)")
Check = Callable[..., tuple[Result, dict[str, Any]]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Class folders of 24 + 6 good images."""
    root = tmp_path / "data"
    for part, count in (("train", 24), ("val", 6)):
        for number in range(count):
            save_image(root / part / CLASSES[number % 3] / f"{number}.jpg", number + 100 * len(part))
    return root


@pytest.fixture
def check(vitamp: Vitamp, tmp_path: Path) -> Check:
    """Run the check, which ends with `code`: its result and the content of its -json file."""

    def call(root: Path, *words: object, dataset: str = "imagefolder", code: int = 0) -> tuple[Result, dict[str, Any]]:
        found = tmp_path / "found.json"
        found.unlink(missing_ok=True)
        done = vitamp(
            *("-dataset", dataset, "-data_path", root, "-num_classes", 3, "-image_size", 32, "-num_workers", 2),
            *("-json", found, *words),
            script=SCRIPT,
            code=code,
        )
        return done, json.loads(found.read_text()) if found.exists() else {}

    return call


def lines_of(listed: Path) -> set[str]:
    return {line.split("  # ")[0] for line in listed.read_text().splitlines()[1:]}


def names(found: list[dict[str, str]]) -> list[str]:
    return ["/".join(Path(one["name"]).parts[-3:]) for one in found]


def test_damaged_jpeg_files_that_pil_reads_are_defects(check: Check, tree: Path, tmp_path: Path) -> None:
    """A lost third behind which the end marker stands, and noise: PIL shows grey or wrong pixels, and says nothing."""
    train, listed = tree / "train", tmp_path / "exclude.txt"
    damaged: list[str] = []
    kinds: list[dict[str, Any]] = [{}, {"progressive": True}, {"restart_marker_rows": 1}]
    for number, how in enumerate(kinds):
        lost, noisy = (train / "ant" / f"{name}{number}.jpg" for name in ("lost", "noisy"))
        for seed, path in enumerate((lost, noisy)):
            save_image(path, 500 + 2 * number + seed, size=(160, 120))
            Image.open(path).save(path, **how)
        whole = lost.read_bytes()
        lost.write_bytes(whole[: len(whole) * 7 // 10] + b"\xff\xd9")
        whole = bytearray(noisy.read_bytes())
        part = len(whole) // 10
        whole[-part - 2 : -2] = np.random.default_rng(number).integers(0, 255, part, dtype=np.uint8).tobytes()
        noisy.write_bytes(whole)
        for path in (lost, noisy):
            Image.open(path).load()  # PIL does not complain
        damaged += [f"train/ant/{path.name}" for path in (lost, noisy)]
    done, found = check(tree, "-fix", listed, code=1)
    assert "DEFECT: damaged, although they can be read: 6" in done.out
    assert sorted(names(found["defects"]["damaged_but_readable"])) == sorted(damaged)
    assert not found["defects"].get("unreadable")
    assert len([line for line in listed.read_text().splitlines() if not line.startswith("#")]) == 6


def test_each_planted_defect_is_reported_and_nothing_else(check: Check, tree: Path, tmp_path: Path) -> None:
    train, val, listed = tree / "train", tree / "val", tmp_path / "exclude.txt"
    (train / "ant" / "0.jpg").write_bytes(b"")
    (train / "bee" / "1.jpg").write_text("<html>404 not found</html>")
    whole = (train / "cat" / "2.jpg").read_bytes()
    (train / "cat" / "2.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    (val / "cat" / "2.jpg").write_bytes(b"\xff\xd8\xff\xe0garbage")
    Image.new("1", (30_000, 30_000)).save(train / "ant" / "bomb.png")
    (train / "ant" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (train / "ant" / "lost.jpg").symlink_to("/proc/self/mem")  # reading it is a storage error
    shutil.copy(train / "ant" / "3.jpg", train / "ant" / "copy.jpg")
    for copy in (train / "bee" / "wrong.jpg", train / "ant" / "again.jpg", val / "cat" / "copy.jpg"):
        shutil.copy(train / "ant" / "6.jpg", copy)
    shutil.copy(train / "bee" / "4.jpg", val / "bee" / "shown.jpg")
    save_image(train / "cat" / "small.jpg", 7777, size=(31, 50))
    odd = {"CMYK": "cmyk.jpg", "RGBA": "rgba.png", "P": "p.png", "I;16": "deep.png", "L": "l.png"}
    for mode, name in odd.items():
        Image.new(mode, (40, 40), 1).save(train / "cat" / name)

    done, found = check(tree, "-fix", listed, code=1)
    header, row = re.search(r"Images per class, 3 of 3 classes:\n(.*)\n(.*)\n", done.out).groups()  # pyright: ignore
    assert header.split() == ["training", "validation", "class"]
    assert header.index("class") == row.index(row.split()[-1]), "headings are above their columns"
    defects, notes = found["defects"], found["notes"]
    kinds = dict(zip(names(defects["unreadable"]), (one["kind"] for one in defects["unreadable"]), strict=True))
    assert kinds == {
        "train/ant/0.jpg": "empty",
        "train/ant/bomb.png": "too large",
        "train/ant/gone.jpg": "missing",
        "train/ant/lost.jpg": "storage",
        "train/bee/1.jpg": "no image",
        "train/cat/2.jpg": "damaged",
        "val/cat/2.jpg": "damaged",
    }
    assert names(defects["duplicate"]) == ["train/ant/copy.jpg"]
    conflicts = ["train/ant/6.jpg", "train/ant/again.jpg", "train/bee/wrong.jpg", "val/cat/copy.jpg"]
    assert names(defects["conflicting_labels"]) == conflicts
    assert "but ant instead of bee" in defects["conflicting_labels"][0]["about"]
    assert "3 training images: copies with different labels, of which none is known to be right" in done.out
    assert names(defects["in_both_parts"]) == ["train/bee/4.jpg"]
    assert defects["empty_classes"] == []
    assert not defects.get("label_out_of_range")
    assert dict(zip(names(notes["not_plain"]), (one["about"] for one in notes["not_plain"]), strict=True)) == {
        "train/cat/cmyk.jpg": "CMYK",
        "train/cat/deep.png": "16 bits and more",
        "train/cat/l.png": "grey",
        "train/cat/p.png": "palette",
        "train/cat/rgba.png": "transparent",
    }
    assert names(notes["smaller_than_image_size"]) == ["train/cat/small.jpg"]
    for name in [*list(kinds)[:5], "train/ant/copy.jpg", "train/bee/wrong.jpg", "train/cat/small.jpg"]:
        assert name in done.out
    assert "because of storage errors: 1. Check again when the storage is back" in done.err

    # The list has what was asked for; without it the data is clean. A copy in validation stays, so that results on it
    # remain comparable.
    (train / "ant" / "lost.jpg").unlink()
    kinds["# train/ant/lost.jpg"] = kinds.pop("train/ant/lost.jpg")
    assert lines_of(listed) == {*kinds, "train/ant/copy.jpg", "train/bee/4.jpg", *conflicts[:3]}
    check(tree, f"DATA.EXCLUDE={listed}", "-fix", listed, "-overwrite")
    assert len(listed.read_text().splitlines()) == 2 + len(kinds) + 5, "earlier lines stay"


def test_the_odd_ones_among_photographs_are_named(check: Check, tree: Path, vitamp: Vitamp) -> None:
    ant = tree / "train" / "ant"
    for number in range(90):
        shutil.copy(ant / "0.jpg", ant / f"copy{number}.jpg")
    assert not {"in_another_format", "to_be_turned", "much_larger"} & check(tree, code=1)[1]["notes"].keys()
    Image.new("P", (40, 40), 1).save(ant / "missing.gif")
    exif = Image.Exif()
    exif[0x112] = 6
    save_image(ant / "camera.jpg", 8000, size=(320, 320))
    Image.open(ant / "camera.jpg").save(ant / "camera.jpg", exif=exif)
    done, found = check(tree, code=1)
    turned = "to be turned by their EXIF data, but read as they are stored; DATA.EXIF_ROTATE=true turns them"
    assert f"note: {turned}:\n    train/ant/camera.jpg: 320 x 320\n" in done.out
    assert "at least 4 times as large as most others:\n    train/ant/camera.jpg: 320 x 320\n" in done.out
    assert names(found["notes"]["to_be_turned"]) == names(found["notes"]["much_larger"]) == ["train/ant/camera.jpg"]
    assert "to_be_turned" not in check(tree, "DATA.EXIF_ROTATE=true", code=1)[1]["notes"]
    said = "note: perhaps placeholders: in another format than nearly all others:"
    assert f"{said} 1\n" in done.out
    assert "Look at 1 image in another format: perhaps placeholders." in done.out.splitlines()[-1]
    assert f"{said}\n    train/ant/missing.gif: GIF\n" in done.out
    assert names(found["notes"]["in_another_format"]) == ["train/ant/missing.gif"]
    words = ("-cfg", "vit_digits", "-dataset", "imagefolder", "-data_path", tree, "-num_classes", 3, "-dry_run")
    note = f"Perhaps placeholders, in another format than the others of 116 training images: {ant}/missing.gif (GIF).\n"
    assert note in vitamp(*words, "DATA.IMAGE_CHANNELS=3", code=0).out


def test_colours_that_tell_a_class_or_that_a_split_lacks_are_named(check: Check, tree: Path) -> None:
    for number in range(20):
        save_image(tree / "train/ant" / f"grey{number}.jpg", 1000 + number)
        Image.open(tree / "train/ant" / f"grey{number}.jpg").convert("L").save(tree / "train/ant" / f"grey{number}.jpg")
    for number in range(12):
        save_image(tree / "val/bee" / f"more{number}.jpg", 2000 + number)
    done, found = check(tree)
    said = "note: properties (format, colours, size) that a split lacks, perhaps of another source: 1\n"
    assert said in done.out
    assert found["notes"]["of_another_source"] == ["colours grey: none of 20 images in validation, where chance puts 6"]
    (told,) = found["notes"]["perhaps_shortcuts"]
    said = "ant: format, colour mode and JPEG settings alone recognise 71 % (53 to 85 %) of its 28 training images, "
    assert told.startswith(said)
    assert re.search("; colours (grey: 20 of these, 0 of 16 others|RGB: 8 of these, 16 of 16 others)", told)
    assert "note: classes partly recognised without the picture, or by a simple property of it: 1\n" in done.out


def test_a_format_of_few_images_is_not_compared_with_classes(check: Check, tree: Path) -> None:
    for number in range(5):
        save_image(tree / "train/ant" / f"{number}.png", 3000 + number)
    notes = check(tree)[1]["notes"]
    assert notes["of_another_source"] == []
    assert "perhaps_shortcuts" not in notes


def test_a_size_that_all_classes_but_one_share_is_named(check: Check, tmp_path: Path) -> None:
    for number in range(96):
        size = (36 + number % 7, 40) if number % 4 == 0 else (48, 40)
        name = "ant" if number % 4 == 0 else CLASSES[1 + number % 2]
        save_image(tmp_path / "data" / name / f"{number}.png", number, size=size)
    done, found = check(tmp_path / "data", code=1)
    told = found["defects"]["shortcuts"][0]
    assert re.search(r"^ant: size and shape alone recognise 100 % \(8\d to 100 %\) of its 2\d training images, ", told)
    assert re.search(r"; size 48 x 40: 0 of these, (\d+) of \1 others\. ", told)
    assert "DEFECT: classes that the file shows nearly without mistakes, without its picture: " in done.out
    assert "Not searched for shortcuts" not in done.out
    shortcut = found["shortcuts"][0]
    assert told.startswith(shortcut["sentence"])
    assert shortcut["kind"] == "shortcut"


def test_why_no_shortcuts_are_searched_for_is_said(check: Check, tree: Path, tmp_path: Path) -> None:
    start = "Not searched for shortcuts (docs/data.md): "
    few = "of 24 training images, no class has 10, and other classes as many."
    assert f"\n{start}{few}\n" in check(tree)[0].out
    nothing = "nothing is known of the files, as of arrays and bands."
    for number in range(30):
        save_image(tree / "train/ant" / f"more{number}.jpg", 4000 + number)
    for path in tree.rglob("*.jpg"):
        np.save(path.with_suffix(".npy"), np.asarray(Image.open(path)).astype(np.uint16))
        path.unlink()
    assert f"\n{start}{nothing}\n" in check(tree, "DATA.BITS=16")[0].out
    for part in ("train", "val"):
        rows = [f"{number}.png,{CLASSES[number % 2]};cat" for number in range(60)]
        for number in range(60):
            save_image(tmp_path / "table" / f"{number}.png", 5000 + number)
        (tmp_path / "table" / f"{part}.csv").write_text("\n".join(["file,label", *rows]))
    assert (
        f"\n{start}the images have several labels.\n"
        in check(tmp_path / "table", "DATA.MULTI_LABEL=true", dataset="csv", code=1)[0].out
    )


def test_images_of_equal_pixels_in_other_bytes_are_copies(check: Check, tree: Path, tmp_path: Path) -> None:
    for name in ("train/ant/0", "val/ant/0"):
        image = Image.open(tree / f"{name}.jpg")
        image.save(tree / "train/ant" / f"{name.replace('/', '_')}.png", compress_level=1)
        image.save(tree / f"{name}.png", compress_level=9)
        (tree / f"{name}.jpg").unlink()
    done, found = check(tree, "-fix", tmp_path / "fix.txt", code=1)
    assert "DEFECT: duplicates within a split: 1, 1 with the same pixels in other bytes\n" in done.out
    overlap = "DEFECT: in two splits (training images in another, or validation images in test): 1"
    assert f"{overlap}, 1 with the same pixels in other bytes\n" in done.out
    (one,) = found["defects"]["in_both_parts"]
    assert one["kind"] == "pixels"
    assert "the same pixels, in other bytes, as" in one["about"]
    assert "1 training images: also in another split (the same pixels in other bytes)" in done.out
    assert "train/ant/val_ant_0.png" in lines_of(tmp_path / "fix.txt")
    check(tree, f"DATA.EXCLUDE={tmp_path / 'fix.txt'}")


def test_masks_beside_their_images_are_named(check: Check, tree: Path, vitamp: Vitamp) -> None:
    ant = tree / "train" / "ant"
    such = f"such as {ant}/0.jpg and {ant}/0.png. If one is the other's mask"
    said = f"images have the name of another one but for the ending, {such}"
    assert said not in check(tree)[0].text
    for photograph in [*tree.rglob("*.jpg")]:
        Image.new("L", (40, 36)).save(photograph.with_suffix(".png"))
    assert f"60 of 60 {said}" in check(tree, code=1)[0].err
    words = ("-cfg", "vit_digits", "-dataset", "imagefolder", "-data_path", tree, "-num_classes", 3, "-dry_run")
    assert f"60 of 60 {said}" in vitamp(*words, "DATA.IMAGE_CHANNELS=3", code=0).err


def test_what_the_validation_crop_keeps_is_said(check: Check, tree: Path) -> None:
    assert "The crop of validation" not in check(tree)[0].out
    for number in range(40):
        save_image(tree / "train/ant" / f"wide{number}.jpg", 9000 + number, size=(80, 40))
    said = "The crop of validation (CROP_PCT 0.875) keeps 38 % of an image (the median; the least: 38 %)."
    assert said in check(tree)[0].out
    assert "The crop of validation" not in check(tree, "DATA.CROP_MODE=squash")[0].out


def test_a_group_for_each_image_changes_nothing(check: Check, tree: Path) -> None:
    said = "DATA.GROUP [a-z]+/[0-9]+: each of 24 images is a group of its own, which changes nothing"
    assert said in check(tree / "train", "DATA.GROUP=[a-z]+/[0-9]+")[0].err


def test_clean_data_has_no_defects_and_classes_without_images_are_found(check: Check, tree: Path) -> None:
    done, found = check(tree)
    assert "No defects." in done.out
    assert found["clean"] is True
    assert found["classes"] == {"training": dict.fromkeys(CLASSES, 8), "validation": dict.fromkeys(CLASSES, 2)}
    assert not any([*found["defects"].values(), *found["notes"].values()])
    shutil.rmtree(tree / "val" / "cat")
    done, found = check(tree)
    assert "note: classes without validation images: 1\n" in done.out
    assert "note: classes without validation images:\n    cat" in done.out
    assert found["notes"]["classes_without_validation_images"] == ["cat"]
    for image in (tree / "train" / "bee").iterdir():
        image.unlink()
    done, found = check(tree, code=1)
    assert found["defects"]["empty_classes"] == ["bee"]
    assert found["classes"]["training"]["bee"] == 0
    assert "classes without training images: 1" in done.out


def test_images_that_are_mostly_small_are_one_line(check: Check, tree: Path) -> None:
    done, found = check(tree, "DATA.IMAGE_SIZE=224")
    line = "note: 30 of 30 images are smaller than IMAGE_SIZE; enlarged when read, which adds no detail (-image_size)"
    assert [each for each in done.out.splitlines() if "IMAGE_SIZE" in each] == [line]
    assert "jpg" not in done.out
    assert len(found["notes"]["smaller_than_image_size"]) == 30


def as_lists(tree: Path, labels: list[int]) -> Path:
    (tree / "train_list.txt").write_text("".join(f"train/{CLASSES[i % 3]}/{i}.jpg {k}\n" for i, k in enumerate(labels)))
    (tree / "val_list.txt").write_text("".join(f"val/{CLASSES[i % 3]}/{i}.jpg {i % 3}\n" for i in range(6)))
    return tree


def as_shards(tree: Path, labels: list[int]) -> Path:
    """Both splits as tar files, with names for the three classes, of which two share one."""
    for part, told in (("train", labels), ("val", [0, 1, 2, 0, 1, 2])):
        images = [(tree / part / CLASSES[i % 3] / f"{i}.jpg").read_bytes() for i in range(len(told))]
        pairs = (((f"{i}.jpg", images[i]), (f"{i}.cls", str(k).encode())) for i, k in enumerate(told))
        write_tar(tree / "tars" / f"{part}-0.tar", [member for pair in pairs for member in pair])
    (tree / "tars" / "classes.txt").write_text("crane\nbee\ncrane\n")
    return tree / "tars"


@pytest.mark.parametrize(("dataset", "made"), [("imagenet2012", as_lists), ("shards", as_shards)])
def test_lists_and_shards_are_checked(
    check: Check, tree: Path, tmp_path: Path, dataset: str, made: Callable[[Path, list[int]], Path]
) -> None:
    (tree / "train" / "ant" / "9.jpg").write_bytes(b"\0" * 1000)
    (tree / "train" / "bee" / "4.jpg").write_bytes((tree / "train" / "bee" / "4.jpg").read_bytes()[:700])
    path, listed = made(tree, [i % 3 for i in range(24)]), tmp_path / "exclude.txt"
    done, found = check(path, "-fix", listed, dataset=dataset, code=1)
    assert {Path(one["name"]).name for one in found["defects"]["unreadable"]} == {"9.jpg", "4.jpg"}
    assert sum(bool(defects) for defects in found["defects"].values()) == 1
    assert not any(line.startswith("/") for line in listed.read_text().splitlines()), "names below DATA_PATH"
    done, found = check(path, f"DATA.EXCLUDE={listed}", dataset=dataset)
    assert done.err == "", "each line names an image"


@pytest.mark.parametrize(
    ("dataset", "made", "known"), [("imagenet2012", as_lists, ("0", "1", "2")), ("shards", as_shards, OF_SHARDS)]
)
def test_every_label_out_of_range_is_reported(
    check: Check, tree: Path, dataset: str, made: Callable[[Path, list[int]], Path], known: tuple[str, ...]
) -> None:
    labels = [i % 3 for i in range(24)]
    labels[4], labels[5], labels[7] = -1, 2_000_000_000, 7
    shutil.copy(tree / "train" / "ant" / "0.jpg", tree / "train" / "cat" / "2.jpg")
    _, found = check(made(tree, labels), "-num_classes", 4, dataset=dataset, code=1)
    wrong = found["defects"]["label_out_of_range"]
    assert [Path(one["name"]).stem for one in wrong] == ["4", "5", "7"]
    assert [one["about"].partition(";")[0] for one in wrong] == ["label -1", "label 2000000000", "label 7"]
    numbers = {kind: len(defects) for kind, defects in found["defects"].items() if defects}
    assert numbers == {"label_out_of_range": 3, "conflicting_labels": 2}, found["defects"]
    assert found["classes"]["training"] == {
        **dict(zip(known, (8, 6, 7), strict=True)),
        **{f"label {label}": 1 for label in (-1, 7, 2_000_000_000)},
    }
    assert found["classes"]["validation"] == dict.fromkeys(known, 2)


@pytest.fixture
def weights(tmp_path: Path) -> tuple[object, ...]:
    """Words for weights as they are before training, which tell colours and edges apart."""
    torch.manual_seed(0)
    save_file(timm.create_model("test_convnext").state_dict(), file := tmp_path / "weights.safetensors")
    return "-model", "test_convnext", "-pretrained", file, "-image_size", 64


def write_photographs(folder: Path, numbers: range) -> None:
    for number in numbers:
        (folder / CLASSES[number % 3]).mkdir(parents=True, exist_ok=True)
        picture(96, 64, number).save(folder / CLASSES[number % 3] / f"{number}.png")


def edit(of: Path, to: Path, how: Callable[[Image.Image], Image.Image]) -> None:
    with Image.open(of) as image:
        how(image).save(to)


def cropped(image: Image.Image) -> Image.Image:
    return image.crop((3, 2, 92, 61))


def blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(2))


def test_edited_copies_of_another_split_are_left_out(check: Check, weights: tuple[object, ...], tmp_path: Path) -> None:
    root, out = tmp_path / "data", tmp_path / "alike"
    write_photographs(root / "train", range(60))
    write_photographs(root / "val", range(60, 80))
    edit(root / "train/ant/0.png", root / "val/ant/cropped.png", cropped)
    edit(root / "train/bee/1.png", root / "val/cat/blurred.png", blurred)
    edit(root / "train/bee/1.png", root / "train/bee/again.png", cropped)
    done, _ = check(root, "-alike", out, *weights)
    assert "2 of 22 images look like one of another split, as edited copies do" in done.out
    assert lines_of(out / "exclude.txt") == {"train/ant/0.png", "train/bee/1.png", "train/bee/again.png"}
    page = (out / "alike.html").read_text()
    assert page.count("<figure") == 22, "each validation image beside the nearest one, to see where copies end"
    first, second = page.split("<figure")[1:3]
    assert all(name in first + second for name in ("cropped.png", "ant/0.png", "blurred.png", "bee/1.png"))
    labels = {text: text.count('class="bad"') for text in (first, second)}
    assert sorted(labels.values()) == [0, 2], "the blurred one has another label"
    again, _ = check(root, "-alike", out, *weights, f"DATA.EXCLUDE={out / 'exclude.txt'}")
    assert "No image looks like one of another split" in again.out


def test_images_that_look_like_many_others_are_no_copies(
    check: Check, weights: tuple[object, ...], tmp_path: Path
) -> None:
    root, out = tmp_path / "data", tmp_path / "alike"
    write_photographs(root / "train", range(60))
    write_photographs(root / "val", range(60, 80))
    for number in range(15):
        edit(root / "train/bee/1.png", root / f"train/bee/like{number}.png", cropped)
    edit(root / "train/bee/1.png", root / "val/bee/like.png", cropped)
    done, _ = check(root, "-alike", out, *weights, code=1)  # equal bytes are a defect
    assert (
        "1 of 21 images look like one of another split, half of them like 15 or more: too many for copies" in done.out
    )
    assert "Defects: " not in done.out
    assert [file.name for file in out.iterdir()] == ["alike.html"], "no list"


def test_images_that_look_like_those_of_other_classes_are_no_copies(
    check: Check, weights: tuple[object, ...], tmp_path: Path
) -> None:
    root, out = tmp_path / "data", tmp_path / "alike"
    write_photographs(root / "train", range(60))
    write_photographs(root / "val", range(60, 80))
    for source, copy in (("ant/0", "ant/a"), ("bee/1", "cat/b"), ("cat/2", "ant/c")):
        edit(root / f"train/{source}.png", root / f"val/{copy}.png", cropped)
    done, _ = check(root, "-alike", out, *weights)
    assert "3 of 23 images look like one of another split, but only 1 of them like one of their own label" in done.out
    assert done.out.endswith("No defects.\n")
    assert [file.name for file in out.iterdir()] == ["alike.html"], "no list"


def test_copies_are_not_told_from_images_that_look_alike_in_every_class(
    check: Check, weights: tuple[object, ...], tmp_path: Path
) -> None:
    root, out = tmp_path / "data", tmp_path / "alike"
    write_photographs(root / "train", range(60))
    write_photographs(root / "val", range(60, 80))
    for number in range(12):
        of = CLASSES[number % 3]
        to = CLASSES[(number + (number < 4)) % 3]
        edit(root / f"train/{of}/{number}.png", root / f"val/{to}/copy{number}.png", cropped)
    done, _ = check(root, "-alike", out, *weights)
    assert "Whether edited copies are in both splits cannot be told here" in done.out
    assert "of pairs as similar as copies, 33 % have two labels, of the next similar ones" in done.out
    assert "12 of" not in done.out
    assert "Defects: " not in done.out
    assert done.out.endswith("Whether images are copies cannot be told; no other defects.\n")
    assert [file.name for file in out.iterdir()] == ["alike.html"], "no list"
    divided, _ = check(root, "-split", tmp_path / "new.csv", *weights)
    assert "Images that look alike are divided all the same: they may be of different things" in divided.text
    assert "Copies and near copies, in " in divided.out


@pytest.mark.parametrize(("names", "refused"), [(("2019", "2020"), "2019"), (("1", "2", "10"), "1"), (("0", "1"), "")])
def test_no_table_of_classes_that_it_would_take_for_numbers(
    vitamp: Vitamp, tmp_path: Path, names: tuple[str, ...], refused: str
) -> None:
    for number in range(24):
        save_image(tmp_path / "data" / names[number % len(names)] / f"{number}.jpg", seed=number)
    table = tmp_path / "split.csv"
    words = ("-dataset", "imagefolder", "-data_path", tmp_path / "data", "-split", table)
    done = vitamp(*words, script=SCRIPT)
    assert table.exists() is not bool(refused)
    if refused:
        assert done.code == 2
        assert f"class {refused}: in a table, this name would be the number of a class" in done.err


def test_no_table_where_most_images_would_be_one_group(
    check: Check, weights: tuple[object, ...], tmp_path: Path
) -> None:
    root, out = tmp_path / "data", tmp_path / "alike"
    write_photographs(root, range(60))
    for number in range(11):  # so few of them are in training that they may be copies
        edit(root / "ant/0.png", root / f"ant/series{number}.png", lambda image: image)
    done, _ = check(root, "-alike", out, *weights, "DATA.VAL_FRACTION=0.4", code=1)
    assert "No table is written. It would put images that look alike into one group" in done.out
    assert "Here one group would have 12 of 71 images: each looks like the next" in done.out
    assert "list those that are copies in a file for DATA.EXCLUDE" in done.out
    assert not (out / "groups.csv").exists()


def test_edited_copies_are_one_group_of_the_split(check: Check, weights: tuple[object, ...], tmp_path: Path) -> None:
    root, out = tmp_path / "data", tmp_path / "alike"
    write_photographs(root, range(60))
    for number in range(0, 30, 3):
        edit(root / f"ant/{number}.png", root / f"ant/copy{number}.png", blurred)
    done, _ = check(root, "-alike", out, *weights, "DATA.VAL_FRACTION=0.4")
    assert "No image looks" not in done.out
    rows = list(csv.DictReader((out / "groups.csv").read_text().splitlines()))
    groups = {row["path"]: row["group"] for row in rows}
    assert (len(rows), len(set(groups.values()))) == (70, 60)
    assert all(groups[f"ant/{number}.png"] == groups[f"ant/copy{number}.png"] for number in range(0, 30, 3))
    assert {row["path"].partition("/")[0] == row["target"] for row in rows} == {True}
    shutil.copy(out / "groups.csv", root)
    words = "-alike", out, *weights, "DATA.VAL_FRACTION=0.4", "DATA.GROUP=group"
    split, _ = check(root / "groups.csv", *words, dataset="csv")
    assert "No image looks" in split.out
    (root / "groups.csv").unlink()
    table = f"csv:{out / 'groups.csv'}"
    assert f"train with -dataset {table} -data_path {root} DATA.GROUP=group, and check" in done.out
    split, _ = check(root, "DATA.VAL_FRACTION=0.4", "DATA.GROUP=group", dataset=table)
    assert "Training split: 42 images" in split.out or "Training split: 41 images" in split.out
    # A test split that is kept stays; what training has of it goes.
    write_photographs(tmp_path / "kept/test", range(90, 96))
    edit(root / "ant/copy0.png", tmp_path / "kept/test/ant/0.png", lambda image: image.crop((1, 1, 94, 63)))
    shutil.copytree(root, tmp_path / "kept/train", ignore=lambda *_: ["groups.csv"])
    root = tmp_path / "kept"
    words = "-alike", out, *weights, "DATA.VAL_FRACTION=0.4", "DATA.KEEP_TEST=true"
    done, _ = check(root, *words)
    assert "it leaves out 2 images like test images" in done.out
    rows = list(csv.DictReader((out / "groups.csv").read_text().splitlines()))
    assert Counter(row["split"] for row in rows) == {"train": 68, "test": 7}
    assert {f"train/ant/{name}.png" for name in ("0", "copy0")}.isdisjoint(row["path"] for row in rows)
    shutil.copy(out / "groups.csv", root)
    split, _ = check(root / "groups.csv", *words, "DATA.GROUP=group", dataset="csv")
    assert "No image looks" in split.out


def test_a_new_split_keeps_images_of_one_thing_in_one_part(
    check: Check, weights: tuple[object, ...], vitamp: Vitamp, tmp_path: Path
) -> None:
    """Copies, near copies, edited copies and groups are in one of three parts, of about the sizes asked for."""
    root, table = tmp_path / "data", tmp_path / "new.csv"
    write_photographs(root, range(60))
    for number in range(0, 30, 3):
        shutil.copy(root / f"ant/{number}.png", root / f"ant/copy{number}.png")
        edit(root / f"ant/{number}.png", root / f"ant/blurred{number}.png", blurred)
    (root / "ant/broken.png").write_bytes(b"no image")

    def parts(*words: object) -> tuple[str, dict[str, str]]:
        done, _ = check(root, "-split", table, "-overwrite", *words, code=1)
        rows = list(csv.DictReader(table.read_text().splitlines()))
        assert all(row["path"].partition("/")[0] == row["target"] for row in rows)
        return done.text, {row["path"]: row["split"] for row in rows}

    said, part_of = parts("-parts", "60,20,20")
    assert f"Not in the table, since they cannot be read: {root / 'ant' / 'broken.png'}." in said
    assert len(part_of) == 80
    assert "Copies and near copies, in 70 groups, of which the largest has 2 images" in said
    assert all(part_of[f"ant/{number}.png"] == part_of[f"ant/copy{number}.png"] for number in range(0, 30, 3))
    sizes = Counter(part_of.values())
    wanted_sizes = {"train": 48, "val": 16, "test": 16}
    assert all(abs(sizes[part] - wanted) <= 2 for part, wanted in wanted_sizes.items()), sizes
    (root / "ant/broken.png").unlink()
    by_looks, part_of = parts(*weights)
    assert "images that look as alike as edited copies, in 60 groups" in by_looks
    assert all(part_of[f"ant/{number}.png"] == part_of[f"ant/blurred{number}.png"] for number in range(0, 30, 3))
    by_name, part_of = parts("DATA.GROUP=/[a-z]*([0-9])")
    assert "Groups (DATA.GROUP /[a-z]*([0-9])) and copies and near copies, in 10 groups" in by_name
    assert len({(re.sub("[a-z/]*", "", path)[0], part) for path, part in part_of.items()}) == 10
    checked, _ = check(root, dataset=f"csv:{table}", code=1)
    assert "Test split: " in checked.out
    assert "in two splits" not in checked.out
    wrong = vitamp("-dataset", "digits", "-split", tmp_path / "a.csv", "-parts", "60,20,30", script=SCRIPT, code=2)
    assert "-parts 60,20,30: takes three numbers above 0 that add up to 100" in wrong.err
    alone = vitamp("-dataset", "digits", "-parts", "60,20,20", script=SCRIPT, code=2)
    assert "-parts: it gives the sizes of the parts of -split FILE.csv, which is missing" in alone.err


@pytest.mark.parametrize("text", ["60,40", "60,20,30", "3,1,1", "60,40,0", "120,-10,-10", "nan,50,50", "a,b,c", ""])
def test_parts_of_a_new_split_add_up(text: str) -> None:
    assert fractions("50,30,20") == fractions("0.5,0.3,0.2") == (0.5, 0.3, 0.2)
    with pytest.raises(ValueError, match="takes three numbers above 0 that add up to 100"):
        fractions(text)


def test_training_says_unasked_that_copies_are_edited(
    vitamp: Vitamp, weights: tuple[object, ...], tmp_path: Path
) -> None:
    root, run = tmp_path / "data", tmp_path / "run"
    write_photographs(root / "train", range(60))
    write_photographs(root / "val", range(60, 80))
    edit(root / "train/bee/1.png", root / "val/bee/blurred.png", blurred)
    words = "-dataset", "imagefolder", "-data_path", root, *weights, "MODEL.NEW_CLASSIFIER=probe", "-output", run
    trained = vitamp(*words, "-epochs", 1, "TRAIN.WARMUP_EPOCHS=0", "-batch_size", 20)
    assert "look like training images, as edited copies do" in trained.text
    assert "one thing or place. `" in trained.text
    ended = "1 of 21 validation images look like training images, as edited copies do"
    assert ended in trained.text.partition("Top-1")[2]
    (step,) = (run / "checkpoints").glob("step-*3")
    resumed = vitamp("-resume", step, "-epochs", 2, "-output", tmp_path / "longer")
    assert ended in resumed.text, "though no features were computed"
    evaluated = vitamp(run, script="scripts/evaluate.py")
    assert ended in evaluated.text
    assert "-alike DIR` shows them" in evaluated.text
    # Elsewhere, copies are searched for anew: of equal bytes, and by the features that the start of the run has kept.
    write_photographs(tmp_path / "other", range(80, 100))
    edit(root / "train/bee/1.png", tmp_path / "other/bee/blurred.png", blurred)
    shutil.copy(root / "train/bee/4.png", tmp_path / "other/bee/same.png")
    elsewhere = (run, "-data_path", tmp_path / "other", "-part", "all")
    evaluated = vitamp(*elsewhere, script="scripts/evaluate.py")
    assert "at least 2 of 22 images have relatives in training" in evaluated.text
    assert "-alike DIR" not in evaluated.text, "check_data.py reads the run's own images"
    unsearched = vitamp(*elsewhere, "DATA.CHECK=off", script="scripts/evaluate.py")
    assert "at least 1 of 22 images have relatives in training" in unsearched.text
    probed = vitamp(*words[:-2], "-probe", script="scripts/evaluate.py")
    assert "1 of 21 images of the validation split look like training images, as edited" in probed.text
    vitamp(run, script="scripts/report.py")
    assert ended in (run / "report.html").read_text()
    off = vitamp(*words[:-1], tmp_path / "off", "-epochs", 0, "DATA.CHECK=off")
    assert "look like training images" not in off.text


def test_nothing_is_compared_with_images_that_are_gone(tmp_path: Path) -> None:
    save_image(tmp_path / "new/0.jpg", 0)
    new, gone = (FileSamples(tmp_path / folder, ["0.jpg"], np.zeros(1, np.int64), None) for folder in ("new", "gone"))
    assert find_copies(gone, new, seconds=10).compared == 0
    assert find_copies(new, new, seconds=10).found == find_copies(new, gone, seconds=10).compared == 1


@pytest.mark.parametrize(
    "name", ["IMG_{0}", "{0:04}", "{class_name}_{0}", "{class_name}/{0}", "shot{0}_of_a_person"], ids=str
)
def test_names_with_nothing_but_a_number_of_their_own_are_no_series(check: Check, tmp_path: Path, name: str) -> None:
    for number in range(90):
        class_name = CLASSES[number % 3]
        save_image(tmp_path / f"data/{class_name}/{name.format(number, class_name=class_name)}.jpg", number)
    said, _ = check(tmp_path / "data")
    assert "with an image in another split" not in said.out
    for number in range(90):  # each class counts from 0
        place = f"data2/{CLASSES[number % 3]}/{name.format(number // 3, class_name=CLASSES[number % 3])}.jpg"
        save_image(tmp_path / place, number)
    said, _ = check(tmp_path / "data2")
    assert "the start of their name" not in said.out or name.startswith("shot")


def test_groups_with_different_labels_are_named(check: Check, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(60):
        patient = number // 3
        class_name = CLASSES[1 if number == 2 else patient % 3]
        save_image(data / class_name / f"p{patient}_{number}.jpg", number)
    grouped = "DATA.GROUP=name_start", "DATA.VAL_FRACTION=0.2"
    said, _ = check(data, *grouped)
    pair = f"{data}/ant/p0_0.jpg and {data}/bee/p0_2.jpg"
    assert f"Different labels in 1 group of DATA.GROUP name_start, such as p0: {pair}. Where a group is one" in said.err
    assert "Different labels" not in check(data)[0].text
    for patient in range(20):
        save_image(data / CLASSES[(patient + 1) % 3] / f"p{patient}_{patient}x.jpg", 100 + patient)
    assert "Different labels" not in check(data, *grouped)[0].text, "where most groups have, each is a place"


def test_the_coarsest_groups_of_names_are_proposed(check: Check, tmp_path: Path) -> None:
    for number in range(144):  # 24 slides of three photographs with two cells each
        name = f"slide{number // 6}_photo{number // 2}_{number}.jpg"
        save_image(tmp_path / "data" / CLASSES[number // 6 % 3] / name, number)
    said, _ = check(tmp_path / "data")
    assert "'DATA.GROUP=name_start' keeps them" in said.out
    assert "DATA.GROUP=name'" not in said.out, "a photograph is a part of a slide"


@pytest.mark.parametrize("split", [False, True])
def test_a_column_of_a_table_is_named_for_groups(check: Check, tmp_path: Path, split: bool) -> None:
    rows = ["path,target,age,Patient_ID" + ",split" * split]
    for number in range(90):
        save_image(tmp_path / f"data/{number:03}.jpg", number)
        part = ",val" if number % 5 == 0 else ",train"
        rows.append(f"{number:03}.jpg,{CLASSES[number % 3]},{number % 9},no {number // 6}" + part * split)
    table = tmp_path / "data/all.csv"
    table.write_text("\n".join(rows))
    said, _ = check(table, dataset="csv")
    where, does = ("18", "names them; split by them") if split else ("9", "keeps them on one side of the split")
    named = rf"{where} of {where} validation images share their value in the column Patient_ID with an image in .*\."
    example = r"Look at those of no \d+: if they come from one person, object or scene,"
    assert re.search(rf"{named} {example} 'DATA.GROUP=Patient_ID' {does} \(docs", said.out)
    grouped, _ = check(tmp_path / "data", "DATA.GROUP=Patient_ID", dataset=f"csv:{table}")
    assert "in the column" not in grouped.text


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["patient{0}_{1}", "{0}-{1}", "patient{0}/{1}", "patient{0}-shot{1}a"])
def test_series_of_names_in_several_splits_are_named(check: Check, tmp_path: Path, split: bool, name: str) -> None:
    for number in range(180):
        part = ("val" if number % 5 == 0 else "train") if split else "."
        # A third of the images are of one person, of whom alone no split would have much to say.
        person = 0 if number % 3 == 0 else number // 6
        save_image(tmp_path / "data" / part / CLASSES[number % 4 % 3] / f"{name.format(person, number)}.jpg", number)
    said, _ = check(tmp_path / "data")
    images, does = ("36", "names them; split by them") if split else ("18", "keeps them on one side of the split")
    hint = re.search(r"(\d+) of (\d+) validation images share .* name.* '(DATA\.GROUP=.*?)' (.*) \(docs", said.out)
    assert hint
    assert (hint[2], hint[4]) == (images, does)
    assert 0.4 < int(hint[1]) / int(hint[2]) < 0.7
    assert hint[3] == f"DATA.GROUP=name{'_start' if 'shot' in name else ''}"
    grouped, _ = check(tmp_path / "data", hint[3])
    assert "with an image in another split" not in grouped.out
    assert ("in more than one split, such as" in grouped.err) == split


def test_a_table_away_from_its_images_is_answered_by_the_flags_that_join_them(vitamp: Vitamp, tmp_path: Path) -> None:
    table = tmp_path / "all.csv"
    table.write_text("path,target\n" + "".join(f"{number}.png,{'ab'[number % 2]}\n" for number in range(20)))
    done = vitamp("-data_path", table, script=SCRIPT, code=2)
    assert f"images exists: there is no file {tmp_path}/0.png. Paths are relative to the table, or with" in done.err
    assert f"-dataset csv:{table} -data_path FOLDER" in done.err


def test_a_test_split_that_cannot_be_read_is_no_clean_end(check: Check, tree: Path) -> None:
    save_image(tree / "test" / "unknown" / "0.jpg", 7)
    done, _ = check(tree, code=1)
    assert "No defects. The test split was not checked." in done.out


def test_looks_are_compared_with_weights_and_a_second_split(
    check: Check, tree: Path, weights: tuple[object, ...], tmp_path: Path
) -> None:
    refused, _ = check(tree, "-alike", tmp_path / "alike", code=2)
    assert "-alike compares images by a model's features: give -model NAME -pretrained FILE" in refused.text
    for name in CLASSES:
        save_image(tmp_path / "few" / name / "0.jpg", 0)
    alone, _ = check(tmp_path / "few", "-alike", tmp_path / "alike", *weights, code=2)
    assert "-alike compares two splits" in alone.text


def test_names_do_not_reach_the_terminal_raw(check: Check, tree: Path) -> None:
    (tree / "train" / "bee" / "loop.jpg").symlink_to("loop.jpg")
    (tree / "train" / "bee" / "a\x1b[31m.txt").touch()
    done, found = check(tree, code=1)
    assert "a\\x1b[31m.txt" in done.err
    assert [one["about"] for one in found["defects"]["unreadable"]] == ["its symbolic links form a loop"]


def test_what_cannot_be_checked(vitamp: Vitamp, tree: Path, tmp_path: Path) -> None:
    both = f"-fix and -json both name {tree / 'a'}; give each its own file"
    for code, dataset, words, said in (
        (0, "digits", ("-num_classes", 10), "The training split of digits is held in memory"),
        (2, "imagefolder", ("-data_path", tmp_path / "none"), "none does not exist"),
        (2, "imagefolder", ("-data_path", tree, "-fix", tree / "a", "-json", tree / "a"), both),
        (2, "imagenet2012", ("-data_path", as_lists(tree, [0, 1, 10**30])), f"list.txt:3: label {10**30} does not fit"),
    ):
        assert said in vitamp("-dataset", dataset, *words, script=SCRIPT, code=code).text


class Deadly(Samples):
    """Reading image 40 kills the process, as the out-of-memory killer does."""

    labels = np.zeros(60, dtype=np.int64)

    def read(self, index: int) -> np.ndarray:
        if index == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros((8, 8, 3), dtype=np.uint8)

    def name(self, index: int) -> str:
        return f"image {index}"


def test_killed_worker_is_reported_with_its_images() -> None:
    data = DataConfig(IMAGE_SIZE=8)
    among = r"it is image (0|32) or one of the next 63 images of the training split"
    with pytest.raises(TrainingError, match=rf"killed by SIGKILL.*-num_workers.*{among}"):
        scan_split("training", Deadly(), data, 1)


# Near copies: encoded again or resized


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "encoded again": lambda image: as_jpeg(image, 75),
    "halved": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "doubled": lambda image: image.resize((image.width * 2, image.height * 2), Image.Resampling.BILINEAR),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.9),
}


def glyph(character: str) -> Image.Image:
    image = Image.new("RGB", (64, 64), "white")
    font = ImageFont.load_default(48)
    ImageDraw.Draw(image).text((32, 32), character, fill="black", font=font, anchor="mm")
    return image


def icon(level: int, colour: str) -> Image.Image:
    """A battery that is more or less full, which is how icons differ: by a small mark."""
    image = Image.new("RGB", (48, 48), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((8, 14, 38, 34), outline="black", width=2)
    draw.rectangle((39, 20, 42, 28), fill="black")
    draw.rectangle((11, 17, 11 + 3 * level, 31), fill=colour)
    return image


def thumbnails(images: list[Image.Image]) -> Thumbnails:
    pixels = [np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for image in images]
    return Thumbnails(np.stack(pixels).transpose(0, 3, 1, 2), np.array([min(image.size) for image in images]))


def pairs(images: list[Image.Image]) -> list[tuple[int, ...]]:
    return [tuple(pair) for pair in near_pairs(thumbnails(images)).tolist()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("side", [32, 64, 160])
def test_changed_copies_are_found(change: str, side: int) -> None:
    originals = [picture(200, 150, seed) for seed in range(60)] + [glyph(c) for c in "abdefghkmnpqrstuwxyzABCDEFGHKMN"]
    originals = [image.resize((side, side), Image.Resampling.LANCZOS) for image in originals]
    copies = [CHANGES[change](image) for image in originals]
    count = len(originals)
    found = pairs([*originals, *copies])
    assert sum((index, index + count) in found for index in range(count)) >= 0.9 * count
    assert [pair for pair in found if pair[1] - pair[0] != count] == [], "different images"


def test_similar_images_are_told_apart() -> None:
    icons = [icon(level, colour) for level in range(9) for colour in ("green", "red")]
    glyphs = [glyph(c) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?+-=<>()[]"]
    flat = [Image.new("RGB", (32, 32), (shade, shade, 255)) for shade in range(0, 250, 5)]
    nearly = np.random.default_rng(0).integers(96, 104, (SIDE, SIDE, 3)).astype(np.uint8)
    flat += [Image.fromarray(nearly)] * 2
    images = [*icons, *glyphs, *flat]
    assert pairs(images) == []
    assert thumbnails(images).flat.sum() == len(flat)


def marked(image: np.ndarray, by: float, side: int = 1) -> np.ndarray:
    """With one of the 64 blocks, or a square of more, brighter by this fraction of the contrast."""
    changed = image.copy()
    changed[:, 8 : 8 + 4 * side, 8 : 8 + 4 * side] += by * image.std()
    return changed


SMALL, LARGE = 32, 128
ALIKE = {
    "the same": (lambda image: image, {SMALL, LARGE}),
    "20 shades brighter": (lambda image: image + 20, {SMALL, LARGE}),
    "45 shades brighter": (lambda image: image + 45, set[int]()),
    "less contrast": (lambda image: (image - 128) * 0.85 + 128, {SMALL, LARGE}),
    "half the contrast": (lambda image: (image - 128) * 0.5 + 128, set[int]()),
    "twice the contrast": (lambda image: (image - 128) * 2 + 128, set[int]()),
    "a little darker to one side": (lambda image: image + np.linspace(-1.8, 1.8, SIDE), {SMALL, LARGE}),
    "darker to one side": (lambda image: image + np.linspace(-3.2, 3.2, SIDE), {SMALL}),
    "a faint mark": (lambda image: marked(image, 0.04), {SMALL, LARGE}),
    "a small mark": (lambda image: marked(image, 0.3), {SMALL}),
    "a clear mark": (lambda image: marked(image, 1.0), set[int]()),
    "a large pale mark": (lambda image: marked(image, 0.29, side=2), set[int]()),
}
"""What is done to an image, and the sizes at which that is nearly the same. All have nearly the same code."""


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("change", ALIKE)
def test_each_limit_tells_images_apart(change: str, size: int) -> None:
    image = np.random.default_rng(0).integers(96, 160, (3, 8, 8)).repeat(4, 1).repeat(4, 2).astype(np.float32)
    altered, alike = ALIKE[change]
    for pair in ((image, altered(image)), (altered(image), image)):
        both = Thumbnails(np.stack(pair).round().clip(0, 255).astype(np.uint8), np.full(2, size))
        assert np.bitwise_count(both.codes[0] ^ both.codes[1]) <= MOST_BITS - 1
        assert len(near_pairs(both)) == (size in alike)


def test_every_pair_of_near_codes_is_compared() -> None:
    """Noise that puts images just inside the bound, among many others."""
    generator = np.random.default_rng(0)
    first = generator.integers(60, 196, (400, 3, SIDE, SIDE)).astype(np.float32)
    second = first + 0.1 * first.std() * generator.standard_normal(first.shape)
    both = Thumbnails(np.concatenate([first, second]).round().astype(np.uint8), np.full(800, SIDE))
    found = near_pairs(both).tolist()
    assert len(found) >= 0.99 * 400
    assert all(b - a == 400 for a, b in found)


@pytest.fixture
def leaks(tmp_path: Path) -> Path:
    """Changed copies of validation images in training, one with another label; icons on transparent ground."""
    root = tmp_path / "data"
    for split, first in (("train", 0), ("val", 100)):
        for number in range(12 if split == "train" else 6):
            place = root / split / ("ant", "bee")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            picture(120, 100, first + number).save(place / f"{number}.png")
    for number, change in enumerate(CHANGES.values()):
        with Image.open(root / f"val/{('ant', 'bee')[number % 2]}/{number}.png") as image:
            change(image).save(root / f"train/bee/leak{number}.png")
    with Image.open(root / "train/ant/0.png") as image:
        as_jpeg(image, 70).save(root / "train/ant/again.jpg")
    shutil.copyfile(root / "val/bee/5.png", root / "train/bee/exact.png")
    (root / "train/few").mkdir()
    (root / "val/few").mkdir()
    for number, place in enumerate(("train/few/0.png", "train/few/1.png", "val/few/2.png")):
        icon(3 * number, "red").convert("RGBA").save(root / place)
    white = np.full((20, 20, 4), 255, dtype=np.uint8)
    white[:, :, 3] = np.random.default_rng(0).integers(0, 2, (20, 20)) * 255  # a white drawing on white
    Image.fromarray(white).save(root / "train/bee/white.png")
    return root


def test_fix_removes_from_training_what_validation_has(check: Check, leaks: Path, tmp_path: Path) -> None:
    """Near copies only with -near: they are a matter of judgement."""
    listed, near_too = tmp_path / "fix.txt", tmp_path / "near.txt"
    done, told = check(leaks, "-fix", listed, code=1)
    near = {Path(one["name"]).name: one["about"] for one in told["defects"]["nearly_in_both_parts"]}
    assert set(near) == {f"leak{number}.png" for number in range(len(CHANGES))}
    assert near["leak0.png"].endswith("val/ant/0.png in the validation split, but bee instead of ant")
    assert near["leak1.png"].endswith("val/bee/1.png in the validation split")
    other = sum(about.endswith("but bee instead of ant") for about in near.values())
    head, *shown = done.out.partition("DEFECT: nearly the same in two splits")[2].splitlines()
    assert head.endswith(f": {len(CHANGES)}, {other} with another label in another split")
    shown = done.out.rpartition("DEFECT: nearly the same in two splits")[2].splitlines()[1:]
    assert all("but bee instead of ant" in line for line in shown[: min(other, 5)]), "those first"
    assert [Path(one["name"]).name for one in told["notes"]["nearly_duplicate"]] == ["again.jpg"]
    assert [Path(one["name"]).name for one in told["notes"]["of_one_colour"]] == ["white.png"]
    assert told["notes"]["tiny_classes"] == ["few (2)"]
    assert "1 training images: also in another split, byte for byte" in done.out
    assert "nearly the same as one of another split stay: look at them, then add -near -overwrite" in done.out
    assert lines_of(listed) == {"train/bee/exact.png"}
    done, _ = check(leaks, "-fix", near_too, "-near", code=1)
    assert f"{len(CHANGES)} training images: nearly the same as one of another split" in done.out
    assert "add -near" not in done.out
    assert lines_of(near_too) == {"train/bee/exact.png", *(f"train/bee/{name}" for name in near)}
    check(leaks, f"DATA.EXCLUDE={near_too}")


def test_copies_of_test_images_are_found_in_each_other_split(check: Check, tree: Path, tmp_path: Path) -> None:
    for number in range(6):
        (place := tree / "test" / CLASSES[number % 3]).mkdir(parents=True, exist_ok=True)
        picture(200, 180, 900 + number).save(place / f"{number}.jpg")
    (tree / "test/cat/5.jpg").write_text("broken")
    for name, split in (("ant/0", "train"), ("bee/1", "val")):
        shutil.copy(tree / f"test/{name}.jpg", tree / split / f"{name}_copy.jpg")
    for name, split in (("cat/2", "train"), ("ant/3", "val")):
        Image.open(tree / f"test/{name}.jpg").resize((100, 90)).save(tree / split / f"{name}_near.jpg")
    for split, size in (("train", (120, 108)), ("val", (140, 126))):  # of which one is in all three
        Image.open(tree / "test/bee/4.jpg").resize(size).save(tree / split / "bee/4_near.jpg")
    listed = tmp_path / "fix.txt"
    done, found = check(tree, "-fix", listed, "-near", code=1)
    assert found["classes"]["test"] == dict.fromkeys(CLASSES, 2)
    assert "Test split: 6 images in 3 classes" in done.out
    assert names(found["defects"]["unreadable"]) == ["test/cat/5.jpg"]
    assert names(found["defects"]["in_both_parts"]) == ["train/ant/0_copy.jpg", "val/bee/1_copy.jpg"]
    of_bee = ["train/bee/4_near.jpg", "train/bee/4_near.jpg", "val/bee/4_near.jpg"]
    near = sorted([*of_bee, "train/cat/2_near.jpg", "val/ant/3_near.jpg"])
    assert sorted(names(found["defects"]["nearly_in_both_parts"])) == near
    assert "val/bee/1_copy.jpg: the same bytes as test/bee/1.jpg in the test split" in done.out
    excluded = {"test/cat/5.jpg", "train/ant/0_copy.jpg", "train/bee/4_near.jpg", "train/cat/2_near.jpg"}
    assert lines_of(listed) == excluded
    done, _ = check(tree, f"DATA.EXCLUDE={listed}", code=1)
    assert "DEFECT: in two splits (training images in another, or validation images in test): 1\n" in done.out
    assert "match no image" not in done.err, "a line may name a test image"


def test_nearly_equal_images_of_two_classes_are_defects(check: Check, tmp_path: Path) -> None:
    for number in range(8):
        for split in ("train", "val"):
            place = tmp_path / "data" / split / ("ant", "bee")[number % 2] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            picture(120, 100, number + 8 * (split == "val")).save(place)
    as_jpeg(picture(120, 100, 0), 60).save(tmp_path / "data" / "train" / "bee" / "again.jpg")
    done, told = check(tmp_path / "data", code=1)
    (found,) = told["defects"]["nearly_the_same_with_conflicting_labels"]
    assert Path(found["name"]).name == "again.jpg"
    assert found["about"].endswith("ant/0.png, but bee instead of ant")
    assert "nearly the same with different labels: one is wrong, unless classes differ in details: 1" in done.out
    assert "different labels stay: see which label is right, then list the other image in DATA.EXCLUDE" in done.out


def test_fix_removes_no_image_for_a_table_that_names_it_twice(check: Check, tree: Path, tmp_path: Path) -> None:
    shutil.copy(tree / "train/bee/4.jpg", tree / "train/bee/copy.jpg")
    ants, bees, cats = ["train/ant/0.jpg"] * 2, ["train/bee/4.jpg", "train/bee/copy.jpg"], ["val/cat/2.jpg"]
    for part, files in (("train", ants + bees + cats), ("val", cats)):
        rows = [f"{file},{Path(file).parent.name}" for file in files]
        (tree / f"{part}.csv").write_text("\n".join(["path,target", *rows]))
    done, _ = check(tree, "-fix", tmp_path / "fix.txt", dataset="csv", code=1)
    assert lines_of(tmp_path / "fix.txt") == {"train/bee/copy.jpg"}
    for name in ("train/ant/0.jpg", "val/cat/2.jpg"):
        assert f"{tree}/{name}: is listed twice; correct the table" in done.err
    shutil.copy(tree / "val/cat/2.jpg", tree / "val/cat/twin.jpg")
    done, _ = check(tree, "-fix", tmp_path / "folders.txt", code=1)
    assert "listed twice" not in done.err
    assert "Duplicates within validation or test stay, and count twice there." in done.out
    done, _ = check(tree, f"DATA.EXCLUDE={tmp_path / 'folders.txt'}", code=0)
    assert "note: duplicates within a split: 1\n" in done.out, "no defect, which no -fix mends"


def test_report_begins_with_numbers_and_names_each_pair_once(check: Check, tree: Path) -> None:
    """Five lines of each kind, with paths below the data."""
    for number in range(7):
        shutil.copy(tree / "train" / CLASSES[number % 3] / f"{number}.jpg", tree / "train" / "ant" / f"z{number}.jpg")
    done, found = check(tree, code=1)
    head, advice, table, *kinds = done.out.split("\n\n")
    assert head.splitlines()[2:] == [
        "DEFECT: duplicates within a split: 3",
        "DEFECT: the same image with different labels: 8",
    ]
    assert "3 training images: duplicates" in advice
    assert "count twice" not in advice, "none is in validation"
    assert "          15          2  ant" in table
    assert kinds[0].splitlines()[1] == "    train/ant/z0.jpg: the same bytes as train/ant/0.jpg"
    assert len(kinds[1].splitlines()) == 1 + 4, "four pairs"
    assert len(found["defects"]["conflicting_labels"]) == 8
    assert str(tree) not in done.out
    for number in range(4):
        shutil.copy(tree / "train" / "bee" / "10.jpg", tree / "train" / "bee" / f"y{number}.jpg")
    kind = check(tree, code=1)[0].out.split("\n\n")[3].splitlines()
    assert (len(kind), kind[-1]) == (7, "    ... and 2 more; -json FILE lists all")
