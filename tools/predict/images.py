"""Finds the image files that predict.py is asked for; predicts them, or writes their features; output formats."""

import csv
import glob
import itertools
import json
import os
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
    """Name in `paths`, result and reason of each image, in order: an unreadable one has a reason and no result.

    `results`: those of a batch, None where the model computes NaN or infinity. `progress`: show a bar. `failed` gets
    the names of images without a result. Of several ranks, each predicts some of the batches, and rank 0 has all rows.
    """
    workers = auto_workers(world, asked.num_workers)
    size = asked.batch_size or trained.config.DATA.val_batch
    workers = 0 if len(paths) <= size else workers  # nothing to prefetch
    not_finite = "the model computes NaN or infinity"
    if trained.precision.level != "O0":
        not_finite += "; try -amp off"
    plan = whole_batches(len(paths), size, world.rank, world.size)
    loader = ValLoader(dataset, size, 0, 1, workers, trained.precision.device, shard=lambda *_: plan)
    unread = loader.broken.images if loader.broken else {}
    bar = tqdm(total=len(paths), unit=" images", file=sys.stderr, disable=not progress, dynamic_ncols=True)
    try:
        for rows, batch in zip(plan, loader, strict=True):
            found = list[tuple[int, Any, str]]()
            for row, index, result in zip(rows.tolist(), batch.indices.tolist(), results(batch), strict=False):
                if row == PADDING:
                    break
                if index != PADDING and result is not None:
                    found.append((row, result, ""))
                    continue
                found.append((row, None, unread.pop(row).reason if row in unread else not_finite))
            for row, result, reason in itertools.chain.from_iterable(gather([found], world)):
                if reason:
                    failed.append(paths[row])
                    log.warning("%s cannot be predicted: %s", one_line(paths[row]), reason)
                yield paths[row], result, reason
                bar.update()
    finally:
        loader.close()
        bar.close()
    if failed:
        named = some_of([one_line(path) for path in failed])
        log.warning("%d of %d images could not be predicted: %s.", len(failed), len(paths), named)


def write_features(asked: Namespace, trained: Trained, dataset: ImageDataset, paths: list[str], world: World) -> int:
    """Write what the classifier sees of each image that can be read, as npz. Returns the exit code.

    The arrays are `features` and `paths`; of a split with labels also `labels` and `classes`.
    """
    check_pool(trained.model, asked.pool)
    if world.first:
        print(f"{asked.path}: {trained.chosen.words}", file=sys.stderr)

    def results(batch: Batch) -> Iterable[tuple[np.ndarray, np.ndarray] | None]:
        found = zip(trained.features(batch.images, asked.pool).cpu().numpy(), batch.labels.cpu().numpy(), strict=True)
        return (one if np.isfinite(one[0]).all() else None for one in found)

    found = predict_images(trained, dataset, paths, results, asked, world.first and sys.stderr.isatty(), [], world)
    rows = [(path, seen) for path, seen, reason in found if not reason]
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
    size = " x ".join(map(str, arrays["features"].shape))
    print(f"{asked.features}: features of {len(rows):,} images, {size} numbers ({asked.pool})", file=sys.stderr)
    return EXIT_DONE if len(rows) == len(paths) else EXIT_FAILED


class Guess(NamedTuple):
    label: int
    name: str
    probability: float


class Chosen:
    """The predicted classes of an image.

    With one label per image these are the most probable ones, else those whose probability reaches their threshold.
    """

    words = ""
    _limits: Tensor | None = None

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
        limits, self.words = trained.thresholds()
        if threshold is not None:
            limits = [threshold for _ in range(classes)]
            self.words = f"a class is predicted if its probability reaches {threshold:g}"
        self._limits = torch.tensor(limits, dtype=torch.float64)

    def __call__(self, logits: Tensor) -> list[list[Guess] | None]:
        """Of each image, the most probable class first; None where the highest logit is NaN or infinite."""
        if self._limits is None:
            labels = guesses(logits, self.most)
            found = list(zip(labels.cpu(), torch.softmax(logits, dim=-1).gather(-1, labels).cpu(), strict=True))
        else:
            found = []
            for row in logits.cpu().double().sigmoid():  # in fp64, in which validation compares them too
                chosen = torch.nonzero(row >= self._limits)[:, 0]
                order = chosen[row[chosen].argsort(descending=True, stable=True)][: self.most]
                found.append((order, row[order]))
        rows = list[list[Guess] | None]()
        for (labels, values), finite in zip(found, logits.amax(1).isfinite().tolist(), strict=True):
            pairs = zip(labels.tolist(), values.tolist(), strict=True)
            row = [Guess(label, self._trained.name_of(label), value) for label, value in pairs]
            rows.append(row if finite else None)
        return rows


def find_images(words: list[str], data: DataConfig) -> list[str]:
    """Paths in the order of the arguments; those of a folder or glob are sorted.

    One missing file among several words is an image that cannot be predicted.
    """
    skipped = SkippedFiles()
    none = f"no images found (files ending in {' '.join(endings_of(data))})"
    some = any(word == "-" or glob.has_magic(word) or os.path.lexists(os.path.expanduser(word)) for word in words)
    if words and not some:
        raise UserError(f"{words[0]}: no such file or folder.")
    by_word = {word: _paths_of(word, skipped, data) for word in words}
    skipped.warn(", ".join(words[:2]) + (", ..." if len(words) > 2 else ""))
    found = [path for word in words for path in by_word[word]]
    empty = [word for word, paths in by_word.items() if not paths and word != "-"]
    if not found and empty:
        raise UserError(f"{', '.join(empty)}: {none}.")
    if not found:
        raise UserError("standard input names no images.")
    for word in empty:
        log.warning("%s: %s; skipped.", word, none)
    return found


