"""Page of the images whose answers an exported file changes: classes and probabilities of the model and of the file."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.common.report_page.evaluations import pictured
from tools.common.report_page.page import write_template
from tools.common.turns import progress_bar
from tools.export.formats import LOGITS, Export, answers
from utils.log import log
from vitamp.metrics import ONE_LABEL

MOST_SHOWN = 200
"""Images with pictures"""


def write_changed(export: Export, outputs: tuple[Tensor, Tensor], words: str, page: Path, flag: str) -> None:
    """Write `page`, the value of `flag`, unless the images are noise. `outputs`: of the model and of the file."""
    trained, images = export.trained, export.images
    dataset, data = images.dataset, trained.config.DATA
    given = [_by_class(export, answers(export, each)) for each in outputs]
    changed = torch.nonzero((given[0] != given[1]).any(1))[:, 0]
    if dataset is None:  # noise
        return
    probabilities = [trained.task.probabilities(each) if images.output == LOGITS else each for each in outputs]
    largest = (probabilities[0] - probabilities[1]).abs().amax(1)[changed]
    order = changed[largest.argsort(descending=True, stable=True)].tolist()
    truth = None if images.labels is None else _by_class(export, images.labels)
    shown = []
    for row in progress_bar(order[:MOST_SHOWN], "pictures"):
        named = given[0][row] != given[1][row]
        if truth is not None and trained.task.kind == ONE_LABEL:
            named |= truth[row]
        rows = [
            {
                "name": trained.name_of(label),
                "true": truth is not None and bool(truth[row, label]),
                "cells": [
                    (bool(says[row, label]), 100 * float(values[row, label]))
                    for says, values in zip(given, probabilities, strict=True)
                ],
            }
            for label in torch.nonzero(named)[:, 0].tolist()
        ]
        shown.append({**pictured(dataset, images.indices[row], data), "rows": rows})
    tiles = [(f"{len(images.names):,}", f"images {images.source}"), (f"{len(order):,}", "answers changed")]
    if truth is not None:
        before, after = ((each == truth).all(1) for each in given)
        tiles += [(f"{(before & ~after).sum():,}", "of them right before")]
        tiles += [(f"{(after & ~before).sum():,}", "of them right in the file")]
    title = f"Answers that {page.name.removesuffix('.changed.html')} changed"
    write_template(
        *("changed.html", page, flag),
        title=title,
        words=words,
        tiles=tiles,
        shown=shown,
        left_out=len(order) - len(shown),
        labelled=truth is not None,
    )
    log.info("  Look at them: %s", page)


def _by_class(export: Export, found: Tensor) -> Tensor:
    """Whether each image has each class, N x C."""
    return F.one_hot(found, export.trained.config.MODEL.NUM_CLASSES) > 0 if found.ndim == 1 else found > 0
