"""`imagefolder`: class folders in `train/` and `val/`, or class folders alone, which are then split."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datasets.base import TITLES, UNSPLIT, Part, Parts, Source, part_to_make, parts_read
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
    """Open a split, with its images in the order of class and path. UserError if it has none."""
    root = data_folder(data)
    folder, classes = _folder_and_classes(root, data, part)
    if folder == root:  # there are no folders of splits
        _refuse_splits_as_classes(root, classes)
    check_class_count(len(classes), num_classes, f"The data set in {root}")
    files = class_files(folder, classes, endings_of(data))
    if len(files) == 0:
        raise _no_images(folder, root)
    return split_files(files, data, part_to_make(parts(data), part))


def _refuse_splits_as_classes(root: Path, classes: list[str]) -> None:
    """Raise UserError if the folders in `root`, taken for classes, are rather data sets, or splits of unusual names."""
    for name in classes:
        splits_inside = _split_folders(root / name)
        if splits_inside:
            raise UserError(
                f"DATA.DATA_PATH (-data_path): {root} seems to be one folder too high: {root / name} has "
                f"class folders in {_as_folders(splits_inside)}. Try -data_path {root / name}."
            )
    # Names that have the beginning of a split's name in them, such as my_training. If all are such names, and have a
    # folder of the same name inside, that one is a class.
    like_splits = [name for name in classes if re.search(r"(?<![a-z])(train|val|test|dev)", name.lower())]
    all_like_splits = len(like_splits) == len(classes)
    if all_like_splits and len(classes) > 1:
        in_all = set.intersection(*(set(subfolders(root / name)) for name in like_splits))
        if in_all:
            problem = f"{' and '.join(classes)} seem to be splits, not classes, because each has a folder {min(in_all)}"
            raise UserError(f"DATA.DATA_PATH (-data_path): {root}: {problem}. Call them train, val and test.")


def check(data: DataConfig, num_classes: int, train: bool) -> None:
    """Raise UserError for missing and empty splits, and log what is unusual about the classes.

    If the splits are folders, this looks at the folders without listing every file.
    """
    root = data_folder(data)
    owner = f"The data set in {root}"
    if _has_splits(root):
        classes: list[str] = []  # the same for all splits: those of the training split
        for part in parts_read(data, train, parts(data)):
            folder, classes = _folder_and_classes(root, data, part)
            check_class_count(len(classes), num_classes, owner)
            # Classes with at least one image, each once, as if these were the labels of all images.
            labels = np.flatnonzero([_has_images(folder / name) for name in classes])
            if len(labels) == 0:
                raise _no_images(folder, root)
            warn_empty_classes(labels, classes, str(folder))
            if part_to_make(parts(data), part):
                samples(data, part, num_classes)  # for its errors: the images may be too few to split
    else:
        classes = subfolders(root)
        files = samples(data, "all", num_classes)
        for name in sorted(set(SPLIT_NAMES).intersection(classes)):
            log.warning("%s is taken for a class, not for a split, because no folder in it has images.", root / name)
        warn_empty_classes(files.labels, classes, str(root))
        # For its errors: the images may be too few to split.
        last_part = parts_read(data, train, UNSPLIT)[-1]
        split_files(files, data, last_part)
    if train and len(classes) == 1:
        raise _one_class(root, classes[0])
    warn_alike_names(classes, owner)
    log_unused_outputs(len(classes), num_classes, owner)


def _one_class(root: Path, name: str) -> UserError:
    """Make the error for a data set of one class. If there are several folders of images inside, it suggests them."""
    # Go down as long as there is a single folder with images. The folder at the end has several ones, or none.
    folder = (root / TRAIN if _has_splits(root) else root) / name
    while len(with_images := [inner for inner in subfolders(folder) if _has_images(folder / inner)]) == 1:
        folder /= with_images[0]
    advice = "name the folder with one folder per class. Without labels, -dataset images reads this one"
    if with_images:
        advice = f"try -data_path {folder}"
    return UserError(
        f"DATA.DATA_PATH (-data_path): {root} has one class, {name}, so there is nothing to learn: {advice}."
    )


def parts(data: DataConfig) -> Parts:
    """Map each split to the name of its folder; `all` if there are only class folders."""
    root = data_folder(data)
    return _names_of_splits(root, data) if _has_splits(root) else UNSPLIT


def count(data: DataConfig, train: bool) -> int:
    """Count the classes: the class folders of the training split if there is one."""
    first_part = parts_read(data, train, parts(data))[0]
    _, classes = _folder_and_classes(data_folder(data), data, first_part)
    return len(classes)


def layout_of(root: Path) -> str | None:
    """Describe the class folders in `root` for a message; None if there are none with images."""
    splits = _split_folders(root)
    if splits:
        return f"class folders in {_as_folders(splits)}"
    if any(_has_images(root / name) for name in subfolders(root)):
        return "class folders without train/ and val/"
    return None


def _as_folders(names: list[str]) -> str:
    return " and ".join(f"{name}/" for name in names)


def class_files(folder: Path, classes: list[str], endings: tuple[str, ...] = ENDINGS) -> FileSamples:
    """List all images in the class folders of `folder`, in the order of class and path, and warn of other files.

    The label of an image is the index of its folder in `classes`.
    """
    skipped = SkippedFiles()
    for entry in sorted(folder.iterdir()):
        if is_hidden(entry.name) and entry.is_dir():
            skipped.add(entry.name, HIDDEN_FOLDER)
        elif entry.name.lower().endswith(endings) and entry.is_file():
            skipped.add(entry.name, "images beside the class folders")
    # `paths` fills these two while `PathTable` reads it.
    counts: list[int] = []
    folders_in_class: dict[str, list[str]] = {}

    def paths() -> Iterator[str]:
        """Yield the paths class by class, so that all paths never exist as Python strings at once."""
        for name in classes:
            paths_in_class = sorted(images_below(str(folder / name), skipped, endings=endings))
            counts.append(len(paths_in_class))
            inner_folders = {path.partition("/")[0] for path in paths_in_class if "/" in path}
            if len(inner_folders) > 1:
                folders_in_class[name] = sorted(inner_folders)
            yield from (f"{name}/{path}" for path in paths_in_class)

    table = PathTable(paths())
    skipped.warn(str(folder))
    if folders_in_class:
        _warn_of_folders(folder, folders_in_class, classes)
    labels = np.repeat(np.arange(len(classes)), counts)
    return FileSamples(folder, table, labels, list(map(one_line, classes)))


def _warn_of_folders(folder: Path, folders_in_class: dict[str, list[str]], classes: list[str]) -> None:
    """Warn that class folders have folders in them, whose images all belong to the class. One class is named."""

    def has_no_other_class(class_name: str) -> bool:
        return set(classes).isdisjoint(folders_in_class[class_name])

    # A class whose folders are called like other classes comes first: it was hardly meant to be one class. For such a
    # class the function returns False, which is less than True.
    name = min(folders_in_class, key=has_no_other_class)
    inner_folders = folders_in_class[name]
    examples = some_of(list(map(one_line, inner_folders)))
    other_classes = ""
    if len(folders_in_class) > 1:
        other_classes = f", like {counted(len(folders_in_class) - 1, 'other class')}"
    question = ""
    if not has_no_other_class(name):
        question = " They are called like other classes: is this meant?"
    warn_once(
        f"{folder}: the class {one_line(name)} takes the images of folders in it ({examples}){other_classes}.{question}"
    )


def subfolders(folder: Path) -> list[str]:
    """List the names of the folders in `folder`, in order, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_folder_entry(entry) and not is_hidden(entry.name))


