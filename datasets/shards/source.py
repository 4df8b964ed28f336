"""`shards`: a data set in tar files of WebDataset's layout, on disk or at a URL. Images are read in place."""

import ast
import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from datasets.base import (
    TITLES,
    Encoded,
    Part,
    Parts,
    Samples,
    Source,
    Unreadable,
    parts_read,
    shuffled_by_file,
)
from datasets.labels import check_class_count, check_label, log_unused_outputs, warn_empty_classes
from datasets.shards.cache import HASH, ShardCache, tar_folder
from datasets.shards.index import Folder, Remote, ShardFile, ShardIndex, Store, from_bytes, make_index, open_store
from datasets.sources.files import leads_out
from datasets.sources.split import (
    SPLIT_NAMES,
    TRAIN,
    named_parts,
    no_such_part,
    split_named_in,
    split_rows,
    warn_of_skipped,
)
from utils.cache import cache_folder, process_lock
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log, warn_once
from utils.text import one_line
from vitamp.checkpoints import sha256_of
from vitamp.files import parse_json, write_atomically

MANIFEST = "dataset.json"
CLASS_NAMES = "classes.txt"
index_name = "index-{}.npz".format
"""File name of the index of a split"""
MADE_BY = "vitamp"
"""Mark of our manifest: other programs use the same file name."""
LAYOUT = """Expected layout, of tar files with key.jpg and key.cls (or key.json) for each image:
  {root}/train/0000.tar, {root}/val/0000.tar    (or valid/, validation/, dev/)
or {root}/anything-train-0000.tar, {root}/anything-val-0000.tar
or {root}/anything.tar, to be split by DATA.VAL_FRACTION
scripts/pack_images.py makes such files."""


