"""scripts/check_labels.py finds planted wrong labels, and none where all are right."""

import csv
import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from datasets.exclude import read_rows
from engine.evaluation.linear import fit
from engine.trained.model import Trained
from tests.label_sets import named, write_recipe, write_set
from tests.program import Result, metrics
from tests.tools.browser import View, views_of
from tools.check_labels import command, methods, prove, search
from tools.check_labels.searched_images import Images, Suspect, open_images
from tools.check_labels.wrong_labels import Verdict, find_wrong, nearest
from tools.common.per_image import per_image, values_of_images
from tools.common.report_page.page import write_report
from tools.common.turns import Budget
from tools.compare import runs
from utils import progress
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from vitamp.metrics import TOP1

Call = Callable[..., Result]
CLASSES = ("ant", "bee", "cat")
STRIPES = np.s_[:, :4], np.s_[:4], np.s_[::2]
"""Which pixels of an image of each class are bright"""


@pytest.fixture
def check(in_process: Callable[[Any], Call], tmp_path: Path) -> Call:
    """check_labels.py in this process; its output is in tmp_path/labels."""
    return lambda *words, code=0: in_process(command.main)("-output", tmp_path / "labels", *words, code=code)


def write_folders(root: Path, wrong: int = 8, images: int = 150, seed: int = 0) -> dict[str, str]:
    """Class folders of PNG files; the right class of each that is in the folder of another."""
    generator, planted = np.random.default_rng(seed), {}
    for number in range(images):
        true = number % 3
        given = CLASSES[true if number >= wrong else (true + 1 + number // 3 % 2) % 3]
        pixels = generator.integers(0, 60, (8, 8), dtype=np.uint8)
        pixels[STRIPES[true]] += np.uint8(190)
        (root / given).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / given / f"{number}.png")
        if number < wrong:
            planted[f"{given}/{number}.png"] = CLASSES[true]
    return planted


def of_folders(root: Path) -> tuple[object, ...]:
    """Cropped, which makes them smoother: the model of the digits tells the stripes apart better."""
    return "-dataset", "imagefolder", "-data_path", root, "DATA.NUM_WORKERS=0", "DATA.CROP=random"


def listed(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((out / "suspects.csv").read_text().splitlines()))


def excluded(out: Path) -> set[str]:
    return {line.partition("  #")[0] for line in (out / "exclude.txt").read_text().splitlines()}


def test_planted_labels_are_found_by_features(check: Call, digits_run: Path, tmp_path: Path) -> None:
    planted, out = write_folders(tmp_path / "data", wrong=14), tmp_path / "labels"
    shutil.copy(tmp_path / "data" / "ant" / "30.png", tmp_path / "data" / "bee" / "copy.png")
    planted["bee/copy.png"] = "ant"
    done = check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both")
    assert "151 images (all images), 3 classes; 1 copies of others, 1 of them with another label" in done.out
    rows = listed(out)
    named = {row["path"]: row["proposed"] for row in rows}
    assert named.items() <= planted.items()
    assert len(named) >= 12
    assert {row["decision"] for row in rows} == {"drop"}
    assert [row["given"] for row in rows] == [row["path"].partition("/")[0] for row in rows]
    assert excluded(out) == set(named)
    page = (out / "report.html").read_text()
    assert [name for name in named if name not in page] == []
    assert f"{len(named)} labels look wrong; " in page
    assert "bee looks like ant: " in done.out

    excluding = f"DATA.EXCLUDE={out / 'exclude.txt'}"
    words = digits_run, *of_folders(tmp_path / "data"), "-pool", "both", excluding
    assert "may have decisions of yours" in check(*words, code=2).err
    again = check(*words, "-overwrite")
    assert f"{151 - len(named)} images" in again.out
    assert "Too few to tell from chance" in again.out
    assert excluded(out) == set(named), "those of an earlier list stay"


def test_a_validation_label_of_no_class_is_an_error(check: Call, digits_run: Path, tmp_path: Path) -> None:
    write_folders(tmp_path / "images", wrong=0, images=60)
    for split, more in (("train", ""), ("val", "images/ant/0.png,7\n")):
        paths = sorted((tmp_path / "images").rglob("*.png"))
        rows = [f"{path.relative_to(tmp_path)},{CLASSES.index(path.parent.name)}\n" for path in paths]
        (tmp_path / f"{split}.csv").write_text("path,target\n" + "".join(rows) + more)
    said = check(digits_run, "-dataset", "csv", *of_folders(tmp_path)[2:], "-pool", "both", code=2).err
    assert "images/ant/0.png: the label 7 is none of the 3 classes of the training images." in said


def test_few_wrong_labels_are_to_be_looked_at(check: Call, digits_run: Path, tmp_path: Path) -> None:
    planted = write_folders(tmp_path / "data", wrong=2, images=60)
    done = check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both")
    for said in (done.out, (tmp_path / "labels" / "report.html").read_text()):
        assert "Too few to tell from chance: 2 labels look wrong; 2 of them by their nearest images, too, where" in said
        assert re.search(r"would if all were right, about \d\.\d on average\. .* and all may be right\.", said)
        assert "Nothing found" not in said
        assert re.search(r"Of 5 labels that were changed on purpose, 2\s% at a time, [1-5] look wrong to this", said)
    assert [row["decision"] for row in listed(tmp_path / "labels")] == ["keep"] * 20
    assert {row["path"] for row in listed(tmp_path / "labels")[:2]} == planted.keys()
    assert re.findall(r"looks like \w+: (\d+) image", done.out) == ["1", "1"], "others do not look wrong"


DECIDE = """(async () => {
  const saved = [], make = URL.createObjectURL;
  URL.createObjectURL = (blob) => { saved.push(blob); return make(blob); };
  const figures = document.querySelectorAll("figure[data-row]");
  figures[0].querySelector("input[value=relabel]").click();
  saved.length = 0;
  figures[1].querySelector("input[value=keep]").click();
  return [await saved[0].text(), await saved[1].text(), document.querySelectorAll(".photo i").length,
          document.querySelector(".photo img").naturalWidth];
})()"""


def test_decisions_are_made_in_the_page(
    check: Call, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folders(tmp_path / "data", wrong=14)
    monkeypatch.setattr("tools.check_labels.page.MOST_SHOWN", 10)
    check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both")
    out, before = tmp_path / "labels", listed(tmp_path / "labels")
    (view,) = views_of(out / "report.html", tmp_path, [View(1000, False, script=DECIDE)])
    assert not view.complaints
    assert view.requests == [(out / "report.html").as_uri()]
    table, names, frames, width = view.answer
    (out / "suspects.csv").write_text(table)
    (out / "exclude.txt").write_text(names)
    rows = {row["path"]: row for row in listed(out)}
    changed = {before[0]["path"]: "relabel", before[1]["path"]: "keep"}
    assert rows == {row["path"]: row | {"decision": changed.get(row["path"], "drop")} for row in before}
    assert len(rows) > 10, "also those that are not shown"
    assert excluded(out) == rows.keys() - changed.keys()
    assert frames == 10
    assert width > 240, "a click enlarges small images, too"
    data = DataConfig(
        DATASET="imagefolder", DATA_PATH=f"{tmp_path / 'data'}", RELABEL=f"{out / 'suspects.csv'}", PART="train"
    )
    assert {name: row[3] for name, row in read_rows(data)[0].items()} == {
        name: row["decision"] for name, row in rows.items()
    }


def test_nearly_equal_images_of_two_classes_are_suspects(check: Call, digits_run: Path, tmp_path: Path) -> None:
    """The one whose label is less probable, even where nothing else is found; no model that is asked saw the other."""
    write_folders(tmp_path / "data", wrong=0)
    for number in (30, 31):
        with Image.open(tmp_path / "data" / CLASSES[number % 3] / f"{number}.png") as image:
            pixels = np.asarray(image).copy()
        pixels[0, 0] ^= 1
        Image.fromarray(pixels).save(tmp_path / "data" / "cat" / f"{number}_again.png")
    done = check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both")
    assert "0 copies of others, 0 of them with another label; 2 pairs nearly the same, with diff" in done.out
    said = "2 images have a copy, or nearly one, with another, likelier label; none is known to be right."
    page = (tmp_path / "labels" / "report.html").read_text()
    assert said in done.out
    assert said in page
    assert page.count("these 2 images look alike and have 2 labels") == 2
    assert 'class="bad"' not in page, "it accuses none of them"
    assert "Too few to tell from chance" in done.out
    one, other, *_ = [(row["path"], row["proposed"]) for row in listed(tmp_path / "labels")]
    assert {one, other} == {("cat/30_again.png", "ant"), ("cat/31_again.png", "bee")}
    assert {row["decision"] for row in listed(tmp_path / "labels")} == {"keep"}, "both labels may be right"
    assert not excluded(tmp_path / "labels")


def test_images_that_show_one_thing_with_several_labels_are_counted() -> None:
    def counted(groups: list[str], alike: int = 1) -> str:
        labels, likeness = np.array([0, 1, 1, 1, 2, 2, 2, 2]), np.zeros(8)
        likeness[:alike] = 0.9
        samples: Any = SimpleNamespace(groups=groups)
        none: Any = None
        numbers = np.arange(8)
        images = Images(none, none, samples, [*"abc"], labels, numbers, numbers, numbers)
        return images.images_of_same_thing(0, likeness, 0.8)[1]

    assert counted([]) == counted([*"abcdefgh"]) == ""
    assert counted([], alike=2) == "these 2 images look alike and have 2 labels"
    assert counted([*"aaabbccc"]) == "", "most groups have several labels"
    assert counted([*"aaabccdd"]) == "the 3 images of its group have 2 labels"
    assert counted([*"aaabccdd"], alike=6) == "these 6 images look alike and have 3 labels"


def test_swapped_classes_of_the_validation_split_are_found(check: Call, digits_run: Path, tmp_path: Path) -> None:
    write_folders(tmp_path / "data" / "train", wrong=0)
    write_folders(tmp_path / "data" / "val", wrong=0, images=60, seed=1)
    for name, other in (("ant", "swapped"), ("bee", "ant"), ("swapped", "bee")):
        (tmp_path / "data" / "val" / name).rename(tmp_path / "data" / "val" / other)
    done = check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both")
    assert "Nothing found: no label looks wrong" in done.out, "in the training split"
    assert "Labels of the validation split, by models of the training split." in done.out
    found = listed(tmp_path / "labels" / "validation")
    assert Counter((row["given"], row["proposed"]) for row in found) == {("ant", "bee"): 20, ("bee", "ant"): 20}
    assert {row["decision"] for row in found} == {"keep"}
    assert not excluded(tmp_path / "labels" / "validation"), "metrics without the model's mistakes would flatter it"
    assert f"DATA.EXCLUDE={tmp_path}/labels/validation/exclude.txt leaves out what you drop" in done.out


def test_features_of_the_same_images_are_computed_once(
    check: Call, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are and whatever other images are among them; a pipe shows how far it is."""
    monkeypatch.setattr(progress, "PACE", 0.0)
    write_folders(tmp_path / "data", wrong=0, images=60)
    words = digits_run, "-pool", "both", f"DATA.CACHE={tmp_path / 'cache'}", "-overwrite"
    first = check(*words, *of_folders(tmp_path / "data")).out
    assert "60 images; no features of these very weights and images are kept yet, 60 are computed now" in first
    assert all(line in first for line in ("features: 60 of 60 images, about 0:", "redrawn labels: 19 of 19 times"))
    for file in (tmp_path / "data").glob("*/*"):
        (tmp_path / "copy" / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, tmp_path / "copy" / file.parent.name / file.name)
    assert "60 images; features are kept in " in check(*words, *of_folders(tmp_path / "copy")).out
    Image.new("L", (8, 8), 9).save(tmp_path / "copy" / "ant" / "new.png")
    assert "61 images; features of 60 are kept, 1 are computed now" in check(*words, *of_folders(tmp_path / "copy")).out
    other = check(*words, *of_folders(tmp_path / "data"), "-amp", "off").out
    assert re.search(r"kept yet \(those in \w+-\w+ have another precision\), 60 are computed now", other)


def test_right_labels_are_left_alone(check: Call, digits_run: Path, tmp_path: Path) -> None:
    write_folders(tmp_path / "data", wrong=0)
    for images, name, prefix in ((4, "dog", ""), (12, "elk", "one-")):
        (tmp_path / "data" / name).mkdir()
        for number in range(images):
            Image.new("L", (8, 8), 240 // images * number).save(tmp_path / "data" / name / f"{prefix}{number}.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "exclude.txt").write_text("of an earlier search\n")
    group = r"DATA.GROUP=(\w+)[-.]"  # the images of elk are one group, the others one each
    done = check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both", group)
    assert "Not judged, since they have fewer images than folds, or all in one group: dog, elk." in done.out
    assert "Nothing found" in done.out
    page = (tmp_path / "labels" / "report.html").read_text()
    assert "<h2>The most doubtful images, which may all be right</h2>" in page
    assert "None of these labels looks wrong beyond what chance and hard images explain" in page
    assert page.count("<figure") == page.count("otherwise <b>") == 20, "and not: looks like"
    assert [row["decision"] for row in listed(tmp_path / "labels")] == ["keep"] * 20
    assert excluded(tmp_path / "labels") == set()


def test_one_wrong_group_may_be_chance(check: Call, digits_run: Path, tmp_path: Path) -> None:
    """Ten images of one thing in the folder of another class: without DATA.GROUP, they look like ten wrong labels."""
    write_folders(tmp_path / "data", wrong=0, images=300)
    for image in sorted((tmp_path / "data").glob("*/*.png")):
        thing = f"{image.parent.name}{int(image.stem) // 30}"
        folder = "ant" if thing == "bee0" else image.parent.name
        image.rename(tmp_path / "data" / folder / f"{thing}-{image.name}")
    words = digits_run, *of_folders(tmp_path / "data"), "-pool", "both", "-overwrite"
    assert re.search(r"^10 labels look wrong; .* where up to 0 would if all were right", check(*words).out, re.M)
    grouped = check(*words, r"DATA.GROUP=(\w+)-").out
    assert re.search(r"^Too few to tell from chance: 10 labels look wrong; .* up to 1\d would", grouped, re.M)


def test_a_class_half_of_which_is_called_another_is_said_to_be_beyond_the_search(
    check: Call, digits_run: Path, tmp_path: Path
) -> None:
    write_folders(tmp_path / "data", wrong=0)
    for number in range(0, 75, 3):
        (tmp_path / "data" / "ant" / f"{number}.png").rename(tmp_path / "data" / "bee" / f"{number}.png")
    done = check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both")
    words = "Beyond what this search can find: a class of which the models learnt a third or more of the images under"
    assert words in done.out
    assert words in (tmp_path / "labels" / "report.html").read_text()
    assert {row["decision"] for row in listed(tmp_path / "labels")} == {"keep"}, "the search does not find them"


def test_classes_that_no_model_recognises_are_named(check: Call, digits_run: Path, tmp_path: Path) -> None:
    write_folders(tmp_path / "data", wrong=0)
    (tmp_path / "data" / "fox").mkdir()
    for number in range(6):
        (tmp_path / "data" / CLASSES[number % 3] / f"{number}.png").rename(tmp_path / "data" / "fox" / f"{number}.png")
    done = check(digits_run, *of_folders(tmp_path / "data"), "-pool", "both")
    words = "The models hardly recognise fox (0 of 6 images): suspects of these classes mean nothing, as"
    assert words in done.out
    assert words in (tmp_path / "labels" / "report.html").read_text()


def test_names_that_are_not_utf8_are_listed(check: Call, digits_run: Path, tmp_path: Path) -> None:
    planted = write_folders(tmp_path / "data")
    odd = os.fsencode(tmp_path / "data" / next(iter(planted)))
    os.rename(odd, odd.replace(b"0.png", b"gr\xfcn.png"))
    done = check(digits_run, "-data_path", tmp_path / "data", *of_folders(tmp_path)[4:], "-pool", "both")
    assert "DATA.DATASET imagefolder: " in done.out, "in place of digits"
    assert b"gr\xfcn.png," in (tmp_path / "labels" / "suspects.csv").read_bytes()
    assert (tmp_path / "labels" / "report.html").exists()


def test_several_labels_are_judged_one_by_one(check: Call, digits_run: Path, tmp_path: Path) -> None:
    rows, _ = write_set(tmp_path)
    right = {f"images/train{number}.png": "|".join(named(rows[number])) for number in (*range(5, 13), 20)}
    for number in range(5, 13):
        rows[number, number % 4] ^= 1
    rows[20, :2] ^= 1
    lines = [f"images/train{number}.png,{';'.join(named(row))}" for number, row in enumerate(rows)]
    (tmp_path / "train.csv").write_text("\n".join(["path,labels", *lines, lines[6]]) + "\n")
    recipe = write_recipe(tmp_path)
    done = check("-cfg", recipe, "-image_size", 32, "-pretrained", digits_run, "-pool", "both")
    assert "161 images (training split), 4 classes" in done.out
    assert max(Counter(row["path"] for row in listed(tmp_path / "labels")).values()) == 1
    found = {row["path"]: row["proposed"] for row in listed(tmp_path / "labels")}
    assert f"{len(found) + 2} labels look wrong" in done.out, "image 6 is there twice, 20 has two wrong ones"
    assert len(found.items() & right.items()) >= 6
    assert found["images/train6.png"] == found["images/train20.png"] == ""
    assert "south looks like no class: 2 images" in done.out
    assert {row["decision"] for row in listed(tmp_path / "labels")} == {"drop"}
    assert excluded(tmp_path / "labels") == set(found)


def test_of_several_labels_the_most_doubtful_one_of_an_image_is_listed() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (30, 3))
    images: Any = SimpleNamespace(labels=labels, classes=CLASSES, label_words=lambda label: "".join(map(str, label)))
    logits = 4 * (2 * labels - 1) + random.normal(size=labels.shape)
    suspects, verdict = search.judge_labels(images, logits, 0, np.array([2]))
    assert not verdict.clear
    assert len({one.image for one in suspects}) == len(suspects) > 10
    for one in suspects:
        differs = [given != proposed for given, proposed in zip(one.given, one.proposed, strict=True)]
        assert sum(differs[:2]) == 1
        assert not differs[2], "not judged"


# The probabilities.


def drawn(seed: int, images: int = 1500) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """Calibrated logits of five classes, some of them ambiguous, and labels drawn from them."""
    generator = np.random.default_rng(seed)
    logits = 3 * generator.normal(size=(images, 5))
    return generator, logits, (logits + generator.gumbel(size=logits.shape)).argmax(1)


SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])


@SEEDS
@pytest.mark.parametrize("offsets", [[0] * 5, pytest.param([3, 1, 0, -1, -3], marks=pytest.mark.slow)])
def test_right_labels_do_not_look_wrong(seed: int, offsets: list[int]) -> None:
    """Images are ambiguous; logits have other offsets and scales, such as class weights give."""
    _, logits, labels = drawn(seed)
    found = find_wrong(2 * logits + offsets, labels, seed)
    assert not found.clear
    assert found.look_wrong < 30


@pytest.mark.parametrize("kind", ["uniform", "similar"])
@SEEDS
def test_flips_are_found(seed: int, kind: str) -> None:
    generator, logits, right = drawn(seed)
    if kind == "uniform":
        labels = np.where(generator.random(1500) < 0.05, (right + generator.integers(1, 5, 1500)) % 5, right)
    else:
        labels = np.where((right == 1) & (generator.random(1500) < 0.25), 2, right)
    found, wrong = find_wrong(logits, labels, seed), labels != right
    suspects = np.flatnonzero(found.wrong_probability >= 0.5)
    hits = suspects[wrong[suspects]]
    assert found.clear
    assert found.look_wrong == len(suspects)
    assert len(hits) / len(suspects) > 0.6
    assert len(hits) / wrong.sum() > 0.3
    assert (found.proposed[hits] == right[hits]).mean() > (0.9 if kind == "similar" else 0.6)


def test_hard_images_of_heavy_tailed_classes_do_not_look_wrong() -> None:
    """Calibrated logits call them wrong; their nearest images do not. With a tenth of the labels changed, both do."""
    generator, right = np.random.default_rng(0), np.arange(1000) % 3
    images = (2 * generator.normal(size=(3, 8)))[right] + generator.standard_t(3, (1000, 8))
    changed = np.where(generator.random(1000) < 0.1, (right + generator.integers(1, 3, 1000)) % 3, right)
    for labels, found in ((right, False), (changed, True)):
        logits = fit(images.astype(np.float32), labels, np.arange(1000) // 3 % 5, 3, torch.device("cpu"))[1]
        near = nearest(images, [np.arange(1000)])
        assert find_wrong(logits, labels, 0).clear
        both = find_wrong(logits, labels, 0, near=near)
        assert both.clear == found
        surer = [(both.wrong_probability >= level).sum() for level in (0.8, 0.95)]
        assert [number for number, _, _ in both.surer] == surer
        of_level = [(both.look_wrong, both.agreed, both.most_if_right), *both.surer]
        for lower, higher in itertools.pairwise(of_level):
            assert all(one >= other for one, other in zip(lower, higher, strict=True)), of_level


def test_surer_labels_may_decide() -> None:
    """The counts of 1,000 MNIST digits with 2 % of the labels changed: too few stand out from 0.5 on."""
    nothing = np.empty(0)
    few = Verdict(
        nothing, nothing, nothing, look_wrong=28, agreed=16, most_if_right=9, mean_if_right=6.0, calibrations=[]
    )
    assert not few.clear
    assert few._replace(surer=[(20, 13, 5), (11, 8, 2)]).clear
    assert not few._replace(surer=[(20, 13, 6), (11, 5, 1)]).clear


@pytest.mark.parametrize(("rare", "beside", "counts"), [(False, 0, True), (False, 2, False), (True, 0, False)])
def test_hard_images_resemble_several_classes_or_one_that_is_not_learnt(rare: bool, beside: int, counts: bool) -> None:
    """Labels that look wrong to both views do not count if these propose different classes, or in such a class."""
    right, random, wrong = np.arange(600) % 3, np.random.default_rng(0), np.arange(30)
    labels, logits = right.copy(), 4 * np.eye(4)[right] + random.normal(size=(600, 4))
    labels[wrong] = 3 if rare else (right[wrong] + 1) % 3
    like = right.copy()
    like[wrong] = (right[wrong] + beside) % 3
    near = [random.choice(600, 10, p=np.where(right == each, 0.9, 0.05) / 200) for each in like]
    found = find_wrong(logits, labels, 0, near=torch.from_numpy(np.stack(near)))
    assert found.look_wrong > 20
    assert (found.agreed > 20) == counts
    assert found.clear == counts


@pytest.mark.parametrize("scattered", [True, False])
def test_images_of_a_group_that_look_wrong_together_count_as_one(scattered: bool) -> None:
    """Two things, photographed ten times each, look like another class: that may be chance. 20 things may not."""
    groups, random = np.arange(600) // 10, np.random.default_rng(0)
    right, odd = groups % 3, np.arange(600)[::30] if scattered else np.arange(20)
    labels, logits = right.copy(), 4 * np.eye(3)[right] + random.normal(size=(600, 3))
    labels[odd] = (right[odd] + 1) % 3
    near = [random.choice(600, 10, p=np.where(right == each, 0.9, 0.05) / 200) for each in right]
    alone = find_wrong(logits, labels, 0, near=torch.from_numpy(np.stack(near)))
    grouped = find_wrong(logits, labels, 0, near=torch.from_numpy(np.stack(near)), groups=groups)
    assert alone.clear
    assert alone.agreed == grouped.agreed >= 18
    assert grouped.clear == scattered
    assert (grouped.most_if_right > alone.most_if_right + 5) is not scattered


def test_models_of_groups_must_be_better_than_guessing_by_groups() -> None:
    """Right on 70 of 100 images, where guessing reaches 50: of seven of ten things, that may be chance."""
    groups = np.arange(100) // 10
    labels = groups % 2
    logits = np.eye(2)[np.where(groups < 7, labels, 1 - labels)]
    assert "top-1 70.0 % of the labels" in search._accuracy(logits, labels, 5, ())
    with pytest.raises(UserError, match="say too little of the labels"):
        search._accuracy(logits, labels, 5, groups)


def test_copies_and_groups_are_no_neighbours() -> None:
    features, groups = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) // 3
    near = nearest(features, [np.arange(60), groups]).numpy()
    assert near.shape == (60, 10)
    assert not (groups[near] == groups[:, None]).any()


# Folds.


def test_all_searches_share_one_budget(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr(runs, "Budget", lambda seconds: made.append(seconds) or Budget(seconds))
    monkeypatch.setattr(runs, "train_run", lambda *_, **__: "it died")
    write_folders(tmp_path / "data", images=30)
    line = command.TOOL.read([str(word) for word in ("-cfg", tiny, *of_folders(tmp_path / "data"), "-budget_min", 60)])
    images = open_images(line.load({"MODEL.NUM_CLASSES": ("auto", "test")}).config, "all")
    method = methods.ByTraining(line, 2, tmp_path / "folds")
    for seed in (0, 1):
        with pytest.raises(TrainingError, match="it died"):
            method.logits(images, seed)
    assert made == [3600]


@pytest.mark.slow
@pytest.mark.usefixtures("trainings")
def test_folds_train_the_recipe_and_go_on(
    check: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = write_folders(tmp_path / "data")
    shutil.copy(tmp_path / "data" / "ant" / "30.png", tmp_path / "data" / "bee" / "copy.png")
    small = ("-epochs", 40, "-lr", 1e-2, "-batch_size", 16, "DATA.CROP=none", "DATA.FLIP=0", "TRAIN.PATIENCE=1")
    words = ("-cfg", tiny, *of_folders(tmp_path / "data"), "-folds", 2, *small, "-max_time", "0:00:01")
    time_left = iter((True, False))  # by the clock, a busy machine would not even begin the first fold
    with monkeypatch.context() as patch:
        patch.setattr(Budget, "allows", lambda *_: next(time_left))
        said = check(*words, "-budget_min", 60)
    assert "-budget_min: no time was left for all folds; repeat the command to continue." in said.err
    assert not (tmp_path / "labels" / "report.html").exists()
    done = check(*words)
    assert "1 of 2: recipe, fold 1/2: already finished" in done.out
    assert "2 of 2: recipe, fold 2/2: " in done.out
    (folder,) = (tmp_path / "labels" / "folds").glob("seed-0-*")
    assert yaml.safe_load((folder / "fold2.yaml").read_text())["TRAIN"]["PATIENCE"] is None
    assert (folder / "left_out.txt").read_text().startswith("bee/copy.png")
    rows = listed(tmp_path / "labels")
    assert len([row for row in rows if row["path"] in planted]) >= 6
    assert len(rows) <= 16

    (tmp_path / "data" / "ant" / "4.png").rename(tmp_path / "data" / "bee" / "4.png")
    again = check(*words, "-overwrite", "-budget_min", 1e-4)
    assert "already finished" not in again.out, "models of other labels"


# Proof.


@pytest.mark.slow
@pytest.mark.usefixtures("trainings")
def test_proof_compares_four_trainings_per_seed(
    check: Call, tiny: Path, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.common.report_page.evaluations.SECONDS_OF_MAPS", 0)  # they ask the models, too
    asked, logits = [], Trained.logits
    monkeypatch.setattr(Trained, "logits", lambda model, images: [asked.append(len(images)), logits(model, images)][1])
    planted, out = write_folders(tmp_path / "data" / "train", wrong=24, images=240), tmp_path / "labels"
    write_folders(tmp_path / "data" / "val", wrong=15, images=150, seed=1)
    small = ("-epochs", 10, "-lr", 3e-3, "-batch_size", 16, "DATA.FLIP=0")
    words = ("-cfg", tiny, *of_folders(tmp_path / "data"), digits_run, "-pool", "both", *small, "-prove", "-seeds", 2)
    part = check(*words, "-budget_min", 0.05)
    assert "-budget_min: no time for" in part.err
    assert "It was not shown" not in part.out, "a verdict needs all runs"
    asked.clear()
    done = check(*words)
    assert "all labels, seed 0: already finished" in done.out
    assert sum(asked) == 8 * 150, "the best checkpoints, once; of the last ones the runs kept what they predicted"
    about = json.loads((out / "compare.json").read_text())
    assert about["compared"] == ["all labels", "without suspects", "relabelled", "without random images"]
    assert len(about["runs"]) == 8
    assert re.search(r"It helped: |It was not shown to help\.", done.out)
    assert re.search(r"without suspects: top-1 .* \([+-].* to [+-].* points for images like these\)", done.out)
    assert [each["holds_for"] for each in about["at_best"]] == ["images like these"] * 3
    assert about["verdicts"][0]["accuracy"]["holds_for"] == "images like these"
    wrong = re.search(r"(\d+) labels of the validation split look wrong, too\. On its other (\d+) images", done.out)
    assert wrong, done.out
    assert int(wrong[1]) + int(wrong[2]) == 150
    for seed in (0, 1):
        tables = {
            arm: list(csv.DictReader((out / "lists" / f"{arm}-{seed}.csv").open()))
            for arm in ("without_suspects", "relabelled", "without_random_images")
        }
        suspects = {row["path"]: row for row in tables["without_suspects"]}
        assert len(suspects.keys() & {f"train/{name}" for name in planted}) >= 18
        assert {row["decision"] for row in suspects.values()} == {"drop"}
        assert {row["path"]: row["proposed"] for row in tables["relabelled"]} == {
            path: row["proposed"] for path, row in suspects.items()
        }
        # As many of each given label, other images.
        random = tables["without_random_images"]
        assert Counter(row["given"] for row in random) == Counter(row["given"] for row in suspects.values())
        assert not {row["path"] for row in random} & suspects.keys()
        trained = yaml.safe_load((out / f"relabelled-{seed}" / "config.yaml").read_text())
        assert trained["DATA"]["RELABEL"] == str(out / "lists" / f"relabelled-{seed}.csv")
        assert trained["SEED"] == seed
        images = re.compile(r"(\d+) training and 150 validation images")
        for arm, count in {"all_labels": 240, "without_suspects": 240 - len(suspects), "relabelled": 240}.items():
            found = images.search((out / f"{arm}-{seed}" / "log.txt").read_text())
            assert found, arm
            assert int(found[1]) == count, arm


def test_random_images_are_others() -> None:
    images: Any = SimpleNamespace(label_words=str, labels=np.array([0, 1, 0, 1, 0, 1, 1]))
    suspects = [Suspect(image, "", "", 1, 0, 0) for image in (0, 2, 3)]
    assert [one.image for one in prove.random_like(images, suspects, 0) if one.given == "0"] == [4], "it has no second"
    images.labels = np.eye(7, dtype=np.uint8)  # several labels, each image with others
    assert {one.image for one in prove.random_like(images, suspects, 0)} < {1, 4, 5, 6}


def test_nothing_is_proved_where_nothing_is_found(check: Call, tiny: Path, digits_run: Path, tmp_path: Path) -> None:
    for part, images in (("train", 150), ("val", 30)):
        write_folders(tmp_path / "data" / part, wrong=0, images=images)
    done = check("-cfg", tiny, *of_folders(tmp_path / "data"), digits_run, "-pool", "both", "-prove", "-seeds", 2)
    assert "No search found wrong labels beyond chance: there is nothing to prove." in done.out
    assert "Without -prove, this command shows the most doubtful images." in done.out
    assert not list((tmp_path / "labels").glob("all_labels*"))


def test_proof_looks_at_the_weights_that_it_compares(digits_run: Path) -> None:
    last, page = metrics(digits_run, "val")[-1], digits_run / "report.html"
    for which in (methods.PLAIN, methods.AVERAGE):
        of_images = per_image(digits_run, TOP1, which)
        assert of_images is not None
        assert of_images.values.mean() == pytest.approx(last[f"{which.prefix}acc1"])
        assert sorted(of_images.rows.tolist()) == list(range(len(of_images.values)))
    predicted: dict[Path, Any] = {}
    write_report([digits_run], page, predicted=predicted)
    best = values_of_images(TOP1, *predicted[digits_run])
    assert best is not None
    assert best.mean() == pytest.approx(max(line["acc1"] for line in metrics(digits_run, "val")), abs=0.3)


# Refusals.


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["RUN"], "digits: its images are held in memory, without names; check_labels.py needs them as files"),
        (["RUN", "-cfg", "TINY"], "leave -cfg out: it has the settings of its own training."),
        (["RUN", "-prove"], "-prove trains a recipe: name it by -cfg."),
        (["RUN", "-folds", "2"], "-folds 2: trains a recipe, so leave"),
        (["RUN", "-seeds", "3"], "-seeds 3: only for -prove; a search has one seed, SEED."),
        (["RUN", "-budget_min", "5"], "-budget_min 5: nothing is trained; it is for -folds and -prove."),
        (["RUN", "-output", "TINY/labels"], "is a file, so the folder cannot be created"),
        (["-dataset", "digits"], "Name the model: a run, -cfg RECIPE, or -model NAME -pretrained FILE."),
        (["-dataset", "digits", "MODEL.PRETRAINED=gone.pth"], "gone.pth: no such file"),
        (["RUN", "-cfg", "TINY", "-prove", "DATA.FOLD=1/5"], "DATA.FOLD: a search reads all folds, and -prove needs"),
        (["RUN", "-data_path", "TINY.csv"], "/0.png: the label -1 is below 0. Correct it, or leave the image out by"),
        (["RUN", "DATA.RELABEL=a.csv"], "DATA.RELABEL: the labels are searched as they are in the data; leave"),
    ],
)
def test_commands_that_are_refused(words: list[str], why: str, check: Call, digits_run: Path, tiny: Path) -> None:
    Path(f"{tiny}.csv").write_text("path,target\n0.png,-1\n")
    words = [word.replace("TINY", str(tiny)).replace("RUN", str(digits_run)) for word in words]
    said = check(*words, code=2)
    assert why in said.err


def test_labels_that_no_model_knows_are_refused(check: Call, digits_run: Path, tmp_path: Path) -> None:
    write_folders(tmp_path / "data", wrong=0, images=90)
    files = sorted((tmp_path / "data").glob("*/*.png"))
    places = np.random.default_rng(0).permutation(len(files))
    for file, place in zip(files, places, strict=True):
        file.rename(tmp_path / "data" / CLASSES[place % 3] / f"again{place}.png")
    said = check(digits_run, *of_folders(tmp_path / "data"), code=2)
    assert "Their probabilities say too little of the labels: train longer, give weights" in said.err
    assert not (tmp_path / "labels").exists()


def test_folds_of_data_that_is_already_split_are_refused(check: Call, tiny: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_folders(tmp_path / "data" / part, images=9)
    said = check("-cfg", tiny, *of_folders(tmp_path / "data"), "-folds", 2, code=2)
    assert "comes with its own validation split, and -folds makes its own: name the folder of the training" in said.err
