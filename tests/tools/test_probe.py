"""evaluate.py -probe and its runs, MODEL.NEW_CLASSIFIER, MODEL.POOL, and trainings on features that are kept."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tests.program import ROOT, Result, Started, Vitamp, metrics, run_program, train_tiny
from tests.waiting import free_port
from tools.evaluate import command as evaluate
from tools.export import command as export
from tools.predict import command as predict
from tools.report import command as report
from vitamp.pooling import POOLS

Say = Callable[..., Result]
Tool = Callable[[Any], Say]
STRENGTH = 1e-2
# A script of the program, with one strength. It can count the batches whose features it computes, and kill itself.
PATCHED = f"""\
import os, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
from engine.evaluation import features, linear
from utils.config import Config
linear.STRENGTHS = ({STRENGTH},)
if "IMAGES" in os.environ:
    Config.trains_on_features = property(lambda config: False)
columns, calls = features._columns, []
def counted(seeing, images):
    calls.append(len(images))
    if len(calls) == int(os.environ.get("KILLED_IN", 0)):
        os.kill(os.getpid(), 9)
    if "PACE" in os.environ:
        time.sleep(float(os.environ["PACE"]))
        print("batch of", len(images), file=sys.stderr)
    return columns(seeing, images)
features._columns = counted
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
"""
EVALUATE, MAIN = (str(ROOT / name) for name in ("scripts/evaluate.py", "main_single_gpu.py"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two blocks, whose class tokens -pool blocks tells from those of -pool both. Not to be changed."""
    return train_tiny(tmp_path_factory.mktemp("probe"), "MODEL.DEPTH=2", "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0")


@pytest.fixture
def say(in_process: Tool) -> Say:
    return in_process(evaluate.main)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "STRENGTHS", (STRENGTH,))


@pytest.fixture
def patched(vitamp: Vitamp, tmp_path: Path) -> Say:
    """A script in a process of its own, with what `PATCHED` changes."""
    path = tmp_path / "patched.py"
    path.write_text(PATCHED)

    def call(script: str, *words: object, code: int = 0, **env: object) -> Result:
        return vitamp(
            *words, script=str(path), env={"SCRIPT": script, **{k: str(v) for k, v in env.items()}}, code=code
        )

    return call


def probed(say: Say, out: Path, *words: object) -> dict[str, Any]:
    done = say(*words, "-probe", "-json", out, "-overwrite")
    assert done.code == 0, done.err
    return json.loads(out.read_text())


