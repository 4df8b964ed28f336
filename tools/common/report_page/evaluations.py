"""Predictions of a run's best checkpoint, for the report: confusions, calibration, classes, mistakes, or pictures.

Each evaluation is what its template shows, by name; `predicted` is for `values_of_images`.
"""

import base64
import io
from collections import Counter
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
from engine.report.outcome import flatters, gain_over_probe, of_groups, probe_is_best, splits_of
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
MOST_PAIRS, MOST_MISTAKES = 15, 12
NOTABLE_IMAGES, NOTABLE_PERCENT = 2, 5.0
"""Images, and percent of its class, from which on a confusion is named at the top"""
MOST_EXAMPLES, MOST_WRONG = 12, 9
"""Example images, and how many of them may have a wrong label while others have none"""
PAINTED = 8
THUMBNAIL, ENLARGED = 112, 480
"""Pixels of the longer side"""

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
        dataset, image = split_of_run(trained, part), IMAGE_OF[part]
        kind = {ONE_LABEL: _one_label, NO_LABELS: _without_labels}.get(trained.task.kind, _several_labels)
        weights = f"{trained.words()}: {trained.chosen.words}"
        if calibration := trained.chosen.describe_calibration(applied=True):
            weights += f"; {calibration}"
        shown = kind(trained, dataset, image, deciding)
        if headline := shown["headline"]:
            said = [of_groups(dataset.groups())]
            shown["remarks"] += filter(None, said)
            if part == "val":
                number = validations_of(trained.config, trained.chosen)
                said = [_gain(trained, folder, shown), flatters(number, folder, splits_of(trained.config.DATA)), *said]
            headline.remarks[:0] = filter(None, said)
        return {"weights": weights, "image": image, **shown}
    except (UserError, TrainingError) as error:
        return str(error)


def _gain(trained: Trained, folder: Path, shown: Shown) -> str:
    """What training has gained over the linear probe that it began with; '' if that is unknown."""
    true, _ = shown["predicted"]
    if read_probe(folder, true) is None or not trained.config.TRAIN.NUM_EPOCHS:
        return ""
    by, history = metric_named(trained.config.SAVE_BEST_BY), History.of_run(folder)
    gain = gain_over_probe(by, history, folder)
    return gain if trained.chosen.meta["update"] else probe_is_best(by, history, gain)


def _one_label(trained: Trained, dataset: ImageDataset, image: str, deciding: Metric) -> Shown:
    found = OneLabel.of(trained, with_bar(trained, dataset), dataset.groups())
    true, guess, groups = found.rows.label, found.rows.guess, np.array(found.groups)
    classes = _rows_of_classes(trained, found)
    for row in classes:
        row["mistaken_for"] = found.mistaken_for(trained, row["label"])
        of = (true == row["label"]).numpy()
        independent = effective_images((guess[of] == row["label"]).numpy(), groups[of] if len(groups) else ())
        row["recall_interval"] = wilson(row["recall"], independent)
    classes.sort(key=lambda row: (row["recall"], row["precision"]))
    wrong = (true != guess).nonzero()[:, 0]
    confusions = Counter(zip(true[wrong].tolist(), guess[wrong].tolist(), strict=True))
    pairs = [
        {
            "true": trained.name_of(label),
            "guess": trained.name_of(other),
            "images": count,
            "of_class": int(found.support[label]),
            "percent": 100 * count / int(found.support[label]),
        }
        for (label, other), count in confusions.most_common(MOST_PAIRS)
    ]
    chosen = list(range(len(found.support)))
    if len(chosen) > MOST_CLASSES:  # the most confused ones, of equally confused ones those with more images
        order = (found.support + found.predicted - 2 * found.right) * (found.images + 1) + found.support
        chosen = sorted(torch.from_numpy(order).topk(MOST_CLASSES).indices.tolist())
    matrix = found.confusion(chosen)
    percents = 100 * matrix / np.maximum(found.support[chosen], 1)[:, None]
    worst = wrong[found.rows.confidence[wrong].argsort(descending=True, stable=True)][:MOST_MISTAKES]
    mistakes = [
        {
            **pictured(dataset, row, trained.config.DATA),
            "true": trained.name_of(int(true[row])),
            "guess": trained.name_of(int(guess[row])),
            "confidence": 100 * float(found.rows.confidence[row]),
            "probability_of_true": 100 * float(found.rows.nll[row].neg().exp()),
        }
        for row in worst.tolist()
    ]
    metric = deciding if deciding in found.values else TOP1
    guess_of = {TOP1: found.largest_class_percent, BALANCED: 100 / len(found.present)}.get(metric)
    always, remarks = "guessing one class" if metric is BALANCED else "always guessing the largest class", list[str]()
    often = [pair for pair in pairs if pair["images"] == pairs[0]["images"] >= NOTABLE_IMAGES]
    if often := [pair for pair in often if pair["percent"] >= NOTABLE_PERCENT]:
        each = [
            f"{one['true']} taken for {one['guess']} ({one['images']:,} of {one['of_class']:,} images)" for one in often
        ]
        remarks.append(f"{'Frequent mistakes' if each[1:] else 'A frequent mistake'}: {some_of(each, 3, '; ')}.")
    remarks += found.strange(trained)
    about_error = found.chance.words(found.ece)
    if (kept := trained.chosen.calibration) is not None and kept.images == found.images:
        about_error += " If the temperature was fitted on these images, the error is a little too low."
    headline = Headline(
        metric, found.values[metric], found.intervals[metric.name], found.images, image, guess_of, always, remarks
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
        "matrix": [list(zip(*rows, strict=True)) for rows in zip(matrix.tolist(), percents.tolist(), strict=True)],
        "has_all_classes": len(chosen) == len(found.support),
        "pairs": pairs,
        "reliability": Reliability(found.bins, found.ece, about_error),
        "mistakes": mistakes,
        "wrong": len(wrong),
    }


