"""What is said of image files before training (DATA.CHECK)."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets.base import Unreadable
from datasets.examine import copies as searching
from datasets.examine.headers import median_side
from datasets.examine.training import examine, notes_of, warnings_of
from datasets.sources.files import FileSamples
from tests.datasets.opened import of_shards, part
from tests.datasets.shards.tar_files import write_tar
from tests.program import TINY_DIGITS, Result, Vitamp, metrics
from utils.config import Config, load_config
from utils.config.data import DataConfig
from utils.config.train import TrainConfig

COUNTS = {"arrow": 40, "bell": 12, "cog": 3}


def write(path: Path, seed: int, mode: str = "RGB", size: tuple[int, int] = (20, 16), turned: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], len(mode)), dtype=np.uint8)
    image = Image.fromarray(pixels.squeeze(), mode)
    exif = image.getexif()
    if turned:
        exif[0x112] = 6
    image.save(path, exif=exif)


@pytest.fixture
def icons(tmp_path: Path) -> Path:
    """train/ and val/: three copies in val, a class without validation images; RGBA, grey, and turned images."""
    root, number = tmp_path / "icons", 0
    for name, count in COUNTS.items():
        for index in range(count):
            mode = "RGBA" if name == "bell" else "L" if name == "cog" else "RGB"
            write(root / "train" / name / f"{index}.png", number, mode)
            number += 1
    write(root / "train/arrow/turned.jpg", number, turned=True)
    for name in ("arrow", "bell"):
        for index in range(5):
            write(root / "val" / name / f"{index}.png", 1000 + number + index)
            number += 10
    for index in range(3):
        shutil.copy(root / f"train/bell/{index}.png", root / f"val/bell/copy{index}.png")
    return root


def lines(root: Path, run: Path, vitamp: Vitamp, *words: str) -> Result:
    small = ("DATA.IMAGE_CHANNELS=3", "-num_classes", "auto", "TRAIN.MAX_UPDATES=2", "-batch_size", "8")
    recipe = root.parent / "tiny.yaml"
    recipe.write_text(TINY_DIGITS, encoding="utf-8")
    words = ("-dataset", "imagefolder", "-data_path", str(root), *small, *words)
    return vitamp("-cfg", recipe, "-output", run, *words, code=0)


def test_training_says_what_its_data_is_like(icons: Path, vitamp: Vitamp, tmp_path: Path) -> None:
    done = lines(icons, tmp_path / "run", vitamp)
    assert (
        "Data: 56 training, 13 validation images in 3 classes, from 3 (cog) to 41 (arrow) training images. "
        "In validation, always guessing its largest class would give 61.5 %." in done.out
    )
    assert "The largest class has 14 times as many images as the smallest" in done.out
    assert "With an alpha channel (DATA.BACKGROUND=white): 12 of 56 training images." in done.out
    assert "read as they are stored: 1 of 56 training images. DATA.EXIF_ROTATE=true turns them; `" in done.out
    assert "Copies of training images, on which a model does better than on new ones: 3 of 13 validation" in done.err
    assert "has no image for 1 of its 3 classes (the first: cog)" in done.err
    check = f"`python scripts/check_data.py -cfg {tmp_path}/run/config.yaml -fix exclude.txt`"
    assert done.text.count(check) == done.err.count(check) == 1, "once, before training"
    told = json.loads((tmp_path / "run/data.json").read_text())
    assert (told["copies"]["found"], told["copies"]["compared"]) == (3, 13)
    assert told["classes"]["training"] == {"arrow": 41, "bell": 12, "cog": 3}
    without_picture, copies = told["warnings"]
    start = "Recognised without the picture, of 56 training images looked at: arrow by format, colour mode and JPEG set"
    assert without_picture.startswith(start)
    assert copies.startswith("Copies of training images")
    assert "details of fewer than" not in done.out

    evaluated = vitamp(tmp_path / "run", script="scripts/evaluate.py")
    assert "at least 3 of 13 validation images have relatives in training" in evaluated.out, evaluated.text

    page = tmp_path / "report.html"
    vitamp(tmp_path / "run", "-no_predictions", "-out", page, script="scripts/report.py", code=0)
    text = page.read_text(encoding="utf-8")
    assert "<h2>What training said of the data</h2>" in text
    assert "Copies of training images" in text
    assert "always guessing its largest class would give 61.5" in text


def test_images_much_larger_than_the_model_sees_lose_details(icons: Path, vitamp: Vitamp, tmp_path: Path) -> None:
    done = lines(icons, tmp_path / "run", vitamp, "-image_size", "4", "MODEL.PATCH_SIZE=2", "-epochs", "0")
    assert "Images of 16 pixels on the shorter side (the median) are seen at 4: details of fewer than 4 pix" in done.out


def test_the_commands_it_names_remove_the_copies(icons: Path, vitamp: Vitamp, tmp_path: Path) -> None:
    own, run, listed, command = tmp_path / "own.py", tmp_path / "run", tmp_path / "out.txt", ""
    own.write_text("from vitamp import loss\n@loss\ndef mine(logits, targets):\n    return logits.square().mean()\n")
    dry = lines(icons, tmp_path / "dry", vitamp, "-dry-run", "-batch_size", "auto", "TRAIN.MEMORY_LIMIT=2")
    first = lines(icons, run, vitamp, "-use", str(own), "TRAIN.LOSS=mine")
    resumed = vitamp("-resume", run, "-trust", "-dry_run", "TRAIN.MAX_UPDATES=4", code=0)
    for done in (dry, resumed, first):
        command = done.err.partition("Copies of training")[2].partition("`python ")[2].partition("`")[0]
        script, *words = command.replace("exclude.txt", str(listed)).split()
        assert "There are defects" in vitamp(*words, "-overwrite", script=script, code=1).out
        assert not re.search("-output|-batch_size|-dry_run|TRAIN", command), "only what concerns the data"
    assert first.text.count(f"`python {command}`") == 1
    again = lines(icons, tmp_path / "again", vitamp, f"DATA.EXCLUDE={listed}")
    assert "training images are all left out" not in again.text
    all_cogs = tmp_path / "cogs.txt"
    all_cogs.write_text("".join(f"train/cog/{index}.png\n" for index in range(COUNTS["cog"])))
    emptied = lines(icons, tmp_path / "emptied", vitamp, f"DATA.EXCLUDE={all_cogs}")
    assert "Classes whose training images are all left out (DATA.EXCLUDE, DATA.RELABEL): cog." in emptied.err
    assert "Copies of training images" not in again.err
    assert json.loads((tmp_path / "again/data.json").read_text())["images"] == {"training": 53, "validation": 13}


def test_the_test_split_is_counted_and_its_copies_are_named(icons: Path, vitamp: Vitamp, tmp_path: Path) -> None:
    for index in range(4):
        write(icons / f"test/bell/{index}.png", 5000 + index)
    shutil.copy(icons / "train/cog/1.png", icons / "test/bell/4.png")
    for index in range(5, 9):
        shutil.copy(icons / f"train/bell/{index}.png", icons / "test/bell")
    shutil.copy(icons / "test/bell/0.png", icons / "val/bell/test0.png")
    done = lines(icons, tmp_path / "run", vitamp)
    assert "Data: 56 training, 14 validation, 9 test images in 3 classes" in done.out
    found = {"training": "5 of 9 test images, 1 of them with another label there", "validation": "1 of 9 test images"}
    for other, original, copy in (("training", "train/cog/1", "4"), ("validation", "val/bell/test0", "0")):
        text = f"Copies of {other} images, on which a model does better than on new ones: {found[other]}. "
        assert f"{text}{icons}/test/bell/{copy}.png has the bytes of {icons}/{original}.png." in done.err
    told = json.loads((tmp_path / "run/data.json").read_text())
    assert {title: one["found"] for title, one in told["copies_in_test"].items()} == {"training": 5, "validation": 1}
    (icons / "test/unknown").mkdir()
    write(icons / "test/unknown/0.png", 1)
    again = lines(icons, tmp_path / "again", vitamp)
    assert f"The test split is not checked: {icons}/test/unknown: the training split" in again.err


def test_check_changes_no_number_and_can_be_off(icons: Path, vitamp: Vitamp, tmp_path: Path) -> None:
    for how in ("quick", "full", "off"):
        done = lines(icons, tmp_path / how, vitamp, f"DATA.CHECK={how}")
        assert ("Data: 56 training" in done.out) == (how != "off")
        assert metrics(tmp_path / how, "val") == metrics(tmp_path / "quick", "val")
    assert not (tmp_path / "off/data.json").exists()
    assert load_config(None, None, {"DATA.CHECK": "off"}).config.DATA.CHECK == "off", "which YAML reads as false"


def samples(root: Path, split: str) -> FileSamples:
    paths = sorted(str(path.relative_to(root)) for path in (root / split).glob("*/*"))
    names = sorted(COUNTS)
    return FileSamples(root, paths, np.array([names.index(path.split("/")[1]) for path in paths]), names)


def test_a_part_is_compared_where_the_time_is_short(icons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that each look at a clock takes is made up: what is compared does not depend on the machine."""
    now = iter(np.arange(0.0, 1e5, 0.055))
    monkeypatch.setattr(searching.time, "monotonic", lambda: float(next(now)))
    found = examine(samples(icons, "train"), samples(icons, "val"), DataConfig(IMAGE_CHANNELS=3))
    assert found.copies is not None
    assert 0 < found.copies.compared < 13
    assert 0 < found.looked_at < 56
    said = notes_of(found, Config(), "check")
    assert any(f"only {found.copies.compared} of 13 validation images" in line and "`check`" in line for line in said)
    assert any(f"of {found.looked_at} training images looked at" in line for line in said)
    everything = examine(samples(icons, "train"), samples(icons, "val"), DataConfig(CHECK="full"))
    assert everything.copies is not None
    assert (everything.copies.compared, everything.copies.training) == (13, 56)

    monkeypatch.setattr(searching, "BLOCK", 4)
    now = iter(np.arange(0.0, 1e5, 0.4))
    found = examine(samples(icons, "train"), samples(icons, "val"), DataConfig(IMAGE_CHANNELS=3))
    assert found.copies is not None
    assert 0 < found.copies.training < 56
    said = notes_of(found, Config(), "check")
    assert any(f"images with {found.copies.training} of 56 training images, in the time" in line for line in said)


