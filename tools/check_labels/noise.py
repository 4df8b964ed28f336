"""Which labels are wrong, from logits of models that did not see the image.

The given label of an image is taken for a draw: its right class i has the probability that the calibrated logits give
it, and class i is given as j with the probability Q[i, j]. Calibration (a scale and an offset for each class) and Q are
those of the greatest likelihood, by expectation maximisation as in Dawid and Skene (1979). The probability that a label
is wrong follows. Labels redrawn from the calibrated probabilities alone, as if Q were the identity, say how many labels
would look wrong if all were right: fewer where classes differ clearly, more where they look alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.progress import Progress
from utils.seeding import key

WRONG = 0.5
"""Probability from which on a label looks wrong"""
REDRAWN = 19
"""Times; so the largest number is a bound of 95 %"""
CLEARLY = 2
"""Times as many labels as that, and one, must look wrong, since no classifier is calibrated exactly"""
ROUNDS, UPDATES, STEPS = 40, 8, 6
"""Of calibration and Q in turn; updates of Q and steps of L-BFGS in each"""
EQUAL_SCALES = 2.0
"""How strongly scales of classes are drawn to their mean"""
EQUAL_ERRORS = 40.0
"""Images of each class by which its row of Q is drawn to the mean of all: a class of few images has no own pattern"""


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
    if_right: int
    """Largest number of them among labels that are redrawn as if all were right"""
    calibrations: list[Calibration]
    """With several labels per image, one for each class"""

    @property
    def clear(self) -> bool:
        return self.number > CLEARLY * (self.if_right + 1)


def find_wrong(logits: np.ndarray, labels: np.ndarray, seed: int, known: Calibration | None = None) -> Wrong:
    """`logits`: images x classes. `labels`: classes of the images. `known`: of labels that are not of these images."""
    outputs, given = torch.from_numpy(logits).double(), torch.from_numpy(labels)
    probability, right, whose, calibration = _fit(outputs, given, known)
    generator = np.random.Generator(np.random.Philox(key=key(seed, "labels")))
    redrawn = []
    for _ in Progress(range(REDRAWN), REDRAWN, "times", "redrawn labels"):
        draws = torch.from_numpy(generator.random((len(given), 1)))
        again = (draws > right.cumsum(1)).sum(1).clamp(max=right.shape[1] - 1)
        redrawn.append(int((_fit(outputs, again, known)[0] >= WRONG).sum()))
    others = whose.scatter(1, given[:, None], -1.0)
    count = int((probability >= WRONG).sum())
    return Wrong(probability.numpy(), right.numpy(), others.argmax(1).numpy(), count, max(redrawn), [calibration])


def _fit(logits: Tensor, given: Tensor, known: Calibration | None = None) -> tuple[Tensor, Tensor, Tensor, Calibration]:
    """The probability that each label is wrong, calibrated probabilities, those of each class given the label, and the
    calibration, unless it is `known`: then only Q is fitted."""
    images, classes = logits.shape
    same = torch.eye(classes, dtype=torch.float64)
    other = (1 - same) / max(classes - 1, 1)
    matrix, before = 0.98 * same + 0.02 * other, -np.inf
    scales, offsets = known or (torch.zeros(classes, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def calibrated() -> Tensor:
        return (logits * scales.exp() + offsets).softmax(1)

    right, joint = calibrated(), calibrated()
    for _ in range(ROUNDS):
        steps = torch.optim.LBFGS([scales, offsets], 1, STEPS, line_search_fn="strong_wolfe")

        def loss(matrix: Tensor = matrix, steps: torch.optim.LBFGS = steps) -> Tensor:
            steps.zero_grad()
            fit = (calibrated() * matrix[:, given].T).sum(1).clamp(min=1e-300).log().sum()
            total = (EQUAL_SCALES * (scales - scales.mean()).square().sum() - fit) / images
            total.backward()
            return total

        if known is None:
            steps.step(loss)
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
    return 1 - joint.gather(1, given[:, None])[:, 0], right, joint, (scales.detach(), offsets.detach())
