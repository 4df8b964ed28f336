"""evaluate.py -probe: it agrees with scikit-learn, keeps features, and saves runs like any others."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, log_loss
from sklearn.preprocessing import StandardScaler

import vitamp as package
from datasets import open_dataset
from engine.evaluation import linear
from engine.trained.model import load_trained, split_of_run
from tests.label_sets import write_recipe, write_set
from tests.program import ROOT, Result, Started, metrics, run_program, train_tiny
from tests.waiting import free_port
from tools.export import command as export
from tools.predict import command as predict
from tools.report import command as report
from utils.distributed.world import ALONE, World
from utils.statistics.proportions import wilson
from vitamp.pooling import POOLS

Say = Callable[..., Result]
Tool = Callable[[Any], Say]
# evaluate.py, with one strength. It shows which batches it computes features of, and may kill itself.
PATCHED = f"""\
import os, runpy, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "scripts")!r}]
from engine.evaluation import features, linear
linear.STRENGTHS = (1e-2,)
columns, calls = features.columns_of, []
def shown(seeing, images):
    calls.append(len(images))
    if len(calls) == int(os.environ.get("KILLED_IN", 0)):
        os.kill(os.getpid(), 9)
    time.sleep(float(os.environ.get("PACE", 0)))
    print("batch of", len(images), file=sys.stderr)
    return columns(seeing, images)
features.columns_of = shown
runpy.run_path({str(ROOT / "scripts/evaluate.py")!r}, run_name="__main__")
"""
NEW_FEATURES, KEPT = "no features of these very weights and images are kept yet", "images; features are kept in"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two blocks, so that -pool blocks is not -pool both. Not to be changed: tests share it."""
    return train_tiny(tmp_path_factory.mktemp("probe"), "MODEL.DEPTH=2", "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0")


def probed(say: Say, place: Path, *words: object, probe: bool = True) -> dict[str, Any]:
    say(*words, *["-probe"] * probe, "-json", place / "found.json", "-overwrite", code=0)
    return json.loads((place / "found.json").read_text())


