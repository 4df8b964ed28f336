"""Find images that look like one of another split; write a page, and a list or table that keeps them apart."""

import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from datasets.labels import ANY_LABEL, distinct_names, label_words
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
"""DATA.PART by the title of a split"""
MOST_SHOWN = 100
"""Pairs with pictures"""


class Images:
    """The images of all splits, numbered through, with their labels and features.

    `features` are directions from the mean of training's: the product of two is how similar the images are. `limit` is
    how similar images are to their edited copies. Split i has the numbers from begins[i] to begins[i + 1].
    """

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
        split, index = self._split_and_index(number)
        return self.splits[split].samples.name(index)

    def label(self, number: int) -> str:
        return label_words(self.labels[number], self.classes)

    def shown(self, number: int) -> dict[str, Any]:
        """The values of the page about one image: its picture, its split and its label."""
        split, index = self._split_and_index(number)
        values = pictured(self.sets[split], index, self.data)
        return {**values, "title": self.splits[split].title, "label": self.label(number)}

    def _split_and_index(self, number: int) -> tuple[int, int]:
        """The split that an image is in, and its index there."""
        split = int(np.searchsorted(self.begins, number, side="right")) - 1
        return split, number - int(self.begins[split])

    def near_pairs(self) -> np.ndarray:
        """Find pairs of images of all splits that are nearly the same, as `near_pairs` gives them."""
        scans = chain.from_iterable(split.scans for split in self.splits)
        return near_pairs(thumbnails_of(list(scans)))

    def groups(self) -> np.ndarray:
        """Group all images so that copies are together; return the number of each image's group, from 0.

        The groups of DATA.GROUP, or the single images without it, are joined where images are nearly the same, or as
        similar as edited copies.
        """
        count = len(self.features)
        groups = np.arange(count)
        given_groups = list(chain.from_iterable(split.samples.groups or () for split in self.splits))
        if given_groups:
            groups = np.unique(given_groups, return_inverse=True)[1]
        return joined_groups(groups, chain([self.near_pairs().T], self.pairs_alike()))

    def pairs_alike(self) -> Iterator[np.ndarray]:
        """Yield pairs of images that are as similar as edited copies, in blocks of two rows."""
        for first in range(0, len(self.features), AT_ONCE):
            row, other = np.nonzero(self.features[first : first + AT_ONCE] @ self.features.T >= self.limit)
            yield np.stack([first + row, other])


def joined_groups(groups: np.ndarray, pairs: Iterable[np.ndarray]) -> np.ndarray:
    """Join the groups of two images wherever these are a pair; return the number of each image's group, from 0.

    `pairs`: blocks of two rows, the indices of images that belong together.
    """
    count = len(groups)
    for image, other in pairs:
        links = csr_array((np.ones(len(image), bool), (groups[image], groups[other])), (count, count))
        group_joined = connected_components(links, directed=False)[1]
        groups = group_joined[groups]
    return np.unique(groups, return_inverse=True)[1]


def is_chain(largest: int, images: int) -> bool:
    """Whether a group of so many images is too large to be one thing: each image looks like the next, not like all."""
    return largest > max(MANY, images / MANY)


def write_alike(config: Config, splits: Sequence[Split], folder: Path) -> int:
    """Write a page of the most similar images of two splits, and a table or list that keeps them out of one of them.

    Returns how many images may be copies. 0 also if they look like too many images to be copies, or often like those of
    other labels; then only the page is written.
    """
    if len(splits) < 2:
        raise UserError(f"-alike compares two splits whose images are files; {source_of(config.DATA)} has not two.")
    images = Images(config, splits)
    training = int(images.begins[1])
    blocks = []
    for begin, end in pairwise(images.begins[1:].tolist()):  # each split, among those before it
        blocks.append(nearest(images.features[begin:end], images.features[:begin], images.limit))
    nearest_images = joined(blocks)
    counts = nearest_images.counted(images.labels[training:], images.labels)
    alike, _, alike_to_each, *_ = counts
    words = alike_in_words(counts, "images look like one of another split")
    found = f"{words or 'No image looks like one of another split as edited copies do'}."
    about_limit = (
        f"The median similarity of validation images to edited copies ({EDITS}) is {images.limit:.2f}; half of such "
        "copies are less similar, so look further down the page."
    )
    log.info("%s %s", found, about_limit)
    _write_page(images, nearest_images, folder / "alike.html", found, about_limit)

    if copies_unknown(counts):
        log.info("No list is written: it would leave out images, or join them, that may be no copies.")
        return 0
    if alike_to_each >= MANY:
        log.info("No list is written: it would leave out too many images, or join them to a few groups.")
        return 0
    # Groups help where the split is made by vitamp, of files with one label each. Elsewhere, images are left out.
    one_label = images.labels.ndim == 1 and has_labels(images.data)
    if alike and one_label and comes_unsplit(images.data) and splits[0].samples.stored == "files":
        _write_groups(images, folder / "groups.csv")
    elif alike:
        _write_list(images, folder / "exclude.txt")
    return alike


