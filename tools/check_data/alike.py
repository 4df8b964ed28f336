"""Images that look like one of another split (-alike): a page that shows them, and a list or table against them.

Images are compared by a model's features. If the data set comes with its splits, the list excludes training images. If
it comes unsplit, the table puts images that look alike into one group, which a split does not divide.
"""

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
"""Pairs of images on the page"""


class Images:
    """The images of all splits with their features, and the limit from which on two images look alike.

    An image is its number among the images of all splits, of which training comes first.
    """

    def __init__(self, config: Config, splits: Sequence[Split]) -> None:
        self.data = config.DATA
        self.splits = splits
        trained = pretrained(config, ALONE)
        pool = pool_of(trained.model)
        batch = config.DATA.val_batch
        self.datasets = list[ImageDataset]()
        feature_tables = list[np.ndarray]()
        for split in splits:
            data = config.DATA.changed(PART=PARTS[split.title])
            dataset = open_dataset(data, False, ANY_LABEL, config.SEED, torch.device("cpu"))
            with trained.computing(data.val_batch):
                feature_tables.append(np.asarray(features_of(trained, config, dataset, data).of(pool)))
            self.datasets.append(dataset)
        self.begins = np.cumsum([0, *map(len, feature_tables)])
        """Number of the first image of each split, and of all images"""
        mean = feature_tables[0].mean(0)
        self.features = directions(np.concatenate(feature_tables), mean)
        """Unit vectors from the mean of the training images; the product of two is how similar the images are"""
        with trained.computing(batch):
            self.limit = similarity_of_edited(trained, self.datasets[1], mean, batch)
        self.labels = np.concatenate([split.samples.labels for split in splits])
        self.classes = distinct_names(splits[0].samples.classes or range(int(self.labels.max()) + 1))

    def name(self, image: int) -> str:
        """Return the name of an image, such as the path of its file."""
        split, index = self._split_and_index(image)
        return self.splits[split].samples.name(index)

    def label(self, image: int) -> str:
        """Return the name of an image's class, or of all its classes, as in `cat|dog`."""
        label = self.labels[image]
        class_indices = np.flatnonzero(label) if label.ndim else [int(label)]
        return "|".join(self.classes[class_index] for class_index in class_indices)

    def figure(self, image: int) -> dict[str, Any]:
        """Return what the page shows of an image: its picture, its split and its label."""
        split, index = self._split_and_index(image)
        picture = pictured(self.datasets[split], index, self.data)
        return {**picture, "title": self.splits[split].title, "label": self.label(image)}

    def _split_and_index(self, image: int) -> tuple[int, int]:
        """Return the number of an image's split, and the index of the image there."""
        split = int(np.searchsorted(self.begins, image, side="right")) - 1
        return split, image - int(self.begins[split])

    def near_pairs(self) -> np.ndarray:
        """Return the pairs of images whose thumbnails are nearly the same, as `near_pairs` does."""
        scans = chain.from_iterable(split.scans for split in self.splits)
        return near_pairs(thumbnails_of(list(scans)))

    def groups(self) -> np.ndarray:
        """Return the number of each image's group.

        Groups of DATA.GROUP, or else single images, are joined if images of them are nearly the same, or as similar as
        edited copies.
        """
        count = len(self.features)
        groups = np.arange(count)
        groups_of_data = list(chain.from_iterable(split.samples.groups or () for split in self.splits))
        if groups_of_data:
            groups = np.unique(groups_of_data, return_inverse=True)[1]

        # Pairs are found and joined in blocks, since all products of features together may not fit into memory.
        pairs = [self.near_pairs().T]
        for begin in range(0, count, AT_ONCE):
            in_block, second = np.nonzero(self.features[begin : begin + AT_ONCE] @ self.features.T >= self.limit)
            pairs.append(np.stack([begin + in_block, second]))
        for first, second in pairs:
            links = csr_array((np.ones(len(first), bool), (groups[first], groups[second])), (count, count))
            groups = connected_components(links, directed=False)[1][groups]
        return np.unique(groups, return_inverse=True)[1]


