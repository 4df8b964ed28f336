"""The images whose labels are searched, and which of them are copies or belong to one group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from datasets import ImageDataset, auto_workers, open_dataset, source_of
from datasets.base import TITLES, Part, Samples
from datasets.exclude import line_of, path_in_list
from datasets.labels import ANY_LABEL, label_words, names_of_classes
from engine.evaluation.data import data_for_evaluation
from engine.trained.model import Trained
from tools.check_data.near import near_pairs
from tools.check_data.scan import scan_split, thumbnails_of
from tools.common.command_line import ToolLine
from utils.config import Config
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log
from utils.record.run_folder import MANY
from utils.text import counted

INPUT_SETTINGS = ("IMAGE_SIZE", "IMAGE_CHANNELS", "CROP", "CROP_PCT", "CROP_MODE", "INTERPOLATION")
INPUT_SETTINGS += ("IMAGENET_MEAN", "IMAGENET_STD", "EXIF_ROTATE", "BACKGROUND")
"""Settings of DATA that decide how an image becomes the input of a model"""


class Suspect(NamedTuple):
    """An image that suspects.csv lists, since its label may be wrong."""

    image: int
    """Its index"""
    given: str
    proposed: str
    """Names of classes; of several, separated by |"""
    wrong_probability: float
    """Probability that the given label is wrong"""
    given_probability: float
    proposed_probability: float
    """Probabilities of both labels from pixels alone"""
    copy_disagrees: bool = False
    """Whether a copy, or nearly one, has the proposed label"""
    same_bytes_disagree: bool = False
    """Whether a copy of the same bytes has another label: of nearly the same images, each label may be right"""


@dataclass
class Images:
    """The images of the split that is searched, their labels as given, and which of them are copies of others."""

    data: DataConfig
    dataset: ImageDataset
    samples: Samples
    classes: list[str]
    labels: np.ndarray
    """See `Samples.labels`"""
    distinct: np.ndarray
    """Indices of the images of which no earlier one is a copy"""
    distinct_row: np.ndarray
    """For each image, the place in `distinct` of the image that it is a copy of, or of itself"""
    first_with_bytes: np.ndarray
    """For each image, the index of the first image with the same bytes"""

    @property
    def contradicted_rows(self) -> list[int]:
        """Places in `distinct` of the images that have a copy with another label."""
        labels_of_originals = self.labels[self.distinct[self.distinct_row]]
        return np.unique(self.distinct_row[_labels_differ(self.labels, labels_of_originals)]).tolist()

    def name(self, index: int) -> str:
        return path_in_list(self.samples.name(index), self.data)

    def groups_of(self, indices: np.ndarray) -> np.ndarray:
        """The group (DATA.GROUP) of each of these images; empty without groups."""
        return np.array(self.samples.groups)[indices] if self.samples.groups else np.empty(0)

    @cached_property
    def label_numbers(self) -> np.ndarray:
        """One number per image, equal for images with the same label, or with the same set of several labels."""
        return np.unique(self.labels, axis=0, return_inverse=True)[1].reshape(-1)

    @cached_property
    def group_numbers(self) -> np.ndarray:
        """One number per image, equal for the images of a group (DATA.GROUP).

        No two numbers are equal without groups, or if at least half of the groups with several images have several
        labels: then a group says nothing about labels.
        """
        if self.samples.groups:
            _, groups = np.unique(self.samples.groups, return_inverse=True)
            # Each different pair of a group and a label once, so a group is in as many pairs as it has labels.
            groups_in_pairs, _ = np.unique(np.stack([groups, self.label_numbers]), axis=1)
            with_several_labels = (np.bincount(groups_in_pairs) > 1).sum()
            with_several_images = (np.bincount(groups) > 1).sum()
            if with_several_labels < with_several_images / 2:
                return groups
        return np.arange(len(self.labels))

    def images_of_same_thing(self, image: int, similarities: np.ndarray, limit: float) -> tuple[np.ndarray, str]:
        """Find the images that show the same thing as one image, and count their labels if these differ.

        `similarities`: of all images to this one. Those from `limit` on count as its copies, unless at least 10 are so
        similar: then the model hardly tells such images apart. If all copies have one label, the image's group is
        tried.

        Returns a mask over all images, and a sentence that these have several labels; '' if they have one.
        """
        is_copy = self.distinct_row == self.distinct_row[image]
        is_similar = similarities >= limit
        if is_similar.sum() < MANY:
            is_copy = is_copy | is_similar
        in_group = self.group_numbers == self.group_numbers[image]
        for mask, sentence in (
            (is_copy, "these {} images look alike and have {} labels"),
            (in_group, "the {} images of its group have {} labels"),
        ):
            label_count = len(np.unique(self.label_numbers[mask]))
            if label_count > 1:
                return mask, sentence.format(mask.sum(), label_count)
        return is_copy, ""

    def exclude_line(self, suspect: Suspect) -> str:
        """A line of exclude.txt that leaves this image out, with the reason as its comment."""
        reason = f"labelled {suspect.given}, looks like {suspect.proposed}"
        return line_of(self.samples.name(suspect.image), reason, self.data)

    def label_words(self, label: np.ndarray) -> str:
        return label_words(label, self.classes)


def _labels_differ(labels: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compare labels image by image: a mask of the images whose label, or any of their labels, differs."""
    return (labels != others).reshape(len(labels), -1).any(1)