def _several_labels(trained: Trained, dataset: ImageDataset, image: str, deciding: Metric) -> Shown:
    if not dataset.sample_labels().any():
        raise UserError(f"no {image} has a label, so nothing can be measured.")
    found = SeveralLabels.of(trained, with_bar(trained, dataset), dataset.groups())
    classes = _rows_of_classes(trained, found)
    for row in classes:
        label = row["label"]
        row |= {"average_precision": found.average_precision[label], "auroc": found.auroc_text(label)}
        row["threshold"] = found.thresholds[label]
    classes.sort(key=lambda row: (row["average_precision"], row["name"]))
    metric, guessing = AUROC if deciding is AUROC else MAP, "ordering the images at random"
    guess = 50.0 if metric is AUROC else float(np.mean([row["prevalence"] for row in classes]))
    remarks = [f"Its macro F1 is {found.at_thresholds['f1_macro']:.2f} %."]
    if len(classes) > 1:
        weakest = classes[0]
        precision = f"average precision {weakest['average_precision']:.1f} %"
        remarks.append(
            f"Weakest class: {weakest['name']} ({precision}, {weakest['images']:,} of {found.images:,} images)."
        )
    at = found.intervals[metric.name]
    examples, wrong = _examples(trained, dataset, found)
    return {
        "template": "several.html",
        "predicted": (found.rows[1], {"logits": found.rows[0], GROUPS: np.array(dataset.groups())}),
        "headline": Headline(metric, found.values[metric], at, found.images, image, guess, guessing, remarks),
        "tiles": [
            *((one.words, one.number(value), found.intervals[one.name]) for one, value in found.shown.items()),
            ("micro F1", MAP.number(found.at_thresholds["f1_micro"]), None),
            ("macro F1", MAP.number(found.at_thresholds["f1_macro"]), None),
            (
                "images with all labels right",
                MAP.number(found.at_thresholds["exact_match"]),
                found.intervals["exact_match_at_thresholds"],
            ),
        ],
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
    order = np.lexsort((-error.max(1), -wrong.sum(1)))
    mistaken = int(wrong.any(1).sum())
    most = max(MOST_WRONG, MOST_EXAMPLES - (len(order) - mistaken))
    examples = []
    for row in map(int, [*order[: min(mistaken, most)], *order[mistaken:]][:MOST_EXAMPLES]):
        labels = [
            {
                "name": trained.name_of(label),
                "kind": "missed" if not predicted[row, label] else "right" if truth[row, label] else "extra",
                "probability": 100 * float(probabilities[row, label]),
            }
            for label in np.flatnonzero(predicted[row] | truth[row]).tolist()
        ]
        examples.append({**pictured(dataset, row, trained.config.DATA), "labels": labels})
    return examples, mistaken


def _without_labels(trained: Trained, dataset: ImageDataset, _image: str, _deciding: Metric) -> Shown:
    """Images with hidden patches, and as the model predicts them."""
    indices = torch.linspace(0, len(dataset) - 1, min(PAINTED, len(dataset))).long().unique().tolist()
    batch = dataset.__getitems__([(0, index) for index in indices]).images.to(trained.precision.device)
    model: Any = trained.model
    inputs: Any = trained.inputs
    originals = inputs(batch)
    shown: Shown = {}
    for name, images in zip(("hidden", "predicted", "original"), (*model.painted(originals), originals), strict=True):
        pixels = ((images - inputs.offset) / inputs.factor).cpu().permute(0, 2, 3, 1)
        pixels = pixels.round().clamp(0, 255).byte() if trained.config.DATA.is_plain else pixels
        shown[name] = [data_uri(picture_of_bands(one.numpy())) for one in pixels]
    return {
        "template": "pixels.html",
        "headline": None,  # only validation measures how much of the images is explained
        "hidden": 100 * trained.config.MODEL.MASK_RATIO,
        "images": [
            {**_named(dataset, index), **{kind: uris[row] for kind, uris in shown.items()}}
            for row, index in enumerate(indices)
        ],
    }


def _rows_of_classes(trained: Trained, found: Evaluation) -> list[Shown]:
    """A row for each class that has images."""
    classes = len(found.support)
    try:
        labels = split_of_run(trained, "train").sample_labels()
    except UserError:  # only the images that are evaluated are there
        labels = None
    # Empty texts if the number of training images is unknown before these are read.
    training = [""] * classes if labels is None else [f"{n:,}" for n in images_of_classes(labels, classes).tolist()]
    recall, precision, f1 = found.recall, found.precision, found.f1
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
    named, samples, link = _named(dataset, index), dataset.single_images(), None
    if samples is None:
        return {**named, "link": link, "picture": data_uri(picture_of(dataset, index), ENLARGED), "crop": None}
    pixels = Reader(data).whole(samples.read(index))
    if samples.stored == "files" and (file := Path(named["image"])).is_file():
        link = file.resolve().as_uri()
    bands = {} if data.is_plain else {"bands": shown_bands(data.IMAGE_CHANNELS)}
    crop, both = None, (pixels.shape[1], pixels.shape[0])
    if data.CROP != "none":
        view = middle_view(data, *both)
        seen = view.left, view.top, view.columns * view.across, view.rows * view.down
        crop = tuple(f"{100 * part / whole:.1f}" for part, whole in zip(seen, both * 2, strict=True))
    return {**named, "link": link, "picture": data_uri(picture_of_bands(pixels), ENLARGED), "crop": crop, **bands}


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
