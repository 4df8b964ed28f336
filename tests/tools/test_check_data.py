"""scripts/check_data.py reports planted defects and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datasets.base import Samples
from tests.datasets.shards.tar_files import write_tar
from tests.program import Result, save_image
from tools.check_data.scan import scan_split
from utils.config.data import DataConfig
from utils.errors import TrainingError

SCRIPT = "scripts/check_data.py"
CLASSES = ("ant", "bee", "cat")
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
def check(vitamp: Callable[..., Result], tmp_path: Path) -> Check:
    """Run the check, which ends with `code`: its result and the content of its -json file."""

    def call(root: Path, *words: object, dataset: str = "imagefolder", code: int = 0) -> tuple[Result, dict[str, Any]]:
        found = tmp_path / "found.json"
        found.unlink(missing_ok=True)
        done = vitamp(
            *("-dataset", dataset, "-data_path", root, "-num_classes", 3, "-image_size", 32, "-num_workers", 2),
            *("-json", found, *words),
            script=SCRIPT,
        )
        assert done.code == code, done.text
        assert "Traceback" not in done.text
        return done, json.loads(found.read_text()) if found.exists() else {}

    return call


def names(found: list[dict[str, str]]) -> list[str]:
    return ["/".join(Path(one["name"]).parts[-3:]) for one in found]


def test_clean_data_has_no_defects(check: Check, tree: Path) -> None:
    done, found = check(tree)
    assert "No defects." in done.out
    assert found["clean"] is True
    assert found["classes"] == {"training": dict.fromkeys(CLASSES, 8), "validation": dict.fromkeys(CLASSES, 2)}
    assert not any(found["defects"].values())
    assert not any(found["notes"].values())


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
    shutil.copy(train / "ant" / "3.jpg", train / "ant" / "copy.jpg")
    shutil.copy(train / "ant" / "6.jpg", train / "bee" / "wrong.jpg")
    shutil.copy(train / "bee" / "4.jpg", val / "bee" / "shown.jpg")
    save_image(train / "cat" / "small.jpg", 7777, size=(31, 50))
    odd = {"CMYK": "cmyk.jpg", "RGBA": "rgba.png", "P": "p.png", "I;16": "deep.png", "L": "l.png"}
    for mode, name in odd.items():
        Image.new(mode, (40, 40), 1).save(train / "cat" / name)

    done, found = check(tree, "-fix", listed, code=1)
    defects, notes = found["defects"], found["notes"]
    kinds = dict(zip(names(defects["unreadable"]), (one["kind"] for one in defects["unreadable"]), strict=True))
    assert kinds == {
        "train/ant/0.jpg": "empty",
        "train/ant/bomb.png": "too large",
        "train/ant/gone.jpg": "missing",
        "train/bee/1.jpg": "no image",
        "train/cat/2.jpg": "damaged",
        "val/cat/2.jpg": "damaged",
    }
    assert names(defects["duplicate"]) == ["train/ant/copy.jpg"]
    assert names(defects["conflicting_labels"]) == ["train/ant/6.jpg", "train/bee/wrong.jpg"]
    assert "but ant instead of bee" in defects["conflicting_labels"][0]["about"]
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
    for name in [*kinds, "train/ant/copy.jpg", "train/bee/wrong.jpg", "train/cat/small.jpg"]:
        assert name in done.out

    # The list has what was asked for; without it the data is clean.
    assert {line.split("  # ")[0] for line in listed.read_text().splitlines()[1:]} == {
        *kinds,
        *("train/ant/copy.jpg", "train/bee/4.jpg", "train/ant/6.jpg", "train/bee/wrong.jpg"),
    }
    done, _ = check(tree, f"DATA.EXCLUDE={listed}", "-fix", listed, "-overwrite")
    assert len(listed.read_text().splitlines()) == 2 + len(kinds) + 4, "earlier lines stay"


def test_classes_without_images_are_found(check: Check, tree: Path) -> None:
    shutil.rmtree(tree / "val" / "cat")
    done, found = check(tree)
    assert "note: classes without validation images: 1\n    cat" in done.out
    assert found["notes"]["classes_without_validation_images"] == ["cat"]
    for image in (tree / "train" / "bee").iterdir():
        image.unlink()
    done, found = check(tree, code=1)
    assert found["defects"]["empty_classes"] == ["bee"]
    assert found["classes"]["training"]["bee"] == 0
    assert "classes without training images: 1" in done.out


def test_all_training_copies_with_conflicting_labels_are_excluded(check: Check, tree: Path, tmp_path: Path) -> None:
    """Also the one that sorts first. A copy in validation stays, so that results on it remain comparable."""
    train, val, listed = tree / "train", tree / "val", tmp_path / "exclude.txt"
    shutil.copy(train / "bee" / "1.jpg", train / "ant" / "copy.jpg")
    shutil.copy(train / "bee" / "1.jpg", train / "bee" / "again.jpg")
    shutil.copy(train / "bee" / "4.jpg", val / "cat" / "copy.jpg")
    done, found = check(tree, "-fix", listed, code=1)
    conflicts = {"train/bee/1.jpg", "train/bee/again.jpg", "train/ant/copy.jpg", "train/bee/4.jpg"}
    assert {line.split("  # ")[0] for line in listed.read_text().splitlines()[1:]} == conflicts
    assert set(names(found["defects"]["conflicting_labels"])) == conflicts | {"val/cat/copy.jpg"}
    assert "4 training images: copies with different labels, of which none is known to be right" in done.out
    done, _ = check(tree, f"DATA.EXCLUDE={listed}")


def as_lists(tree: Path, labels: list[int]) -> Path:
    (tree / "train_list.txt").write_text("".join(f"train/{CLASSES[i % 3]}/{i}.jpg {k}\n" for i, k in enumerate(labels)))
    (tree / "val_list.txt").write_text("".join(f"val/{CLASSES[i % 3]}/{i}.jpg {i % 3}\n" for i in range(6)))
    return tree


def as_shards(tree: Path, labels: list[int]) -> Path:
    """Both splits as tar files, with names for the three classes."""
    for part, told in (("train", labels), ("val", [0, 1, 2, 0, 1, 2])):
        images = [(tree / part / CLASSES[i % 3] / f"{i}.jpg").read_bytes() for i in range(len(told))]
        pairs = (((f"{i}.jpg", images[i]), (f"{i}.cls", str(k).encode())) for i, k in enumerate(told))
        write_tar(tree / "tars" / f"{part}-0.tar", [member for pair in pairs for member in pair])
    (tree / "tars" / "classes.txt").write_text("\n".join(CLASSES) + "\n")
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
    ("dataset", "made", "known"), [("imagenet2012", as_lists, ("0", "1", "2")), ("shards", as_shards, CLASSES)]
)
def test_every_label_out_of_range_is_reported(
    check: Check, tree: Path, dataset: str, made: Callable[[Path, list[int]], Path], known: tuple[str, ...]
) -> None:
    labels = [i % 3 for i in range(24)]
    labels[4], labels[5], labels[7] = -1, 2_000_000_000, 7
    _, found = check(made(tree, labels), "-num_classes", 4, dataset=dataset, code=1)
    wrong = found["defects"]["label_out_of_range"]
    assert [Path(one["name"]).stem for one in wrong] == ["4", "5", "7"]
    assert [one["about"].partition(";")[0] for one in wrong] == ["label -1", "label 2000000000", "label 7"]
    assert sum(bool(defects) for defects in found["defects"].values()) == 1, found["defects"]
    assert found["classes"]["training"] == {
        **dict(zip(known, (8, 6, 7), strict=True)),
        **{f"label {label}": 1 for label in (-1, 7, 2_000_000_000)},
    }
    assert found["classes"]["validation"] == dict.fromkeys(known, 2)


def test_label_beyond_64_bits_is_refused(check: Check, tree: Path) -> None:
    done, _ = check(as_lists(tree, [0, 1, 10**30]), dataset="imagenet2012", code=2)
    assert "train_list.txt:3: label 1000000000000000000000000000000 does not fit" in done.err


def test_names_do_not_reach_the_terminal_raw(check: Check, tree: Path) -> None:
    (tree / "train" / "bee" / "loop.jpg").symlink_to("loop.jpg")
    (tree / "train" / "bee" / "a\x1b[31m.txt").touch()
    done, found = check(tree, code=1)
    assert "a\\x1b[31m.txt" in done.err
    assert names(found["defects"]["unreadable"]) == ["train/bee/loop.jpg"]


def test_bad_command_lines_are_refused(vitamp: Callable[..., Result], tree: Path, tmp_path: Path) -> None:
    for words, said in (
        (("-data_path", tmp_path / "none"), "none does not exist"),
        (("-data_path", tree, "-fix", tmp_path / "a", "-json", tmp_path / "a"), "give each its own file"),
    ):
        done = vitamp("-dataset", "imagefolder", *words, script=SCRIPT)
        assert (done.code, said in done.err) == (2, True), done.text


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


def test_data_in_memory_has_no_files_to_check(vitamp: Callable[..., Result]) -> None:
    done = vitamp("-dataset", "digits", "-num_classes", 10, script=SCRIPT)
    assert done.code == 0
    assert "The training split of digits is held in memory" in done.out
