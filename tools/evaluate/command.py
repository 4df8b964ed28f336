"""Evaluate a trained model on its validation split or on other data: accuracy, recall, calibration, confusion.

    python scripts/evaluate.py runs/flowers
    python scripts/evaluate.py runs/flowers -weights both -json eval.json
    python scripts/evaluate.py runs/flowers -calibrate
    python scripts/evaluate.py runs/flowers -knn
    python scripts/evaluate.py runs/a runs/b runs/c
    python scripts/evaluate.py runs/flowers -dataset imagefolder -data_path /data/other_flowers -confusion matrix.png

The model is a run (its best checkpoint), a checkpoint, or weights written by scripts/checkpoint.py. Settings are those
of the run; flags and settings of main_single_gpu.py override them, such as -batch_size and -amp, but not those of the
model and its weights (-cfg, -resume, -pretrained, -num_classes). Classes of another data set are matched by name to
those of the model. Other data than the run's is evaluated whole, unless it has a validation split of its own.

Precision, recall and F1 are means over the classes that have images. The calibration error is ECE: the mean distance
between confidence and accuracy, over bins of equal width. A model with several labels per image gets mAP, F1 and exact
match, and average precision for each class.

Several models are evaluated one by one, and then the mean of their probabilities.

-calibrate fits a temperature to the weights, so that the probabilities are as often right as they say. It is kept in
the run's calibration.json; predict.py, export.py and later evaluations of these weights divide the logits by it.

-knn classifies each image by its nearest training images, without the classifier: it says how well the features of a
model separate the classes, also those of a model that learned without labels. -dataset and -data_path name images with
labels, if the run's have none.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.command_line import (
    NO_CALIBRATION,
    OVERWRITE,
    PART,
    POOL,
    TRUST,
    TTA,
    Tool,
    ToolLine,
    run_tool,
)
from tools.common.output_file import check_output_file, writing
from utils.cli import CommandLine
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, Positional, whole
from utils.log import log
from utils.record.run_folder import write_json
from vitamp.metrics import BETTER, CHOICES, CHOICES_IN_WORDS, ONE_LABEL, SETS, TOP1, WeightSet, always_guessing

if TYPE_CHECKING:
    from engine.trained.model import Trained
    from tools.common.evaluation import OneLabel
    from tools.common.parts import Part

BOTH, MEAN = "both", "mean"
NAMES_IN_PICTURE, NUMBERS_IN_PICTURE = 60, 20

OWN = (
    Flag(
        "weights",
        f"{CHOICES_IN_WORDS}, or {BOTH} side by side",
        "WHICH",
        default=BETTER,
        choices=(*CHOICES, BOTH),
    ),
    PART,
    TTA,
    Flag("json", "write all metrics as JSON", "FILE.json"),
    Flag("confusion", "write the confusion matrix", "FILE.csv|png"),
    Flag("bins", "number of bins of the calibration error", "N", default=15, kind=whole(1, 1000)),
    Flag("calibrate", "fit a temperature to the weights on these images, and keep it in the run; no other metrics"),
    NO_CALIBRATION,
    Flag(
        "knn",
        "accuracy of the K nearest training images instead of the classifier; no other metrics",
        "[K]",
        kind=whole(1),
        const="20",
        accepts=str.isdecimal,
    ),
    replace(
        POOL,
        about="-knn: what the classifier sees (pooled), the class token, or the mean of all patches",
        choices=tuple(choice for choice in POOL.choices if choice != "patches"),
    ),
    Flag("plain_votes", "-knn: the vote of each of the K images counts the same, however similar it is"),
    *TRUST,
    OVERWRITE,
)
TOOL = Tool("evaluate.py", __doc__, OWN, (Positional("model", "RUN_OR_CHECKPOINT", "the model, or several", "+"),))
MEMORISED = ("train", "all")
"""Values of -part that include training images"""
OF_CLASSIFIER = ("calibrate", "no_calibration", "tta", "confusion", "bins")
"""Own flags about the classifier and its probabilities"""
REFUSED = ("MODEL.RESUME", "MODEL.PRETRAINED", "TRAIN.LAST_EPOCH", "MODEL.NUM_CLASSES")


def main(argv: list[str]) -> int:
    return run_tool(_evaluate, argv)


def _evaluate(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked = line.asked
    out, matrix = line.file("json", ".json"), line.file("confusion", ".csv", ".png")
    _check(line, matrix)
    default = None if asked.knn is None else "val"  # its training images vote, so it needs both splits
    part = {"DATA.PART": (asked.part or default, "-part")} if asked.part or default else {}
    given = replace(line.run, flags={**line.run.flags, "EVAL": (True, "evaluate.py"), **part})
    log.setLevel("WARNING")  # building the model logs what the training has logged already

    if asked.knn is not None:
        from tools.evaluate.knn import evaluate_neighbours

        about, figures = evaluate_neighbours(line, given)
    elif asked.calibrate:
        return _calibrate(line, given)
    else:
        about, figures = _metrics(line, given, matrix)
    if out is not None:
        with writing(out, "-json"):
            write_json(out, {**about, "figures": figures})
        log.info("All metrics: %s", out)
    return EXIT_DONE


def _metrics(line: ToolLine, given: CommandLine, matrix: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Log the metrics of each set of weights, or of each model and the mean of their probabilities.

    Returns what the JSON file says of the evaluation, and the metrics for it.
    """
    import torch

    from engine.evaluated_data import copies_evaluated
    from engine.trained.model import check_same_classes, names_of
    from tools.common.evaluation import kind_of, table_of, with_bar

    asked, paths, several = line.asked, line.asked.model, len(line.asked.model) > 1
    models, sets = _loaded(line, given)
    check_same_classes(models)
    first, kind, one_label = models[0], kind_of(models[0]), models[0].task.kind == ONE_LABEL
    if kind.no_matrix and matrix is not None:
        raise UserError(f"-confusion: {kind.no_matrix}.")
    opened = [_open(given, trained) for trained in models]
    data, _ = opened[0]
    if several:
        names_of([part.dataset for part, _ in opened], " and ".join(paths))
    log.setLevel("INFO")
    for path, trained in zip(paths, models, strict=True) if len(sets) == 1 else ():
        calibration = trained.chosen.describe_calibration(trained.calibrated)
        log.info("%s: %s", path, "; ".join(filter(None, (trained.chosen.words, calibration))))
    if several:
        log.info("%s: the mean of the probabilities of these %d models.", MEAN, len(models))
        if len({(trained.chosen.samples or {}).get("data") for trained in models}) > 1:
            log.info(
                "The models were not all trained on the same images. If one was trained on some of the images below, "
                "its metrics and the mean's are too good."
            )
    for note in dict.fromkeys(note for _, notes in opened for note in notes):
        log.info("%s.", note)
    if asked.tta:
        log.info("-tta %s: mean of the probabilities of each image and its mirror image.", asked.tta)
    short = [Path(path).name for path in paths]  # or the whole paths, if these are not distinct
    names = short if len({*short, MEAN}) == len(paths) + 1 else paths
    titles = names if several else [which.mark or which.name for which in sets]
    found, temperatures, outputs = {}, [], []
    for number, title in enumerate(titles):
        trained, (part, _) = (models[number], opened[number]) if several else (first, opened[0])
        if not several and sets[number] != trained.chosen.which:
            trained.take(sets[number])
        if len(sets) > 1 and (words := trained.chosen.describe_calibration(trained.calibrated)):
            log.info("%s: %s.", title, words)
        batches = ((logits, part.labels(labels)) for logits, labels, _ in with_bar(trained, part.dataset))
        if several:  # on the host, for the mean
            batches = [(logits.cpu(), labels.cpu()) for logits, labels in batches]
            outputs.append([torch.cat(column) for column in zip(*batches, strict=True)])
            if not torch.equal(outputs[-1][1], outputs[0][1]):
                raise UserError(
                    f"{paths[number]} and {paths[0]}: the runs have different images, so they cannot be averaged."
                )
        found[title] = kind.of(trained, batches, asked.bins)
        temperatures.append(trained.temperature)
    if not several and _may_measure_own(first):
        for title, which in zip(titles, sets, strict=True):
            first.take(which)
            found[title] = replace(found[title], own=_own_metrics(first, data))
    if several:
        mean = first.task.averaged([logits for logits, _ in outputs])
        # In pieces, since the probabilities of all images at once may not fit into memory.
        found[MEAN] = kind.of(first, zip(mean.split(1024), outputs[0][1].split(1024), strict=True), asked.bins, True)
        guessing = f"; {always_guessing(found[MEAN].largest_class_percent)}" if one_label else ""
        text = [f"{data.title}: {data.counted}{guessing}", "", *table_of(found)]
    else:
        best = found[titles[0]]
        thresholds = "" if one_label else f"; {first.thresholds()[1]}"
        text = [
            f"{first.config.MODEL.NAME} of {first.chosen.place}, in {first.precision.name}{thresholds}",
            f"{data.title}: {best.words(data.counted)}",
            "",
            *table_of(found),
            "",
            *best.class_table(first, titles[0] if len(sets) > 1 else ""),
        ]
    log.info("%s", "\n".join(text))
    copies = [copies_evaluated(trained.config, trained.chosen, len(data.dataset)) for trained in models]
    for copy in filter(None, dict.fromkeys(copies)):
        log.info("%s", copy)
    if matrix is not None:
        for title, which in [(MEAN, None)] if several else zip(titles, sets, strict=True):
            path = _matrix_of(matrix, which) if which and len(sets) > 1 else matrix
            _write_matrix(path, found[title], first.names())
            log.info("Confusion matrix%s: %s", " of the mean" * several, path)
    about: dict[str, Any] = {
        "model": [trained.config.MODEL.NAME for trained in models],
        "source": [f"{trained.chosen.place}" for trained in models],
        "precision": [trained.precision.name for trained in models],
    }
    if not several:
        about = {name: values[0] for name, values in about.items()}
    about |= {
        "tta": asked.tta,
        "temperature": temperatures if several else {w.name: t for w, t in zip(sets, temperatures, strict=True)},
        "data": data.title,
        "classes": first.names(),
    }
    keys = [*titles, MEAN] if several else [which.name for which in sets]
    return about, {key: one.as_json() for key, one in zip(keys, found.values(), strict=True)}


