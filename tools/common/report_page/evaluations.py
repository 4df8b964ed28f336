"""Predictions of a run's best checkpoint, for the report: confusions, calibration, classes, mistakes, or pictures.

Each evaluation is what its template shows, by name; `predicted` is for `values_of_images`.
"""

import base64
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from PIL import Image

from datasets import ImageDataset
from datasets.decoding import Reader
from datasets.labels import images_of_classes
from datasets.transforms.pixels import middle_view
from engine.evaluation.data import OF_RUN, check_split, validations_of, whose_data
from engine.evaluation.start import gain_over_probe, probe_is_best
from engine.report.outcome import flatters, of_groups, splits_of
from engine.trained.model import Trained, load_trained, name_of, picture_of, split_of_run
from tools.common.evaluation import Evaluation, OneLabel, SeveralLabels, with_bar
from tools.common.report_page.charts import Reliability
from tools.common.report_page.runs import Headline
from utils.cli import CommandLine
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.record.history import History
from utils.record.predictions import GROUPS, read_probe
from utils.statistics.groups import effective_images
from utils.statistics.proportions import wilson
from utils.text import some_of
from vitamp.bands import picture_of_bands, shown_bands
from vitamp.metrics import AUROC, BALANCED, MAP, NO_LABELS, ONE_LABEL, TOP1, Metric, always_guessing, metric_named

IMAGE_OF = {"train": "training image", "val": "validation image", "test": "test image", "all": "image"}
MOST_ROWS = 100
"""Classes in a table"""
MOST_CLASSES = 20
"""Classes in the confusion matrix: more would not be readable on a screen."""
MOST_PAIRS = 15
MOST_MISTAKES = 12
# A confusion from which on it is named at the top.
NOTABLE_IMAGES = 2
NOTABLE_PERCENT = 5.0
"""Percent of its class"""
MOST_EXAMPLES = 12
"""Example images"""
MOST_WRONG = 9
"""Those of them that may have a wrong label while others have none"""
PAINTED = 8
# Pixels of the longer side.
THUMBNAIL = 112
ENLARGED = 480

Shown = dict[str, Any]


def evaluate(folder: Path, part: str, deciding: Metric, data_path: str | None = None) -> Shown | str:
    """Evaluation of the run in `folder` on a split of its data, or the reason why there is none.

    `deciding`: the metric of the headline. `data_path`: where the data is now, if it was moved.
    """
    try:
        given = CommandLine(flags={"DATA.DATA_PATH": (data_path, "-data_path")} if data_path else {})
        trained = load_trained(folder, calibrated=True, needs_labels=False, given=given)
        if data_path and whose_data(trained.config, trained.chosen) not in OF_RUN:
            raise UserError(f"-data_path {data_path}: not the images of the run, which evaluate.py can evaluate, too.")
        check_split(trained.config, trained.chosen, part)
        dataset = split_of_run(trained, part)
        image = IMAGE_OF[part]
        kind = {ONE_LABEL: _one_label, NO_LABELS: _without_labels}.get(trained.task.kind, _several_labels)
        weights = f"{trained.words()}: {trained.chosen.words}"
        calibration = trained.chosen.describe_calibration(applied=True)
        if calibration:
            weights += f"; {calibration}"
        shown = kind(trained, dataset, image, deciding)
        headline = shown["headline"]
        if headline:
            said = []
            if part == "val":
                number = validations_of(trained.config, trained.chosen)
                said.append(_gain(trained, folder, shown))
                said.append(flatters(number, folder, splits_of(trained.config.DATA)))
            grouped = of_groups(dataset.groups())
            if grouped:
                shown["remarks"].append(grouped)
                said.append(grouped)
            headline.remarks[:0] = [words for words in said if words]
        return {"weights": weights, "image": image, **shown}
    except (UserError, TrainingError) as error:
        return str(error)


def _gain(trained: Trained, folder: Path, shown: Shown) -> str:
    """What training has gained over the linear probe that it began with; '' if that is unknown."""
    true, _ = shown["predicted"]
    if read_probe(folder, true) is None or not trained.config.TRAIN.NUM_EPOCHS:
        return ""
    by = metric_named(trained.config.SAVE_BEST_BY)
    history = History.of_run(folder)
    gain = gain_over_probe(by, history, folder)
    return gain if trained.chosen.meta["update"] else probe_is_best(by, history, gain)


