"""Images in files of their own: found in folders by their extensions, or named by lists."""

import glob
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from datasets.base import Part, Samples, Unreadable, name_prefix
from datasets.decoding import ENDINGS
from datasets.labels import check_label
from datasets.sources.grouped import groups_in_paths
from datasets.sources.split import split_rows
from utils.config.data import DataConfig
from utils.errors import UserError, closest
from utils.log import log, warn_once
from utils.text import one_line
from vitamp.files import kind_of_path, only_regular, read_regular

MOST_NAMES = 2
"""Files of a kind that are named in one line"""
MOST_KINDS = 8
"""Kinds that are named in one line"""
# Kinds under which what `is_hidden` is counted as skipped
HIDDEN = "hidden files"
HIDDEN_FOLDER = "hidden folders"
OF_SYSTEMS = ("__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
"""Folders that archives, Python and file systems leave beside those of the user"""


class SkippedFiles:
    """Files that were skipped in one place, by kind, mostly their extension."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, kind: str | None = None) -> None:
        """Add a file. `kind`: what to count it as, if not its extension."""
        kind = kind or os.path.splitext(name)[1].lower() or "no extension"
        self._names.setdefault(one_line(kind), []).append(one_line(name))

    def line(self) -> str:
        """'skipped .heic 3 (photo.heic, ...)'; '' for none."""
        parts = []
        for kind, names in sorted(self._names.items(), key=lambda item: (-len(item[1]), item[0])):
            more = ["..."] if len(names) > MOST_NAMES else []
            parts.append(f"{kind} {len(names):,} ({', '.join(names[:MOST_NAMES] + more)})")
        more = ["..."] if len(parts) > MOST_KINDS else []
        return f"skipped {', '.join(parts[:MOST_KINDS] + more)}" if parts else ""

    def warn(self, where: str) -> None:
        """Log the line, once per process and place."""
        line = self.line()
        if line:
            warn_once(f"{where}: {line}")


def images_below(
    folder: str,
    skipped: SkippedFiles | None = None,
    inside: str = "",
    above: tuple[tuple[int, int], ...] = (),
    endings: tuple[str, ...] = ENDINGS,
) -> Iterator[str]:
    """Paths relative to `folder`: its own images in the order of names, then those of each subfolder.

    Links to folders are followed, unless they lead back to a folder above. What is not read is counted in `skipped`.
    `inside` and `above`: the way to a subfolder, and device and inode of each folder on it. `endings`: of the files.
    """
    try:
        stat = os.stat(folder)
        own_id = stat.st_dev, stat.st_ino
        if own_id in above:
            return
        with os.scandir(folder) as entries:
            names = sorted((entry.name, is_folder_entry(entry), is_odd_entry(entry)) for entry in entries)
    except FileNotFoundError:  # a split may lack the folder of a class, which is then reported as empty
        return
    except OSError as error:
        log.warning("Skipping the folder %s, which cannot be read: %s.", one_line(folder), error.strerror)
        return
    skipped = SkippedFiles() if skipped is None else skipped
    for name, is_folder, is_odd in names:
        if is_hidden(name):
            skipped.add(name, HIDDEN_FOLDER if is_folder else HIDDEN)
        elif is_odd:
            skipped.add(name, "pipes and devices")
        elif not is_folder and name.lower().endswith(endings):
            yield f"{inside}{name}"
        elif not is_folder:
            skipped.add(name)
    for name, is_folder, _ in names:
        if is_folder and not is_hidden(name):
            way = (*above, own_id)
            yield from images_below(f"{folder}/{name}", skipped, inside=f"{inside}{name}/", above=way, endings=endings)


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name in OF_SYSTEMS


def is_folder_entry(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder. A broken or circular link counts as a file: reading it gives a clear error."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_odd_entry(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a pipe, a socket or a device, links followed. Of a plain file or folder, it needs no stat."""
    try:
        return not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path)
    except OSError:
        return False


SECONDS_TO_REPORT = 5.0
"""A longer listing is reported every so many seconds."""
IMAGES_TO_LOOK = 1000
"""A listing looks at the clock after so many images."""


def reported(paths: Iterable[str]) -> Iterator[str]:
    """The paths as they come, with a line in the log now and then if that takes long."""
    due = time.monotonic() + SECONDS_TO_REPORT
    for number, path in enumerate(paths, start=1):
        if number % IMAGES_TO_LOOK == 0 and time.monotonic() > due:
            log.info("Listing images: %s so far, the last: %s", f"{number:,}", one_line(path))
            due = time.monotonic() + SECONDS_TO_REPORT
        yield path


