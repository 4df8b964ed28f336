"""evaluate.py -calibrate: the temperature of lowest NLL, kept for exactly its weights and applied by other tools."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import Result, Vitamp
from tools.common.report_page import evaluations
from tools.evaluate import command as evaluate
from tools.evaluate.calibrate import fit_temperature, measure
from utils.errors import UserError
from vitamp.metrics import TOP1

FILE = "calibration.json"
PREDICT = ("-part", "val", "-topk", "1", "-format", "csv")


def test_fit_finds_the_temperature_of_lowest_nll() -> None:
    generator = torch.Generator().manual_seed(5)
    justified = 2 * torch.randn(4000, 6, generator=generator)
    logits, labels = 3 * justified, torch.multinomial(justified.softmax(1), 1, generator=generator)[:, 0]
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(3, rel=0.05)
    losses = [float(F.cross_entropy(logits.double() / (found * factor), labels)) for factor in (0.999, 1, 1.001)]
    assert losses[1] == min(losses)
    before, after = (measure(logits, labels, torch.full((len(labels),), t, dtype=torch.float64)) for t in (1, 3))
    assert (after["nll"], after["ece"]) < (before["nll"], before["ece"])
    assert after["nll"] == pytest.approx(float(F.cross_entropy(logits.double() / 3, labels)))
    assert before["ece"] > 10 > 3 > after["ece"]


def test_fit_without_a_minimum_is_refused() -> None:
    labels = torch.arange(60) % 3
    logits = F.one_hot(labels, 3).float()
    with pytest.raises(UserError, match=r"in these images, all are classified correctly\. .* Name more images"):
        fit_temperature(logits, labels)
    with pytest.raises(UserError, match=r"on these images, no temperature .* as when they are classified at random"):
        fit_temperature(logits, labels.roll(1))


@pytest.fixture(scope="module")
def run(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run that has a temperature for its plain weights."""
    copy = Path(shutil.copytree(digits_run, tmp_path_factory.mktemp("calibrate") / "run"))
    assert evaluate.main([f"{copy}", "-calibrate", "-weights", "model"]) == 0
    return copy


def kept_in(run: Path) -> dict[str, Any]:
    (kept,) = json.loads((run / FILE).read_text())["temperatures"]
    return kept


def test_temperature_is_crossfitted_kept_and_applied(
    say: Callable[..., Result], vitamp: Vitamp, run: Path, tmp_path: Path
) -> None:
    out, kept = say(run, "-calibrate", "-weights", "model").out, kept_in(run)
    found = validation_predictions(load_trained(run, "model"), workers=0)
    logits, labels, temperature = found.logits.double(), found.labels, kept["temperature"]
    assert temperature == pytest.approx(fit_temperature(logits, labels))
    halves = (order := torch.randperm(360, generator=torch.Generator().manual_seed(0)))[::2], order[1::2]
    nll = [
        float(F.cross_entropy(logits[own] / fit_temperature(logits[other], labels[other]), labels[own]))
        for own, other in (halves, halves[::-1])
    ]
    assert kept["crossfitted"]["nll"] == pytest.approx(np.mean(nll))
    assert kept["before"]["nll"] == pytest.approx(float(F.cross_entropy(logits, labels)))
    assert kept["crossfitted"]["nll"] < kept["before"]["nll"]
    assert "by cross-fitting" in out
    assert f"{kept['crossfitted']['nll']:.4f}" in out

    told = {}
    for name, weights, *words in (("after", "model"), ("left_out", "model", "-no_calibration"), ("ema", "ema")):
        done = say(run, "-weights", weights, *words, "-json", tmp_path / f"{name}.json", code=0)
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["temperature"] == {weights: temperature if name == "after" else 1}
        told[name] = done.out, written["figures"][weights]
    assert f"calibrated (temperature {temperature:.4g}, fitted on 360 images)" in told["after"][0]
    numbers = "calibration error {ece:.2f} %, NLL {nll:.4f}.".format(**kept["crossfitted"])
    line = "The temperature was fitted on these images"
    assert f"{line}: cross-fitted, {numbers}" in told["after"][0], "those of the table are too low"
    others = say(run, "-weights", "model", "-part", "train", code=0)
    assert not any(line in text for text in (others.out, told["left_out"][0], told["ema"][0]))
    for word in ("--tta=flip", "--amp=off", "DATA.INTERPOLATION=bilinear"):
        assert f"{line}.\n" in say(run, "-weights", "model", word, code=0).out, "another predictor"
    assert "-no_calibration" in told["left_out"][0]
    assert "of other weights" in told["ema"][0], "another set of weights has no temperature"
    scaled = float(F.cross_entropy(logits / temperature, labels))
    assert told["after"][1]["nll"] == pytest.approx(scaled, rel=1e-6)
    assert told["left_out"][1]["nll"] == pytest.approx(kept["before"]["nll"], rel=1e-6)
    assert told["after"][1]["acc1"] == told["left_out"][1]["acc1"]
    averaged = validation_predictions(load_trained(run, "ema"), workers=0).logits
    assert told["ema"][1]["nll"] == pytest.approx(float(F.cross_entropy(averaged, labels)), rel=1e-6)

    page = evaluations.evaluate(load_trained(run, "model").chosen.file, "val", TOP1)
    assert isinstance(page, dict)
    fitted = f"; calibrated (temperature {temperature:.4g}, fitted on 360 images); if it was fitted on these"
    assert fitted in page["weights"]
    assert page["reliability"].ece == pytest.approx(told["after"][1]["ece"])

    guessed = vitamp(run, "-weights", "model", *PREDICT, script="scripts/predict.py")
    assert "calibrated (temperature" in guessed.err
    probabilities = [float(row["probability"]) for row in csv.DictReader(guessed.out.splitlines())]
    assert probabilities == pytest.approx((logits / temperature).softmax(1).max(1).values.tolist(), abs=2e-6)


