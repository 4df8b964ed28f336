"""Find the image files that predict.py is asked for, predict them or write their features, and write the results."""

import csv
import glob
import itertools
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from datasets import Batch, ImageDataset, ValLoader, auto_workers, has_labels
from datasets.base import PADDING
from datasets.decoding import endings_of
from datasets.given import open_given
from datasets.loading.order import whole_batches
from datasets.sources.csv_table import images_in_table
from datasets.sources.files import OF_SEVERAL, SkippedFiles, images_below
from engine.trained.model import Trained, guesses
from tools.common.maps import laid_over, trained_maps
from tools.common.output_file import writing
from tools.common.ranks import gather
from tools.common.tables import shown
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World
from utils.errors import EXIT_DONE, EXIT_FAILED, TrainingError, UserError
from utils.log import log
from utils.text import one_line, some_of
from vitamp.files import replacing
from vitamp.metrics import ONE_LABEL
from vitamp.pooling import check_pool

NOT_IN_NAMES = r"[^\w.,()+-]+"
"""Characters of image and class that the names of pictures do not have"""
LONGEST_NAME = 80
"""Characters of the name of a picture, each of up to three bytes of the 255 that file systems allow"""
TOP = 5
"""Classes per image without -topk"""


def predict_images(
    trained: Trained,
    dataset: ImageDataset,
    paths: list[str],
    results: Callable[[Batch], Iterable[Any]],
    asked: Namespace,
    progress: bool,
    failed: list[str],
    world: World = ALONE,
) -> Iterator[tuple[str, Any, str]]:
    """Predict all images batch by batch; yield the name, the result, and the reason why there is none, in their order.

    An image that cannot be read, or for which the model computes NaN or infinity, has a reason and the result None;
    others have the reason ''. `paths`: names of the images. `results`: computes the results of a batch, None for NaN or
    infinity. `progress`: whether to show a bar. `failed`: gets the names of images without a result. Of several ranks,
    each predicts some of the batches, and rank 0 yields all images.
    """
    workers = auto_workers(world, asked.num_workers)
    batch_size = asked.batch_size or trained.config.DATA.val_batch
    if len(paths) <= batch_size:
        workers = 0  # nothing to prefetch
    not_finite = "the model computes NaN or infinity"
    if trained.precision.level != "O0":
        not_finite += "; try -amp off"
    plan = whole_batches(len(paths), batch_size, world.rank, world.size)
    loader = ValLoader(dataset, batch_size, 0, 1, workers, trained.precision.device, shard=lambda *_: plan)
    unreadable = loader.broken.images if loader.broken else {}
    bar = tqdm(total=len(paths), unit=" images", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    try:
        for images, batch in zip(plan, loader, strict=True):
            found = list[tuple[int, Any, str]]()
            for image, index, result in zip(images.tolist(), batch.indices.tolist(), results(batch), strict=False):
                if image == PADDING:  # the rest fills the batch
                    break
                was_read = index != PADDING
                if was_read and result is not None:
                    found.append((image, result, ""))
                elif image in unreadable:
                    found.append((image, None, unreadable.pop(image).reason))
                else:
                    found.append((image, None, not_finite))
            for image, result, reason in itertools.chain.from_iterable(gather([found], world)):
                if reason:
                    failed.append(paths[image])
                    log.warning("%s cannot be predicted: %s", one_line(paths[image]), reason)
                yield paths[image], result, reason
                bar.update()
    finally:
        loader.close()
        bar.close()
    if failed:
        names = some_of([one_line(path) for path in failed])
        log.warning("%d of %d images could not be predicted: %s.", len(failed), len(paths), names)


def write_features(asked: Namespace, trained: Trained, dataset: ImageDataset, paths: list[str], world: World) -> int:
    """Write what the classifier sees of each image that can be read, as npz. Returns the exit code.

    The arrays are `features` and `paths`; of a split with labels also `labels` and `classes`.
    """
    check_pool(trained.model, asked.pool)
    if world.first:
        print(f"{asked.path}: {trained.chosen.words}", file=sys.stderr)

    def features_and_labels(batch: Batch) -> Iterable[tuple[np.ndarray, np.ndarray] | None]:
        features = trained.features(batch.images, asked.pool).cpu().numpy()
        pairs = zip(features, batch.labels.cpu().numpy(), strict=True)
        return (pair if np.isfinite(pair[0]).all() else None for pair in pairs)

    progress = world.first and sys.stderr.isatty()
    predicted = predict_images(trained, dataset, paths, features_and_labels, asked, progress, failed=[], world=world)
    rows = [(path, result) for path, result, reason in predicted if not reason]
    if not world.first:
        return EXIT_DONE
    if not rows:
        raise TrainingError(f"No image has features; {asked.features} is not written.")
    arrays = {
        "features": np.stack([features for _, (features, _) in rows]),
        "paths": np.array([path for path, _ in rows]),
    }
    if asked.part is not None and has_labels(trained.config.DATA):
        labels = np.stack([label for _, (_, label) in rows])
        arrays |= {"labels": labels.astype(np.int64), "classes": np.array(trained.names())}
    with writing(asked.features, "-features"), replacing(asked.features) as unfinished, unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    shape = " x ".join(map(str, arrays["features"].shape))
    print(f"{asked.features}: features of {len(rows):,} images, {shape} numbers ({asked.pool})", file=sys.stderr)
    return EXIT_DONE if len(rows) == len(paths) else EXIT_FAILED


class Guess(NamedTuple):
    """A predicted class of an image."""

    label: int
    name: str
    probability: float


class ClassChooser:
    """Chooses the predicted classes of images by their logits.

    With one label per image these are the most probable ones, else those whose probability reaches their threshold.
    `topk`, `threshold`: the flags, None if not given. `words`: how classes are chosen, for the log. `most`: how many an
    image can have.
    """

    words = ""
    _thresholds: Tensor | None = None

    def __init__(self, trained: Trained, topk: int | None, threshold: float | None) -> None:
        self._trained = trained
        classes = int(trained.config.MODEL.NUM_CLASSES)
        if trained.task.kind == ONE_LABEL:
            if threshold is not None:
                raise UserError(
                    f"-threshold {threshold:g}: this model has one label per image, so it needs no threshold."
                )
            self.most = topk or TOP
            return
        self.most = topk or classes
        thresholds, self.words = trained.thresholds()
        if threshold is not None:
            thresholds = [threshold for _ in range(classes)]
            self.words = f"a class is predicted if its probability reaches {threshold:g}"
        self._thresholds = torch.tensor(thresholds, dtype=torch.float64)

    def __call__(self, logits: Tensor) -> list[list[Guess] | None]:
        """Choose the classes of each image, the most probable first; None where the highest logit is not finite."""
        chosen = list[tuple[Tensor, Tensor]]()  # labels and probabilities of each image
        if self._thresholds is None:
            top_labels = guesses(logits, self.most)
            top_probabilities = torch.softmax(logits, dim=-1).gather(-1, top_labels)
            chosen += zip(top_labels.cpu(), top_probabilities.cpu(), strict=True)
        else:
            for probabilities in logits.cpu().double().sigmoid():  # in fp64, in which validation compares them too
                reached = torch.nonzero(probabilities >= self._thresholds)[:, 0]
                order = probabilities[reached].argsort(descending=True, stable=True)
                labels = reached[order][: self.most]
                chosen.append((labels, probabilities[labels]))
        rows = list[list[Guess] | None]()
        for (labels, probabilities), is_finite in zip(chosen, logits.amax(1).isfinite().tolist(), strict=True):
            pairs = zip(labels.tolist(), probabilities.tolist(), strict=True)
            row = [Guess(label, self._trained.name_of(label), probability) for label, probability in pairs]
            rows.append(row if is_finite else None)
        return rows


def with_maps(
    rows: Sequence[list[Guess] | None], batch: Batch, trained: Trained, paths: Sequence[str], asked: Namespace
) -> Iterator[list[Guess] | None]:
    """Yield the guesses of a batch, after writing a picture of each image with the map of where the model looks.

    With one label per image, the map is of the first guess, else there is a picture for each guess. `paths`: names of
    all images. A picture's name is the number and the name of the image, and the class.
    """
    asked.explain.mkdir(exist_ok=True)
    digits = len(str(len(paths)))
    batch_size = asked.batch_size or trained.config.DATA.val_batch
    for pixels, index, row in zip(batch.images, batch.indices.tolist(), rows, strict=True):
        was_read = index != PADDING
        if was_read and row:
            explained = row[:1] if trained.task.kind == ONE_LABEL else row
            maps = trained_maps(trained, pixels, [guess.label for guess in explained], batch_size)
            for guess, one_map in zip(explained, maps, strict=True):
                name = f"{index + 1:0{digits}}_{Path(paths[int(index)]).stem}_{guess.name}"
                file = asked.explain / f"{re.sub(NOT_IN_NAMES, '_', name)[:LONGEST_NAME]}.jpg"
                with writing(asked.explain, "-explain"):
                    laid_over(pixels, one_map).save(file)
        yield row


def find_images(words: list[str], data: DataConfig) -> list[str]:
    """Find the paths of the images that `words` name: files, folders, globs, tables, or - for standard input.

    They are in the order of the words; those of a folder or glob are sorted. A missing file among several words is an
    image that cannot be predicted, but UserError is raised if nothing that is named exists, or has an image.
    """
    skipped = SkippedFiles()
    no_images = f"no images found (files ending in {' '.join(endings_of(data))})"
    any_exists = any(word == "-" or glob.has_magic(word) or os.path.lexists(os.path.expanduser(word)) for word in words)
    if words and not any_exists:
        raise UserError(f"{words[0]}: no such file or folder.")
    paths_of_word = {word: _paths_of(word, skipped, data) for word in words}
    more = ", ..." if len(words) > 2 else ""
    skipped.warn(", ".join(words[:2]) + more)
    paths = [path for word in words for path in paths_of_word[word]]
    empty_words = [word for word in paths_of_word if not paths_of_word[word] and word != "-"]
    if not paths and empty_words:
        raise UserError(f"{', '.join(empty_words)}: {no_images}.")
    if not paths:
        raise UserError("standard input names no images.")
    for word in empty_words:
        log.warning("%s: %s; skipped.", word, no_images)
    return paths


def _paths_of(word: str, skipped: SkippedFiles, data: DataConfig) -> list[str]:
    """The paths of the images that one argument names; a missing file is one of them.

    `skipped`: counts files in folders that are no images. Raises UserError for a glob without a match.
    """
    if word == "-":  # names separated by newlines, or by zero bytes, as `find -print0` prints them
        content = sys.stdin.buffer.read()
        names = content.split(b"\0") if b"\0" in content else [name.rstrip(b"\r") for name in content.split(b"\n")]
        return [os.fsdecode(name) for name in names if name]
    path = os.path.expanduser(word)
    # A file may be called `photo[1].jpg`, so an existing path is not read as a glob.
    is_path = os.path.lexists(path) or not glob.has_magic(word)
    matches = [path] if is_path else sorted(glob.glob(path, recursive=True))
    if not matches:
        raise UserError(f"{word}: no file matches.")
    images = list[str]()
    for match in matches:
        if match.lower().endswith(".csv") and os.path.isfile(match):
            images += images_in_table(Path(match), data)
        elif os.path.isdir(match):
            images += (os.path.join(match, file) for file in images_below(match, skipped, endings=endings_of(data)))
        else:
            images.append(match)
    return images


MOST_QUOTED = 200
"""Characters of a wrong request in its answer"""
LONGEST_IMAGE = 60
"""Widest column of paths; longer paths move the other columns of their line"""
Row = tuple[str, list[Guess] | None, str]
"""Of an image: path, guesses, and the reason why there are none, which standard error has, too; else ''"""


def write_csv(stream: TextIO, rows: Iterable[Row], *_: object) -> None:
    """Write a CSV table with a line per guess; one line for an image without any, none for one that cannot be read."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("image", "rank", "label", "class", "probability"))
    for path, guesses_of_image, reason in rows:
        for rank, guess in enumerate(guesses_of_image or (), start=1):
            writer.writerow((path, rank, guess.label, guess.name, f"{guess.probability:.6f}"))
        if not guesses_of_image and not reason:
            writer.writerow((path, "", "", "", ""))


def write_jsonl(stream: TextIO, rows: Iterable[Row], *_: object) -> None:
    """Write a JSON object per image, each on its line."""
    stream.writelines(f"{_json(row)}\n" for row in rows)


def write_json(stream: TextIO, rows: Iterable[Row], *_: object) -> None:
    """Write a JSON list of the objects that `write_jsonl` writes."""
    separator = "\n"
    stream.write("[")
    for row in rows:
        stream.write(f"{separator}{_json(row)}")
        separator = ",\n"
    stream.write("\n]\n")


def _json(row: Row) -> str:
    """The JSON object of an image, as one line of text that a terminal can show."""
    path, guesses_of_image, reason = row
    about: dict[str, Any] = {"image": path}
    if reason:
        about["error"] = reason
    else:
        about["guesses"] = [
            {"class": guess.name, "label": guess.label, "probability": round(guess.probability, 6)}
            for guess in guesses_of_image or ()
        ]
    text = json.dumps(about, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(about)


def write_table(stream: TextIO, rows: Iterable[Row], classes: Sequence[str], topk: int, paths: Sequence[str]) -> None:
    """Write a table in columns with a line per image.

    `classes`, `paths`: all that may occur, since the widths of columns must be known before the first row. `topk`: most
    guesses of an image.
    """
    image_width = min(LONGEST_IMAGE, max([5] + [len(shown(path)) for path in paths]))
    class_width = max([5] + [len(shown(name)) for name in classes])
    cell_width = class_width + 8  # with the probability, such as " 100.0 %"

    def write_line(path: str, cells: Iterable[str]) -> None:
        columns = [shown(path).ljust(image_width)] + [cell.ljust(cell_width) for cell in cells]
        stream.write(f"{'  '.join(columns).rstrip()}\n")

    write_line("image", map(str, range(1, min(topk, len(classes)) + 1)))
    for path, guesses_of_image, reason in rows:
        cells = []
        for guess in guesses_of_image or ():
            cells.append(f"{shown(guess.name).ljust(class_width)} {100 * guess.probability:5.1f} %")
        if reason:
            cells = [f"cannot be predicted: {shown(reason)}"]
        write_line(path, cells or ["-"])


def serve(requests: BinaryIO, stream: TextIO, trained: Trained, choose: ClassChooser, asked: Namespace) -> int:
    """Answer each line of `requests`, a JSON list of images as the command line takes them, with a line of JSON.

    It ends with its input. Until then no request ends it: whatever one raises is its answer. Returns the exit code.
    """
    data = trained.config.DATA

    def predict(batch: Batch) -> list[list[Guess] | None]:
        return choose(trained.logits(batch.images))

    for request in requests:
        line = os.fsdecode(request)
        no_list = f"{one_line(line.strip()[:MOST_QUOTED])}: is no list of names of images."
        try:
            words = json.loads(line)
            if not isinstance(words, list) or not all(isinstance(word, str) and word != "-" for word in words):
                raise UserError(no_list)
            paths = find_images(words, data)
            dataset = open_given(paths, data)
            names = [path.partition(OF_SEVERAL)[0] for path in paths]
            rows = predict_images(trained, dataset, names, predict, asked, progress=False, failed=[])
            answer = f"[{', '.join(_json(row) for row in rows)}]"
        except json.JSONDecodeError:
            answer = json.dumps({"error": no_list})
        except (UserError, TrainingError, ValueError, RecursionError) as error:
            answer = json.dumps({"error": str(error)})
        except Exception as error:
            log.exception("internal error")
            answer = json.dumps({"error": f"internal error: {type(error).__name__}: {error}"})
        print(answer, file=stream, flush=True)
    return EXIT_DONE


FORMS = {"table": write_table, "csv": write_csv, "json": write_json, "jsonl": write_jsonl}
"""Writers of the results, by the name of the format"""
