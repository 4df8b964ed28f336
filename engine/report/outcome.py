"""Writes the sentences at the end of a run: how far to trust its best metric, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from datasets import ImageDataset
from datasets.examine.trust import Doubt
from datasets.exclude import path_in_list
from engine.machine.device import Run
from engine.measure.meters import Best, Position
from engine.report.trust import FEWEST_COMPARED, TOO_LOW, Result, Source, Splits, doubts
from utils.config.data import DataConfig
from utils.program import start_again, tool
from utils.record.history import History
from utils.record.predictions import read_predictions
from utils.record.run_folder import FOLDS, read_data
from utils.statistics.classes import BY_CLASS
from utils.statistics.groups import Groups, effective_images
from utils.statistics.paired import SIGNIFICANCE
from utils.statistics.proportions import wilson
from utils.text import counted, some_of
from vitamp.metrics import AVERAGE, BALANCED, NO_LABELS, TOP1, Metric, always_guessing, metric_named, set_of

if TYPE_CHECKING:
    from engine.trainer import Trainer

MOST_LINES = 4
"""Most lines at the end of a run, the commands and the last one aside"""
FEWEST_IMAGES = 10
"""A class of fewer images is never called strange"""
NEARLY_ALL = 0.9
"""A class is strange if at least this fraction of its images is taken for one other class"""
FAR = 15.0
"""Validation is strange if its top-1 is more points than this below that of folds of the training images"""
FEW_MISTAKES = 5
"""Most mistakes of a validation that are named"""
INTERVAL_BY_TOOL = f"`{tool('evaluate')}` computes its interval"
"""Words in place of an interval, if the predictions that it depends on are not known here"""


def at_end(trainer: Trainer, splits: Splits, history: History) -> list[str]:
    """Say at the end of a run what its best validation is worth, and what can be done next.

    Returns lines for the log, some of which may be '': the best metric; what training gained over the probe that it
    began with; as many reasons to doubt the metric as there is room for; and the block of commands to copy.
    """
    ready = trainer.ready
    config = trainer.config
    folder = trainer.folder
    best = trainer.best
    metric = metric_named(best.by)
    labels = ready.val_set.sample_labels()
    groups = ready.val_set.groups()

    # The best metric, with its interval. The predicted classes are known if this start of the run has measured it.
    metrics = trainer.best_metrics
    best_guesses = None
    if metrics and metrics.value(metric.name) == best.figure:
        best_guesses = metrics.predictions.get("guess")
    lines = [in_context(metric, best.figure, trainer.guess, labels, best_guesses, groups)]

    # What training gained over the probe that it began with.
    if config.MODEL.starts_at_probe:
        from engine.evaluation.start import gained  # only now: other runs do not need it

        lines.append(gained(metric, history, folder, best, trainer.position.update))

    if best.figure is not None:
        result = _best_result(trainer, history, best.figure, best_guesses)
        found = doubts(read_data(folder), result, Source(folder, splits, fold=config.DATA.FOLD is not None))
        room = MOST_LINES - len(list(filter(None, lines)))
        lines += [doubt.words() for doubt in found[:room]]
        if len(found) > room:
            lines[-1] += " The report has more."
    lines.append(next_commands(trainer.run, trainer.position, best, folder, trainer.paused))
    return lines


def _best_result(trainer: Trainer, history: History, value: float, best_guesses: np.ndarray | None) -> Result:
    """Collect what the doubts about the best validation depend on.

    `value`: the best metric. `best_guesses`: the classes that were predicted then; None if they are not known. In their
    place, those of the last validation show what looks wrong with the images.
    """
    ready = trainer.ready
    best = trainer.best
    metric = metric_named(best.by)
    weights, _ = set_of(best.kind)
    labels = ready.val_set.sample_labels()
    groups = ready.val_set.groups()
    result = Result(metric, value, images=len(labels), groups=groups)
    if metric is TOP1:
        result.guess = trainer.guess
    result.validations = len(history.of("val"))
    result.last = history.last(metric).get(weights)
    result.related = read_data(trainer.folder).get("related", [])
    guesses = best_guesses
    if guesses is None:
        table = read_predictions(trainer.folder, trainer.position.update) or {}
        guesses = table.get("guess", table.get(f"{AVERAGE.prefix}guess"))
    if guesses is None:
        return result
    result.problems = strange(
        labels.astype(int),
        guesses.astype(int),
        names=ready.val_set.classes or [],
        in_folds=ready.choices.get(FOLDS),
        probe=trainer.probe,
        groups=groups,
    )
    if best_guesses is not None:
        is_right = labels.astype(int) == best_guesses.astype(int)
        result.is_right = is_right
        if metric is TOP1:
            result.interval = wilson(value, effective_images(is_right, groups))
        named = few_mistakes(ready.val_set, trainer.config.DATA, best_guesses)
        if named is not None:
            result.problems.append(named)
    return result


def in_context(
    metric: Metric,
    value: float | None,
    guess: float | None,
    labels: np.ndarray,
    guesses: np.ndarray | None = None,
    groups: Sequence[str] = (),
) -> str:
    """Say how far noise may have moved a metric, and what always guessing would reach; '' if neither applies.

    `value`: value of the metric; None without a validation. `guess`: accuracy in percent of always guessing the most
    frequent class; None if that means nothing. `labels`, `guesses`, `groups`: class, predicted class and group of each
    validation image. `guesses` is None if the predictions are not known, as for a validation before the run was
    resumed; `groups` is empty without groups.
    """
    predicted = guesses  # of each image, unlike `guess`
    parts = list[str]()
    on_groups = ""
    is_mean_of_classes = metric in BY_CLASS
    if value is not None and (metric.counts_images or is_mean_of_classes):
        if is_mean_of_classes:
            interval = _words_on_classes(metric, labels, predicted, groups)
        elif groups and (predicted is None or metric is not TOP1):
            # Images of a group resemble each other, so they count as fewer. How many depends on which images are right,
            # and the predicted classes say that for top-1 alone.
            interval = f": {INTERVAL_BY_TOOL}"
        else:
            images = len(labels) if predicted is None else effective_images(predicted == labels, groups)
            interval = f": 95 % interval {wilson(value, images).words()}"
        parts.append(f"{metric.words} {metric.number(value)} on {counted(len(labels), 'image')}{interval}")
        on_groups = of_groups(groups)
    if guess is not None and not is_mean_of_classes:
        parts.append(always_guessing(guess, value if metric == TOP1 else None))
    if not parts:
        return ""
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}. {on_groups}".rstrip()


def _words_on_classes(metric: Metric, labels: np.ndarray, guesses: np.ndarray | None, groups: Sequence[str]) -> str:
    """Continue the sentence "<metric> <value> on 100 images" for a metric that is a mean over classes.

    Returns words that begin with ", of which": the size of the smallest class, on which the interval depends most, and
    the interval. For balanced accuracy, also the accuracy of always guessing one class. `guesses`: predicted classes;
    None if they are not known.
    """
    sizes = np.bincount(labels)
    sizes = sizes[sizes > 0]
    interval_words = INTERVAL_BY_TOOL
    if guesses is not None:
        interval_of, _ = BY_CLASS[metric]
        classes = int(max(labels.max(), guesses.max())) + 1
        interval = interval_of(labels, guesses, classes, groups)
        interval_words = f"95 % interval {interval.words()}" if interval else "too few images per class for an interval"
    guessing = f"; always guessing one class: {100 / len(sizes):.1f} %" if metric is BALANCED else ""
    return f", of which the smallest of {len(sizes)} classes has {sizes.min()}: {interval_words}{guessing}"


def of_groups(groups: Sequence[str]) -> str:
    """Say that intervals allow for images that resemble each other in groups (DATA.GROUP); '' without groups."""
    number = len(set(groups))
    if not 0 < number < len(groups):
        return ""
    return f"The {len(groups):,} images are {counted(number, 'group')} (DATA.GROUP), which the intervals allow for."


def strange(
    labels: np.ndarray,
    guesses: np.ndarray,
    names: Sequence[str],
    in_folds: float | None,
    probe: np.ndarray | None = None,
    groups: Groups = (),
) -> list[Doubt]:
    """Return what looks wrong with the validation images rather than with the model.

    `labels`, `guesses`: class and predicted class of each validation image. `names`: of the classes; those that lack
    one are named by their numbers. `in_folds`: top-1 in percent that a linear probe reached in cross-validation on the
    training images; None if it was not measured. `probe`: classes that this probe predicts for the validation images;
    None if unknown, then the `guesses` are compared with `in_folds`. `groups`: of each image, if there are any.
    """
    found = list[Doubt]()
    right = labels == guesses
    name_of = partial(_class_name, names)

    # Top-1 far below that in folds of the training images. That was measured with the probe, so the probe's top-1 here
    # is compared with it: training may have lowered top-1 since.
    compared_right = labels == (guesses if probe is None else probe)
    top1 = 100 * float(compared_right.mean())
    independent = effective_images(compared_right, groups)
    if in_folds is not None and wilson(top1, independent).high < in_folds - FAR:
        sentence = f"only {top1:.1f} % of these images are recognised, and {in_folds:.1f} % in folds of training images"
        advice = "These images may be from another source, or their class folders swapped"
        found.append(Doubt("source", sentence, top1 - in_folds, advice, effect_in_words=TOO_LOW))

    # Classes whose images are nearly all taken for another class.
    mistaken = _mistaken_classes(labels, guesses, name_of)
    for doubt in mistaken.values():
        if doubt not in found:  # two swapped classes have one
            found.append(doubt)

    # Other classes of which not one image is recognised, though they have so many that this is more than chance.
    images = np.bincount(labels)
    recognised = np.bincount(labels[right], minlength=len(images)) > 0
    none_by_chance = (1 - right.mean()) ** images  # probability if the classes are equally hard
    unexpected = (images >= FEWEST_COMPARED) & (none_by_chance < SIGNIFICANCE) & ~recognised
    never = [label for label in np.flatnonzero(unexpected).tolist() if label not in mistaken]
    if never:
        verb = "is" if len(never) == 1 else "are"
        other = "other class" if mistaken else "class"
        counts = f"{counted(len(never), other)} of {np.count_nonzero(images):,} {verb}"
        sentence = f"{counts} never recognised: {some_of([name_of(label) for label in never])}"
        points = -100 * images[never].sum() / len(labels)
        found.append(Doubt("classes", sentence, points, effect_in_words="Not learnt"))
    return found


def _class_name(names: Sequence[str], label: int) -> str:
    """Return the name of a class; its number if it has none."""
    return names[label] if label < len(names) else str(label)


def few_mistakes(val_set: ImageDataset, data: DataConfig, guesses: np.ndarray) -> Doubt | None:
    """Name the validation images that are not recognised, so that people look at them: their labels may be wrong.

    Returns None if there are none or more than `FEW_MISTAKES`, or if the images have no names. No image is read.
    `guesses`: predicted class of each image in the best validation.
    """
    samples = val_set.single_images()
    labels = val_set.sample_labels().astype(int)
    mistaken = np.flatnonzero(labels != guesses)
    if samples is None or not 0 < len(mistaken) <= FEW_MISTAKES:
        return None
    name_of = partial(_class_name, val_set.classes or [])
    images = list[str]()
    for index in mistaken.tolist():
        name = path_in_list(samples.name(index), data)
        images.append(f"{name} (labelled {name_of(labels[index])}, predicted {name_of(guesses[index])})")
    return Doubt(
        "labels",
        f"{counted(len(images), 'mistake')} in the best validation, {'; '.join(images)}",
        points=-100 * len(images) / len(labels),
        effect_in_words=TOO_LOW,
        advice="Look whether their labels are right",
        images=[samples.name(index) for index in mistaken.tolist()],
    )


def _mistaken_classes(labels: np.ndarray, guesses: np.ndarray, name_of: Callable[[int], str]) -> dict[int, Doubt]:
    """Return, by class, a doubt about each of which nearly all images are taken for one other class.

    There is none if the other classes are not recognised either, as by a model that has learnt little. Two swapped
    classes have the same doubt.
    """
    found = dict[int, Doubt]()
    right = labels == guesses
    images = np.bincount(labels)
    classes = int(max(labels.max(), guesses.max())) + 1

    # Class -> the one that nearly all its images are taken for, and their number.
    taken_for = dict[int, tuple[int, int]]()
    pairs, counts = np.unique(labels * classes + guesses, return_counts=True)
    for pair, count in zip(pairs, counts, strict=True):
        label, guess = divmod(int(pair), classes)
        if label != guess and images[label] >= FEWEST_IMAGES and count >= NEARLY_ALL * images[label]:
            taken_for[label] = guess, int(count)

    for label, (guess, count) in taken_for.items():
        words = f"{count} of {images[label]} images of {name_of(label)} are taken for {name_of(guess)}"
        guess_taken_for, count_back = taken_for.get(guess, (None, 0))
        is_swapped = guess_taken_for == label
        if is_swapped:
            sentence = f"{words}, and {count_back} the other way"
            points = -100 * (count + count_back) / len(labels)
            doubt = Doubt("swapped", sentence, points=points, advice="Are their folders swapped?")
            found[label] = found.get(guess, doubt)
            continue
        # Only if the model recognises most images of the other classes, of which there must be two or more.
        if np.count_nonzero(images) > 2 and right[labels != label].mean() > 0.5:
            advice = "Are they of that class, or from another source?"
            found[label] = Doubt("mistaken", words, points=-100 * count / len(labels), advice=advice)
    return found


def next_commands(run: Run, position: Position, best: Best, folder: Path, paused: bool = False) -> str:
    """Write commands to copy, one per line: evaluate, predict, export, report and resume.

    A model that learned without labels is fine-tuned in place of the first three. `paused`: the run resumes as it is;
    otherwise with settings that let it train longer.
    """
    run_words = shlex.quote(str(folder))
    if run.config.USE:  # the user's own code, which has just been executed
        run_words += " -trust"
    train = run.config.TRAIN

    # Commands that use the model.
    title = "Next:"
    if run.config.task == NO_LABELS:
        recipe = f"-cfg RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {run_words}"
        commands = {"finetune": start_again(run.world, recipe)}
    else:
        commands = {
            "evaluate": f"{tool('evaluate')} {run_words}",
            "predict": f"{tool('predict')} {run_words} IMAGE.jpg",
            "export": f"{tool('export')} {run_words} -to onnx -out {shlex.quote(str(folder / 'model.onnx'))}",
        }
        if run.config.DATA.is_plain:  # -with_resize does not take images of other channels or bits
            title = "Next (export -with_resize: a file that does the preprocessing, too):"
    commands["report"] = f"{tool('report')} {run_words}"

    # The command that resumes training. A run that has reached one of its limits needs a new one.
    limits = ""
    if best.is_given_up(train.PATIENCE):
        limits += " TRAIN.PATIENCE=null"
    if position.epoch > train.NUM_EPOCHS:
        limits += f" TRAIN.NUM_EPOCHS={2 * (position.epoch - 1)}"
    if train.MAX_UPDATES is not None and position.update >= train.MAX_UPDATES:
        limits += f" TRAIN.MAX_UPDATES={2 * position.update}"
    if train.NUM_EPOCHS:
        changes = "" if paused else limits
        commands["resume"] = start_again(run.world, f"-resume {run_words}{changes}")
    lines = [title]
    for name, command in commands.items():
        lines.append(f"  {name:<8}  {command}")
    return "\n".join(lines)
