"""scripts/evaluate.py: metrics agree with scikit-learn and validation, on the run's data and on other data."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as sklearn

from engine.trained.model import load_trained, split_of_run
from tests.predicted import validation_predictions
from tests.program import Result, metrics
from tools.checkpoint import command as checkpoint
from tools.common.evaluation import OneLabel
from tools.evaluate import command as evaluate
from vitamp.metrics import BALANCED, MACRO_F1, TOP1, TOP5

CLASSES = 7
SCORES: Any = sklearn.precision_recall_fscore_support  # its type stubs do not know the values it takes


@pytest.fixture
def say(in_process: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    return in_process(evaluate.main)


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> OneLabel:
    """Metrics of a model with these logits, in two batches."""
    trained: Any = SimpleNamespace(config=SimpleNamespace(MODEL=SimpleNamespace(NUM_CLASSES=logits.shape[1])))
    half = len(labels) // 2
    return OneLabel.of(trained, [(logits[:half], labels[:half]), (logits[half:], labels[half:])])


@pytest.fixture(scope="module")
def answers() -> tuple[torch.Tensor, torch.Tensor]:
    """Mostly correct logits; class 5 is never guessed, and class 6 has no images."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES - 1, (333,), generator=generator)
    logits = torch.randn(333, CLASSES, generator=generator)
    logits[torch.arange(333), labels] += 1.5
    logits[:, 5] -= 20
    return logits, labels


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_metrics_agree_with_scikit_learn(answers: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = answers
    found, guess, shares = of_logits(logits, labels), logits.argmax(1), logits.double().softmax(1).numpy()
    assert found.values[TOP1] == pytest.approx(100 * sklearn.accuracy_score(labels, guess))
    among = sklearn.top_k_accuracy_score(labels, shares, k=5, labels=range(CLASSES))
    assert found.values[TOP5] == pytest.approx(100 * among)
    assert found.values[BALANCED] == pytest.approx(100 * sklearn.balanced_accuracy_score(labels, guess), abs=1e-9)
    macro_f1 = 100 * float(sklearn.f1_score(labels, guess, average="macro"))
    assert found.values[MACRO_F1] == pytest.approx(macro_f1, abs=1e-9)
    told = found.as_json()
    assert told["macro_f1"] != told["f1_macro"], "class 6 is predicted and has no images"
    present = sorted(set(labels.tolist()))
    for average in ("macro", "weighted"):
        wanted: Any = SCORES(labels, guess, labels=present, average=average, zero_division=0)
        values = [told[f"{name}_{average}"] for name in ("precision", "recall", "f1")]
        assert values == pytest.approx([100 * float(value) for value in wanted[:3]])
    each: Any = SCORES(labels, guess, labels=range(CLASSES), zero_division=0)
    for values, of_class in zip((found.precision, found.recall, found.f1), each, strict=False):
        assert values.tolist() == pytest.approx((100 * of_class).tolist())
    assert found.support.tolist() == each[3].tolist()
    assert told["confusion"] == sklearn.confusion_matrix(labels, guess, labels=range(CLASSES)).tolist()
    assert found.confusion([1, 4]).tolist() == sklearn.confusion_matrix(labels, guess, labels=[1, 4]).tolist()
    assert found.nll == pytest.approx(sklearn.log_loss(labels, shares, labels=range(CLASSES)), rel=1e-6)
    assert found.brier == pytest.approx(((shares - np.eye(CLASSES)[labels.numpy()]) ** 2).sum(1).mean())


def test_calibration_error_and_bins(answers: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = answers
    found = of_logits(logits, labels)
    confidence, guess = (values.numpy() for values in logits.double().softmax(1).max(1))
    right, error = guess == labels.numpy(), 0.0
    for number, one in enumerate(found.bins):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        assert one.images == inside.sum()
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
            assert one.accuracy == pytest.approx(100 * right[inside].mean())
    assert found.ece == pytest.approx(100 * error)
    assert found.ece > 1


def test_certain_model_and_model_with_nan() -> None:
    labels = torch.arange(5)
    certain = of_logits(200 * torch.eye(5), labels)
    assert (certain.values[TOP1], certain.ece, certain.brier) == pytest.approx((100, 0, 0))
    assert certain.bins[-1].images == 5
    broken = of_logits(torch.full((5, 5), torch.nan), labels)
    assert broken.not_finite == 5
    told = json.dumps(broken.as_json(), allow_nan=False)
    assert json.loads(told)["ece"] is None


@pytest.mark.parametrize(("which", "prefix"), [("model", ""), ("ema", "ema_")])
def test_metrics_are_those_of_validation(
    say: Callable[..., Result], digits_run: Path, tmp_path: Path, which: str, prefix: str
) -> None:
    done = say(digits_run, "-weights", which, "-json", tmp_path / "eval.json")
    assert done.code == 0, done.err
    validated = metrics(digits_run, "val")[-1]
    told = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert told["classes"] == [str(digit) for digit in range(10)]
    assert told["precision"] == "bf16"
    found = told["figures"][which]
    for name in ("acc1", "acc5", "balanced_acc", "macro_f1"):
        assert found[name] == validated[f"{prefix}{name}"]
    assert found["nll"] == pytest.approx(validated[f"{prefix}loss"], rel=1e-12)
    low, high = found["intervals"]["acc1"]
    assert low < found["acc1"] < high
    assert f"{found['acc1']:.2f} % ({low:.2f} to {high:.2f})" in done.out
    assert found["intervals"].keys() == {"acc1", "acc5", "balanced_acc", "macro_f1"}
    about = json.loads((digits_run / "run.json").read_text())
    assert found["largest_class_percent"] == about["largest_class_percent"]
    assert f"always guessing the largest class: {found['largest_class_percent']:.1f} % top-1" in done.out
    assert sum(map(sum, found["confusion"])) == found["images"] == 360
    assert done.out.count("\n  9 ") == 1, "one line per class"


def test_mirrored_images_are_averaged(
    say: Callable[..., Result], vitamp: Callable[..., Result], digits_run: Path, tmp_path: Path
) -> None:
    """Against the model itself, called by hand; predict.py gives the same classes."""
    done = say(digits_run, "-tta", "flip", "-amp", "off", "-json", tmp_path / "eval.json")
    assert done.code == 0, done.err
    assert "-tta flip: mean of the probabilities of each image and its mirror image." in done.out
    trained = load_trained(digits_run, amp="off")
    dataset = split_of_run(trained)
    batch = dataset.__getitems__([(0, index) for index in range(len(dataset))])
    with torch.no_grad():
        views = [trained.model(trained.inputs(images)) for images in (batch.images, batch.images.flip(-1))]
    logits = torch.stack([view.softmax(1) for view in views]).mean(0).log()
    found = json.loads((tmp_path / "eval.json").read_text())["figures"][trained.chosen.which.name]
    assert found["acc1"] == pytest.approx(100 * float((logits.argmax(1) == batch.labels).float().mean()))
    assert found["nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, batch.labels)), rel=1e-5)
    plain = say(digits_run, "-amp", "off", "-json", tmp_path / "plain.json")
    assert plain.code == 0
    other = json.loads((tmp_path / "plain.json").read_text())["figures"][trained.chosen.which.name]
    assert other["nll"] != found["nll"]
    words = ("-part", "val", "-tta", "flip", "-amp", "off", "-topk", "1", "-format", "csv")
    guessed = vitamp(digits_run, *words, script="scripts/predict.py")
    assert "mean of the probabilities of each image and its mirror image" in guessed.err
    rows = list(csv.DictReader(guessed.out.splitlines()))
    assert [int(row["label"]) for row in rows] == logits.argmax(1).tolist()


@pytest.fixture
def tree(digits_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """Validation images of the run in class folders with these names."""

    def make(names: dict[int, str]) -> Path:
        part = split_of_run(load_trained(digits_run))
        images, labels, _ = part.__getitems__([(0, index) for index in range(len(part))])
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            if label in names:
                path = tmp_path / "tree" / "val" / names[label] / f"{number:03d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image[0].numpy()).save(path)
        return tmp_path / "tree"

    return make


OTHER = ("-dataset", "imagefolder", "DATA.CROP=none")


def test_classes_of_other_data_are_matched_by_name(
    say: Callable[..., Result], digits_run: Path, tree: Callable[..., Path], tmp_path: Path
) -> None:
    """Folders 3, 4 and 8 have labels 0, 1 and 2 in that data set."""
    root = tree({3: "3", 4: "4", 8: "8"})
    done = say(digits_run, *OTHER, "-data_path", root, "-json", tmp_path / "eval.json")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))["figures"]["model"]
    own = validation_predictions(load_trained(digits_run), workers=0)
    chosen = torch.isin(own.labels, torch.tensor([3, 4, 8]))
    guess, labels = own.guesses()[chosen, 0], own.labels[chosen]
    assert found["images"] == len(labels)
    assert found["confusion"] == sklearn.confusion_matrix(labels, guess, labels=range(10)).tolist()
    assert found["recall_macro"] == pytest.approx(100 * SCORES(labels, guess, labels=[3, 4, 8], average="macro")[1])
    assert "images of 3 classes" in done.out


@pytest.mark.parametrize("more", [{}, {label: f"{label}" for label in range(10) if label != 7}])
def test_unknown_classes_are_named(
    say: Callable[..., Result], digits_run: Path, tree: Callable[..., Path], more: dict[int, str]
) -> None:
    root = tree({1: "1", 7: "seven", **more})
    if more:  # eleven classes: more than the model has
        (root / "val" / "six").mkdir()
        save = next((root / "val" / "1").iterdir()).read_bytes()
        (root / "val" / "six" / "x.png").write_bytes(save)
    done = say(digits_run, *OTHER, "-data_path", root)
    assert done.code == 2
    assert (
        "2 of its 11 classes are unknown to the model: seven, six." if more else "1 of its 2 classes are unknown"
    ) in done.err
    assert "The model was trained on 0, 1, 2" in done.err


def test_unreadable_image_ends_the_evaluation(
    say: Callable[..., Result], digits_run: Path, tree: Callable[..., Path]
) -> None:
    root = tree({3: "3", 4: "4"})
    (root / "val" / "3" / "bad.png").write_text("no image")
    done = say(digits_run, *OTHER, "-data_path", root)
    assert done.code == 1
    assert "bad.png (not an image in a known format)" in done.err
    assert "top-5" not in done.out, "no metrics of the other images alone"


def test_bad_command_lines_are_refused(say: Callable[..., Result], digits_run: Path, tmp_path: Path) -> None:
    for words, said in (
        ((), "required: RUN_OR_CHECKPOINT"),
        ((tmp_path / "none",), "no such file or folder"),
        ((digits_run, "-weights", "best"), "takes auto, model or ema"),
        ((digits_run, "-part", "test"), "the data set digits has no test split"),
        ((digits_run, "-part", "vol"), "takes train, val, test or all. Did you mean val?"),
        ((digits_run, "-json", tmp_path / "x.txt"), "name a file that ends in .json"),
        (
            (digits_run, "-cfg", "x.yaml"),
            "-cfg x.yaml: leave this out. The model is evaluated with the settings",
        ),
        ((digits_run, "-pretrained", "x.pth"), "the model is the first argument"),
        ((digits_run, "-dataset", "imagefolder"), "needs DATA.DATA_PATH"),
        ((digits_run, "MODEL.DEPTH=3"), "weights of another architecture"),
        ((digits_run, "DEVICE=mps"), "-device mps: this machine has no mps device"),
    ):
        done = say(*words)
        assert done.code == 2, (words, done.err)
        assert said in done.err, (words, done.err)
        assert "Traceback" not in done.err


def test_missing_ema_is_refused_before_the_evaluation(
    say: Callable[..., Result], digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.common.evaluation.batches_of", lambda *_: pytest.fail("it was evaluated"))
    plain = tmp_path / "plain.safetensors"
    assert checkpoint.main(["strip", str(digits_run), "-weights", "model", "-out", str(plain)]) == 0
    done = say(plain, "-weights", "ema")
    assert done.code == 2
    assert "has no EMA (TRAIN.MODEL_EMA) weights; use -weights model" in done.err
