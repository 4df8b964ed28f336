"""-tta in evaluate.py and predict.py: which views are averaged, and how."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from datasets.transforms.pixels import Pixels
from engine.saved.predictions import name_of, split_of_run
from engine.saved.trained import load_trained
from engine.saved.views import Views
from tests.program import Result, run_program
from tools.evaluate import command as evaluate
from tools.predict import command as predict
from utils.config.data import DataConfig

Say = Callable[..., Result]
MODEL = ("MODEL.NAME=tiny", "MODEL.NUM_CLASSES=4", "MODEL.PATCH_SIZE=7", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1")
REST = ("MODEL.NUM_HEADS=2", "DATA.IMAGE_SIZE=28", "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0")
QUICK = ("-batch_size", 8, "-num_workers", 0, "-device", "cpu", "-amp", "off")


@pytest.fixture
def say(in_process: Callable[..., Say]) -> Say:
    return in_process(evaluate.main)


@pytest.fixture
def guess(in_process: Callable[..., Say]) -> Say:
    return in_process(predict.main)


@pytest.fixture(scope="module")
def run(imagenet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("views")
    data = ("-dataset", "imagenet2012", "-data_path", imagenet)
    done = run_program(*data, *MODEL, *REST, *QUICK, "-output", place / "run", streams=place)
    assert done.code == 0, done.text
    return place / "run"


@pytest.mark.parametrize("size", [(70, 41), (41, 70), (33, 33), (300, 40)])
@pytest.mark.parametrize(
    ("mode", "crop", "side"),
    [("center", 0.875, 32), ("squash", 0.875, 32), ("border", 0.875, 32), ("center", 0.9, 31), ("squash", 0.9, 31)],
)
def test_centre_is_what_validation_sees(size: tuple[int, int], mode: str, crop: float, side: int) -> None:
    """And the corners are cut from the same pixels. The centre of 31 pixels is rounded as in validation."""
    data = DataConfig.model_validate({"IMAGE_SIZE": 28, "CROP_PCT": crop, "CROP_MODE": mode})
    stored = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(1)).byte().numpy()
    views = Views.asked("flip,crops", data, "a model")
    middle, square = (torch.empty(3, pixels, pixels, dtype=torch.uint8) for pixels in (28, side))
    Pixels(data, train=False)(stored, middle)
    Pixels(views.data(data), train=False)(stored, square)
    found = list(views.of(square[None]))
    assert (found[0][0].int() - middle.int()).abs().max() <= 1
    corners = [square[:, :28, :28], square[:, :28, -28:], square[:, -28:, :28], square[:, -28:, -28:]]
    for place, corner in enumerate(corners):
        assert torch.equal(found[2 * place + 2][0], corner)
        assert torch.equal(found[2 * place + 3][0], corner.flip(-1))
    assert len(found) == 10


def test_probabilities_of_crops_are_averaged(say: Say, guess: Say, run: Path, tmp_path: Path) -> None:
    """Against the model itself, called by hand, with one model and with the same one twice."""
    trained = load_trained(run, amp="off")
    trained.look("crops,flip")
    dataset = split_of_run(trained)
    batch = dataset.__getitems__([(0, index) for index in range(len(dataset))])
    assert batch.images.shape[-1] == 32
    with torch.no_grad():
        outputs = [trained.model(trained.inputs(view.contiguous())) for view in trained.views.of(batch.images)]
    wanted = torch.stack([logits.double().softmax(1) for logits in outputs]).mean(0)
    trained.temperature = 0.02  # so sure that the mean of logits would be another
    sharp = torch.stack([(logits.double() / 0.02).softmax(1) for logits in outputs]).mean(0)
    torch.testing.assert_close(trained.logits(batch.images).double().softmax(1), sharp, rtol=1e-3, atol=1e-4)
    nll = float(-wanted[range(8), batch.labels].log().mean())
    done = say(run, "-tta", "crops,flip", "-json", tmp_path / "e.json", "DATA.NUM_WORKERS=0")
    assert done.code == 0, done.err
    words = "mean of the probabilities of 10 views of each image: 28 x 28 pixels in the centre and the four corners"
    assert f"-tta flip,crops: {words} of 32 x 32 and their mirror images." in done.out
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["tta"] == "flip,crops"
    assert found["figures"][trained.chosen.which.name]["nll"] == pytest.approx(nll, rel=1e-5)
    plain = say(run, "-json", tmp_path / "plain.json", "DATA.NUM_WORKERS=0")
    assert plain.code == 0
    other = json.loads((tmp_path / "plain.json").read_text())["figures"][trained.chosen.which.name]["nll"]
    assert other != pytest.approx(nll, rel=1e-5), "the views matter"
    files = [name_of(dataset, index) for index in range(8)]
    for models in ((run,), (run, run)):
        guessed = guess(*models, *files, "-tta", "flip,crops", "-topk", 4, "-format", "csv", "-num_workers", 0)
        assert guessed.code == 0, guessed.err
        assert words in guessed.err
        rows = list(csv.DictReader(guessed.out.splitlines()))
        for row in rows:
            share = float(wanted[files.index(row["image"]), int(row["label"])])
            assert float(row["probability"]) == pytest.approx(share, abs=1e-5)
        assert len(rows) == 32


def test_nothing_to_crop_is_refused(say: Say, guess: Say, run: Path, digits_run: Path) -> None:
    done = say(run, "-tta", "crops", "DATA.CROP_PCT=1.0")
    assert done.code == 2
    assert "DATA.CROP_PCT is 1 for" in done.err
    assert "-tta flip works" in done.err
    done = guess(digits_run, "-part", "val", "-tta", "crops")
    assert done.code == 2
    assert "sees the whole image, resized to a square, so there is nothing to crop" in done.err
    done = say(run, "-tta", "crops,crops")
    assert done.code == 2
    assert "takes flip, crops or flip,crops" in done.err
