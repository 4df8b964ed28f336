"""Images in parquet files, as on the Hugging Face hub: a column of images and a column of labels."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datasets.sources.named_splits import SPLIT_NAMES, distinct, named_parts, split_named_in, warn_of_skipped
from utils.errors import UserError
from utils.files import parse_json, require_regular

IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label", "target", "class")
ROWS = 64
"""Rows read at once, which bounds the memory in use, besides a piece of the file."""
TAR_BYTES_PER_IMAGE = 4 * 512
"""Two headers, a label, and the filling up of the image's last block"""
LAYOUT = """Expected layout:
  {root}/train-00000-of-00002.parquet, ...         or train/0000.parquet
  {root}/validation-00000-of-00001.parquet, ...    or test-..., or none: then DATA.VAL_FRACTION is split off
each with a column of images ('image': bytes, or a struct with 'bytes') and one of labels ('label'; with
DATA.MULTI_LABEL=true a list of them)"""


class Row(NamedTuple):
    key: str
    kind: str
    image: bytes
    labels: tuple[int, ...]
    """One; with `Columns.several` any number, ascending"""


def require_pyarrow(what: str) -> None:
    """Raise UserError, beginning with `what`, unless pyarrow is installed, which only parquet files need."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{what} parquet files needs pyarrow, which is not installed. Run: pip install pyarrow")


def find_splits(root: Path, dataset: str) -> dict[str, list[Path]]:
    """Parquet files of each split; all are 'train' if no name says which is which."""
    return choose_files(root, root.rglob("*.parquet"), dataset)


def choose_files(root: Path, paths: Iterable[Path], dataset: str) -> dict[str, list[Path]]:
    """The same of these parquet files below `root`, which need not exist yet."""
    files = sorted(path for path in paths if not _is_hidden(path.relative_to(root)))
    if not files:
        raise UserError(f"DATA.DATASET {dataset}: there is no parquet file in {root}. {LAYOUT.format(root=root)}")
    named: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        named[_split_of(path.relative_to(root))].append(path)
    parts = named_parts([name for name in SPLIT_NAMES if name in named], root)
    splits = {part: named[parts[part]] for part in distinct(parts)}
    if not splits:
        splits = {"train": named[""]}
    else:
        warn_of_skipped(str(root), [str(path.relative_to(root)) for path in named.get("", [])])
    for of_split in splits.values():
        _refuse_several(root, of_split, dataset)
    return splits


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _split_of(path: Path) -> str:
    """Split named by the file, else by its nearest folder; '' for none."""
    return next((name for part in reversed(path.parts) if (name := split_named_in(part))), "")


def _refuse_several(root: Path, files: list[Path], dataset: str) -> None:
    """Raise UserError for several versions of a data set, each in its folder: they must not be mixed."""
    tops = {path.relative_to(root).parts[0] for path in files if len(path.relative_to(root).parts) > 1}
    if len(tops) > 1 or (tops and any(path.parent == root for path in files)):
        first = min(tops)
        raise UserError(
            f"DATA.DATASET {dataset} holds several data sets: {', '.join(sorted(tops))}. "
            f"Name one of them, as in {dataset}/{first}."
        )


@dataclass(frozen=True)
class Columns:
    """Columns of the images and labels."""

    image: str
    label: str
    classes: list[str] | None
    names_are_labels: bool
    """The label column holds names, not numbers."""
    several: bool
    """The label column holds lists."""


def columns_of(root: Path, files: list[Path], dataset: str) -> Columns:
    """Find the columns of the images and labels, by the hub's metadata, else by their names."""
    import pyarrow as pa

    schema = _open(files[0]).schema_arrow
    features = _features(schema.metadata or {})
    image = _choose(schema.names, features, "Image", IMAGE_COLUMNS)
    label = _choose(schema.names, features, "ClassLabel", LABEL_COLUMNS)
    if label is None:
        lists = (name for name in schema.names if _of_items(features.get(name, {})).get("_type") == "ClassLabel")
        label = next(lists, None)
    if image is None or label is None:
        what = "images" if image is None else "labels"
        raise UserError(
            f"DATA.DATASET {dataset}: {files[0]} has no column of {what}; its columns are {', '.join(schema.names)}. "
            f"{LAYOUT.format(root=root)}"
        )
    kind = schema.field(label).type
    several = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if several or pa.types.is_dictionary(kind):  # a dictionary: pandas' categories
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Columns(image, label, _label_names(files, label, several), True, several)
    if not pa.types.is_integer(kind):
        raise UserError(
            f"DATA.DATASET {dataset}: the column {label} of {files[0]} is of type {kind}; labels must "
            "be whole numbers or names, or lists of them."
        )
    return Columns(image, label, _of_items(features.get(label, {})).get("names"), False, several)


