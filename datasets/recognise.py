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

    None if nothing exists there; UserError if the layout is unknown. `needs_labels=False`: the caller also takes images
    without labels, so a folder that is no other data set is read as such.
    """
    if "://" in place:
        return "shards", "a URL is read as tar files"
    path = Path(place).expanduser()
    if path.suffix.lower() in TABLES and path.is_file():
        return "csv", "a table"
    if not path.is_dir():
        return None
    layouts = _layouts(readable_folder(place))
    # Any folder of images may look like class folders, so without labels this layout does not count.
    other_layouts = layouts.keys() - {"imagefolder"}
    if not needs_labels and not other_layouts:
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
    """Add suggestions to the error of a data set: the other layouts that DATA_PATH has. Returns the same error."""
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
    """Map the layouts of data sets that a folder has to words about its content, in the order of precedence.

    A layout is a value for DATA.DATASET.
    """
    layouts = {}
    for dataset, file_name in (("imagenet2012", imagenet2012.list_name), ("csv", csv_table.table_name)):
        files = []
        for split in SPLIT_NAMES:
            # The list of a test split alone makes no data set.
            if split != TEST and (root / file_name(split)).is_file():
                files.append(file_name(split))
        if files:
            layouts[dataset] = " and ".join(files)
    # Tar files are in the folder itself, or in a subfolder per split.
    if any(Folder(root).tars(subfolder) for subfolder in ("", *SPLIT_NAMES)):
        layouts["shards"] = "tar files"
    class_folders = layout_of(root)
    if class_folders:
        layouts["imagefolder"] = class_folders
    return layouts
