"""Recognise the layout of DATA_PATH, for a run without -dataset, and suggest other layouts in errors."""

import os
from pathlib import Path

from datasets.shards.index import Folder
from datasets.sources import csv_table, imagenet2012
from datasets.sources.files import readable_folder
from datasets.sources.imagefolder import layout_of
from datasets.sources.split import SPLIT_NAMES, TEST
from utils.config.data import DataConfig
from utils.errors import UserError

LAYOUTS = """Expected layout, one of:
  {root}/train_list.txt, {root}/val_list.txt        lists of images (imagenet2012)
  {root}/train.csv, {root}/val.csv                  tables of images (csv)
  {root}/train/0000.tar, {root}/val/0000.tar        tar files (shards)
  {root}/train/<class>/1.jpg, {root}/val/<class>/2.jpg    class folders (imagefolder)
  {root}/<class>/1.jpg                              class folders, to be split (imagefolder)"""

TABLES = ".csv", ".tsv"
UNLABELLED = "all images below the folder are used, without labels"


def recognise(place: str, needs_labels: bool = True) -> tuple[str, str] | None:
    """Recognise the data set at a path or URL. Return its value for DATA.DATASET, and words about what was recognised.

    None if nothing exists there; UserError if the layout is unknown. `needs_labels=False`: images without labels will
    do, too.
    """
    if "://" in place:
        return "shards", "a URL is read as tar files"
    path = Path(place).expanduser()
    if path.suffix.lower() in TABLES and path.is_file():
        return "csv", "a table"
    if not path.is_dir():
        return None
    layouts = _layouts(readable_folder(place))
    if not needs_labels and not layouts.keys() - {"imagefolder"}:
        return "images", UNLABELLED
    if not layouts:
        raise UserError(
            f"DATA.DATA_PATH (-data_path): the layout of {path} is not recognised. Name the data set with -dataset "
            f"(docs/data.md). {LAYOUTS.format(root=path)}{''.join(_table_suggestions(path))}"
        )
    (dataset, content), *others = layouts.items()
    also = "".join(f"; it also has {content}, which -dataset {other} reads" for other, content in others)
    return dataset, f"{path} has {content}{also}"


def offering_layout(error: UserError, data: DataConfig) -> UserError:
    """Add to the error of a data set which other layouts DATA_PATH has, and return it."""
    root = Path(data.DATA_PATH or "").expanduser()
    layouts: dict[str, str] = {}
    if data.DATA_PATH and root.is_dir() and os.access(root, os.R_OK | os.X_OK):
        layouts = _layouts(root)
    layouts.pop(data.DATASET, None)
    suggestions = [
        f"\n{data.DATA_PATH} has {content}: -dataset {dataset} reads them." for dataset, content in layouts.items()
    ]
    if data.DATASET == "imagefolder":
        suggestions += _table_suggestions(root)
    error.args = (str(error) + "".join(suggestions),)
    return error


def _table_suggestions(root: Path) -> list[str]:
    """List lines of an error that suggest the tables in a folder."""
    tables = sorted(file for file in root.glob("*") if file.suffix.lower() in TABLES)
    return [f"\n{root} has the table {table.name}, which -data_path {table} reads." for table in tables]


def _layouts(root: Path) -> dict[str, str]:
    """Find the layouts of data sets in a folder, in the order of precedence.

    Each is a value for DATA.DATASET, with words about what the folder has.
    """
    layouts = {}
    for dataset, file_name in (("imagenet2012", imagenet2012.list_name), ("csv", csv_table.table_name)):
        files = []
        for split in SPLIT_NAMES:
            if split != TEST and (root / file_name(split)).is_file():
                files.append(file_name(split))
        if files:
            layouts[dataset] = " and ".join(files)
    if any(Folder(root).tars(name) for name in ("", *SPLIT_NAMES)):
        layouts["shards"] = "tar files"
    class_folders = layout_of(root)
    if class_folders:
        layouts["imagefolder"] = class_folders
    return layouts