def _calibrate(line: ToolLine, given: CommandLine) -> int:
    from tools.evaluate.calibrate import calibrate, check

    (trained,), sets = _loaded(line, given)
    file = check(trained)
    data, notes = _open(given, trained)
    log.setLevel("INFO")
    if len(sets) == 1:
        log.info("%s: %s", line.asked.model[0], trained.chosen.words)
    for note in notes:
        log.info("%s.", note)
    for which in sets:
        trained.take(which)
        log.info("%s", calibrate(trained, data, line.asked.bins, file))
    return EXIT_DONE


def _loaded(line: ToolLine, given: CommandLine) -> tuple[list[Trained], tuple[WeightSet, ...]]:
    """The models, and the sets of weights to evaluate. UserError if one is not there."""
    from engine.trained.model import load_trained  # torch takes seconds to import; a wrong command fails at once

    asked, both = line.asked, line.asked.weights == BOTH
    weights, calibrated = BETTER if both else asked.weights, not (asked.no_calibration or asked.calibrate)
    models = [load_trained(path, weights, given=given, calibrated=calibrated) for path in asked.model]
    for trained in models:
        trained.flip = bool(asked.tta)
    for which in SETS if both else ():
        models[0].chosen.other(which)
    return models, SETS if both else (models[0].chosen.which,)