def config_to_search(trained: Trained, line: ToolLine, recipe: Config) -> Config:
    """Combine the settings of a run's model with those of the images to search.

    The images are those that the command line names; with -prove, those of `recipe`, in the form that the model reads.
    """
    config = trained.config
    if line.asked.prove:
        data = recipe.DATA.changed(**{key: getattr(config.DATA, key) for key in INPUT_SETTINGS})
    else:
        all_images = config.changed(DATA={"PART": "all"})
        settings_on_command_line = {*line.run.flags, *line.run.words}
        data, _ = data_for_evaluation(all_images, trained.chosen, settings_on_command_line)
    return config.changed(DATA=data)


def open_images(config: Config, part: Part) -> Images:
    """Open a split with its labels as given, find copies among its images, and log how many there are.

    Raises UserError if the images are no files on a disk, if a label is below 0, or if an image cannot be read.
    """
    data = config.DATA.changed(PART=part, FOLD=None, RELABEL=None)
    dataset = open_dataset(data, False, ANY_LABEL, config.SEED, torch.device("cpu"))
    samples = dataset.single_images()
    if samples is None or samples.remote:
        where = "held in memory, without names" if samples is None else "read over a network"
        raise UserError(
            f"{source_of(data)}: its images are {where}; check_labels.py needs them as files on a disk, such as one "
            "folder per class."
        )
    labels = np.asarray(samples.labels)
    below_zero = np.flatnonzero(labels < 0)
    if len(below_zero):
        label = f"{samples.name(int(below_zero[0]))}: the label {labels[below_zero[0]]}"
        raise UserError(f"{label} is below 0. Correct it, or leave the image out by DATA.EXCLUDE.")
    scans = scan_split(TITLES[part], samples, data, auto_workers(given=data.NUM_WORKERS)).scans
    for image, scan in enumerate(scans):
        if scan.problem:
            raise UserError(f"{samples.name(image)}: cannot be read ({scan.reason}); leave it out by DATA.EXCLUDE.")

    # Copies with equal bytes
    image_by_digest: dict[bytes, int] = {}  # the first image of each
    first_with_bytes = np.array([image_by_digest.setdefault(scan.digest, image) for image, scan in enumerate(scans)])
    contradicting = int(_labels_differ(labels, labels[first_with_bytes]).sum())
    copies = f"{len(samples) - len(image_by_digest):,} copies of others, {contradicting:,} of them with another label"

    # Nearly the same images with different labels count as copies, too. Copies share a fold, so that a model that
    # judges one has not seen another.
    original_of = first_with_bytes.copy()
    if labels.ndim == 1:
        pairs = near_pairs(thumbnails_of(scans))
        first = pairs[:, 0]
        second = pairs[:, 1]
        pairs = pairs[(labels[first] != labels[second]) & (original_of[first] != original_of[second])]
        for image, near_copy in pairs.tolist():
            # All copies of the second image's original become copies of the first image's original.
            original_of[original_of == original_of[near_copy]] = original_of[image]
        if len(pairs):
            copies += f"; {counted(len(pairs), 'pair')} nearly the same, with different labels"

    # The distinct images, and for each image the place of its original among these.
    distinct, distinct_row = np.unique(original_of, return_inverse=True)
    classes = names_of_classes(dataset.classes, labels)
    number = f"{len(samples):,}"
    log.info("%s: %s images (%s), %d classes; %s", source_of(data), number, TITLES[part], len(classes), copies)
    return Images(
        data=data,
        dataset=dataset,
        samples=samples,
        classes=classes,
        labels=labels,
        distinct=distinct,
        distinct_row=distinct_row,
        first_with_bytes=first_with_bytes,
    )


def open_validation(config: Config, classes: list[str]) -> Images:
    """Open the validation split like `open_images`, to be judged by models of these classes.

    It may have no image of the last classes. Raises UserError for an image of another class, too.
    """
    images = replace(open_images(config, "val"), classes=classes)
    if images.labels.ndim == 1:
        unknown = np.flatnonzero(images.labels >= len(classes))
        if len(unknown):
            label = f"{images.name(int(unknown[0]))}: the label {images.labels[unknown[0]]}"
            raise UserError(f"{label} is none of the {len(classes)} classes of the training images. Correct it.")
    return images
