"""evaluate.py -knn and linear probes: as scikit-learn computes them, for models with and without labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from engine.evaluation import knn
from engine.trained.model import Trained, load_trained, split_of_run
from tests.program import ROOT, Result, metrics, run_program
from tools.evaluate import command as evaluate
from utils.text import wilson


@pytest.fixture
def say(in_process: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    return in_process(evaluate.main)


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of images that any features separate."""
    folder = tmp_path_factory.mktemp("flowers")
    for number in range(40):
        path = folder / ("dark" if number % 2 else "striped") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 40, (8, 8), dtype=np.uint8)
        pixels[:, :: 2 + 6 * (number % 2)] += 200 - 190 * (number % 2)
        Image.fromarray(pixels).save(path)
    return folder


def _scikit_learn(bank: np.ndarray, labels: np.ndarray, count: int) -> KNeighborsClassifier:
    """Its distance is 1 - similarity."""
    weights: Any = lambda distance: np.exp((1 - distance) / knn.TEMPERATURE)  # noqa: E731
    return KNeighborsClassifier(count, metric="cosine", weights=weights).fit(bank, labels)


def test_guesses_agree_with_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batches in which the training images come, and the chunks in which they are compared."""
    monkeypatch.setattr(knn, "AT_ONCE", 33)
    draw = np.random.default_rng(0)
    bank, labels = draw.normal(size=(500, 24)), draw.integers(0, 7, 500)
    bank[np.arange(500), labels] += 2
    images = draw.normal(size=(100, 24))
    images[np.arange(100), np.arange(100) % 7] += 2
    for count in (1, 5, 40):
        rows = [torch.from_numpy(one) for one in (images, np.arange(100) % 7, np.arange(100))]
        others = [torch.from_numpy(one).split(64) for one in (bank, labels, labels)]
        found, truth = knn.classify([tuple(rows)], zip(*others, strict=True), count)  # pyright: ignore[reportArgumentType]
        assert torch.equal(truth, rows[1])
        assert (found.numpy() == _scikit_learn(bank, labels, count).predict(images)).all()
        found = found.numpy()
        assert 0.3 < (found == np.arange(100) % 7).mean() < 1


def _seen(trained: Trained, part: str, pool: str) -> tuple[np.ndarray, np.ndarray]:
    dataset = split_of_run(trained, part)
    batch = dataset.__getitems__([(0, index) for index in range(len(dataset))])
    return trained.features(batch.images, pool).numpy(), batch.labels.numpy()  # pyright: ignore[reportArgumentType]


def test_accuracy_of_a_run(say: Callable[..., Result], digits_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "knn.json"
    done = say(digits_run, "-knn", 15, "-pool", "mean", "-weights", "ema", "-amp", "off", "-json", out)
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert (found["knn"], found["pool"], found["bank_images"]) == (15, "mean", 1437)
    assert found["data"] == "digits, validation split"
    trained = load_trained(digits_run, "ema", amp="off")
    images, truth = _seen(trained, "val", "mean")
    right = (_scikit_learn(*_seen(trained, "train", "mean"), 15).predict(images) == truth).mean()
    figures = found["figures"]["ema"]
    assert figures["acc1"] == pytest.approx(100 * right, abs=0.3)  # one image: its similarities are in fp32
    assert figures["intervals"]["acc1"] == pytest.approx(wilson(figures["acc1"], 360))
    assert f"{figures['acc1']:.2f} % (" in done.text


def test_a_model_without_labels_on_other_images(
    say: Callable[..., Result], unlabelled_run: Path, flowers: Path, tmp_path: Path
) -> None:
    done = say(unlabelled_run, "-knn")
    assert done.code == 2
    assert "has no labels. Name images with labels, as in -dataset imagefolder -data_path DIR" in done.err
    words = ("-dataset", "imagefolder", "-data_path", flowers, "DATA.VAL_FRACTION=0.25")
    done = say(unlabelled_run, "-knn", *words, "-json", tmp_path / "knn.json")
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "knn.json").read_text())
    assert (found["knn"], found["bank_images"], found["figures"]["model"]["images"]) == (20, 30, 10)
    assert found["figures"]["model"]["acc1"] == 100
    done = say(unlabelled_run, "-knn", 31, *words)
    assert done.code == 2
    assert "has only 30 training images" in done.err


def test_a_linear_probe_of_a_model_without_labels(unlabelled_run: Path, flowers: Path, tmp_path: Path) -> None:
    """Its encoder stays as it is, and only the new classifier is trained."""
    recipe = ROOT / "configs" / "linear_probe_vit_base.yaml"
    data = ("-dataset", "imagefolder", "-data_path", flowers, "DATA.VAL_FRACTION=0.25", "DATA.IMAGE_CHANNELS=1")
    sizes = ("MODEL.NAME=tiny", "MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2")
    short = ("-batch_size", 8, "TRAIN.NUM_EPOCHS=1", "DEVICE=cpu", "THREADS=1", "-output", tmp_path / "run")
    done = run_program("-cfg", recipe, "-pretrained", unlabelled_run, *data, *sizes, *short, streams=tmp_path)
    assert done.code == 0, done.text
    before, after = (
        load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")
        for run in (unlabelled_run, tmp_path / "run")
    )
    encoder = {name for name in before if not name.startswith("decoder.")}
    assert after.keys() - encoder == {"head.weight", "head.bias"}
    assert all(torch.equal(after[name], before[name]) for name in encoder)


@pytest.mark.slow
def test_a_linear_probe_converges_to_scikit_learns(digits_run: Path, tmp_path: Path) -> None:
    """The same minimum as LogisticRegression on the encoder's features: cross-entropy with an L2 penalty of weights."""
    recipe, decay, images = ROOT / "configs" / "linear_probe_vit_base.yaml", 0.01, 1437
    data = ("-dataset", "digits", "-image_size", 8, "DATA.IMAGE_CHANNELS=1", "-batch_size", images)
    sizes = ("MODEL.NAME=tiny", "MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2")
    descent = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.OPTIMIZER.MOMENTUM=0.9", "TRAIN.BASE_LR=0.5", "TRAIN.WARMUP_EPOCHS=0")
    plain = (f"TRAIN.WEIGHT_DECAY={decay}", "TRAIN.SMOOTHING=0", "TRAIN.GRAD_CLIP=null", "DEVICE=cpu", "THREADS=1")
    rare = ("TRAIN.NUM_EPOCHS=1000", "VALIDATE_FREQ=1000", "SAVE_FREQ=1000", "-output", tmp_path / "run")
    words = ("-cfg", recipe, "-pretrained", digits_run, *data, *sizes, *descent, *plain, *rare)
    done = run_program(*words, streams=tmp_path, timeout=600)
    assert done.code == 0, done.text

    trained = load_trained(tmp_path / "run", amp="off")
    (bank, labels), (features, truth) = (_seen(trained, part, "pooled") for part in ("train", "val"))
    theirs = LogisticRegression(C=1 / (images * decay), tol=1e-10, max_iter=10_000).fit(bank.astype(np.float64), labels)
    head: Any = trained.model.get_submodule("head")
    ours = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()

    def objective(weights: np.ndarray, bias: np.ndarray) -> float:
        logits = torch.from_numpy(bank.astype(np.float64) @ weights.T + bias)
        return float(F.cross_entropy(logits, torch.from_numpy(labels)) + decay / 2 * (weights**2).sum())

    assert objective(*ours) == pytest.approx(objective(theirs.coef_, theirs.intercept_), rel=1e-6)
    (val,) = (line for line in metrics(tmp_path / "run", "val") if line["epoch"] == 1000)
    assert val["acc1"] == pytest.approx(100 * theirs.score(features, truth), abs=1e-9)
    assert 60 < val["acc1"] < 100


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-knn", "-part", "train"), "the training images vote, so -knn needs other ones"),
        (("-knn", "-calibrate"), "-calibrate: does not go with -knn"),
        (("-pool", "mean"), "-pool mean: chooses the features that -knn compares"),
        (("-knn", "-pool", "patches"), "-pool"),
    ],
)
def test_refusals(say: Callable[..., Result], digits_run: Path, words: tuple[str, ...], error: str) -> None:
    done = say(digits_run, *words)
    assert done.code == 2
    assert error in done.err
