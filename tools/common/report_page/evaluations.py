"""Evaluate a run's best checkpoint for the report: confusions, calibration, classes, mistakes, or pictures.

An evaluation is a dictionary of what its template shows. Its `predicted` is not shown: it is for `values_of_images`.
"""

import base64
import io
import time
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
from engine.evaluation.data import OF_RUN, check_split, whose_data
from engine.evaluation.start import gain_over_probe, probe_is_best
from engine.trained.model import Trained, load_trained, name_of, picture_of, split_of_run
from tools.common.evaluation import Evaluation, OneLabel, SeveralLabels, with_bar
from tools.common.maps import laid_over, trained_maps
from tools.common.report_page.charts import Reliability
from tools.common.trust import IMAGE_OF, doubts_of
from utils.cli import CommandLine
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.record.history import History
from utils.record.predictions import GROUPS, read_probe
from utils.statistics.proportions import Interval
from utils.text import some_of
from vitamp.bands import picture_of_bands, shown_bands
from vitamp.metrics import AUROC, MAP, NO_LABELS, ONE_LABEL, TOP1, Metric, always_guessing, metric_named

MOST_ROWS = 100
"""Most classes in the table of classes"""
MOST_CLASSES = 20
"""Most classes in the confusion matrix: more would not be readable on a screen."""
MOST_PAIRS = 15
MOST_MISTAKES = 12
# Least size of a confusion that the top of the page names.
NOTABLE_IMAGES = 3
NOTABLE_PERCENT = 5.0
"""Percent of the images of its class"""
MOST_MEAN_MAPS = 12
MAPPED = 10
"""Most images in a mean map"""
LEAST_MAPPED = 5
"""Least images in a mean map"""
SECONDS_OF_MAPS = 30
"""After this time, no more images are mapped for the mean maps; the same for mistakes or examples"""
MOST_EXAMPLES = 12
"""Most example images with several labels"""
MOST_WRONG = 9
"""Most of them with wrong labels, as long as there are enough images without any"""
PAINTED = 8
"""Number of images that a masked autoencoder predicts"""
# Pixels of the longer side of a picture.
THUMBNAIL = 112
ENLARGED = 480

Shown = dict[str, Any]


def evaluate(folder: Path, part: str, deciding: Metric, data_path: str | None = None) -> Shown | str:
    """Evaluate the run in `folder` on a split of its data, for its template; or return why that is not possible.

    `part`: the split, as -part names it. `deciding`: the metric of the headline.
    `data_path`: the folder of the data, if it was moved since the run.
    """
    try:
        flags: dict[str, tuple[Any, str]] = {"EVAL": (True, "-eval"), "DATA.PART": (part, "-part")}
        if data_path:
            flags["DATA.DATA_PATH"] = (data_path, "-data_path")
        given = CommandLine(flags=flags)
        trained = load_trained(folder, calibrated=True, needs_labels=False, given=given)
        if data_path and whose_data(trained.config, trained.chosen) not in OF_RUN:
            raise UserError(f"-data_path {data_path}: not the images of the run, which evaluate.py can evaluate, too.")
        check_split(trained.config, trained.chosen, part)
        dataset = split_of_run(trained, part)
        image = IMAGE_OF[part]
        evaluate_task = {ONE_LABEL: _one_label, NO_LABELS: _without_labels}.get(trained.task.kind, _several_labels)
        weights = f"{trained.words()}: {trained.chosen.words}"
        calibration = trained.chosen.describe_calibration(applied=True)
        if calibration:
            weights += f"; {calibration}"

        shown = evaluate_task(trained, dataset, image, deciding)
        headline = shown["headline"]
        if headline and part == "val":
            gain = _gain_in_words(trained, folder, shown)
            headline.remarks[:0] = [gain] if gain else []
        return {"weights": weights, "image": image, **shown}
    except (UserError, TrainingError) as error:
        return str(error)