def rows(file: Path, number: int, columns: Columns) -> Iterator[Row]:
    """Rows of a file, with unchanged images. A missing image becomes an empty file, which training reports as broken.

    `number`: index of the file in its split. Keys begin with it, because files in different folders can share a name.
    """
    numbers = {name: number for number, name in enumerate(columns.classes or ())}
    row = 0
    for batch in _batches(file, ROWS, [columns.image, columns.label]):
        images = _image_bytes(batch.column(columns.image), f"{file}, row {row}")
        for image, label in zip(images, batch.column(columns.label).to_pylist(), strict=True):
            of_image = label if columns.several else [label]
            if of_image is None or None in of_image:
                raise UserError(f"{file}, row {row}: the column {columns.label} has no label.")
            labels = {numbers[one] if columns.names_are_labels else int(one) for one in of_image}
            yield Row(f"{number:05d}/{row:08d}", kind_of(image or b""), image or b"", tuple(sorted(labels)))
            row += 1


def size_in_tar(file: Path, columns: Columns) -> int:
    """Bytes that the images and labels of a file need in a tar file, at most."""
    about = _open(file).metadata
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    found = [group.column(number) for group in groups for number in range(group.num_columns)]
    images = sum(one.total_uncompressed_size for one in found if one.path_in_schema.split(".")[0] == columns.image)
    return images + about.num_rows * TAR_BYTES_PER_IMAGE


def _open(file: Path) -> Any:
    import pyarrow.parquet as pq

    with _naming(file):
        require_regular(file)
        # Buffered in small pieces: a row group can hold a gigabyte of images.
        return pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)


def _batches(file: Path, size: int, columns: list[str]) -> Iterator[Any]:
    batches = _open(file).iter_batches(size, columns=columns)
    while True:
        with _naming(file):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into UserErrors that name the file."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{file} cannot be read as a parquet file: {reason}. Fetch it again.") from None


def _image_bytes(column: Any, where: str) -> list[bytes | None]:
    import pyarrow as pa

    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.flatten()[column.type.get_field_index("bytes")]
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise UserError(f"{where}: the image column is of type {column.type}; it must hold the bytes of image files.")
    return column.to_pylist()


def _features(metadata: dict[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """The hub's metadata of each column."""
    try:
        features = parse_json(metadata[b"huggingface"])["info"]["features"]
        # The hub's versions write lists as {"feature": ITEM} or as [ITEM].
        found = {name: {"feature": one[0]} if isinstance(one, list) else one for name, one in features.items()}
        return {name: about for name, about in found.items() if isinstance(about, dict)}
    except (KeyError, IndexError, ValueError, TypeError, AttributeError):
        return {}


def _of_items(about: dict[str, Any]) -> dict[str, Any]:
    """What the hub says of a column or, if it holds lists, of their items."""
    item = about.get("feature", about)
    return item if isinstance(item, dict) else {}


def _choose(names: list[str], features: dict[str, dict[str, Any]], kind: str, usual: tuple[str, ...]) -> str | None:
    """A column that the hub marks as `kind`, preferably with a usual name; else a column with a usual name."""
    marked = [name for name in names if features.get(name, {}).get("_type") == kind]
    for candidates in (marked, names):
        for name in usual:
            if name in candidates:
                return name
    return marked[0] if marked else None


def _label_names(files: list[Path], label: str, several: bool) -> list[str]:
    names: set[str] = set()
    for file in files:
        for batch in _batches(file, 1 << 16, [label]):
            column = batch.column(label).flatten() if several else batch.column(label)
            names.update(name for name in column.unique().to_pylist() if name is not None)
    return sorted(names)


def kind_of(image: bytes) -> str:
    """File extension for an image with these bytes. Decoding looks at the bytes, so a wrong one does no harm."""
    if image.startswith(b"\x89PNG"):
        return "png"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return "jpg"
