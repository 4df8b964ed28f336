"""Findings from the names and groups of images: masks beside their images, and series that are in several splits."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from datasets.base import Samples
from datasets.registry import comes_unsplit
from datasets.sources.csv_table import group_column
from datasets.sources.grouped import IN_NAMES
from utils.config.data import DataConfig
from utils.text import counted

# A part of a name may be that of one thing, such as a patient, if it is in at most this fraction of all images and of
# the images of each class. A more frequent part, such as IMG_, is a camera's, or the name of a class.
MOST_OF_IMAGES = 0.05
MOST_OF_CLASS = 0.25
NOTED = 0.1
"""Smallest fraction of images with a companion, or of a split in groups that other splits have too, for a note"""
MOST_NAMES = 200_000
"""Largest number of images for which all names are read"""


def companions_of(splits: Mapping[str, Samples]) -> str:
    """Return a sentence if many images differ from another one only in the ending of the name; else ''.

    Masks have such names. `splits`: title -> samples of a split.
    """
    if not _have_names(splits):
        return ""
    names = set[str]()  # a set, because several rows of a table may name one file
    for samples in splits.values():
        names.update(samples.name(image) for image in range(len(samples)))
    by_stem = defaultdict[str, list[str]](list)
    for name in sorted(names):
        by_stem[os.path.splitext(name)[0]].append(name)
    companions = [same_stem for same_stem in by_stem.values() if len(same_stem) > 1]
    number = sum(map(len, companions))
    if number < NOTED * len(names):
        return ""
    first, second, *_ = companions[0]
    return (
        f"{number:,} of {len(names):,} images have the name of another one but for the ending, such as "
        f"{first} and {second}. If one is the other's mask, list the masks in a file for DATA.EXCLUDE"
    )


class Series(NamedTuple):
    """What names and groups show of images that are in several splits."""

    sentence: str = ""
    """What they show, without a full stop; '' if they show nothing"""
    advice: str = ""
    """What to do about it, with an example, without a full stop; '' with DATA.GROUP"""
    group: str = ""
    """The value of DATA.GROUP that keeps such images together"""
    namesakes: Sequence[int] = ()
    """Indices of the validation images that may be of one group with training images, if DATA.GROUP does not say"""


def series_of(splits: Mapping[str, Samples], data: DataConfig) -> Series:
    """Find images of one group that are in several splits, as those of one patient may be.

    The groups are those of DATA.GROUP; then a group with different labels gets a sentence, too. Without it, images are
    a group if a table's column such as patient has one value for them, or if the part of their names that a pattern of
    IN_NAMES matches is the same. `splits`: title -> samples of a split.
    """
    if data.GROUP is not None:
        sentences = (_sentence_on_groups(splits, data.GROUP), _sentence_on_labels(splits, data.GROUP))
        return Series(". ".join(filter(None, sentences)))
    if not _have_names(splits):
        return Series()
    # What may be groups: the value of DATA.GROUP for it, what images share, and the groups of each split
    candidates = list[tuple[str, str, dict[str, list[str]]]]()
    column, group_of = group_column(data)
    if column:
        groups = dict[str, list[str]]()
        for title, samples in splits.items():
            groups[title] = [group_of.get(samples.name(image), "") for image in range(len(samples))]
        candidates.append((column, f"their value in the column {column}", groups))
    for setting, (pattern, in_words) in IN_NAMES.items():
        candidates.append((setting, in_words, _groups_by_name(splits, pattern)))

    def fraction_and_coarseness(candidate: tuple[str, str, dict[str, list[str]]]) -> tuple[float, int]:
        _, _, groups = candidate
        number_of_groups = len(set(chain.from_iterable(groups.values())))
        return _divided_groups(groups).largest_fraction, -number_of_groups

    # The coarsest groups that are divided keep most together, such as those of a patient with several series.
    setting, shared, groups = max(candidates, key=fraction_and_coarseness)
    divided = _divided_groups(groups)
    if divided.largest_fraction < NOTED:  # a smaller fraction of each split may be chance
        return Series()
    effect = "keeps them on one side of the split" if comes_unsplit(data) else "names them; split by them"
    in_training = set(groups["training"])
    validation = enumerate(groups.get("validation", []))
    return Series(
        # divided.images is text, such as "3 of 10 validation images".
        sentence=f"{divided.images} share {shared} with an image in another split",
        advice=(
            f"Look at those of {min(divided.groups)}: if they come from one person, object or scene, "
            f"'DATA.GROUP={setting}' {effect} (docs/splits.md)"
        ),
        group=setting,
        namesakes=[index for index, group in validation if group and group in in_training],
    )


def _sentence_on_groups(splits: Mapping[str, Samples], setting: str) -> str:
    """Return a sentence if groups of DATA.GROUP are in several splits, or if each group is one image; else ''.

    `setting`: the value of DATA.GROUP.
    """
    groups = {title: samples.groups or [] for title, samples in splits.items()}
    number_of_images = sum(map(len, splits.values()))
    number_of_groups = len(set(chain.from_iterable(groups.values())))
    if number_of_groups == number_of_images:
        each = f"each of {counted(number_of_images, 'image')} is a group of its own, which changes nothing"
        return f"DATA.GROUP {setting}: {each}"
    divided = _divided_groups(groups)
    if not divided.groups:
        return ""
    return (
        f"DATA.GROUP {setting}: {counted(len(divided.groups), 'group')} in more than one split, such as "
        f"{min(divided.groups)}: {divided.images}. Metrics may be better there than on new groups (docs/splits.md)"
    )


def _sentence_on_labels(splits: Mapping[str, Samples], setting: str) -> str:
    """Return a sentence if images of one group of DATA.GROUP have different labels; else ''.

    It is also '' if most groups do, as those of places may, and with several labels per image.
    """
    # Group -> its labels, each with the name of the first image that has it
    labels_of = defaultdict[str, dict[int, str]](dict)
    for samples in splits.values():
        if samples.labels.ndim == 1:
            for image, group in enumerate(samples.groups or ()):
                label = int(samples.labels[image])
                if label not in labels_of[group]:
                    labels_of[group][label] = samples.name(image)
    mixed = sorted(group for group, labels in labels_of.items() if len(labels) > 1)
    if not 0 < 2 * len(mixed) <= len(labels_of):
        return ""
    first, second, *_ = labels_of[mixed[0]].values()
    return (
        f"Different labels in {counted(len(mixed), 'group')} of DATA.GROUP {setting}, such as {mixed[0]}: {first} and "
        f"{second}. Where a group is one thing, one of them may be wrong"
    )


def _have_names(splits: Mapping[str, Samples]) -> bool:
    """Say whether the images are files, and few enough to read all names."""
    few = sum(map(len, splits.values())) <= MOST_NAMES
    return few and all(samples.stored == "files" for samples in splits.values())


def _groups_by_name(splits: Mapping[str, Samples], group_pattern: str) -> dict[str, list[str]]:
    """Return, for each split, the part of each image's name that may be the name of its group.

    `group_pattern` matches an image's file name; its first group in brackets is this part. The part is '' if the
    pattern does not match, if the part is the whole match, or if too many images have it to be of one thing.
    """
    pattern = re.compile(f"(?:.*/)?{group_pattern}")
    groups = dict[str, list[str]]()
    labels = list[int]()
    for title, samples in splits.items():
        matches = (pattern.match(samples.name(image)) for image in range(len(samples)))
        # Something must follow the part, such as the number of the image in its series.
        groups[title] = [match[1] if match and match.end(1) < match.end() else "" for match in matches]
        # Images with several labels count as one class.
        labels += samples.labels.tolist() if samples.labels.ndim == 1 else [0] * len(samples)

    # Images of all splits count together. A part that many images have is a camera's, or the name of a class.
    all_groups = list(chain.from_iterable(groups.values()))
    group_sizes = Counter(all_groups)
    class_sizes = Counter(labels)
    sizes_in_class = Counter(zip(all_groups, labels, strict=True))
    too_frequent = {group for group, size in group_sizes.items() if size > MOST_OF_IMAGES * len(all_groups)}
    too_frequent |= {
        group for (group, label), size in sizes_in_class.items() if size > MOST_OF_CLASS * class_sizes[label]
    }
    for title, groups_of_split in groups.items():
        groups[title] = ["" if group in too_frequent else group for group in groups_of_split]
    return groups


class DividedGroups(NamedTuple):
    """Groups that are in more than one split."""

    groups: set[str]
    images: str
    """How many images of each split are in groups that an earlier split has too, as in `3 of 10 validation images`"""
    largest_fraction: float
    """The largest fraction of a split that these images are"""


def _divided_groups(groups: Mapping[str, Sequence[str]]) -> DividedGroups:
    """Find the groups that are in more than one split. `groups`: title of a split -> group of each image, '' for none.

    Only images in later splits than the first one of their group are counted.
    """
    first_split_of = dict[str, str]()
    divided = set[str]()
    counts = list[str]()
    largest_fraction = 0.0
    for title, groups_of_split in groups.items():
        shared = list[str]()
        for group in filter(None, groups_of_split):
            first_split = first_split_of.setdefault(group, title)
            if first_split != title:
                shared.append(group)
        if shared:
            divided.update(shared)
            counts.append(f"{len(shared):,} of {len(groups_of_split):,} {title} images")
            largest_fraction = max(largest_fraction, len(shared) / len(groups_of_split))
    return DividedGroups(divided, ", ".join(counts), largest_fraction)