def test_unreadable_files_are_no_copies_of_each_other(icons: Path) -> None:
    for split in ("train", "val"):
        (icons / split / "bell/gone.png").symlink_to("nowhere")
        (icons / split / "bell/0.png").write_bytes(b"")
        (icons / split / "bell/1.png").write_bytes(b"\xff" * 10)
    found = examine(samples(icons, "train"), samples(icons, "val"), DataConfig())
    assert found.copies is not None
    assert found.copies.found == 3, "copy2, the empty file, and the damaged one"
    assert not any("Searched" in line for line in notes_of(found, Config(), "check"))
    data = [DataConfig(DATASET="imagefolder", DATA_PATH=str(root)) for root in (icons, icons / "train")]
    data += [DataConfig(DATASET="csv"), data[0].changed(EXCLUDE="exclude.txt")]
    told = [[*warnings_of(found, one, "check")] for one in data]
    assert all(one[-1].startswith("Copies of training images") for one in told)
    assert [one[0].count("1 of 3 (the first: cog)") for one in told] == [0, 1, 1, 1], "before, of val/ alone"


def test_images_that_are_not_compared_are_named(icons: Path) -> None:
    for change in ({"remote": True}, {"stored": "pixels"}):
        split = samples(icons, "train")
        vars(split).update(change)
        for check in ("quick", "full"):
            config = Config(DATA=DataConfig(CHECK=check))
            said = notes_of(examine(split, samples(icons, "val"), config.DATA), config, "check")
            assert any("the images are raw pixels or not on this machine" in line for line in said)
            assert not any("DATA.CHECK quick" in line for line in said)


