"""evaluate.py -calibrate: the temperature of lowest NLL, kept for exactly its weights and applied by other tools."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import Result, Vitamp
from tools.common.calibration_error import Chance, calibration
from tools.common.report_page import evaluations
from tools.evaluate import command as evaluate
from tools.evaluate.calibrate import FEWEST, _propose_calibration, fit_temperature, random_halves
from utils.errors import UserError
from utils.statistics.differences import student_interval, student_interval_of_images
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
    guess, errors = logits.argmax(1), []
    for one in (logits, logits / found):
        confidence = one.double().softmax(1).max(1).values
        errors.append(calibration(confidence, guess == labels)[0])
        expected = Chance.of(confidence, guess == labels)
        assert (errors[-1] > expected.percentile_95) is (one is logits)
        beyond = "may be chance: " if errors[1:] else "is more than chance explains: "
        assert beyond in expected.words(errors[-1])
    assert errors[0] > 10 > 3 > errors[1]


def test_chance_covers_the_errors_of_calibrated_models() -> None:
    """Labels are drawn by the probabilities themselves; 95 of 100 errors are below the percentile."""
    generator = torch.Generator().manual_seed(3)
    below, means = [], []
    for _ in range(150):
        probabilities = (2 * torch.randn(150, 2, generator=generator)).double().softmax(1)
        labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        confidence, guess = probabilities.max(1)
        right = guess == labels
        error, expected = calibration(confidence, right)[0], Chance.of(confidence, right)
        below.append(error <= expected.percentile_95)
        means.append(error - expected.mean)
    assert 0.9 < np.mean(below) < 0.99
    assert np.mean(means) == pytest.approx(0, abs=0.3)


def test_chance_counts_the_groups_of_images() -> None:
    """Five pictures of each thing, all right or all wrong, are as many draws as there are things."""
    generator = torch.Generator().manual_seed(4)
    confidence = torch.rand(80, generator=generator).double().repeat_interleave(5)
    right = torch.rand(80, generator=generator).repeat_interleave(5) < confidence
    things = [f"thing {number // 5}" for number in range(400)]
    single = Chance.of(confidence, right)
    assert Chance.of(confidence, right, [f"{number}" for number in range(400)]) == single
    assert Chance.of(confidence, right, things).mean == pytest.approx(5**0.5 * single.mean, rel=0.1)
    independent = torch.rand(400, generator=generator) < confidence
    assert Chance.of(confidence, independent, things).mean < 1.3 * single.mean


def test_fit_without_a_minimum_is_refused() -> None:
    labels = torch.arange(60) % 3
    logits = F.one_hot(labels, 3).float()
    with pytest.raises(UserError, match=r"in these images, all are classified correctly\. .* Name more images"):
        fit_temperature(logits, labels)
    with pytest.raises(UserError, match=r"on these images, no temperature .* as when they are classified at random"):
        fit_temperature(logits, labels.roll(1))


def test_halves_keep_groups_whole_and_the_interval_allows_for_them() -> None:
    groups = [f"{number // 20}" for number in range(200)]
    for given, whole in ((groups, True), ([], False)):
        halves = random_halves(200, given)
        assert sorted(halves[0] + halves[1]) == list(range(200))
        assert len(halves[0]) == len(halves[1]) == 100
        assert ({groups[each] for each in halves[0]}.isdisjoint(groups[each] for each in halves[1])) is whole
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    assert halves == (order[::2], order[1::2]), "as before, without groups"

    values = np.repeat(np.random.default_rng(0).normal(0.3, 1, 10), 20)
    alone, together = student_interval_of_images(values), student_interval_of_images(values, groups)
    assert alone.low == pytest.approx(student_interval(values.tolist(), 1).low)
    assert alone.seen
    assert together.low == pytest.approx(student_interval(values[::20].tolist(), 1).low, rel=0.05), (
        "ten groups of equal images"
    )


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
    columns = {line.split("  ")[1]: line.split()[-2:] for line in out.splitlines() if line.startswith("  ")}
    assert columns["NLL, cross-fitted"] == [f"{kept[which]['nll']:.4f}" for which in ("before", "crossfitted")]
    assert columns["NLL"] == [f"{kept[which]['nll']:.4f}" for which in ("before", "after")]

    told = {}
    for name, weights, *words in (("after", "model"), ("left_out", "model", "-no_calibration"), ("ema", "ema")):
        done = say(run, "-weights", weights, *words, "-json", tmp_path / f"{name}.json", code=0)
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["temperature"] == {weights: temperature if name == "after" else 1}
        told[name] = done.out, written["figures"][weights]
    assert f"calibrated (temperature {temperature:.4g}, fitted on 360 images)" in told["after"][0]
    line = "The temperature was fitted on these images"
    assert f"{line}, so calibration error and NLL are a little too low; cross-fitted, the NLL is " in told["after"][0]
    assert f" {kept['crossfitted']['nll']:.4f}.\n" in told["after"][0]
    shown = {name: re.findall(r"  calibration error +(.*?) %(?: +(.*) %)?\n", told[name][0])[0][0] for name in told}
    assert re.findall(r"  calibration error +(.*) % +(.*) %\n", out) == [(shown["left_out"], shown["after"])], (
        "one number"
    )
    others = say(run, "-weights", "model", "-part", "train", code=0)
    assert not any(line in text for text in (others.out, told["left_out"][0], told["ema"][0]))
    for word in ("--tta=flip", "--amp=off", "DATA.INTERPOLATION=bilinear"):
        assert f"{line}.\n" in say(run, "-weights", "model", word, code=0).out, "another predictor"
    assert "-no_calibration" in told["left_out"][0]
    assert "of other weights" in told["ema"][0], "another set of weights has no temperature"
    scaled = float(F.cross_entropy(logits / temperature, labels))
    assert told["after"][1]["nll"] == pytest.approx(scaled, rel=1e-6)
    assert told["after"][1]["ece"] == pytest.approx(kept["after"]["ece"], abs=1e-4)
    chance = told["after"][1]["ece_by_chance"]
    assert chance["images"] == 360
    assert 0 < chance["mean"] < chance["percentile_95"]
    assert told["left_out"][1]["nll"] == pytest.approx(kept["before"]["nll"], rel=1e-6)
    assert told["after"][1]["acc1"] == told["left_out"][1]["acc1"]
    averaged = validation_predictions(load_trained(run, "ema"), workers=0).logits
    assert told["ema"][1]["nll"] == pytest.approx(float(F.cross_entropy(averaged, labels)), rel=1e-6)

    page = evaluations.evaluate(load_trained(run, "model").chosen.file, "val", TOP1)
    assert isinstance(page, dict)
    assert page["weights"].endswith(f"; calibrated (temperature {temperature:.4g}, fitted on 360 images)")
    about = page["reliability"].about_error
    assert " % on average on 360 images, and up to " in about
    assert "If the temperature was fitted on these images, the error is a little too low." in about
    assert page["reliability"].ece == pytest.approx(told["after"][1]["ece"])

    guessed = vitamp(run, "-weights", "model", *PREDICT, script="scripts/predict.py")
    assert "calibrated (temperature" in guessed.err
    probabilities = [float(row["probability"]) for row in csv.DictReader(guessed.out.splitlines())]
    assert probabilities == pytest.approx((logits / temperature).softmax(1).max(1).values.tolist(), abs=2e-6)


@pytest.mark.parametrize(
    ("sharpness", "wanted", "earlier", "fate"),
    [
        (1.3, "which may be chance", 1.2, ", stays: it changes the NLL by "),
        (1.0, "the NLL does not fall.", 0.2, ", is removed, since it makes the NLL of these images higher"),
        (3.0, "Kept in ", 2.0, "replaces the earlier temperature 2, fitted on 90 images."),
    ],
)
def test_a_gain_that_may_be_chance_keeps_no_temperature(
    sharpness: float,
    wanted: str,
    earlier: float,
    fate: str,
    say: Callable[..., Result],
    digits_run: Path,
    run: Path,
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
    assert "earlier" not in said
    kept = json.loads((copy / FILE).read_text())["temperatures"]
    assert ("Not kept: temperature" in said, len(kept)) == ((False, 1) if sharpness == 3 else (True, 0))

    own = {**kept_in(run), "temperature": earlier, "images": 90}
    assert own["sha256"] == load_trained(copy, "model").chosen.hashes
    of_others = {**own, "sha256": ["0" * 64], "temperature": 7.0}
    (copy / FILE).write_text(json.dumps({"temperatures": [own, of_others]}))
    assert fate in say(copy, "-calibrate", "-weights", "model", code=0).out
    after = [one["temperature"] for one in json.loads((copy / FILE).read_text())["temperatures"]]
    assert after == {1.3: [earlier, 7.0], 1.0: [7.0], 3.0: [7.0, *(one["temperature"] for one in kept)]}[sharpness]


def test_a_large_calibration_error_names_the_remedy(
    say: Callable[..., Result], digits_run: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "-calibrate fits a temperature, and keeps it if it surely helps."
    monkeypatch.setattr("tools.evaluate.calibrate.LARGE_ECE", 100.0)
    assert hint not in say(digits_run, code=0).out
    monkeypatch.setattr("tools.evaluate.calibrate.LARGE_ECE", 0.5)
    said = say(digits_run, code=0).out
    assert re.search(r"\nThe model is (over|under)confident: mean confidence [0-9.]+ %, top-1 [0-9.]+ %\.\n", said)
    assert f"\n{hint}\n" in said
    assert re.search(r"\nThe calibration error is more than chance explains: .* on 360 images, and up to ", said)
    assert hint not in say(run, "-weights", "model", "-no_calibration", code=0).out, "it has one"
    assert hint not in say(digits_run, "-part", "train", code=0).out, "-calibrate refuses training images"


@pytest.mark.parametrize(("images", "is_proposed"), [(FEWEST - 1, False), (FEWEST, True)])
def test_a_remedy_that_needs_more_validation_images_is_not_named(images: int, is_proposed: bool) -> None:
    trained = SimpleNamespace(
        config=SimpleNamespace(DATA=SimpleNamespace(PART="test"), TRAIN=SimpleNamespace(SMOOTHING=0, mixes=False)),
        chosen=SimpleNamespace(meta={"val_images": images}),
    )
    evaluation = SimpleNamespace(rows=SimpleNamespace(confidence=torch.full((80,), 0.9)), values={TOP1: 50.0})
    how, *proposed = _propose_calibration(cast(Any, trained), cast(Any, evaluation))
    assert how == "The model is overconfident: mean confidence 90.0 %, top-1 50.0 %."
    assert [words.startswith("-calibrate, without -part, fits") for words in proposed] == [True] * is_proposed


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


def test_what_cannot_be_calibrated_is_refused(
    say: Callable[..., Result], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (run / FILE).read_bytes()
    lone = Path(shutil.copytree(next((run / "checkpoints").glob("step-*")), tmp_path / "lone"))
    for model, words, wanted in (
        (run, ("-tta", "flip"), "-tta: does not go with -calibrate"),
        (run, ("-part", "train"), "the model was trained on these images"),
        (lone, (), "is not in a run's folder"),
    ):
        done = say(model, "-calibrate", *words, code=2)
        assert wanted in done.text
    monkeypatch.setattr("tools.evaluate.calibrate.FEWEST", 361)
    monkeypatch.setattr("tools.evaluate.calibrate.with_bar", lambda *_: pytest.fail("before images are predicted"))
    assert "-calibrate: 360 images are too few" in say(run, "-calibrate", code=2).text
    assert (run / FILE).read_bytes() == before
