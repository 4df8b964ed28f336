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
from utils.statistics.groups import Groups, variance_inflation

WRONG = 0.5
"""Probability from which on a label looks wrong"""
SURER = (0.8, 0.95)
"""Higher probabilities, at which hard images are fewer: the verdict is clear if it is at any of the three"""
REDRAWN = 19
"""How often all labels are redrawn; so the largest count of labels that look wrong is a bound of 95 %"""
CLEARLY = 2
"""More labels must look wrong than this times that count plus one, since no classifier is calibrated exactly; so at
least three, where none would by chance"""
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
    """Largest number of these among labels that are redrawn as if all were right; more if images are in groups"""
    mean_if_right: float
    """Mean of the numbers of which that is the largest"""
    calibrations: list[Calibration]
    """A single one for all classes together; with several labels per image, one for each class"""
    changed: int = 0
    """Labels that were changed to see how many of these would look wrong"""
    changed_found: int = 0
    """How many of these look wrong"""
    surer: Sequence[tuple[int, int, int]] = ()
    """`look_wrong`, `agreed` and `most_if_right` at each probability in `SURER`; none without features"""

    @property
    def clear(self) -> bool:
        """Whether so many labels look wrong that chance does not explain them.

        One level of probability suffices: `WRONG`, or a surer one, at which hard images are fewer. There, both views
        must agree on more labels than by chance, and on a good part of those that look wrong to the models.
        """
        counts_by_level = [(self.look_wrong, self.agreed, self.most_if_right), *self.surer]
        return any(
            agreed > CLEARLY * (most_if_right + 1) and agreed >= AGREED * look_wrong
            for look_wrong, agreed, most_if_right in counts_by_level
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
    no neighbours of each other. So an image is no neighbour of itself.
    """
    features_of_images = torch.from_numpy(features).float()
    numbers = torch.from_numpy(np.stack(related))  # arrays x images
    directions = F.normalize(features_of_images - features_of_images.mean(0))
    neighbours = []
    for first in range(0, len(directions), AT_ONCE):
        block = slice(first, first + AT_ONCE)
        similarities = directions[block] @ directions.T  # images of the block x all images
        are_related = (numbers[:, block, None] == numbers[:, None]).any(0)
        similarities[are_related] = -2.0  # less than any
        neighbours.append(similarities.topk(min(NEIGHBOURS, len(directions)), 1).indices)
    return torch.cat(neighbours)


def find_wrong(
    logits: np.ndarray,
    labels: np.ndarray,
    seed: int,
    known: Calibration | None = None,
    near: Tensor | None = None,
    groups: Groups = (),
) -> Verdict:
    """Judge which labels are wrong, one label per image, by logits of models that did not see the image.

    `logits`: images x classes. `labels`: those that the images have. `known`: the calibration of other images, which is
    used in place of one that is fitted to these. `near`: the neighbours of each image, as `nearest` returns them;
    without them the logits are the only view. `groups`: of each image (DATA.GROUP), empty without groups.
    """
    given_labels = torch.from_numpy(labels)
    classes = logits.shape[1]
    logits_of_models = torch.from_numpy(logits).double()

    # Fit each view of the images. The first one is that of the models. The second one says how frequent each class is
    # among the labels of the neighbours; logarithms of frequencies serve as its logits.
    views = [(logits_of_models, known)]
    if near is not None:
        smoothed_counts = F.one_hot(given_labels[near], classes).sum(1).double() + 1 / classes
        views.append((smoothed_counts.log(), None))
    fits = [_fit(view, given_labels, calibration) for view, calibration in views]
    fit_of_models = fits[0]

    # Labels are counted that look wrong at each level of probability (levels x 1). With two views, surer levels are
    # tried, too, and labels of classes that the models did not learn do not count.
    levels = torch.tensor([WRONG])[:, None]
    is_learnt = torch.ones(classes)  # 1 for each class whose labels count, else 0
    if near is not None:
        levels = torch.tensor([WRONG, *SURER])[:, None]
        recognised = given_labels[logits_of_models.argmax(1) == given_labels].bincount(minlength=classes)
        is_learnt = (recognised >= LEARNT * given_labels.bincount(minlength=classes)).double()

    def look_wrong_at(wrong_probability: Tensor) -> Tensor:
        return wrong_probability >= levels  # levels x images

    # Redraw the labels as if all were right, and count those that look wrong then.
    cumulative_probabilities = torch.stack([fitted.class_probabilities for fitted in fits]).mean(0).cumsum(1)
    generator = generator_of(seed, "labels")
    counts_of_draws = []
    for _ in Progress(range(REDRAWN), REDRAWN, "times", "redrawn labels"):
        draws = torch.from_numpy(generator.random((len(given_labels), 1)))
        redrawn = (draws > cumulative_probabilities).sum(1).clamp(max=classes - 1)
        wrong = _wrong_by_all([_fit(view, redrawn, calibration) for view, calibration in views])
        counts_of_draws.append(look_wrong_at(wrong * is_learnt[redrawn]).sum(1))
    if_right = torch.stack(counts_of_draws)  # draws x levels

    # Count the given labels that look wrong to the models, and those that look wrong to both views.
    agree = look_wrong_at(_wrong_by_all(fits) * is_learnt[given_labels])
    changed, changed_found = _find_changed_labels(logits_of_models, known, given_labels, seed)
    look_wrong_by_level = look_wrong_at(fit_of_models.wrong_probability).sum(1)
    most_by_level = _most_by_chance(if_right, agree, groups)
    (look_wrong, agreed, most_if_right), *surer = zip(
        look_wrong_by_level.tolist(), agree.sum(1).tolist(), most_by_level.tolist(), strict=True
    )
    return Verdict(
        wrong_probability=fit_of_models.wrong_probability.numpy(),
        class_probabilities=fit_of_models.class_probabilities.numpy(),
        proposed=fit_of_models.proposed.numpy(),
        look_wrong=look_wrong,
        agreed=agreed,
        most_if_right=most_if_right,
        mean_if_right=float(if_right[:, 0].double().mean()),
        calibrations=[fit_of_models.calibration],
        changed=changed,
        changed_found=changed_found,
        surer=surer,
    )


def _most_by_chance(if_right: Tensor, agree: Tensor, groups: Groups) -> Tensor:
    """Return at each level how many labels may look wrong if all are right: the largest number of all draws, or more.

    Images of a group look wrong together, but labels were redrawn one by one. So several images count as one: by
    chance, their number varies more, and by several at once.

    `if_right`: numbers of labels that looked wrong, draws x levels. `agree`: whether each given label looks wrong,
    levels x images.
    """
    count_as_one = torch.tensor([variance_inflation(looks_wrong, groups) for looks_wrong in agree.numpy()])
    mean = if_right.double().mean(0)
    most = mean + (if_right.amax(0) - mean) * count_as_one.sqrt() + count_as_one - 1
    return most.round().int()


def _find_changed_labels(logits: Tensor, known: Calibration | None, given_labels: Tensor, seed: int) -> tuple[int, int]:
    """Change some labels at random, to see how many of these wrong labels the search finds.

    Returns how many were changed, and how many of them look wrong then. A few labels are changed at a time. The models
    are not trained anew with them, because so few would hardly change the logits. `known`: see `_fit`.
    """
    labels_in_use = given_labels.unique()  # sorted
    found = 0
    generator = generator_of(seed, "changed labels")
    if len(labels_in_use) < 2:
        return 0, 0
    at_a_time = max(1, round(CHANGED * len(given_labels)))
    images_to_change = torch.from_numpy(generator.permutation(len(given_labels))[: DRAWS * at_a_time])
    for images in images_to_change.split(at_a_time):
        # Go on by 1 to len - 1 places in the list of labels, which is a cycle, so each gets another label.
        steps = torch.from_numpy(generator.integers(1, len(labels_in_use), len(images)))
        places = torch.searchsorted(labels_in_use, given_labels[images])
        labels = given_labels.clone()
        labels[images] = labels_in_use[(places + steps) % len(labels_in_use)]
        found += int((_fit(logits, labels, known).wrong_probability[images] >= WRONG).sum())
    return len(images_to_change), found


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
    """Return the smallest probability of any view that each label is wrong; 0 where views propose different classes."""
    proposed = torch.stack([fitted.proposed for fitted in fits])
    views_agree = (proposed == proposed[0]).all(0)
    return torch.stack([fitted.wrong_probability for fitted in fits]).amin(0) * views_agree


def _fit(logits: Tensor, given: Tensor, known: Calibration | None = None) -> Fit:
    """Fit two models to the given labels, alternating: a calibration of the logits, and the labels' errors Q.

    Q[i, j] is the probability that an image of the right class i is given the label j. The fit ends when the given
    labels become hardly more probable. `known`: a calibration that is used in place of a fitted one.
    """
    images, classes = logits.shape
    right = torch.eye(classes, dtype=torch.float64)
    wrong = (1 - right) / max(classes - 1, 1)
    q = 0.98 * right + 0.02 * wrong  # at first, 2 % of the labels are wrong
    if known is None:
        log_scales = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
        offsets = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    else:
        log_scales, offsets = known

    def calibrated() -> Tensor:
        return (logits * log_scales.exp() + offsets).softmax(1)

    def joint_with_labels(class_probabilities: Tensor, q: Tensor) -> Tensor:
        """Return the probability of each right class together with the given label, images x right classes."""
        return class_probabilities * q[:, given].T

    def log_likelihood(joint: Tensor) -> Tensor:
        """Return the logarithm of the probability of all given labels."""
        return joint.sum(1).clamp(min=1e-300).log().sum()

    def loss_with_gradients(q: Tensor) -> Tensor:
        """Return the loss of the calibration per image, and set its gradients: likely labels, and similar scales."""
        log_scales.grad = None
        offsets.grad = None
        likelihood = log_likelihood(joint_with_labels(calibrated(), q))
        spread_of_scales = (log_scales - log_scales.mean()).square().sum()
        loss = (EQUAL_SCALES * spread_of_scales - likelihood) / images
        loss.backward()
        return loss

    class_probabilities = calibrated()
    joint = class_probabilities
    likelihood_before = -np.inf
    for _ in range(ROUNDS):
        if known is None:
            optimizer = torch.optim.LBFGS([log_scales, offsets], 1, STEPS, line_search_fn="strong_wolfe")
            optimizer.step(partial(loss_with_gradients, q))
        with torch.no_grad():
            class_probabilities = calibrated()
            for _ in range(UPDATES):
                # Expectation: the probability of each right class, given the label
                joint = joint_with_labels(class_probabilities, q)
                joint /= joint.sum(1, keepdim=True)
                # Maximisation: count images by right class (rows) and given label (columns). To each class, add
                # EQUAL_ERRORS images with the error rate of all classes, so that a class of few images is like others.
                counts = torch.zeros_like(q).index_add_(0, given, joint).T + 1e-9
                error_rate = 1 - counts.diagonal().sum() / counts.sum()
                counts = counts + EQUAL_ERRORS * ((1 - error_rate) * right + error_rate * wrong)
                q = counts / counts.sum(1, keepdim=True)
            joint = joint_with_labels(class_probabilities, q)
            likelihood = float(log_likelihood(joint))
        if likelihood - likelihood_before < 0.05:  # hardly more probable
            break
        likelihood_before = likelihood
    joint = (joint / joint.sum(1, keepdim=True)).detach()
    given_column = given[:, None]
    return Fit(
        wrong_probability=1 - joint.gather(1, given_column)[:, 0],
        class_probabilities=class_probabilities,
        proposed=joint.scatter(1, given_column, -1.0).argmax(1),
        calibration=(log_scales.detach(), offsets.detach()),
    )
