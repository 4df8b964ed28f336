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

    `outputs`: the logits of the model and those of the file, each images x classes. `words`: what the file costs in
    accuracy and gains in speed. `flag`: the flag that gave `out`.
    """
    trained = export.trained
    images = export.images
    labels = images.labels
    # The predicted classes as booleans (images x classes), by the model and by the file.
    by_model, by_file = (answers(export, logits) for logits in outputs)
    if images.dataset is None or torch.equal(by_model, by_file):  # None: noise, or resized for -with_resize
        return
    one_label = trained.task.kind == ONE_LABEL
    correct = torch.zeros_like(by_model)  # the labels as booleans; all False if they are unknown
    if labels is not None:
        correct = F.one_hot(labels, by_model.shape[1]) > 0 if one_label else labels > 0

    # The images whose probabilities changed most come first.
    model_percent, file_percent = (100 * trained.task.probabilities(logits) for logits in outputs)
    changed = torch.nonzero((by_model != by_file).any(1))[:, 0]
    largest_change = (model_percent - file_percent).abs().amax(1)[changed]
    rows = changed[largest_change.argsort(descending=True, stable=True)].tolist()[:MOST_SHOWN]
    shown = []
    for row in progress_bar(rows, "pictures"):
        # Classes that only one of the two predicts, and with one label per image the correct class.
        shown_classes = by_model[row] != by_file[row]
        if one_label:
            shown_classes |= correct[row]
        classes = []
        for label in torch.nonzero(shown_classes)[:, 0].tolist():
            # Whether the class is predicted, and its probability in percent, by the model and by the file.
            cell_of_model = (bool(by_model[row, label]), float(model_percent[row, label]))
            cell_of_file = (bool(by_file[row, label]), float(file_percent[row, label]))
            classes.append((trained.name_of(label), bool(correct[row, label]), [cell_of_model, cell_of_file]))
        shown.append({**pictured(images.dataset, images.indices[row], trained.config.DATA), "classes": classes})

    tiles = [(len(images.names), f"images {images.source}"), (len(changed), "answers changed")]
    if labels is not None:
        right_by_model = int((by_model == correct).all(1)[changed].sum())
        right_by_file = int((by_file == correct).all(1)[changed].sum())
        tiles += [(right_by_model, "of them right before"), (right_by_file, "of them right in the file")]
    page = out.with_name(f"{out.name}{CHANGED}")
    header = {"title": f"Answers that {out.name} changed", "words": words, "labelled": labels is not None}
    write_template("changed.html", page, flag, **header, tiles=tiles, shown=shown)
    log.info("  Look at them: %s", page)
