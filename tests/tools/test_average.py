"""Several models in evaluate.py and predict.py: the mean of their probabilities."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.task.one import OneLabel
from engine.task.several import SeveralLabels
from engine.trained.model import load_trained
from tests.predicted import Predictions, validation_predictions
from tests.program import Result, write_meta
from tools.evaluate import command as evaluate
from tools.predict import command as predict

Say = Callable[..., Result]


@pytest.fixture
def say(in_process: Callable[..., Say]) -> Say:
    return in_process(evaluate.main)


@pytest.fixture
def guess(in_process: Callable[..., Say]) -> Say:
    return in_process(predict.main)


@pytest.fixture(scope="module")
def models(digits_run: Path) -> list[Path]:
    """Both checkpoints of the run."""
    return sorted((digits_run / "checkpoints").glob("step-*"))


def test_logits_of_the_mean_have_its_probabilities() -> None:
    generator = torch.Generator().manual_seed(2)
    outputs = [20 * torch.randn(5, 4, generator=generator) for _ in range(3)]
    for task, activation in ((OneLabel(4), lambda logits: logits.softmax(-1)), (SeveralLabels(4), torch.sigmoid)):
        found = activation(task.averaged(outputs))
        torch.testing.assert_close(found, torch.stack([activation(logits) for logits in outputs]).mean(0))
    far = [torch.tensor([[-300.0, 300.0]])] * 2
    torch.testing.assert_close(SeveralLabels(2).averaged(far), far[0], msg="far from rounding to 0 and 1")


def by_hand(models: list[Path]) -> tuple[Predictions, torch.Tensor]:
    each = [validation_predictions(load_trained(path, "model", amp="off"), workers=0) for path in models]
    return each[0], torch.stack([one.logits.double().softmax(1) for one in each]).mean(0)


def test_mean_of_models_is_evaluated_and_predicted(say: Say, guess: Say, models: list[Path], tmp_path: Path) -> None:
    words = ("-weights", "model", "-amp", "off")
    done = say(*models, *words, "-json", tmp_path / "mean.json")
    assert done.code == 0, done.text
    assert "; always guessing the largest class: 10.3 % top-1" in done.out
    first, mean = by_hand(models)
    told = json.loads((tmp_path / "mean.json").read_text())["figures"]
    assert list(told) == [*(path.name for path in models), "mean"]
    assert told["mean"]["acc1"] == pytest.approx(100 * float((mean.argmax(1) == first.labels).double().mean()))
    assert told["mean"]["nll"] == pytest.approx(float(F.nll_loss(mean.log(), first.labels)), rel=1e-5)
    alone = float(F.cross_entropy(first.logits, first.labels))
    assert told[models[0].name]["nll"] == pytest.approx(alone, rel=1e-5)
    assert f"{told['mean']['acc1']:.2f} %" in done.out

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for row in range(4):
        first.picture(row).save(pictures / f"{row}.png")
    (pictures / "4.png").write_text("no image")
    done = guess(*models, pictures, *words, "-topk", 1, "-format", "csv")
    assert done.code == 1
    assert "4.png cannot be read" in done.err
    assert "the mean of the probabilities of 2 models" in done.err
    rows = list(csv.DictReader(done.out.splitlines()))
    assert [int(row["label"]) for row in rows] == mean[:4].argmax(1).tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(mean[:4].max(1).values.tolist(), abs=2e-6)


def test_models_that_do_not_go_together_are_refused(say: Say, guess: Say, models: list[Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(models[1], tmp_path / "other"))
    meta = json.loads((other / "meta.json").read_text())
    write_meta(other / "meta.json", meta | {"classes": ["ten", *meta["classes"][1:]]})
    for done in (say(models[0], other), guess(models[0], other, "-part", "val")):
        assert done.code == 2
        assert "class 0 is 'ten' and '0'" in done.err
    for words in (("-calibrate",), ("-weights", "both")):
        done = say(*models, *words)
        assert done.code == 2
        assert "takes one model, but 2 are given" in done.err
