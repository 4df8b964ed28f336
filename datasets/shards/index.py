"""Tar files in WebDataset's layout, `key.jpg` beside `key.cls` or `key.json`, and the index of a set of them.

They are in a local folder, or at a URL that fsspec supports, such as s3://bucket/imagenet. Nothing is ever extracted:
the position of each sample is read from the headers once and kept in a file.
"""

import contextlib
import io
import os
import random
import tarfile
import time
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from datasets.base import remark
from datasets.decoding import ENDINGS
from datasets.sources.files import SkippedFiles, leads_out, readable_folder
from utils.errors import UserError
from utils.text import is_redacted
from vitamp.files import only_regular, parse_json, read_regular

MOST_OPEN = 64
"""Files that a process keeps open: the shards of a window are read alternately, and opening one per image is slow."""

STAMPS = ("ETag", "etag", "LastModified", "mtime", "created")
"""Entries of a listing that change when the file is rewritten, by protocol"""

PAUSES = 0.1, 0.3, 1.0, 3.0, 10.0, 20.0
"""Seconds before a request to a store that failed is repeated"""
LONGEST_PAUSE = 60.0
"""Of those that a store asks for (Retry-After)"""
SILENCE = 30.0
"""Seconds without a byte from a web server, after which a request has failed; aiohttp's own limit is 5 minutes."""
BLOCK = 8 << 20
"""Most bytes of a request"""
LARGEST_READ = 32 << 20
"""Most bytes that reading the headers of a tar file requests at once: a member's name or label, and what follows"""
GAP = 32 << 10
"""Ranges of a file that are so near each other are one request: these bytes cost less than another one."""

Value = TypeVar("Value")
Range = tuple[str, int, int]
"""(file, first byte, number of bytes)"""


class ShardFile(NamedTuple):
    """A tar file in a store."""

    name: str
    """Relative to the store's root, with /"""
    size: int
    stamp: str
    """Changes when the file is rewritten; '' if the store does not record it"""


class Folder:
    """Files below a local folder."""

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._files: OrderedDict[str, BinaryIO] = OrderedDict()

    def tars(self, folder: str = "") -> list[ShardFile]:
        """Tar files in `folder`, in the order of their names; none if the folder does not exist."""
        files = [file for file in Path(self.root, folder).glob("*.tar") if file.is_file()]
        stats = [(file.name, file.stat()) for file in files if not file.name.startswith(".")]
        prefix = f"{folder}/" if folder else ""
        return sorted(ShardFile(prefix + name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats)

    def read_file(self, name: str) -> bytes | None:
        """Content of a small file; None if it does not exist. Raises OSError."""
        try:
            return read_regular(os.path.join(self.root, name))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        return open(os.path.join(self.root, name), "rb", opener=only_regular)

    def range(self, wanted: Range) -> np.ndarray:
        """Bytes of a range, fewer if the file ends early. Raises OSError."""
        name, offset, size = wanted
        content = np.empty(size, dtype=np.uint8)
        length = 0
        try:
            if name not in self._files:
                if len(self._files) >= MOST_OPEN:
                    self._files.popitem(last=False)[1].close()
                self._files[name] = self.open(name)
            self._files.move_to_end(name)
            handle = self._files[name].fileno()
            while length < size and (got := os.preadv(handle, [content[length:].data], offset + length)):
                length += got
        finally:
            # When a file system is mounted again, old handles stay invalid; a complete file may replace a short one.
            if length < size and name in self._files:
                with contextlib.suppress(OSError):
                    self._files.pop(name).close()
        return content[:length]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}