def _open(given: CommandLine, trained: Trained) -> tuple[Part, list[str]]:
    from tools.common.parts import open_part

    return open_part(trained, {*given.flags, *given.words})


def _may_measure_own(trained: Trained) -> bool:
    """Execute the files of the run's own metrics (VALIDATE_METRICS). False without such files, or without consent."""
    names, chosen = trained.config.VALIDATE_METRICS, trained.chosen
    if not names:
        return False
    from engine.trained.own_code import may_execute, use_of_meta

    if not may_execute(chosen.meta, chosen.place, names):
        what = ", ".join(names)
        log.info("VALIDATE_METRICS %s: not computed, because that executes code of the run; -trust does.", what)
        return False
    use_of_meta(chosen.meta, trained.config, chosen.place, ("metric",))
    return True


def _own_metrics(trained: Trained, data: Part) -> dict[str, float]:
    from engine.task.own_code import measured
    from tools.common.parts import outputs_of

    logits, labels = outputs_of(trained, data)
    return measured(trained.config.VALIDATE_METRICS, trained.task.probabilities(logits), labels.long())


def _matrix_of(matrix: Path, which: WeightSet) -> Path:
    """File of one of both matrices."""
    return matrix.with_stem(f"{matrix.stem}_{which.name}")


def _write_matrix(path: Path, found: OneLabel, names: list[str]) -> None:
    with writing(path, "-confusion"):
        (_write_picture if path.suffix.lower() == ".png" else _write_table)(path, found, names)


