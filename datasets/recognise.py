"""Recognises the layout of DATA_PATH, for a run without -dataset."""

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
    """(value for DATA.DATASET, what was recognised) of the data set at `place`; None if `place` does not exist."""
    if "://" in place:
        return "shards", "a URL is read as tar files"
    path = Path(place).expanduser()
    if path.suffix.lower() in TABLES and path.is_file():
        return "csv", "a table"
    if not path.is_dir():
        return None
    found = _layouts(readable_folder(place))
    if not needs_labels and not found.keys() - {"imagefolder"}:
        return "images", UNLABELLED
    if not found:
        raise UserError(
            f"DATA.DATA_PATH (-data_path): the layout of {path} is not recognised. Name the data set with -dataset "
            f"(docs/data.md). {LAYOUTS.format(root=path)}{''.join(_tables(path))}"
        )
    (name, what), *others = found.items()
    more = "".join(f"; it also has {what}, which -dataset {other} reads" for other, what in others)
    return name, f"{path} has {what}{more}"


def offering_layout(error: UserError, data: DataConfig) -> UserError:
    """The error of a data set, with the other layouts that are in DATA_PATH."""
    root = Path(data.DATA_PATH or "").expanduser()
    found = _layouts(root) if data.DATA_PATH and root.is_dir() and os.access(root, os.R_OK | os.X_OK) else {}
    found.pop(data.DATASET, None)
    offers = [f"\n{data.DATA_PATH} has {what}: -dataset {name} reads them." for name, what in found.items()]
    if data.DATASET == "imagefolder":
        offers += _tables(root)
    error.args = (str(error) + "".join(offers),)
    return error


def _tables(root: Path) -> list[str]:
    tables = sorted(one for one in root.glob("*") if one.suffix.lower() in TABLES)
    return [f"\n{root} has the table {one.name}, which -data_path {one} reads." for one in tables]


def _layouts(root: Path) -> dict[str, str]:
    """Value for DATA.DATASET -> what the folder has, in the order of precedence."""
    found = {}
    for dataset, name in (("imagenet2012", imagenet2012.list_name), ("csv", csv_table.table_name)):
        files = [name(split) for split in SPLIT_NAMES if split != TEST and (root / name(split)).is_file()]
        if files:
            found[dataset] = " and ".join(files)
    if any(Folder(root).tars(name) for name in ("", *SPLIT_NAMES)):
        found["shards"] = "tar files"
    folders = layout_of(root)
    if folders:
        found["imagefolder"] = folders
    return found
