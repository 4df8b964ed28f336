"""Decide which labels are wrong, from logits of models that did not see the image.

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
"""Higher probabilities, at which hard images are fewer: the verdict is clear if it is at any of the three"""
REDRAWN = 19
"""How often all labels are redrawn; so the largest count of labels that look wrong is a bound of 95 %"""
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
"""Fraction of the labels that are changed at a time, to see how many of them would look wrong"""
DRAWS = 5
"""How often this is done"""
ROUNDS = 40
"""Most times that calibration and Q are fitted in turn"""
UPDATES = 8
"""Updates of Q in each round"""
STEPS = 6
"""Steps of L-BFGS in each round"""
EQUAL_SCALES = 2.0
"""How strongly scales of classes are drawn to their mean"""
EQUAL_ERRORS = 40.0
"""Images of each class by which its row of Q is drawn to the mean of all: a class of few images has no own pattern"""
NEIGHBOURS = 10
"""Nearest images whose labels are the second view of an image"""
AT_ONCE = 1024
"""Images that are compared with all others at once"""


Calibration = tuple[Tensor, Tensor]
"""Logarithms of the scales of the classes, and their offsets"""


class Verdict(NamedTuple):
    """Which of the given labels look wrong, and how many would by chance."""

    wrong_probability: np.ndarray
    """Probability that each label is wrong"""
    class_probabilities: np.ndarray
    """Probability of each class, images x classes, from pixels alone"""
    proposed: np.ndarray
    """The most probable other class of each image"""
    look_wrong: int
    """Number of labels that are rather wrong than right"""
    agreed: int
    """Those that count, since they look like the same class beside the nearest images, too; all, without features"""
    most_if_right: int
    """Largest number of these among labels that are redrawn as if all were right"""
    mean_if_right: float
    """Mean of the numbers of which that is the largest"""
    calibrations: list[Calibration]
    """One; with several labels per image, one for each class"""
    changed: int = 0
    """Labels that were changed to see how many of these would look wrong"""
    changed_found: int = 0
    """How many of these look wrong"""
    surer: Sequence[tuple[int, int, int]] = ()
    """`look_wrong`, `agreed` and `most_if_right` at each probability in `SURER`; none without features"""

    @property
    def clear(self) -> bool:
        """Whether so many labels look wrong, at `WRONG` or a surer probability, that chance does not explain them."""
        levels = [(self.look_wrong, self.agreed, self.most_if_right), *self.surer]
        return any(
            agreed > CLEARLY * (most_if_right + 1) and agreed >= AGREED * look_wrong
            for look_wrong, agreed, most_if_right in levels
        )

    @property
    def beyond_chance(self) -> bool:
        """Whether more labels look wrong by both views than chance explains.

        If the verdict is not clear all the same, the views disagree on most labels that look wrong.
        """
        return self.agreed > CLEARLY * (self.most_if_right + 1)

    @property
    def listed(self) -> int:
        """How many labels are listed: those that look wrong, and if that is not clear, at least `DOUBTFUL`."""
        return self.look_wrong if self.clear else max(self.look_wrong, DOUBTFUL)


def nearest(features: np.ndarray, related: Sequence[np.ndarray]) -> Tensor:
    """Find the most similar images of each image: their indices, images x `NEIGHBOURS`.

    `related`: arrays of one number per image. Images that share a number in any of them, such as copies or a group, are
    no neighbours of each other.
    """
    directions = torch.from_numpy(features).float()
    numbers = torch.from_numpy(np.stack(related))
    directions = F.normalize(directions - directions.mean(0))
    neighbours = []
    for first in range(0, len(directions), AT_ONCE):
        block = slice(first, first + AT_ONCE)
        similarities = directions[block] @ directions.T
        are_related = (numbers[:, block, None] == numbers[:, None]).any(0)
        similarities[are_related] = -2.0  # less than any
        neighbours.append(similarities.topk(min(NEIGHBOURS, len(directions)), 1).indices)
    return torch.cat(neighbours)


def find_wrong(
    logits: np.ndarray, labels: np.ndarray, seed: int, known: Calibration | None = None, near: Tensor | None = None
) -> Verdict:
    """Judge which labels are wrong, one label per image, by logits of models that did not see the image.

    `logits`: images x classes. `known`: the calibration of other images, which is used in place of one that is fitted
    to these. `near`: the neighbours of each image, of `nearest`; without them the logits are the only view.
    """
    given = torch.from_numpy(labels)
    classes = logits.shape[1]
    of_models = torch.from_numpy(logits).double()

    # Fit each view of the images; the first one is that of the models.
    views = [(of_models, known)]
    if near is not None:
        smoothed_counts = F.one_hot(given[near], classes).sum(1).double() + 1 / classes
        views.append((smoothed_counts.log(), None))
    fits = [_fit(view, given, calibration) for view, calibration in views]
    fit_of_models = fits[0]

    # With two views, surer probabilities are tried, too, and labels of classes that were not learnt do not count.
    levels = torch.tensor([WRONG])[:, None]
    class_counts = torch.ones(classes)
    if near is not None:
        levels = torch.tensor([WRONG, *SURER])[:, None]
        recognised = given[of_models.argmax(1) == given].bincount(minlength=classes)
        class_counts = (recognised >= LEARNT * given.bincount(minlength=classes)).double()

    # Redraw the labels as if all were right, and count those that look wrong then.
    cumulative = torch.stack([fitted.class_probabilities for fitted in fits]).mean(0).cumsum(1)
    generator = generator_of(seed, "labels")
    redrawn_counts = []
    for _ in Progress(range(REDRAWN), REDRAWN, "times", "redrawn labels"):
        draws = torch.from_numpy(generator.random((len(given), 1)))
        redrawn = (draws > cumulative).sum(1).clamp(max=classes - 1)
        wrong = _wrong_by_all([_fit(view, redrawn, calibration) for view, calibration in views])
        redrawn_counts.append((wrong * class_counts[redrawn] >= levels).sum(1))
    if_right = torch.stack(redrawn_counts)

    agreed = (_wrong_by_all(fits) * class_counts[given] >= levels).sum(1)
    changed, changed_found = _change_labels(of_models, known, given, seed)
    look_wrong = (fit_of_models.wrong_probability >= levels).sum(1)
    at_wrong, *surer = zip(look_wrong.tolist(), agreed.tolist(), if_right.amax(0).tolist(), strict=True)
    return Verdict(
        wrong_probability=fit_of_models.wrong_probability.numpy(),
        class_probabilities=fit_of_models.class_probabilities.numpy(),
        proposed=fit_of_models.proposed.numpy(),
        look_wrong=at_wrong[0],
        agreed=at_wrong[1],
        most_if_right=at_wrong[2],
        mean_if_right=float(if_right[:, 0].double().mean()),
        calibrations=[fit_of_models.calibration],
        changed=changed,
        changed_found=changed_found,
        surer=surer,
    )


def _change_labels(logits: Tensor, known: Calibration | None, given: Tensor, seed: int) -> tuple[int, int]:
    """Change labels at random, some at a time; return how many were changed, and how many of these look wrong then.

    The logits stay as they are: models that had learnt from the few changed labels would hardly differ.
    """
    present = given.unique()
    found = 0
    generator = generator_of(seed, "changed labels")
    if len(present) < 2:
        return 0, 0
    at_a_time = max(1, round(CHANGED * len(given)))
    chosen = torch.from_numpy(generator.permutation(len(given))[: DRAWS * at_a_time])
    for rows in chosen.split(at_a_time):
        # A step of 1 to len(present) - 1 in the cycle of the labels that occur leads to another label.
        steps = torch.from_numpy(generator.integers(1, len(present), len(rows)))
        labels = given.clone()
        labels[rows] = present[(torch.searchsorted(present, given[rows]) + steps) % len(present)]
        found += int((_fit(logits, labels, known).wrong_probability[rows] >= WRONG).sum())
    return len(chosen), found


class Fit(NamedTuple):
    """What one view of the images says about their labels, after calibration."""

    wrong_probability: Tensor
    """Probability that each label is wrong"""
    class_probabilities: Tensor
    """Calibrated, images x classes"""
    proposed: Tensor
    """The most probable other class of each image"""
    calibration: Calibration


def _wrong_by_all(fits: Sequence[Fit]) -> Tensor:
    """The smallest probability of any view that each label is wrong; 0 where views propose different classes."""
    proposed = torch.stack([fitted.proposed for fitted in fits])
    views_agree = (proposed == proposed[0]).all(0)
    return torch.stack([fitted.wrong_probability for fitted in fits]).amin(0) * views_agree


def _fit(logits: Tensor, given: Tensor, known: Calibration | None = None) -> Fit:
    """Fit the calibration and Q to the given labels, in turn, until these are hardly more probable.

    `known`: a calibration that is used in place of a fitted one.
    """
    images, classes = logits.shape
    same = torch.eye(classes, dtype=torch.float64)
    other = (1 - same) / max(classes - 1, 1)
    q = 0.98 * same + 0.02 * other  # at first, 2 % of the labels are wrong
    likelihood_before = -np.inf
    scales, offsets = known or (torch.zeros(classes, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def calibrated() -> Tensor:
        return (logits * scales.exp() + offsets).softmax(1)

    def loss(q: Tensor) -> Tensor:
        """The negative log-likelihood of the given labels per image, with its gradients for the calibration."""
        scales.grad = None
        offsets.grad = None
        likelihood = (calibrated() * q[:, given].T).sum(1).clamp(min=1e-300).log().sum()
        total = (EQUAL_SCALES * (scales - scales.mean()).square().sum() - likelihood) / images
        total.backward()
        return total

    class_probabilities = calibrated()
    joint = calibrated()
    for _ in range(ROUNDS):
        if known is None:
            optimizer = torch.optim.LBFGS([scales, offsets], 1, STEPS, line_search_fn="strong_wolfe")
            optimizer.step(partial(loss, q))
        with torch.no_grad():
            class_probabilities = calibrated()
            for _ in range(UPDATES):
                # Expectation: the probability of each right class, given the label
                joint = class_probabilities * q[:, given].T
                joint /= joint.sum(1, keepdim=True)
                # Maximisation: images by right class and label, drawn to errors that all classes share
                counts = torch.zeros_like(q).index_add_(0, given, joint).T + 1e-9
                error_rate = 1 - counts.diagonal().sum() / counts.sum()
                counts = counts + EQUAL_ERRORS * ((1 - error_rate) * same + error_rate * other)
                q = counts / counts.sum(1, keepdim=True)
            joint = class_probabilities * q[:, given].T
            likelihood = float(joint.sum(1).clamp(min=1e-300).log().sum())
        if likelihood - likelihood_before < 0.05:  # hardly more probable
            break
        likelihood_before = likelihood
    joint = (joint / joint.sum(1, keepdim=True)).detach()
    given_column = given[:, None]
    return Fit(
        wrong_probability=1 - joint.gather(1, given_column)[:, 0],
        class_probabilities=class_probabilities,
        proposed=joint.scatter(1, given_column, -1.0).argmax(1),
        calibration=(scales.detach(), offsets.detach()),
    )
