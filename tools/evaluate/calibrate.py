"""evaluate.py -calibrate: fit a temperature to a model's weights, measure it by cross-fitting, and keep it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.evaluation.data import copies_of_training
from engine.inputs.batches import input_of
from engine.trained.model import Trained
from tools.common import command_line
from tools.common.calibration_error import BINS
from tools.common.evaluation import Evaluation, OneLabel, joined, with_bar
from tools.common.tables import in_columns
from tools.evaluate.part import Part, open_part
from utils.cli import CommandLine
from utils.errors import UserError
from utils.log import log, log_lines
from utils.record.run_folder import write_json
from utils.statistics.differences import Difference, student_interval_of_images
from vitamp.checkpoints import run_folder_of
from vitamp.files import try_to_write
from vitamp.metrics import ONE_LABEL, TOP1
from vitamp.weights import CALIBRATION, Chosen, Fitted, read_calibrations

FEWEST = 50
"""Images that a temperature needs. With fewer, it is mostly noise."""
SMALLEST = 0.01
LARGEST = 100.0
"""Temperatures between which the best one is searched"""
MOST_COPIES = 5.0
"""Percent of images with the bytes of training images, above which a temperature would be of those"""
LARGE_ECE = 2.0
"""Percent, from which on the log names -calibrate, if it is beyond chance"""
AT_ONCE = 1024
"""Images of which metrics are computed together"""


def calibrate(trained: Trained, given: CommandLine, path: str) -> None:
    """Fit a temperature to the weights, keep it in the run if it surely helps on other images, and log both.

    `path`: the model as the command line names it. Raises UserError if a temperature cannot be fitted or kept.
    """
    file = _file_for(trained)
    part = _open_images(trained, given, path)
    batches = ((logits, part.labels(labels)) for logits, labels in with_bar(trained, part.dataset))
    logits, labels = joined(batches)
    if not bool(logits.isfinite().all()):
        raise UserError("-calibrate: the model has NaN or infinite logits on these images; nothing can be fitted.")
    groups = part.dataset.groups()
    of_halves, of_other_half = _cross_fit(logits, labels, groups, part.title)
    temperature = fit_temperature(logits, labels)

    # Measure the model without a temperature, with the new one, by cross-fitting, and with an earlier one.
    chosen = trained.chosen

    def measure(temperatures: Tensor | float) -> OneLabel:
        scaled = logits.double() / temperatures
        return OneLabel.of(trained, zip(scaled.split(AT_ONCE), labels.split(AT_ONCE), strict=True), groups)

    before = measure(1.0)
    after = measure(temperature)
    cross_fitted = measure(of_other_half)
    gain = student_interval_of_images((before.rows.nll - cross_fitted.rows.nll).numpy(), groups)
    harm = None
    if chosen.calibration:
        earlier = measure(chosen.calibration.temperature)
        harm = student_interval_of_images((earlier.rows.nll - before.rows.nll).numpy(), groups)

    # Keep the new one if it helps, and log all.
    new = Fitted(
        temperature=temperature,
        images=len(labels),
        sha256=chosen.hashes,
        checkpoint=chosen.place.name,
        weights=chosen.which.name,
        data=part.title,
        precision=trained.precision.name,
        before={"nll": before.nll, "ece": before.ece},
        after={"nll": after.nll, "ece": after.ece},
        crossfitted={"nll": cross_fitted.nll, "ece": cross_fitted.ece},
        input=input_of(trained.config.DATA),
    )
    lines = [trained.words(), f"{part.title}: {len(labels):,} images; calibration in {BINS} bins", ""]
    lines += _table(before, after, cross_fitted, temperature)
    first, second = of_halves
    lines += [
        "Cross-fitted: each half of the images with the temperature of the other half "
        f"({first:.4g} and {second:.4g}). "
        f"Else {temperature:.4g} is measured on the images that it was fitted on, as evaluate.py does. "
        "By chance: the calibration error of a perfectly calibrated model that is as sure, on as many images.",
        _keep(file, chosen, new, gain, harm),
    ]
    log.info("%s", "\n".join(lines))


def _open_images(trained: Trained, given: CommandLine, path: str) -> Part:
    """Open the images to which a temperature is fitted, and log which these are.

    Raises UserError if they are too few, or if too many of them are training images.
    """
    part, notes = open_part(trained, given)
    images = len(part.dataset)
    if images < FEWEST:
        raise UserError(
            f"-calibrate: {images} images are too few ({part.title}); a temperature needs {FEWEST} or more."
        )
    log.setLevel("INFO")
    log.info("%s: %s", path, trained.chosen.words)
    log_lines(f"{note}." for note in notes)
    copies = copies_of_training(trained.config, trained.chosen, part.dataset)
    if copies is not None:
        words, percent = copies
        if percent > MOST_COPIES:
            raise UserError(f"-calibrate needs images that the model was not trained on: {words}")
        log.warning("%s", words)
    return part


def _cross_fit(logits: Tensor, labels: Tensor, groups: Sequence[str], title: str) -> tuple[list[float], Tensor]:
    """Fit a temperature to each of two random halves of the images.

    Returns both, and for each image the one that was fitted to the other half. `title`: of the images, for errors.
    """
    halves = random_halves(len(labels), groups)
    if not all(map(len, halves)):
        raise UserError(f"-calibrate: all images of {title} are of one group (DATA.GROUP); it needs two or more.")
    which = f"one half of these {len(labels):,}"
    fitted = [fit_temperature(logits[half], labels[half], which) for half in halves]
    of_other_half = torch.empty(len(labels), 1, dtype=torch.float64)
    for half, temperature_of_other in zip(halves, reversed(fitted), strict=True):
        of_other_half[half] = temperature_of_other
    return fitted, of_other_half


def _table(before: OneLabel, after: OneLabel, cross_fitted: OneLabel, temperature: float) -> list[str]:
    """Return the lines of a table of the metrics without a temperature and with it."""
    return in_columns(
        [
            ["", "uncalibrated", f"temperature {temperature:.4g}"],
            ["calibration error", f"{before.ece:.2f} %", f"{after.ece:.2f} %"],
            ["by chance: mean", f"{before.chance.mean:.2f} %", f"{after.chance.mean:.2f} %"],
            [
                "by chance: 95 of 100 cases below",
                f"{before.chance.percentile_95:.2f} %",
                f"{after.chance.percentile_95:.2f} %",
            ],
            ["NLL", f"{before.nll:.4f}", f"{after.nll:.4f}"],
            ["NLL, cross-fitted", f"{before.nll:.4f}", f"{cross_fitted.nll:.4f}"],
        ]
    )


def random_halves(images: int, groups: Sequence[str]) -> tuple[list[int], list[int]]:
    """Divide the images at random into two halves, the same each time, which keep groups whole.

    At random, since a data set is often in the order of its classes. `groups`: of each image; empty without groups.
    """
    group_of = list(groups) or [str(image) for image in range(images)]
    members = dict[str, list[int]]()
    for image in torch.randperm(images, generator=torch.Generator().manual_seed(0)).tolist():
        members.setdefault(group_of[image], []).append(image)
    halves = list[int](), list[int]()
    # The largest groups first, each to the smaller half, so that the halves end about equal.
    for group in sorted(members.values(), key=len, reverse=True):
        smaller_half = min(halves, key=len)
        smaller_half.extend(group)
    return halves


def _keep(file: Path, chosen: Chosen, new: Fitted, gain: Difference, harm: Difference | None) -> str:
    """Keep the new temperature if it surely helps, remove an earlier one that surely harms, and say so in words.

    `file`: the run's file of temperatures. `gain`: how much the new one lowers the NLL, by cross-fitting. `harm`: how
    much the earlier one raises it; None if there is no earlier one.
    """
    helps = gain.seen and gain.value > 0
    harms = harm is not None and harm.seen and harm.value > 0
    not_kept = f"Not kept: {new.words}. On images that it was not fitted on, the NLL"
    if helps:
        words = (
            f"Kept in {file}: {new.words}, all of these. predict.py, export.py and evaluate.py "
            "divide the logits of these weights by it; -no_calibration leaves it out."
        )
    elif gain.value > 0:
        words = (
            f"{not_kept} falls by {gain.value:.4f} (95 % interval {gain.low:.4f} to {gain.high:.4f}), which may be "
            "chance. More images would tell."
        )
    else:
        words = f"{not_kept} does not fall."
    earlier = chosen.calibration
    if earlier and helps:
        words += f" It replaces the earlier {earlier.words}."
    elif earlier and harm is not None:
        fate = "is removed, since it makes the NLL of these images higher, beyond chance" if harms else "stays"
        words += f" The earlier {earlier.words}, {fate}: it changes the NLL by {harm.value:+.4f}."

    # Write the temperatures of all weights of the run. These weights are recognised by the hashes of their files.
    temperatures = read_calibrations(chosen.place)
    if helps or harms:
        temperatures = [fitted for fitted in temperatures if fitted.sha256 != chosen.hashes]
    if helps:
        temperatures.append(new)
    write_json(file, {"temperatures": [fitted.model_dump() for fitted in temperatures]})
    return words


def about_calibration(trained: Trained, part: Part, evaluation: Evaluation) -> list[str]:
    """Say whether the calibration error is chance, is too low because of the temperature, or would be lower with one.

    Empty with several labels per image.
    """
    if not isinstance(evaluation, OneLabel):
        return []
    by_chance = evaluation.chance.words(evaluation.ece)
    sentences = [by_chance] if by_chance else []
    if trained.others:  # the mean of several models has no temperature
        return sentences

    # The metrics are too low if the temperature was fitted to these very logits: the same images, prepared and computed
    # in the same way. A temperature of another kind, such as a published one, was fitted to other images.
    temperature = trained.chosen.calibration
    if trained.calibrated and isinstance(temperature, Fitted):
        fitted_on_these_images = (temperature.data, temperature.images) == (part.title, len(part.dataset))
        if fitted_on_these_images:
            too_low = ""
            input_now = json.loads(json.dumps(input_of(trained.config.DATA)))  # tuples are lists, as in the run's file
            if not trained.flip and (temperature.precision, temperature.input) == (trained.precision.name, input_now):
                nll = temperature.crossfitted["nll"]
                too_low = f", so calibration error and NLL are a little too low; cross-fitted, the NLL is {nll:.4f}"
            sentences.append(f"The temperature was fitted on these images{too_low}.")

    # Propose -calibrate where it would not refuse, and the error is large and beyond chance.
    wrong = int((evaluation.rows.guess != evaluation.rows.label).sum())
    # MEMORISED: splits that include training images
    accepted = evaluation.images >= FEWEST and wrong > 1 and trained.config.DATA.PART not in command_line.MEMORISED
    has_large_ece = evaluation.ece > max(LARGE_ECE, evaluation.chance.percentile_95)
    if accepted and has_large_ece and not temperature:
        sentences += _propose_calibration(trained, evaluation)
    return sentences


def _propose_calibration(trained: Trained, evaluation: OneLabel) -> list[str]:
    """Say that the model is too sure, or not sure enough; propose -calibrate, unless it would refuse."""
    config = trained.config
    confidence = 100 * float(evaluation.rows.confidence.mean())
    accuracy = evaluation.values[TOP1]
    how = "overconfident" if confidence > accuracy else "underconfident"
    has_soft_labels = config.TRAIN.SMOOTHING or config.TRAIN.mixes  # `mixes`: MixUp or CutMix
    because = ", as label smoothing and mixing make it" if confidence < accuracy and has_soft_labels else ""
    sentences = [f"The model is {how}{because}: mean confidence {confidence:.1f} %, top-1 {accuracy:.1f} %."]
    what = "fits a temperature, and keeps it if it surely helps."
    if config.DATA.PART != "test":
        sentences.append(f"-calibrate {what}")
    elif trained.chosen.meta.get("val_images", FEWEST) >= FEWEST:  # test images only measure
        sentences.append(f"-calibrate, without -part, {what}")
    return sentences


def _file_for(trained: Trained) -> Path:
    """Return the file of the run in which the temperature is kept.

    Raises UserError, before images are read, if the file cannot be written or the model cannot be calibrated: it has
    several labels per image, or is not in the folder of a run.
    """
    place = trained.chosen.place
    if trained.task.kind != ONE_LABEL:
        raise UserError(
            "-calibrate: needs one label per image. With several, each class has a threshold of its own, which belongs "
            "to the probabilities as they are."
        )
    run = run_folder_of(place) if trained.chosen.checkpoint else None  # a file of weights alone is in no run
    if run is None:
        raise UserError(f"-calibrate: {place} is not in a run's folder, where the temperature is kept; name the run.")
    try:
        try_to_write(run / CALIBRATION)
    except OSError as error:
        raise UserError(f"-calibrate: {run / CALIBRATION} cannot be written ({error.strerror}).") from None
    return run / CALIBRATION


def fit_temperature(logits: Tensor, labels: Tensor, which: str = "these") -> float:
    """Find the temperature T with the lowest NLL, in double precision. The NLL has one minimum in log T.

    `which`: word for the images in errors, 'in these images'. Raises UserError if all are classified correctly, as then
    a smaller T always has a lower NLL, and if the minimum is not between `SMALLEST` and `LARGEST`.
    """
    from scipy.optimize import minimize_scalar  # takes a while to import

    def nll(log_temperature: float) -> float:
        return float(F.cross_entropy(logits.double() / math.exp(log_temperature), labels))

    if bool((logits.argmax(1) == labels).all()):
        raise UserError(
            f"-calibrate: in {which} images, all are classified correctly. The surer the model, the lower their NLL, "
            "so no temperature is the best. Name more images, so that each half of them has some that are classified "
            "wrongly (-data_path DIR). The run's probabilities stay as they were."
        )
    bounds = math.log(SMALLEST), math.log(LARGEST)
    minimum: Any = minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    log_temperature = float(minimum.x)
    at_bound = min(abs(log_temperature - bound) for bound in bounds) < 1e-3
    if at_bound:
        raise UserError(
            f"-calibrate: on {which} images, no temperature from {SMALLEST:g} to {LARGEST:g} has the lowest NLL, as "
            "when they are classified at random, or nearly all correctly. Use more images."
        )
    return math.exp(log_temperature)
