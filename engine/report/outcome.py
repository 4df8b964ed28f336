"""The end of a run: how far to trust its best metric, and what comes next."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets import comes_unsplit, has_test
from engine.machine.device import Run
from engine.measure.meters import Best, Position
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.program import start_again, tool
from utils.record.history import History
from utils.record.predictions import GROUPS, PROBE, read_predictions
from utils.record.run_folder import CONFIG, known_to_training, read_data
from utils.statistics.classes import (
    balanced_accuracy_by_image,
    balanced_accuracy_interval,
    macro_f1_by_image,
    macro_f1_interval,
)
from utils.statistics.groups import Groups, effective_images
from utils.statistics.paired import half_width_of_mean, interval_and_test
from utils.statistics.proportions import wilson
from utils.text import counted, some_of
from vitamp.metrics import BALANCED, MACRO_F1, NO_LABELS, TOP1, Metric, against_guessing, always_guessing

# Strange:
FEWEST_IMAGES = 10
"""So many images of a class,"""


NEARLY_ALL = 0.9
"""of which this fraction is taken for one other;"""


FAR = 15.0
"""points below the folds"""


BY_CLASS = {
    BALANCED: (balanced_accuracy_interval, balanced_accuracy_by_image),
    MACRO_F1: (macro_f1_interval, macro_f1_by_image),
}
"""Means over classes -> interval, and what each image adds to them"""
FEW = 100
"""Validation images, below which folds are advised"""
FOLDS = "probe_in_folds"
"""Key under which a run's choices keep the top-1 that its probe had in folds"""
ALIKE = "alike_in_validation"
"""Key under which they keep how many validation images look like training images, of how many compared"""
COMPUTED = f"`{tool('evaluate')}` computes its interval"
TO_GAIN = "More images, more epochs, or a third of the learning rate (-lr) may let training gain more."
AT_LAST = "At the last validation,"
PROBE_IS_BEST = (
    "On these images, training did not improve on the linear probe that it began with: the best checkpoint is that "
    "probe."
)


def mark_of_best(guess: float | None, top1: float | None) -> str:
    """Words for the best epoch so far. `top1`: of its better weights."""
    against = against_guessing(guess, top1)
    return f"best ({against} guessing)" if against else "best"


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


def probe_is_best(by: Metric, history: History, gain: str = "") -> str:
    """That training has not improved on the linear probe. `by`: of SAVE_BEST_BY. `gain`: of `gain_over_probe`."""
    validated = history.of("val")
    if validated and not any(line["update"] for line in validated):
        return (
            "The best checkpoint is the linear probe that training began with: nothing was validated after an update."
        )
    words = PROBE_IS_BEST
    best = history.best(TOP1)
    if by is not TOP1 and best is not None and best.line["update"]:
        before = TOP1.number(validated[0][TOP1.name])
        after = TOP1.number(best.value)
        words += f" It is the best by {by.words}; top-1 rose from {before} to {after} (epoch {best.line['epoch']})."
    advice = gain or TO_GAIN
    return f"{words} {advice}"


def gain_over_probe(by: Metric, history: History, folder: Path) -> str:
    """`beside_probe` of a run's last validation; '' if it is unknown what that predicted."""
    validated = history.of("val")
    last = validated[-1]["update"] if validated else 0
    table = read_predictions(folder, last) if last else None
    if table is None or PROBE not in table:
        return ""
    return beside_probe(
        by,
        history,
        labels=table["labels"].astype(int),
        probe=table[PROBE],
        guesses=table["guess"],
        groups=table.get(GROUPS, ()),
    )


def beside_probe(
    by: Metric, history: History, labels: np.ndarray, probe: np.ndarray, guesses: np.ndarray, groups: Groups = ()
) -> str:
    """Whether training improved on the linear probe by more than chance, by SAVE_BEST_BY; '' without metrics.jsonl.

    `guesses`: of the last validation. The best one is the luckiest of several on these images.
    """
    validated = history.of("val") or [{}]
    before = validated[0]
    after = validated[-1]
    than = "the linear probe that training began with"
    if by is TOP1:
        gain, low, high = interval_and_test(guesses == labels, probe == labels, groups)
        more = "more" if gain >= 0 else "fewer"
        words = f"right on {abs(gain):.0f} {more} of {counted(len(labels), 'image')} than {than} "
        words += f"(95 % interval {low:+.0f} to {high:+.0f})"
        top1 = ""
    else:
        if None in (after.get(by.name), before.get(by.name)):
            return ""
        words = f"by {by.words}, {by.number(after[by.name])} against {by.number(before[by.name])} of {than}"
        top1 = f"; top-1 {TOP1.number(after[TOP1.name])} against {TOP1.number(before[TOP1.name])}"
        if by not in BY_CLASS:
            return f"{AT_LAST} {words}{top1}."
        _, by_image = BY_CLASS[by]
        half = half_width_of_mean(by_image(labels, guesses) - by_image(labels, probe), groups)
        gain = after[by.name] - before[by.name]
        low = gain - half
        high = gain + half
        words += f" ({gain:+.2f} points, 95 % interval {low:+.2f} to {high:+.2f})"
    verdict = "may be chance" if low <= 0 <= high else "is beyond chance"
    words = f"{AT_LAST} {words}, which {verdict}{top1}."
    return words if low > 0 else f"{words} The probe alone (TRAIN.NUM_EPOCHS=0) may do as well. {TO_GAIN}"


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
