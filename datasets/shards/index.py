"""Read tar files in WebDataset's layout (`key.jpg` beside `key.cls` or `key.json`), and make an index of them.

They are in a local folder, or at a URL that fsspec supports, such as s3://bucket/imagenet. Nothing is ever extracted:
the position of each sample is read from the headers once and kept in a file, the index.
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
"""Fields of a store's listing that change when a file is rewritten; each protocol has another one"""

PAUSES = 0.1, 0.3, 1.0, 3.0, 10.0, 20.0
"""Seconds before a request to a store that failed is repeated"""
LONGEST_PAUSE = 60.0
"""Most seconds of a pause that a store asks for (Retry-After)"""
SILENCE = 30.0
"""Seconds without a byte from a web server after which a request has failed; aiohttp's own limit is 5 minutes."""
BLOCK = 8 << 20
"""Most bytes of a request"""
LARGEST_READ = 32 << 20
"""Most bytes of a request while the headers of a tar file are read; a larger header is an attack or damage"""
GAP = 32 << 10
"""Most bytes between two ranges of a file that become one request: these bytes cost less than another request."""

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
        """List the tar files in `folder`, in the order of their names; none if the folder does not exist."""
        files = [file for file in Path(self.root, folder).glob("*.tar") if file.is_file()]
        stats = [(file.name, file.stat()) for file in files if not file.name.startswith(".")]
        prefix = f"{folder}/" if folder else ""
        return sorted(ShardFile(prefix + name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats)

    def read_file(self, name: str) -> bytes | None:
        """Read a small file; None if it does not exist. Raises OSError."""
        try:
            return read_regular(os.path.join(self.root, name))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        return open(os.path.join(self.root, name), "rb", opener=only_regular)

    def range(self, wanted: Range) -> np.ndarray:
        """Read the bytes of a range; fewer if the file ends early. Files stay open. Raises OSError."""
        name, offset, size = wanted
        content = np.empty(size, dtype=np.uint8)
        length = 0
        try:
            if name not in self._files:
                if len(self._files) >= MOST_OPEN:
                    _, least_recent = self._files.popitem(last=False)
                    least_recent.close()
                self._files[name] = self.open(name)
            self._files.move_to_end(name)
            handle = self._files[name].fileno()
            while length < size and (got := os.preadv(handle, [content[length:].data], offset + length)):
                length += got
        finally:
            # After an error, or if the file is shorter than it should be, close it, so that it is opened anew: when a
            # file system is mounted again, old handles stay invalid, and a complete file may replace a short one.
            if length < size and name in self._files:
                with contextlib.suppress(OSError):
                    self._files.pop(name).close()
        return content[:length]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}