class Remote:
    """Files below a URL, read with fsspec."""

    remote = True

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._place()

    def _place(self, name: str = "") -> tuple[Any, str]:
        """The file system, of which fsspec keeps one in each process, and a path in it."""
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        try:
            if self.root.startswith(("http:", "https:")):  # other stores' packages have limits of their own
                from datasets.shards.web import session_options

                options["client_kwargs"] = session_options(SILENCE)
            files, root = fsspec.core.url_to_fs(self.root, **options)
        except (ImportError, ValueError) as error:  # each protocol needs its own package
            raise UserError(f"DATA.DATA_PATH (-data_path): {self.root} cannot be opened: {error}") from None
        return files, f"{root.rstrip('/')}/{name}" if name else root.rstrip("/")

    def tars(self, folder: str = "") -> list[ShardFile]:
        files, place = self._place(folder)
        try:
            entries = self._patiently(lambda: files.ls(place, detail=True))
        except FileNotFoundError:
            return []
        shards = []
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if not name.endswith(".tar") or name.startswith("."):
                continue
            size = entry["size"] if entry.get("size") is not None else files.size(entry["name"])
            stamp = next((str(entry[key]) for key in STAMPS if entry.get(key)), "")
            shards.append(ShardFile(f"{folder}/{name}" if folder else name, int(size or 0), stamp))
        return sorted(shards)

    def read_file(self, name: str) -> bytes | None:
        files, place = self._place(name)
        try:
            return self._patiently(lambda: files.cat_file(place))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        files, place = self._place(name)
        opened = self._patiently(lambda: files.open(place, "rb"))
        cache = getattr(opened, "cache", None)  # fsspec's, which reads the file in blocks
        if cache is not None:
            fetch = cache.fetcher

            def fetch_all(begin: int, end: int) -> bytes:
                if end - begin > LARGEST_READ:
                    raise OSError(f"a header has {end - begin:,} bytes")
                return self._patiently(lambda: _whole(fetch(begin, end), min(end, cache.size) - begin))

            cache.fetcher = fetch_all
        return opened

    def range(self, wanted: Range) -> np.ndarray:
        """Bytes of a range. Raises OSError."""
        contents: dict[Range, np.ndarray] = {}
        self._patiently(lambda: self._request([wanted], contents))
        return contents[wanted]

    def ranges(self, wanted: Sequence[Range]) -> dict[Range, np.ndarray]:
        """Many ranges at once, without those whose requests keep failing."""
        requests = _joined(wanted)
        contents = dict[Range, np.ndarray]()
        with contextlib.suppress(OSError):
            self._patiently(lambda: self._request(list(requests), contents), len(PAUSES))
        found = {}
        for whole, content in contents.items():
            for part in requests[whole]:
                begin = part[1] - whole[1]
                found[part] = content[begin:][: part[2]]
        return found

    def _request(self, wanted: Sequence[Range], contents: dict[Range, np.ndarray]) -> None:
        """Add the ranges that `contents` lacks. OSError if one fails."""
        missing = [one for one in wanted if one not in contents]
        if not missing:
            return
        files, root = self._place()
        names = [f"{root}/{name}" for name, _, _ in missing]
        begins = [begin for _, begin, _ in missing]
        ends = [begin + size for _, begin, size in missing]
        answers = files.cat_ranges(names, begins, ends, on_error="return")
        failures: list[Exception] = []
        for one, answer in zip(missing, answers, strict=True):
            try:
                contents[one] = np.frombuffer(bytearray(_whole(answer, one[2])), np.uint8)  # writable, for torch
            except Exception as error:
                failures.append(error)
        if failures:  # one that may pass, if any
            raise min(failures, key=lambda error: _as_os_error(error)[1] is None)

    def _patiently(self, request: Callable[[], Value], repeats: int = 4) -> Value:
        """Repeat a request that fails, after PAUSES or what the store asks for. Raises OSError."""
        left = iter(PAUSES[:repeats])
        while True:
            try:
                return request()
            except Exception as failure:
                error, asked = _as_os_error(failure)
            pause = next(left, None)
            if pause is None or asked is None:
                raise error from None
            cause = str(error).partition(": ")[0] or type(error).__name__
            remark(f"{self.root} fails at times: {cause}. Such requests are repeated.")
            # By chance up to twice as long, so that not all processes return at once; `random` itself is seeded.
            time.sleep(max(pause, min(asked, LONGEST_PAUSE)) * (1 + random.SystemRandom().random()))


Store = Folder | Remote


def open_store(place: str | None) -> Store:
    """Open DATA_PATH, a folder or a URL."""
    if place is None:
        raise UserError("DATA.DATASET shards needs DATA.DATA_PATH (-data_path): the folder or URL of its tar files.")
    if is_redacted(place):
        raise UserError(f"DATA.DATA_PATH: {place} is without its password. Give the whole URL: -data_path.")
    if "://" in place:
        return Remote(place)
    return Folder(readable_folder(place))


