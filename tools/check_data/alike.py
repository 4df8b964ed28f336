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
from datasets.labels import ANY_LABEL, label_words, names_of_classes
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
from utils.config.data import DataConfig
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.log import log
from utils.record.run_folder import MANY, alike_in_words, copies_unknown, share_a_style
from utils.text import counted
from vitamp.files import write_atomically
from vitamp.pooling import pool_of

PARTS: dict[str, Part] = {"training": "train", "validation": "val", "test": "test"}
"""DATA.PART by the title of a split"""
MOST_SHOWN = 100
"""Pairs with pictures"""
COLUMNS = ("path", "target", "group", "split")
"""Columns of a table of images"""


class Images:
    """The images of all splits, numbered through, with their labels and features.

    `features` are directions from the mean of training's: the product of two is how similar the images are.
    `similarity_of_copies` is how similar images are to their edited copies. Split i has the numbers from begins[i] to
    begins[i + 1]; training, the first split, ends before `training_end`.
    """

    def __init__(self, config: Config, splits: Sequence[Split]) -> None:
        """Compute the features of all images of `splits`: training, validation, and test if there is one.

        They are features by the pretrained model of the settings, with its usual pooling.
        """
        self.data = config.DATA
        self.splits = splits
        trained = pretrained(config, ALONE)
        pool = pool_of(trained.model)
        batch = config.DATA.val_batch
        self.datasets = list[ImageDataset]()
        features_of_splits = list[np.ndarray]()  # images x features
        for split in splits:
            data = config.DATA.changed(PART=PARTS[split.title])
            dataset = open_dataset(
                data, train=False, num_classes=ANY_LABEL, seed=config.SEED, device=torch.device("cpu")
            )
            with trained.computing(batch):
                features_of_splits.append(np.asarray(features_of(trained, config, dataset, data).of(pool)))
            self.datasets.append(dataset)
        self.begins = np.cumsum([0, *map(len, features_of_splits)])
        self.training_end = int(self.begins[1])
        mean_of_training = features_of_splits[0].mean(0)
        self.features = directions(np.concatenate(features_of_splits), mean_of_training)
        validation = self.datasets[1]
        with trained.computing(batch):
            self.similarity_of_copies = similarity_of_edited(trained, validation, mean_of_training, batch)
        self.labels = np.concatenate([split.samples.labels for split in splits])
        self.classes = names_of_classes(splits[0].samples.classes, self.labels)

    def name(self, number: int) -> str:
        split, index = self._split_and_index(number)
        return self.splits[split].samples.name(index)

    def label(self, number: int) -> str:
        return label_words(self.labels[number], self.classes)

    def shown(self, number: int) -> dict[str, Any]:
        """The values of the page about one image: its picture, its split and its label."""
        split, index = self._split_and_index(number)
        values = pictured(self.datasets[split], index, self.data)
        return {**values, "title": self.splits[split].title, "label": self.label(number)}

    def _split_and_index(self, number: int) -> tuple[int, int]:
        """The split that an image is in, and its index there."""
        split = int(np.searchsorted(self.begins, number, side="right")) - 1
        return split, number - int(self.begins[split])

    def near_pairs(self) -> np.ndarray:
        """Find pairs of images that are nearly the same: pairs x 2 numbers of images, the first below the second."""
        scans = chain.from_iterable(split.scans for split in self.splits)
        return near_pairs(thumbnails_of(list(scans)))

    def groups(self) -> np.ndarray:
        """Group all images so that copies are together; return the number of each image's group, from 0.

        The groups of DATA.GROUP, or the single images without it, are joined where images are nearly the same, or as
        similar as edited copies.
        """
        groups, _ = given_groups(self.splits)
        return joined_groups(groups, chain([self.near_pairs().T], self.pairs_alike()))

    def most_similar_before(self) -> Nearest:
        """Find, for each image of a split after training, the most similar image of all splits before its own."""
        blocks = []
        for begin, end in pairwise(self.begins[1:].tolist()):
            blocks.append(nearest(self.features[begin:end], self.features[:begin], self.similarity_of_copies))
        return joined(blocks)

    def pairs_alike(self) -> Iterator[np.ndarray]:
        """Yield pairs of images that are as similar as edited copies, in blocks of two rows."""
        for first in range(0, len(self.features), AT_ONCE):
            is_alike = self.features[first : first + AT_ONCE] @ self.features.T >= self.similarity_of_copies
            row, other = np.nonzero(is_alike)
            yield np.stack([first + row, other])


