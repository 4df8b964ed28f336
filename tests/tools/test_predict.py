"""scripts/predict.py predicts images as validation does; -features writes what the classifier sees, as npz."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.inputs.batches import Inputs
from engine.setup import tuned_model
from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import ROOT, Result, change_meta, made_meta, metrics, save_image
from tests.saved import save_checkpoint
from tools.common.weights import strip
from tools.predict import command as predict
from tools.predict.images import ClassChooser
from utils.config import load_config
from utils.config.keys import values_to_keep
from vitamp.checkpoints import MODEL
from vitamp.metrics import AVERAGE, PLAIN

Row = dict[str, Any]
Say = Callable[..., Result]


@pytest.fixture(scope="module")
def digits(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The validation images of the run, as files called NUMBER_LABEL.png."""
    folder = tmp_path_factory.mktemp("digits")
    found = validation_predictions(load_trained(digits_run))
    for row, label in enumerate(found.labels.tolist()):
        found.picture(row).save(folder / f"{row:03d}_{label}.png")
    return folder


@pytest.fixture
def say(in_process: Callable[[Any], Say]) -> Say:
    return in_process(predict.main)


def lines_of(text: str) -> list[Row]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("weights", "prefix"), [("model", ""), ("ema", "ema_"), ("auto", "")])
def test_predictions_have_the_accuracy_of_validation(
    say: Say, digits_run: Path, digits: Path, tmp_path: Path, weights: str, prefix: str
) -> None:
    done = say(digits_run, digits, "-weights", weights, "-topk", 1, "-out", tmp_path / "found.csv")
    assert (done.code, done.out, done.err.count("\n")) == (0, "", 1)
    assert f"step-000000088 (the run's best), {(AVERAGE if prefix else PLAIN).label} weights" in done.err
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [str(path) for path in sorted(digits.iterdir())]
    right = sum(row["class"] == Path(row["image"]).stem[-1] for row in rows)
    assert 100 * right / len(rows) == metrics(digits_run, "val")[-1][f"{prefix}acc1"]


@pytest.mark.parametrize("settings", [{}, {"DATA.EXIF_ROTATE": "true", "DATA.CROP_PCT": "1.0"}, {"DATA.CROP": "none"}])
def test_photographs_are_prepared_as_in_validation(say: Say, tmp_path: Path, settings: dict[str, str]) -> None:
    """Bit for bit, with every setting that affects the preparation."""
    val = tmp_path / "data" / "val"
    for number in range(6):
        path = val / "ab"[number % 2] / f"{number}.JPEG"
        save_image(path, seed=number, size=(40 + 7 * number, 36))
        exif = Image.Exif()
        exif[0x0112] = 1 + number  # orientation
        Image.open(path).save(path, exif=exif, quality=95)
    checkpoint = untrained(tmp_path, {"DATA.DATASET": "imagefolder", "DATA.DATA_PATH": f"{val.parent}", **settings})
    validated = validation_predictions(load_trained(checkpoint), workers=0)
    done = say(checkpoint, val, "-format", "jsonl", "-topk", 2, code=0)
    rows = lines_of(done.out)
    assert [row["image"] for row in rows] == [validated.name(row) for row in range(6)]
    for row, shares, best in zip(rows, validated.logits.softmax(-1), validated.guesses(2).tolist(), strict=True):
        assert [guess["label"] for guess in row["guesses"]] == best
        assert [guess["probability"] for guess in row["guesses"]] == [round(float(shares[n]), 6) for n in best]


