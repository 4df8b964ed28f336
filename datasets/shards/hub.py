"""`hf:NAME_OR_PATH`: image data sets of the Hugging Face hub, or a folder of such parquet files.

An image in a parquet file cannot be read without its neighbours. So the images are copied once, unchanged, into tar
files, and read from there.
"""

import contextlib
import glob
import hashlib
import importlib.util
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from datasets.base import HUB_PREFIX
from datasets.shards.index import Folder, TarWriter
from datasets.shards.source import MANIFEST, ShardSet, finish_set, shard_source
from datasets.sources.files import images_below
from datasets.sources.split import SPLIT_NAMES, TEST, TRAIN, named_parts, split_named_in, warn_of_skipped
from utils.cache import cache_folder, process_lock
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log
from vitamp.files import parse_json

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "class")
PARQUET = (".parquet",)
ROWS = 64
"""Rows read at once, which bounds the memory in use, besides a piece of the file."""
LAYOUT = """Expected layout:
  {root}/train-00000-of-00002.parquet, ...         or train/0000.parquet
  {root}/validation-00000-of-00001.parquet, ...    or test-..., or none: then DATA.VAL_FRACTION is split off
each with a column of images ('image': bytes, or a struct with 'bytes') and one of labels ('label')"""


class Columns(NamedTuple):
    """Columns of the images and labels."""

    image: str
    label: str
    classes: list[str] | None
    numbers: dict[str, int] | None
    """Of the classes, if the label column holds names, not numbers"""


def choose_files(root: Path, paths: Iterable[Path], data: DataConfig) -> dict[str, list[Path]]:
    """Those of these parquet files below `root` (which need not exist yet) that each split has.

    All are 'train' if no name says which is which.
    """
    dataset = data.DATASET
    named: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        parts_of_path = path.relative_to(root).parts
        if any(one.startswith(".") for one in parts_of_path):
            continue
        words = map(split_named_in, reversed(parts_of_path))  # of the file, else of its nearest folder
        named[next(filter(None, words), "")].append(path)
    if not named:
        raise UserError(f"DATA.DATASET {dataset}: there is no parquet file in {root}. {LAYOUT.format(root=root)}")
    parts = named_parts([name for name in SPLIT_NAMES if name in named], root, data)
    # A test split that validates too is kept as what it is, so that DATA.PART=test finds it.
    kept = {part: name for part, name in parts.items() if (part, name) != ("val", TEST)}
    splits = {"train" if name == TRAIN else part: named[name] for part, name in kept.items()}
    if not splits:
        splits = {"train": named[""]}
    else:
        warn_of_skipped(str(root), [str(path.relative_to(root)) for path in named.get("", [])])
    for of_split in splits.values():
        _refuse_several(root, of_split, dataset)
    return splits


def _refuse_several(root: Path, files: list[Path], dataset: str) -> None:
    """UserError for several versions of a data set, each in its folder: they must not be mixed."""
    folders = {path.relative_to(root).parts[0] for path in files if path.parent != root}
    if len(folders) > 1 or (folders and any(path.parent == root for path in files)):
        raise UserError(
            f"DATA.DATASET {dataset} holds several data sets: {', '.join(sorted(folders))}. "
            f"Name one of them, as in {dataset}/{min(folders)}."
        )


