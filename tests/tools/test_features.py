"""predict.py -features: what the classifier sees, as npz."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import Result
from tools.predict import command as predict


@pytest.fixture
def say(in_process: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    return in_process(predict.main)


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Three images, of which the second is no image."""
    folder = tmp_path / "digits"
    folder.mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "0_broken.png").write_bytes(b"no image")
    return folder


def test_features_and_labels_of_a_split(say: Callable[..., Result], digits_run: Path, tmp_path: Path) -> None:
    """The classifier makes the logits of validation of the pooled features."""
    out = tmp_path / "val.npz"
    done = say(digits_run, "-part", "val", "-features", out, "-weights", "ema", "-amp", "off", "-batch_size", 7)
    assert done.code == 0, done.err
    assert done.out == ""
    assert "EMA weights" in done.err
    assert f"{out}: features of 360 images, 360 x 16 numbers (pooled)" in done.err
    found = np.load(out)
    assert sorted(found.files) == ["classes", "features", "labels", "paths"]
    assert found["features"].dtype == np.float32

    trained = load_trained(digits_run, "ema", amp="off")
    validated = validation_predictions(trained)
    head: torch.nn.Linear = trained.model.get_submodule("head")  # pyright: ignore[reportAssignmentType]
    logits = head(torch.from_numpy(found["features"])).detach()
    assert torch.allclose(logits, validated.logits, atol=1e-5)
    assert found["labels"].tolist() == validated.labels.tolist()
    assert found["paths"].tolist() == [validated.name(row) for row in range(360)]
    assert found["classes"].tolist() == trained.names()


def test_tokens_without_a_broken_image(
    say: Callable[..., Result], digits_run: Path, digits: Path, tmp_path: Path
) -> None:
    arrays = {}
    for pool in ("class", "mean", "patches", "pooled"):
        out = tmp_path / f"{pool}.npz"
        done = say(digits_run, digits, "-features", out, "-pool", pool, "-amp", "off", "-num_workers", 0)
        assert done.code == 1, done.err
        assert "0_broken.png cannot be read" in done.err
        found = np.load(out)
        assert sorted(found.files) == ["features", "paths"]
        assert found["paths"].tolist() == [str(digits / "0.png"), str(digits / "1.png")]
        arrays[pool] = found["features"]
    assert {pool: array.shape for pool, array in arrays.items()} == {
        "class": (2, 16),
        "mean": (2, 16),
        "patches": (2, 4, 16),
        "pooled": (2, 16),
    }
    assert np.allclose(arrays["patches"].mean(1), arrays["mean"], atol=1e-6)
    assert np.allclose(arrays["pooled"], arrays["class"], atol=1e-6)  # this model's classifier sees it


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-features", "f.txt"), "name a file that ends in .npz, such as f.npz"),
        (("-features", "f.npz", "-topk", 2), "-topk: does not go with -features"),
        (("-pool", "mean"), "-pool mean: chooses the features that -features FILE writes"),
    ],
)
def test_refusals(
    say: Callable[..., Result],
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = say(digits_run, "-part", "val", *words)
    assert done.code == 2
    assert error in done.err
    assert list(tmp_path.iterdir()) == []


def test_no_readable_image_leaves_no_file(
    say: Callable[..., Result], digits_run: Path, digits: Path, tmp_path: Path
) -> None:
    done = say(digits_run, digits / "0_broken.png", "-features", tmp_path / "f.npz")
    assert done.code == 1
    assert "None of the images can be read" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_features_of_a_model_that_learned_without_labels(
    say: Callable[..., Result], unlabelled_run: Path, tmp_path: Path
) -> None:
    """All patches are seen, and images without labels get none."""
    out = tmp_path / "f.npz"
    done = say(unlabelled_run, "-part", "all", "-features", out, "-pool", "patches")
    assert done.code == 0, done.err
    found = np.load(out)
    assert sorted(found.files) == ["features", "paths"]
    assert found["features"].shape == (12, 4, 16)
    done = say(unlabelled_run, found["paths"][0])
    assert done.code == 2
    assert "learned without labels" in done.err