def _as_os_error(error: Exception) -> tuple[OSError, float | None]:
    """The error, and the seconds that the store asks to wait; None if the same request will fail again."""
    if isinstance(error, TimeoutError) and not str(error):  # fsspec's has no words
        return TimeoutError("it does not answer"), 0.0
    if isinstance(error, OSError):
        return error, None if isinstance(error, FileNotFoundError | PermissionError) else 0.0
    if getattr(error, "lasting", False):
        return OSError(str(error)), None
    status = getattr(error, "status", 0)
    text = f"it answers {status} ({getattr(error, 'message', '')})" if status else f"{type(error).__name__}: {error}"
    asked = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
    if 400 <= status < 500 and status not in (408, 425, 429):
        return OSError(text), None
    return OSError(text), float(asked) if asked.isdecimal() else 0.0


def _whole(answer: bytes | Exception, size: int) -> bytes:
    """The answer to the request for so many bytes, if it is one."""
    if isinstance(answer, Exception):
        raise answer
    if len(answer) > size:
        raise OSError(
            "the server ignores requests for a part of a file (Range) and sends more. Use a server that supports them, "
            "or copy the files to a disk"
        )
    if len(answer) < size:
        raise OSError("it sends fewer bytes than were requested")
    return answer


def _joined(wanted: Sequence[Range]) -> dict[Range, list[Range]]:
    """Requests, each with the ranges in it: of those that are near each other in a file, one."""
    groups: list[list[Range]] = []
    for name, begin, size in sorted(wanted):
        if groups:
            _, first, _ = groups[-1][0]
            last, offset, length = groups[-1][-1]
            if name == last and begin - (offset + length) <= GAP and begin + size - first <= BLOCK:
                groups[-1].append((name, begin, size))
                continue
        groups.append([(name, begin, size)])
    requests = {}
    for group in groups:
        name, first, _ = group[0]
        _, offset, length = group[-1]
        requests[name, first, offset + length - first] = group
    return requests


