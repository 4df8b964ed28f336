"""Findings from the names and groups of images: masks beside their images, and series that are in several splits."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from datasets.base import Samples
from datasets.registry import comes_unsplit
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
    """Return a sentence if many images have the name of another one but for the ending, as masks have; else ''."""
    if not _have_names(splits):
        return ""
    names = set[str]()  # images of tables may share a file
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


def series_of(splits: Mapping[str, Samples], data: DataConfig) -> str:
    """Return a sentence if images of one group are in several splits; else ''.

    The groups are those of DATA.GROUP. Without it, images with similar names are taken for a group.
    """
    if data.GROUP is not None:
        return _sentence_on_groups(splits, data.GROUP)
    if not _have_names(splits):
        return ""
    for word, (pattern, name_part) in IN_NAMES.items():
        divided = _divided_groups(_groups_by_name(splits, pattern))
        if divided.largest_fraction >= NOTED:
            keeps = "keeps them on one side of the split" if comes_unsplit(data) else "names them; split by them"
            return (
                f"{name_part}, the names of {divided.images} are also those of images in another split, such as "
                f"{min(divided.groups)}. If such images show one thing, 'DATA.GROUP={word}' {keeps} (docs/splits.md)"
            )
    return ""


def _sentence_on_groups(splits: Mapping[str, Samples], setting: str) -> str:
    """Return a sentence if groups of DATA.GROUP are in several splits, or if each group is one image; else ''."""
    groups = {title: samples.groups or [] for title, samples in splits.items()}
    number = sum(map(len, splits.values()))
    if len(set(chain.from_iterable(groups.values()))) == number:
        each = f"each of {counted(number, 'image')} is a group of its own, which changes nothing"
        return f"DATA.GROUP {setting}: {each}"
    divided = _divided_groups(groups)
    if not divided.groups:
        return ""
    return (
        f"DATA.GROUP {setting}: {counted(len(divided.groups), 'group')} in more than one split, such as "
        f"{min(divided.groups)}: {divided.images}. Metrics may be better there than on new groups (docs/splits.md)"
    )


def _have_names(splits: Mapping[str, Samples]) -> bool:
    """Say whether the images are files, and few enough to read all names."""
    few = sum(map(len, splits.values())) <= MOST_NAMES
    return few and all(samples.stored == "files" for samples in splits.values())


def _groups_by_name(splits: Mapping[str, Samples], group_pattern: str) -> dict[str, list[str]]:
    """Return, for each split, the part of each image's name that may be the name of its group.

    `group_pattern` matches this part. It is '' where it tells nothing: if it is the whole name, or if many images have
    it.
    """
    pattern = re.compile(f"(?:.*/)?{group_pattern}")
    groups = dict[str, list[str]]()
    labels = list[int]()
    for title, samples in splits.items():
        matches = (pattern.match(samples.name(image)) for image in range(len(samples)))
        groups[title] = [match[1] if match and match.end(1) < match.end() else "" for match in matches]
        labels += samples.labels.tolist() if samples.labels.ndim == 1 else [0] * len(samples)

    # Images of all splits count together.
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
    """Find the groups that are in more than one split. `groups` has the group of each image ('' for none) by split."""
    first_split_of = dict[str, str]()
    divided = set[str]()
    counts = list[str]()
    largest_fraction = 0.0
    for title, groups_of_split in groups.items():
        shared = [group for group in groups_of_split if group and first_split_of.setdefault(group, title) != title]
        if shared:
            divided.update(shared)
            counts.append(f"{len(shared):,} of {len(groups_of_split):,} {title} images")
            largest_fraction = max(largest_fraction, len(shared) / len(groups_of_split))
    return DividedGroups(divided, ", ".join(counts), largest_fraction)
