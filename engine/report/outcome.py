"""Writes the sentences at the end of a run: how far to trust its best metric, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datasets import ImageDataset, comes_unsplit, has_test
from datasets.exclude import path_in_list
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
from utils.statistics.proportions import Interval, newcombe, wilson
from utils.text import counted, some_of
from vitamp.metrics import AVERAGE, BALANCED, NO_LABELS, TOP1, Metric, always_guessing, metric_named

if TYPE_CHECKING:
    from engine.trainer import Trainer

MOST = 6
"""Most sentences at the end of a run. The last ones of `strange`, which are the least important, are left out"""
# Predictions are strange:
FEWEST_IMAGES = 10
"""if a class with at least so many images"""


NEARLY_ALL = 0.9
"""has at least this fraction of them taken for one other class;"""


FAR = 15.0
"""or if top-1 is more than so many points below that of folds of the training images"""


FEW_MISTAKES = 5
"""Most mistakes of a validation that are named"""
FEW = 100
"""With fewer validation images than this, folds are advised"""
INTERVAL_BY_TOOL = f"`{tool('evaluate')}` computes its interval"
"""Words in place of an interval, if the predictions that it depends on are not known here"""


def at_end(trainer: Trainer, splits: Splits, history: History) -> list[str]:
    """Say at the end of a run what its best validation is worth, what looks wrong, and what can be done next.

    Returns sentences for the log, some of which may be ''. The last one is the block of commands to copy.
    """
    ready = trainer.ready
    config = trainer.config
    folder = trainer.folder
    best = trainer.best
    deciding_metric = metric_named(best.by)
    labels = ready.val_set.sample_labels()
    groups = ready.val_set.groups()

    # The best metric, with its interval. The predicted classes are known if this start of the run has measured it.
    metrics = trainer.best_metrics
    best_guesses = None
    if metrics and metrics.value(deciding_metric.name) == best.figure:
        best_guesses = metrics.predictions.get("guess")
    context = in_context(deciding_metric, best.figure, trainer.guess, labels, best_guesses, groups)
    sentences = [context]

    # What training gained over the probe that it began with.
    if config.MODEL.starts_at_probe:
        from engine.evaluation.start import gained  # only now: other runs do not need it

        sentences.append(gained(deciding_metric, history, folder, best, trainer.position.update))

    # Why the best metric may be too high, and how to measure a better one. What copies of training images in validation
    # do to it comes last, after the sentences below.
    sentences_on_copies = [copies_in_words(folder, advice=False)]
    if context and best.figure is not None:
        sentences.append(flatters(len(history.of("val")), folder, splits))
        sentences.append(advise_folds(len(labels), folder, config.DATA, splits))
        sentences_on_copies.append(favoured(folder, history, config.MODEL.starts_at_probe))
    if best_guesses is not None:
        data = read_data(folder)
        is_right = labels.astype(int) == best_guesses.astype(int)
        sentences += [on_relatives(is_right, data.get("related", []), groups), by_shortcut(data)]
    on_copies = " ".join(sentences_on_copies).strip()

    # What looks wrong with the images, by the best predictions, or else by those of the last validation: as many of
    # these sentences as there is room for.
    guesses = best_guesses
    if guesses is None:
        table = read_predictions(folder, trainer.position.update) or {}
        guesses = table.get("guess", table.get(f"{AVERAGE.prefix}guess"))
    if guesses is not None:
        names = ready.val_set.classes or []
        in_folds = ready.choices.get(FOLDS)
        problems = strange(labels.astype(int), guesses.astype(int), names, in_folds, trainer.probe, groups)
        written = list(filter(None, [*sentences, on_copies]))
        room = MOST - len(written)
        sentences += problems[:room]

    sentences.append(on_copies)
    sentences.append(next_commands(trainer.run, trainer.position, best, folder, trainer.paused))
    return sentences


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


class Splits(NamedTuple):
    """Facts about the data's splits that advice depends on.

    A run collects them before it trains, since the data may be gone at its end.
    """

    unsplit: bool = False
    """The program makes the validation split."""
    test: bool = False
    """There is a test split that is not used for validation."""


def splits_of(data: DataConfig) -> Splits:
    """Collect the facts about the splits of `data`; those of no data if it cannot be read."""
    with suppress(UserError):
        return Splits(comes_unsplit(data), has_test(data))
    return Splits()


def flatters(validations: int, run: Path, splits: Splits) -> str:
    """Say that the metric of the best checkpoint flatters on the images that chose it; '' after a single validation."""
    if validations < 2:
        return ""
    words = f"This is the best of {validations} validations on these images, so it flatters"
    if splits.test:
        command = f"{tool('evaluate')} {shlex.quote(str(run))} -part test"
        return f"{words}. Measure on the test images, which chose nothing, once you have decided: `{command}`."
    return f"{words}. Only a test split, of images that choose nothing, shows what to expect (docs/splits.md)."


def favoured(folder: Path, history: History, of_probe: bool) -> str:
    """Say that copies of training images in the validation split favour some checkpoints.

    Returns '' if there are no such copies, or if a single validation left no choice among checkpoints. `of_probe`:
    training began with a linear probe, which copies favour too.
    """
    validations = len(history.of("val"))
    if validations < 2 or not known_to_training(read_data(folder)):
        return ""
    probe = "the probe, which works like nearest neighbours, and " if of_probe else ""
    return f"Copies in validation favour {probe}checkpoints that remember them: on new images, others may be better."


def on_relatives(is_right: np.ndarray, related: Sequence[int], groups: Groups) -> str:
    """Compare top-1 on images that have relatives among the training images with top-1 on the others.

    `is_right`, `groups`: whether each image is recognised, and its group. `related`: indices of those with relatives.
    Returns '' if there are none.
    """
    has_relatives = np.zeros(len(is_right), bool)
    has_relatives[[index for index in related if index < len(is_right)]] = True
    number = np.count_nonzero(has_relatives)
    if number == 0:
        return ""
    if has_relatives.all():
        return "All of these images have relatives in training (copies, look-alikes or images of their group)."
    group_of = np.array(groups) if len(groups) else np.arange(len(is_right))
    percents = list[float]()
    independent = list[float]()
    texts = list[str]()
    for chosen in (has_relatives, ~has_relatives):
        percent = 100 * float(is_right[chosen].mean())
        images = effective_images(is_right[chosen], group_of[chosen])
        percents.append(percent)
        independent.append(images)
        texts.append(f"{percent:.2f} % ({wilson(percent, images).words()})")
    with_relatives, without = texts
    sentence = (
        f"{number:,} of these images have relatives in training (copies, look-alikes or images of their group): "
        f"top-1 {with_relatives} on them, {without} on the other {np.count_nonzero(~has_relatives):,}"
    )
    lowest_difference, _ = newcombe((percents[0], percents[1]), independent)
    advice = ", about what to expect on new images like these" if lowest_difference > 0 else ""
    return f"{sentence}{advice}."


def by_shortcut(data: dict[str, Any]) -> str:
    """Say how many validation images are recognised without the picture; '' if none of these shortcuts was found.

    `data`: the content of data.json.
    """
    of_files = [shortcut for shortcut in data.get("shortcuts", []) if shortcut["of_file"] and shortcut["in_validation"]]
    if not of_files:
        return ""
    strongest = max(of_files, key=lambda shortcut: shortcut["validation_top1"])
    interval = Interval(*strongest["validation_interval"])
    return (
        f"Without the picture, {strongest['properties']} alone recognise {strongest['validation_top1']:.1f} % of these "
        f"images ({interval.words()}), so top-1 here cannot tell whether the model knows the pictures or their files."
    )


def mistakes_by_name(val_set: ImageDataset, data: DataConfig, guesses: np.ndarray) -> str:
    """Name the validation images that are not recognised, so that people look at them: their labels may be wrong.

    Returns '' if there are none or more than `FEW_MISTAKES`, or if the images have no names. No image is read.
    `guesses`: predicted class of each image in the best validation.
    """
    samples = val_set.single_images()
    labels = val_set.sample_labels().astype(int)
    mistaken = np.flatnonzero(labels != guesses)
    if samples is None or not 0 < len(mistaken) <= FEW_MISTAKES:
        return ""
    names = val_set.classes or []
    images = list[str]()
    for index in mistaken.tolist():
        label = _class_name(names, labels[index])
        guess = _class_name(names, guesses[index])
        images.append(f"{path_in_list(samples.name(index), data)} (labelled {label}, predicted {guess})")
    number = counted(len(images), "mistake")
    return f"{number} in the best validation; look whether the label is right: {'; '.join(images)}."


def _class_name(names: Sequence[str], label: int) -> str:
    """Return the name of a class; its number if it has none."""
    return names[label] if label < len(names) else str(label)


def advise_folds(images: int, run: Path, data: DataConfig, splits: Splits) -> str:
    """Advise to train on folds if the validation split is too small to judge by; '' if it is not, or they cannot help.

    `images`: number of validation images.
    """
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
    """Say what looks wrong with the validation images rather than with the model, the most important sentences first.

    `labels`, `guesses`: class and predicted class of each validation image. `names`: of the classes; those that lack
    one are named by their numbers. `in_folds`: top-1 in percent that a linear probe reached in cross-validation on the
    training images; None if it was not measured. `probe`: classes that this probe predicts for the validation images;
    None if unknown, then the `guesses` are compared with `in_folds`. `groups`: of each image, if there are any.
    """
    sentences = list[str]()
    right = labels == guesses
    name_of = partial(_class_name, names)

    # Top-1 far below that in folds of the training images. That was measured with the probe, so the probe's top-1 here
    # is compared with it: training may have lowered top-1 since.
    compared_right = labels == (guesses if probe is None else probe)
    top1 = 100 * float(compared_right.mean())
    independent = effective_images(compared_right, groups)
    if in_folds is not None and wilson(top1, independent).high < in_folds - FAR:
        sentences.append(
            f"Only {top1:.1f} % of these images are recognised, and {in_folds:.1f} % in folds of the training images: "
            "these images may be from another source, or their class folders swapped."
        )

    # Classes whose images are nearly all taken for another class.
    sentences += _describe_mistaken_classes(labels, guesses, name_of)

    # Classes of which not one image is recognised.
    images = np.bincount(labels)
    recognised = np.bincount(labels[right], minlength=len(images)) > 0
    never = np.flatnonzero((images > 0) & ~recognised).tolist()
    if never:
        verb = "is" if len(never) == 1 else "are"
        words = f"{counted(len(never), 'class')} of {np.count_nonzero(images):,} {verb}"
        sentences.append(f"{words} never recognised: {some_of([name_of(label) for label in never])}.")
    return sentences


def _describe_mistaken_classes(labels: np.ndarray, guesses: np.ndarray, name_of: Callable[[int], str]) -> list[str]:
    """Write a sentence about each class of which nearly all images are taken for one other class.

    There is no sentence if the other classes are not recognised either, as by a model that has learnt little.
    """
    sentences = list[str]()
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
            if label < guess:  # one sentence for both
                sentences.append(f"{words}, and {count_back} the other way: are their folders swapped?")
            continue
        # Only if the model recognises most images of the other classes, of which there must be two or more.
        if np.count_nonzero(images) > 2 and right[labels != label].mean() > 0.5:
            sentences.append(f"{words}: are they of that class, or from another source?")
    return sentences


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