def _one_label(trained: Trained, dataset: ImageDataset, image: str, deciding: Metric) -> Shown:
    found = OneLabel.of(trained, with_bar(trained, dataset), dataset.groups())
    true = found.rows.label
    guess = found.rows.guess
    groups = np.array(found.groups)
    classes = _rows_of_classes(trained, found)
    for row in classes:
        row["mistaken_for"] = found.mistaken_for(trained, row["label"])
        of = (true == row["label"]).numpy()
        independent = effective_images((guess[of] == row["label"]).numpy(), groups[of] if len(groups) else ())
        row["recall_interval"] = wilson(row["recall"], independent)
    classes.sort(key=lambda row: (row["recall"], row["precision"]))
    chosen = list(range(len(found.support)))
    if len(chosen) > MOST_CLASSES:  # the most confused ones, of equally confused ones those with more images
        order = (found.support + found.predicted - 2 * found.right) * (found.images + 1) + found.support
        chosen = sorted(torch.from_numpy(order).topk(MOST_CLASSES).indices.tolist())
    matrix = found.confusion(chosen)
    percents = 100 * matrix / np.maximum(found.support[chosen], 1)[:, None]
    cells = zip(matrix.tolist(), percents.tolist(), strict=True)
    about_error = found.chance.words(found.ece)
    calibration = trained.chosen.calibration
    if calibration is not None and calibration.images == found.images:
        about_error += " If the temperature was fitted on these images, the error is a little too low."
    wrong = (true != guess).nonzero()[:, 0]
    pairs = _confused_pairs(trained, found, wrong)
    frequent = _frequent(pairs)
    remarks = [frequent] if frequent else []
    remarks += found.strange(trained)
    metric = deciding if deciding in found.values else TOP1
    headline = Headline(
        metric,
        found.values[metric],
        interval=found.intervals[metric.name],
        images=found.images,
        image=image,
        guess={TOP1: found.largest_class_percent, BALANCED: 100 / len(found.present)}.get(metric),
        guessing="guessing one class" if metric is BALANCED else "always guessing the largest class",
        remarks=remarks,
    )
    return {
        "template": "one.html",
        "predicted": (true.numpy(), {"guess": guess.numpy(), GROUPS: groups}),
        "headline": headline,
        "tiles": [(one.words, one.number(value), found.intervals[one.name]) for one, value in found.shown.items()],
        "evaluated": found.images,
        "remarks": found.remarks(),
        "guessing": always_guessing(found.largest_class_percent, found.values[TOP1]),
        "classes": classes[:MOST_ROWS],
        "left_out": max(0, len(classes) - MOST_ROWS),
        "names": [trained.name_of(label) for label in chosen],
        "matrix": [list(zip(images, percent, strict=True)) for images, percent in cells],
        "has_all_classes": len(chosen) == len(found.support),
        "pairs": pairs,
        "reliability": Reliability(found.bins, found.ece, about_error),
        "mistakes": _mistakes(trained, dataset, found, wrong),
        "wrong": len(wrong),
    }


def _confused_pairs(trained: Trained, found: OneLabel, wrong: torch.Tensor) -> list[Shown]:
    """The most frequent confusions, of the images `wrong`."""
    true = found.rows.label[wrong].tolist()
    guess = found.rows.guess[wrong].tolist()
    pairs = []
    for (label, other), count in Counter(zip(true, guess, strict=True)).most_common(MOST_PAIRS):
        of_class = int(found.support[label])
        pairs.append(
            {
                "true": trained.name_of(label),
                "guess": trained.name_of(other),
                "images": count,
                "of_class": of_class,
                "percent": 100 * count / of_class,
            }
        )
    return pairs


def _frequent(pairs: Sequence[Shown]) -> str:
    """A sentence on the notable ones of the most frequent confusions; '' if none is."""
    most = pairs[0]["images"] if pairs else 0
    if most < NOTABLE_IMAGES:
        return ""
    each = [
        f"{pair['true']} taken for {pair['guess']} ({most:,} of {pair['of_class']:,} images)"
        for pair in pairs
        if pair["images"] == most and pair["percent"] >= NOTABLE_PERCENT
    ]
    if not each:
        return ""
    title = "A frequent mistake" if len(each) == 1 else "Frequent mistakes"
    return f"{title}: {some_of(each, 3, '; ')}."


