"""Images that look like one of another split: a page, and what keeps them on one side of the split."""

import csv
import io
import itertools
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from datasets import ImageDataset, comes_unsplit, has_labels, open_dataset, source_of
from datasets.base import Part
from datasets.exclude import line_of
from datasets.labels import ANY_LABEL, distinct_names
from datasets.sources.split import TEST, TRAIN
from engine.evaluation.alike import AT_ONCE, EDITS, Nearest, directions, nearest, similarity_of_edited
from engine.evaluation.features import features_of
from engine.trained.model import pretrained
from tools.check_data.findings import Split, near_pairs, text_of_list, thumbnails_of
from tools.common.output_file import writing
from tools.common.report_page.evaluations import pictured
from tools.common.report_page.page import write_template
from tools.common.turns import progress_bar
from utils.config import Config
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.log import log
from utils.record.run_folder import MANY, alike_in_words, copies_unknown
from utils.text import counted
from vitamp.files import write_atomically
from vitamp.pooling import pool_of

PARTS: dict[str, Part] = {"training": "train", "validation": "val", "test": "test"}
MOST_SHOWN = 100
"""Pairs with pictures"""


class Images:
    """The images of all splits, numbered through, and the directions of their features from the mean of training's."""

    def __init__(self, config: Config, splits: Sequence[Split]) -> None:
        trained = pretrained(config, ALONE)
        self.data, self.splits, pool = config.DATA, splits, pool_of(trained.model)
        self.sets, tables = list[ImageDataset](), list[np.ndarray]()
        for split in splits:
            data = config.DATA.changed(PART=PARTS[split.title])
            dataset = open_dataset(data, False, ANY_LABEL, config.SEED, torch.device("cpu"))
            with trained.computing(data.val_batch):
                tables.append(np.asarray(features_of(trained, config, dataset, data).of(pool)))
            self.sets.append(dataset)
        self.begins = np.cumsum([0, *map(len, tables)])
        mean = tables[0].mean(0)
        self.features = directions(np.concatenate(tables), mean)
        with trained.computing(config.DATA.val_batch):
            self.limit = similarity_of_edited(trained, self.sets[1], mean, config.DATA.val_batch)
        self.labels = np.concatenate([split.samples.labels for split in splits])
        self.classes = distinct_names(splits[0].samples.classes or range(int(self.labels.max()) + 1))

    def name(self, number: int) -> str:
        split, index = self._place(number)
        return self.splits[split].samples.name(index)

    def label(self, number: int) -> str:
        label = self.labels[number]
        return "|".join(self.classes[one] for one in (np.flatnonzero(label) if label.ndim else [int(label)]))

    def shown(self, number: int) -> dict[str, Any]:
        split, index = self._place(number)
        about = pictured(self.sets[split], index, self.data)
        return {**about, "title": self.splits[split].title, "label": self.label(number)}

    def _place(self, number: int) -> tuple[int, int]:
        """Its split, and its index there."""
        split = int(np.searchsorted(self.begins, number, side="right")) - 1
        return split, number - int(self.begins[split])

    def nearly_same(self) -> np.ndarray:
        """As `near_pairs`."""
        return near_pairs(thumbnails_of([scan for split in self.splits for scan in split.scans]))

    def groups(self) -> np.ndarray:
        """The number of each image's group: of DATA.GROUP, joined where images are nearly the same, or as similar as
        edited copies."""
        count = len(self.features)
        given = [group for split in self.splits for group in split.samples.groups or ()]
        groups = np.unique(given, return_inverse=True)[1] if given else np.arange(count)
        pairs = [self.nearly_same().T]
        for first in range(0, count, AT_ONCE):
            one, other = np.nonzero(self.features[first : first + AT_ONCE] @ self.features.T >= self.limit)
            pairs.append(np.stack([first + one, other]))
        for one, other in pairs:
            links = csr_array((np.ones(len(one), bool), (groups[one], groups[other])), (count, count))
            groups = connected_components(links, directed=False)[1][groups]
        return np.unique(groups, return_inverse=True)[1]


