"""Several models in evaluate.py and predict.py: the mean of their probabilities, and not of their weights."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import Result, change_meta
from tools.checkpoint import command as checkpoint
from tools.evaluate import command as evaluate
from tools.predict import command as predict

Say = Callable[..., Result]


@pytest.fixture(scope="module")
def models(digits_run: Path) -> list[Path]:
    return sorted((digits_run / "checkpoints").glob("step-*"))


def test_mean_of_models_is_evaluated_and_predicted(
    in_process: Callable[..., Say], models: list[Path], tmp_path: Path
) -> None:
    each = [validation_predictions(load_trained(path, "model", amp="off"), workers=0) for path in models]
    first, mean = each[0], torch.stack([one.logits.double().softmax(1) for one in each]).mean(0)
    words = ("-weights", "model", "-amp", "off")
    done = in_process(evaluate.main)(*models, *words, "-json", tmp_path / "mean.json")
    assert done.code == 0, done.text
    assert "Mean of the probabilities of these 2 models, in fp32" in done.out
    found = json.loads((tmp_path / "mean.json").read_text())
    assert found["source"] == [str(path) for path in models]
    right, figures = (mean.argmax(1) == first.labels).double(), found["figures"]["mean"]
    assert figures["acc1"] == pytest.approx(100 * float(right.mean()))
    assert figures["nll"] == pytest.approx(float(F.nll_loss(mean.log(), first.labels)), rel=1e-5)

    done = in_process(predict.main)(*models, "-part", "val", *words, "-topk", 1, "-format", "csv")
    assert done.code == 0, done.text
    assert "mean of the probabilities of these 2 models" in done.err
    rows = list(csv.DictReader(done.out.splitlines()))
    assert [float(row["probability"]) for row in rows] == pytest.approx(mean.max(1).values.tolist(), abs=2e-6)


def test_models_that_do_not_go_together_are_refused(
    in_process: Callable[..., Say], models: list[Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(models[1], tmp_path / "other"))
    change_meta(other, classes=["ten", *map(str, range(1, 10))])
    for tool, words in ((evaluate, ()), (predict, ("-part", "val"))):
        done = in_process(tool.main)(models[0], other, *words)
        assert done.code == 2
        assert "their classes differ, so their probabilities cannot be averaged" in done.err
    for tool, words in ((evaluate, ("-calibrate",)), (evaluate, ("-knn",)), (predict, ("x.png", "-features", "f.npz"))):
        done = in_process(tool.main)(*models, *words)
        assert done.code == 2
        assert "takes one model, but 2 are given" in done.err


def test_images_that_one_of_the_models_was_trained_on_are_warned_of(
    in_process: Callable[..., Say], models: list[Path], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(models[1], tmp_path / "other"))
    samples = json.loads((other / "meta.json").read_text())["samples"]
    change_meta(other, samples={**samples, "data": "another"})
    assert "The models were not all trained on the same images" in in_process(evaluate.main)(models[0], other).text
    assert "not all trained on the same" not in in_process(evaluate.main)(*models).text


def test_mean_of_weights_of_runs_with_nothing_in_common_is_warned_of(
    in_process: Callable[..., Say], digits_run: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(digits_run, tmp_path / "other")
    for number, (paths, warned) in enumerate((((digits_run, other), True), ((digits_run, "-last", 2), False))):
        done = in_process(checkpoint.main)("average", *paths, "-out", tmp_path / f"{number}.safetensors")
        assert done.code == 0, done.text
        assert ("did not begin with the same pretrained weights" in done.text) is warned
