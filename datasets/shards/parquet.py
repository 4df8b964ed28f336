"""Images in parquet files, as the Hugging Face hub keeps them: a column of images, a column of labels."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import UserError
from utils.files import require_regular

VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")
"""What hub data sets call their validation part; the first that is there is taken."""
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label", "target", "class")
ROWS = 64
"""Read at once: all that is ever held in memory, beside a piece of the file."""
LAYOUT = """Expected layout:
  {root}/train-00000-of-00002.parquet, ...         or train/0000.parquet
  {root}/validation-00000-of-00001.parquet, ...    or test-..., or none: DATA.VAL_FRACTION is taken
each with a column of images ('image': bytes, or a struct with 'bytes') and one of labels ('label')"""


class Row(NamedTuple):
    key: str
    kind: str
    image: bytes
    label: int


def need_pyarrow(who: str) -> None:
    """Parquet files are read by a package that nothing else needs."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"DATA.DATASET {who} reads parquet files, for which pyarrow is missing. Run: pip install pyarrow"
        )


def find_parts(root: Path, who: str) -> dict[str, list[Path]]:
    """The parquet files of the training and the validation part, 'train' alone where nothing tells them apart."""
    files = sorted(path for path in root.rglob("*.parquet") if not path.name.startswith("."))
    if not files:
        raise UserError(f"DATA.DATASET {who}: there is no parquet file in {root}. {LAYOUT.format(root=root)}")
    named: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        named[_part_of(path.relative_to(root))].append(path)
    if not any(name in named for name in ("train", *VALIDATION_NAMES)):
        named = {"train": named[""]}
    parts = {"train": named.get("train", [])}
    parts["val"] = next((named[name] for name in VALIDATION_NAMES if named.get(name)), [])
    for of_part in parts.values():
        _refuse_several(root, of_part, who)
    return {name: of_part for name, of_part in parts.items() if of_part}


def _part_of(path: Path) -> str:
    """The word of the file's name, else of its nearest folder, that names a part."""
    for word in reversed(path.parts):
        found = re.search(rf"(?<![a-z])(train|{'|'.join(VALIDATION_NAMES)})(?![a-z])", word.lower())
        if found:
            return found[1]
    return ""


def _refuse_several(root: Path, files: list[Path], who: str) -> None:
    """A hub data set may come in several versions, each in a folder. Together they would be nonsense."""
    tops = {path.relative_to(root).parts[0] for path in files if len(path.relative_to(root).parts) > 1}
    if len(tops) > 1 or (tops and any(path.parent == root for path in files)):
        first = min(tops)
        raise UserError(
            f"DATA.DATASET {who} holds several data sets: {', '.join(sorted(tops))}. "
            f"Name one of them, as in {who}/{first}."
        )


@dataclass(frozen=True)
class Columns:
    """Which columns hold what."""

    image: str
    label: str
    classes: list[str] | None
    names_are_labels: bool
    """The label column holds names, not numbers."""


def columns_of(files: list[Path], who: str) -> Columns:
    """The columns of image and label, by what the hub's own notes say, else by their names."""
    import pyarrow as pa

    schema = _open(files[0]).schema_arrow
    features = _features(schema.metadata or {})
    image = _choose(schema.names, features, "Image", IMAGE_COLUMNS)
    label = _choose(schema.names, features, "ClassLabel", LABEL_COLUMNS)
    if image is None or label is None:
        what = "images" if image is None else "labels"
        raise UserError(
            f"DATA.DATASET {who}: {files[0]} has no column of {what}; its columns are {', '.join(schema.names)}. "
            f"{LAYOUT.format(root=files[0].parent)}"
        )
    kind = schema.field(label).type
    if pa.types.is_dictionary(kind):  # pandas' categories
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Columns(image, label, _label_names(files, label), names_are_labels=True)
    if not pa.types.is_integer(kind):
        raise UserError(f"DATA.DATASET {who}: the column {label} of {files[0]} is {kind}; labels are numbers or names.")
    return Columns(image, label, features.get(label, {}).get("names"), names_are_labels=False)


def rows(file: Path, number: int, columns: Columns) -> Iterator[Row]:
    """The images of a file, unchanged. One that is missing is empty, so that training can name it.

    `number`: that of the file in its part. Keys begin with it, as files in several folders may have the same name.
    """
    numbers = {name: number for number, name in enumerate(columns.classes or ())}
    row = 0
    for batch in _batches(file, ROWS, [columns.image, columns.label]):
        images = _image_bytes(batch.column(columns.image), f"{file}, row {row}")
        for image, label in zip(images, batch.column(columns.label).to_pylist(), strict=True):
            if label is None:
                raise UserError(f"{file}, row {row}: the label in the column {columns.label} is missing.")
            as_number = numbers[label] if columns.names_are_labels else int(label)
            yield Row(f"{number:05d}/{row:08d}", kind_of(image or b""), image or b"", as_number)
            row += 1


def _open(file: Path) -> Any:
    import pyarrow.parquet as pq

    with _named(file):
        require_regular(file)
        # In small pieces: a row group may hold a gigabyte of images.
        return pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)


def _batches(file: Path, size: int, columns: list[str]) -> Iterator[Any]:
    found = _open(file).iter_batches(size, columns=columns)
    while True:
        with _named(file):
            batch = next(found, None)
        if batch is None:
            return
        yield batch


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Put the file's name to what pyarrow says of it."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file} is no parquet file that can be read: {reason} Fetch it again.") from None


def _image_bytes(column: Any, where: str) -> list[bytes | None]:
    import pyarrow as pa

    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.flatten()[column.type.get_field_index("bytes")]
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise UserError(f"{where}: the column of images is {column.type}; it must hold their bytes.")
    return column.to_pylist()


def _features(metadata: dict[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """The hub's notes on each column."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: about for name, about in features.items() if isinstance(about, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _choose(names: list[str], features: dict[str, dict[str, Any]], kind: str, usual: tuple[str, ...]) -> str | None:
    noted = [name for name in names if features.get(name, {}).get("_type") == kind]
    for candidates in (noted, names):
        for name in usual:
            if name in candidates:
                return name
    return noted[0] if noted else None


def _label_names(files: list[Path], label: str) -> list[str]:
    found: set[str] = set()
    for file in files:
        for batch in _batches(file, 1 << 16, [label]):
            found.update(name for name in batch.column(label).unique().to_pylist() if name is not None)
    return sorted(found)


def kind_of(image: bytes) -> str:
    """The usual ending of a file with these bytes. What reads it looks at the bytes again."""
    if image.startswith(b"\x89PNG"):
        return "png"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return "jpg"
