"""evaluate.py -calibrate: fits a temperature to a model's weights, measures it by cross-fitting, and keeps it."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.evaluation.data import copies_of_training
from engine.inputs.batches import input_of
from engine.trained.model import Trained, guesses
from tools.common import command_line
from tools.common.differences import interval
from tools.common.evaluation import BINS, Evaluation, OneLabel, Part, calibration, open_part, with_bar
from tools.common.tables import in_columns
from utils.cli import CommandLine
from utils.errors import UserError
from utils.log import log, log_lines
from utils.record.run_folder import write_json
from vitamp.checkpoints import run_folder_of
from vitamp.files import try_to_write
from vitamp.metrics import ONE_LABEL, TOP1
from vitamp.weights import CALIBRATION, Fitted, read_calibrations

FEWEST = 50
"""Images. With fewer, the temperature is mostly noise."""
SMALLEST, LARGEST = 0.01, 100.0
MOST_COPIES = 5.0
"""Percent of images with the bytes of training images, above which a temperature would be of those"""
LARGE_ECE = 10.0
"""Percent, from which on the log names -calibrate"""
DRAWS = 400
"""Of which images are right, if the probabilities are: they give the calibration errors that are chance"""


def calibrate(trained: Trained, given: CommandLine, path: str) -> None:
    """Fit a temperature to the weights, keep it in the run if it surely helps on other images, and log both."""
    file = _file_for(trained)
    part, notes = open_part(trained, given)
    log.setLevel("INFO")
    log.info("%s: %s", path, trained.chosen.words)
    log_lines(f"{note}." for note in notes)
    if copies := copies_of_training(trained.config, trained.chosen, part.dataset):
        said, percent = copies
        if percent > MOST_COPIES:
            raise UserError(f"-calibrate needs images that the model was not trained on: {said}")
        log.warning("%s", said)
    rows = [(logits.cpu(), part.labels(labels).cpu()) for logits, labels in with_bar(trained, part.dataset)]
    logits, labels = (torch.cat(column) for column in zip(*rows, strict=True))
    if not bool(logits.isfinite().all()):
        raise UserError("-calibrate: the model has NaN or infinite logits on these images; nothing can be fitted.")
    if len(labels) < FEWEST:
        raise UserError(f"-calibrate: {len(labels)} images are too few; a temperature needs at least {FEWEST}.")
    # Two random halves, the same each time: a data set is often in the order of its classes.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    halves = order[::2], order[1::2]
    fitted = [fit_temperature(logits[half], labels[half], f"one half of these {len(labels):,}") for half in halves]
    of_others = torch.empty(len(labels), dtype=torch.float64)
    for half, temperature in zip(halves, reversed(fitted), strict=True):
        of_others[half] = temperature
    ones = torch.ones_like(of_others)
    before, after = (measure(logits, labels, each) for each in (ones, of_others))
    gain = interval((_losses(logits, labels, ones) - _losses(logits, labels, of_others)).tolist(), 1)
    temperature, chosen = fit_temperature(logits, labels), trained.chosen
    helps = gain.seen and gain.value > 0
    kept = Fitted(
        temperature=temperature,
        images=len(labels),
        sha256=chosen.hashes,
        checkpoint=chosen.place.name,
        weights=chosen.which.name,
        data=part.title,
        precision=trained.precision.name,
        before=before,
        crossfitted=after,
        input=input_of(trained.config.DATA),
    )
    others = [one for one in read_calibrations(chosen.place) if one.sha256 != chosen.hashes]
    write_json(file, {"temperatures": [one.model_dump() for one in (*others, *((kept,) if helps else ()))]})
    table = [
        ["", "before", "after"],
        ["calibration error", f"{before['ece']:.2f} %", f"{after['ece']:.2f} %"],
        ["NLL", f"{before['nll']:.4f}", f"{after['nll']:.4f}"],
    ]
    first, second = (f"{one:.4g}" for one in fitted)
    none = f"Not kept: {kept.words}. On images that it was not fitted on, the NLL"
    if helps:
        verdict = (
            f"Kept in {file}: {kept.words}, all of these. predict.py, export.py and evaluate.py "
            "divide the logits of these weights by it; -no_calibration leaves it out."
        )
    elif gain.value > 0:
        verdict = (
            f"{none} falls by {gain.value:.4f} (95 % interval {gain.low:.4f} to {gain.high:.4f}), which may be "
            "chance. More images would tell."
        )
    else:
        verdict = f"{none} does not fall."
    text = [
        trained.words(),
        f"{part.title}: {len(labels):,} images; calibration in {BINS} bins",
        "",
        *in_columns(table),
        "",
        "After: by cross-fitting. Each half of the images is measured with the temperature fitted on the other half "
        f"({first} and {second}).",
        verdict,
    ]
    log.info("%s", "\n".join(text))


def about_temperature(trained: Trained, part: Part, found: Evaluation) -> list[str]:
    """Whether the metrics `found` are too good because of the temperature, or would be better with one."""
    if trained.others:
        return []
    said, kept = [], trained.chosen.calibration
    if trained.calibrated and isinstance(kept, Fitted) and (kept.data, kept.images) == (part.title, len(part.dataset)):
        words, now = "", json.loads(json.dumps(input_of(trained.config.DATA)))  # JSON has no tuples
        if not trained.flip and (kept.precision, kept.input) == (trained.precision.name, now):
            words = ": cross-fitted, calibration error {ece:.2f} %, NLL {nll:.4f}".format_map(kept.crossfitted)
        said.append(f"The temperature was fitted on these images{words}.")
    # What -calibrate does not refuse
    fits = found.images >= FEWEST and trained.config.DATA.PART not in command_line.MEMORISED
    if fits and isinstance(found, OneLabel) and found.ece >= LARGE_ECE and not kept:
        chance = _ece_by_chance(found.rows.confidence)
        if found.ece > chance:
            sure, right = 100 * float(found.rows.confidence.mean()), found.values[TOP1]
            how = "overconfident" if sure > right else "underconfident"
            said.append(f"The model is {how}: mean confidence {sure:.1f} %, top-1 {right:.1f} %.")
            what = f"A calibration error beyond the {chance:.1f} % that chance may give on {found.images:,} images"
            said.append(f"{what}: -calibrate fits a temperature, and keeps it if it surely helps.")
    return said


def _ece_by_chance(confidence: Tensor) -> float:
    """The ECE in percent that 97.5 % of draws stay below, if each image is right as often as the model says."""
    generator = torch.Generator().manual_seed(0)
    draws = (torch.rand(len(confidence), generator=generator) < confidence for _ in range(DRAWS))
    return float(torch.tensor([calibration(confidence, right)[0] for right in draws]).quantile(0.975))


def _file_for(trained: Trained) -> Path:
    """The file to keep the temperature in. Refuses what cannot be calibrated or kept, before the images are read."""
    place = trained.chosen.place
    if trained.task.kind != ONE_LABEL:
        raise UserError(
            "-calibrate: needs one label per image. With several, each class has a threshold of its own, which belongs "
            "to the probabilities as they are."
        )
    run = run_folder_of(place) if trained.chosen.checkpoint else None
    if run is None:
        raise UserError(f"-calibrate: {place} is not in a run's folder, where the temperature is kept; name the run.")
    try:
        try_to_write(run / CALIBRATION)
    except OSError as error:
        raise UserError(f"-calibrate: {run / CALIBRATION} cannot be written ({error.strerror}).") from None
    return run / CALIBRATION


def fit_temperature(logits: Tensor, labels: Tensor, which: str = "these") -> float:
    """The temperature with the lowest NLL, in double precision. The NLL has one minimum in log T."""
    from scipy.optimize import minimize_scalar  # takes a while to import

    def nll(log_temperature: float) -> float:
        temperatures = torch.full((len(labels),), math.exp(log_temperature), dtype=torch.float64)
        return float(_losses(logits, labels, temperatures).mean())

    bounds = math.log(SMALLEST), math.log(LARGEST)
    found: Any = minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    log_temperature = float(found.x)
    if bool((logits.argmax(1) == labels).all()):
        raise UserError(
            f"-calibrate: in {which} images, all are classified correctly. The surer the model, the lower their NLL, "
            "so no temperature is the best. Name more images, so that each half of them has some that are classified "
            "wrongly (-part test, -data_path DIR). The run's probabilities stay as they were."
        )
    if min(abs(log_temperature - bound) for bound in bounds) < 1e-3:
        raise UserError(
            f"-calibrate: on {which} images, no temperature from {SMALLEST:g} to {LARGEST:g} has the lowest NLL, as "
            "when they are classified at random, or nearly all correctly. Use more images."
        )
    return math.exp(log_temperature)


def measure(logits: Tensor, labels: Tensor, temperatures: Tensor) -> dict[str, float]:
    """NLL, and ECE in percent, if the logits of each image are divided by its temperature."""
    guess, probabilities = guesses(logits)[:, 0], (logits.double() / temperatures[:, None]).softmax(1)
    confidence = probabilities.gather(1, guess[:, None])[:, 0]
    nll = float(_losses(logits, labels, temperatures).mean())
    return {"nll": nll, "ece": calibration(confidence, guess == labels)[0]}


def _losses(logits: Tensor, labels: Tensor, temperatures: Tensor) -> Tensor:
    """Negative log likelihood of each image."""
    return F.cross_entropy(logits.double() / temperatures[:, None], labels, reduction="none")