class ShardSet:
    """The splits of a data set in tar files, as its manifest lists them, or else as folders and file names tell."""

    def __init__(self, store: Store, data: DataConfig) -> None:
        """Find the splits: in the manifest, or else by folders and file names.

        Raises UserError if the store cannot be read, or if its manifest is damaged.
        """
        self.store = store
        self.data = data
        self.splits: dict[str, list[ShardFile]]
        """The tar files of each stored split"""
        self.classes: list[str] | None = None
        """Names of the classes, if the manifest or classes.txt has them"""
        self.how: dict[str, Any] = {}
        """How the images were packed, as the manifest says; empty without one"""
        with self.reading():
            manifest = self._read_manifest()
            if manifest:
                self.classes = manifest["classes"]
                self.splits = self._splits_in_manifest(manifest)
                self.how = manifest["how"]
                return
            content = store.read_file(CLASS_NAMES)
            if content is not None:
                lines = content.decode("utf-8-sig", errors="replace").rstrip().splitlines()
                self.classes = [line.strip() for line in lines]
            self.splits = self._find_splits()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn an OSError of the store into a UserError, in a `with` block that reads it."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.store.root} cannot be read: {error}.") from None

    def split(self, part: Part) -> tuple[str, bool]:
        """Return the name of the stored split to read for `part`, and whether this stored split must be divided.

        It must be if the data set has no validation split: then `train` and `val` are both made of the same stored
        split. UserError if there is no stored split for `part`.
        """
        # Stored splits that can be the validation split. Without `val`, the test split is used, as in some data sets of
        # the hub, unless DATA.KEEP_TEST keeps it and there is a training split to divide.
        for_validation = ["val"]
        if not self.data.KEEP_TEST or "train" not in self.splits:
            for_validation.append("test")
        candidates = ["train", "all"]
        if part == "val":
            candidates = for_validation + candidates
        elif part == "test":
            candidates = ["test"]
        for name in candidates:
            if name in self.splits:
                lacks_validation = self.splits.keys().isdisjoint(for_validation)
                is_divided = name == "all" or (name == "train" and lacks_validation)
                return name, is_divided
        if part == "test" and self.splits:
            raise no_such_part(part, self.store.root)
        missing = "no tar file for training" if self.splits else "no tar file"
        root = self.store.root
        raise UserError(f"DATA.DATA_PATH (-data_path): there is {missing} in {root}. {LAYOUT.format(root=root)}")

    def parts(self) -> Parts:
        """Map each split that the data set has to its tar files; see `Source.parts`."""
        validation, is_divided = self.split("val")
        names: dict[Part, str] = {"train": "train", "val": validation, "test": "test"}
        if is_divided:
            names = {"all": validation, "test": "test"}
        return {part: self.splits[name] for part, name in names.items() if name in self.splits}

    def index(self, split: str) -> ShardIndex:
        """Return the index of a split: the one beside the tar files, or in the cache, or a new one from all headers.

        A line about the members of its tar files that are no samples is logged, once per process.
        """
        with self.reading():
            if isinstance(self.store, Remote):
                # Try a range of one byte. A server that ignores ranges would send a whole tar file for each image.
                self.store.range((self.splits[split][0].name, 0, 1))
            index = self._index_beside_tars(split)
        if not index:
            index = self._index_in_cache(split)  # which makes one, if there is none
        if index.skipped:
            warn_once(f"{self.store.root}, split {split}: {index.skipped}")
        return index

    def _index_in_cache(self, split: str) -> ShardIndex:
        """Return the index in the cache if it is current; else make a new one from all headers, and save it.

        One process makes it, and the others wait.
        """
        shards = self.splits[split]
        root = self.store.root
        folder = cache_folder(self.data, "shards")
        cache_file = folder / f"{hashlib.sha256(root.encode()).hexdigest()[:16]}-{split}.npz"
        with process_lock(cache_file.with_suffix(".lock"), f"makes the index of {root}"):
            content = cache_file.read_bytes() if cache_file.is_file() else None
            # The process that had the lock before may have saved an index beside the tar files, so look there first.
            index = self._index_beside_tars(split) or self._load_if_current(content, shards)
            if not index:
                gigabytes = sum(file.size for file in shards) / 1e9
                log.info("Reading the headers of %d tar files (%.1f GB) in %s.", len(shards), gigabytes, root)
                index = make_index(self.store, shards)
                if len(index) == 0:
                    skipped = f"; {index.skipped}" if index.skipped else "."
                    raise UserError(f"{root}: the tar files of the split '{split}' have no images{skipped}")
                self._save(index, split, cache_file)
        return index

    def _index_beside_tars(self, split: str) -> ShardIndex | None:
        """Return the index beside the tar files; None if there is none, or if it is not current.

        In a remote store, times are not compared, since uploading changes them.
        """
        shards = self.splits[split]
        if self.store.remote:
            shards = [file._replace(stamp="") for file in shards]  # an empty stamp is not compared
        return self._load_if_current(self.store.read_file(index_name(split)), shards)

    def _load_if_current(self, content: bytes | None, shards: list[ShardFile]) -> ShardIndex | None:
        """Load an index from the content of its file; None without one, or if it is not of these tar files."""
        index = from_bytes(content) if content is not None else None
        return index if index is not None and index.is_current(shards) else None

    def _save(self, index: ShardIndex, split: str, cache_file: Path) -> None:
        """Save the index beside the tar files if possible, else in the cache. If neither works, log a warning."""
        files = [cache_file]
        if not self.store.remote:
            files.insert(0, Path(self.store.root, index_name(split)))
        failure: OSError | None = None
        for file in files:
            try:
                write_atomically(file, index.to_bytes())
            except OSError as error:
                failure = error
            else:
                log.info("Saved the index of %d images as %s.", len(index), file)
                return
        log.warning("The index of %s cannot be saved, so each start makes it again: %s", self.store.root, failure)

    def _read_manifest(self) -> dict[str, Any] | None:
        """Read the manifest that scripts/pack_images.py wrote; None if there is none, or if another program wrote it.

        Raises UserError if it is damaged, or names a file outside the data set.
        """
        content = self.store.read_file(MANIFEST)
        try:
            manifest = parse_json(content) if content is not None else None
            if not isinstance(manifest, dict) or manifest.get("made_by") != MADE_BY:
                return None
            manifest["how"] = {**manifest.get("how", {})}  # raises TypeError unless it is a mapping
            shards = []
            for part in manifest["parts"].values():
                shards += part["shards"]
            invalid = any(shard["bytes"] < 0 or leads_out(shard["name"]) for shard in shards)
            if invalid or not isinstance(manifest["classes"], list | None):
                raise ValueError("invalid sizes, names or classes")
            if "label_sets" in manifest:
                raise ValueError("version 0.3 reads several labels per image from csv tables alone")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.store.root}/{MANIFEST} cannot be read: {type(error).__name__}: {error}.") from None
        return manifest

    def _splits_in_manifest(self, manifest: dict[str, Any]) -> dict[str, list[ShardFile]]:
        """Return the tar files of each split as the manifest lists them. UserError if one is missing."""
        splits = {}
        for split, entry in manifest["parts"].items():
            files = []
            for shard in entry["shards"]:
                stamp = f"{HASH}{shard['sha256']}" if "sha256" in shard else ""
                files.append(ShardFile(shard["name"], shard["bytes"], stamp))
            self._check_sizes(split, files)
            splits[split] = files
        return splits

    def _check_sizes(self, split: str, files: list[ShardFile]) -> None:
        """Raise UserError unless each of a split's files in the manifest exists and has the size that it lists.

        Otherwise a missing file would go unnoticed.
        """
        actual_sizes: dict[str, int] = {}
        # Many web servers do not list their files, so an error or an empty list of a remote store is no reason to stop.
        # If the store is down, reading the first tar file fails.
        with contextlib.suppress(OSError) if self.store.remote else contextlib.nullcontext():
            actual_sizes = {file.name: file.size for file in self.store.tars(split)}
        if self.store.remote and not actual_sizes:
            return
        for file in files:
            if actual_sizes.get(file.name) != file.size:
                problem = f"has {actual_sizes[file.name]:,} bytes" if file.name in actual_sizes else "is missing"
                raise UserError(
                    f"{self.store.root}/{file.name} {problem}; {MANIFEST} lists it with {file.size:,} bytes. "
                    f"Copy or pack it again; of a data set hf:NAME, remove {self.store.root}."
                )

    def _find_splits(self) -> dict[str, list[ShardFile]]:
        """Find the tar files of each split by their folders, or else by their names, in a data set without a manifest.

        If no folder or name is that of a split, all files are `all`; empty without tar files.
        """
        # Name of a split, such as "valid" -> the tar files in the folder of this name.
        files_of: dict[str, list[ShardFile]] = {name: self.store.tars(name) for name in SPLIT_NAMES}
        in_no_split: list[ShardFile] = []
        if not any(files_of.values()):
            for file in self.store.tars():
                split = split_named_in(file.name)
                files = files_of[split] if split else in_no_split
                files.append(file)
        elif not self.store.remote:  # a server may list the folders of the splits and refuse to list the one above
            in_no_split = self.store.tars()
        parts = named_parts([name for name, files in files_of.items() if files], self.store.root, self.data)
        if not parts:
            return {"all": in_no_split} if in_no_split else {}
        warn_of_skipped(self.store.root, [file.name for file in in_no_split])
        # The files named `train` are the stored split `train`, also if they have to be divided; then `part` is "all".
        return {"train" if name == TRAIN else part: files_of[name] for part, name in parts.items()}


