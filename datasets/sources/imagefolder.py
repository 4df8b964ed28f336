"""`imagefolder`: class folders in `train/` and `val/`, or class folders alone, which are then split."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datasets.base import TITLES, UNSPLIT, Part, Parts, Source, part_made, parts_read
from datasets.decoding import ENDINGS, endings_of
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
from vitamp.files import ARRAYS

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
        _refuse_splits_as_classes(root, classes)
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    files = class_files(folder, classes, endings_of(data))
    if not len(files):
        raise _no_images(folder, root)
    return split_files(files, data, part_made(parts(data), part))


def _refuse_splits_as_classes(root: Path, classes: list[str]) -> None:
    """UserError if the classes in `root` are data sets, or splits of other names."""
    for name in classes:
        splits = _split_folders(root / name)
        if splits:
            raise UserError(
                f"DATA.DATA_PATH (-data_path): {root} seems to be one folder too high: {root / name} has "
                f"class folders in {_as_folders(splits)}. Try -data_path {root / name}."
            )
    splits = [name for name in classes if re.search(r"(?<![a-z])(train|val|test|dev)", name.lower())]
    if len(splits) == len(classes) > 1:
        same = set.intersection(*(set(subfolders(root / name)) for name in splits))
        if same:
            what = f"{' and '.join(classes)} seem to be splits, not classes, because each has a folder {min(same)}"
            raise UserError(f"DATA.DATA_PATH (-data_path): {root}: {what}. Call them train, val and test.")


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
        for name in sorted(set(SPLIT_NAMES).intersection(classes)):
            log.warning("%s is taken for a class, not for a split, because no folder in it has images.", root / name)
        warn_empty_classes(files.labels, classes, str(root))
        split_files(files, data, parts_read(data, train, UNSPLIT)[-1])
    if train and len(classes) == 1:
        raise _one_class(root, classes[0])
    warn_alike_names(classes, owner)
    log_unused_outputs(len(classes), num_classes, owner)


def _one_class(root: Path, name: str) -> UserError:
    inner = (root / TRAIN if _has_splits(root) else root) / name
    while len(below := [name for name in subfolders(inner) if _has_images(inner / name)]) == 1:
        inner /= below[0]
    advice = "name the folder with one folder per class. Without labels, -dataset images reads this one"
    if below:
        advice = f"try -data_path {inner}"
    return UserError(
        f"DATA.DATA_PATH (-data_path): {root} has one class, {name}, so there is nothing to learn: {advice}."
    )


def parts(data: DataConfig) -> Parts:
    """The splits that are folders."""
    root = data_folder(data)
    return _named(root, data) if _has_splits(root) else UNSPLIT


def count(data: DataConfig, train: bool) -> int:
    """Number of class folders, of the training split if there is one."""
    return len(_split(data_folder(data), data, parts_read(data, train, parts(data))[0])[1])


def layout_of(root: Path) -> str | None:
    """The class folders in `root`, in words; None if there are none with images."""
    splits = _split_folders(root)
    if splits:
        return f"class folders in {_as_folders(splits)}"
    if any(_has_images(root / name) for name in subfolders(root)):
        return "class folders without train/ and val/"
    return None


def _as_folders(names: list[str]) -> str:
    return " and ".join(f"{name}/" for name in names)


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
            folders = {path.partition("/")[0] for path in of_class if "/" in path}
            if len(folders) > 1:
                inside[name] = sorted(folders)
            yield from (f"{name}/{path}" for path in of_class)

    table = PathTable(paths())
    skipped.warn(str(folder))
    if inside:
        _warn_of_folders(folder, inside, classes)
    return FileSamples(folder, table, np.repeat(np.arange(len(classes)), counts), list(map(one_line, classes)))


def _warn_of_folders(folder: Path, inside: dict[str, list[str]], classes: list[str]) -> None:
    """Warn of the folders in class folders, whose images are taken."""
    # First one whose folders are called like other classes: these were hardly meant to be one.
    name = min(inside, key=lambda name: set(classes).isdisjoint(inside[name]))
    names = some_of(list(map(one_line, inside[name])))
    others = f", like {counted(len(inside) - 1, 'other class')}" if len(inside) > 1 else ""
    same = "" if set(classes).isdisjoint(inside[name]) else " They are called like other classes: is this meant?"
    warn_once(f"{folder}: the class {one_line(name)} takes the images of folders in it ({names}){others}.{same}")


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in `folder`, in order, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_folder_entry(entry) and not is_hidden(entry.name))


def _has_splits(root: Path) -> bool:
    """Whether folders called train, val and so on are splits. Train can also be a class, beside other class folders."""
    names = subfolders(root)
    return bool(_split_folders(root)) or (bool(names) and set(SPLIT_NAMES).issuperset(names))


def _split_folders(root: Path) -> list[str]:
    """Folders with the name of a split and class folders that have images."""
    found = []
    for name in subfolders(root):
        if name in SPLIT_NAMES and any(_has_images(root / name / inner) for inner in subfolders(root / name)):
            found.append(name)
    return found


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
        names = (TRAIN,) if part == "train" else VALIDATION_NAMES
        raise _no_images(" or ".join(str(root / name) for name in names), root)
    folder = root / found[stored]
    train = root / TRAIN
    named = train if train.is_dir() else folder
    classes = subfolders(named)
    if not classes:
        raise _no_images(named, root)
    unknown = set(subfolders(folder)).difference(classes)
    if unknown:
        first = min(unknown)
        title = TITLES["test" if folder.name == TEST else "val"]
        raise UserError(
            f"{folder / first}: the training split {train} has no class of that name.{nearest(first, classes)} Every "
            f"class in the {title} must also be in the training split."
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