def standardised(in_process: Tool, run: Path, pool: str, place: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Features of both splits, as predict.py writes them, and their labels."""
    scaler, found = StandardScaler(), []
    for part in ("train", "val"):
        in_process(predict.main)(run, "-part", part, "-pool", pool, "-features", place / f"{part}.npz", code=0)
        arrays = np.load(place / f"{part}.npz")
        columns = arrays["features"].astype(np.float64)
        found.append(((scaler.fit(columns) if part == "train" else scaler).transform(columns), arrays["labels"]))
    return found


def logistic(strength: float, features: np.ndarray, labels: np.ndarray) -> Any:
    """Its objective is that of the probe, times the number of images over the strength."""
    return LogisticRegression(C=1 / (strength * len(labels)), solver="newton-cholesky", tol=1e-8).fit(features, labels)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["pooled", "both"])
def test_probe_is_logistic_regression_whose_strength_folds_choose(
    say: Say, in_process: Tool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    best, tried = probed(say, tmp_path, run, "-pool", pool)["probes"][pool], linear.STRENGTHS
    monkeypatch.setattr(linear, "STRENGTHS", tried[:9])  # the minimum of weaker ones is flat
    ours = probed(say, tmp_path, run, "-pool", pool)["probes"][pool]
    (bank, labels), (images, truth) = standardised(in_process, run, pool, tmp_path)
    theirs = logistic(ours["strength"], bank, labels)
    one_image = 100 / len(truth)  # two solutions that differ by rounding may differ in an image on the border
    assert ours["acc1"] == pytest.approx(100 * theirs.score(images, truth), abs=1.01 * one_image)
    assert ours["nll"] == pytest.approx(log_loss(truth, theirs.predict_proba(images)), rel=1e-3)

    data = load_trained(run).config.DATA.changed(PART="train")
    fold_of, _ = linear.folds_of(open_dataset(data, False, 10, 0, torch.device("cpu")), labels, data)

    def in_folds(strength: float) -> float:
        each = [(fold_of != fold, fold_of == fold) for fold in range(5)]
        right = [(logistic(strength, bank[a], labels[a]).predict(bank[b]) == labels[b]).sum() for a, b in each]
        return 100 * float(sum(right)) / len(bank)

    assert np.bincount(fold_of).tolist() == pytest.approx([1437 / 5] * 5, abs=10)
    assert ours["folds"] == pytest.approx(in_folds(ours["strength"]), abs=0.1)
    assert best["folds"] >= ours["folds"] > in_folds(10.0) + 5
    chosen = tried.index(best["strength"])
    others = [in_folds(strength) for strength in tried[max(chosen - 2, 0) : chosen + 2]]
    assert best["folds"] == pytest.approx(in_folds(best["strength"]), abs=0.3)
    assert best["folds"] >= max(others) - 0.3, "a few images more or less"


@pytest.mark.slow
def test_probe_of_several_labels_is_one_regression_per_class(
    say: Say, in_process: Tool, unlabelled_run: Path, tmp_path: Path
) -> None:
    write_set(tmp_path)
    run_program("-cfg", write_recipe(tmp_path), "-output", tmp_path / "run", streams=tmp_path, code=0)
    found = probed(say, tmp_path, tmp_path / "run")
    assert found["chosen"] == max(found["probes"], key=lambda pool: found["probes"][pool]["folds"])
    (bank, labels), (images, truth) = standardised(in_process, tmp_path / "run", "mean", tmp_path)
    strength = found["probes"]["mean"]["strength"]
    scores = np.stack([logistic(strength, bank, column).decision_function(images) for column in labels.T], 1)
    assert found["probes"]["mean"]["map"] == pytest.approx(100 * average_precision_score(truth, scores), abs=0.1)
    assert "neighbours" not in found
    masked = ("-model", "vit_tiny_patch16_224", "-pretrained", unlabelled_run, "-image_size", 8, "DEVICE=cpu")
    masked += ("MODEL.PATCH_SIZE=4", "DATA.IMAGE_CHANNELS=1")
    found = probed(say, tmp_path, *masked, "-data_path", tmp_path, "DATA.MULTI_LABEL=true")
    assert found["probes"]["mean"]["map"] > 50, "of a run whose own settings exclude several labels"


# Features that are kept.


def table(done: Result) -> list[str]:
    return [line for line in done.out.splitlines() if " %" in line]


def computed(done: Result) -> int:
    """Images; one of each split only shows how many features there are."""
    return sum(map(int, re.findall(r"batch of (\d+)", done.err))) - 2


def kept(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.glob("features/*/*.npy")}


def test_killed_probe_resumes_and_processes_share_the_work(run: Path, tmp_path: Path) -> None:
    """In blocks of 512 images."""
    (tmp_path / "patched.py").write_text(PATCHED)

    def start(name: str, cache: str, **env: str) -> Started:
        (streams := tmp_path / name).mkdir()
        words = [str(run), "-probe", "-pool", "both", f"DATA.CACHE={tmp_path / cache}"]
        return Started(str(tmp_path / "patched.py"), words, ROOT, env, streams)

    whole = start("first", "whole").end(60)
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "PACE": "0.02"}
    assert start("second", "killed", KILLED_IN="24").end(60).code == -9
    late = start("late", "killed", RANK="1", **both).end(60)
    assert computed(late) == 512, "its own block, the second one, whatever other processes have done by then"
    again, third = start("third", "killed").end(60), start("fourth", "killed").end(60)
    assert f"training split: 1,437 images; features of 1,024 are kept, 413 are computed now in {tmp_path}" in again.out
    assert (computed(again), computed(third), third.out.count(KEPT)) == (413 + 360, 0, 2)

    began = [start(f"rank{rank}", "shared", RANK=str(rank), **both) for rank in range(2)]
    first, second = (one.end(60) for one in began)
    assert (whole.code, first.code, second.code) == (0, 0, 0), first.text + second.text
    assert computed(second) >= 512
    assert computed(first) + computed(second) <= 1437 + 360 + 512, "at most a block twice"
    assert table(second) == []
    assert table(again) == table(third) == table(first) == table(whole) != []
    assert kept(tmp_path / "killed") == kept(tmp_path / "shared") == kept(tmp_path / "whole")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "STRENGTHS", (1e-2,))


@pytest.fixture
def greys(tmp_path: Path) -> tuple[object, ...]:
    """Words that name class folders of noise of another brightness."""
    for number, (name, images) in enumerate({"dark": 20, "grey": 20, "light": 3}.items()):
        (tmp_path / "data" / name).mkdir(parents=True)
        for image in range(images):
            pixels = np.random.default_rng(image).integers(0, 60, (8, 8), dtype=np.uint8) + np.uint8(90 * number)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{image}.png")
    return "-dataset", "imagefolder", "-data_path", tmp_path / "data", "DATA.VAL_FRACTION=0.25", "DATA.NUM_WORKERS=0"


@pytest.mark.usefixtures("quick")
def test_changed_images_weights_and_inputs_are_computed_anew(
    say: Say, digits_run: Path, greys: tuple[object, ...], tmp_path: Path, cache: Path
) -> None:
    def counts(*more: object) -> tuple[int, int]:
        done = say(digits_run, *greys, "-probe", "-pool", "mean", *more, code=0)
        assert "fewer images than folds have 1 class: light." in done.out
        assert ("all images weigh alike: TRAIN.CLASS_WEIGHTS" in done.out) == ("TRAIN.CLASS_WEIGHTS=balanced" in more)
        return done.out.count(NEW_FEATURES), done.out.count(KEPT)

    assert (counts(), counts("TRAIN.CLASS_WEIGHTS=balanced")) == ((2, 0), (0, 2))
    assert [counts(*more) for more in (("-weights", "ema"), ("DATA.IMAGENET_MEAN=0.4",))] == [(2, 0)] * 2
    Image.new("L", (8, 8)).save(tmp_path / "data" / "dark" / "0.png")
    assert counts() == (0, 1), "only the new image is computed"
    before, gone = kept(cache), [tmp_path / "data" / "grey" / name for name in ("0gone.png", "lost.png")]
    for file in gone:
        file.symlink_to("nowhere")
    for world, code in ((ALONE, 2), (World(0, 2), 1)):
        with mock.patch("tools.evaluate.command.read_world", return_value=world):
            said = say(digits_run, *greys, "-probe", "-batch_size", 4, "DATA.IMAGENET_MEAN=0.3", code=code).err
        assert f"2 images cannot be read: {gone[0]} (it does not exist); {gone[1]} (it does" in said, "all of them"
    (new,) = (content[128:] for name, content in kept(cache).items() if name not in before and "complete" in name)
    assert 0 in new, "what could not be read is not kept"


@pytest.mark.usefixtures("quick")
def test_probe_compares_several_models(say: Say, greys: tuple[object, ...], tmp_path: Path) -> None:
    """A model's error is one line, and the results of the others are kept."""
    names = ("resnet10t", "test_vit", "resnet18")
    for name in names[:2]:
        torch.save(timm.create_model(name).state_dict(), tmp_path / f"{name}.pth")
    listed = ("-model", ",".join(names), "-pretrained", ",".join(f"{tmp_path / name}.pth" for name in names))
    words = (*listed, *greys, "-image_size", 32, "DEVICE=cpu", "-probe")
    done = say(*words, "-json", tmp_path / "found.json", code=2)
    assert done.err.count(f"resnet18: Pretrained weights {tmp_path / 'resnet18.pth'}: no such file.") == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert ([model["model"] for model in found["models"]], [*found["failed"]]) == ([*names[:2]], ["resnet18"])
    folds = {model["model"]: model["probes"][model["chosen"]]["folds"] for model in found["models"]}
    assert folds[found["best"]] == max(folds.values())
    table = done.out[done.out.rindex("parameters") :]
    for model in found["models"]:
        best = r" \(best\)" * (model["model"] == found["best"])
        probe = model["probes"][model["chosen"]]
        for metric, words in (("acc1", "top-1"), ("balanced_acc", "balanced accuracy")):
            row = rf"{model['model']}{best}, {words} +{model['parameters']:,} +"
            values = r".* \(.* ".join(f"{each[metric]:.2f} %" for each in (probe["in_folds"], probe))
            assert re.search(row + values, table), table
        assert probe["in_folds"]["acc1"] == pytest.approx(probe["folds"])
        assert probe["in_folds"]["intervals"]["acc1"] == [*wilson(probe["folds"], probe["in_folds"]["images"])]
    refused = (
        (("-out", tmp_path / "run"), "-model: several"),
        (("-pretrained", "one.pth"), "-pretrained: 1 for 3 models"),
        (("-model", "resnet18,resnet81"), "'resnet81': not a file or folder, and not a timm model. Did you mean"),
    )
    for more, words in refused:
        assert words in say(*listed[:2], *greys, "-probe", *more, code=2).err


def test_nearly_dead_columns_get_no_huge_weights() -> None:
    """Another precision or machine would move the logits by their rounding."""
    labels, features = np.arange(300) % 3, np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)
    features[:, 2] += labels
    features[:, 3] = 1e-5 * (labels == 1)
    one, _ = linear.fit(features, labels, np.arange(300) // 3 % 5, 3, torch.device("cpu"))
    assert float(one.weight.abs().max()) < 1000


@pytest.mark.usefixtures("quick")
def test_full_disk_is_refused_before_work(say: Say, run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    done = say(run, "-probe", code=2)
    assert "1 kB are free. Name a folder on a larger disk (DATA.CACHE=DIR)." in done.err
    assert kept(cache) == {}


# Runs.


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("pool", [POOLS[0], *(pytest.param(pool, marks=pytest.mark.slow) for pool in POOLS[1:])])
def test_saved_probe_is_a_run(say: Say, in_process: Tool, run: Path, tmp_path: Path, pool: str) -> None:
    out = tmp_path / "run"
    said = say(run, "-probe", "-pool", pool, "-out", out, "-json", tmp_path / "found.json", "-overwrite", code=0).out
    assert f"\nThe model with this classifier is saved as a run in {out}: `" in said.rpartition("linear top-1")[2], said
    assert (said.count("choose the strength"), "learning rate" in said) == (1, False), "nothing about training"
    assert "learning rate" in (out / "log.txt").read_text()
    acc1 = json.loads((tmp_path / "found.json").read_text())["probes"][pool]["acc1"]
    assert [(line["update"], line["acc1"]) for line in metrics(out, "val")] == [(0, acc1)]
    again = probed(say, tmp_path, out, probe=False)
    assert (again["figures"]["model"]["acc1"], again["classes"]) == (acc1, [str(digit) for digit in range(10)])

    trained, right = load_trained(out), round(3.6 * acc1)
    batch = split_of_run(trained).__getitems__([(0, index) for index in range(360)])
    guessed = in_process(predict.main)(out, "-part", "val", "-topk", 1, "-format", "csv")
    labels = [int(row["label"]) for row in csv.DictReader(guessed.out.splitlines())]
    assert int((torch.tensor(labels) == batch.labels).sum()) == right
    done = in_process(export.main)(out, "-to", "torch", "-out", tmp_path / "m.pt2", "-check", "all")
    assert "no answer changed" in done.text
    for model in (package.load(out)[0], torch.export.load(tmp_path / "m.pt2").module()):
        assert int((model(trained.inputs(batch.images)).argmax(1) == batch.labels).sum()) == right
    done = in_process(report.main)(out, "-out", tmp_path / "page.html")
    assert f"{acc1:.2f} %" in (tmp_path / "page.html").read_text(), done.err


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_probes_of_a_masked_autoencoder_and_of_weights_without_tokens(
    say: Say, unlabelled_run: Path, greys: tuple[object, ...], tmp_path: Path
) -> None:
    found = probed(say, tmp_path, unlabelled_run, *greys, "-out", tmp_path / "mae")
    again = probed(say, tmp_path, tmp_path / "mae", probe=False)
    assert again["classes"] == ["dark", "grey", "light"]
    assert again["figures"]["model"]["acc1"] == found["probes"][found["chosen"]]["acc1"] > 80

    torch.save(timm.create_model("resnet10t").state_dict(), tmp_path / "w.pth")
    named = ("-model", "resnet10t", "-pretrained", tmp_path / "w.pth", *greys, "-image_size", 8, "DEVICE=cpu")
    (tmp_path / "recipe.yaml").write_text(f"MODEL: {{NAME: resnet10t, PRETRAINED: {tmp_path / 'w.pth'}}}")
    done = say("-cfg", tmp_path / "recipe.yaml", *named[4:], "-probe", "-pool", "class", code=2)
    assert "-pool class: this ResNet has no such tokens; use pooled." in done.err
    found = probed(say, tmp_path, *named, "-out", tmp_path / "cnn")
    assert (found["source"], set(found["probes"])) == (str(tmp_path / "w.pth"), {"pooled"})
    assert [line["acc1"] for line in metrics(tmp_path / "cnn", "val")] == [found["probes"]["pooled"]["acc1"]]