def _gain_in_words(trained: Trained, folder: Path, shown: Shown) -> str:
    """Say what training has gained over the linear probe that it began with; '' if that is unknown."""
    labels, _ = shown["predicted"]
    if read_probe(folder, labels) is None or not trained.config.TRAIN.NUM_EPOCHS:
        return ""
    metric = metric_named(trained.config.SAVE_BEST_BY)
    history = History.of_run(folder)
    gain = gain_over_probe(metric, history, folder)
    has_updates = trained.chosen.meta["update"] > 0
    return gain if has_updates else probe_is_best(metric, history, gain)


def _one_label(trained: Trained, dataset: ImageDataset, _image: str, deciding: Metric) -> Shown:
    """Evaluate a model for images with one label, for templates/one.html."""
    evaluation = OneLabel.of(trained, with_bar(trained, dataset), dataset.groups())
    labels = evaluation.rows.label
    guesses = evaluation.rows.guess

    classes = _rows_of_classes(trained, evaluation)
    for row in classes:
        row["mistaken_for"] = evaluation.mistaken_for(trained, row["label"])
        row["recall_interval"] = evaluation.recall_interval(row["label"])
    classes.sort(key=lambda row: (row["recall"], row["precision"]))

    # Of many classes, the matrix has the most confused ones; of equally confused ones, those with more images.
    in_matrix = list(range(len(evaluation.support)))
    if len(in_matrix) > MOST_CLASSES:
        confused = evaluation.support + evaluation.predicted - 2 * evaluation.right
        order = confused * (evaluation.images + 1) + evaluation.support
        in_matrix = sorted(torch.from_numpy(order).topk(MOST_CLASSES).indices.tolist())
    matrix = evaluation.confusion(in_matrix)
    percents = 100 * matrix / np.maximum(evaluation.support[in_matrix], 1)[:, None]
    cells = zip(matrix.tolist(), percents.tolist(), strict=True)

    about_error = evaluation.chance.words(evaluation.ece)
    calibration = trained.chosen.calibration
    if calibration is not None and calibration.images == evaluation.images:
        about_error += " If the temperature was fitted on these images, the error is a little too low."
    wrong = (labels != guesses).nonzero()[:, 0]
    pairs = _confused_pairs(trained, evaluation, wrong)
    about_pairs = _frequent_mistakes(pairs)
    headline, found = doubts_of(trained, dataset, evaluation, deciding)
    headline.remarks = [about_pairs] if about_pairs else []
    return {
        "template": "one.html",
        "predicted": (labels.numpy(), {"guess": guesses.numpy(), GROUPS: np.array(evaluation.groups)}),
        "headline": headline,
        "doubts": found,
        "tiles": _tiles(evaluation),
        "evaluated": evaluation.images,
        "remarks": evaluation.remarks(),
        "guessing": always_guessing(evaluation.largest_class_percent, evaluation.values[TOP1]),
        "classes": classes[:MOST_ROWS],
        "left_out": max(0, len(classes) - MOST_ROWS),
        "names": [trained.name_of(label) for label in in_matrix],
        "matrix": [list(zip(images, percent, strict=True)) for images, percent in cells],
        "has_all_classes": len(in_matrix) == len(evaluation.support),
        "pairs": pairs,
        "reliability": Reliability(evaluation.bins, evaluation.ece, about_error),
        "mistakes": _mistakes(trained, dataset, evaluation, wrong),
        "mean_maps": _mean_maps(trained, dataset, guesses, [row["label"] for row in classes]),
        "wrong": len(wrong),
    }


def _tiles(evaluation: Evaluation) -> list[tuple[str, str, Interval | None]]:
    """Return name, value and interval of each metric to show at the top of an evaluation."""
    intervals = evaluation.intervals
    return [(metric.words, metric.number(value), intervals[metric.name]) for metric, value in evaluation.shown.items()]