def standardised(in_process: Tool, run: Path, pool: str, place: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Features of both splits, as predict.py writes them, and their labels."""
    scaler = StandardScaler()
    for part in ("train", "val"):
        file = place / f"{part}-{pool}.npz"
        done = in_process(predict.main)(run, "-part", part, "-pool", pool, "-features", file)
        assert done.code == 0, done.err
        arrays = np.load(file)
        columns = arrays["features"].astype(np.float64)
        yield (scaler.fit_transform if part == "train" else scaler.transform)(columns), arrays["labels"]


def logistic(strength: float, images: int) -> LogisticRegression:
    """Its objective is that of the probe, times the number of images over the strength."""
    return LogisticRegression(C=1 / (strength * images), tol=1e-8, max_iter=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["mean", "both"])
def test_probe_is_logistic_regression_and_folds_choose_its_strength(
    say: Say, in_process: Tool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    monkeypatch.setattr(linear, "STRENGTHS", linear.STRENGTHS[:10])  # weaker ones take scikit-learn long
    found = probed(say, tmp_path / "e.json", run, "-pool", pool)
    ours = found["probes"][pool]
    (bank, labels), (images, truth) = standardised(in_process, run, pool, tmp_path)
    theirs = logistic(ours["strength"], len(bank)).fit(bank, labels)
    assert ours["acc1"] == pytest.approx(100 * theirs.score(images, truth), abs=0.1)
    assert ours["nll"] == pytest.approx(log_loss(truth, theirs.predict_proba(images)), rel=1e-3)

    data = load_trained(run).config.DATA
    of_train = open_dataset(data.model_copy(update={"PART": "train"}), False, 10, 0, torch.device("cpu"))
    fold_of, _ = linear.folds_of(of_train, labels, data)
    in_folds = {}
    for strength in (1.0, ours["strength"] * 10, ours["strength"], 10**-3.5):
        right = 0
        for fold in range(linear.FOLDS):
            seen = fold_of != fold
            one = logistic(strength, int(seen.sum())).fit(bank[seen], labels[seen])
            right += int((one.predict(bank[~seen]) == labels[~seen]).sum())
        in_folds[strength] = 100 * right / len(bank)
    assert ours["folds"] == pytest.approx(in_folds[ours["strength"]], abs=0.1)
    assert ours["folds"] >= max(in_folds.values()) - 0.1
    for strength in (1.0, 10**-3.5):
        monkeypatch.setattr(linear, "STRENGTHS", (strength,))
        fixed = probed(say, tmp_path / "fixed.json", run, "-pool", pool)["probes"][pool]
        assert fixed["strength"] == strength
        assert fixed["folds"] == pytest.approx(in_folds[strength], abs=0.15)
        assert fixed["folds"] <= ours["folds"]


@pytest.mark.slow
def test_probe_of_several_labels_is_one_regression_per_class(
    say: Say, in_process: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "STRENGTHS", linear.STRENGTHS[:8])
    write_set(tmp_path)
    run_program("-cfg", write_recipe(tmp_path), "-output", tmp_path / "run", streams=tmp_path, code=0)
    found = probed(say, tmp_path / "e.json", tmp_path / "run", "-pool", "mean", "-amp", "off")
    ours = found["probes"]["mean"]
    (bank, labels), (images, truth) = standardised(in_process, tmp_path / "run", "mean", tmp_path)
    each = [logistic(ours["strength"], len(bank)).fit(bank, column).decision_function(images) for column in labels.T]
    assert ours["map"] == pytest.approx(100 * average_precision_score(truth, np.stack(each, 1)), abs=0.1)
    assert "neighbours" not in found


# Features that are kept.


def test_killed_probe_resumes_where_it_was(patched: Say, run: Path, tmp_path: Path) -> None:
    """In blocks of 512 images."""
    words = (run, "-probe", "-pool", "both")
    whole = patched(EVALUATE, *words, f"DATA.CACHE={tmp_path / 'whole'}")
    cache = f"DATA.CACHE={tmp_path / 'killed'}"
    patched(EVALUATE, *words, cache, KILLED_IN=40, code=-9)
    again = patched(EVALUATE, *words, cache, PACE=0)
    assert (
        "training split: 1,437 images; no features of these very weights and images are kept yet, 413 are" in again.out
    )
    assert computed(again) == 413 + 360
    assert table(again) == table(whole)
    assert kept(tmp_path / "killed") == kept(tmp_path / "whole")
    third = patched(EVALUATE, *words, cache, PACE=0)
    assert third.out.count("images; features are kept in") == 2
    assert computed(third) == 0


def table(done: Result) -> list[str]:
    return [line for line in done.out.splitlines() if " %" in line]


def computed(done: Result) -> int:
    """Images; one batch of each split only shows how many features there are."""
    return sum(map(int, re.findall(r"batch of (\d+)", done.err))) - 2


def kept(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.glob("features/*/*.npy")}


def test_processes_share_the_work(patched: Say, run: Path, tmp_path: Path) -> None:
    words = [str(word) for word in (run, "-probe", "-pool", "both")]
    whole, began, port = patched(EVALUATE, *words, f"DATA.CACHE={tmp_path / 'whole'}"), [], str(free_port())
    for rank in ("0", "1"):
        (streams := tmp_path / rank).mkdir()
        env = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "PACE": "0.02"}
        argv = [*words, f"DATA.CACHE={tmp_path / 'both'}"]
        began.append(Started(str(tmp_path / "patched.py"), argv, ROOT, {"SCRIPT": EVALUATE, **env}, streams))
    first, second = (one.end(60) for one in began)
    assert (first.code, second.code) == (0, 0), first.text + second.text
    assert table(first) == table(whole)
    assert "%" not in second.out
    assert computed(second) >= 512
    assert computed(first) + computed(second) <= 1437 + 360 + 512, "at most the last block twice"
    assert kept(tmp_path / "both") == kept(tmp_path / "whole")


def colours(root: Path, counts: dict[str, int]) -> Path:
    """Class folders of noise of another brightness."""
    for number, (name, images) in enumerate(counts.items()):
        for image in range(images):
            pixels = np.random.default_rng(100 * number + image).integers(0, 60, (8, 8), dtype=np.uint8)
            path = root / name / f"{image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels + np.uint8(90 * number)).save(path)
    return root


@pytest.mark.usefixtures("quick")
def test_changed_images_and_weights_are_computed_anew(say: Say, run: Path, tmp_path: Path) -> None:
    data = colours(tmp_path / "data", {"dark": 20, "grey": 20, "light": 3})
    words = ("-dataset", "imagefolder", "-data_path", data, "DATA.VAL_FRACTION=0.25", "-probe", "-pool", "mean")
    first = say(run, *words)
    assert first.code == 0, first.err
    assert first.out.count("are computed now") == 2
    assert "fewer images than folds have 1 class: light." in first.out
    assert say(run, *words).out.count("features are kept in") == 2
    assert say(run, *words, "DATA.IMAGENET_MEAN=0.4").out.count("are computed now") == 2
    about = (data / "dark" / "0.png").stat()
    shutil.copy(data / "grey" / "0.png", data / "dark" / "0.png")
    os.utime(data / "dark" / "0.png", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    done = say(run, *words)
    assert (done.out.count("are computed now"), done.out.count("features are kept in")) == (1, 1)


# Runs.


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("pool", POOLS)
def test_saved_probe_is_a_run_like_any_other(say: Say, in_process: Tool, run: Path, tmp_path: Path, pool: str) -> None:
    out = tmp_path / "run"
    found = probed(say, tmp_path / "e.json", run, "-pool", pool, "-out", out)["probes"][pool]
    acc1, (first,) = found["acc1"], metrics(out, "val")
    assert (first["update"], first["acc1"]) == (0, acc1)
    assert first["loss"] == pytest.approx(found["nll"], rel=1e-4)

    done = say(out, "-json", tmp_path / "again.json")
    assert done.code == 0, done.err
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["figures"]["model"]["acc1"] == acc1
    assert again["classes"] == [str(digit) for digit in range(10)]

    trained = load_trained(out)
    batch = split_of_run(trained).__getitems__([(0, index) for index in range(360)])
    images, right = trained.inputs(batch.images), round(3.6 * acc1)
    guessed = in_process(predict.main)(out, "-part", "val", "-topk", 1, "-format", "csv")
    labels = [int(row["label"]) for row in csv.DictReader(guessed.out.splitlines())]
    assert int((torch.tensor(labels) == batch.labels).sum()) == right
    done = in_process(export.main)(out, "-to", "torch", "-out", tmp_path / "m.pt2", "-check", "all")
    assert done.code == 0, done.text
    assert "top-1 the same on all" in done.text
    for model in (package.load(out)[0], torch.export.load(tmp_path / "m.pt2").module()):
        with torch.no_grad():
            assert int((model(images).argmax(1) == batch.labels).sum()) == right
    done = in_process(report.main)(out, "-out", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert f"{acc1:.2f} %" in (tmp_path / "page.html").read_text()


@pytest.mark.usefixtures("quick")
def test_probe_of_a_masked_autoencoder_is_a_classifier(say: Say, unlabelled_run: Path, tmp_path: Path) -> None:
    data = colours(tmp_path / "data", {"dark": 20, "grey": 20, "light": 20})
    words = ("-dataset", "imagefolder", "-data_path", data, "DATA.VAL_FRACTION=0.25", "-out", tmp_path / "run")
    found = probed(say, tmp_path / "e.json", unlabelled_run, *words)
    assert set(found["probes"]) == {"pooled", "mean", "both", "blocks"}
    assert found["chosen"] == max(found["probes"], key=lambda pool: found["probes"][pool]["folds"])
    done = say(tmp_path / "run", "-json", tmp_path / "again.json")
    assert done.code == 0, done.err
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["classes"] == ["dark", "grey", "light"]
    assert again["figures"]["model"]["acc1"] == found["probes"][found["chosen"]]["acc1"] > 80


NEW = ("MODEL.DEPTH=2", "REPORT_FREQ=1", "SAVE_FREQ=1")


def test_training_that_starts_at_a_probe_is_never_worse(
    say: Say, quick: None, patched: Say, tiny: Path, run: Path, tmp_path: Path
) -> None:
    found = probed(say, tmp_path / "e.json", run, "-pool", "pooled")["probes"]["pooled"]
    words = ("-cfg", tiny, "-pretrained", run, "MODEL.NEW_CLASSIFIER=probe", *NEW, f"DATA.CACHE={tmp_path / 'cache'}")
    bad = ("TRAIN.BASE_LR=1", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.GRAD_CLIP=null", "TRAIN.NUM_EPOCHS=1")
    done = patched(MAIN, *words, *bad, "-output", tmp_path / "run")
    first, last = metrics(tmp_path / "run", "val")
    assert (first["update"], first["acc1"]) == (0, found["acc1"])
    assert last["acc1"] < first["acc1"]
    assert f"best top-1 {found['acc1']:.2f} %" in done.out
    best = say(tmp_path / "run", "-json", tmp_path / "best.json")
    assert best.code == 0, best.err
    assert json.loads((tmp_path / "best.json").read_text())["figures"]["model"]["acc1"] == found["acc1"]


def test_classifier_of_zeros_begins_without_a_guess(vitamp: Vitamp, tiny: Path, run: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-pretrained", run, "MODEL.NEW_CLASSIFIER=zero", *NEW, "-output", tmp_path / "run")
    vitamp(*words, "TRAIN.NUM_EPOCHS=0", code=0)
    trained = load_trained(tmp_path / "run")
    logits = trained.logits(torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8))
    assert torch.equal(logits, torch.zeros(9, 10))


FROZEN = ("MODEL.FREEZE=backbone", "MODEL.NEW_CLASSIFIER=true", "DATA.CROP=none", "DATA.FLIP=0", *NEW)


@pytest.mark.slow
def test_frozen_backbone_trains_on_kept_features_as_on_images(
    patched: Say, tiny: Path, run: Path, tmp_path: Path
) -> None:
    words = ("-cfg", tiny, "-pretrained", run, *FROZEN, f"DATA.CACHE={tmp_path / 'cache'}", "-output")

    def losses(name: str) -> list[float]:
        of_updates = [line["loss"] for line in metrics(tmp_path / name, "train")]
        return [*of_updates, *(line["loss"] for line in metrics(tmp_path / name, "val") if line["update"] % 45 == 0)]

    patched(MAIN, *words, tmp_path / "images", IMAGES=1)
    assert not (tmp_path / "cache").exists()
    done = patched(MAIN, *words, tmp_path / "features")
    assert "training split: 1,437 images; no features of these very weights and images are kept yet" in done.out
    assert losses("features") == pytest.approx(losses("images"), rel=1e-5)
    for limit in (("TRAIN.MAX_UPDATES=20",), ("TRAIN.MAX_UPDATES=60",), ()):
        done = patched(MAIN, *words, tmp_path / "resumed", "-resume", "auto", *limit, PACE=0)
        assert computed(done) == 0
    assert losses("resumed") == losses("features")
    two = ("-ngpus", 2, "-batch_size", 16, f"DATA.CACHE={tmp_path / 'two'}")
    patched(str(ROOT / "main_multi_gpu.py"), *words, tmp_path / "two_processes", *two)
    assert losses("two_processes") == pytest.approx(losses("features"), rel=1e-5)
    assert len(kept(tmp_path / "two")) == 4


def test_frozen_backbone_of_changing_images_names_the_probe(
    vitamp: Vitamp, tiny: Path, run: Path, tmp_path: Path
) -> None:
    words = ("-cfg", tiny, "-pretrained", run, *FROZEN, f"DATA.CACHE={tmp_path / 'cache'}", "DATA.SHIFT=0.1")
    done = vitamp(*words, "-output", tmp_path / "run", "TRAIN.MAX_UPDATES=1", code=0)
    said = "MODEL.FREEZE backbone: it is computed in each of 2 epochs, because the images change at random. scripts/"
    assert done.out.count(said) == 1
    assert "features" not in os.listdir(tmp_path / "cache") if (tmp_path / "cache").exists() else True


# What is refused.


def test_bad_command_lines_are_refused(say: Say, run: Path, tmp_path: Path) -> None:
    for words, text in (
        ((run, "-out", tmp_path / "out"), "the run that -probe saves; give that too"),
        ((run, "-probe", "-knn"), "-knn: leave it out; -probe shows it too"),
        ((run, "-probe", "-tta", "flip"), "-tta: does not go with -probe"),
        ((run, "-probe", "-part", "train"), "-part train: -probe learns from the training images"),
        ((run, "-probe", "-pool", "patches"), "-pool patches: takes "),
        (("-probe",), "RUN_OR_CHECKPOINT is missing"),
        (("-pretrained", "w.pth"), "RUN_OR_CHECKPOINT is missing"),
        (("-probe", "-model", "resnet10t", "-pretrained", "w.pth", "-dataset", "digits"), "w.pth"),
    ):
        done = say(*words)
        assert done.code == 2, (words, done.err)
        assert text in done.err, (words, done.err)
        assert "Traceback" not in done.err


@pytest.mark.usefixtures("quick")
def test_weights_of_another_program_without_tokens(say: Say, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet10t").state_dict(), tmp_path / "w.pth")
    words = ("-model", "resnet10t", "-pretrained", tmp_path / "w.pth", "-dataset", "digits", "-image_size", 8)
    words += ("DATA.IMAGENET_MEAN=0.5", "DATA.IMAGENET_STD=0.5", "DEVICE=cpu", "THREADS=1")
    done = say(*words, "-probe", "-pool", "class")
    assert done.code == 2
    assert "-pool class: this ResNet has no such tokens; use pooled." in done.err
    found = probed(say, tmp_path / "e.json", *words, "-out", tmp_path / "run")
    assert found["source"] == str(tmp_path / "w.pth")
    assert set(found["probes"]) == {"pooled"}
    again = probed(say, tmp_path / "again.json", tmp_path / "run")
    assert again["probes"]["pooled"]["acc1"] == found["probes"]["pooled"]["acc1"]
    (saved,) = metrics(tmp_path / "run", "val")
    assert saved["acc1"] == found["probes"]["pooled"]["acc1"] > 30


@pytest.mark.usefixtures("quick")
def test_full_disk_is_refused_before_work(say: Say, run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    done = say(run, "-probe")
    assert done.code == 2
    assert "the features take" in done.err
    assert "1 kB are free. Name a folder on a larger disk: DATA.CACHE=DIR." in done.err
    assert kept(cache) == {}
