"""Images that look like one of another split: a page, and what keeps them on one side of the split."""

import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
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
from engine.evaluation.alike import AT_ONCE, EDITS, Nearest, directions, joined, nearest, similarity_of_edited
from engine.evaluation.features import features_of
from engine.trained.model import pretrained
from tools.check_data.near import near_pairs
from tools.check_data.report import text_of_list
from tools.check_data.scan import Split, thumbnails_of
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
        self.data = config.DATA
        self.splits = splits
        trained = pretrained(config, ALONE)
        pool = pool_of(trained.model)
        batch = config.DATA.val_batch
        self.sets = list[ImageDataset]()
        tables = list[np.ndarray]()
        for split in splits:
            data = config.DATA.changed(PART=PARTS[split.title])
            dataset = open_dataset(data, False, ANY_LABEL, config.SEED, torch.device("cpu"))
            with trained.computing(data.val_batch):
                tables.append(np.asarray(features_of(trained, config, dataset, data).of(pool)))
            self.sets.append(dataset)
        self.begins = np.cumsum([0, *map(len, tables)])
        mean = tables[0].mean(0)
        self.features = directions(np.concatenate(tables), mean)
        with trained.computing(batch):
            self.limit = similarity_of_edited(trained, self.sets[1], mean, batch)
        self.labels = np.concatenate([split.samples.labels for split in splits])
        self.classes = distinct_names(splits[0].samples.classes or range(int(self.labels.max()) + 1))

    def name(self, number: int) -> str:
        split, index = self._place(number)
        return self.splits[split].samples.name(index)

    def label(self, number: int) -> str:
        label = self.labels[number]
        chosen = np.flatnonzero(label) if label.ndim else [int(label)]
        return "|".join(self.classes[one] for one in chosen)

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
        scans = chain.from_iterable(split.scans for split in self.splits)
        return near_pairs(thumbnails_of(list(scans)))

    def groups(self) -> np.ndarray:
        """The number of each image's group: of DATA.GROUP, joined where images are nearly the same, or as similar as
        edited copies."""
        count = len(self.features)
        groups = np.arange(count)
        given = list(chain.from_iterable(split.samples.groups or () for split in self.splits))
        if given:
            groups = np.unique(given, return_inverse=True)[1]
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
    training = int(images.begins[1])
    blocks = []
    for begin, end in pairwise(images.begins[1:].tolist()):  # each split, among those before it
        blocks.append(nearest(images.features[begin:end], images.features[:begin], images.limit))
    likest = joined(blocks)
    count = likest.counted(images.labels[training:], images.labels)
    alike, _, each, *_ = count
    found = alike_in_words(count, "images look like one of another split")
    found = f"{found or 'No image looks like one of another split as edited copies do'}."
    about = (
        f"The median similarity of validation images to edited copies ({EDITS}) is {images.limit:.2f}; half of such "
        "copies are less similar, so look further down the page."
    )
    log.info("%s %s", found, about)
    _write_page(images, likest, folder / "alike.html", found, about)

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


def _write_page(images: Images, likest: Nearest, page: Path, found: str, about: str) -> None:
    """Pictures of the most similar pairs of an image and one of a split before its own."""
    with writing(page, "-alike"):
        page.parent.mkdir(parents=True, exist_ok=True)
    training = int(images.begins[1])
    order = np.argsort(-likest.similar, kind="stable")
    pairs = []
    for one in progress_bar(order[:MOST_SHOWN].tolist(), "pictures"):
        both = [images.shown(training + one), images.shown(int(likest.place[one]))]
        pairs.append((likest.similar[one], both))
    title = f"Images of {source_of(images.data)} that look like one of another split"
    values = {"title": title, "found": found, "about": about, "pairs": pairs, "limit": images.limit}
    write_template("alike.html", page, "-alike", **values)
    log.info("Look at them: %s", page)


def _write_groups(images: Images, table: Path) -> None:
    """Write a table of all images, with their groups, which a split keeps whole; none if one group would have most."""
    groups = images.groups()
    largest = int(np.bincount(groups).max())
    if largest > max(MANY, len(groups) / MANY):
        log.info(
            "No table is written. It would put images that look alike into one group, which a split does not divide. "
            "Here one group would have %s of %s images: each looks like the next, though the first need not look like "
            "the last. If names or a table say what images show, such as a patient, split by that (DATA.GROUP, "
            "docs/splits.md). Else look at the page, and list those that are copies in a file for DATA.EXCLUDE.",
            f"{largest:,}",
            f"{len(groups):,}",
        )
        return
    root = Path(images.data.DATA_PATH or "").expanduser()
    root = root if root.is_dir() else root.parent
    columns = ["path", "target", "group"]
    tests = len(groups)
    has_test = len(images.splits) > 2
    if has_test:
        columns.append("split")
        tests = images.begins[2]
    # Where the data keeps its test split, training images that look like its images are in no split.
    of_test = np.isin(groups[:tests], groups[tests:])
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    written = Counter[int]()
    for number, group in enumerate(groups.tolist()):
        if number < tests and of_test[number]:
            continue
        written[group] += 1
        row = [os.path.relpath(images.name(number), root), images.label(number), group]
        if has_test:
            row.append(TEST if number >= tests else TRAIN)
        rows.writerow(row)
    with writing(table, "-alike"):
        write_atomically(table, text.getvalue())
    of = counted(max(written.values()), "image")
    words = f"-dataset {shlex.quote(f'csv:{table}')} -data_path {shlex.quote(str(root))} DATA.GROUP=group"
    log.info("%s: similar images are a group, the largest of %s, to be kept on one side of a split:", table, of)
    if has_test:
        log.info("it leaves out %s like test images, and keeps test for the end;", counted(int(of_test.sum()), "image"))
        words += " DATA.KEEP_TEST=true"
    log.info("train with %s, and check that split again.", words)


def _write_list(images: Images, listed: Path) -> None:
    """Write a list of the training images that are as similar to one of another split, or nearly the same."""
    training = int(images.begins[1])
    found = nearest(images.features[:training], images.features[training:], images.limit)
    same = images.nearly_same()
    same = same[(same[:, 0] < training) & (same[:, 1] >= training)]
    found.place[same[:, 0]] = same[:, 1] - training
    lines = []
    for one in np.union1d(np.flatnonzero(found.similar >= images.limit), same[:, 0]).tolist():
        like = images.name(training + int(found.place[one]))
        lines.append(line_of(images.name(one), f"like {like}", images.data))
    with writing(listed, "-alike"):
        write_atomically(listed, text_of_list(lines, images.data))
    number = counted(len(lines), "training image")
    log.info("%s: %s; to leave them out, train with DATA.EXCLUDE=%s", listed, number, shlex.quote(str(listed)))
