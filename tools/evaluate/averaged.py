"""evaluate.py RUN RUN ...: metrics of each model, and of the mean of their probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.evaluated_data import copies_evaluated
from engine.saved.averaged import check_same_classes
from engine.saved.predictions import names_of
from engine.saved.trained import Trained, load_trained
from tools.common.command_line import ToolLine
from tools.common.parts import Part, open_part, outputs_of
from tools.evaluate import one, several
from utils.cli import CommandLine
from utils.errors import UserError
from utils.log import log
from utils.record.tasks import ONE_LABEL, SEVERAL_LABELS, always_guessing

MEAN = "mean"


def evaluate_average(
    line: ToolLine, given: CommandLine, bins: int, matrix: Path | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Log the metrics. What the JSON file says of the evaluation, and the metrics for it."""
    asked = line.asked
    how = {"calibrated": not asked.no_calibration, "average": asked.average}
    models = [load_trained(path, asked.weights, given=given, **how) for path in asked.model]
    for trained in models:
        trained.look(asked.tta)
    check_same_classes(models)
    first = models[0]
    task = {ONE_LABEL: one, SEVERAL_LABELS: several}[first.task.kind]
    if task.NO_MATRIX and matrix is not None:
        raise UserError(f"-confusion: {task.NO_MATRIX}.")
    opened = [open_part(trained, {*given.flags, *given.words}) for trained in models]
    parts = [part for part, _ in opened]
    names_of([part.dataset for part in parts], " and ".join(asked.model))
    log.setLevel("INFO")
    _describe(asked.model, models)
    for note in dict.fromkeys(note for _, notes in opened for note in notes):
        log.info("%s.", note)
    logits, labels = _outputs(asked.model, models, parts)
    names = _short_names(asked.model)
    found = {
        name: task.of_outputs(trained, output, labels, bins)
        for name, trained, output in zip(names, models, logits, strict=True)
    }
    found[MEAN] = task.of_outputs(first, first.task.averaged(logits), labels, bins, True)
    guessing = f"; {always_guessing(found[MEAN].largest_class_percent)}" if first.task.kind == ONE_LABEL else ""
    log.info("%s: %s%s", parts[0].title, parts[0].counted, guessing)
    log.info("\n%s", "\n".join(one.table_of(found, task.CELLS)))
    for copies in dict.fromkeys(
        copies_evaluated(trained.config, trained.chosen, len(parts[0].dataset)) for trained in models
    ):
        if copies:
            log.info("%s", copies)
    if matrix is not None:
        task.write_matrix(matrix, found[MEAN], first.names())
        log.info("Confusion matrix of the mean: %s", matrix)
    return _about(line, models, parts[0]), {name: task.figures_as_json(of) for name, of in found.items()}


def _describe(paths: list[str], models: list[Trained]) -> None:
    for path, trained in zip(paths, models, strict=True):
        calibration = trained.chosen.describe_calibration(trained.calibrated)
        words = (trained.chosen.words, calibration, trained.views.words())
        log.info("%s: %s", path, "; ".join(filter(None, words)))
    log.info("%s: the mean of the probabilities of these %d models.", MEAN, len(models))
    identities = [(trained.chosen.samples or {}).get("data") for trained in models]
    if len(set(identities)) > 1:
        log.info(
            "The models were not all trained on the same images. If one was trained on some of the images below, its "
            "metrics and the mean's are too good."
        )


def _outputs(paths: list[str], models: list[Trained], parts: list[Part]) -> tuple[list[Tensor], Tensor]:
    """Logits of each model, and the labels."""
    found = [outputs_of(trained, part) for trained, part in zip(models, parts, strict=True)]
    labels = found[0][1]
    for path, (_, own) in zip(paths, found, strict=True):
        if not torch.equal(own, labels):
            raise UserError(f"{path} and {paths[0]}: the runs have different images, so they cannot be averaged.")
    return [logits for logits, _ in found], labels


def _short_names(paths: list[str]) -> list[str]:
    """Last parts of the paths, or whole paths if these are not distinct."""
    short = [Path(path).name for path in paths]
    return short if len({*short, MEAN}) == len(paths) + 1 else paths


def _about(line: ToolLine, models: list[Trained], part: Part) -> dict[str, Any]:
    return {
        "model": [trained.config.MODEL.NAME for trained in models],
        "source": [trained.chosen.origin for trained in models],
        "precision": [trained.precision.name for trained in models],
        "tta": line.asked.tta,
        "temperature": [trained.temperature for trained in models],
        "data": part.title,
        "classes": models[0].names(),
    }
