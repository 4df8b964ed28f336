"""`hf:NAME_OR_PATH`: a data set of the Hugging Face hub, or a folder of such parquet files.

An image in a parquet file cannot be read without its neighbours. So the images are copied once, unchanged, into tar
files in DATA.CACHE, and read from there.
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
"""Rows that are read at once, which bounds the memory in use."""
LAYOUT = """Expected layout:
  {root}/train-00000-of-00002.parquet, ...         or train/0000.parquet
  {root}/validation-00000-of-00001.parquet, ...    or test-..., or none: then DATA.VAL_FRACTION is split off
each with a column of images ('image': bytes, or a struct with 'bytes') and one of labels ('label')"""


class Columns(NamedTuple):
    """The columns of images and labels in the parquet files of a data set."""

    image: str
    """Name of the column of images"""
    label: str
    """Name of the column of labels"""
    classes: list[str] | None
    """Names of the classes, if they are known"""
    numbers: dict[str, int] | None
    """Label of each class by its name, if the column of labels holds names; None if it holds numbers"""


def choose_files(root: Path, paths: Iterable[Path], data: DataConfig) -> dict[str, list[Path]]:
    """Choose the parquet files of each split by the names of files and folders. UserError if there are none.

    If no name is that of a split, all files are `train`. `paths` are below `root`, and need not exist yet.
    """
    dataset = data.DATASET
    # Word for a split in a name, such as "valid" -> files; '' for files that no name assigns to a split.
    files_of: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        path_parts = path.relative_to(root).parts
        if any(name.startswith(".") for name in path_parts):
            continue
        # The name of the file decides, else that of its nearest folder that names a split.
        split_names = map(split_named_in, reversed(path_parts))
        split_name = next(filter(None, split_names), "")
        files_of[split_name].append(path)
    if not files_of:
        raise UserError(f"DATA.DATASET {dataset}: there is no parquet file in {root}. {LAYOUT.format(root=root)}")
    splits = dict[str, list[Path]]()
    names = [name for name in SPLIT_NAMES if name in files_of]
    for part, name in named_parts(names, root, data).items():
        if name == TRAIN:  # also if a part of it is for validation; then `part` is "all"
            splits["train"] = files_of[name]
        elif (part, name) != ("val", TEST):
            # A test split that is used for validation is a part twice, but is copied once: as `test`, so that
            # DATA.PART=test finds it.
            splits[part] = files_of[name]
    if not splits:
        splits = {"train": files_of[""]}
    else:
        warn_of_skipped(str(root), [str(path.relative_to(root)) for path in files_of.get("", [])])
    for files in splits.values():
        _refuse_several(root, files, dataset)
    return splits


def _refuse_several(root: Path, files: list[Path], dataset: str) -> None:
    """Raise UserError if the files of a split are in several folders: several data sets must not be mixed."""
    folders = {path.relative_to(root).parts[0] for path in files if path.parent != root}
    has_files_beside_folders = any(path.parent == root for path in files)
    if len(folders) > 1 or (folders and has_files_beside_folders):
        raise UserError(
            f"DATA.DATASET {dataset} holds several data sets: {', '.join(sorted(folders))}. "
            f"Name one of them, as in {dataset}/{min(folders)}."
        )


def columns_of(root: Path, splits: dict[str, list[Path]], dataset: str) -> Columns:
    """Find the columns of images and labels, by the hub's metadata or else by their names. UserError without them.

    `splits`: the files of each split; splits in which one of the columns is missing are removed from it.
    """
    import pyarrow as pa

    first_file = next(iter(splits.values()))[0]
    with _opened(first_file) as parquet:
        schema = parquet.schema_arrow
    hub_features = _hub_features(schema)

    def choose(hub_type: str, usual_names: tuple[str, ...]) -> str | None:
        """Choose a column of images or of labels; None if there is none.

        The first choice is a column with a usual name that the hub marks with the type, then any column with a usual
        name, then the first one that the hub marks.
        """
        marked = [name for name in schema.names if hub_features.get(name, {}).get("_type") == hub_type]
        marked_with_usual_name = [name for name in usual_names if name in marked]
        with_usual_name = [name for name in usual_names if name in schema.names]
        candidates = marked_with_usual_name + with_usual_name + marked
        return candidates[0] if candidates else None

    image = choose("Image", IMAGE_COLUMNS)
    label = choose("ClassLabel", LABEL_COLUMNS)
    if image is None or label is None:
        content = "images" if image is None else "labels"
        raise UserError(
            f"DATA.DATASET {dataset}: {first_file} has no column of {content}; its columns are "
            f"{', '.join(schema.names)}. {LAYOUT.format(root=root)}"
        )
    _leave_out_splits_without(image, label, splits, dataset)
    label_type = schema.field(label).type
    if pa.types.is_dictionary(label_type):  # pandas' categories
        label_type = label_type.value_type
    if pa.types.is_string(label_type) or pa.types.is_large_string(label_type):
        names = _names_in(label, splits)
        numbers = {name: number for number, name in enumerate(names)}
        return Columns(image, label, classes=names, numbers=numbers)
    if not pa.types.is_integer(label_type):
        raise UserError(
            f"DATA.DATASET {dataset}: the column {label} of {first_file} is of type {label_type}; labels must be "
            "whole numbers or names. Several labels per image are read from a csv table; see docs/several_labels.md."
        )
    return Columns(image, label, classes=hub_features.get(label, {}).get("names"), numbers=None)


def _hub_features(schema: Any) -> dict[str, dict[str, Any]]:
    """Read the hub's metadata of each column from a parquet file's schema; empty if the file has none."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _leave_out_splits_without(image: str, label: str, splits: dict[str, list[Path]], dataset: str) -> None:
    """Remove the splits that lack the column `image` or `label`, with a warning; UserError if it is the training split.

    The test split of a competition, for example, has no labels.
    """
    first_file = next(iter(splits.values()))[0]
    for split, files in list(splits.items()):
        for file in files:
            with _opened(file) as parquet:
                missing = {image, label}.difference(parquet.schema_arrow.names)
            if not missing:
                continue
            if split == "train":
                raise UserError(f"DATA.DATASET {dataset}: {file} has no column {min(missing)}, which {first_file} has.")
            # One warning for each file without the column; the split is removed once.
            log.warning("%s has no column %s; the split %s is left out.", file, min(missing), split)
            splits.pop(split, None)