def write_alike(config: Config, splits: Sequence[Split], folder: Path) -> int:
    """Write the page of the most similar images of two splits, and a table that keeps them out of one of them.

    Returns how many may be copies: none, where they are alike to too many images, or often to those of other labels.
    """
    if len(splits) < 2:
        raise UserError(f"-alike compares two splits whose images are files; {source_of(config.DATA)} has not two.")
    images = Images(config, splits)
    training, features = int(images.begins[1]), images.features
    by_split = [  # of each split, among those before it
        nearest(features[begin:end], features[:begin], images.limit)
        for begin, end in itertools.pairwise(images.begins[1:].tolist())
    ]
    likest = Nearest(*map(np.concatenate, zip(*by_split, strict=True)))
    order = np.argsort(-likest.similar, kind="stable")
    count = alike, _, each, *_ = likest.counted(images.labels[training:], images.labels)
    found = alike_in_words(count, "images look like one of another split")
    found = f"{found or 'No image looks like one of another split as edited copies do'}."
    about = (
        f"The median similarity of validation images to edited copies ({EDITS}) is {images.limit:.2f}; half of such "
        "copies are less similar, so look further down the page."
    )
    log.info("%s %s", found, about)

    page = folder / "alike.html"
    with writing(page, "-alike"):
        folder.mkdir(parents=True, exist_ok=True)
    shown = progress_bar(order[:MOST_SHOWN].tolist(), "pictures")
    pairs = [
        (likest.similar[one], [images.shown(training + one), images.shown(int(likest.place[one]))]) for one in shown
    ]
    title = f"Images of {source_of(images.data)} that look like one of another split"
    values = {"title": title, "found": found, "about": about, "pairs": pairs, "limit": images.limit}
    write_template("alike.html", page, "-alike", **values)
    log.info("Look at them: %s", page)

    if copies_unknown(count):
        log.info("No list is written: it would leave out images, or join them, that may be no copies.")
        return 0
    if each >= MANY:
        log.info("No list is written: it would leave out too many images, or join them to a few groups.")
        return 0
    one_label = images.labels.ndim == 1 and has_labels(images.data)
    if alike and one_label and comes_unsplit(images.data) and splits[0].samples.stored == "files":
        _write_groups(images, folder / "groups.csv")
    elif alike:
        _write_list(images, folder / "exclude.txt")
    return alike


def _write_groups(images: Images, table: Path) -> None:
    """Write a table of all images, with their groups, which a split keeps whole; none if one group would have most."""
    groups, text = images.groups(), io.StringIO()
    largest = int(np.bincount(groups).max())
    if largest > max(MANY, len(groups) / MANY):
        log.info(
            "No table is written. It would put images that look alike into one group, which a split does not divide. "
            "Here one group would have %s of %s images: each looks like the next, though the first need not look like "
            "the last. If names or a table say what images show, such as a patient, split by that (DATA.GROUP, "
            "docs/splits.md). Else look at the page, and list those that are copies in a file for DATA.EXCLUDE.",
            *(f"{number:,}" for number in (largest, len(groups))),
        )
        return
    root = Path(images.data.DATA_PATH or "").expanduser()
    root = root if root.is_dir() else root.parent
    rows = csv.writer(text, lineterminator="\n")
    kept = len(images.splits) > 2
    rows.writerow(["path", "target", "group", *(["split"] if kept else [])])
    # Where the data keeps its test split, training images that look like its images are in no split.
    tests = images.begins[2] if kept else len(groups)
    of_test = np.isin(groups[:tests], groups[tests:])
    written = Counter[int]()
    for number, group in enumerate(groups.tolist()):
        if number >= tests or not of_test[number]:
            split = [TEST if number >= tests else TRAIN] if kept else []
            written[group] += 1
            rows.writerow([os.path.relpath(images.name(number), root), images.label(number), group, *split])
    with writing(table, "-alike"):
        write_atomically(table, text.getvalue())
    of, images_at = counted(max(written.values()), "image"), shlex.quote(str(root))
    words = f"-dataset {shlex.quote(f'csv:{table}')} -data_path {images_at} DATA.GROUP=group"
    log.info("%s: similar images are a group, the largest of %s, to be kept on one side of a split:", table, of)
    if kept:
        log.info("it leaves out %s like test images, and keeps test for the end;", counted(int(of_test.sum()), "image"))
        words += " DATA.KEEP_TEST=true"
    log.info("train with %s, and check that split again.", words)


def _write_list(images: Images, listed: Path) -> None:
    """Write a list of the training images that are as similar to one of another split, or nearly the same."""
    training = int(images.begins[1])
    place, similar, *_ = nearest(images.features[:training], images.features[training:], images.limit)
    same = images.nearly_same()
    same = same[(same[:, 0] < training) & (same[:, 1] >= training)]
    place[same[:, 0]] = same[:, 1] - training
    alike = np.union1d(np.flatnonzero(similar >= images.limit), same[:, 0]).tolist()
    lines = [line_of(images.name(one), f"like {images.name(training + int(place[one]))}", images.data) for one in alike]
    with writing(listed, "-alike"):
        write_atomically(listed, text_of_list(lines, images.data))
    number, quoted = counted(len(lines), "training image"), shlex.quote(str(listed))
    log.info("%s: %s; to leave them out, train with DATA.EXCLUDE=%s", listed, number, quoted)
