"""Check labels and numbers of classes against MODEL.NUM_CLASSES, and count the images of classes."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from utils.errors import UserError
from utils.log import IN_FULL, log
from utils.text import some_of

ANY_LABEL = 2**63
"""Number of classes with which labels are not checked, for tools that look for wrong labels. It exceeds int64."""

MOST_WITH_GAPS = 100_000
"""Number of classes up to which most may lack images with -num_classes auto: more than public numberings have"""


def members_of_classes(labels: np.ndarray) -> list[np.ndarray]:
    """Return one array per class that has samples, in the order of their labels: the samples' indices, ascending."""
    _, sizes = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])[: len(sizes)]


def distinct_names(classes: Iterable[object]) -> list[str]:
    """Return the names of classes, with the label added if several share one: ImageNet has two classes called crane."""
    names = list(map(str, classes))
    times = Counter(names)
    return [name if times[name] == 1 else f"{name} (label {label})" for label, name in enumerate(names)]


def names_of_classes(names: Sequence[str] | None, labels: np.ndarray) -> list[str]:
    """Return a different name for each class; without `names`, its label. `labels`: see `Samples.labels`."""
    if names:
        return distinct_names(names)
    classes = labels.shape[1] if labels.ndim == 2 else int(labels.max(initial=-1)) + 1
    return distinct_names(range(classes))


def label_words(label: np.ndarray, classes: Sequence[str]) -> str:
    """Return the name of an image's class, or the names of its several classes, separated by |."""
    class_indices = np.flatnonzero(label).tolist() if label.ndim else [int(label)]
    return "|".join(classes[index] for index in class_indices)


def images_of_classes(labels: np.ndarray, classes: int) -> np.ndarray:
    """Count the images of each class. `labels`: see `Samples.labels`."""
    if labels.ndim == 2:
        return labels.sum(0, dtype=np.int64)[:classes]
    return np.bincount(labels[labels >= 0], minlength=classes)[:classes]  # -1: an image without label


def check_gaps(labels: Sequence[int] | np.ndarray, where: Callable[[int], str]) -> None:
    """Raise UserError for a label below 0, and for a largest label that would make very many classes without images.

    Such a large label is usually a mistake. `where(index)` returns the beginning of the message for `labels[index]`.
    """
    smallest_at = int(np.argmin(labels))
    if labels[smallest_at] < 0:
        smallest = labels[smallest_at]
        raise UserError(f"{where(smallest_at)}: the label {smallest} is below 0; labels are whole numbers from 0.")
    largest_at = int(np.argmax(labels))
    occurring = len(np.unique(labels))
    classes = int(labels[largest_at]) + 1
    if classes > MOST_WITH_GAPS and occurring < classes / 2:
        raise UserError(
            f"{where(largest_at)}: label {classes - 1} would make {classes:,} classes, but only {occurring:,} labels "
            f"occur. Correct it; if it is right, set -num_classes {classes} instead of auto."
        )


def check_label(label: int, num_classes: int, where: str) -> None:
    """Raise UserError for a label outside the classes. `where` begins the message."""
    # ANY_LABEL as the number of classes turns the check off: then only numbers that exceed int64 are refused.
    least = -ANY_LABEL if num_classes == ANY_LABEL else 0
    if not least <= label < num_classes:
        raise UserError(
            f"{where}: label {label} does not fit MODEL.NUM_CLASSES {num_classes}: "
            f"labels go from {least} to {num_classes - 1}. Correct it, or train with a larger -num_classes."
        )


def check_class_count(classes: int, num_classes: int, owner: str) -> None:
    """Raise UserError for more classes than the classifier has. `owner` begins the message."""
    if classes > num_classes:
        raise UserError(
            f"{owner} has {classes} classes, but MODEL.NUM_CLASSES is {num_classes}; set -num_classes {classes}."
        )


def log_unused_outputs(classes: int, num_classes: int, owner: str) -> None:
    """Log that the data has fewer classes than the classifier. This is allowed: a pretrained one is often kept."""
    if num_classes != ANY_LABEL and classes < num_classes:
        unused = f"{num_classes - classes} of the model's outputs stay unused (MODEL.NUM_CLASSES)"
        auto = "MODEL.NUM_CLASSES=auto takes the number of classes"
        log.info("%s has %d classes; %s; %s.", owner, classes, unused, auto, extra=IN_FULL)


def warn_empty_classes(labels: np.ndarray, classes: Sequence[object], owner: str) -> None:
    """Warn of classes without an image: they are never learned, and often mean that images are missing."""
    empty = np.flatnonzero(images_of_classes(labels, len(classes)) == 0)
    if len(empty):
        first = classes[empty[0]]
        log.warning("%s has no image for %d of its %d classes (the first: %s).", owner, len(empty), len(classes), first)


def warn_alike_names(classes: Sequence[object], owner: str) -> None:
    """Warn of classes whose names differ only in capital letters or in how accents are encoded.

    Usually they are one class. `owner` begins the warning.
    """
    names_by_folded: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(map(str, classes)):  # each name once: ImageNet has two classes named crane
        usual_form = unicodedata.normalize("NFKC", name)
        # Two encodings of an accent look the same, so a name in an unusual form is shown with escapes, as \xe9.
        shown_name = name if name == usual_form else ascii(name)
        names_by_folded[usual_form.casefold()].append(shown_name)
    pairs = [" and ".join(names) for names in names_by_folded.values() if len(names) > 1]
    if pairs:
        problem = "has classes whose names differ only in capital letters or in how accents are encoded"
        examples = some_of(pairs, separator="; ")
        log.warning("%s %s: %s. If they are one class, give it one name.", owner, problem, examples)