def _confused_pairs(trained: Trained, evaluation: OneLabel, wrong: torch.Tensor) -> list[Shown]:
    """Return the most frequent confusions of two classes. `wrong`: indices of the images with a wrong guess."""
    labels = evaluation.rows.label[wrong].tolist()
    guesses = evaluation.rows.guess[wrong].tolist()
    pairs = []
    for (label, guess), count in Counter(zip(labels, guesses, strict=True)).most_common(MOST_PAIRS):
        of_class = int(evaluation.support[label])
        pairs.append(
            {
                "true": trained.name_of(label),
                "guess": trained.name_of(guess),
                "images": count,
                "of_class": of_class,
                "percent": 100 * count / of_class,
            }
        )
    return pairs


def _frequent_mistakes(pairs: Sequence[Shown]) -> str:
    """Write a sentence on the most frequent confusions that are notable; '' if none is.

    `pairs`: from `_confused_pairs`, the most frequent one first.
    """
    most = pairs[0]["images"] if pairs else 0
    if most < NOTABLE_IMAGES:
        return ""
    notable = [
        f"{pair['true']} taken for {pair['guess']} ({most:,} of {pair['of_class']:,} images)"
        for pair in pairs
        if pair["images"] == most and pair["percent"] >= NOTABLE_PERCENT
    ]
    if not notable:
        return ""
    title = "A frequent mistake" if len(notable) == 1 else "Frequent mistakes"
    return f"{title}: {some_of(notable, 3, '; ')}."


def _mistakes(trained: Trained, dataset: ImageDataset, evaluation: OneLabel, wrong: torch.Tensor) -> list[Shown]:
    """Return the most confident mistakes with their pictures. `wrong`: indices of the images with a wrong guess."""
    rows = evaluation.rows
    end = time.monotonic() + SECONDS_OF_MAPS
    most_confident = wrong[rows.confidence[wrong].argsort(descending=True, stable=True)]
    return [
        {
            **pictured(dataset, index, trained.config.DATA),
            "map": _mapped(trained, dataset, [index], int(rows.guess[index]), end),
            "true": trained.name_of(int(rows.label[index])),
            "guess": trained.name_of(int(rows.guess[index])),
            "confidence": 100 * float(rows.confidence[index]),
            "probability_of_true": 100 * float(rows.nll[index].neg().exp()),
        }
        for index in most_confident[:MOST_MISTAKES].tolist()
    ]


def _mean_maps(trained: Trained, dataset: ImageDataset, guesses: torch.Tensor, labels: Sequence[int]) -> list[Shown]:
    """Return for each class the mean map of some images that are predicted as it, over their mean picture.

    `labels`: of the classes, the most important first. Classes that few images are predicted as are left out.
    """
    mean_maps = []
    end = time.monotonic() + SECONDS_OF_MAPS
    for label in labels:
        indices = (guesses == label).nonzero()[:, 0]
        if len(indices) < LEAST_MAPPED or len(mean_maps) == MOST_MEAN_MAPS:
            continue
        chosen = indices[torch.linspace(0, len(indices) - 1, MAPPED).long().unique()].tolist()
        shown_map = _mapped(trained, dataset, chosen, label, end)
        if not shown_map:
            break
        mean_maps.append({"name": trained.name_of(label), "images": len(chosen), "map": shown_map})
    return mean_maps


def _mapped(trained: Trained, dataset: ImageDataset, indices: Sequence[int], label: int, end: float) -> str:
    """Return the mean map of some images for a class, over their mean picture, as a data: URI; '' without time.

    `end`: time from which on no image is mapped, as of time.monotonic().
    """
    images = dataset.__getitems__([(0, index) for index in indices]).images
    maps = []
    for pixels in images:
        if time.monotonic() > end:
            return ""
        maps.append(trained_maps(trained, pixels, [label], trained.config.DATA.val_batch))
    mean_picture = images.float().mean(0).to(images.dtype)
    return data_uri(laid_over(mean_picture, torch.cat(maps).mean(0)), 2 * THUMBNAIL)