def _names_in(label: str, splits: dict[str, list[Path]]) -> list[str]:
    """List all names that the column of labels has in any split, sorted."""
    names = set()
    for file in chain.from_iterable(splits.values()):
        for batch in _batches(file, 1 << 16, [label]):
            names.update(batch.column(label).unique().to_pylist())
    return sorted(names - {None})


def _batches(file: Path, size: int, columns: list[str]) -> Iterator[Any]:
    """Yield batches of `size` rows of a parquet file, with these columns."""
    with _opened(file) as parquet:
        yield from parquet.iter_batches(size, columns=columns)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a parquet file, and turn pyarrow's errors in the `with` block into UserErrors that name the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Buffered in small pieces: a row group can hold a gigabyte of images.
        yield pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{file} cannot be read as a parquet file: {reason}. Fetch it again.") from None


def kind_of(image: bytes) -> str:
    """Return a file extension for an image with these bytes. A wrong one does no harm: decoding looks at the bytes."""
    if image.startswith(b"\x89PNG"):
        return "png"
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "webp"
    return "jpg"


SHARD_BYTES = 256 << 20
"""Bytes after which another tar file begins"""
ALL_SHARDS = 1 << 30
"""Shuffle window, in shards: the copy is on a local disk, where random reads are cheap."""
LONGEST_REASON = 300
"""Characters of an error message of the hub that are shown; it can be a page long."""
CONVERTED = "refs/convert/parquet"
"""Revision in which the hub keeps its own conversion of data sets of other formats"""


def _folder_of_copy(data: DataConfig) -> Path:
    """Return the folder in DATA.CACHE with the copy of the data set, which is made at the first use.

    One process makes it, and the others wait. UserError if the data set is missing, or cannot be downloaded or copied.
    """
    place = data.DATASET.removeprefix(HUB_PREFIX)
    if not place:
        raise UserError("DATA.DATASET 'hf:' lacks a name or a folder, as in hf:ylecun/mnist or hf:/data/mnist.")
    is_local = is_path(place)
    source = Path(place).expanduser()
    if is_local and not source.is_dir():
        raise UserError(f"DATA.DATASET {data.DATASET}: there is no folder {place}.")

    # The copy's name changes with the files of a local folder; a data set of the hub is downloaded once.
    identity = [place]
    if is_local:
        relative_paths = images_below(str(source), endings=PARQUET)  # despite its name, of all files with this ending
        paths = map(source.resolve().joinpath, relative_paths)
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
            _copy(source if is_local else _download(place, data), folder, data)
    return folder


def is_path(place: str) -> bool:
    """Tell whether the text after `hf:` names a folder of this machine, not a data set of the hub."""
    return place.startswith(("/", ".", "~")) or Path(place).is_dir()


def repository_of(place: str) -> tuple[str, str, str | None]:
    """Split `owner/name/folder@revision` into (owner/name, folder, revision).

    The folder, which holds a subset, is '' if it is missing, and the revision None.
    """
    path, _, revision = place.partition("@")
    owner, _, name_and_folder = path.partition("/")
    name, _, folder = name_and_folder.partition("/")
    return f"{owner}/{name}", folder, revision or None


