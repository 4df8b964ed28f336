"""DATA.GROUP: images of a group are on one side of the split."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import open_dataset
from datasets.sources.grouped import groups_in_paths, split_by_group
from engine.evaluation.linear import folds_of
from tests.program import Result, Vitamp, write_meta
from tools.common.per_image import per_image
from utils.config.data import DataConfig
from utils.record.history import History
from utils.record.predictions import GROUPS, read_predictions, write_predictions
from utils.statistics.classes import (
    balanced_accuracy_by_image,
    balanced_accuracy_interval,
    macro_f1_by_image,
    macro_f1_interval,
)
from utils.statistics.crossed import crossed_interval
from utils.statistics.groups import effective_images
from utils.statistics.paired import agresti_min
from utils.statistics.proportions import wilson
from utils.statistics.ranking import ranking_intervals, ranking_of
from vitamp.metrics import PLAIN, TOP1


def made(groups: int, classes: int = 4, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Labels and groups of images; groups differ in size and have more of some classes than of others."""
    random = np.random.default_rng(seed)
    of = np.repeat(np.arange(groups), random.integers(5, 40, groups))
    weights = random.dirichlet(np.ones(classes), groups)
    labels = np.array([random.choice(classes, p=weights[group]) for group in of])
    order = random.permutation(len(of))
    return labels[order], [f"g{group}" for group in of[order]]


@pytest.mark.parametrize("several", [False, True])
def test_no_group_is_on_both_sides_and_classes_are_in_proportion(several: bool) -> None:
    labels, groups = made(60)
    rows = np.eye(4, dtype=np.uint8)[labels] if several else labels
    train, validation = split_by_group(rows, groups, DataConfig(VAL_FRACTION=0.2, GROUP="g"))
    assert sorted([*train, *validation]) == list(range(len(labels)))
    assert {groups[i] for i in train}.isdisjoint({groups[i] for i in validation})
    assert len(validation) == pytest.approx(0.2 * len(labels), rel=0.1)
    shares = [np.bincount(labels[side], minlength=4) / len(side) for side in (train, validation)]
    assert np.abs(shares[0] - shares[1]).max() < 0.04


def test_each_class_stays_in_proportion_whatever_the_size_of_its_groups() -> None:
    sizes = np.repeat([10, 7], [98, 155])
    labels, groups = np.repeat(sizes == 7, sizes).astype(int), [f"g{g}" for g in np.repeat(np.arange(253), sizes)]
    for fraction, counts in ((0.1, (100, 105)), (0.15, (150, 161)), (0.2, (200, 217))):
        splits = [DataConfig(VAL_FRACTION=fraction, SPLIT_SEED=seed, GROUP="g") for seed in range(2)]
        one, other = (split_by_group(labels, groups, data)[1] for data in splits)
        assert tuple(np.bincount(labels[one])) == tuple(np.bincount(labels[other])) == counts
        assert {groups[i] for i in one} != {groups[i] for i in other}


def test_folds_are_disjoint_cover_all_and_keep_groups() -> None:
    labels, groups = made(30)
    folds = [split_by_group(labels, groups, DataConfig(FOLD=f"{k}/5", GROUP="g"))[1] for k in range(1, 6)]
    assert sorted(np.concatenate(folds)) == list(range(len(labels)))
    assert sum(len({groups[i] for i in fold}) for fold in folds) == 30
    assert max(map(len, folds)) < 1.2 * min(map(len, folds))
    other = split_by_group(labels, groups, DataConfig(FOLD="1/5", GROUP="g", SPLIT_SEED=1))[1]
    assert list(other) != list(folds[0])


def test_few_large_groups_leave_no_side_empty() -> None:
    labels, groups = np.array([0, 1] * 30), ["a"] * 20 + ["b"] * 20 + ["c"] * 20
    train, validation = split_by_group(labels, groups, DataConfig(VAL_FRACTION=0.1, GROUP="g"))
    assert (len(train), len(validation)) == (40, 20)


def patients(root: Path) -> None:
    for name in ("ill", "well"):
        for patient in range(6):
            for shot in range(4):
                pixels = np.random.default_rng(100 * patient + shot).integers(0, 255, (8, 8), dtype=np.uint8)
                (root / name).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / name / f"patient{patient}_{shot}.png")


def train(vitamp: Vitamp, tiny: Path, *words: object, code: int) -> Result:
    small = ("-num_classes", "auto", "TRAIN.MAX_UPDATES=1", "-batch_size", "8", "-dry_run")
    return vitamp("-cfg", tiny, *words, *small, code=code)


