"""Page of the images whose answers an exported file changes: classes and probabilities of the model and of the file."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.common.report_page.evaluations import pictured
from tools.common.report_page.page import write_template
from tools.common.turns import progress_bar
from tools.export import CHANGED
from tools.export.check import answers
from tools.export.formats import Export
from utils.log import log
from vitamp.metrics import ONE_LABEL

MOST_SHOWN = 200
"""Most images with pictures"""


def write_changed(export: Export, outputs: list[Tensor], words: str, out: Path, flag: str) -> None:
    """Write the page of changed answers beside the exported file `out`; no page if no answer changed.

    `outputs`: of the model, and of the file. `words`: the verdict on cost and gain. `flag`: the flag that gave `out`.
    """
    trained = export.trained
    images = export.images
    labels = images.labels
    # Which classes the answers have, by model and by file: 2 x N x C.
    answered = torch.stack([answers(export, logits) for logits in outputs])
    if images.dataset is None or torch.equal(answered[0], answered[1]):  # None: noise, or resized for -with_resize
        return
    one_label = trained.task.kind == ONE_LABEL
    correct = torch.zeros_like(answered[0])
    if labels is not None:
        correct = F.one_hot(labels, answered.shape[2]) > 0 if one_label else labels > 0

    # The images whose probabilities changed most come first.
    percents = 100 * torch.stack([trained.task.probabilities(logits) for logits in outputs])
    changed = torch.nonzero((answered[0] != answered[1]).any(1))[:, 0]
    largest_change = (percents[0] - percents[1]).abs().amax(1)[changed]
    rows = changed[largest_change.argsort(descending=True, stable=True)].tolist()[:MOST_SHOWN]
    shown = []
    for row in progress_bar(rows, "pictures"):
        # Classes in only one of the answers, and with one label per image the correct class.
        shown_classes = answered[0, row] != answered[1, row]
        if one_label:
            shown_classes |= correct[row]
        classes = []
        for label in torch.nonzero(shown_classes)[:, 0].tolist():
            cells = list(zip(answered[:, row, label].tolist(), percents[:, row, label].tolist(), strict=True))
            classes.append((trained.name_of(label), bool(correct[row, label]), cells))
        shown.append({**pictured(images.dataset, images.indices[row], trained.config.DATA), "classes": classes})

    tiles = [(len(images.names), f"images {images.source}"), (len(changed), "answers changed")]
    if labels is not None:
        before, after = (answered == correct).all(2)[:, changed].sum(1).tolist()
        tiles += [(before, "of them right before"), (after, "of them right in the file")]
    page = out.with_name(f"{out.name}{CHANGED}")
    header = {"title": f"Answers that {out.name} changed", "words": words, "labelled": labels is not None}
    write_template("changed.html", page, flag, **header, tiles=tiles, shown=shown)
    log.info("  Look at them: %s", page)