def finish_set(folder: Path, splits: dict[str, list[str]], about: dict[str, Any]) -> int:
    """Complete a new set of tar files by writing their indexes and the manifest. Returns the number of images.

    The manifest is written last, so it marks the set as complete. `splits`: names of the tar files of each split.
    `about`: further fields of the manifest, such as the names of the classes.
    """
    store = Folder(folder)
    entries = {}
    for split, names in splits.items():
        # Without stamps, which are times of changes: the manifest identifies these files by their hashes, also after
        # they are copied elsewhere.
        files = [ShardFile(name, os.path.getsize(folder / name), stamp="") for name in names]
        index = make_index(store, files)
        counts = np.bincount(index.shard, minlength=len(files)).tolist()
        shards = [
            {"name": file.name, "bytes": file.size, "samples": count, "sha256": sha256_of(folder / file.name)}
            for file, count in zip(files, counts, strict=True)
        ]
        entries[split] = {"samples": len(index), "shards": shards}
        write_atomically(folder / index_name(split), index.to_bytes())
    manifest = {"made_by": MADE_BY, "format": 1, **about, "parts": entries}
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return sum(entry["samples"] for entry in entries.values())


CHECKED = 256 << 20
"""Bytes of tar files of each split whose hash is checked before training, so that it does not begin on wrong ones."""
WINDOW = 8
"""Tar files whose samples are shuffled together, unless all of them are on a local disk that we filled."""


