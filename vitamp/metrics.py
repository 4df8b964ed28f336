"""Describes all metrics, the tasks (one label per image, several or none) that have them, and the sets of weights."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """The description of a metric, which all code that shows or compares metrics uses."""

    name: str
    """Name in metrics.jsonl, meta.json and SAVE_BEST_BY."""
    words: str
    """Name in log lines and tables."""
    title: str = ""
    """Title of its chart in a report; '': it has no chart."""
    percent: bool = True
    """Whether its values are in percent."""
    higher: bool = True
    """Whether a higher value is better."""
    counts_images: bool = False
    """Whether it is a fraction of the validation images, so that it changes by whole images."""
    decides: bool = True
    """Whether SAVE_BEST_BY may name it."""
    beside: bool = False
    """Whether only some runs measure it; curves.png and the table of epochs then show it beside `TaskKind.best`."""
    plain_words: str = ""
    """Name for a reader who does not train models; '': `words`."""
    without_learning: tuple[float, str] | None = None
    """The value of a model that has learnt nothing, and what such a model does."""
    trivial: int = 0
    """Largest number of classes with which the metric is always 100 %."""

    @property
    def heading(self) -> str:
        """The name with its unit, for the heading of a column."""
        return f"{self.words} (%)" if self.percent else self.words

    def number(self, value: float) -> str:
        """A value as text, with its unit."""
        return f"{value:.2f} %" if self.percent else f"{value:.4f}"

    def number_in_table(self, value: float) -> str:
        """A value as text, without its unit, which is in the heading."""
        return self.number(value).removesuffix(" %")


@dataclass(frozen=True)
class TaskKind:
    """A task, by the labels of its images, and its metrics."""

    words: str
    """The task in words, such as 'with one label per image'."""
    metrics: tuple[Metric, ...]
    """The loss first."""
    best: Metric
    """The metric that decides which checkpoint is best by default; curves show it beside the loss."""
    axis: str
    """Label of the axis of `best` in curves.png."""

    @property
    def deciding(self) -> list[str]:
        """The values of SAVE_BEST_BY, the loss last."""
        loss, *others = self.metrics
        return [metric.name for metric in [*others, loss] if metric.decides]


LOSS = Metric("loss", "loss", "Loss", percent=False, higher=False)
TOP1 = Metric("acc1", "top-1", "Accuracy, top-1 (%)", counts_images=True, plain_words="accuracy (top-1)")
TOP5 = Metric("acc5", "top-5", counts_images=True, trivial=5)
BALANCED = Metric("balanced_acc", "balanced accuracy", "Balanced accuracy (%)")
MACRO_F1 = Metric("macro_f1", "macro F1", "F1, macro (%)")
MAP = Metric("map", "mAP", "Mean average precision (%)", plain_words="mean average precision (mAP)")
AUROC = Metric("auroc", "AUROC", "AUROC, mean over classes (%)")
OF_EVERY_TASK = tuple(metric.name for metric in (LOSS, TOP1, TOP5))
"""Fields of every line of metrics.jsonl; those that a task does not measure are null."""
ONE_LABEL = TaskKind("with one label per image", (LOSS, TOP1, TOP5, BALANCED, MACRO_F1), TOP1, "top-1 accuracy (%)")
SEVERAL_LABELS = TaskKind(
    "with several labels per image",
    (
        LOSS,
        MAP,
        AUROC,
        Metric("f1_micro", "F1 at 0.5, micro", "F1 at 0.5, micro (%)", decides=False),
        Metric("f1_macro", "F1 at 0.5, macro", decides=False),
        Metric("f1_micro_tuned", "F1 at tuned thresholds, micro", decides=False),
        Metric("f1_macro_tuned", "F1 at tuned thresholds, macro", decides=False),
        Metric("exact_match", "exact match", counts_images=True, decides=False),
    ),
    MAP,
    "mAP (%)",
)
EXPLAINED = Metric(
    "explained",
    "explained variance",
    "Explained variance of hidden patches (%)",
    plain_words="explained variance of hidden patches",
    without_learning=(0.0, "filling each patch with its mean"),
)
KNN = Metric("knn_acc1", "k-NN top-1", "k-NN accuracy, top-1 (%)", beside=True)
NO_LABELS = TaskKind("without labels", (LOSS, EXPLAINED, KNN), EXPLAINED, "explained variance (%)")
TASKS = (ONE_LABEL, SEVERAL_LABELS, NO_LABELS)
METRICS: dict[str, Metric] = {}
for _kind in TASKS:
    METRICS |= {metric.name: metric for metric in _kind.metrics}


def metric_named(name: str) -> Metric:
    """The metric with this name; an unknown one is of the user's own code (VALIDATE_METRICS): higher is better."""
    return METRICS.get(name) or Metric(name, name, name, percent=False, beside=True)