def write_alike(config: Config, splits: Sequence[Split], folder: Path) -> int:
    """Write a page of the most similar images of two splits, and a list or a table that keeps them in one of them.

    Returns how many images may be copies. It is 0, without a list or table, if most of them look like very many images,
    or if their labels say that they may be no copies.
    """
    if len(splits) < 2:
        raise UserError(f"-alike compares two splits whose images are files; {source_of(config.DATA)} has not two.")
    images = Images(config, splits)

    # The images of each later split are compared with those of all splits before it.
    training_images = int(images.begins[1])
    blocks = []
    for begin, end in pairwise(images.begins[1:].tolist()):
        blocks.append(nearest(images.features[begin:end], images.features[:begin], images.limit))
    most_similar = joined(blocks)
    counts = most_similar.counted(images.labels[training_images:], images.labels)
    alike, _, alike_to_each, *_ = counts

    summary = alike_in_words(counts, "images look like one of another split")
    summary = f"{summary or 'No image looks like one of another split as edited copies do'}."
    about_limit = (
        f"The median similarity of validation images to edited copies ({EDITS}) is {images.limit:.2f}; half of such "
        "copies are less similar, so look further down the page."
    )
    log.info("%s %s", summary, about_limit)
    _write_page(images, most_similar, folder / "alike.html", summary, about_limit)

    if copies_unknown(counts):
        log.info("No list is written: it would leave out images, or join them, that may be no copies.")
        return 0
    if alike_to_each >= MANY:
        log.info("No list is written: it would leave out too many images, or join them to a few groups.")
        return 0
    one_label = images.labels.ndim == 1 and has_labels(images.data)
    if alike and one_label and comes_unsplit(images.data) and splits[0].samples.stored == "files":
        _write_groups(images, folder / "groups.csv")
    elif alike:
        _write_list(images, folder / "exclude.txt")
    return alike


def _write_page(images: Images, most_similar: Nearest, page: Path, summary: str, about_limit: str) -> None:
    """Write a page with the most similar pairs of an image and one of an earlier split, the most similar pair first.

    `most_similar` has a row for each image that is not of the training split. Both texts stand above the pairs.
    """
    with writing(page, "-alike"):
        page.parent.mkdir(parents=True, exist_ok=True)
    training_images = int(images.begins[1])
    order = np.argsort(-most_similar.similar, kind="stable")
    pairs = []
    for row in progress_bar(order[:MOST_SHOWN].tolist(), "pictures"):
        both = [images.figure(training_images + row), images.figure(int(most_similar.place[row]))]
        pairs.append((most_similar.similar[row], both))
    title = f"Images of {source_of(images.data)} that look like one of another split"
    values = {"title": title, "found": summary, "about": about_limit, "pairs": pairs, "limit": images.limit}
    write_template("alike.html", page, "-alike", **values)
    log.info("Look at them: %s", page)


def _write_groups(images: Images, table: Path) -> None:
    """Write a table of all images with their groups, for DATA.GROUP, and log how to train with it.

    No table is written if one group would have too many images. If the data set keeps a test split, the table keeps it
    as well, and training images that are in a group with a test image are left out.
    """
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
    data_path = Path(images.data.DATA_PATH or "").expanduser()
    root = data_path if data_path.is_dir() else data_path.parent
    columns = ["path", "target", "group"]
    first_test_image = len(groups)
    has_test = len(images.splits) > 2
    if has_test:
        columns.append("split")
        first_test_image = images.begins[2]
    like_test_images = np.isin(groups[:first_test_image], groups[first_test_image:])

    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    group_sizes = Counter[int]()
    for image, group in enumerate(groups.tolist()):
        of_test = image >= first_test_image
        if not of_test and like_test_images[image]:
            continue
        group_sizes[group] += 1
        row = [os.path.relpath(images.name(image), root), images.label(image), group]
        if has_test:
            row.append(TEST if of_test else TRAIN)
        rows.writerow(row)
    with writing(table, "-alike"):
        write_atomically(table, text.getvalue())

    largest_size = counted(max(group_sizes.values()), "image")
    arguments = f"-dataset {shlex.quote(f'csv:{table}')} -data_path {shlex.quote(str(root))} DATA.GROUP=group"
    log.info(
        "%s: similar images are a group, the largest of %s, to be kept on one side of a split:", table, largest_size
    )
    if has_test:
        left_out = counted(int(like_test_images.sum()), "image")
        log.info("it leaves out %s like test images, and keeps test for the end;", left_out)
        arguments += " DATA.KEEP_TEST=true"
    log.info("train with %s, and check that split again.", arguments)


def _write_list(images: Images, exclude_file: Path) -> None:
    """Write an exclude list of the training images that are nearly the same as one of another split, or look like it.

    Those look like it that are as similar as edited copies.
    """
    training_images = int(images.begins[1])
    most_similar = nearest(images.features[:training_images], images.features[training_images:], images.limit)
    pairs = images.near_pairs()
    pairs = pairs[(pairs[:, 0] < training_images) & (pairs[:, 1] >= training_images)]
    most_similar.place[pairs[:, 0]] = pairs[:, 1] - training_images
    lines = []
    for image in np.union1d(np.flatnonzero(most_similar.similar >= images.limit), pairs[:, 0]).tolist():
        like = images.name(training_images + int(most_similar.place[image]))
        lines.append(line_of(images.name(image), f"like {like}", images.data))
    with writing(exclude_file, "-alike"):
        write_atomically(exclude_file, text_of_list(lines, images.data))
    count = counted(len(lines), "training image")
    log.info(
        "%s: %s; to leave them out, train with DATA.EXCLUDE=%s", exclude_file, count, shlex.quote(str(exclude_file))
    )