def untrained(place: Path, settings: dict[str, str], classes: tuple[str, ...] = ("a", "b")) -> Path:
    """Checkpoint of a randomly initialised model."""
    sizes = {"DATA.IMAGE_SIZE": "16", "MODEL.NUM_CLASSES": f"{len(classes)}", "THREADS": "1", "DEVICE": "cpu"}
    vit = {"MODEL.NAME": "vit", "MODEL.PATCH_SIZE": "8", "MODEL.EMBED_DIM": "16", "MODEL.DEPTH": "1"}
    config = load_config(None, {}, {**sizes, **vit, "MODEL.NUM_HEADS": "2", **settings}).config
    model = tuned_model(config, torch.device("cpu")).model
    with torch.no_grad():  # timm's initial classifier gives nearly equal probabilities
        model.get_parameter("head.weight").normal_()
    meta = made_meta(1, settings=values_to_keep(config), classes=list(classes))
    return save_checkpoint(place / "checkpoints", 1, {MODEL: model.state_dict()}, {"fp32_modules": []}, meta)


def test_images_from_files_folders_globs_and_lists(
    say: Say, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("b.png", "deep/er/z.PNG", "deep/a.png", ".hidden.png", "deep/notes.txt", "odd[1].png", "line\nfeed.png")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(path, format="PNG")

    def found(*words: object, given: bytes = b"") -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        done = say(digits_run, *words, "-format=json", "-num_workers=0", code=0)
        return [os.path.relpath(row["image"], tmp_path) for row in json.loads(done.out)]

    monkeypatch.chdir(tmp_path)
    assert found(".") == ["b.png", "line\nfeed.png", "odd[1].png", "deep/a.png", "deep/er/z.PNG"]
    assert found("deep", "b.png", "deep/../b.png") == ["deep/a.png", "deep/er/z.PNG", "b.png", "b.png"]
    assert found("*.png") == ["b.png", "line\nfeed.png", "odd[1].png"]
    assert found("**/*.png") == ["b.png", "deep/a.png", "line\nfeed.png", "odd[1].png"]
    assert found("odd[1].png", "deep/notes.txt") == ["odd[1].png", "deep/notes.txt"], "a named file is tried"
    assert found("-", "b.png", given=b"deep/a.png\r\n\nodd[1].png\n") == ["deep/a.png", "odd[1].png", "b.png"]
    assert found("-", given=b"line\nfeed.png\0b.png\0") == ["line\nfeed.png", "b.png"]
    (tmp_path / "deep" / "round").symlink_to(tmp_path)
    assert found("deep") == ["deep/a.png", "deep/er/z.PNG", *(f"deep/round/{name}" for name in found("*.png"))]
    (tmp_path / "b.txt").touch()
    told = say(digits_run, ".", "deep/er", "deep", "-num_workers=0").err
    assert told.count("skipped") == 1, "one line of all folders"
    assert "., deep/er, ...: skipped .txt 4 (b.txt, notes.txt, ...)" in told


def test_images_without_a_result_are_named_and_the_rest_predicted(
    say: Say, digits_run: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = sorted(digits.iterdir())[:3]
    bad, gone, white = (tmp_path / f"{name}.png" for name in ("bad", "gone", "white"))
    bad.write_text("no image")
    Image.new("L", (8, 8), 255).save(white)
    nan = "the model computes NaN or infinity; try -amp off"
    errors = {bad: "not an image in a known format", gone: "it does not exist", white: nan}
    whole = Inputs.forward  # here white images become NaN
    monkeypatch.setattr(Inputs, "forward", lambda *of: whole(*of) + 0 / (of[1].amin((1, 2, 3), True) < 255))
    for workers in (0, 2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{good[1]}\n{gone}".encode())))
        words = ("-format", "jsonl", "-batch_size", 2, "-num_workers", workers)
        done = say(digits_run, good[0], bad, "-", good[2], white, *words, code=1)
        rows = lines_of(done.out)
        expected = [(f"{path}", errors.get(path)) for path in (good[0], bad, good[1], gone, good[2], white)]
        assert [(row["image"], row.get("error")) for row in rows] == expected
        assert f"warning: {bad} cannot be predicted: not an image in a known format" in done.err
        assert f"{gone} cannot be predicted: it does not exist" in done.err
        assert f"3 of 6 images could not be predicted: {bad}, {gone}, {white}." in done.err
        alone = say(digits_run, *good, *words)
        assert lines_of(alone.out) == [rows[0], rows[2], rows[4]]
        say(digits_run, good[0], gone, white, "-features", tmp_path / f"{workers}.npz", code=1)
        assert np.load(tmp_path / f"{workers}.npz")["paths"].tolist() == [f"{good[0]}"]
    logits = torch.tensor([[torch.inf, 0], [-torch.inf, -torch.inf], [-torch.inf, 0]])
    assert [one is None for one in ClassChooser(load_trained(digits_run), 1, None)(logits)] == [True, True, False]


def test_table_has_a_line_per_image(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"DATA.DATASET": "stripes", "USE": "stripes.py"}
    checkpoint = untrained(tmp_path / "run", data, ("ant", "\x1b[31mred", "a long name"))
    change_meta(checkpoint, own_code=[{"file": "stripes.py", "sha256": "", "registers": {"stripes": "dataset"}}])
    strip(checkpoint, tmp_path / "w.safetensors", "model")  # without the code of its data set
    monkeypatch.chdir(tmp_path)
    for name in ("x.png", "short.png"):
        save_image(tmp_path / name, seed=1)
    done = say("w.safetensors", "x.png", "short.png", "-topk", 9, code=0)
    head, *rows = done.out.splitlines()
    assert head.split() == ["image", "1", "2", "3"]
    assert [row.split()[0] for row in rows] == ["x.png", "short.png"]
    assert all(row.count("%") == 3 and "\\x1b[31mred" in row for row in rows)
    assert len({row.index(" %") for row in rows}) == 1
    assert "One of your own needs its file: -use FILE" in say("w.safetensors", "-part", "val", code=2).err


def test_odd_names_survive_csv_and_json(say: Say, tmp_path: Path) -> None:
    classes = ('comma, "quote"', "line\nfeed")
    checkpoint = untrained(tmp_path, {"DATA.DATASET": "imagefolder"}, classes)
    odd = os.fsencode(tmp_path) + b"/latin-\xe9, x.png"
    save_image(tmp_path / "plain.png", seed=1)
    os.rename(tmp_path / "plain.png", odd)
    assert say(checkpoint, os.fsdecode(odd), "-out", tmp_path / "o.csv").code == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "o.csv").read_bytes().decode("utf-8", "surrogateescape"))))
    assert {row["class"] for row in rows} == set(classes)
    assert {os.fsencode(row["image"]) for row in rows} == {odd}
    assert sum(float(row["probability"]) for row in rows) == pytest.approx(1, abs=1e-5)
    for kind in ("json", "jsonl"):
        assert say(checkpoint, os.fsdecode(odd), "-out", tmp_path / f"o.{kind}").code == 0
        found = json.loads((tmp_path / f"o.{kind}").read_bytes().decode("utf-8"))
        row = found[0] if kind == "json" else found
        assert os.fsencode(row["image"]) == odd
        assert {guess["class"] for guess in row["guesses"]} == set(classes)


