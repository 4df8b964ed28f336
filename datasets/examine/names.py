"""What the names and groups of images show: masks beside their images, and series that are in several splits."""

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

# Most of all images, and of those of a class, with one such name, for it to say what they show: not IMG_, no class
OF_IMAGES = 0.05
OF_CLASS = 0.25
TORN = 0.1
"""Least fraction of a split whose names other splits have too, for a note"""
MOST_NAMES = 200_000
"""Most images whose names are read"""


def companions_of(splits: Mapping[str, Samples]) -> str:
    """A sentence, if many images have the name of another one but for its ending, as masks have."""
    if not _have_names(splits):
        return ""
    names = set[str]()  # images of tables may share a file
    for samples in splits.values():
        names.update(samples.name(index) for index in range(len(samples)))
    by_stem = defaultdict[str, list[str]](list)
    for name in sorted(names):
        by_stem[os.path.splitext(name)[0]].append(name)
    pairs = [same for same in by_stem.values() if len(same) > 1]
    number = sum(map(len, pairs))
    if number < TORN * len(names):
        return ""
    first, second, *_ = pairs[0]
    return (
        f"{number:,} of {len(names):,} images have the name of another one but for the ending, such as "
        f"{first} and {second}. If one is the other's mask, list the masks in a file for DATA.EXCLUDE"
    )


def series_of(splits: Mapping[str, Samples], data: DataConfig) -> str:
    """A sentence, if images of one group are in several splits; without DATA.GROUP, of those that names hint at."""
    if data.GROUP is not None:
        return _of_groups(splits, data.GROUP)
    if not _have_names(splits):
        return ""
    for word, (pattern, what) in IN_NAMES.items():
        torn = _in_several(_named_alike(splits, pattern))
        if torn.most >= TORN:
            keeps = "keeps them on one side of the split" if comes_unsplit(data) else "names them; split by them"
            return (
                f"{what}, the names of {torn.images} are also those of images in another split, such as "
                f"{min(torn.groups)}. If such images show one thing, 'DATA.GROUP={word}' {keeps} (docs/splits.md)"
            )
    return ""


def _of_groups(splits: Mapping[str, Samples], setting: str) -> str:
    """A sentence, if groups of DATA.GROUP are in several splits, or each of them is of one image."""
    groups = {title: samples.groups or [] for title, samples in splits.items()}
    number = sum(map(len, splits.values()))
    if len(set(chain.from_iterable(groups.values()))) == number:
        each = f"each of {counted(number, 'image')} is a group of its own, which changes nothing"
        return f"DATA.GROUP {setting}: {each}"
    torn = _in_several(groups)
    if not torn.groups:
        return ""
    return (
        f"DATA.GROUP {setting}: {counted(len(torn.groups), 'group')} in more than one split, such as "
        f"{min(torn.groups)}: {torn.images}. Metrics may be better there than on new groups (docs/splits.md)"
    )


def _have_names(splits: Mapping[str, Samples]) -> bool:
    """Whether the images are files, and not too many to read the names of."""
    return sum(map(len, splits.values())) <= MOST_NAMES and all(one.stored == "files" for one in splits.values())


def _named_alike(splits: Mapping[str, Samples], group: str) -> dict[str, list[str]]:
    """Of each image, by split, what this pattern finds in its name; '' where it says nothing: a whole name, or one
    that many have."""
    pattern = re.compile(f"(?:.*/)?{group}")
    names = dict[str, list[str]]()
    labels = list[int]()
    for title, of in splits.items():
        matches = (pattern.match(of.name(index)) for index in range(len(of)))
        names[title] = [match[1] if match and match.end(1) < match.end() else "" for match in matches]
        labels += of.labels.tolist() if of.labels.ndim == 1 else [0] * len(of)
    everywhere = list(chain.from_iterable(names.values()))
    of_class = Counter(labels)
    of_both = Counter(zip(everywhere, labels, strict=True))
    nothing = {name for name, images in Counter(everywhere).items() if images > OF_IMAGES * len(everywhere)}
    nothing |= {name for (name, label), images in of_both.items() if images > OF_CLASS * of_class[label]}
    for title, of_split in names.items():
        names[title] = ["" if name in nothing else name for name in of_split]
    return names


class Torn(NamedTuple):
    """Groups that several splits have."""

    groups: set[str]
    images: str
    """How many of each later split are of groups that an earlier one has, in words"""
    most: float
    """The largest fraction of them"""


def _in_several(groups: Mapping[str, Sequence[str]]) -> Torn:
    first = dict[str, str]()
    torn = set[str]()
    counts = list[str]()
    most = 0.0
    for title, of_images in groups.items():
        shared = [group for group in of_images if group and first.setdefault(group, title) != title]
        if shared:
            torn.update(shared)
            counts.append(f"{len(shared):,} of {len(of_images):,} {title} images")
            most = max(most, len(shared) / len(of_images))
    return Torn(torn, ", ".join(counts), most)