def test_paths_and_columns_name_groups(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    patients(tmp_path / "data")
    folder = ("-dataset", "imagefolder", "-data_path", tmp_path / "data")
    done = train(vitamp, tiny, *folder, r"DATA.GROUP=(patient\d+)_", "DATA.VAL_FRACTION=0.3", code=0)
    # Both classes have images of each patient, so whole patients are 8 images.
    assert "32 training and 16 validation images" in done.out
    assert r"split at random by DATA.VAL_FRACTION 0.3, groups by DATA.GROUP (patient\d+)_" in done.out

    rows = [f"{p.relative_to(tmp_path)},{p.parent.name},{p.name[7]}" for p in sorted(tmp_path.glob("data/*/*.png"))]
    (tmp_path / "all.csv").write_text("\n".join(["path,target,who", *rows]) + "\n", encoding="utf-8")
    table = ("-dataset", "csv", "-data_path", tmp_path / "all.csv")
    done = train(vitamp, tiny, *table, "DATA.GROUP=who", "DATA.FOLD=2/3", code=0)
    assert "32 training and 16 validation images" in done.out
    assert "is a group of its own" not in done.text

    # All but one patient lose their names: as one group, 40 of 48 images would be in one fold.
    rows = [row if row.endswith(",0") else row[:-1] for row in rows]
    (tmp_path / "all.csv").write_text("\n".join(["path,target,who", *rows]) + "\n", encoding="utf-8")
    done = train(vitamp, tiny, *table, "DATA.GROUP=who", "DATA.FOLD=2/3", code=0)
    assert "32 training and 16 validation images" in done.out
    assert "40 of 48 images have no value in the column of DATA.GROUP; each is a group of its own." in done.text


def test_words_name_parts_of_file_names_as_groups() -> None:
    paths = ["ant/p1_007.jpg", "bee/p1_8.jpg", "bee/p1-left 3.jpg", "p2/31.jpg", "b/p3_1.tif\0b/p3_2.tif"]
    assert groups_in_paths(paths, DataConfig(GROUP="name")) == ["p1_", "p1_", "p1-left ", "p2/", "p3_"]
    assert groups_in_paths(paths, DataConfig(GROUP="name_start")) == ["p1", "p1", "p1", "31.jpg", "p3"]


@pytest.mark.parametrize("kind", ["csv", "imagefolder"])
def test_groups_of_given_splits_are_compared_and_kept_whole_in_folds(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, kind: str
) -> None:
    patients(root := tmp_path / "data")
    rows = ["path,target,who,split"]
    for file in sorted(root.glob("*/*.png")):
        patient, shot = file.stem[7], file.stem[9]
        split = "val" if patient == "5" or (patient, shot) == ("4", "3") else "train"
        rows.append(f"{file.relative_to(root)},{file.parent.name},{patient},{split}")
        if kind == "imagefolder":
            (to := root / split / file.parent.name).mkdir(parents=True, exist_ok=True)
            file.rename(to / file.name)
    (root / "all.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    path, group = (root / "all.csv", "who") if kind == "csv" else (root, "patient([0-9])")
    place = ("-dataset", kind, "-data_path", path, f"DATA.GROUP={group}", "-num_classes", "auto")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *place, "-batch_size", "8", "-epochs", "1", code=0)
    torn = f"DATA.GROUP {group}: 1 group in more than one split, such as 4: 2 of 10 validation images."
    assert torn in done.err
    assert "The 10 images are 2 groups (DATA.GROUP)" in done.text
    assert torn in vitamp(*place, script="scripts/check_data.py").err
    every = vitamp(tmp_path / "run", "-part", "all", script="scripts/evaluate.py", code=0).text
    assert "The interval allows for their 6 groups (DATA.GROUP)" in every
    assert "have relatives in training" not in every, "all of them are of training"
    validated = vitamp(tmp_path / "run", script="scripts/evaluate.py", code=0).text
    known = "at least 2 of 10 validation images have relatives in training"
    assert known in validated
    vitamp(tmp_path / "run", "-no_predictions", script="scripts/report.py", code=0)
    assert f"<dd>{known[0].upper()}{known[1:]}" in (tmp_path / "run/report.html").read_text()

    data = DataConfig(DATASET=kind, DATA_PATH=str(path), GROUP=group)
    train = open_dataset(data, True, 2, 0, torch.device("cpu"))
    samples = train.single_images()
    assert samples is not None
    fold_of, _ = folds_of(train, train.sample_labels(), data)
    assert len({*fold_of.tolist()}) == len({*zip(samples.groups or (), fold_of.tolist(), strict=True)}) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("DATA.GROUP=(",), "DATA.GROUP (: not a regular expression"),
        (("DATA.GROUP=visit[0-9]",), "DATA.GROUP visit[0-9]: not found in 'ill/patient0_0.png'. Name a pattern"),
        (("DATA.GROUP=(t1)_|ill",), "DATA.GROUP (t1)_|ill: not found in 'ill/patient0_0.png'. Name a pattern"),
        (("DATA.GROUP=(p)(a)",), "has 2 pairs of parentheses; put one around what names the group"),
        (("DATA.GROUP=png",), "1 group, too few for two splits; groups stay whole"),
        ((r"DATA.GROUP=patient\d", "DATA.FOLD=1/9"), "6 groups, fewer than the 9 folds"),
        (("DATA.GROUP=x", "-dataset", "digits", "DATA.DATA_PATH=null"), "the data set digits names no groups"),
    ],
)
def test_bad_groups_are_refused(vitamp: Vitamp, tiny: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    patients(tmp_path / "data")
    done = train(vitamp, tiny, "-dataset", "imagefolder", "-data_path", tmp_path / "data", *words, code=2)
    assert said in done.err


def test_a_run_is_not_resumed_with_another_split(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    patients(tmp_path / "data")
    run, place = tmp_path / "run", ("-dataset", "imagefolder", "-data_path", tmp_path / "data")
    words = ("-num_classes", "auto", "-batch_size", "8", "-epochs", "1", "DATA.GROUP=patient[0-9]")
    vitamp("-cfg", tiny, "-output", run, *place, *words, code=0)
    groups = ("GROUP", "'patient[0-9]'", "'_[0-9]'")
    for name, before, now in (groups, ("SPLIT_SEED", "0", "1"), ("VAL_FRACTION", "0.1", "0.2")):
        again = vitamp("-resume", run, "-epochs", "2", f"DATA.{name}={now}", code=2)
        assert f"trained with DATA.{name} {before}; with {now} it would be validated on images" in again.err
    assert "samples have changed" not in vitamp("-resume", run, "-epochs", "2", code=0).err
    (tmp_path / "data" / "ill" / "patient0_0.png").unlink()
    done = vitamp("-resume", run, "-epochs", "3", code=0)
    assert "Validation may now have images that the run was trained on." in done.err
    (tmp_path / "data" / "ill").rename(tmp_path / "data" / "x")
    again = vitamp("-resume", run, "-epochs", "4", code=2)
    assert f"label 0 was ill in training, but is well in imagefolder in {tmp_path / 'data'}. Restore" in again.err


def unequal(random: np.random.Generator, images: int, groups: int) -> np.ndarray:
    """The group of each image."""
    sizes = random.lognormal(0, 1, groups)
    return np.repeat(np.arange(groups), np.maximum(1, sizes / sizes.sum() * images).astype(int))


@pytest.mark.parametrize(
    ("images", "groups", "accuracy", "alike"), [(150, 30, 0.9, 0.2), (500, 60, 0.75, 0.4), (500, 60, 0.98, 0.6)]
)
def test_intervals_of_groups_hold_as_often_as_they_promise(
    images: int, groups: int, accuracy: float, alike: float
) -> None:
    random, held = np.random.default_rng(0), {"wilson": 0, "by group": 0}
    for _ in range(400):
        of = unequal(random, images, groups)
        easy = random.beta(accuracy * (1 / alike - 1), (1 - accuracy) * (1 / alike - 1), groups)
        right = random.random(len(of)) < easy[of]
        for kind, number in (("wilson", len(of)), ("by group", effective_images(right, [f"{one}" for one in of]))):
            low, high = wilson(100 * right.mean(), number)
            held[kind] += low <= 100 * accuracy <= high
    assert held["wilson"] < 0.85 * 400
    assert 0.92 * 400 <= held["by group"] <= 0.98 * 400


@pytest.mark.parametrize(("singles", "large", "of_each"), [(500, 1, 100), (300, 1, 60), (90, 3, 30)])
def test_intervals_hold_where_one_large_group_is_among_single_images(singles: int, large: int, of_each: int) -> None:
    """By the intraclass correlation alone, up to 19 % missed: single images say nothing of it."""
    random, tries, of = (
        np.random.default_rng(0),
        300,
        np.repeat(np.arange(singles + large), [1] * singles + [of_each] * large),
    )
    missed = {"top-1": 0, "gain": 0, "comparison": 0}
    for _ in range(tries):
        right = random.random(len(of)) < random.beta(0.8 * 0.7 / 0.3, 0.2 * 0.7 / 0.3, singles + large)[of]
        low, high = wilson(100 * right.mean(), effective_images(right, of))
        missed["top-1"] += not low <= 80 <= high
        base = random.normal(2.2, 3, len(of))
        noise = np.sqrt(0.7) * random.normal(size=(2, singles + large))[:, of] + np.sqrt(0.3) * random.normal(
            size=(2, len(of))
        )
        ours, theirs = base + 2 * noise > 0
        _, low, high = agresti_min(ours, theirs, of)
        missed["gain"] += not low <= 0 <= high
        one, other = 100.0 * ours[None], 100.0 * theirs[None]
        found = crossed_interval(float((one - other).mean()), one, other, np.stack([one.mean(1), other.mean(1)]), of)
        missed["comparison"] += found.seen
    assert max(missed.values()) <= 0.07 * tries, missed


def test_intervals_of_every_metric_hold_with_groups() -> None:
    """And those of the difference of two equal models, over the probe and in a comparison."""
    random, tries, shares = np.random.default_rng(0), 200, [0.5, 0.3, 0.2]

    def scored(of: np.ndarray, alike: float) -> tuple[np.ndarray, list[np.ndarray]]:
        """Labels, and the scores of two models; what is hard about an image is partly that of its group."""
        labels = random.choice(3, len(of), p=shares)
        noise = (
            np.sqrt(alike) * random.normal(size=(of.max() + 1, 3))[of]
            + np.sqrt(1 - alike) * random.normal(size=(len(of), 3))
            for _ in range(2)
        )
        return labels, [1.5 * np.eye(3)[labels] + each for each in noise]

    def intervals(of: np.ndarray, labels: np.ndarray, models: list[np.ndarray], grouped: bool) -> dict[str, Any]:
        ours, theirs = (scores.argmax(1) for scores in models)
        groups = of if grouped else np.empty(0)
        of_map, of_auroc = ranking_intervals(models[0], np.eye(3)[labels] > 0, groups)
        one, other = (100.0 * (guesses == labels)[None] for guesses in (ours, theirs))
        found = crossed_interval(
            float((one - other).mean()), one, other, np.stack([one.mean(1), other.mean(1)]), groups
        )
        return {
            "balanced": balanced_accuracy_interval(labels, ours, 3, groups),
            "macro F1": macro_f1_interval(labels, ours, 3, groups),
            "mAP": of_map,
            "AUROC": of_auroc,
            "gain": agresti_min(ours == labels, theirs == labels, groups)[1:],
            "comparison": (found.low, found.high),
        }

    labels, (scores, _) = scored(np.arange(200_000), 0.0)
    ranking = ranking_of(scores, np.eye(3)[labels] > 0)
    assert ranking is not None
    by_image = balanced_accuracy_by_image, macro_f1_by_image
    means = (float(of_each(labels, scores.argmax(1)).mean()) for of_each in by_image)
    truth = dict(zip(("balanced", "macro F1"), means, strict=True)) | {"gain": 0.0, "comparison": 0.0}
    truth |= {"mAP": 100 * ranking.precision, "AUROC": 100 * ranking.area}
    held = {(name, grouped): 0 for name in truth for grouped in (False, True)}
    for _ in range(tries):
        drawn = scored(of := unequal(random, 400, 40), 0.7)
        for grouped in (False, True):
            for name, (low, high) in intervals(of, *drawn, grouped).items():
                held[name, grouped] += low <= truth[name] <= high
    for name in truth:
        assert held[name, False] < 0.8 * tries, name
        assert 0.92 * tries <= held[name, True] <= 0.98 * tries, name


def test_groups_count_as_one_image_at_least_and_none_as_more() -> None:
    right, pairs = np.arange(100) % 4 > 0, [f"{number // 2}" for number in range(100)]
    assert effective_images(right, []) == effective_images(right, [f"{number}" for number in range(100)]) == 100
    doubled = effective_images(right.repeat(2), [f"{number // 2}" for number in range(200)])
    assert 90 < doubled < 100, "each group is of equal images; Student's t is a little wider"
    assert 90 < effective_images(right, pairs) < 100, "no more alike than others"
    none, one = np.ones(100, bool), np.arange(100) > 0
    assert 60 < effective_images(none, pairs) < 66, "nothing shows how alike they are"
    assert 70 < effective_images(one, pairs) < 80, "one mistake hardly does"
    assert effective_images(right, ["one"] * 100) < 1


def test_intervals_allow_for_groups_and_splits_of_earlier_versions_are_refused(
    vitamp: Vitamp, tiny: Path, tmp_path: Path
) -> None:
    patients(tmp_path / "data")
    run, left_out, found = tmp_path / "run", tmp_path / "left_out.txt", tmp_path / "found.json"
    left_out.write_text("ill/patient0_0.png\n")
    place = ("-dataset", "imagefolder", "-data_path", tmp_path / "data", f"DATA.EXCLUDE={left_out}")
    small = ("-num_classes", "auto", "-batch_size", "8", "-epochs", "1")
    split = ("DATA.GROUP=patient[0-9]", "DATA.VAL_FRACTION=0.3")
    said = "The 16 images are 2 groups (DATA.GROUP), which the intervals allow for."
    trained = vitamp("-cfg", tiny, "-output", run, *place, *small, *split, code=0).text
    interval = re.search(r"95 % interval ([\d.]+) to ([\d.]+) %", trained)
    assert interval
    for text in (trained, vitamp("-eval", "-resume", run, "-output", tmp_path / "eval", code=0).text):
        assert said in text
        assert interval[0] in text
    for flags, fields in (((), ("figures",)), (("-probe",), ("probes", "neighbours"))):
        text = vitamp(run, *flags, "-json", found, "-overwrite", script="scripts/evaluate.py", code=0).text
        assert (said if flags else "The interval allows for their 2 groups (DATA.GROUP)") in text
        for one in (one for field in fields for one in json.loads(found.read_text())[field].values()):
            for at in filter(None, (one["intervals"].get(name) for name in ("acc1", "balanced_acc"))):
                assert at[1] - at[0] > 60 > np.diff(wilson(one["acc1"], 16)), "two groups know little"
            low, high = one["intervals"]["acc1"]
            assert flags or (low, high) == pytest.approx([float(interval[1]), float(interval[2])], abs=0.01)
    for flags in ((), ("-no_predictions", "-overwrite")):
        vitamp(run, *flags, "-out", tmp_path / "page.html", script="scripts/report.py", code=0)
        page = (tmp_path / "page.html").read_text()
        assert page.count("The interval allows for their 2 groups (DATA.GROUP)") == 1
        assert re.search(rf"{interval[1]} to {interval[2]}\s%", page)
        assert len(re.findall(r'<span class="soft">[0-4] to (?:9[6-9]|100)</span>', page)) == (0 if flags else 2), (
            "of each class"
        )

    update = History.of_run(run).of("val")[-1]["update"]
    of_images, table = per_image(run, TOP1, PLAIN), read_predictions(run, update)
    assert of_images is not None
    assert table is not None
    assert len({*of_images.groups.tolist()}) == 2
    write_predictions(run, update, {name: column for name, column in table.items() if name != GROUPS})
    assert per_image(run, TOP1, PLAIN) is None, "as an earlier version wrote them"

    for file in run.glob("checkpoints/*/meta.json"):
        meta = json.loads(file.read_text())
        del meta["samples"]["groups"]
        write_meta(file, meta)
    done = vitamp(run, script="scripts/evaluate.py", code=2)
    assert "would now be split otherwise than in its training" in done.err


def test_a_cross_validation_allows_for_groups(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    patients(tmp_path / "data")
    place = ("-dataset", "imagefolder", "-data_path", tmp_path / "data", "DATA.GROUP=patient[0-9]", "-folds", "2")
    small = ("-num_classes", "auto", "-batch_size", "8", "TRAIN.MAX_UPDATES=1", "-output", tmp_path / "out")
    vitamp("-cfg", tiny, *place, *small, script="scripts/compare.py", code=0)
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    (of_all,), (recall,) = found["all_folds"].values(), found["recall"].values()
    low, high = wilson(of_all["acc1"], of_all["images"])
    assert of_all["images"] == 48
    assert of_all["high"] - of_all["low"] > 1.1 * (high - low)
    assert {name: count[1] for name, count in recall.items()} == {"ill": 24, "well": 24}
    assert all(0 < count[2] < 20 for count in recall.values()), "six patients"
