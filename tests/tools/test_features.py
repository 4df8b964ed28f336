"""predict.py -features: what the classifier sees, as npz and parquet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from engine.saved.features import features_of
from engine.saved.predictions import split_of_run, validation_predictions
from engine.saved.trained import load_trained
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


def test_tokens_in_parquet_without_a_broken_image(
    say: Callable[..., Result], digits_run: Path, digits: Path, tmp_path: Path
) -> None:
    tables = {}
    for pool in ("class", "mean", "patches"):
        out = tmp_path / f"{pool}.parquet"
        done = say(digits_run, digits, "-features", out, "-pool", pool, "-amp", "off", "-num_workers", 0)
        assert done.code == 1, done.err
        assert "0_broken.png cannot be read" in done.err
        tables[pool] = pq.read_table(out)
        assert tables[pool].column_names == ["path", "features"]
        assert tables[pool]["path"].to_pylist() == [str(digits / "0.png"), str(digits / "1.png")]
    arrays = {pool: np.array(table["features"].to_pylist(), dtype=np.float32) for pool, table in tables.items()}
    assert {pool: array.shape for pool, array in arrays.items()} == {
        "class": (2, 16),
        "mean": (2, 16),
        "patches": (2, 4, 16),
    }
    assert np.allclose(arrays["patches"].mean(1), arrays["mean"], atol=1e-6)
    out = tmp_path / "pooled.npz"
    assert say(digits_run, digits / "0.png", "-features", out, "-amp", "off").code == 0
    assert np.allclose(np.load(out)["features"][0], arrays["class"][0], atol=1e-6)  # this model's classifier sees it


def test_parquet_has_labels_and_row_groups(
    say: Callable[..., Result], digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.predict.features.ROW_GROUP", 100 * 16 * 4)
    out = tmp_path / "train.parquet"
    assert say(digits_run, "-part", "train", "-features", out).code == 0
    file = pq.ParquetFile(out)
    assert file.num_row_groups == 15
    table = file.read().to_pydict()
    trained = load_trained(digits_run)
    labels = split_of_run(trained, "train").sample_labels()
    batch = split_of_run(trained, "train").__getitems__([(0, 3)])
    assert labels is None or table["label"] == labels.tolist()
    assert (table["label"][3], table["class"][3]) == (int(batch.labels[0]), trained.name_of(int(batch.labels[0])))
    assert np.allclose(table["features"][3], features_of(trained, batch.images, "pooled")[0], atol=2e-2)  # bf16


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("-features", "f.txt"), "name a file that ends in .npz or .parquet, such as f.npz"),
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


def test_missing_pyarrow_is_an_error(
    say: Callable[..., Result], digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.shards.parquet.importlib.util.find_spec", lambda _: None)
    done = say(digits_run, "-part", "val", "-features", tmp_path / "f.parquet")
    assert done.code == 2
    assert "writing parquet files needs pyarrow, which is not installed. Run: pip install pyarrow" in done.err


def test_no_readable_image_leaves_no_file(
    say: Callable[..., Result], digits_run: Path, digits: Path, tmp_path: Path
) -> None:
    for name in ("f.npz", "f.parquet"):
        done = say(digits_run, digits / "0_broken.png", "-features", tmp_path / name)
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