class Remote:
    """Files below a URL, read with fsspec. Requests that fail are repeated."""

    remote = True

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._place()

    def _place(self, name: str = "") -> tuple[Any, str]:
        """Return fsspec's file system of the URL, and the path of a file or folder in it; of the root for name ''.

        fsspec keeps one file system per process, so it is not kept here. Raises UserError if the package for the URL's
        protocol is missing.
        """
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        try:
            # Limit the size and time of a web server's answers. The packages for other stores do that themselves.
            if self.root.startswith(("http:", "https:")):
                from datasets.shards.web import session_options

                options["client_kwargs"] = session_options(SILENCE)
            filesystem, root = fsspec.core.url_to_fs(self.root, **options)
        except (ImportError, ValueError) as error:  # each protocol needs its own package
            raise UserError(f"DATA.DATA_PATH (-data_path): {self.root} cannot be opened: {error}") from None
        path = root.rstrip("/")
        if name:
            path += f"/{name}"
        return filesystem, path

    def tars(self, folder: str = "") -> list[ShardFile]:
        """List the tar files in `folder`, in the order of their names; none if the folder does not exist."""
        filesystem, path = self._place(folder)
        try:
            entries = self._patiently(lambda: filesystem.ls(path, detail=True))
        except FileNotFoundError:
            return []
        shards = []
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if not name.endswith(".tar") or name.startswith("."):
                continue
            size = entry["size"] if entry.get("size") is not None else filesystem.size(entry["name"])
            # A text that changes when the file is rewritten: the first of STAMPS that the listing has.
            stamp = next((str(entry[key]) for key in STAMPS if entry.get(key)), "")
            shards.append(ShardFile(f"{folder}/{name}" if folder else name, int(size or 0), stamp))
        return sorted(shards)

    def read_file(self, name: str) -> bytes | None:
        filesystem, path = self._place(name)
        try:
            return self._patiently(lambda: filesystem.cat_file(path))
        except FileNotFoundError:
            return None

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading its headers. Each of its requests is repeated if it fails or is cut off."""
        filesystem, path = self._place(name)
        opened = self._patiently(lambda: filesystem.open(path, "rb"))
        cache = getattr(opened, "cache", None)  # fsspec's, which reads the file in blocks
        if cache is not None:
            fetch = cache.fetcher

            def fetch_patiently(begin: int, end: int) -> bytes:
                """Fetch bytes of the file in place of fsspec's function, which neither repeats nor checks."""
                if end - begin > LARGEST_READ:  # tarfile wants to read a header that is damaged, or an attack
                    raise OSError(f"a header has {end - begin:,} bytes")

                def fetch_whole() -> bytes:
                    answer = fetch(begin, end)
                    return _checked_answer(answer, size=min(end, cache.size) - begin)  # the last block is shorter

                return self._patiently(fetch_whole)

            cache.fetcher = fetch_patiently
        return opened

    def range(self, wanted: Range) -> np.ndarray:
        """Request the bytes of a range. Raises OSError."""
        contents: dict[Range, np.ndarray] = {}
        self._patiently(lambda: self._request([wanted], contents))
        return contents[wanted]

    def ranges(self, wanted: Sequence[Range]) -> dict[Range, np.ndarray]:
        """Request many ranges at once. Ranges whose requests keep failing are left out of the result."""
        ranges_of_request = _join_near_ranges(wanted)
        answers = dict[Range, np.ndarray]()
        with contextlib.suppress(OSError):
            self._patiently(lambda: self._request(list(ranges_of_request), answers), repeats=len(PAUSES))
        # Cut the wanted ranges out of the answers to the joined ones.
        contents = {}
        for request, answer in answers.items():
            _, request_begin, _ = request
            for wanted_range in ranges_of_request[request]:
                _, begin, size = wanted_range
                contents[wanted_range] = answer[begin - request_begin :][:size]
        return contents

    def _request(self, wanted: Sequence[Range], contents: dict[Range, np.ndarray]) -> None:
        """Request the ranges that `contents` lacks, and add their bytes to it.

        If some fail, the others are added and the error of one that failed is raised.
        """
        missing = [file_range for file_range in wanted if file_range not in contents]
        if not missing:
            return
        filesystem, root = self._place()
        paths = list[str]()
        begins = list[int]()
        ends = list[int]()
        for name, begin, size in missing:
            paths.append(f"{root}/{name}")
            begins.append(begin)
            ends.append(begin + size)
        answers = filesystem.cat_ranges(paths, begins, ends, on_error="return")
        failures: list[Exception] = []
        for file_range, answer in zip(missing, answers, strict=True):
            _, _, size = file_range
            try:
                content = bytearray(_checked_answer(answer, size))  # writable, for torch
                contents[file_range] = np.frombuffer(content, np.uint8)
            except Exception as error:
                failures.append(error)

        def is_lasting(failure: Exception) -> bool:
            _, requested_pause = _as_os_error(failure)
            return requested_pause is None

        # Raise the first error for which a repetition may help, or else the first error: False is less than True.
        if failures:
            raise min(failures, key=is_lasting)

    def _patiently(self, request: Callable[[], Value], repeats: int = 4) -> Value:
        """Make a request, and repeat it if it fails, after PAUSES or longer if the store asks for that.

        Raises OSError if the request still fails after `repeats` repetitions, or at once if a repetition cannot help.
        """
        pauses = iter(PAUSES[:repeats])
        while True:
            try:
                return request()
            except Exception as failure:
                error, requested_pause = _as_os_error(failure)
            pause = next(pauses, None)
            if pause is None or requested_pause is None:  # no repetition is left, or none can help
                raise error from None
            cause = str(error).partition(": ")[0] or type(error).__name__
            remark(f"{self.root} fails at times: {cause}. Such requests are repeated.")
            seconds = max(pause, min(requested_pause, LONGEST_PAUSE))
            # Randomly up to twice as long, so that not all processes return at once. `random` itself is seeded, so all
            # of them would draw the same number.
            time.sleep(seconds * (1 + random.SystemRandom().random()))


