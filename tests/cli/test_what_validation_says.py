"""What the end of a run, evaluate.py and the report say of a figure that flatters, and of doubtful images."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import open_dataset
from datasets.examine.trust import Doubt
from engine.measure.meters import Best, Position
from engine.report.outcome import MOST_LINES, at_end, few_mistakes, strange
from engine.report.trust import MOST, Result, Source, Splits, doubts
from tests.program import Vitamp, run_program
from utils.config import Config
from utils.config.data import DataConfig
from utils.distributed.world import ALONE
from utils.record.history import History
from utils.statistics.proportions import Interval, wilson
from vitamp.metrics import TOP1

COLOURS = {"leaf": (20, 160, 30), "rose": (200, 20, 40), "sky": (40, 90, 220)}
RECIPE = """\
DATA: {DATASET: imagefolder, DATA_PATH: flowers, IMAGE_SIZE: 8, BATCH_SIZE: 12, NUM_WORKERS: 0, CHECK: "off"}
MODEL: {NAME: tiny, NUM_CLASSES: 3, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 6, WARMUP_EPOCHS: 0, BASE_LR: 5e-3}
THREADS: 1
DEVICE: cpu
"""
SWAPPED = "12 of 12 images of leaf are taken for rose, and 12 the other way. Are their folders swapped?"


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run on images of one colour each, whose validation folders of two classes are swapped."""
    drawn = np.random.default_rng(0)
    for split in ("train", "val", "test"):
        for name, colour in COLOURS.items():
            wrong = {"leaf": "rose", "rose": "leaf"}.get(name, name) if split == "val" else name
            (place / "flowers" / split / wrong).mkdir(parents=True)
            for number in range(12):
                pixels = np.clip(drawn.normal(colour, 12, (12, 12, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / "flowers" / split / wrong / f"{number}.png")
    (place / "own.yaml").write_text(RECIPE)
    done = run_program("-cfg", "own.yaml", "-output", "run", cwd=place, streams=place, code=0)
    (place / "said.txt").write_text(done.out)
    return place / "run"


def test_the_best_of_several_validations_and_swapped_folders_are_named(
    run: Path, vitamp: Vitamp, tmp_path: Path
) -> None:
    end = (run.parent / "said.txt").read_text()
    assert SWAPPED in end
    out, evaluate = ("-json", tmp_path / "e.json", "-overwrite"), "scripts/evaluate.py"
    name = json.loads((run / "checkpoints" / "index.json").read_text())["best"]
    for place, part, number in ((run, "val", 6), (run / "checkpoints" / name, "val", 6), (run, "test", 0)):
        said = vitamp(place, "-part", part, *out, script=evaluate, code=0).out
        assert (SWAPPED in said) == (part == "val")
        assert "it is the best of" not in said, "the last was as good"
        assert json.loads((tmp_path / "e.json").read_text())["best_of_validations"] == number
        assert ("points below that here, more than chance explains" in said) == (part == "test")
    grouped = vitamp(run, "-part", "test", "DATA.GROUP=^[a-z]+", script=evaluate, code=0).out
    assert "The interval allows for their 3 groups (DATA.GROUP)" in grouped
    assert "points below that here" not in grouped, "three groups are few"
    copy = run.parent / "flowers" / "test" / "sky" / "copy.png"
    shutil.copy(next((run.parent / "flowers" / "train" / "sky").iterdir()), copy)
    found = vitamp(run, "-part", "test", script=evaluate, code=0).err
    copy.unlink()
    assert "1 of 37 compared images have the bytes of training images" in found
    (tmp_path / "others").mkdir()
    for one, other in (("leaf", "rose"), ("rose", "sky"), ("sky", "leaf")):
        (tmp_path / "others" / other).symlink_to((run.parent / "flowers" / "test" / one).resolve())
    others = vitamp(run, "-data_path", tmp_path / "others", script=evaluate, code=0).out
    assert "Unlike validation: validation had top-1 33.3 %, " in others
    assert "above that here, more than chance explains. The best of several validations flatters; those" in others
    for changed in (("-tta", "flip"), ("DATA.CROP_PCT=0.5",)):
        others = vitamp(run, "-data_path", tmp_path / "others", *changed, script=evaluate, code=0).out
        assert "Unlike validation" not in others, "it was not validated so"
    shutil.copytree(run, tmp_path / "run")
    about = tmp_path / "run" / "checkpoints" / name / "meta.json"
    meta = json.loads(about.read_text())
    del meta["meta_sha256"]
    # Beside 0 % of the others, and at last of too few images to compare them.
    for value, images, said in ((20.0, 36, True), (9.0, 36, False), (20.0, 29, False)):
        meta["metrics"]["acc1"] = value
        meta["val_images"] = images
        about.write_text(json.dumps(meta))
        others = vitamp(tmp_path / "run", "-data_path", tmp_path / "others", script=evaluate, code=0).out
        assert (f"validation had top-1 {value:.1f} %, " in others) == said
    vitamp(run, script="scripts/report.py", code=0)
    page = (run / "report.html").read_text()
    swapped, advice = SWAPPED.split(". ")
    assert f"<dd>{swapped}." in page, "each doubt is a row of its own"
    assert f'<div class="soft">{advice}</div>' in page
    assert "12 of 24 mistakes. Click an image" in page
    vitamp(run, "-part", "test", script="scripts/report.py", code=0)
    page = (run / "report.html").read_text()
    assert "points below that here, more than chance explains" in page, "the doubts about the test images"
    assert swapped not in page, "not those about validation"
    assert "the best of 6 validations" not in page, "test images have chosen nothing"


def test_few_validation_images_name_the_command_for_folds(run: Path) -> None:
    place, advice = run.parent, "To judge by all images, each once, train on five folds: `"
    assert advice not in (place / "said.txt").read_text(), "its validation images come with the data"
    words = ("-cfg", "own.yaml", "-output", "one", "DATA.DATA_PATH=flowers/train", "TRAIN.NUM_EPOCHS=1")
    said = run_program(*words, cwd=place, streams=place, code=0).out
    python, script, *command = said.partition(advice)[2].partition("`")[0].split()
    assert (python, Path(script).name) == ("python", "compare.py")
    assert command == ["-cfg", "one/config.yaml", "-folds", "5", "-output", "one-folds"]
    words = (*command, "-budget_min", "0.01")
    said = run_program(*words, script="scripts/compare.py", cwd=place, streams=place, code=0).out
    assert "one: accuracy " in said
    assert "images of 1 of 5 folds (95 % interval" in said
    assert advice not in (place / "one-folds/one-fold1/log.txt").read_text()


def relatives(
    is_right: np.ndarray, related: Sequence[int], groups: Sequence[str] = (), namesakes: Sequence[int] = ()
) -> str:
    """What is said of these relatives; '' if nothing is."""
    result = Result(TOP1, 100 * float(is_right.mean()), images=len(is_right), is_right=is_right)
    result.related = related
    result.groups = groups
    found = [
        doubt
        for doubt in doubts({"namesakes": namesakes, "series": "Names", "images": {"validation": 140}}, result)
        if doubt.kind == "relatives"
    ]
    return found[0].words(advice=False) if found else ""


def test_images_with_relatives_in_training_are_measured_apart() -> None:
    """What they are worth is measured if there are enough of both kinds; groups widen the intervals."""
    is_right = np.array([True] * 60 + [True, False] * 40)
    start = "at least 60 of 140 validation images have relatives in training"
    measured = f"{start}: top-1 100.00 % (93.98 to 100.00 %) on them, "
    others = "50.00 % (39.30 to 60.70 %) on the other 80"
    assert relatives(is_right, range(60)) == f"Up to 21.4 points too high: {measured}{others}."
    assert others not in relatives(is_right, range(60), [f"{number // 30}" for number in range(140)])
    assert relatives(is_right, range(0, 140, 2)).endswith("on the other 70.")
    assert relatives(np.ones(140, bool), range(60)).endswith("on the other 80, a difference that may be chance.")
    # Few relatives, or no image that surely is none: the fraction of the relatives is a bound.
    assert relatives(is_right, [0]).startswith("Up to 0.7 points too high: at least 1 of 140 ")
    is_only_right = np.arange(140) < 5
    few = relatives(is_only_right, range(5), namesakes=range(100))
    assert few.startswith("Up to 3.6 points too high: at least 5 of 140 "), "not worth more than their fraction"
    assert relatives(np.ones(140, bool), range(10)).endswith("on the other 130, too few to tell.")
    assert ":" not in relatives(is_right, range(140)).partition("high: ")[2]
    assert relatives(is_right, range(60), namesakes=range(140)) == f"Perhaps too high: {start}.", "a wide bound"
    assert relatives(is_right, []) == ""
    some = relatives(is_right, range(60), namesakes=range(70))
    assert some.endswith("50.00 % (38.60 to 61.40 %) on the 70 with neither relatives nor such names.")
    few_groups = relatives(is_right, range(60), [f"{number // 47}" for number in range(140)])
    assert "top-1" not in few_groups, "of two groups, no interval says anything"
    looks = doubts({"alike": [2, 140, 1], "images": {"validation": 140}, "related": [0, 1]})
    assert looks[0].sentence == "2 of 140 validation images look like training images, as edited copies do"
    assert looks[0].effect == "Perhaps too high", "nothing is measured yet"
    no_copies = {"alike": [20, 140, 1, 2, 0], "images": {"validation": 140}}
    assert doubts(no_copies)[0].sentence.startswith("20 of 140 validation images look like training images, but only 2")
    assert doubts(no_copies | {"alike": [2, 140, 1, 0, 0]}) == [], "too few to say anything"


def test_names_that_training_has_too_are_worth_what_is_above_guessing() -> None:
    data = {"series": "The names of 40 of 80", "series_advice": "Compare those of jane_doe_"}
    data |= {"namesakes": list(range(40)), "images": {"validation": 80}}
    (doubt,) = doubts(data, Result(TOP1, 95.0, guess=60.0))
    assert doubt.points == 35
    assert doubt.words(advice=False) == "Perhaps too high: the names of 40 of 80."
    assert "jane" in doubt.words()
    is_right = np.array([True] * 60 + [False] * 20)
    (doubt,) = doubts(data, Result(TOP1, 75.0, guess=60.0, is_right=is_right))
    assert doubt.points == 15, "at most what is above guessing"
    assert doubt.effect == "Up to 15.0 points too high", "it is measured"
    assert "top-1 100.00 % (91.24 to 100.00 %) on them, 50.00 % (35.20 to 64.80 %) on the other 40" in doubt.sentence
    assert doubts({"series": "DATA.GROUP name: 3 groups in more than one split"}) == []
    examined = {"series": "2 of 9 validation images share a name", "namesakes": [0], "images": {"validation": 9}}
    examined["classes"] = {"training": {"a": 5, "b": 5}, "validation": {"a": 9, "b": 0}}
    said = " ".join(doubt.sentence for doubt in doubts(examined, Result(TOP1, 75.0, image="test image")))
    assert "2 of 9 test images share a name" in said, "of other images than validation's"
    assert "1 class of 2 has no test image: b" in said
    (doubt,) = doubts(data, Result(TOP1, 95.0, image="image"), Source(own_data=False))
    assert doubt.advice.startswith("If they show the same things"), "another split of the training data would not help"
    result = Result(TOP1, 75.0, Interval(65.0, 83.0), images=80)
    chance = doubts(data | {"series_group": "name_start"}, result, Source(Path("run"), Splits(unsplit=True)))[1]
    command = "-cfg run/config.yaml -folds 5 -output run-folds DATA.GROUP=name_start`."
    assert chance.words().endswith(command), "folds keep apart what names say to be of one thing"


def test_commands_of_advice_name_the_users_own_code_and_work_without_weights() -> None:
    result = Result(TOP1, 75.0, Interval(65.0, 83.0), images=80, validations=3, last=60.0, related=[0, 1])
    splits = Splits(unsplit=True, test=True)
    data = {"use": ["-use", "my loss.py"], "pretrained": False}
    said = " ".join(doubt.words() for doubt in doubts(data, result, Source(Path("run"), splits)))
    assert "compare.py -cfg run/config.yaml -use 'my loss.py' -folds 5" in said
    assert "evaluate.py run -part test -trust`" in said
    assert "check_data.py -cfg run/config.yaml -use 'my loss.py'` names copies" in said
    assert "-alike" not in said


def test_a_shortcut_that_validation_has_too_may_be_all_that_the_model_knows() -> None:
    shortcut = {"properties": "size and shape", "of_file": True, "in_validation": True, "points": 45.0}
    shortcut |= {
        "misled": [],
        "validation_top1": 90.0,
        "validation_interval": [85.0, 94.0],
        "advice": "Crop",
        "images": ["a.png"],
    }
    (doubt,) = doubts({"shortcuts": [shortcut]}, Result(TOP1, 80.0, guess=55.0))
    assert doubt.words() == (
        "Up to 25.0 points too high: without the picture, size and shape alone recognise 90.0 % of the validation "
        "images (85.00 to 94.00 %). Crop."
    )
    # Where size and shape are wrong, a model that knows them alone is wrong, too.
    misled = list(range(10))
    knows_files = np.arange(100) >= 10
    there = "on the 10 images where they name another"
    for is_right, effect, end in (
        (knows_files, "Up to 90.0 points too high", f"0.00 % (0.00 to 27.75 %) {there}"),
        (np.ones(100, bool), "Perhaps too high", f"{there}, too few to tell"),
    ):
        result = Result(TOP1, 100 * float(is_right.mean()), is_right=is_right)
        (doubt,) = doubts({"shortcuts": [shortcut | {"misled": misled}]}, result)
        assert doubt.effect == effect
        assert doubt.sentence.endswith(end)
    for change in ({"of_file": False}, {"in_validation": False}):
        assert doubts({"shortcuts": [shortcut | change]}) == []


def test_doubts_of_the_largest_effect_come_first_and_unmeasured_ones_last() -> None:
    data = {"classes": {"training": {"a": 5, "b": 5}, "validation": {"a": 3, "b": 0}}, "images": {"validation": 3}}
    result = Result(TOP1, 90.0, Interval(80.0, 95.0), images=3, validations=4, last=86.0)
    result.problems = [Doubt(f"{number}", "", points=-number) for number in range(11, 20)]
    found = doubts(data, result)
    assert [doubt.kind for doubt in found] == ["19", "18", "17", "16", "15", "14", "13"]
    assert len(found) == MOST
    result.problems = []
    tested = doubts(data, result, Source(Path("run"), Splits(test=True)))[0]
    assert tested.words().endswith("once you have decided: `python scripts/evaluate.py run -part test`.")
    assert [doubt.words(advice=False) for doubt in doubts(data, result)] == [
        "Up to 10.0 points too high: chance, on 3 validation images; it may as well be 5.0 points too low. It is the "
        "best of 4 validations on these images; the last had 86.00 %.",
        "Perhaps too high: 1 class of 2 has no validation image: b.",
    ]
    assert doubts({}, Result(TOP1, 90.0, Interval(89.6, 90.4), images=30_000, validations=4, last=89.8)) == []
    result.last = 70.0
    choice = "it is the best of 4 validations on these images; the last had 70.00 %"
    assert choice in [doubt.sentence for doubt in doubts(data, result)], "more than chance"
    (perfect,) = doubts({}, Result(TOP1, 100.0, wilson(100.0, 10), images=10))
    assert perfect.words(advice=False) == "Up to 27.8 points too high: chance, on 10 validation images."


def test_a_few_mistakes_are_named_without_reading_an_image(tmp_path: Path) -> None:
    for number in range(8):
        image = tmp_path / ("leaf", "rose")[number % 2] / f"{number}.png"
        image.parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(image)
    data = DataConfig(DATASET="imagefolder", DATA_PATH=f"{tmp_path}", PART="all")
    images = open_dataset(data, train=False, num_classes=3, seed=0, device=torch.device("cpu"))
    for image in tmp_path.glob("*/*"):
        image.unlink()
    labels = images.sample_labels()

    def named(*mistaken: int, guess: int = 2) -> str:
        guesses = labels.astype(np.uint8)
        guesses[list(mistaken)] = guess
        doubt = few_mistakes(images, data, guesses)
        return doubt.words() if doubt else ""

    one = "Perhaps too low: 1 mistake in the best validation, leaf/2.png (labelled leaf, predicted "
    assert named(1) == f"{one}2). Look whether their labels are right."
    assert named(1, guess=1).startswith(f"{one}rose).")
    two = named(1, 7)
    assert two.startswith("Perhaps too low: 2 mistakes ")
    assert "predicted 2); rose/7.png (labelled rose, predicted 2)." in two
    assert named() == named(*range(6)) == ""
    digits = open_dataset(DataConfig(DATASET="digits"), train=False, num_classes=10, seed=0, device=torch.device("cpu"))
    guesses = digits.sample_labels().copy()
    guesses[0] += 1
    assert few_mistakes(digits, data, guesses) is None, "images in memory have no names"


def test_only_what_stands_out_is_strange() -> None:
    names, labels = ["a", "b", "c"], np.repeat([0, 1, 2], 20)
    taken = np.where(labels == 0, 1, labels)
    (said,) = strange(labels, taken, names, None)
    assert said.words() == (
        "Up to 33.3 points too low: 20 of 20 images of a are taken for b. Are they of that class, or from another "
        "source?"
    )
    (never,) = strange(labels, np.ones(60, int), names, None)
    assert never.sentence == "2 classes of 3 are never recognised: a, c", "a model that has learnt nothing"
    for images, is_named in ((4, False), (5, True)):
        rare = np.repeat([0, 1, 2], [images, 20, 20])
        said = strange(rare, np.where(rare == 0, 1, rare), names, None)
        assert [doubt.words() for doubt in said] == ["Not learnt: 1 class of 3 is never recognised: a."] * is_named
        a_third = np.where(np.arange(len(rare)) % 3, 3 - rare, rare)
        assert not strange(rare, np.where(rare == 0, 2, a_third), names, None), "by chance, if top-1 is 30 %"
    few = np.repeat([0, 1, 2], [9, 20, 20])
    assert not strange(few, np.where((few == 0) & (np.arange(49) > 0), 1, few), names, None), "too few images"
    two = np.repeat([0, 1], 20)
    (never,) = strange(two, np.ones(40, int), names, None)
    assert never.sentence == "1 class of 2 is never recognised: a", "always the same class"
    (said,) = strange(two, np.where(np.arange(40) % 2, two, 1 - two), names, 95.0)
    assert said.sentence == "only 50.0 % of these images are recognised, and 95.0 % in folds of training images"
    assert not strange(two, np.where(np.arange(40) % 8, two, 1 - two), names, 95.0), "87.5 % of 40"
    assert not strange(two, np.where(np.arange(40) % 2, two, 1 - two), names, 95.0, two), "the probe recognises them"


def test_the_end_of_a_run_has_no_more_sentences_than_one_reads(tmp_path: Path) -> None:
    """Here, ten pairs of folders are swapped."""
    labels = np.repeat(np.arange(22), 20)
    guesses = np.where(labels < 20, labels ^ 1, 20)
    seen: Any = SimpleNamespace(sample_labels=lambda: labels, groups=list, classes=None, single_images=lambda: None)
    best = Best(figure=4.5, kind="acc1", update=2, epoch=2)
    config = Config.model_validate({"MODEL": {"NUM_CLASSES": 22}, "TRAIN": {"NUM_EPOCHS": 2}})
    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(config=config, world=ALONE),
        ready=SimpleNamespace(val_set=seen, choices={}),
        config=config,
        folder=tmp_path,
        best=best,
        best_metrics=SimpleNamespace(predictions={"guess": guesses}, value={"acc1": 4.5}.get),
        guess=4.5,
        probe=None,
        position=Position(epoch=3, update=2),
        paused=False,
    )
    validated = History([{"event": "val", "update": update} for update in (1, 2)])
    context, *found, commands = filter(None, at_end(trainer, Splits(), validated))
    assert context.startswith("Top-1 4.50 % on 440 images")
    assert len(found) == MOST_LINES - 1
    assert all("Are their folders swapped?" in line for line in found)
    assert found[-1].endswith("Are their folders swapped? The report has more.")
    assert commands.startswith("Next")