def _write_table(path: Path, found: OneLabel, names: list[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("actual / predicted", *names))
        for name, row in zip(names, found.confusion(range(len(names))).tolist(), strict=True):
            writer.writerow((name, *row))


def _write_picture(path: Path, found: OneLabel, names: list[str]) -> None:
    """Colours are percent of the true class, so that rare classes are visible too."""
    import numpy as np
    from matplotlib.figure import Figure

    from tools.common.tables import shown

    counts = found.confusion(range(len(names)))
    shares = 100 * counts / np.maximum(found.support, 1)[:, None]
    side = min(16.0, max(5.0, 0.35 * len(names) + 2))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    top1 = f"{TOP1.words} {TOP1.number(found.values[TOP1])}"
    axes.set(xlabel="predicted", ylabel="actual", title=f"{found.images} images, {top1}")
    if len(names) <= NAMES_IN_PICTURE:
        places, labels = range(len(names)), [shown(name)[:30] for name in names]
        axes.set_xticks(places, labels, rotation=90, parse_math=False)
        axes.set_yticks(places, labels, parse_math=False)
    if len(names) <= NUMBERS_IN_PICTURE:
        for row, column in np.argwhere(counts).tolist():
            colour = "white" if shares[row, column] > 50 else "black"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=colour)
    figure.colorbar(image, ax=axes, label="% of the class", shrink=0.7)
    figure.savefig(path, dpi=120)


def _check(line: ToolLine, matrix: Path | None) -> None:
    """Raise UserError for flags that do not go together."""
    asked, several, both = line.asked, len(line.asked.model) > 1, line.asked.weights == BOTH
    if matrix is not None and both:
        for which in SETS:
            check_output_file(_matrix_of(matrix, which), "-confusion", fresh=not asked.overwrite)
    if asked.knn is None:
        if asked.pool is not None:
            raise UserError(f"-pool {asked.pool}: chooses the features that -knn compares; give that too.")
        if asked.plain_votes:
            raise UserError("-plain_votes: says how the images that -knn finds vote; give that too.")
    else:
        if others := [name for name in OF_CLASSIFIER if name in line.given]:
            raise UserError(f"-{others[0]}: does not go with -knn, which has no classifier and no probabilities.")
        if asked.part in MEMORISED:
            raise UserError(f"-part {asked.part}: the training images vote, so -knn needs other ones: val or test.")
    for given, flag in ((asked.knn, "-knn"), (asked.calibrate, "-calibrate"), (both, f"-weights {BOTH}")):
        if several and given:
            raise UserError(f"{flag}: takes one model, but {len(asked.model)} are given.")
    if asked.calibrate:
        for name in ("tta", "json", "confusion", "no_calibration"):
            if getattr(asked, name):
                raise UserError(f"-{name}: does not go with -calibrate, which only fits a temperature; leave it out.")
        if asked.part in MEMORISED:
            raise UserError(
                f"-part {asked.part}: the model was trained on these images, and is surer of them than of others; "
                "-calibrate needs val or test."
            )
    if line.run.cfg is not None:
        raise UserError(
            f"-cfg {line.run.cfg}: leave this out. The model is evaluated with the settings that it was trained with; "
            "flags and KEY=VALUE change single settings."
        )
    for key in REFUSED:
        if key in line.run.flags or key in line.run.words:
            where = line.run.flags[key][1] if key in line.run.flags else key
            raise UserError(
                f"{where}: leave this out; the model is the first argument, and is evaluated as it was trained."
            )