class PathTable:
    """Paths in one block of bytes: a million strings would be copied into every worker as soon as it reads them."""

    def __init__(self, paths: Iterable[str]) -> None:
        block = bytearray()
        ends = array("q", [0])
        for path in reported(paths):
            block += os.fsencode(path)
            ends.append(len(block))
        self.block: bytes | memoryview = bytes(block)
        self.ends = np.array(ends, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {"block": np.frombuffer(self.block, np.uint8), "ends": self.ends}  # arrays, which shared.py maps

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.block = state["block"].data
        self.ends = state["ends"]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> str:
        begin, end = self.ends[index : index + 2]
        return os.fsdecode(bytes(self.block[begin:end]))


OF_SEVERAL = "\0"
"""Between the paths of the files of one image, which have no such character"""


class FileSamples(Samples):
    """Image files below one folder; with '' for it, in any folders. One image may be several files."""

    def __init__(
        self, root: Path | str, paths: Iterable[str] | PathTable, labels: np.ndarray, classes: list[str] | None
    ) -> None:
        """`paths`: relative to `root`"""
        self.root = root
        self.labels = labels
        self.classes = classes
        self.paths = paths if isinstance(paths, PathTable) else PathTable(paths)

    def read(self, index: int) -> bytes:
        paths = self._paths(index)
        if len(paths) == 1:
            return read_regular(paths[0], self.most_bytes)
        for path in paths:
            if not os.path.exists(path):
                raise Unreadable(f"its file {one_line(path)} does not exist")
        contents = []
        for path in paths:
            try:
                contents.append(read_regular(path, self.most_bytes))
            except OSError as error:
                reason = error.strerror or error
                error.strerror = f"its file {one_line(path)}: {reason}"
                raise
        from vitamp.bands import together

        return together(contents, [one_line(path) for path in paths])

    def name(self, index: int) -> str:
        return one_line(self._paths(index)[0])

    def size(self, index: int) -> int:
        return sum(os.stat(path).st_size for path in self._paths(index))

    def _paths(self, index: int) -> list[str]:
        return [os.path.join(self.root, path) for path in self.paths[index].split(OF_SEVERAL)]

    def names(self) -> Iterator[bytes | memoryview]:
        yield from (self.paths.block, self.paths.ends.data)


def split_files(files: FileSamples, data: DataConfig, part: Part | None) -> FileSamples:
    """One split of these files, as `split_rows` chooses it; None: they are one already.

    Without `groups` of a column, DATA.GROUP is in the paths.
    """
    if data.GROUP is not None and files.groups is None:
        files.groups = groups_in_paths(files.paths, data)
    if part is None:
        return files
    paths = files.paths
    groups = files.groups
    chosen = split_rows(files.labels, data, part, files.root, groups)
    found = FileSamples(files.root, map(paths.__getitem__, chosen), files.labels[chosen], files.classes)
    found.groups = groups and [groups[index] for index in chosen]
    return found


def data_folder(data: DataConfig) -> Path:
    """DATA_PATH as a folder that exists and can be read."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET {data.DATASET} needs DATA.DATA_PATH (-data_path): the folder its images are in.")
    return readable_folder(data.DATA_PATH)


def readable_folder(path: str) -> Path:
    """`path`, given as DATA_PATH, as a folder that exists and can be read."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = kind_of_path(folder)
        what = f"is {kind}, not a folder" if kind else f"does not exist{_meant(folder)}"
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} {what}.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"DATA.DATA_PATH (-data_path): no permission to read {folder}.")
    return folder


def in_any_case(folder: Path, name: str) -> Path:
    """The entry of this name, or else one whose name has other capital letters, if there is one."""
    if (folder / name).exists():
        return folder / name
    return next((one for one in sorted(folder.glob("*")) if one.name.lower() == name.lower()), folder / name)


def no_file(path: Path) -> str:
    """Half a sentence for a path that is not a file: 'there is no file X' or 'X is a folder, not a file'."""
    kind = kind_of_path(path)
    if kind:
        return f"{path} is {kind}, not a file"
    below = next(path.parent.glob(f"*/{glob.escape(path.name)}"), None)
    other = f" (there is {below})" if below else _meant(path)
    return f"there is no file {path}{other}"


def _meant(path: Path) -> str:
    """' (did you mean X?)' for a missing path; '' if nothing has a name like the first part that is missing."""
    missing = path.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    with suppress(OSError):
        found = closest(missing.name, os.listdir(missing.parent))
        if found:
            near = missing.parent / found
            whole = near / path.absolute().relative_to(missing)
            meant = whole if whole.exists() else near
            return f" (did you mean {meant}?)"
    return ""


PROBED = 8
"""Images of a list whose existence is checked before the run: enough to notice a list for another folder."""


def read_list(file: Path, num_classes: int) -> tuple[PathTable, np.ndarray]:
    """Paths and labels of a list file, with every line checked."""
    labels: list[int] = []

    def paths() -> Iterator[str]:  # one by one, so that a million lines never exist as Python strings at once
        with open(file, encoding="utf-8-sig", opener=only_regular) as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                where = f"{file}:{number}"
                try:
                    path, text = line.rsplit(maxsplit=1)
                    labels.append(int(text))
                except ValueError:
                    raise UserError(
                        f"{where}: {line.strip()!r} must be 'relative/path.JPEG label'; the label is a whole number."
                    ) from None
                check_label(labels[-1], num_classes, where)
                yield check_path(path.strip(), where)

    try:
        table = PathTable(paths())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The list {file} cannot be read: {error}.") from None
    if not labels:
        raise UserError(f"{file} is empty: it needs one image per line, as in 'train/n01440764/image.JPEG 0'.")
    return table, np.array(labels, dtype=np.int64)


def check_first_files(file: Path, paths: PathTable | Sequence[str], data: DataConfig, root: Path | None = None) -> None:
    """Raise UserError unless the first images that `file` names exist, or are left out. `root`: if not the file's."""
    from datasets.exclude import below, excluded

    root = root or file.parent
    left_out = excluded(data) if data.EXCLUDE else {}
    prefix = name_prefix(data)
    for index in range(min(PROBED, len(paths))):
        of_image = paths[index].split(OF_SEVERAL)
        if below(str(root / of_image[0]), prefix) in left_out:
            continue
        for path in of_image:
            image = root / path
            if not image.is_file():
                raise UserError(f"{file} names {path}, but {no_file(image)}. Paths are relative to the file.")


def leads_out(path: str) -> bool:
    """Whether a path can leave the folder that it is relative to: it is absolute or has a '..'."""
    return path.startswith("/") or (".." in path and ".." in path.split("/"))


def check_path(path: str, where: str) -> str:
    """The path; UserError if it is empty or leaves the data folder."""
    if not path:
        raise UserError(f"{where}: the path is empty.")
    if leads_out(path):
        raise UserError(f"{where}: {path} leads out of the data folder; give a relative path, without '..'.")
    return path