Store = Folder | Remote


def open_store(place: str | None) -> Store:
    """Open the folder or the URL DATA_PATH. UserError if it is missing, or a URL without its password."""
    if place is None:
        raise UserError("DATA.DATASET shards needs DATA.DATA_PATH (-data_path): the folder or URL of its tar files.")
    if is_redacted(place):
        raise UserError(f"DATA.DATA_PATH: {place} is without its password. Give the whole URL: -data_path.")
    if "://" in place:
        return Remote(place)
    return Folder(readable_folder(place))


def _as_os_error(error: Exception) -> tuple[OSError, float | None]:
    """Return the error of a failed request as an OSError, and the seconds to wait before the request is repeated.

    They are the seconds that the store asks for, or 0 if it does not ask; None if the same request would fail again.
    The errors are those of Python, of fsspec's packages, and of shards/web.py, which differ by their fields.
    """
    if isinstance(error, TimeoutError) and not str(error):  # fsspec's error has no text
        return TimeoutError("it does not answer"), 0.0
    if isinstance(error, OSError):
        is_lasting = isinstance(error, FileNotFoundError | PermissionError)
        return error, None if is_lasting else 0.0
    if getattr(error, "lasting", False):  # web.Refused, which is imported for web servers only
        return OSError(str(error)), None
    status = getattr(error, "status", 0)  # of HTTP
    text = f"it answers {status} ({getattr(error, 'message', '')})" if status else f"{type(error).__name__}: {error}"
    retry_after = str((getattr(error, "headers", None) or {}).get("Retry-After", ""))
    # Of the client's errors, only a timeout (408), "too early" (425) and "too many requests" (429) may pass.
    if 400 <= status < 500 and status not in (408, 425, 429):
        return OSError(text), None
    return OSError(text), float(retry_after) if retry_after.isdecimal() else 0.0


def _checked_answer(answer: bytes | Exception, size: int) -> bytes:
    """Return the answer to a request for `size` bytes. Raises its error, or OSError if it has more bytes or fewer."""
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


def _join_near_ranges(wanted: Sequence[Range]) -> dict[Range, list[Range]]:
    """Join ranges that are near each other in a file (GAP), up to BLOCK bytes.

    Returns the joined ranges to request, each with the wanted ranges in it.
    """
    groups: list[list[Range]] = []
    for name, begin, size in sorted(wanted):
        if groups:
            group = groups[-1]
            _, group_begin, _ = group[0]
            last_name, last_begin, last_size = group[-1]
            gap = begin - (last_begin + last_size)
            joined_size = begin + size - group_begin
            if name == last_name and gap <= GAP and joined_size <= BLOCK:
                group.append((name, begin, size))
                continue
        groups.append([(name, begin, size)])
    requests = {}
    for group in groups:
        name, group_begin, _ = group[0]
        _, last_begin, last_size = group[-1]
        group_size = last_begin + last_size - group_begin
        requests[name, group_begin, group_size] = group
    return requests


