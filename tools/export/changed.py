"""Page of the images whose answers an exported file changes: classes and probabilities of the model and of the file."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.common.report_page.evaluations import pictured
from tools.common.report_page.page import write_template
from tools.common.turns import progress_bar
from tools.export import CHANGED
from tools.export.formats import Export, answers
from utils.log import log
from vitamp.metrics import ONE_LABEL

MOST_SHOWN = 200
"""Images with pictures"""


def write_changed(export: Export, outputs: list[Tensor], words: str, out: Path, flag: str) -> None:
    """Write the page of `out`, the value of `flag`. `outputs`: of the model and of the file; `words`: the verdict."""
    trained = export.trained
    images = export.images
    labels = images.labels
    given = torch.stack([answers(export, each) for each in outputs])
    if images.dataset is None or torch.equal(given[0], given[1]):  # None: noise, or images that were made
        return
    one_label = trained.task.kind == ONE_LABEL
    truth = torch.zeros_like(given[0])
    if labels is not None:
        truth = F.one_hot(labels, given.shape[2]) > 0 if one_label else labels > 0
    percents = 100 * torch.stack([trained.task.probabilities(each) for each in outputs])
    changed = torch.nonzero((given[0] != given[1]).any(1))[:, 0]
    largest = (percents[0] - percents[1]).abs().amax(1)[changed]
    first = changed[largest.argsort(descending=True, stable=True)].tolist()[:MOST_SHOWN]
    shown = []
    for row in progress_bar(first, "pictures"):
        named = given[0, row] != given[1, row]
        if one_label:
            named |= truth[row]
        classes = []
        for label in torch.nonzero(named)[:, 0].tolist():
            cells = list(zip(given[:, row, label].tolist(), percents[:, row, label].tolist(), strict=True))
            classes.append((trained.name_of(label), bool(truth[row, label]), cells))
        shown.append({**pictured(images.dataset, images.indices[row], trained.config.DATA), "classes": classes})
    tiles = [(len(images.names), f"images {images.source}"), (len(changed), "answers changed")]
    if labels is not None:
        before, after = (given == truth).all(2)[:, changed].sum(1).tolist()
        tiles += [(before, "of them right before"), (after, "of them right in the file")]
    page = out.with_name(f"{out.name}{CHANGED}")
    about = {"title": f"Answers that {out.name} changed", "words": words, "labelled": labels is not None}
    write_template("changed.html", page, flag, **about, tiles=tiles, shown=shown)
    log.info("  Look at them: %s", page)
