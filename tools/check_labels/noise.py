"""Which labels are wrong, from logits of models that did not see the image.

The given label of an image is taken for a draw: its right class i has the probability that the calibrated logits give
it, and class i is given as j with the probability Q[i, j]. Calibration (a scale and an offset for each class) and Q are
those of the greatest likelihood, by expectation maximisation as in Dawid and Skene (1979). The probability that a label
is wrong follows.

The logits' tails may be lighter than those of the images: then hard images look like wrong labels. So the verdict asks
a second view of the same images: the labels of the nearest ones, fitted in the same way. It counts the labels that look
wrong to both, and like the same other class. A wrong label has one right class; a hard image, or one of a class that is
not defined by looks, resembles several. Labels redrawn from the mean of both views' probabilities, as if Q were the
identity, say how many would look so if all were right: fewer where classes differ clearly, more where they look alike,
or where the views disagree.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from utils.progress import Progress
from utils.seeding import generator_of

WRONG = 0.5
"""Probability from which on a label looks wrong"""
SURER = (0.8, 0.95)
"""Others, at which hard images are fewer: any of them may decide"""
REDRAWN = 19
"""Times; so the largest number is a bound of 95 %"""
CLEARLY = 2
"""Times as many labels as that, and one, must look wrong, since no classifier is calibrated exactly"""
AGREED = 0.5
"""Fraction of the labels that look wrong in which the nearest images must agree: of hard images, they often do not"""
DOUBTFUL = 20
"""Labels that are listed at least where too few look wrong, so that people can judge"""
LEARNT = 0.25
"""Fraction of a class's images that the logits must recognise for its labels to count: most of a class that models did
not learn, because it is rare, looks like others"""
CHANGED = 0.02
"""Fraction of the labels that are changed, to see how many of them would look wrong"""
DRAWS = 5
"""Times that this is done"""
ROUNDS = 40
"""Of calibration and Q in turn"""
UPDATES = 8
"""Of Q in each"""
STEPS = 6
"""Of L-BFGS in each"""
EQUAL_SCALES = 2.0
"""How strongly scales of classes are drawn to their mean"""
EQUAL_ERRORS = 40.0
"""Images of each class by which its row of Q is drawn to the mean of all: a class of few images has no own pattern"""
NEIGHBOURS = 10
AT_ONCE = 1024
"""Images that are compared with all others at once"""


Calibration = tuple[Tensor, Tensor]
"""Logarithms of the scales of the classes, and their offsets"""


class Wrong(NamedTuple):
    """Verdict on the given labels."""

    probability: np.ndarray
    """That each label is wrong"""
    right: np.ndarray
    """Probability of each class, images x classes, from pixels alone"""
    proposed: np.ndarray
    """The most probable other class of each image"""
    number: int
    """Labels that are rather wrong than right"""
    agreed: int
    """Those that count, since they look like the same class beside the nearest images, too; all, without features"""
    if_right: int
    """Largest number of these among labels that are redrawn as if all were right"""
    expected: float
    """Mean of the numbers of which that is the largest"""
    calibrations: list[Calibration]
    """With several labels per image, one for each class"""
    changed: int = 0
    """Labels that were changed to see how many of these would look wrong"""
    changed_found: int = 0
    """Of them"""
    surer: Sequence[tuple[int, int, int]] = ()
    """The three numbers at `SURER`; none without features"""

    @property
    def clear(self) -> bool:
        levels = [(self.number, self.agreed, self.if_right), *self.surer]
        return any(
            agreed > CLEARLY * (if_right + 1) and agreed >= AGREED * number for number, agreed, if_right in levels
        )

    @property
    def beyond_chance(self) -> bool:
        """Whether only the other labels that look wrong, but not by both views, keep it from being clear."""
        return self.agreed > CLEARLY * (self.if_right + 1)

    @property
    def listed(self) -> int:
        return self.number if self.clear else max(self.number, DOUBTFUL)


def nearest(features: np.ndarray, own: Sequence[np.ndarray]) -> Tensor:
    """Indices of the most similar images of each. None has the same number in one of `own`: a copy, or its group."""
    rows = torch.from_numpy(features).float()
    numbers = torch.from_numpy(np.stack(own))
    rows = F.normalize(rows - rows.mean(0))
    found = []
    for first in range(0, len(rows), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        likeness = rows[some] @ rows.T
        likeness[(numbers[:, some, None] == numbers[:, None]).any(0)] = -2.0
        found.append(likeness.topk(min(NEIGHBOURS, len(rows)), 1).indices)
    return torch.cat(found)


def find_wrong(
    logits: np.ndarray, labels: np.ndarray, seed: int, known: Calibration | None = None, near: Tensor | None = None
) -> Wrong:
    """`logits`: images x classes. `labels`: classes of the images. `known`: of labels that are not of these images.
    `near`: of `nearest`; None if there are no features, and the logits are the only view."""
    given = torch.from_numpy(labels)
    classes = logits.shape[1]
    views = [(torch.from_numpy(logits).double(), known)]
    if near is not None:
        views.append(((F.one_hot(given[near], classes).sum(1).double() + 1 / classes).log(), None))
    fits = [_fit(view, given, of_view) for view, of_view in views]
    probability, right, proposed, calibration = fits[0]
    doubtful = torch.stack([fitted.right for fitted in fits]).mean(0).cumsum(1)
    levels = torch.tensor([WRONG])[:, None]
    counts = torch.ones(classes)
    if near is not None:
        levels = torch.tensor([WRONG, *SURER])[:, None]
        recognised = given[views[0][0].argmax(1) == given].bincount(minlength=classes)
        counts = (recognised >= LEARNT * given.bincount(minlength=classes)).double()
    generator = generator_of(seed, "labels")
    redrawn = []
    for _ in Progress(range(REDRAWN), REDRAWN, "times", "redrawn labels"):
        draws = torch.from_numpy(generator.random((len(given), 1)))
        again = (draws > doubtful).sum(1).clamp(max=classes - 1)
        wrong = _by_all([_fit(view, again, of_view) for view, of_view in views]) * counts[again]
        redrawn.append((wrong >= levels).sum(1))
    agreed = (_by_all(fits) * counts[given] >= levels).sum(1)
    if_right = torch.stack(redrawn).amax(0)
    changed, changed_found = _changed(*views[0], given, seed)
    numbers = (probability >= levels).sum(1)
    (number, both, chance), *surer = zip(numbers.tolist(), agreed.tolist(), if_right.tolist(), strict=True)
    return Wrong(
        probability=probability.numpy(),
        right=right.numpy(),
        proposed=proposed.numpy(),
        number=number,
        agreed=both,
        if_right=chance,
        expected=float(torch.stack(redrawn)[:, 0].double().mean()),
        calibrations=[calibration],
        changed=changed,
        changed_found=changed_found,
        surer=surer,
    )


def _changed(logits: Tensor, known: Calibration | None, given: Tensor, seed: int) -> tuple[int, int]:
    """How many labels were changed at random, some at a time, and how many of these look wrong then.

    The logits stay as they are: models that had learnt from the few changed labels would hardly differ.
    """
    present = given.unique()
    found = 0
    generator = generator_of(seed, "changed labels")
    if len(present) < 2:
        return 0, 0
    each = max(1, round(CHANGED * len(given)))
    rows = torch.from_numpy(generator.permutation(len(given))[: DRAWS * each])
    for some in rows.split(each):
        labels = given.clone()
        steps = torch.from_numpy(generator.integers(1, len(present), len(some)))
        labels[some] = present[(torch.searchsorted(present, given[some]) + steps) % len(present)]
        found += int((_fit(logits, labels, known).wrong[some] >= WRONG).sum())
    return len(rows), found


class Fit(NamedTuple):
    wrong: Tensor
    """Probability that each label is wrong"""
    right: Tensor
    """Calibrated probabilities"""
    proposed: Tensor
    """The most probable other class of each image"""
    calibration: Calibration


def _by_all(views: Sequence[Fit]) -> Tensor:
    """The smallest probability of any view that each label is wrong; 0 where views propose different classes."""
    proposed = torch.stack([view.proposed for view in views])
    return torch.stack([view.wrong for view in views]).amin(0) * (proposed == proposed[0]).all(0)


def _fit(logits: Tensor, given: Tensor, known: Calibration | None = None) -> Fit:
    """The calibration is fitted, unless it is `known`: then only Q is."""
    images, classes = logits.shape
    same = torch.eye(classes, dtype=torch.float64)
    other = (1 - same) / max(classes - 1, 1)
    matrix = 0.98 * same + 0.02 * other
    before = -np.inf
    scales, offsets = known or (torch.zeros(classes, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def calibrated() -> Tensor:
        return (logits * scales.exp() + offsets).softmax(1)

    def loss(matrix: Tensor) -> Tensor:
        scales.grad = None
        offsets.grad = None
        fit = (calibrated() * matrix[:, given].T).sum(1).clamp(min=1e-300).log().sum()
        total = (EQUAL_SCALES * (scales - scales.mean()).square().sum() - fit) / images
        total.backward()
        return total

    right = calibrated()
    joint = calibrated()
    for _ in range(ROUNDS):
        if known is None:
            steps = torch.optim.LBFGS([scales, offsets], 1, STEPS, line_search_fn="strong_wolfe")
            steps.step(partial(loss, matrix))
        with torch.no_grad():
            right = calibrated()
            for _ in range(UPDATES):
                joint = right * matrix[:, given].T
                joint /= joint.sum(1, keepdim=True)
                counts = torch.zeros_like(matrix).index_add_(0, given, joint).T + 1e-9
                wrong = 1 - counts.diagonal().sum() / counts.sum()
                counts = counts + EQUAL_ERRORS * ((1 - wrong) * same + wrong * other)
                matrix = counts / counts.sum(1, keepdim=True)
            joint = right * matrix[:, given].T
            now = float(joint.sum(1).clamp(min=1e-300).log().sum())
        if now - before < 0.05:  # hardly more probable
            break
        before = now
    joint = (joint / joint.sum(1, keepdim=True)).detach()
    proposed = joint.scatter(1, given[:, None], -1.0).argmax(1)
    return Fit(1 - joint.gather(1, given[:, None])[:, 0], right, proposed, (scales.detach(), offsets.detach()))