IMAGE_KINDS = (*(ending.removeprefix(".") for ending in ENDINGS), "npy")
"""Extensions of images"""
ARRAY_KINDS = ("npz", "dcm")
"""Extensions of arrays, which are the image of a sample without one of IMAGE_KINDS"""
LABEL_KINDS = ("cls", "json")
"""Extensions of labels"""
SAMPLE_KINDS = (*IMAGE_KINDS, *LABEL_KINDS)
LARGEST_LABEL = 1 << 20
"""Most bytes of a label member."""
LARGEST_NUMBER = 1 << 31
"""Largest label"""
UNREADABLE = (tarfile.TarError, ValueError, OverflowError, RecursionError)
"""Errors that tarfile raises; the last three for absurd extended headers."""
MOST_ZEROS = 1 << 20
"""Most zero bytes at the end of a tar file, usually 10 KiB or less. More mean a copy with space but no content."""


class Place(NamedTuple):
    """Position of a member's content in a tar file."""

    name: str
    offset: int
    size: int


def read_tar(file: BinaryIO, size: int, where: str, skipped: SkippedFiles) -> list[tuple[str, int, int, int]]:
    """List the images of a tar file by its headers, each as (member's name, offset, size, label).

    `size`: bytes of the tar file, which is called `where` in messages. Members that belong to no sample are counted in
    `skipped`. Raises UserError if the file is damaged, or if an image has no label.
    """
    images: dict[str, Place] = {}
    arrays: dict[str, Place] = {}
    labels: dict[str, int] = {}
    for member in _members(file, size, where):
        # As in WebDataset, the extension begins at the first dot: 'a/b.c.jpg' has the key 'a/b' and the kind 'c.jpg'.
        folder, slash, file_name = member.name.rpartition("/")
        stem, _, extension = file_name.partition(".")
        key = folder + slash + stem
        kind = extension.lower()
        if not member.isreg() or member.issparse():
            if kind in SAMPLE_KINDS:
                skipped.add(member.name, "links and other members that are not files")
        elif kind in IMAGE_KINDS:
            if key in images:
                raise UserError(f"{where}: {member.name} and {images[key].name} are two images of one sample.")
            images[key] = Place(member.name, member.offset_data, member.size)
        elif kind in ARRAY_KINDS and key not in images:
            arrays[key] = Place(member.name, member.offset_data, member.size)
        elif kind in LABEL_KINDS:
            if kind == "cls" or key not in labels:  # key.cls takes precedence over key.json
                label = _label(file, member, where)
                if label is not None:
                    labels[key] = label
        else:
            _, _, last_extension = kind.rpartition(".")
            # By default, skipped files are counted by their extension.
            has_two_dots = last_extension in SAMPLE_KINDS
            skipped.add(member.name, "more than one dot in the name" if has_two_dots else None)
    # An array is an image only beside a label, and if the sample has no other image.
    for key, array in arrays.items():
        if key in labels:
            images.setdefault(key, array)
    return _labelled(images, labels, where)


def _labelled(images: dict[str, Place], labels: dict[str, int], where: str) -> list[tuple[str, int, int, int]]:
    """Join images and labels by their keys, which are the paths without endings.

    Returns each image as (member's name, offset, size, label). UserError for an image without a label; labels alone are
    ignored.
    """
    samples = []
    for key, (name, offset, size) in images.items():
        if key not in labels:
            raise UserError(f"{where}: {name} has no label: there is no {key}.cls beside it, nor any in {key}.json.")
        samples.append((name, offset, size, labels[key]))
    return samples