def _paths_of(word: str, skipped: SkippedFiles, data: DataConfig) -> list[str]:
    if word == "-":  # names separated by newlines, or by zero bytes, as `find -print0` prints them
        content = sys.stdin.buffer.read()
        names = content.split(b"\0") if b"\0" in content else [name.rstrip(b"\r") for name in content.split(b"\n")]
        return [os.fsdecode(name) for name in names if name]
    path = os.path.expanduser(word)
    # A file may be called `photo[1].jpg`, so an existing path is not read as a glob.
    named = os.path.lexists(path) or not glob.has_magic(word)
    matched = [path] if named else sorted(glob.glob(path, recursive=True))
    if not matched:
        raise UserError(f"{word}: no file matches.")
    found = []
    for one in matched:
        if one.lower().endswith(".csv") and os.path.isfile(one):
            found += images_in_table(Path(one), data)
            continue
        below = (os.path.join(one, file) for file in images_below(one, skipped, endings=endings_of(data)))
        found += below if os.path.isdir(one) else [one]
    return found


MOST_QUOTED = 200
"""Characters of a wrong request in its answer"""
LONGEST_IMAGE = 60
"""Longer paths move the columns of their line"""
Rows = Iterable[tuple[str, list[Guess] | None, str]]
"""Path, guesses, and why there are none, which standard error says besides"""


def write_csv(stream: TextIO, rows: Rows, *_: object) -> None:
    """One line per guess, or one without a class; none for an unreadable image."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("image", "rank", "label", "class", "probability"))
    for path, best, reason in rows:
        for rank, guess in enumerate(best or (), start=1):
            writer.writerow((path, rank, guess.label, guess.name, f"{guess.probability:.6f}"))
        if not best and not reason:
            writer.writerow((path, "", "", "", ""))


def write_jsonl(stream: TextIO, rows: Rows, *_: object) -> None:
    """One JSON object per line."""
    stream.writelines(f"{_json(path, best, reason)}\n" for path, best, reason in rows)


def write_json(stream: TextIO, rows: Rows, *_: object) -> None:
    """JSON list of the same objects."""
    separator = "\n"
    stream.write("[")
    for path, best, reason in rows:
        stream.write(f"{separator}{_json(path, best, reason)}")
        separator = ",\n"
    stream.write("\n]\n")


def _json(path: str, best: list[Guess] | None, reason: str) -> str:
    row: dict[str, Any] = {"image": path}
    if reason:
        row["error"] = reason
    else:
        row["guesses"] = [
            {"class": one.name, "label": one.label, "probability": round(one.probability, 6)} for one in best or ()
        ]
    text = json.dumps(row, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(row)


def write_table(stream: TextIO, rows: Rows, classes: Sequence[str], topk: int, paths: Sequence[str]) -> None:
    """One line per image. `classes` and `paths` give the widths of columns before the first row."""
    image_width = min(LONGEST_IMAGE, max([5] + [len(shown(path)) for path in paths]))
    class_width = max([5] + [len(shown(name)) for name in classes])

    def write_line(path: str, cells: Iterable[str]) -> None:
        columns = [shown(path).ljust(image_width)] + [cell.ljust(class_width + 8) for cell in cells]
        stream.write(f"{'  '.join(columns).rstrip()}\n")

    write_line("image", map(str, range(1, min(topk, len(classes)) + 1)))
    for path, best, reason in rows:
        cells = [f"{shown(one.name).ljust(class_width)} {100 * one.probability:5.1f} %" for one in best or ()]
        write_line(path, [f"cannot be predicted: {shown(reason)}"] if reason else cells or ["-"])


def serve(requests: BinaryIO, stream: TextIO, trained: Trained, choose: Chosen, asked: Namespace) -> int:
    """Answer each line, a JSON list of images as the command line takes them, with a line of JSON.

    No line ends it: whatever a request raises is its answer.
    """
    data = trained.config.DATA

    def predict(batch: Batch) -> list[list[Guess] | None]:
        return choose(trained.logits(batch.images))

    for request in requests:
        line = os.fsdecode(request)
        try:
            words = json.loads(line)
            if not isinstance(words, list) or not all(isinstance(word, str) and word != "-" for word in words):
                raise UserError(f"{one_line(line.strip()[:MOST_QUOTED])}: is no list of names of images.")
            paths = find_images(words, data)
            dataset = open_given(paths, data)
            names = [path.partition(OF_SEVERAL)[0] for path in paths]
            rows = predict_images(trained, dataset, names, predict, asked, progress=False, failed=[])
            answer = f"[{', '.join(_json(path, best, reason) for path, best, reason in rows)}]"
        except (UserError, TrainingError, ValueError, RecursionError) as error:
            answer = json.dumps({"error": str(error)})
        except Exception as error:
            log.exception("internal error")
            answer = json.dumps({"error": f"internal error: {type(error).__name__}: {error}"})
        print(answer, file=stream, flush=True)
    return EXIT_DONE


FORMS = {"table": write_table, "csv": write_csv, "json": write_json, "jsonl": write_jsonl}
