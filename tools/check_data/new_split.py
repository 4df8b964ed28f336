"""Write a table that divides all images anew into three splits. Images of one thing are in one of them."""

import shlex
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from datasets.labels import label_words, names_of_classes
from datasets.sources.grouped import images_by_group, subsets_of_groups
from tools.check_data.alike import Images, given_groups, is_chain, joined_groups, root_of, write_table
from tools.check_data.near import near_pairs
from tools.check_data.scan import Scan, Split, thumbnails_of
from tools.common.output_file import writing
from utils.config import Config
from utils.errors import UserError
from utils.log import log
from utils.record.run_folder import alike_in_words, copies_unknown
from utils.seeding import generator_of
from utils.text import counted, some_of

TITLES = {"train": "training", "val": "validation", "test": "test"}
"""Parts in the order of -parts: as the table calls them, and as messages do"""
NEARLY_RANDOM = 0.75
"""More groups than this fraction of the images make a split nearly random"""


def write_split(config: Config, splits: Sequence[Split], fractions: Sequence[float], table: Path) -> None:
    """Write the table, and log the sizes of its parts and the command that trains on it.

    Groups of DATA.GROUP, copies, and images that are nearly the same stay in one part; with weights, also images that
    look as alike as edited copies. `fractions`: those of all images for training, validation and test.
    """
    data = config.DATA
    if any(split.samples.stored != "files" for split in splits):
        raise UserError("-split lists image files, and these images are not files of their own.")
    scans = list(chain.from_iterable(split.scans for split in splits))
    readable = np.flatnonzero([not scan.problem for scan in scans])
    groups, joined_by = _groups_of(config, splits, scans, readable)

    # Divide the readable images of all splits, without dividing a group.
    labels = np.concatenate([split.samples.labels for split in splits])[readable]
    group_of = np.unique(groups[readable], return_inverse=True)[1]
    counts = images_by_group(labels, group_of)
    if len(counts) < len(TITLES):
        raise UserError(f"-split: {counted(len(counts), 'group')} cannot fill three parts; groups stay whole.")
    order = generator_of(data.SPLIT_SEED, "split").permutation(len(counts))
    largest_first = order[np.argsort(-counts[order, 0], kind="stable")]
    part_of_image = subsets_of_groups(counts, np.array(fractions), largest_first)[group_of]

    # Write the table.
    names = list(chain.from_iterable(map(split.samples.name, range(len(split.samples))) for split in splits))
    classes = names_of_classes(splits[0].samples.classes, labels)
    part_names = list(TITLES)
    rows = list[tuple[str, str, object, str]]()
    for image, label, group, part in zip(readable.tolist(), labels, group_of, part_of_image, strict=True):
        rows.append((names[image], label_words(label, classes), group, part_names[part]))
    with writing(table, "-split"):
        write_table(table, data, rows, classes)

    # Say what it has.
    sizes = np.bincount(part_of_image, minlength=len(TITLES))
    sizes_in_words = ", ".join(f"{size:,} {title}" for size, title in zip(sizes, TITLES.values(), strict=True))
    largest_group = int(counts[:, 0].max())
    log.info(
        "%s: %s images. %s, in %s, of which the largest has %s, stay in one part.",
        *(table, sizes_in_words, joined_by, counted(len(counts), "group"), counted(largest_group, "image")),
    )
    if len(counts) > NEARLY_RANDOM * len(readable):
        log.info(
            "This split is nearly random, since few images are alike. If several images show one thing, name the "
            "groups (DATA.GROUP, docs/splits.md)."
        )
    unreadable = sorted(set(range(len(scans))).difference(readable.tolist()))
    if unreadable:
        without = [names[image] for image in unreadable]
        log.warning("Not in the table, since they cannot be read: %s.", some_of(without))
    wanted = np.array(fractions) * len(readable)
    for title, size, size_wanted in zip(TITLES.values(), sizes, wanted, strict=True):
        # As for splits that a run makes: a third fewer or half more is worth a warning, a single image is not.
        if not size_wanted / 1.5 - 1 <= size <= size_wanted * 1.5 + 1:
            log.warning("%d %s images, not %.0f, since groups are not divided.", size, title, size_wanted)
    missing = _classes_missing(labels, part_of_image, classes)
    if missing:
        log.warning("Classes without images there, since they have few images or groups: %s.", missing)
    arguments = ["-dataset", f"csv:{table}", "-data_path", str(root_of(data))]
    log.info("Train with %s; the end of the run names the command that measures on test.", shlex.join(arguments))


def _groups_of(
    config: Config, splits: Sequence[Split], scans: Sequence[Scan], readable: np.ndarray
) -> tuple[np.ndarray, str]:
    """Return the number of each image's group, and in words what makes images a group.

    Images are counted through all splits. `readable`: those that can be read.
    """
    groups, are_named = given_groups(splits)
    reasons = ["Copies and near copies"]
    if are_named:
        reasons = [f"Groups (DATA.GROUP {config.DATA.GROUP})", "copies and near copies"]
    first_with_pixels = dict[bytes, int]()
    copies = [(image, first_with_pixels.setdefault(scans[image].same, image)) for image in readable.tolist()]
    near = readable[near_pairs(thumbnails_of([scans[image] for image in readable]))]
    groups = joined_groups(groups, [np.array(copies).T, near.T])
    if config.MODEL.PRETRAINED and len(splits) > 1:
        images = Images(config, splits)
        counts = images.most_similar_before().counted(images.labels[images.training_end :], images.labels)
        groups_by_looks = joined_groups(groups, images.pairs_alike())
        largest = int(np.bincount(groups_by_looks).max())
        if copies_unknown(counts):
            words = "%s. Images that look alike are divided all the same: they may be of different things."
            log.warning(words, alike_in_words(counts))
        elif is_chain(largest, len(groups)):
            log.warning(
                "Images that look alike are divided all the same: they would be one group of %s of %s images, of which "
                "each looks like the next, though the first need not look like the last.",
                *(f"{largest:,}", f"{len(groups):,}"),
            )
        else:
            groups = groups_by_looks
            reasons.append("images that look as alike as edited copies")
    *first, last = reasons
    return groups, f"{', '.join(first)} and {last}" if first else last


def _classes_missing(labels: np.ndarray, part_of_image: np.ndarray, classes: Sequence[str]) -> str:
    """Name the parts that lack images of a class, with these classes; '' if none does."""

    def are_present(chosen: np.ndarray) -> np.ndarray:
        """Return for each class whether one of the images with the labels `chosen` has it."""
        return np.any(chosen, 0) if chosen.ndim == 2 else np.isin(np.arange(len(classes)), chosen)

    lacking = list[str]()
    for part, title in enumerate(TITLES.values()):
        is_absent = are_present(labels) & ~are_present(labels[part_of_image == part])
        absent = [classes[label] for label in np.flatnonzero(is_absent).tolist()]
        if absent:
            lacking.append(f"{title}: {some_of(absent)}")
    return "; ".join(lacking)