def _members(file: BinaryIO, size: int, where: str) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file of `size` bytes, and raise UserError where it is damaged or cut off."""
    try:
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the file is the caller's
    except UNREADABLE as error:
        raise UserError(f"{where} cannot be read as a tar file: {error}. Decompress it (gunzip).") from None
    # tar.next() is not used: it keeps every member in memory, and takes damage, or a cut between two members, for the
    # end of the file.
    tar.offset = 0
    while True:
        begin = tar.offset
        file.seek(begin)
        block = file.read(tarfile.BLOCKSIZE)
        is_zero = block == bytes(tarfile.BLOCKSIZE)
        if is_zero:  # the end of the tar file, unless something other than zeros follows, or too many zeros
            if size - begin > MOST_ZEROS or any(file.read(MOST_ZEROS)):
                raise _damaged(where, size, begin, "zeros in place of a member")
            return
        try:
            file.seek(begin)
            member = tarfile.TarInfo.fromtarfile(tar)  # sets tar.offset to the next header
        except UNREADABLE:
            raise _damaged(where, size, begin, "the header of a member") from None
        if member.size < 0 or tar.offset <= begin:  # else the same members would be read again and again
            raise _damaged(where, size, begin, "the header of a member")
        if member.offset_data + member.size > size:
            raise _damaged(where, size, begin, member.name)
        if leads_out(member.name):
            raise UserError(f"{where}: the member {member.name!r} leads out of the tar file; do not trust it.")
        yield member


def _damaged(where: str, size: int, offset: int, item: str) -> UserError:
    """Make the error for a tar file in which `item`, such as a member's name, is damaged or missing at `offset`."""
    return UserError(
        f"{where} is damaged or cut off: it has {size:,} bytes, and the data at byte {offset:,} ({item}) is not "
        f"complete. Copy or pack this file again."
    )


def _label(file: BinaryIO, member: tarfile.TarInfo, where: str) -> int | None:
    """Read the label from a .cls or .json member; None for a JSON file without one. UserError if it is no number."""
    file.seek(member.offset_data)
    text = file.read(min(member.size, LARGEST_LABEL))
    try:
        label = text.decode().strip()
        if member.name.lower().endswith(".json"):
            fields = parse_json(label)
            if not isinstance(fields, dict) or "label" not in fields:
                return None
            label = str(fields["label"])
        # Negative labels are read, too: they are reported where labels are compared with the classes.
        if not label.removeprefix("-").isdecimal():
            raise ValueError(f"{label[:40]!r} is not a whole number; the names of the classes are lines of classes.txt")
    except ValueError as error:
        raise UserError(f"{where}: {member.name} has no valid label: {error}.") from None
    number = int(label[:100])  # cut, because Python refuses to convert thousands of digits
    if abs(number) > LARGEST_NUMBER:
        raise UserError(f"{where}: {member.name} has the label {label:.40}, which is too large for a class.")
    return number


class TarWriter:
    """Writes samples to a tar file, which is equal byte for byte if the samples are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tar = tarfile.open(path, "w:", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - see close

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._tar.offset

    def add(self, key: str, kind: str, image: bytes, label: int) -> None:
        """Add a sample as two members, key.kind with the image file's bytes and key.cls with the label."""
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
"""Version of the index file, raised when its fields change. An index of another version is made again."""