def task_of(lines: Iterable[Mapping[str, Any]]) -> TaskKind:
    """Find the task of a run by the metrics that have a value: the first of TASKS that has one of them.

    The loss does not count, because every task has it. Without another metric, the task is ONE_LABEL.

    lines: name of a metric -> value, such as the lines of metrics.jsonl, or the metrics in a meta.json
    """
    measured = set()
    for line in lines:
        measured |= {name for name, value in line.items() if value is not None}
    measured.discard(LOSS.name)
    for kind in TASKS:
        if any(metric.name in measured for metric in kind.metrics):
            return kind
    return ONE_LABEL


SAME = 1e-6
"""Percentage points within which two accuracies are equal."""


def against_guessing(guess: float | None, top1: float | None) -> str:
    """Compare a model with always guessing the largest class: 'as good as', 'worse than', or '' if it is better.

    The result is also '' if one of the two is unknown.

    guess: top-1 accuracy of always guessing the largest class, in percent; None if unknown
    top1: top-1 accuracy of the model, in percent; None or NaN if unknown
    """
    if guess is None or top1 is None:
        return ""
    is_better_or_nan = not top1 <= guess + SAME
    if is_better_or_nan:
        return ""
    return "worse than" if top1 < guess - SAME else "as good as"


def always_guessing(guess: float, top1: float | None = None) -> str:
    """Describe the accuracy of always guessing the largest class; if a model is not better, this is said, too.

    guess: top-1 accuracy of always guessing the largest class, in percent
    top1: top-1 accuracy of the model, in percent; None if unknown
    """
    comparison = against_guessing(guess, top1)
    words = f"always guessing the largest class: {guess:.1f} % top-1"
    return f"{words}: this model is {comparison} guessing" if comparison else words


class WeightSet(NamedTuple):
    """A set of weights that a checkpoint may have: the plain ones or the EMA."""

    name: str
    """Name in -weights, and in meta.json's thresholds."""
    prefix: str
    """Beginning of the names of its metrics in metrics.jsonl and meta.json."""
    file: str
    """Name of its file in a checkpoint."""
    label: str
    """Adjective in texts for users: 'plain' or 'EMA'."""
    words: str
    """Noun in texts for users."""
    setting: str = ""
    """Setting that makes a run keep it; '' for the plain weights, which every run keeps."""

    @property
    def mark(self) -> str:
        """The label, but '' for plain weights, as in a chart's legend, which marks only the others."""
        return self.label if self.prefix else ""

    def marked(self, what: str) -> str:
        """The name of a metric with the mark before it: 'EMA top-1', or 'top-1' for plain weights."""
        return f"{self.mark} {what}".lstrip()

    @property
    def described(self) -> str:
        """The label, with the setting if there is one: 'EMA (TRAIN.MODEL_EMA)'."""
        return f"{self.label} ({self.setting})" if self.setting else self.label


PLAIN = WeightSet("model", "", "model.safetensors", "plain", "the model's weights")
AVERAGE = WeightSet("ema", "ema_", "ema.safetensors", "EMA", "the EMA", "TRAIN.MODEL_EMA")
SETS = (PLAIN, AVERAGE)
BETTER = "auto"
"""Value of -weights: the set that validated better."""
CHOICES = (BETTER, *(which.name for which in SETS))
"""All values of -weights."""
_SETS_IN_WORDS = ", ".join(f"{which.name} ({which.label} weights)" for which in SETS)
CHOICES_IN_WORDS = f"{BETTER} (whichever validated better), {_SETS_IN_WORDS}"


def set_named(name: str) -> WeightSet:
    """The set of weights with this name."""
    return next(which for which in SETS if which.name == name)


def set_of(field: str) -> tuple[WeightSet, str]:
    """Split the field of a metric into the set of weights and the metric's name: 'ema_acc1' into the EMA and 'acc1'."""
    for which in SETS:
        if which.prefix and field.startswith(which.prefix):
            return which, field.removeprefix(which.prefix)
    return PLAIN, field


def rank(value: float, loss: float | None, by: Metric) -> tuple[float, float]:
    """A key that is higher for a better validation: by a metric, and of equal values, by the lower loss.

    value: of the metric `by`
    loss: of the same weights in the same validation; None if unknown, which is worse than any loss
    """
    score = value if by.higher else -value
    return score, -math.inf if loss is None or math.isnan(loss) else -loss


def best_set(metrics: Mapping[WeightSet, Mapping[str, Any]], by: Metric) -> WeightSet | None:
    """The set of weights that validated best by a metric; the first one if they are equal, None without a value.

    metrics: set of weights -> its metrics by name
    """
    ranks = {}
    for which, values in metrics.items():
        if is_number(values.get(by.name)):
            ranks[which] = rank(values[by.name], values.get(LOSS.name), by)
    return max(ranks, key=lambda which: ranks[which], default=None)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)
