"""`imagefolder`: class folders in `train/` and `val/`, or class folders alone, which are then split."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datasets.base import TITLES, UNSPLIT, Part, Parts, Source, part_made, parts_read
from datasets.decoding import ARRAYS, ENDINGS, endings_of
from datasets.labels import check_class_count, log_unused_outputs, warn_alike_names, warn_empty_classes
from datasets.sources.files import (
    HIDDEN_FOLDER,
    FileSamples,
    PathTable,
    SkippedFiles,
    data_folder,
    images_below,
    is_folder_entry,
    is_hidden,
    split_files,
)
from datasets.sources.split import SPLIT_NAMES, TEST, TRAIN, VALIDATION_NAMES, named_parts, no_such_part
from utils.config.data import DataConfig
from utils.errors import UserError, nearest
from utils.log import log, warn_once
from utils.text import counted, one_line, some_of

LAYOUT = """Expected layout:
  {root}/train/<class>/image.jpg
  {root}/val/<class>/image.jpg    (or valid/, validation/, dev/)
  {root}/test/<class>/image.jpg   (if there is one)
or, to be split by DATA.VAL_FRACTION:
  {root}/<class>/image.jpg"""


def samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    """All images of a split, in the order of class and path."""
    root = data_folder(data)
    folder, classes = _split(root, data, part)
    if folder == root:
        for name in classes:
            if splits := _split_folders(root / name):
                raise UserError(
                    f"DATA.DATA_PATH (-data_path): {root} seems to be one folder too high: {root / name} has "
                    f"class folders in {' and '.join(f'{split}/' for split in splits)}. Try -data_path {root / name}."
                )
        splits = [name for name in classes if re.search(r"(?<![a-z])(train|val|test|dev)", name.lower())]
        each = [{*subfolders(root / name)} for name in splits]
        if len(each) == len(classes) > 1 and (same := set.intersection(*each)):
            what = f"{' and '.join(classes)} seem to be splits, not classes, because each has a folder {min(same)}"
            raise UserError(f"DATA.DATA_PATH (-data_path): {root}: {what}. Call them train, val and test.")
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    files = class_files(folder, classes, endings_of(data))
    if not len(files):
        raise _no_images(folder, root)
    return split_files(files, data, part_made(parts(data), part))


def check(data: DataConfig, num_classes: int, train: bool) -> None:
    """Report missing and empty splits from a look at the folders, without listing every file."""
    root = data_folder(data)
    owner = f"The data set in {root}"
    if _has_splits(root):
        classes: list[str] = []
        for part in parts_read(data, train, parts(data)):
            folder, classes = _split(root, data, part)
            check_class_count(len(classes), num_classes, owner)
            with_images = np.flatnonzero([_has_images(folder / name) for name in classes])
            if not len(with_images):
                raise _no_images(folder, root)
            warn_empty_classes(with_images, classes, str(folder))
            if part_made(parts(data), part):
                samples(data, part, num_classes)
    else:
        classes = subfolders(root)
        files = samples(data, "all", num_classes)
        for name in sorted({*SPLIT_NAMES}.intersection(classes)):
            log.warning("%s is taken for a class, not for a split, because no folder in it has images.", root / name)
        warn_empty_classes(files.labels, classes, str(root))
        split_files(files, data, parts_read(data, train, UNSPLIT)[-1])
    if train and len(classes) == 1:
        inner = (root / TRAIN if _has_splits(root) else root) / classes[0]
        while len(below := [name for name in subfolders(inner) if _has_images(inner / name)]) == 1:
            inner /= below[0]
        instead = "name the folder with one folder per class. Without labels, -dataset images reads this one"
        raise UserError(
            f"DATA.DATA_PATH (-data_path): {root} has one class, {classes[0]}, so there is nothing to learn: "
            f"{f'try -data_path {inner}' if below else instead}."
        )
    warn_alike_names(classes, owner)
    log_unused_outputs(len(classes), num_classes, owner)


def parts(data: DataConfig) -> Parts:
    """The splits that are folders."""
    root = data_folder(data)
    return _named(root, data) if _has_splits(root) else UNSPLIT


def count(data: DataConfig, train: bool) -> int:
    """Number of class folders, of the training split if there is one."""
    return len(_split(data_folder(data), data, parts_read(data, train, parts(data))[0])[1])


def layout_of(root: Path) -> str | None:
    """The class folders in `root`, in words; None if there are none with images."""
    if splits := _split_folders(root):
        return f"class folders in {' and '.join(f'{name}/' for name in splits)}"
    if any(_has_images(root / name) for name in subfolders(root)):
        return "class folders without train/ and val/"
    return None


def class_files(folder: Path, classes: list[str], endings: tuple[str, ...] = ENDINGS) -> FileSamples:
    """All images in the class folders, in the order of class and path."""
    skipped = SkippedFiles()
    for entry in sorted(folder.iterdir()):
        if is_hidden(entry.name) and entry.is_dir():
            skipped.add(entry.name, HIDDEN_FOLDER)
        elif entry.name.lower().endswith(endings) and entry.is_file():
            skipped.add(entry.name, "images beside the class folders")
    counts: list[int] = []
    inside: dict[str, list[str]] = {}

    def paths() -> Iterator[str]:  # class by class, so that all paths never exist as Python strings at once
        for name in classes:
            of_class = sorted(images_below(str(folder / name), skipped, endings=endings))
            counts.append(len(of_class))
            folders = {path.partition("/")[0] if "/" in path else "" for path in of_class} - {""}
            if len(folders) > 1:
                inside[name] = sorted(folders)
            yield from (f"{name}/{path}" for path in of_class)

    table = PathTable(paths())
    skipped.warn(str(folder))
    if inside:
        # First one whose folders are called like other classes: these were hardly meant to be one.
        name = min(inside, key=lambda name: set(classes).isdisjoint(inside[name]))
        others = f", like {counted(len(inside) - 1, 'other class')}" if len(inside) > 1 else ""
        same = "" if set(classes).isdisjoint(inside[name]) else " They are called like other classes: is this meant?"
        names = some_of([*map(one_line, inside[name])])
        warn_once(f"{folder}: the class {one_line(name)} takes the images of folders in it ({names}){others}.{same}")
    return FileSamples(folder, table, np.repeat(np.arange(len(classes)), counts), [*map(one_line, classes)])


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in `folder`, in order, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_folder_entry(entry) and not is_hidden(entry.name))


def _has_splits(root: Path) -> bool:
    """Whether folders called train, val and so on are splits. Train can also be a class, beside other class folders."""
    names = subfolders(root)
    return bool(_split_folders(root)) or (bool(names) and {*SPLIT_NAMES}.issuperset(names))


def _split_folders(root: Path) -> list[str]:
    """Folders with the name of a split and class folders that have images."""
    return [
        name
        for name in subfolders(root)
        if name in SPLIT_NAMES and any(_has_images(root / name / inner) for inner in subfolders(root / name))
    ]


def _named(root: Path, data: DataConfig) -> dict[Part, str]:
    names = _split_folders(root) or subfolders(root)  # if no folder has images, the error names those that exist
    return named_parts([name for name in SPLIT_NAMES if name in names], root, data)


def _split(root: Path, data: DataConfig, part: Part) -> tuple[Path, list[str]]:
    """The folder of a split, and the class names in the order of their labels, from the training split if there is one.

    Without splits, the folder is `root`.
    """
    if not _has_splits(root):
        return root, subfolders(root)
    found = _named(root, data)
    stored = "all" if part_made(found, part) else part
    if stored not in found:
        if part == "test":
            raise no_such_part(part, root)
        expected = " or ".join(str(root / name) for name in ((TRAIN,) if part == "train" else VALIDATION_NAMES))
        raise _no_images(expected, root)
    folder = root / found[stored]
    train = root / TRAIN
    classes = subfolders(train if train.is_dir() else folder)
    if not classes:
        raise _no_images(train if train.is_dir() else folder, root)
    if unknown := set(subfolders(folder)).difference(classes):
        first = min(unknown)
        raise UserError(
            f"{folder / first}: the training split {train} has no class of that name.{nearest(first, classes)} Every "
            f"class in the {TITLES['test' if folder.name == TEST else 'val']} must also be in the training split."
        )
    return folder, classes


def _has_images(folder: Path) -> bool:
    return next(images_below(str(folder), endings=(*ENDINGS, *ARRAYS)), None) is not None


def _no_images(folder: Path | str, root: Path) -> UserError:
    arrays = f"{' '.join(ARRAYS)} need DATA.BITS or DATA.IMAGE_CHANNELS, docs/bands.md"
    what = f"there are no images in class folders of {folder} (they end in {' '.join(ENDINGS)}; {arrays})"
    alone = _split_folders(root) == [TRAIN]
    advice = f"\nTo split {TRAIN}/ by DATA.VAL_FRACTION: -data_path {root / TRAIN}" if alone else ""
    return UserError(f"DATA.DATA_PATH (-data_path): {what}. {LAYOUT.format(root=root)}{advice}")


SOURCE = Source(samples, check, count=count, parts=parts, groups=True, shares_list=True)
