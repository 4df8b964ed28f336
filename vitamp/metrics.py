"""Metrics by the labels of a run (one class per image, several, or none), and the sets of weights that have them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """The one description of a metric: whatever shows or compares metrics reads it here."""

    name: str
    """In metrics.jsonl, meta.json and SAVE_BEST_BY"""
    words: str
    title: str = ""
    """Of its chart in a report; none: it has no chart"""
    percent: bool = True
    higher: bool = True
    """Whether a higher value is better"""
    counts_images: bool = False
    """Whether it is a share of the validation images, so that it changes by whole images"""
    decides: bool = True
    """Whether SAVE_BEST_BY may name it"""
    beside: bool = False
    """Whether only some runs measure it; curves.png and the table of epochs then show it beside `TaskKind.best`"""
    plain_words: str = ""
    """For a reader who does not train models; '': `words`"""
    without_learning: tuple[float, str] | None = None
    """What a model that has learnt nothing reaches, and how"""
    trivial: int = 0
    """Number of classes up to which it is always 100 %"""

    @property
    def heading(self) -> str:
        """The words with their unit."""
        return f"{self.words} (%)" if self.percent else self.words

    def number(self, value: float) -> str:
        return f"{value:.2f} %" if self.percent else f"{value:.4f}"

    def number_in_table(self, value: float) -> str:
        """Without the unit, which is in the heading."""
        return self.number(value).removesuffix(" %")


@dataclass(frozen=True)
class TaskKind:
    words: str
    metrics: tuple[Metric, ...]
    best: Metric
    """Which decides about the best checkpoint, unless SAVE_BEST_BY is set; curves show it beside the loss"""
    axis: str
    """Its words in curves.png"""

    @property
    def deciding(self) -> list[str]:
        """Values of SAVE_BEST_BY, the loss last."""
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
    """One of the user's own (VALIDATE_METRICS) has no other description than its name: a higher value is better."""
    return METRICS.get(name) or Metric(name, name, name, percent=False, beside=True)


def task_of(lines: Iterable[Mapping[str, Any]]) -> TaskKind:
    """The task whose metrics have values in these lines of metrics.jsonl, or metrics of meta.json."""
    measured = set()
    for line in lines:
        measured |= {name for name, value in line.items() if value is not None}
    measured.discard(LOSS.name)
    for kind in TASKS:
        if any(metric.name in measured for metric in kind.metrics):
            return kind
    return ONE_LABEL


SAME = 1e-6
"""Percent within which two accuracies are equal"""


def against_guessing(guess: float | None, top1: float | None) -> str:
    """'as good as' or 'worse than' always guessing the largest class; '' for a better model, or if one is unknown.

    `guess`: the top-1 of such guessing, in percent, as `top1` is.
    """
    if guess is None or top1 is None or not top1 <= guess + SAME:
        return ""
    return "worse than" if top1 < guess - SAME else "as good as"


def always_guessing(guess: float, top1: float | None = None) -> str:
    """What guessing would reach; and that a model does not surpass it, if so."""
    against = against_guessing(guess, top1)
    words = f"always guessing the largest class: {guess:.1f} % top-1"
    return f"{words}: this model is {against} guessing" if against else words


class WeightSet(NamedTuple):
    name: str
    """In -weights, and in meta.json's thresholds"""
    prefix: str
    """Of its metrics in metrics.jsonl and meta.json"""
    file: str
    """In a checkpoint"""
    label: str
    """In words for users"""
    words: str
    """The same as a noun"""
    setting: str = ""
    """Setting that makes a run keep it; none for the plain weights, which every run keeps"""

    @property
    def mark(self) -> str:
        """The label where plain weights need none, as in a chart's legend."""
        return self.label if self.prefix else ""

    def marked(self, what: str) -> str:
        """For example 'EMA top-1', and 'top-1' of the plain weights."""
        return f"{self.mark} {what}".lstrip()

    @property
    def described(self) -> str:
        return f"{self.label} ({self.setting})" if self.setting else self.label


PLAIN = WeightSet("model", "", "model.safetensors", "plain", "the model's weights")
AVERAGE = WeightSet("ema", "ema_", "ema.safetensors", "EMA", "the EMA", "TRAIN.MODEL_EMA")
SETS = (PLAIN, AVERAGE)
BETTER = "auto"
"""In -weights: the set that validated better"""
CHOICES = (BETTER, *(which.name for which in SETS))
"""Values of -weights"""
_SETS_IN_WORDS = ", ".join(f"{which.name} ({which.label} weights)" for which in SETS)
CHOICES_IN_WORDS = f"{BETTER} (whichever validated better), {_SETS_IN_WORDS}"


def set_named(name: str) -> WeightSet:
    return next(which for which in SETS if which.name == name)


def set_of(metric: str) -> tuple[WeightSet, str]:
    """'ema_acc1' -> the EMA, 'acc1'."""
    which = next((one for one in SETS if one.prefix and metric.startswith(one.prefix)), PLAIN)
    return which, metric.removeprefix(which.prefix)


def best_set(values: Mapping[WeightSet, Any], by: Metric) -> WeightSet | None:
    """The better weights by their values of the metric `by`; the first if they are equal, None without a value."""
    scores = {which: float(value if by.higher else -value) for which, value in values.items() if is_number(value)}
    return max(scores, key=lambda which: scores[which]) if scores else None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