def _mistakes(trained: Trained, dataset: ImageDataset, found: OneLabel, wrong: torch.Tensor) -> list[Shown]:
    """The most confident mistakes, of the images `wrong`."""
    rows = found.rows
    worst = wrong[rows.confidence[wrong].argsort(descending=True, stable=True)][:MOST_MISTAKES]
    return [
        {
            **pictured(dataset, row, trained.config.DATA),
            "true": trained.name_of(int(rows.label[row])),
            "guess": trained.name_of(int(rows.guess[row])),
            "confidence": 100 * float(rows.confidence[row]),
            "probability_of_true": 100 * float(rows.nll[row].neg().exp()),
        }
        for row in worst.tolist()
    ]


def _several_labels(trained: Trained, dataset: ImageDataset, image: str, deciding: Metric) -> Shown:
    if not dataset.sample_labels().any():
        raise UserError(f"no {image} has a label, so nothing can be measured.")
    found = SeveralLabels.of(trained, with_bar(trained, dataset), dataset.groups())
    classes = _rows_of_classes(trained, found)
    for row in classes:
        label = row["label"]
        row["average_precision"] = found.average_precision[label]
        row["auroc"] = found.auroc_text(label)
        row["threshold"] = found.thresholds[label]
    classes.sort(key=lambda row: (row["average_precision"], row["name"]))
    remarks = [f"Its macro F1 is {found.at_thresholds['f1_macro']:.2f} %."]
    if len(classes) > 1:
        weakest = classes[0]
        precision = f"average precision {weakest['average_precision']:.1f} %"
        remarks.append(
            f"Weakest class: {weakest['name']} ({precision}, {weakest['images']:,} of {found.images:,} images)."
        )
    metric = AUROC if deciding is AUROC else MAP
    headline = Headline(
        metric,
        found.values[metric],
        interval=found.intervals[metric.name],
        images=found.images,
        image=image,
        guess=50.0 if metric is AUROC else float(np.mean([row["prevalence"] for row in classes])),
        guessing="ordering the images at random",
        remarks=remarks,
    )
    tiles = [(one.words, one.number(value), found.intervals[one.name]) for one, value in found.shown.items()]
    at_thresholds = {"micro F1": "f1_micro", "macro F1": "f1_macro", "images with all labels right": "exact_match"}
    for words, key in at_thresholds.items():
        tiles.append((words, MAP.number(found.at_thresholds[key]), found.intervals.get(f"{key}_at_thresholds")))
    examples, wrong = _examples(trained, dataset, found)
    return {
        "template": "several.html",
        "predicted": (found.rows[1], {"logits": found.rows[0], GROUPS: np.array(dataset.groups())}),
        "headline": headline,
        "tiles": tiles,
        "evaluated": found.images,
        "remarks": found.remarks(),
        "thresholds": trained.thresholds()[1],
        "classes": classes[:MOST_ROWS],
        "left_out": max(0, len(classes) - MOST_ROWS),
        "unmeasured": int((found.support == 0).sum()),
        "wrong": wrong,
        "examples": examples,
    }


def _examples(trained: Trained, dataset: ImageDataset, found: SeveralLabels) -> tuple[list[Shown], int]:
    """Images with wrong labels, those with the most first, of equally many the most confident; then right ones.

    Also returns how many images have wrong labels.
    """
    probabilities, truth = found.rows
    predicted = probabilities >= found.thresholds
    wrong = predicted != truth
    error = np.where(wrong, np.abs(probabilities - truth), 0)
    order = np.lexsort((-error.max(1), -wrong.sum(1))).tolist()
    mistaken = int(wrong.any(1).sum())
    most = max(MOST_WRONG, MOST_EXAMPLES - (len(order) - mistaken))
    chosen = order[: min(mistaken, most)] + order[mistaken:]
    examples = []
    for row in chosen[:MOST_EXAMPLES]:
        labels = []
        for label in np.flatnonzero(predicted[row] | truth[row]).tolist():
            kind = "right" if truth[row, label] else "extra"
            if not predicted[row, label]:
                kind = "missed"
            probability = 100 * float(probabilities[row, label])
            labels.append({"name": trained.name_of(label), "kind": kind, "probability": probability})
        examples.append({**pictured(dataset, row, trained.config.DATA), "labels": labels})
    return examples, mistaken