def _several_labels(trained: Trained, dataset: ImageDataset, image: str, deciding: Metric) -> Shown:
    """Evaluate a model for images with several labels, for templates/several.html. `image`: what an image is called."""
    if not dataset.sample_labels().any():
        raise UserError(f"no {image} has a label, so nothing can be measured.")
    evaluation = SeveralLabels.of(trained, with_bar(trained, dataset), dataset.groups())

    classes = _rows_of_classes(trained, evaluation)
    for row in classes:
        label = row["label"]
        row["average_precision"] = evaluation.average_precision[label]
        row["auroc"] = evaluation.auroc_text(label)
        row["threshold"] = evaluation.thresholds[label]
    classes.sort(key=lambda row: (row["average_precision"], row["name"]))

    remarks = [f"Its macro F1 is {evaluation.at_thresholds['f1_macro']:.2f} %."]
    if len(classes) > 1:
        weakest = classes[0]
        precision = f"average precision {weakest['average_precision']:.1f} %"
        remarks.append(
            f"Weakest class: {weakest['name']} ({precision}, {weakest['images']:,} of {evaluation.images:,} images)."
        )
    headline, found = doubts_of(trained, dataset, evaluation, AUROC if deciding is AUROC else MAP)
    headline.remarks = remarks

    tiles = _tiles(evaluation)
    at_thresholds = {"micro F1": "f1_micro", "macro F1": "f1_macro", "images with all labels right": "exact_match"}
    for words, key in at_thresholds.items():
        interval = evaluation.intervals.get(f"{key}_at_thresholds")
        tiles.append((words, MAP.number(evaluation.at_thresholds[key]), interval))
    examples, wrong = _examples(trained, dataset, evaluation)
    probabilities, truth = evaluation.rows
    return {
        "template": "several.html",
        "predicted": (truth, {"logits": probabilities, GROUPS: np.array(dataset.groups())}),
        "headline": headline,
        "doubts": found,
        "tiles": tiles,
        "evaluated": evaluation.images,
        "remarks": evaluation.remarks(),
        "thresholds": trained.thresholds()[1],
        "classes": classes[:MOST_ROWS],
        "left_out": max(0, len(classes) - MOST_ROWS),
        "unmeasured": int((evaluation.support == 0).sum()),
        "wrong": wrong,
        "examples": examples,
    }


def _examples(trained: Trained, dataset: ImageDataset, evaluation: SeveralLabels) -> tuple[list[Shown], int]:
    """Choose example images with their labels, first those with wrong labels, then others.

    Those with the most wrong labels come first, and of equally many the most confident ones.
    Also returns how many images have wrong labels.
    """
    probabilities, truth = evaluation.rows
    predicted = probabilities >= evaluation.thresholds
    is_wrong = predicted != truth
    error = np.where(is_wrong, np.abs(probabilities - truth), 0)
    order = np.lexsort((-error.max(1), -is_wrong.sum(1))).tolist()  # the last key is the first to decide
    wrong_images = int(is_wrong.any(1).sum())
    right_images = len(order) - wrong_images
    most_wrong = max(MOST_WRONG, MOST_EXAMPLES - right_images)
    chosen = order[: min(wrong_images, most_wrong)] + order[wrong_images:]

    end = time.monotonic() + SECONDS_OF_MAPS
    examples = []
    for index in chosen[:MOST_EXAMPLES]:
        labels = []
        for label in np.flatnonzero(predicted[index] | truth[index]).tolist():
            kind = "right" if truth[index, label] else "extra"
            if not predicted[index, label]:
                kind = "missed"
            probability = 100 * float(probabilities[index, label])
            one_map = _mapped(trained, dataset, [index], label, end)
            labels.append({"name": trained.name_of(label), "kind": kind, "probability": probability, "map": one_map})
        examples.append({**pictured(dataset, index, trained.config.DATA), "labels": labels})
    return examples, wrong_images