def _write_page(images: Images, nearest_images: Nearest, page: Path, found: str, about_limit: str) -> None:
    """Write the page, with pictures of the most similar pairs of an image and one of a split before its own.

    `nearest_images`: of all images but those of training. `found`, `about_limit`: sentences at its top.
    """
    with writing(page, "-alike"):
        page.parent.mkdir(parents=True, exist_ok=True)
    training = int(images.begins[1])
    order = np.argsort(-nearest_images.similar, kind="stable")
    pairs = []
    for row in progress_bar(order[:MOST_SHOWN].tolist(), "pictures"):
        both = [images.shown(training + row), images.shown(int(nearest_images.place[row]))]
        pairs.append((nearest_images.similar[row], both))
    title = f"Images of {source_of(images.data)} that look like one of another split"
    values = {"title": title, "found": found, "about": about_limit, "pairs": pairs, "limit": images.limit}
    write_template("alike.html", page, "-alike", **values)
    log.info("Look at them: %s", page)


def _write_groups(images: Images, table: Path) -> None:
    """Write a table of all images, with their groups, which a split keeps whole; none if one group would have most."""
    groups = images.groups()
    largest = int(np.bincount(groups).max())
    if is_chain(largest, len(groups)):
        log.info(
            "No table is written. It would put images that look alike into one group, which a split does not divide. "
            "Here one group would have %s of %s images: each looks like the next, though the first need not look like "
            "the last. If names or a table say what images show, such as a patient, split by that (DATA.GROUP, "
            "docs/splits.md). Else look at the page, and list those that are copies in a file for DATA.EXCLUDE.",
            f"{largest:,}",
            f"{len(groups):,}",
        )
        return
    data_path = Path(images.data.DATA_PATH or "").expanduser()
    root = data_path if data_path.is_dir() else data_path.parent
    columns = ["path", "target", "group"]
    first_test = len(groups)
    has_test = len(images.splits) > 2
    if has_test:
        columns.append("split")
        first_test = images.begins[2]
    # Where the data keeps its test split, training images that look like its images are in no split.
    like_test = np.isin(groups[:first_test], groups[first_test:])
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    written = Counter[int]()
    for number, group in enumerate(groups.tolist()):
        if number < first_test and like_test[number]:
            continue
        written[group] += 1
        row = [os.path.relpath(images.name(number), root), images.label(number), group]
        if has_test:
            row.append(TEST if number >= first_test else TRAIN)
        rows.writerow(row)
    with writing(table, "-alike"):
        write_atomically(table, text.getvalue())
    size = counted(max(written.values()), "image")
    flags = f"-dataset {shlex.quote(f'csv:{table}')} -data_path {shlex.quote(str(root))} DATA.GROUP=group"
    log.info("%s: similar images are a group, the largest of %s, to be kept on one side of a split:", table, size)
    if has_test:
        left_out = counted(int(like_test.sum()), "image")
        log.info("it leaves out %s like test images, and keeps test for the end;", left_out)
        flags += " DATA.KEEP_TEST=true"
    log.info("train with %s, and check that split again.", flags)


def _write_list(images: Images, list_file: Path) -> None:
    """Write a list for DATA.EXCLUDE: the training images that look like one of another split, or are nearly the same.

    Each line has the image that it looks like as its comment.
    """
    training = int(images.begins[1])
    nearest_others = nearest(images.features[:training], images.features[training:], images.limit)
    like = nearest_others.place
    pairs = images.near_pairs()
    pairs = pairs[(pairs[:, 0] < training) & (pairs[:, 1] >= training)]
    near_copies = pairs[:, 0]
    like[near_copies] = pairs[:, 1] - training
    lines = []
    for number in np.union1d(np.flatnonzero(nearest_others.similar >= images.limit), near_copies).tolist():
        other_name = images.name(training + int(like[number]))
        lines.append(line_of(images.name(number), f"like {other_name}", images.data))
    with writing(list_file, "-alike"):
        write_atomically(list_file, text_of_list(lines, images.data))
    count = counted(len(lines), "training image")
    log.info("%s: %s; to leave them out, train with DATA.EXCLUDE=%s", list_file, count, shlex.quote(str(list_file)))