def _without_labels(trained: Trained, dataset: ImageDataset, _image: str, _deciding: Metric) -> Shown:
    """Images with hidden patches, and as the model predicts them."""
    indices = torch.linspace(0, len(dataset) - 1, min(PAINTED, len(dataset))).long().unique().tolist()
    batch = dataset.__getitems__([(0, index) for index in indices]).images.to(trained.precision.device)
    model: Any = trained.model
    inputs: Any = trained.inputs
    originals = inputs(batch)
    hidden, predicted = model.painted(originals)
    shown = [_named(dataset, index) for index in indices]
    for name, images in {"hidden": hidden, "predicted": predicted, "original": originals}.items():
        pixels = ((images - inputs.offset) / inputs.factor).cpu().permute(0, 2, 3, 1)
        if trained.config.DATA.is_plain:
            pixels = pixels.round().clamp(0, 255).byte()
        for one, image in zip(shown, pixels, strict=True):
            one[name] = data_uri(picture_of_bands(image.numpy()))
    return {
        "template": "pixels.html",
        "headline": None,  # only validation measures how much of the images is explained
        "hidden": 100 * trained.config.MODEL.MASK_RATIO,
        "images": shown,
    }


def _rows_of_classes(trained: Trained, found: Evaluation) -> list[Shown]:
    """A row for each class that has images."""
    classes = len(found.support)
    # Empty texts if the number of training images is unknown before these are read.
    training = [""] * classes
    try:
        labels = split_of_run(trained, "train").sample_labels()
    except UserError:  # only the images that are evaluated are there
        labels = None
    if labels is not None:
        training = [f"{images:,}" for images in images_of_classes(labels, classes).tolist()]
    recall = found.recall
    precision = found.precision
    f1 = found.f1
    return [
        {
            "label": label,
            "name": trained.name_of(label),
            "training": training[label],
            "images": int(found.support[label]),
            "prevalence": 100 * int(found.support[label]) / found.images,
            "recall": float(recall[label]),
            "precision": float(precision[label]),
            "f1": float(f1[label]),
        }
        for label in found.present
    ]


def _named(dataset: ImageDataset, index: int) -> Shown:
    """Its name, and the short one: folder and file."""
    image = name_of(dataset, index)
    return {"image": image, "short": "/".join(PurePath(image).parts[-2:])}


def pictured(dataset: ImageDataset, index: int, data: DataConfig) -> Shown:
    """The whole image, the crop that the model sees, in percent of it, and a link to its file if it is one."""
    shown = {**_named(dataset, index), "link": None, "crop": None}
    samples = dataset.single_images()
    if samples is None:
        shown["picture"] = data_uri(picture_of(dataset, index), ENLARGED)
        return shown
    pixels = Reader(data).whole(samples.read(index))
    shown["picture"] = data_uri(picture_of_bands(pixels), ENLARGED)
    file = Path(shown["image"])
    if samples.stored == "files" and file.is_file():
        shown["link"] = file.resolve().as_uri()
    if not data.is_plain:
        shown["bands"] = shown_bands(data.IMAGE_CHANNELS)
    if data.CROP != "none":
        height, width = pixels.shape[:2]
        view = middle_view(data, width, height)
        seen = (
            (view.left, width),
            (view.top, height),
            (view.columns * view.across, width),
            (view.rows * view.down, height),
        )
        shown["crop"] = tuple(f"{100 * part / whole:.1f}" for part, whole in seen)
    return shown


def data_uri(picture: Image.Image, side: int = THUMBNAIL) -> str:
    """Thumbnail of so many pixels as a data: URI."""
    size = max(picture.size)
    kind = "jpeg" if size > THUMBNAIL else "png"  # of photographs a tenth as large
    if size > side:
        picture = picture.copy()
        picture.thumbnail((side, side))
    elif size <= side // 2:  # so that single pixels are visible
        factor = side // size
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    content = io.BytesIO()
    picture.save(content, kind, optimize=True, quality=80)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