IMAGE_KINDS = (*(ending.removeprefix(".") for ending in ENDINGS), "npy")
ARRAY_KINDS = ("npz", "dcm")
"""Of a sample without an image of IMAGE_KINDS"""
LABEL_KINDS = ("cls", "json")
SAMPLE_KINDS = (*IMAGE_KINDS, *LABEL_KINDS)
LARGEST_LABEL = 1 << 20
"""Most bytes of a label member."""
LARGEST_NUMBER = 1 << 31
UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""What tarfile raises; the last three for absurd extended headers."""
MOST_ZEROS = 1 << 20
"""Most zero bytes at the end of a tar file, usually 10 KiB or less. More mean a copy with space but no content."""


class Place(NamedTuple):
    """A member of a tar file."""

    name: str
    offset: int
    size: int


def read_tar(file: BinaryIO, size: int, where: str, skipped: SkippedFiles) -> list[tuple[str, int, int, int]]:
    """Name, offset, size and label of each image in the tar file `where`, `size` bytes long, by its headers.

    UserErrors name the offset of the damage.
    """
    images: dict[str, Place] = {}
    arrays: dict[str, Place] = {}
    labels: dict[str, int] = {}
    for member in _members(file, size, where):
        # 'a/b.c.jpg' is 'c.jpg' of 'a/b': as in WebDataset, the extension begins at the first dot.
        folder, slash, file_name = member.name.rpartition("/")
        stem, _, kind = file_name.partition(".")
        key = folder + slash + stem
        kind = kind.lower()
        if not member.isreg() or member.issparse():
            if kind in SAMPLE_KINDS:
                skipped.add(member.name, "links and other members that are not files")
        elif kind in IMAGE_KINDS:
            if key in images:
                raise UserError(f"{where}: {member.name} and {images[key].name} are two images of one sample.")
            images[key] = Place(member.name, member.offset_data, member.size)
        elif kind in ARRAY_KINDS and key not in images:
            arrays[key] = Place(member.name, member.offset_data, member.size)
        elif kind not in LABEL_KINDS:
            dotted = kind.rpartition(".")[2] in SAMPLE_KINDS
            skipped.add(member.name, "more than one dot in the name" if dotted else None)
        elif kind == "cls" or key not in labels:
            label = _label(file, member, where)
            if label is not None:
                labels[key] = label
    for key, array in arrays.items():
        if key in labels:
            images.setdefault(key, array)
    return _labelled(images, labels, where)


def _labelled(images: dict[str, Place], labels: dict[str, int], where: str) -> list[tuple[str, int, int, int]]:
    samples = []
    for key, (name, offset, size) in images.items():
        if key not in labels:
            raise UserError(f"{where}: {name} has no label: there is no {key}.cls beside it, nor any in {key}.json.")
        samples.append((name, offset, size, labels[key]))
    return samples


def _members(file: BinaryIO, size: int, where: str) -> Iterator[tarfile.TarInfo]:
    try:
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the file is the caller's
    except UNREADABLE as error:
        raise UserError(f"{where} cannot be read as a tar file: {error}. Decompress it (gunzip).") from None
    # Not tar.next(): it keeps every member in memory, and takes a cut between two members, or damage, for the end.
    tar.offset = 0
    while True:
        begin = tar.offset
        file.seek(begin)
        block = file.read(tarfile.BLOCKSIZE)
        if block == bytes(tarfile.BLOCKSIZE):
            if size - begin > MOST_ZEROS or any(file.read(MOST_ZEROS)):
                raise _damaged(where, size, begin, "zeros in place of a member")
            return
        try:
            file.seek(begin)
            member = tarfile.TarInfo.fromtarfile(tar)
        except UNREADABLE:
            raise _damaged(where, size, begin, "the header of a member") from None
        if member.size < 0 or tar.offset <= begin:  # else the same members would be read again and again
            raise _damaged(where, size, begin, "the header of a member")
        if member.offset_data + member.size > size:
            raise _damaged(where, size, begin, member.name)
        if leads_out(member.name):
            raise UserError(f"{where}: the member {member.name!r} leads out of the tar file; do not trust it.")
        yield member


def _damaged(where: str, size: int, offset: int, what: str) -> UserError:
    return UserError(
        f"{where} is damaged or cut off: it has {size:,} bytes, and the data at byte {offset:,} ({what}) is not "
        f"complete. Copy or pack this file again."
    )


def _label(file: BinaryIO, member: tarfile.TarInfo, where: str) -> int | None:
    """Label in a member; None for a JSON file without a label."""
    file.seek(member.offset_data)
    text = file.read(min(member.size, LARGEST_LABEL))
    try:
        label = text.decode().strip()
        if member.name.lower().endswith(".json"):
            value = parse_json(label)
            if not isinstance(value, dict) or "label" not in value:
                return None
            label = str(value["label"])
        if not label.removeprefix("-").isdecimal():
            raise ValueError(f"{label[:40]!r} is not a whole number; the names of the classes are lines of classes.txt")
    except ValueError as error:
        raise UserError(f"{where}: {member.name} has no valid label: {error}.") from None
    number = int(label[:100])  # Python refuses to convert thousands of digits
    if abs(number) > LARGEST_NUMBER:
        raise UserError(f"{where}: {member.name} has the label {label:.40}, which is too large for a class.")
    return number


class TarWriter:
    """Writes samples to a tar file; the same samples give the same bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tar = tarfile.open(path, "w:", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - see close

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._tar.offset

    def add(self, key: str, kind: str, image: bytes, label: int) -> None:
        for name, content in ((f"{key}.{kind}", image), (f"{key}.cls", str(label).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o644
            self._tar.addfile(info, io.BytesIO(content))

    def close(self) -> None:
        """Close the file and sync it to the disk."""
        self._tar.close()
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())


FORMAT = 1
"""Version of the file. Raised when its fields change; an index of another version is rebuilt."""


@dataclass(frozen=True)
class ShardIndex:
    """All samples of a split, in the order of shards and of images in them. Arrays, so that processes share them."""

    files: list[ShardFile]
    """The shards"""
    shard: np.ndarray
    """ShardFile number of each sample, ascending."""
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray
    names: np.ndarray
    """Names of the members as bytes, concatenated."""
    name_ends: np.ndarray
    skipped: str = ""
    """Line about members that are not samples; '' also in indexes of older versions."""

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, index: int) -> str:
        begin = self.name_ends[index - 1] if index else 0
        return self.names[begin : self.name_ends[index]].tobytes().decode(errors="surrogateescape")

    def is_current(self, shards: Sequence[ShardFile]) -> bool:
        """Whether the index is of these tar files, unchanged. An empty stamp is not compared."""
        return len(shards) == len(self.files) and all(
            (old.name, old.size, old.stamp and new.stamp) == (new.name, new.size, new.stamp and old.stamp)
            for old, new in zip(self.files, shards, strict=True)
        )

    def is_sound(self, sizes: np.ndarray) -> bool:
        """Whether all positions are inside its own tables and the shards, which have these `sizes`."""
        return bool(
            all(getattr(self, name).dtype == kind and getattr(self, name).ndim == 1 for name, kind in _ARRAYS.items())
            and (sizes.dtype, sizes.ndim) == (np.int64, 1)
            and all(len(getattr(self, name)) == len(self) for name in ("offset", "size", "label", "name_ends"))
            and (np.diff(self.shard, prepend=0, append=max(len(sizes) - 1, 0)) >= 0).all()
            and (np.diff(self.name_ends, prepend=0, append=len(self.names)) >= 0).all()
            and (np.concatenate([self.offset, self.size]) >= 0).all()
            and (self.offset + self.size <= sizes[self.shard]).all()
        )

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(
            file,
            format=np.array(FORMAT),
            shards=_text([file.name for file in self.files]),
            stamps=_text([file.stamp for file in self.files]),
            shard_sizes=np.array([file.size for file in self.files], dtype=np.int64),
            classes=_text([]),  # of labels that are names, which earlier versions read
            passed_over=_text([self.skipped]),
            **{name: getattr(self, name) for name in _ARRAYS},
        )
        return file.getvalue()


_ARRAYS = {
    "shard": np.int32,
    "offset": np.int64,
    "size": np.int64,
    "label": np.int64,
    "names": np.uint8,
    "name_ends": np.int64,
}


def from_bytes(content: bytes) -> ShardIndex | None:
    """Load an index, perhaps from an untrusted place; None if it is damaged or of another format."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:  # an index is not compressed: a bomb would be
            if sum(member.file_size for member in file.infolist()) > len(content):
                return None
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            if int(file["format"]) != FORMAT or len(file["classes"]):
                return None
            arrays = {name: file[name] for name in _ARRAYS}
            sizes = file["shard_sizes"]
            shards = zip(_lines(file["shards"]), sizes.tolist(), _lines(file["stamps"]), strict=True)
            skipped = "".join(_lines(file["passed_over"])) if "passed_over" in file else ""
            index = ShardIndex([ShardFile(*fields) for fields in shards], **arrays, skipped=skipped)
    except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile):
        return None
    return index if index.is_sound(sizes) else None


def make_index(store: Store, shards: Sequence[ShardFile]) -> ShardIndex:
    """Index shards by their headers."""
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    skipped = SkippedFiles()
    for number, file in enumerate(shards):
        where = f"{store.root}/{file.name}"
        try:
            with store.open(file.name) as opened:
                samples = read_tar(opened, file.size, where, skipped)
        except OSError as error:
            raise UserError(f"{where} cannot be read: {error}.") from None
        names = [name.encode(errors="surrogateescape") for name, *_ in samples]
        numbers = np.array([sample[1:] for sample in samples], dtype=np.int64).reshape(-1, 3)
        for column, values in zip(("offset", "size", "label"), numbers.T, strict=True):
            columns[column].append(values)
        columns["shard"].append(np.full(len(samples), number, dtype=np.int32))
        columns["names"].append(np.frombuffer(b"".join(names), dtype=np.uint8))
        columns["name_ends"].append(np.array([len(name) for name in names], dtype=np.int64))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    joined["name_ends"] = np.cumsum(joined["name_ends"])
    return ShardIndex(list(shards), **joined, skipped=skipped.line())


def _text(lines: list[str]) -> np.ndarray:
    return np.frombuffer("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"), dtype=np.uint8)


def _lines(text: np.ndarray) -> list[str]:
    return text.tobytes().decode(errors="surrogateescape").split("\n")[:-1]