def given_groups(splits: Sequence[Split]) -> tuple[np.ndarray, bool]:
    """Return the number of each image's group, counted through all splits, and whether DATA.GROUP names the groups.

    Without it, each image is a group of its own.
    """
    groups = list(chain.from_iterable(split.samples.groups or () for split in splits))
    if groups:
        return np.unique(groups, return_inverse=True)[1], True
    return np.arange(sum(len(split.samples) for split in splits)), False


def joined_groups(groups: np.ndarray, pairs: Iterable[np.ndarray]) -> np.ndarray:
    """Join the groups of two images wherever these are a pair; return the number of each image's group, from 0.

    `pairs`: blocks of two rows, the numbers of the one images, and those of the others.
    """
    count = len(groups)
    # Each pair links the groups of its two images. Groups that are linked, also by way of others, become one.
    for image, other in pairs:
        links = csr_array((np.ones(len(image), bool), (groups[image], groups[other])), (count, count))
        _, joined_group_of = connected_components(links, directed=False)
        groups = joined_group_of[groups]
    _, consecutive_numbers = np.unique(groups, return_inverse=True)
    return consecutive_numbers


def is_chain(largest: int, images: int) -> bool:
    """Whether a group is too large for images of one thing: each looks like the next, not like all.

    `largest`: the size of the group. `images`: the number of all images.
    """
    return largest > max(MANY, images / MANY)  # 10 images, or a tenth of all


def write_alike(config: Config, splits: Sequence[Split], folder: Path) -> int | None:
    """Write a page of images that look like one of another split, and a table or list that keeps such images apart.

    Returns how many images may be copies of one in another split; None if that cannot be told, because such pairs often
    have two labels. The result is 0 if they are probably no copies: if each looks like many others, or if most pairs
    have two labels. In all these cases, only the page is written.
    """
    if len(splits) < 2:
        raise UserError(f"-alike compares two splits whose images are files; {source_of(config.DATA)} has not two.")
    images = Images(config, splits)
    nearest_images = images.most_similar_before()
    counts = nearest_images.counted(images.labels[images.training_end :], images.labels)
    possible_copies, _, others_like_each, _, _ = counts
    words = alike_in_words(counts, "images look like one of another split")
    found = f"{words or 'No image looks like one of another split as edited copies do'}."
    about_limit = (
        f"The median similarity of validation images to edited copies ({EDITS}) is {images.similarity_of_copies:.2f}; "
        "half of such copies are less similar, so look further down the page."
    )
    log.info("%s %s", found, about_limit)
    _write_page(images, nearest_images, folder / "alike.html", found, about_limit)

    if copies_unknown(counts):
        log.info("No list is written: it would leave out images, or join them, that may be no copies.")
        return 0 if share_a_style(counts) else None
    if others_like_each >= MANY:
        log.info("No list is written: it would leave out too many images, or join them to a few groups.")
        return 0
    if possible_copies == 0:
        return 0
    # Groups help where the split is made by vitamp, of files with one label each. Elsewhere, images are left out.
    has_one_label = images.labels.ndim == 1 and has_labels(images.data)
    if has_one_label and comes_unsplit(images.data) and splits[0].samples.stored == "files":
        _write_groups(images, folder / "groups.csv")
    else:
        _write_list(images, folder / "exclude.txt")
    return possible_copies


def _write_page(images: Images, nearest_images: Nearest, page: Path, found: str, about_limit: str) -> None:
    """Write the page, with pictures of the most similar pairs of an image and one of a split before its own.

    `nearest_images`: the most similar image for each image, except for those of training, which come first in `images`.
    `found`, `about_limit`: sentences at the top of the page.
    """
    with writing(page, "-alike"):
        page.parent.mkdir(parents=True, exist_ok=True)
    most_similar_first = np.argsort(-nearest_images.similar, kind="stable")
    pairs = []
    for row in progress_bar(most_similar_first[:MOST_SHOWN].tolist(), "pictures"):
        image = images.training_end + row
        nearest_image = int(nearest_images.place[row])
        pairs.append((nearest_images.similar[row], [images.shown(image), images.shown(nearest_image)]))
    title = f"Images of {source_of(images.data)} that look like one of another split"
    limit = images.similarity_of_copies
    values = {"title": title, "found": found, "about": about_limit, "pairs": pairs, "limit": limit}
    write_template("alike.html", page, "-alike", **values)
    log.info("Look at them: %s", page)