def _without_labels(trained: Trained, dataset: ImageDataset, _image: str, _deciding: Metric) -> Shown:
    """Show images with hidden patches, and as a masked autoencoder predicts them, for templates/pixels.html."""
    indices = torch.linspace(0, len(dataset) - 1, min(PAINTED, len(dataset))).long().unique().tolist()
    first_epoch = [(0, index) for index in indices]
    batch = dataset.__getitems__(first_epoch).images.to(trained.precision.device)
    model: Any = trained.model
    inputs: Any = trained.inputs
    originals = inputs(batch)
    hidden, predicted = model.painted(originals)
    shown = [_named(dataset, index) for index in indices]
    for name, images in {"hidden": hidden, "predicted": predicted, "original": originals}.items():
        pixels = ((images - inputs.offset) / inputs.factor).cpu().permute(0, 2, 3, 1)
        if trained.config.DATA.is_plain:
            pixels = pixels.round().clamp(0, 255).byte()
        for shown_image, image in zip(shown, pixels, strict=True):
            shown_image[name] = data_uri(picture_of_bands(image.numpy()))
    return {
        "template": "pixels.html",
        "doubts": [],
        "headline": None,  # only validation measures how much of the images is explained
        "hidden": 100 * trained.config.MODEL.MASK_RATIO,
        "images": shown,
    }


def _rows_of_classes(trained: Trained, evaluation: Evaluation) -> list[Shown]:
    """Return a row of the table of classes for each class that has images."""
    classes = len(evaluation.support)
    # Number of training images of each class, as text; empty if it is unknown without reading the images.
    training = [""] * classes
    try:
        labels = split_of_run(trained, "train").sample_labels()
    except UserError:  # the training images are not on this machine
        labels = None
    if labels is not None:
        training = [f"{images:,}" for images in images_of_classes(labels, classes).tolist()]
    recall = evaluation.recall
    precision = evaluation.precision
    f1 = evaluation.f1
    return [
        {
            "label": label,
            "name": trained.name_of(label),
            "training": training[label],
            "images": int(evaluation.support[label]),
            "prevalence": 100 * int(evaluation.support[label]) / evaluation.images,
            "recall": float(recall[label]),
            "precision": float(precision[label]),
            "f1": float(f1[label]),
        }
        for label in evaluation.present
    ]


def _named(dataset: ImageDataset, index: int) -> Shown:
    """Return the name of an image, and its short name: folder and file."""
    image = name_of(dataset, index)
    return {"image": image, "short": "/".join(PurePath(image).parts[-2:])}


def pictured(dataset: ImageDataset, index: int, data: DataConfig) -> Shown:
    """Return what templates/photo.html shows of an image: its name, the whole picture, the crop, and a link.

    The crop is what the model sees, as left, top, width and height in percent of the image; None if that is unknown
    or the whole image. The link is to the image's file; None if it is not a file of its own.
    """
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
        percents = (
            100 * view.left / width,
            100 * view.top / height,
            100 * (view.columns * view.x_scale) / width,
            100 * (view.rows * view.y_scale) / height,
        )
        shown["crop"] = tuple(f"{percent:.1f}" for percent in percents)
    return shown


def data_uri(picture: Image.Image, side: int = THUMBNAIL) -> str:
    """Return a picture as a data: URI, reduced to `side` pixels on its longer side; a tiny one is enlarged."""
    size = max(picture.size)
    kind = "jpeg" if size > THUMBNAIL else "png"  # a photograph is a tenth as large as JPEG
    if size > side:
        picture = picture.copy()
        picture.thumbnail((side, side))
    elif size <= side // 2:  # so that single pixels are visible
        factor = side // size
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    content = io.BytesIO()
    picture.save(content, kind, optimize=True, quality=80)
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