def test_bad_command_lines_are_refused(
    say: Say, digits_run: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    image = next(digits.iterdir())
    gone = {"DATA.DATASET": "imagefolder", "DATA.DATA_PATH": "/gone", "DIST.STRATEGY": "fsdp", "DIST.HSDP": "true"}
    moved = untrained(tmp_path / "moved", gone)
    for words, said in (
        ((), "-h lists all arguments"),
        ((digits_run,), "IMAGE"),
        ((image, digits_run), "or a file written by `python scripts/checkpoint.py"),
        ((tmp_path / "none", image), "no such run, checkpoint or file"),
        ((digits_run, tmp_path / "none.png"), "none.png: no such file or folder"),
        ((digits_run, tmp_path / "*.jpg"), "*.jpg: no file matches"),
        ((digits_run, tmp_path / "empty"), f"{tmp_path / 'empty'}: no images found"),
        ((digits_run, "-"), "standard input names no images"),
        ((digits_run, image, "-amp=fp7"), "fp7"),
        ((digits_run, image, "-cfg", "x.yaml"), "-cfg"),
        ((digits_run, image, "-features", "x.txt"), "name a file that ends in .npz, such as x.npz"),
        ((digits_run, image, "-features", tmp_path / "x.npz", "-topk", 2), "-topk: does not go with -features"),
        ((digits_run, image, "-features", tmp_path / "x.npz", "-explain", "x"), "-explain: does not go with -features"),
        ((digits_run, image, "-explain", digits), "is not empty; name another folder, or give -overwrite"),
        ((digits_run, "-serve", "-explain", tmp_path / "x"), "-serve: does not go with -explain"),
        ((moved, "-part", "val"), "/gone does not exist. predict.py cannot change where the run's data is: name the"),
        ((moved, image, "-device", "mps"), "this machine has no mps device"),
        ((digits_run, image, "-pool", "mean"), "-pool mean: chooses the features that -features FILE writes"),
    ):
        done = say(*words, code=2)
        assert said in done.err, (words, done.err)
        assert not done.out
    assert not list(tmp_path.glob("*x*")), "no file is left"


@pytest.mark.slow
def test_closed_pipe_ends_quietly(digits_run: Path, digits: Path) -> None:
    tool = f'"{sys.executable}" scripts/predict.py "{digits_run}" "{digits}" -topk 10 -format csv'
    line = f"{tool} | head -3; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert len(done.stdout.splitlines()) == 4
    assert done.stdout.endswith("\n0\n")
    assert done.stderr.count("\n") == 1, "only the line about the weights"


# -features


def test_features_and_labels_of_a_split(say: Say, digits_run: Path, tmp_path: Path) -> None:
    """The classifier makes the logits of validation of the pooled features."""
    out = tmp_path / "val.npz"
    done = say(digits_run, "-part", "val", "-features", out, "-weights", "ema", "-amp", "off", "-batch_size", 7, code=0)
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


def test_tokens_without_a_broken_image(say: Say, digits_run: Path, digits: Path, tmp_path: Path) -> None:
    arrays, images = {}, sorted(digits.iterdir())[:2]
    (tmp_path / "broken.png").write_bytes(b"no image")
    for pool in ("class", "mean", "patches", "pooled"):
        out = tmp_path / f"{pool}.npz"
        done = say(digits_run, tmp_path / "broken.png", *images, "-features", out, "-pool", pool, "-amp", "off", code=1)
        assert "broken.png cannot be predicted" in done.err
        found = np.load(out)
        assert sorted(found.files) == ["features", "paths"]
        assert found["paths"].tolist() == [str(path) for path in images]
        arrays[pool] = found["features"]
    shapes = [array.shape for array in arrays.values()]
    assert shapes == [(2, 16), (2, 16), (2, 4, 16), (2, 16)]
    assert np.allclose(arrays["patches"].mean(1), arrays["mean"], atol=1e-6)
    assert np.allclose(arrays["pooled"], arrays["class"], atol=1e-6)  # this model's classifier sees it
    done = say(digits_run, tmp_path / "broken.png", "-features", tmp_path / "f.npz", code=1)
    assert "No image has features" in done.err
    assert not (tmp_path / "f.npz").exists()


def test_features_of_a_model_that_learned_without_labels(say: Say, unlabelled_run: Path, tmp_path: Path) -> None:
    """All patches are seen, and images without labels get none."""
    done = say(unlabelled_run, "-part", "all", "-explain", tmp_path / "maps", code=2)
    assert "learned without labels and has no classes yet" in done.err
    out = tmp_path / "f.npz"
    say(unlabelled_run, "-part", "all", "-features", out, "-pool", "patches", code=0)
    found = np.load(out)
    assert sorted(found.files) == ["features", "paths"]
    assert found["features"].shape == (12, 4, 16)
