"""The end of a run: how far to trust its best metric, and what comes next."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from datasets import comes_unsplit, has_test
from engine.machine.device import Run
from engine.measure.meters import Best, Position
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.program import start_again, tool
from utils.record.history import History
from utils.record.predictions import read_predictions
from utils.record.run_folder import CONFIG, FOLDS, copies_in_words, known_to_training, read_data
from utils.statistics.classes import BY_CLASS
from utils.statistics.groups import Groups, effective_images
from utils.statistics.proportions import wilson
from utils.text import counted, some_of
from vitamp.metrics import AVERAGE, BALANCED, NO_LABELS, TOP1, Metric, always_guessing, metric_named

if TYPE_CHECKING:
    from engine.trainer import Trainer

MOST = 6
"""Sentences at the end of a run. `strange` may have any number, the least important ones last."""
# Strange:
FEWEST_IMAGES = 10
"""So many images of a class,"""


NEARLY_ALL = 0.9
"""of which this fraction is taken for one other;"""


FAR = 15.0
"""points below the folds"""


FEW = 100
"""Validation images, below which folds are advised"""
COMPUTED = f"`{tool('evaluate')}` computes its interval"


def at_end(trainer: Trainer, splits: Splits, history: History) -> list[str]:
    """What the best validation is worth, what is strange about its predictions, and what can be done next."""
    ready = trainer.ready
    config = trainer.config
    folder = trainer.folder
    best = trainer.best
    by = metric_named(best.by)
    labels = ready.val_set.sample_labels()
    groups = ready.val_set.groups()
    known = trainer.best_metrics
    guesses = known.predictions.get("guess") if known and known.value(by.name) == best.figure else None
    context = in_context(by, best.figure, trainer.guess, labels, guesses, groups)
    said = [context]
    copies = [copies_in_words(folder, advice=False)]
    if config.MODEL.starts_at_probe:
        from engine.evaluation.start import gained

        said.append(gained(by, history, folder, best, trainer.position.update))
    if context and best.figure is not None:
        copies.append(favoured(folder, history, config.MODEL.starts_at_probe))
        said.append(flatters(len(history.of("val")), folder, splits))
        said.append(in_folds_instead(len(labels), folder, config.DATA, splits))
    of_copies = " ".join(copies).strip()
    if guesses is None:  # those of the last validation
        table = read_predictions(folder, trainer.position.update) or {}
        guesses = table.get("guess", table.get(f"{AVERAGE.prefix}guess"))
    if guesses is not None:
        names = ready.val_set.classes or []
        in_folds = ready.choices.get(FOLDS)
        found = strange(labels.astype(int), guesses.astype(int), names, in_folds, trainer.probe, groups)
        room = MOST - len(list(filter(None, [*said, of_copies])))
        said += found[:room]
    said.append(of_copies)
    said.append(next_commands(trainer.run, trainer.position, best, folder, trainer.paused))
    return said


def in_context(
    metric: Metric,
    value: float | None,
    guess: float | None,
    labels: np.ndarray,
    guesses: np.ndarray | None = None,
    groups: Sequence[str] = (),
) -> str:
    """How far noise may have moved a metric, and what guessing would reach; '' if there is nothing to say.

    `labels`, `guesses`, `groups`: of each image; a resumed run does not know the guesses of an earlier validation.
    """
    parts = list[str]()
    grouped = ""
    by_class = metric in BY_CLASS
    if (metric.counts_images or by_class) and value is not None:
        if by_class:
            how = _of_classes(metric, labels, guesses, groups)
        elif groups and (guesses is None or metric is not TOP1):
            how = f": {COMPUTED}"
        else:
            images = len(labels) if guesses is None else effective_images(guesses == labels, groups)
            how = f": 95 % interval {wilson(value, images).words()}"
        parts.append(f"{metric.words} {metric.number(value)} on {counted(len(labels), 'image')}{how}")
        grouped = of_groups(groups)
    if guess is not None and not by_class:
        parts.append(always_guessing(guess, value if metric == TOP1 else None))
    if not parts:
        return ""
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}. {grouped}".rstrip()


def _of_classes(metric: Metric, labels: np.ndarray, guesses: np.ndarray | None, groups: Sequence[str]) -> str:
    """The smallest class, the interval of balanced accuracy or macro F1, and what guessing would reach."""
    sizes = np.bincount(labels)
    present = sizes[sizes > 0]
    how = COMPUTED
    if guesses is not None:
        interval_of, _ = BY_CLASS[metric]
        found = interval_of(labels, guesses, int(max(labels.max(), guesses.max())) + 1, groups)
        how = f"95 % interval {found.words()}" if found else "too few images per class for an interval"
    guessing = f"; always guessing one class: {100 / len(present):.1f} %" if metric is BALANCED else ""
    return f", of which the smallest of {len(present)} classes has {present.min()}: {how}{guessing}"


def of_groups(groups: Sequence[str]) -> str:
    """A sentence about intervals where images resemble each other in groups (DATA.GROUP); '' without groups."""
    number = len(set(groups))
    if not 0 < number < len(groups):
        return ""
    return f"The {len(groups):,} images are {counted(number, 'group')} (DATA.GROUP), which the intervals allow for."


class Splits(NamedTuple):
    """What advice needs to know of the data's splits. A run asks before it trains, since data may go meanwhile."""

    unsplit: bool = False
    """The program makes the validation split."""
    test: bool = False
    """There is a test split that is not used for validation."""