@dataclass(frozen=True)
class ShardIndex:
    """Where each image of a split is, and its label, in the order of the tar files and of the images in them.

    The columns are arrays with one value per image, so that processes share them.
    """

    files: list[ShardFile]
    """The split's tar files"""
    shard: np.ndarray
    """Index in `files` of each image's tar file, ascending"""
    offset: np.ndarray
    """First byte of each image in its tar file"""
    size: np.ndarray
    """Bytes of each image"""
    label: np.ndarray
    names: np.ndarray
    """Names of the images' members as bytes, one after the other"""
    name_ends: np.ndarray
    """Where in `names` each name ends"""
    skipped: str = ""
    """Log line about members that are not samples; '' if there are none, and in indexes of older versions"""

    def __len__(self) -> int:
        return len(self.shard)

    def name(self, index: int) -> str:
        """Return the name of an image's member."""
        begin = self.name_ends[index - 1] if index > 0 else 0
        end = self.name_ends[index]
        return self.names[begin:end].tobytes().decode(errors="surrogateescape")

    def is_current(self, shards: Sequence[ShardFile]) -> bool:
        """Tell whether the index was made of these tar files and they are unchanged.

        Names, sizes and stamps must be equal. A stamp that either side lacks is not compared.
        """
        if len(shards) != len(self.files):
            return False
        for old, new in zip(self.files, shards, strict=True):
            stamps_differ = old.stamp and new.stamp and old.stamp != new.stamp
            if old.name != new.name or old.size != new.size or stamps_differ:
                return False
        return True

    def is_sound(self, shard_sizes: np.ndarray) -> bool:
        """Tell whether the arrays fit each other, and all positions are inside the tar files, which have these sizes.

        An index can come from an untrusted place, so a wrong position must not reach memory or a file.
        """
        for name, dtype in _ARRAYS.items():
            column = getattr(self, name)
            if column.dtype != dtype or column.ndim != 1:
                return False
        if shard_sizes.dtype != np.int64 or shard_sizes.ndim != 1:
            return False
        if any(len(getattr(self, name)) != len(self) for name in ("offset", "size", "label", "name_ends")):
            return False
        # The numbers of the tar files ascend from 0 to the last tar file, so none is below or above; likewise the ends
        # of the names. With these bounds added at both ends, no step is negative.
        last_shard = max(len(shard_sizes) - 1, 0)
        shard_steps = np.diff(self.shard, prepend=0, append=last_shard)
        name_lengths = np.diff(self.name_ends, prepend=0, append=len(self.names))
        if (shard_steps < 0).any() or (name_lengths < 0).any():
            return False
        # Images are inside their tar files.
        if (self.offset < 0).any() or (self.size < 0).any():
            return False
        return bool((self.offset + self.size <= shard_sizes[self.shard]).all())

    def to_bytes(self) -> bytes:
        """Return the content of the index file; `from_bytes` reads it."""
        file = io.BytesIO()
        np.savez(
            file,
            format=np.array(FORMAT),
            shards=_text([file.name for file in self.files]),
            stamps=_text([file.stamp for file in self.files]),
            shard_sizes=np.array([file.size for file in self.files], dtype=np.int64),
            # Earlier versions read labels that are names, and need this field with the names; it stays empty.
            classes=_text([]),
            passed_over=_text([self.skipped]),  # the log line
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
    """Load an index from the content of its file; None if it is damaged or of another format.

    The file may come from an untrusted place, so no code in it is run and all positions are checked.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            # An index is not compressed, so its members are no larger than its file. Those of a zip bomb are.
            if sum(member.file_size for member in file.infolist()) > len(content):
                return None
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            # An index with names of classes is of an earlier version, whose labels were names.
            if int(file["format"]) != FORMAT or len(file["classes"]) > 0:
                return None
            arrays = {name: file[name] for name in _ARRAYS}
            shard_sizes = file["shard_sizes"]
            shards = zip(_lines(file["shards"]), shard_sizes.tolist(), _lines(file["stamps"]), strict=True)
            skipped = "".join(_lines(file["passed_over"])) if "passed_over" in file else ""
            index = ShardIndex([ShardFile(*fields) for fields in shards], **arrays, skipped=skipped)
    except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile):
        return None
    return index if index.is_sound(shard_sizes) else None


def make_index(store: Store, shards: Sequence[ShardFile]) -> ShardIndex:
    """Make the index of tar files by reading all of their headers. UserError if one is damaged or cannot be read."""
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
        positions = np.array([sample[1:] for sample in samples], dtype=np.int64).reshape(-1, 3)
        for column, values in zip(("offset", "size", "label"), positions.T, strict=True):
            columns[column].append(values)
        columns["shard"].append(np.full(len(samples), number, dtype=np.int32))
        columns["names"].append(np.frombuffer(b"".join(names), dtype=np.uint8))
        name_lengths = np.array([len(name) for name in names], dtype=np.int64)
        columns["name_lengths"].append(name_lengths)
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    arrays["name_ends"] = np.cumsum(arrays.pop("name_lengths"))
    return ShardIndex(list(shards), **arrays, skipped=skipped.line())


def _text(lines: list[str]) -> np.ndarray:
    """Store lines of text as an array of bytes, which needs no pickle; `_lines` reads it."""
    return np.frombuffer("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"), dtype=np.uint8)


def _lines(text: np.ndarray) -> list[str]:
    """Return the lines of text that `_text` stored."""
    return text.tobytes().decode(errors="surrogateescape").split("\n")[:-1]