class ShardSamples(Samples):
    """One split of a data set in tar files. Its samples are rows of the split's index.

    Images of a remote store are requested by ranges of bytes, or read from tar files in the cache (`cache`).
    """

    def __init__(self, shards: ShardSet, split: str, index: ShardIndex, window: int, rows: np.ndarray) -> None:
        """Make the samples of a split from the index of the stored split.

        `split`: name of the stored split. `rows`: rows of `index` that are the samples, ascending. `window`: number of
        tar files whose samples are shuffled together.
        """
        self.store = shards.store
        self.files = shards.splits[split]
        self.classes = shards.classes
        self.window = window
        self.index = index
        self.rows = rows
        self.labels = index.label[rows]
        # The first sample of each tar file, and the end: the numbers of the samples' tar files ascend.
        self.file_begins = np.searchsorted(index.shard[rows], np.arange(len(index.files) + 1))
        # Whether each row of the index is an .npy file, by the last letter of its name: only .npy ends in y among the
        # extensions of images, and one letter is faster to look up than the name. `names` has the bytes of all names.
        last_letters = index.names[index.name_ends - 1]
        self._is_array = np.isin(last_letters, np.frombuffer(b"yY", dtype=np.uint8))
        self._is_array &= shards.data.is_plain  # bands are read by vitamp/bands.py, whatever their file
        self.stored = "pixels" if self._is_array.all() else "tar files"
        self.remote = self.store.remote
        self.cache: ShardCache | None = None
        if isinstance(self.store, Remote) and shards.data.CACHE_GB:
            folder = tar_folder(shards.data)
            self.cache = ShardCache(self.store, self.files, folder, shards.data.CACHE_GB * 1e9)
        self._prefetched: dict[int, list[np.ndarray]] = {}
        """Row -> contents of its image that were requested ahead, one for each time that the image will be read"""

    def read(self, index: int) -> Encoded:
        """Return the stored image: prefetched, or from the cache, or else from the store.

        Raises Unreadable if the tar file ends before the image does, and OSError if the store fails.
        """
        row = int(self.rows[index])
        byte_range = self._range(row)
        name, offset, size = byte_range
        content = None
        prefetched = self._prefetched.get(row)
        if prefetched:
            content = prefetched.pop()
        elif self.cache:
            content = self.cache.range(int(self.index.shard[row]), offset, size)
        if content is None:
            content = self.store.range(byte_range)
        if len(content) < size:
            where = f"before byte {offset + size}, where the image ends"
            raise Unreadable(f"{self.store.root}/{name} was cut off while in use: it ends {where}")
        return pixels_of(content) if self._is_array[row] else content.tobytes()

    def name(self, index: int) -> str:
        row = int(self.rows[index])
        return one_line(f"{self.store.root}/{self.index.files[self.index.shard[row]].name}/{self.index.name(row)}")

    def size(self, index: int) -> int:
        return int(self.index.size[self.rows[index]])

    def stamp(self, index: int) -> str:
        file = self.files[self.index.shard[self.rows[index]]]
        return f"{file.size} {file.stamp}"

    def names(self) -> Iterator[bytes]:
        """Yield bytes that depend on the names of all samples and their order, to be hashed; see `Samples.names`.

        They are those of the tar files' names, and of columns of the index: faster than making a text for each name.
        """
        index = self.index
        rows = self.rows
        name_lengths = np.diff(index.name_ends, prepend=0)
        is_sample = np.zeros(len(index), dtype=bool)
        is_sample[rows] = True
        yield "\0".join(file.name for file in index.files).encode(errors="surrogateescape")
        for column in (index.shard, index.size, name_lengths):
            yield column[rows].astype(np.int64).tobytes()
        # `names` has the bytes of all names one after the other; these are the names of the samples, in their order.
        yield index.names[np.repeat(is_sample, name_lengths)].tobytes()

    def prefetch(self, indices: Sequence[int]) -> None:
        """Request the images of a batch from a remote store all at once, without those whose tar file is in the cache.

        If a request fails, the image is requested again when it is read, which then raises the error.
        """
        if not isinstance(self.store, Remote):
            return
        times_of_row = Counter(self.rows[indices].tolist())  # DATA.REPEATED_AUGMENT reads some several times
        cached_files: set[int] = set()
        if self.cache:
            numbers = np.unique(self.index.shard[list(times_of_row)]).tolist()
            cached_files = set(filter(self.cache.has, numbers))
        # Range of bytes of an image -> its row.
        row_of = {self._range(row): row for row in times_of_row if self.index.shard[row] not in cached_files}
        contents = self.store.ranges(list(row_of))
        self._prefetched = {}
        for byte_range, content in contents.items():
            row = row_of[byte_range]
            self._prefetched[row] = list(itertools.repeat(content, times_of_row[row]))

    def look_ahead(self) -> float | None:
        """Log whether tar files are downloaded whole, and return how far ahead, as a fraction of an epoch.

        None: they are not downloaded, so `announce` need not be called.
        """
        if not isinstance(self.store, Remote):
            return None
        reason = self._why_in_parts()
        if reason:
            warn_once(f"{self.store.root}: images are requested by ranges of tar files: {reason}.", logging.INFO)
            return None
        warn_once(f"{self.store.root}: whole tar files are downloaded ahead into {self.cache}.", logging.INFO)
        # Ahead by one window of files: while one is read, the next is downloaded.
        return min(1.0, self.window / self._files_of_machine())

    def _files_of_machine(self) -> int:
        """Return how many tar files a machine reads in an epoch: all, or with DATA.SAMPLER by_machine those it shares.

        Then the first and the last of its files can be shared with other machines.
        """
        files = len(self.index.files)
        return min(files, files // self.machines + 2) if self.by_machine else files

    def _why_in_parts(self) -> str:
        """Return the reason why parts of tar files are requested, not whole files; '' if whole files are downloaded."""
        if self.cache is None:
            return "DATA.CACHE_GB is 0"
        sizes = sorted((file.size for file in self.index.files), reverse=True)  # in bytes, largest first
        # Room for the window in use, the next one, and one for processes that are behind. With less, processes would
        # remove each other's files.
        number = min(3 * self.window, self._files_of_machine())
        needed = sum(sizes[:number])
        room = self.cache.room()
        if needed > room:
            return f"{number} of them have {needed / 1e9:.3g} GB, and there is room for {room / 1e9:.3g}"
        # The fraction of a file's images that a machine reads. Each file is read by one machine with DATA.SAMPLER
        # by_machine, else by all machines, each reading a part of its samples.
        machines_per_file = 1 if self.by_machine else self.machines
        fraction_read = len(self.rows) / len(self.index) / machines_per_file
        if sum(sizes) > room and fraction_read < 1 / 2:
            percent = 100 * fraction_read
            return f"a machine reads {percent:.0f} % of them in an epoch, and there is no room to keep them all"
        return ""

    def check_hashes(self) -> None:
        """Download the first CHECKED bytes of tar files and check their hashes, if there is a cache for whole files.

        Raises UserError if a hash is wrong.
        """
        if self.cache is None or self._why_in_parts():
            return
        bytes_checked = 0
        for number, file in enumerate(self.index.files):
            bytes_checked += file.size
            is_first = number == 0  # which is checked whatever its size
            if bytes_checked > CHECKED and not is_first:
                return
            self.cache.check(number)

    def announce(self, indices: Sequence[int]) -> None:
        """Have the tar files of these samples downloaded into the cache."""
        if self.cache:
            files = self.index.shard[self.rows[indices]].tolist()
            self.cache.announce(list(dict.fromkeys(files)), 2 * self.window)

    def shuffled(self, generator: np.random.Generator) -> np.ndarray:
        files = list(itertools.pairwise(self.file_begins.tolist()))
        return shuffled_by_file(files, self.window, generator)

    def _range(self, row: int) -> tuple[str, int, int]:
        """Return where an image is: name of the tar file, first byte, number of bytes."""
        index = self.index
        return index.files[index.shard[row]].name, int(index.offset[row]), int(index.size[row])


def pixels_of(content: np.ndarray) -> np.ndarray:
    """Return the pixels of an .npy file as an array of height x width x channels; Unreadable if it has none.

    numpy would spend as much time on the header as on the pixels. Here, headers that were read before are cached.
    """
    # The format begins with 6 bytes of magic, 2 of the version and 2 with the length of the rest of the header.
    header_size = int.from_bytes(content[8:10].tobytes(), "little") + 10
    shape = _npy_shape(content[:header_size].tobytes())
    pixels = content[header_size:]
    if pixels.size != shape[0] * shape[1] * shape[2]:
        raise Unreadable(f"an array of shape {shape} cannot have {pixels.size} bytes")
    return pixels.reshape(shape)


@lru_cache(maxsize=1024)
def _npy_shape(header: bytes) -> tuple[int, int, int]:
    """Read height, width and channels from an .npy header, without running code in it.

    Raises Unreadable for a header that does not describe pixels. `header` begins with 6 bytes of magic, 2 of the
    version, and 2 with the length of the rest.
    """
    try:
        if header[:8] != b"\x93NUMPY\x01\x00":
            raise ValueError
        fields = ast.literal_eval(header[10:].decode("latin-1").strip())
        shape = tuple(fields["shape"])
        dtype = fields["descr"]
        columns_first = fields["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError):
        raise Unreadable("not an .npy file of version 1.0") from None
    if len(shape) == 2:
        shape += (1,)
    if dtype != "|u1" or columns_first or len(shape) != 3 or min(shape) < 1 or shape[2] not in (1, 3):
        raise Unreadable(
            f"an array of {dtype} with shape {shape}; pixels must be uint8, height x width x 1 or 3, in C order"
        )
    return shape


def open_split(shards: ShardSet, data: DataConfig, part: Part, num_classes: int, window: int) -> ShardSamples:
    """Open a split of a data set in tar files. UserError for a label outside the classes.

    `window`: number of tar files whose samples are shuffled together.
    """
    name, is_divided = shards.split(part)
    index = shards.index(name)
    rows_outside = np.flatnonzero((index.label < 0) | (index.label >= num_classes))
    if len(rows_outside) > 0:
        row = int(rows_outside[0])
        where = f"{shards.store.root}/{index.files[index.shard[row]].name}: {index.name(row)}"
        check_label(int(index.label[row]), num_classes, one_line(where))  # raises, unless num_classes is ANY_LABEL
    if is_divided:  # training and validation are made of one stored split
        rows = split_rows(index.label, data, part, shards.store.root)
    else:
        rows = np.arange(len(index))
    return ShardSamples(shards, name, index, window, rows)


def shard_source(
    open_set: Callable[[DataConfig], ShardSet],
    window: int | None = None,
    fetches: bool = False,
    reads_path: bool = True,
) -> Source:
    """Make the source of a kind of data sets in tar files: its functions that open splits and check them.

    `open_set` finds the tar files of a data set. `window`: number of tar files whose samples are shuffled together;
    None means WINDOW. `fetches`: the data set can be downloaded. `reads_path`: it is in DATA.DATA_PATH.
    """

    def samples(data: DataConfig, part: Part, num_classes: int) -> ShardSamples:
        return open_split(open_set(data), data, part, num_classes, window or WINDOW)

    def check(data: DataConfig, num_classes: int, train: bool) -> None:
        """Make the indexes of the splits that a run reads, check their labels, and log classes without images."""
        shards = open_set(data)
        owner = f"data set in {shards.store.root}"
        if shards.classes is not None:
            check_class_count(len(shards.classes), num_classes, f"The {owner}")
        parts_to_check = parts_read(data, train, shards.parts())
        # Nothing is shuffled here, so the window does not matter.
        splits = [open_split(shards, data, part, num_classes, window=1) for part in parts_to_check]
        with shards.reading():
            for split in splits:
                split.check_hashes()
        classes = shards.classes if shards.classes is not None else range(int(splits[0].labels.max()) + 1)
        log_unused_outputs(len(classes), num_classes, f"The {owner}")
        for part, split in zip(parts_to_check, splits, strict=True):
            largest = split.labels.max(initial=-1)
            if shards.classes is not None and largest >= len(classes):
                raise UserError(f"The {owner} has the label {largest}, but {CLASS_NAMES} ends with {len(classes) - 1}.")
            _, is_divided = shards.split(part)
            # A validation split that is made here lacks classes of few images, of which `split_rows` warns.
            is_made_validation = is_divided and part != "train"
            if not is_made_validation:
                warn_empty_classes(split.labels, classes, f"The {TITLES[part]} of the {owner}")

    def parts(data: DataConfig) -> Parts:
        return open_set(data).parts()

    return Source(samples, check, parts=parts, fetches=fetches, reads_path=reads_path, shares_list=True)


SOURCE = shard_source(lambda data: ShardSet(open_store(data.DATA_PATH), data))