def test_class_weights_are_advised_where_a_loss_takes_them(icons: Path) -> None:
    found = examine(samples(icons, "train"), samples(icons, "val"), DataConfig())
    for train in (TrainConfig(), TrainConfig(DISTILLATION_TYPE="soft"), TrainConfig(LOSS="mine")):
        (said,) = (line for line in notes_of(found, Config(TRAIN=train), "check") if "14 times" in line)
        assert ("CLASS_WEIGHTS" in said) == (train == TrainConfig())
        assert said.endswith("SAVE_BEST_BY=balanced_acc would choose the best checkpoint so; both may lower top-1")
    probe = Config(TRAIN=TrainConfig(NUM_EPOCHS=0))
    assert "14 times" not in "".join(notes_of(found, probe, "check"))
    for metric in ("acc1", "balanced_acc"):
        config = Config(DATA=DataConfig(SAMPLER="balanced"), SAVE_BEST_BY=metric)
        said = "".join(notes_of(found, config, "check"))
        assert ("SAVE_BEST_BY=balanced_acc chooses by it" in said) is (metric == "acc1")


@pytest.mark.parametrize("words", ["DATA.SAMPLER=balanced", "TRAIN.CLASS_WEIGHTS=balanced"])
def test_unequal_classes_are_named_where_training_balances_them(
    icons: Path, vitamp: Vitamp, tmp_path: Path, words: str
) -> None:
    said = lines(icons, tmp_path / "run", vitamp, words).out
    assert "14 times as many images as the smallest: top-1 mostly counts the large ones. Balanced accuracy " in said
    assert "DATA.SAMPLER=balanced or" not in said


def test_images_in_tar_files_are_compared(icons: Path) -> None:
    for split in ("train", "val"):
        images = enumerate(sorted((icons / split).rglob("*.*g")))
        pairs = (((f"{k}{path.suffix}", path.read_bytes()), (f"{k}.cls", b"0")) for k, path in images)
        write_tar(icons / f"{split}-0.tar", [member for pair in pairs for member in pair])
    (icons / "classes.txt").write_text("crane\ndog\ncrane\n")
    data = of_shards(icons, CHECK="full")
    found = examine(part(data), part(data, train=False), data)
    assert found.copies is not None
    assert (found.copies.found, found.copies.compared, found.copies.training) == (3, 13, 56)
    assert found.classes["training"] == {"crane (label 0)": 56, "dog": 0, "crane (label 2)": 0}


def test_arrays_have_sizes_and_broken_ones_are_passed_over(icons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = samples(icons, "train")
    read = {0: np.zeros((4, 6, 3), dtype=np.uint8)}

    def one(index: int) -> np.ndarray:
        if index not in read:
            raise Unreadable("not an .npy file")
        return read[index]

    monkeypatch.setattr(split, "read", one)
    found = examine(split, samples(icons, "val"), DataConfig(CHECK="full"))
    assert found.looked_at == 1
    assert median_side(split, DataConfig()) == 4