def splits_of(data: DataConfig) -> Splits:
    with suppress(UserError):
        return Splits(comes_unsplit(data), has_test(data))
    return Splits()


def flatters(validations: int, run: Path, splits: Splits) -> str:
    """A sentence about a metric of the best checkpoint on the images that chose it; '' after one validation."""
    if validations < 2:
        return ""
    words = f"This is the best of {validations} validations on these images, so it flatters"
    if splits.test:
        command = f"{tool('evaluate')} {shlex.quote(str(run))} -part test"
        return f"{words}. Measure on the test images, which chose nothing, once you have decided: `{command}`."
    return f"{words}. Only a test split, of images that choose nothing, shows what to expect (docs/splits.md)."


def favoured(folder: Path, history: History, of_probe: bool) -> str:
    """A sentence, if known images favour what is chosen on validation. `of_probe`: training began with a probe."""
    if len(history.of("val")) < 2 or not known_to_training(read_data(folder)):
        return ""
    probe = "the probe, which works like nearest neighbours, and " if of_probe else ""
    return f"Copies in validation favour {probe}checkpoints that remember them: on new images, others may be better."


def in_folds_instead(images: int, run: Path, data: DataConfig, splits: Splits) -> str:
    """A sentence about a validation split that is too small to judge by; '' where folds cannot help."""
    if images >= FEW or data.FOLD is not None or not splits.unsplit:
        return ""
    words = shlex.join(["-cfg", str(run / CONFIG), "-folds", "5", "-output", f"{run}-folds"])
    verb = "says" if images == 1 else "say"
    few = f"{counted(images, 'validation image')} {verb} little"
    return f"{few}. To judge by all images, each once, train on five folds: `{tool('compare')} {words}`."