def _download(place: str, data: DataConfig) -> Path:
    """Download the parquet files of a data set of the hub, and return their folder. `place`: see `repository_of`.

    Only files of splits are downloaded. UserError if DATA.DOWNLOAD does not allow it, or if it fails.
    """
    name, subset, revision = repository_of(place)
    if not data.DOWNLOAD:
        raise UserError(f"DATA.DATASET {data.DATASET} is not on this machine. DATA.DOWNLOAD=true fetches it.")
    from huggingface_hub import snapshot_download

    try:
        sizes = _parquet_sizes(name, subset, revision)
        if not sizes and revision is None:
            # The hub converts data sets of other formats to parquet files, in a revision of its own.
            revision = CONVERTED
            sizes = _parquet_sizes(name, subset, CONVERTED)
        # Files are chosen before anything is downloaded, because a data set can have a hundred subsets. The name of the
        # data set stands for the folder that does not exist yet.
        splits = choose_files(Path(name, subset), [Path(name, file) for file in sizes], data)
        files = [str(file.relative_to(name)) for file in chain.from_iterable(splits.values())]
        gigabytes = sum(sizes[file] for file in files) / 1e9
        log.info("Fetching %d parquet files (%.2f GB) of %s from the Hugging Face hub.", len(files), gigabytes, place)
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
    commit = folder.name
    same_revision = f"{HUB_PREFIX}{place.partition('@')[0]}@{commit}"
    log.info("%s is fetched; to get the same files again, name its revision: %s", data.DATASET, same_revision)
    return folder / subset


def _parquet_sizes(name: str, subset: str, revision: str | None) -> dict[str, int]:
    """List the parquet files of a data set on the hub, with their sizes. `subset`: the folder to list; '' for all."""
    from huggingface_hub import HfApi

    tree = HfApi().list_repo_tree(name, recursive=True, repo_type="dataset", revision=revision)
    prefix = f"{subset}/" if subset else ""
    sizes = {}
    for entry in tree:
        size = getattr(entry, "size", None)
        if size is not None and entry.path.endswith(".parquet") and entry.path.startswith(prefix):
            sizes[entry.path] = size
    return sizes


def _copy(source: Path, folder: Path, data: DataConfig) -> None:
    """Copy the images of parquet files in `source` into tar files in `folder`.

    They are written to a temporary folder beside it, which is renamed when the copy is complete.
    """
    parquet_files = map(source.joinpath, images_below(str(source), endings=PARQUET))
    splits = choose_files(source, parquet_files, data)
    columns = columns_of(source, splits, data.DATASET)
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # left by an interrupted copy
    gigabytes = sum(file.stat().st_size for file in chain.from_iterable(splits.values())) / 1e9
    log.info("%s: copying its images to %s, once (%.2f GB).", data.DATASET, folder, gigabytes)
    try:
        tar_names = {split: _copy_split(files, columns, scratch / split) for split, files in splits.items()}
        images = finish_set(scratch, tar_names, {"classes": columns.classes, "source": data.DATASET})
        os.replace(scratch, folder)
    except OSError as error:
        raise UserError(f"{data.DATASET} cannot be copied to {folder} (DATA.CACHE): {error}.") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log.info("%s: copied %d images; from now on, this copy is read.", data.DATASET, images)


def _copy_split(files: list[Path], columns: Columns, folder: Path) -> list[str]:
    """Copy the images of a split into tar files in `folder`, and return their names, relative to its parent.

    A missing image becomes an empty file, which training reports as broken. UserError for a missing label.
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
                if writer is not None and writer.size >= SHARD_BYTES:
                    writer.close()
                    writer = None
                if writer is None:  # begin the next tar file
                    tar_name = f"{folder.name}/{len(names):05d}.tar"
                    names.append(tar_name)
                    writer = TarWriter(folder.parent / tar_name)
                # Keys begin with the number of the parquet file: files in different folders can share a name.
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
    """Return the bytes of the image files in a column, which holds bytes or structs with a field `bytes`.

    None is a missing image. UserError, which begins with `where`, if the column holds something else.
    """
    import pyarrow as pa

    contents = images
    if pa.types.is_struct(images.type) and images.type.get_field_index("bytes") >= 0:
        contents = images.flatten()[images.type.get_field_index("bytes")]
    if not (pa.types.is_binary(contents.type) or pa.types.is_large_binary(contents.type)):
        raise UserError(f"{where}: images are of type {contents.type}, not bytes of image files.")
    return contents.to_pylist()


def _open_copy(data: DataConfig) -> ShardSet:
    return ShardSet(Folder(_folder_of_copy(data)), data)


SOURCE = shard_source(_open_copy, ALL_SHARDS, fetches=True, reads_path=False)
