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

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.command_line import (
    AVERAGE,
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
from utils.record.tasks import ONE_LABEL, SEVERAL_LABELS
from utils.record.weight_sets import BETTER, CHOICES, CHOICES_IN_WORDS, SETS, WeightSet

if TYPE_CHECKING:
    from engine.saved.trained import Trained
    from tools.common.parts import Part

BOTH = "both"

OWN = (
    Flag(
        "weights",
        f"{CHOICES_IN_WORDS}, or {BOTH} side by side",
        "WHICH",
        default=BETTER,
        choices=(*CHOICES, BOTH),
    ),
    AVERAGE,
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
    (model, *others), weights, bins = (getattr(line.asked, name) for name in ("model", "weights", "bins"))
    out, matrix = line.file("json", ".json"), line.file("confusion", ".csv", ".png")
    both = weights == BOTH
    _check(line, matrix if both else None)
    line.show_gpus()

    given = _given(line)
    log.setLevel("WARNING")  # building the model logs what the training has logged already

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from engine.saved.trained import load_trained
    from tools.common.parts import open_part
    from tools.evaluate import averaged, calibrate, knn, one, several

    if line.asked.knn is not None:
        return _written(out, *knn.evaluate_neighbours(line, given))
    if others:
        return _written(out, *averaged.evaluate_average(line, given, bins, matrix))
    trained = load_trained(model, BETTER if both else weights, given=given, **_how(line))
    trained.look(line.asked.tta)
    for which in SETS if both else ():
        trained.chosen.other(which)  # an error if it is not there
    task = {ONE_LABEL: one, SEVERAL_LABELS: several}[trained.task.kind]
    if task.NO_MATRIX and matrix is not None:
        raise UserError(f"-confusion: {task.NO_MATRIX}.")
    if line.asked.calibrate:
        calibrate.check(trained)
    data, notes = open_part(trained, {*given.flags, *given.words})
    log.setLevel("INFO")
    if not both:
        log.info("%s: %s", model, trained.chosen.words)
    for note in notes:
        log.info("%s.", note)
    sets = SETS if both else (trained.chosen.which,)
    if line.asked.calibrate:
        for which in sets:
            trained.take(which)
            log.info("%s", calibrate.calibrate(trained, data, bins))
        return EXIT_DONE
    if views := trained.views.words():
        log.info("-tta %s: %s.", line.asked.tta, views)
    found, temperatures = _of_sets(trained, sets, task, data, bins)
    log.info("%s", task.text(trained, data, found))
    _say_copies(trained, len(data.dataset))
    if matrix is not None:
        for which, figures in found.items():
            path = _matrix_of(matrix, which) if both else matrix
            task.write_matrix(path, figures, trained.names())
            log.info("Confusion matrix: %s", path)
    figures_as_json = {which.name: task.figures_as_json(figures) for which, figures in found.items()}
    return _written(out, _about(line, trained, data.title, temperatures), figures_as_json)


def _of_sets(
    trained: Trained, sets: Sequence[WeightSet], task: Any, data: Part, bins: int
) -> tuple[dict[WeightSet, Any], dict[str, float]]:
    """Metrics of each set of weights, and its temperature."""
    from tools.evaluate import own

    with_own = own.executes_metrics(trained)
    found: dict[WeightSet, Any] = {}
    temperatures: dict[str, float] = {}
    for which in sets:
        if which != trained.chosen.which:
            trained.take(which)
        _say_calibration(trained)
        found[which], temperatures[which.name] = task.evaluated(trained, data, bins), trained.temperature
        if with_own:
            found[which] = replace(found[which], own=own.own_metrics(trained, data))
    return found, temperatures


def _given(line: ToolLine) -> CommandLine:
    """Settings that override the run's."""
    default = None if line.asked.knn is None else "val"  # its training images vote, so it needs both splits
    part = {"DATA.PART": (line.asked.part or default, "-part")} if line.asked.part or default else {}
    return replace(line.run, flags={**line.run.flags, "EVAL": (True, "evaluate.py"), **part})


def _say_copies(trained: Trained, images: int) -> None:
    from engine.evaluated_data import copies_evaluated

    if copies := copies_evaluated(trained.config, trained.chosen, images):
        log.info("%s", copies)


def _say_calibration(trained: Trained) -> None:
    if words := trained.chosen.describe_calibration(trained.calibrated):
        label = trained.chosen.which.label
        log.info("%s%s weights: %s.", label[0].upper(), label[1:], words)


def _about(line: ToolLine, trained: Trained, title: str, temperatures: dict[str, float]) -> dict[str, Any]:
    """What the JSON file says of the evaluation."""
    return {
        "model": trained.config.MODEL.NAME,
        "source": trained.chosen.origin,
        "precision": trained.precision.name,
        "tta": line.asked.tta,
        "temperature": temperatures,
        "data": title,
        "classes": trained.names(),
    }


def _written(out: Path | None, about: dict[str, Any], figures: dict[str, Any]) -> int:
    if out is not None:
        with writing(out, "-json"):
            write_json(out, {**about, "figures": figures})
        log.info("All metrics: %s", out)
    return EXIT_DONE


def _matrix_of(matrix: Path, which: WeightSet) -> Path:
    """File of one of both matrices."""
    return matrix.with_stem(f"{matrix.stem}_{which.name}")


def _how(line: ToolLine) -> dict[str, Any]:
    """More arguments of `load_trained`."""
    plain = line.asked.no_calibration or line.asked.calibrate
    return {"calibrated": not plain, "average": line.asked.average}


def _check(line: ToolLine, matrix: Path | None) -> None:
    """`matrix`: the file given, of which both sets of weights get one."""
    if matrix is not None:
        for which in SETS:
            check_output_file(_matrix_of(matrix, which), "-confusion", fresh=not line.asked.overwrite)
    _check_knn(line)
    several = len(line.asked.model) > 1
    for given, flag in ((line.asked.calibrate, "-calibrate"), (line.asked.weights == BOTH, f"-weights {BOTH}")):
        if several and given:
            raise UserError(f"{flag}: takes one model, but {len(line.asked.model)} are given.")
    if line.asked.calibrate:
        for name in ("average", "tta", "json", "confusion", "no_calibration"):
            if getattr(line.asked, name):
                raise UserError(f"-{name}: does not go with -calibrate, which only fits a temperature; leave it out.")
        if line.asked.part in MEMORISED:
            raise UserError(
                f"-part {line.asked.part}: the model was trained on these images, and is surer of them than of others; "
                "-calibrate needs val or test."
            )
    if line.asked.average and line.asked.weights == BOTH:
        raise UserError(f"-average: takes one set of weights; give -weights model or ema instead of {BOTH}.")
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


def _check_knn(line: ToolLine) -> None:
    asked = line.asked
    if asked.knn is None:
        if asked.pool is not None:
            raise UserError(f"-pool {asked.pool}: chooses the features that -knn compares; give that too.")
        if asked.plain_votes:
            raise UserError("-plain_votes: says how the images that -knn finds vote; give that too.")
        return
    if len(asked.model) > 1:
        raise UserError(f"-knn: takes one model, but {len(asked.model)} are given.")
    if others := [name for name in OF_CLASSIFIER if name in line.given]:
        raise UserError(f"-{others[0]}: does not go with -knn, which has no classifier and no probabilities.")
    if asked.part in MEMORISED:
        raise UserError(f"-part {asked.part}: the training images vote, so -knn needs other ones: val or test.")