def strange(
    labels: np.ndarray,
    guesses: np.ndarray,
    names: Sequence[str],
    in_folds: float | None,
    probe: np.ndarray | None = None,
    groups: Groups = (),
) -> list[str]:
    """What looks wrong with images rather than with the model, and what it may be; and classes never recognised.

    `in_folds`: percent, top-1 of a classifier on training images that it did not see. `probe`: its guesses, where
    training may have lowered top-1.
    """
    said = list[str]()
    hit = labels == guesses
    known = labels == (guesses if probe is None else probe)
    top1 = 100 * float(known.mean())
    independent = effective_images(known, groups)

    def called(label: int) -> str:
        return names[label] if label < len(names) else str(label)

    if in_folds is not None and wilson(top1, independent).high < in_folds - FAR:
        said.append(
            f"Only {top1:.1f} % of these images are recognised, and {in_folds:.1f} % in folds of the training images: "
            "these images may be from another source, or their class folders swapped."
        )
    said += _taken_for_another(labels, guesses, called)
    images = np.bincount(labels)
    recognised = np.bincount(labels[hit], minlength=len(images)) > 0
    unseen = np.flatnonzero((images > 0) & ~recognised).tolist()
    if unseen:
        verb = "is" if len(unseen) == 1 else "are"
        words = f"{counted(len(unseen), 'class')} of {np.count_nonzero(images):,} {verb}"
        said.append(f"{words} never recognised: {some_of([called(label) for label in unseen])}.")
    return said


def _taken_for_another(labels: np.ndarray, guesses: np.ndarray, called: Callable[[int], str]) -> list[str]:
    """Classes of which nearly all images are taken for one other class.

    Nothing is said of them if the other classes are not recognised either, as by a model that has learnt little.
    """
    said = list[str]()
    hit = labels == guesses
    images = np.bincount(labels)
    number = int(max(labels.max(), guesses.max())) + 1
    taken = dict[int, tuple[int, int]]()
    pairs, counts = np.unique(labels * number + guesses, return_counts=True)
    for pair, times in zip(pairs, counts, strict=True):
        one, other = divmod(int(pair), number)
        if one != other and images[one] >= FEWEST_IMAGES and times >= NEARLY_ALL * images[one]:
            taken[one] = other, int(times)
    for one, (other, times) in taken.items():
        words = f"{times} of {images[one]} images of {called(one)} are taken for {called(other)}"
        back, others = taken.get(other, (None, 0))
        if back == one and one < other:
            said.append(f"{words}, and {others} the other way: are their folders swapped?")
        elif back != one and np.count_nonzero(images) > 2 and hit[labels != one].mean() > 0.5:
            said.append(f"{words}: are they of that class, or from another source?")
    return said


def next_commands(run: Run, position: Position, best: Best, folder: Path, paused: bool = False) -> str:
    """Commands to copy, one per line: evaluate, predict, export, report, and resume; those without labels."""
    quoted = shlex.quote(str(folder))
    if run.config.USE:  # the user's own code, which has just been executed
        quoted += " -trust"
    train = run.config.TRAIN
    longer = ""  # settings that let a run that has ended train longer
    if best.is_given_up(train.PATIENCE):
        longer += " TRAIN.PATIENCE=null"
    if position.epoch > train.NUM_EPOCHS:
        longer += f" TRAIN.NUM_EPOCHS={2 * (position.epoch - 1)}"
    if train.MAX_UPDATES is not None and position.update >= train.MAX_UPDATES:
        longer += f" TRAIN.MAX_UPDATES={2 * position.update}"
    commands = {
        "evaluate": f"{tool('evaluate')} {quoted}",
        "predict": f"{tool('predict')} {quoted} IMAGE.jpg",
        "export": f"{tool('export')} {quoted} -to onnx -out {shlex.quote(str(folder / 'model.onnx'))}",
    }
    if run.config.task == NO_LABELS:
        recipe = f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {quoted}"
        commands = {"finetune": start_again(run.world, recipe)}
    title = "Next:"
    if "export" in commands and run.config.DATA.is_plain:
        title = "Next (export -with_resize: a file that does the preprocessing, too):"
    commands["report"] = f"{tool('report')} {quoted}"
    if train.NUM_EPOCHS:
        changed = "" if paused else longer
        commands["resume"] = start_again(run.world, f"-resume {quoted}{changed}")
    lines = [title]
    for name, command in commands.items():
        lines.append(f"  {name:<8}  {command}")
    return "\n".join(lines)