def _has_splits(root: Path) -> bool:
    """Tell whether folders called train, val and so on are splits.

    They are if one of them has class folders, or if there are no other folders. Otherwise train may be a class.
    """
    names = subfolders(root)
    return bool(_split_folders(root)) or (bool(names) and set(SPLIT_NAMES).issuperset(names))


def _split_folders(root: Path) -> list[str]:
    """List the folders in `root` that have the name of a split, and in them class folders with images."""
    split_names = []
    for name in subfolders(root):
        if name in SPLIT_NAMES and any(_has_images(root / name / inner) for inner in subfolders(root / name)):
            split_names.append(name)
    return split_names


def _names_of_splits(root: Path, data: DataConfig) -> dict[Part, str]:
    """Map each split to the name of its folder in `root`."""
    names = _split_folders(root) or subfolders(root)  # if no folder has images, the error names those that exist
    return named_parts([name for name in SPLIT_NAMES if name in names], root, data)


def _folder_and_classes(root: Path, data: DataConfig, part: Part) -> tuple[Path, list[str]]:
    """Return the folder of a split, and the names of the classes in the order of their labels.

    Without folders of splits, the folder is `root`. The classes are the folders in the training split, or in the split
    itself if there is no training split. UserError if the split is missing, or has a class that the training split
    lacks.
    """
    if not _has_splits(root):
        return root, subfolders(root)
    names = _names_of_splits(root, data)
    # A split that the program makes is in the folder of the images that it divides, which is called `all` here.
    stored_part = "all" if part_to_make(names, part) else part
    if stored_part not in names:
        if part == "test":
            raise no_such_part(part, root)
        expected_names = (TRAIN,) if part == "train" else VALIDATION_NAMES
        raise _no_images(" or ".join(str(root / name) for name in expected_names), root)
    folder = root / names[stored_part]
    train = root / TRAIN
    folder_with_classes = train if train.is_dir() else folder
    classes = subfolders(folder_with_classes)
    if not classes:
        raise _no_images(folder_with_classes, root)
    unknown_classes = set(subfolders(folder)).difference(classes)
    if unknown_classes:
        first = min(unknown_classes)
        title = TITLES["test" if folder.name == TEST else "val"]
        raise UserError(
            f"{folder / first}: the training split {train} has no class of that name.{nearest(first, classes)} Every "
            f"class in the {title} must also be in the training split."
        )
    return folder, classes


def _has_images(folder: Path) -> bool:
    """Tell whether there is an image in a folder, or in one below it."""
    return next(images_below(str(folder), endings=(*ENDINGS, *ARRAYS)), None) is not None


def _no_images(folder: Path | str, root: Path) -> UserError:
    """Make the error for a split without images. `folder`: the folder of the split, or several, joined by 'or'."""
    arrays = f"{' '.join(ARRAYS)} need DATA.BITS or DATA.IMAGE_CHANNELS, docs/bands.md"
    problem = f"there are no images in class folders of {folder} (they end in {' '.join(ENDINGS)}; {arrays})"
    only_train = _split_folders(root) == [TRAIN]
    advice = f"\nTo split {TRAIN}/ by DATA.VAL_FRACTION: -data_path {root / TRAIN}" if only_train else ""
    return UserError(f"DATA.DATA_PATH (-data_path): {problem}. {LAYOUT.format(root=root)}{advice}")


SOURCE = Source(samples, check, count=count, parts=parts, groups=True, shares_list=True)