def columns_of(root: Path, splits: dict[str, list[Path]], dataset: str) -> Columns:
    """Find the columns of the images and labels, by the hub's metadata, else by their names. Splits need both."""
    import pyarrow as pa

    first = next(iter(splits.values()))[0]
    with _opened(first) as parquet:
        schema = parquet.schema_arrow
    features = _features(schema)

    def choose(kind: str, usual: tuple[str, ...]) -> str | None:
        """A column that the hub marks as `kind`, preferably with a usual name; else a column with a usual name."""
        marked = [name for name in schema.names if features.get(name, {}).get("_type") == kind]
        for candidates in (marked, schema.names):
            for name in usual:
                if name in candidates:
                    return name
        return marked[0] if marked else None

    image = choose("Image", IMAGE_COLUMNS)
    label = choose("ClassLabel", LABEL_COLUMNS)
    if image is None or label is None:
        what = "images" if image is None else "labels"
        raise UserError(
            f"DATA.DATASET {dataset}: {first} has no column of {what}; its columns are {', '.join(schema.names)}. "
            f"{LAYOUT.format(root=root)}"
        )
    _leave_out_without(image, label, splits, dataset)
    kind = schema.field(label).type
    if pa.types.is_dictionary(kind):  # pandas' categories
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        names = _names_in(label, splits)
        return Columns(image, label, names, {name: number for number, name in enumerate(names)})
    if not pa.types.is_integer(kind):
        raise UserError(
            f"DATA.DATASET {dataset}: the column {label} of {first} is of type {kind}; labels must be whole numbers "
            "or names. Several labels per image are read from a csv table; see docs/several_labels.md."
        )
    return Columns(image, label, features.get(label, {}).get("names"), None)


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """The hub's metadata of each column; none in other files."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: about for name, about in features.items() if isinstance(about, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _leave_out_without(image: str, label: str, splits: dict[str, list[Path]], dataset: str) -> None:
    """Remove splits without these columns, such as the test split of a competition, which has no labels."""
    first = next(iter(splits.values()))[0]
    for split, files in list(splits.items()):
        for file in files:
            with _opened(file) as parquet:
                missing = {image, label}.difference(parquet.schema_arrow.names)
            if not missing:
                continue
            if split == "train":
                raise UserError(f"DATA.DATASET {dataset}: {file} has no column {min(missing)}, which {first} has.")
            log.warning("%s has no column %s; the split %s is left out.", file, min(missing), split)
            splits.pop(split, None)


def _names_in(label: str, splits: dict[str, list[Path]]) -> list[str]:
    """All names in the column of labels, in order."""
    names = set()
    for file in chain.from_iterable(splits.values()):
        for batch in _batches(file, 1 << 16, [label]):
            names.update(batch.column(label).unique().to_pylist())
    return sorted(names - {None})


def _batches(file: Path, size: int, columns: list[str]) -> Iterator[Any]:
    with _opened(file) as parquet:
        yield from parquet.iter_batches(size, columns=columns)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The file as pyarrow reads it, whose errors become UserErrors that name the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffered in small pieces: a row group can hold a gigabyte of images.
        yield pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{file} cannot be read as a parquet file: {reason}. Fetch it again.") from None


def kind_of(image: bytes) -> str:
    """File extension for an image with these bytes. Decoding looks at the bytes, so a wrong one does no harm."""
    if image.startswith(b"\x89PNG"):
        return "png"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return "jpg"


SHARD_BYTES = 256 << 20
ALL_SHARDS = 1 << 30
"""Shuffle window, in shards: the copy is on a local disk, where random reads are cheap."""
LONGEST_REASON = 300
"""Characters of an error message of the hub that are shown; it can be a page long."""
CONVERTED = "refs/convert/parquet"
"""Revision in which the hub keeps its own conversion of data sets of other formats"""


def _copied(data: DataConfig) -> Path:
    """The folder of the copy, made at the first use."""
    place = data.DATASET.removeprefix(HUB_PREFIX)
    if not place:
        raise UserError("DATA.DATASET 'hf:' lacks a name or a folder, as in hf:ylecun/mnist or hf:/data/mnist.")
    local = is_path(place)
    source = Path(place).expanduser()
    if local and not source.is_dir():
        raise UserError(f"DATA.DATASET {data.DATASET}: there is no folder {place}.")
    # The copy's name changes with the files of a local folder; a data set of the hub is downloaded once.
    identity = [place]
    if local:
        paths = map(source.resolve().joinpath, images_below(str(source), endings=PARQUET))
        files = sorted((str(path), path.stat()) for path in paths)
        identity = [str(source.resolve())]
        identity += [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files]
    digest = hashlib.sha256("\n".join(identity).encode(errors="surrogateescape")).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._]+", "-", place).strip("-.")[-60:]
    folder = cache_folder(data, "hf") / f"{name}-{digest}"
    if (folder / MANIFEST).is_file():
        return folder
    with process_lock(folder.with_name(f"{folder.name}.lock"), f"copies {data.DATASET}"):
        if not (folder / MANIFEST).is_file():
            if importlib.util.find_spec("pyarrow") is None:
                raise UserError(f"DATA.DATASET {data.DATASET} needs pyarrow. Run: pip install pyarrow")
            _copy(source if local else _download(place, data), folder, data)
    return folder


def is_path(place: str) -> bool:
    """Whether the text after `hf:` names a folder of this machine, not a data set of the hub."""
    return place.startswith(("/", ".", "~")) or Path(place).is_dir()


def repository_of(place: str) -> tuple[str, str, str | None]:
    """(owner/name, folder for a subset, revision) of `owner/name/folder@revision`."""
    path, _, revision = place.partition("@")
    owner, _, rest = path.partition("/")
    name, _, inside = rest.partition("/")
    return f"{owner}/{name}", inside, revision or None


def _download(place: str, data: DataConfig) -> Path:
    """Download the parquet files that are needed and return their folder. `place`: see `repository_of`."""
    name, inside, revision = repository_of(place)
    if not data.DOWNLOAD:
        raise UserError(f"DATA.DATASET {data.DATASET} is not on this machine. DATA.DOWNLOAD=true fetches it.")
    from huggingface_hub import snapshot_download

    try:
        sizes = _parquet_files(name, inside, revision)
        if not sizes and revision is None:
            revision = CONVERTED
            sizes = _parquet_files(name, inside, CONVERTED)
        # Before anything is fetched: a data set can have a hundred configurations.
        splits = choose_files(Path(name, inside), [Path(name, file) for file in sizes], data)
        files = [str(file.relative_to(name)) for file in chain.from_iterable(splits.values())]
        size = sum(sizes[file] for file in files) / 1e9
        log.info("Fetching %d parquet files (%.2f GB) of %s from the Hugging Face hub.", len(files), size, place)
        patterns = [glob.escape(file) for file in files]
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns, revision=revision))
    except UserError:
        raise
    except Exception as error:  # the network, the hub and the disk have errors of many types
        reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        raise UserError(
            f"DATA.DATASET {data.DATASET}: {name} could not be fetched from the Hugging Face hub: {reason.rstrip('.')}."
            " Files fetched so far are kept. Try again, or give the folder of its parquet files as hf:/folder."
        ) from None
    again = f"{HUB_PREFIX}{place.partition('@')[0]}@{folder.name}"  # the folder is named by the commit
    log.info("%s is fetched; to get the same files again, name its revision: %s", data.DATASET, again)
    return folder / inside


def _parquet_files(name: str, inside: str, revision: str | None) -> dict[str, int]:
    """Size of each parquet file below a folder of a data set on the hub."""
    from huggingface_hub import HfApi

    tree = HfApi().list_repo_tree(name, recursive=True, repo_type="dataset", revision=revision)
    below = f"{inside}/" if inside else ""
    sizes = {}
    for entry in tree:
        size = getattr(entry, "size", None)
        if size is not None and entry.path.endswith(".parquet") and entry.path.startswith(below):
            sizes[entry.path] = size
    return sizes


def _copy(source: Path, folder: Path, data: DataConfig) -> None:
    """Copy into a temporary folder beside `folder`, and rename it when the copy is complete."""
    splits = choose_files(source, map(source.joinpath, images_below(str(source), endings=PARQUET)), data)
    columns = columns_of(source, splits, data.DATASET)
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # of an interrupted copy
    size = sum(file.stat().st_size for file in chain.from_iterable(splits.values())) / 1e9
    log.info("%s: copying its images to %s, once (%.2f GB).", data.DATASET, folder, size)
    try:
        names = {split: _copy_split(of_split, columns, scratch / split) for split, of_split in splits.items()}
        samples = finish_set(scratch, names, {"classes": columns.classes, "source": data.DATASET})
        os.replace(scratch, folder)
    except OSError as error:
        raise UserError(f"{data.DATASET} cannot be copied to {folder} (DATA.CACHE): {error}.") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log.info("%s: copied %d images; from now on, this copy is read.", data.DATASET, samples)


def _copy_split(files: list[Path], columns: Columns, folder: Path) -> list[str]:
    """Copy the images of a split, and return the names of its tar files, relative to the parent of `folder`.

    A missing image becomes an empty file, which training reports as broken.
    """
    folder.mkdir(parents=True)
    names: list[str] = []
    writer: TarWriter | None = None
    for number, file in enumerate(files):
        row = 0
        for batch in _batches(file, ROWS, [columns.image, columns.label]):
            images = _image_files(batch.column(columns.image), f"{file}, row {row}")
            labels = batch.column(columns.label).to_pylist()
            for image, label in zip(images, labels, strict=True):
                if label is None:
                    raise UserError(f"{file}, row {row}: the column {columns.label} has no label.")
                if writer is None or writer.size >= SHARD_BYTES:
                    if writer is not None:
                        writer.close()
                    names.append(f"{folder.name}/{len(names):05d}.tar")
                    writer = TarWriter(folder.parent / names[-1])
                # Keys begin with the number of the file, because files in different folders can share a name.
                key = f"{number:05d}/{row:08d}"
                content = image or b""
                label_number = columns.numbers[label] if columns.numbers else int(label)
                writer.add(key, kind=kind_of(content), image=content, label=label_number)
                row += 1
    if writer is None:
        raise UserError(f"{files[0]} has no images.")
    writer.close()
    return names


def _image_files(images: Any, where: str) -> list[bytes | None]:
    """Contents of the image files in a column."""
    import pyarrow as pa

    if pa.types.is_struct(images.type) and images.type.get_field_index("bytes") >= 0:
        images = images.flatten()[images.type.get_field_index("bytes")]
    if not (pa.types.is_binary(images.type) or pa.types.is_large_binary(images.type)):
        raise UserError(f"{where}: images are of type {images.type}, not bytes of image files.")
    return images.to_pylist()


SOURCE = shard_source(lambda data: ShardSet(Folder(_copied(data)), data), ALL_SHARDS, fetches=True, reads_path=False)