def _write_groups(images: Images, table: Path) -> None:
    """Write a CSV table of all images and their groups, for a new split that keeps each group in one of its splits.

    Images that look alike are a group. No table is written if one group has too many of the images.
    """
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
    has_test = len(images.splits) > 2  # training, validation, test
    test_begin = images.begins[2] if has_test else len(groups)

    # The test split stays as it is. Training and validation are split anew from TRAIN, without images like test images.
    like_test = np.isin(groups[:test_begin], groups[test_begin:])
    rows = []
    images_in_group = Counter[int]()
    for number, group in enumerate(groups.tolist()):
        is_test = number >= test_begin
        if is_test or not like_test[number]:
            images_in_group[group] += 1
            rows.append((images.name(number), images.label(number), group, TEST if is_test else TRAIN))
    with writing(table, "-alike"):
        write_table(table, images.data, rows, images.classes, COLUMNS if has_test else COLUMNS[:3])

    # Log what the table is for, and the flags that use it.
    size = counted(max(images_in_group.values()), "image")
    root = shlex.quote(str(root_of(images.data)))
    flags = f"-dataset {shlex.quote(f'csv:{table}')} -data_path {root} DATA.GROUP=group"
    log.info("%s: similar images are a group, the largest of %s, to be kept on one side of a split:", table, size)
    if has_test:
        left_out = counted(int(like_test.sum()), "image")
        log.info("it leaves out %s like test images, and keeps test for the end;", left_out)
        flags += " DATA.KEEP_TEST=true"
    log.info("train with %s, and check that split again.", flags)


def root_of(data: DataConfig) -> Path:
    """Return the folder that the paths in a table are relative to."""
    data_path = Path(data.DATA_PATH or "").expanduser()
    return data_path if data_path.is_dir() else data_path.parent


def write_table(
    table: Path,
    data: DataConfig,
    rows: Iterable[tuple[str, str, object, str]],
    classes: Sequence[str],
    columns: Sequence[str] = COLUMNS,
) -> None:
    """Write a table of images. `rows`: path, class, group and split of each image, of which `columns` are written.

    Raises UserError if the table would mean other classes: it takes a number for a label, not for a name.
    """
    for label, name in enumerate(classes):
        if name.isdecimal() and int(name) != label:
            raise UserError(
                f"class {name}: in a table, this name would be the number of a class, and {name} is class {label} by "
                f"the order of names. Rename such folders first, for example to n{name}."
            )
    root = root_of(data)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for path, *others in rows:
        writer.writerow([os.path.relpath(path, root), *others][: len(columns)])
    write_atomically(table, text.getvalue())


def _write_list(images: Images, list_file: Path) -> None:
    """Write a list for DATA.EXCLUDE: the training images that may be copies of an image in another split.

    They are nearly the same pixel for pixel, or as similar by their features as edited copies. The comment of each line
    names the image of the other split.
    """
    training_end = images.training_end
    features = images.features
    limit = images.similarity_of_copies

    # For each training image, the most similar image of another split: by pixels if these are nearly the same.
    nearest_others = nearest(features[:training_end], features[training_end:], limit)
    other_of = training_end + nearest_others.place
    pairs = images.near_pairs()
    is_across_splits = (pairs[:, 0] < training_end) & (pairs[:, 1] >= training_end)
    near_copies, near_originals = pairs[is_across_splits].T
    other_of[near_copies] = near_originals

    similar_images = np.flatnonzero(nearest_others.similar >= limit)
    lines = []
    for number in np.union1d(similar_images, near_copies).tolist():
        other_name = images.name(int(other_of[number]))
        lines.append(line_of(images.name(number), f"like {other_name}", images.data))
    with writing(list_file, "-alike"):
        write_atomically(list_file, text_of_list(lines, images.data))
    count = counted(len(lines), "training image")
    log.info("%s: %s; to leave them out, train with DATA.EXCLUDE=%s", list_file, count, shlex.quote(str(list_file)))
