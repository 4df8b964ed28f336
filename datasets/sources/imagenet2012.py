"""`imagenet2012`: train_list.txt and val_list.txt beside the images, or ImageNet's class folders."""

from pathlib import Path

from datasets.base import Part, Parts, Source, part_to_make, parts_read
from datasets.labels import ANY_LABEL, check_gaps, log_unused_outputs, warn_empty_classes
from datasets.sources import imagefolder
from datasets.sources.files import FileSamples, check_first_files, data_folder, no_file, read_list, split_files
from datasets.sources.split import SPLIT_NAMES, no_such_part, parts_in_files
from utils.config.data import DataConfig
from utils.errors import UserError

list_name = "{}_list.txt".format
"""File name of the list of a split"""
LAYOUT = """Expected layout:
  {root}/train_list.txt    lines like: train/n01440764/n01440764_10026.JPEG 0
  {root}/val_list.txt      lines like: val/ILSVRC2012_val_00000001.JPEG 65    (or valid_list.txt, ...)
  {root}/train/..., {root}/val/...    the images
or, without list files, class folders:
  {root}/train/<class>/image.JPEG
  {root}/val/<class>/image.JPEG"""


def _samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
    """Open a split from its list file, or from class folders if the data set has no lists."""
    lists = _lists(data)
    if not lists:
        return imagefolder.samples(data, part, num_classes)
    file = _list_file(data, lists, part)
    paths, labels = read_list(file, num_classes)
    files = FileSamples(file.parent, paths, labels, None)  # the classes have no names
    return split_files(files, data, part_to_make(lists, part))


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    """Check the list files that a run reads, and that their first images exist; log classes without images."""
    lists = _lists(data)
    if not lists:
        imagefolder.check(data, num_classes, train)
        return
    classes = 0  # by the largest label in the lists so far; a later list should have images of all of them
    for part in parts_read(data, train, lists):
        file = _list_file(data, lists, part)
        paths, labels = read_list(file, num_classes)
        check_first_files(file, paths, data)
        classes_in_list = int(labels.max()) + 1
        if classes == 0:  # the first list, usually that of training
            log_unused_outputs(classes_in_list, num_classes, f"The list {file}")
        classes = max(classes, classes_in_list)
        warn_empty_classes(labels, range(classes), f"The list {file}")


def _lists(data: DataConfig) -> dict[Part, str]:
    """Map each split to the name of its list file; empty if the data set has only folders. Lists take precedence.

    UserError if it has neither lists nor folders of splits.
    """
    root = data_folder(data)
    lists = parts_in_files(root, data, list_name)
    if not lists and not any((root / name).is_dir() for name in SPLIT_NAMES):
        raise _missing(root / list_name("train"))
    return lists


def _list_file(data: DataConfig, lists: dict[Part, str], part: Part) -> Path:
    """Return the list file that has the images of a split; UserError if it does not exist."""
    root = data_folder(data)
    if part == "test" and part not in lists:
        raise no_such_part(part, root)
    # A split that the program makes is in the list of the images that it divides, which is called `all` here.
    stored_part = "all" if part_to_make(lists, part) else part
    file = root / lists.get(stored_part, list_name(part))
    if not file.is_file():
        raise _missing(file)
    return file


def _missing(file: Path) -> UserError:
    """Make the error for a list file that does not exist."""
    return UserError(f"DATA.DATA_PATH (-data_path): {no_file(file)}. {LAYOUT.format(root=file.parent)}")


def _count(data: DataConfig, train: bool) -> int:
    """Count the classes by the largest label of the first list that is read, or else the class folders."""
    lists = _lists(data)
    if not lists:
        return imagefolder.count(data, train)
    first_part = parts_read(data, train, lists)[0]  # in training, the training split
    file = _list_file(data, lists, first_part)
    paths, labels = read_list(file, ANY_LABEL)
    check_gaps(labels, lambda row: f"{file}: {paths[row]}")
    return int(labels.max()) + 1


def _parts(data: DataConfig) -> Parts:
    """Map each split to its list file, or else to its folder."""
    return _lists(data) or imagefolder.parts(data)


SOURCE = Source(_samples, _check, count=_count, parts=_parts, shares_list=True)