@pytest.mark.parametrize(
    ("sharpness", "wanted"), [(1.3, "which may be chance"), (1.0, "the NLL does not fall."), (3.0, "Kept in ")]
)
def test_a_gain_that_may_be_chance_keeps_no_temperature(
    sharpness: float,
    wanted: str,
    say: Callable[..., Result],
    digits_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """60 images, whose labels are drawn by the softmax of logits that the model makes sharper."""
    copy = shutil.copytree(digits_run, tmp_path / "run")
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(60, 10, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    monkeypatch.setattr("tools.evaluate.calibrate.with_bar", lambda *_: [(sharpness * logits, labels)])
    monkeypatch.setattr("tools.common.evaluation.with_bar", lambda *_: [(sharpness * logits, labels)])
    monkeypatch.setattr("tools.evaluate.calibrate.LARGE_ECE", 5.0)
    advice = say(copy, "-weights", "model", code=0).out
    assert float(re.findall(r"calibration error +([0-9.]+)", advice)[0]) > 5
    assert ("-calibrate fits" in advice) is (sharpness > 1), "of a calibrated model it is chance"
    said = say(copy, "-calibrate", "-weights", "model", code=0).out
    assert wanted in said
    kept = json.loads((copy / FILE).read_text())["temperatures"]
    assert ("Not kept: temperature" in said, len(kept)) == ((False, 1) if sharpness == 3 else (True, 0))


def test_a_large_calibration_error_names_the_remedy(
    say: Callable[..., Result], digits_run: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "-calibrate fits a temperature, and keeps it if it surely helps."
    monkeypatch.setattr("tools.evaluate.calibrate.LARGE_ECE", 100.0)
    assert hint not in say(digits_run, code=0).out
    monkeypatch.setattr("tools.evaluate.calibrate.LARGE_ECE", 0.5)
    said = say(digits_run, code=0).out
    assert re.search(r"\nThe model is (over|under)confident: mean confidence [0-9.]+ %, top-1 [0-9.]+ %\.\n", said)
    assert re.search(rf"\nA calibration error beyond the [0-9.]+ % .* on 360 images: {hint}\n", said)
    assert hint not in say(run, "-weights", "model", "-no_calibration", code=0).out, "it has one"
    assert hint not in say(digits_run, "-part", "train", code=0).out, "-calibrate refuses training images"


def test_exports_are_calibrated(export_tool: Callable[..., str], run: Path, tmp_path: Path) -> None:
    import onnxruntime

    kept = kept_in(run)
    said = export_tool(run, "-weights", "model", "-to", "onnx,safetensors", "-out", tmp_path / "m")
    assert "calibrated (temperature" in said
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    about = json.loads(session.get_modelmeta().custom_metadata_map["calibration"])
    assert about == {"temperature": kept["temperature"], "images": 360, "applied": True}
    plain = load_trained(run, "model", device="cpu", amp="off")
    pixels = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    logits = session.run(["logits"], {"images": plain.inputs(pixels).numpy()})[0]
    assert logits == pytest.approx((plain.logits(pixels) / kept["temperature"]).numpy(), abs=1e-5)
    file = load_trained(tmp_path / "m.safetensors", amp="off", calibrated=True)
    assert file.temperature == kept["temperature"], "weights alone take the temperature along"
    assert file.chosen.meta["calibration"]["applied"] is False

    said = export_tool(run, "-weights", "model", "-no_calibration", "-to", "hub", "-output", tmp_path / "plain")
    assert "model(image[None]).softmax(1)" in (tmp_path / "plain" / "README.md").read_text()
    said = export_tool(run, "-weights", "model", "-to", "hub", "-output", tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert f"(model(image[None]) / {kept['temperature']:.6g}).softmax(1)" in card
    assert "fitted on 360 images" in card


def test_what_cannot_be_calibrated_is_refused(say: Callable[..., Result], run: Path, tmp_path: Path) -> None:
    before = (run / FILE).read_bytes()
    lone = Path(shutil.copytree(next((run / "checkpoints").glob("step-*")), tmp_path / "lone"))
    for model, words, wanted in (
        (run, ("-tta", "flip"), "-tta: does not go with -calibrate"),
        (run, ("-part", "train"), "the model was trained on these images"),
        (lone, (), "is not in a run's folder"),
    ):
        done = say(model, "-calibrate", *words, code=2)
        assert wanted in done.text
    assert (run / FILE).read_bytes() == before
