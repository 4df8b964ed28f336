"""Data sets whose images are single files: files are found in folders by their extensions, or named by a list."""

import glob
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasets.base import CSV_PREFIX, Part, Samples, Unreadable, name_prefix, stamp_of
from datasets.decoding import ENDINGS
from datasets.labels import check_label
from datasets.sources.grouped import groups_in_paths
from datasets.sources.split import split_rows
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log, warn_once
from utils.text import one_line
from vitamp.files import kind_of_path, only_regular, read_regular, suggested_path

MOST_NAMES = 2
"""Skipped files of each kind that the log line names"""
MOST_KINDS = 8
"""Kinds of skipped files that the log line names"""
# Kinds of skipped files, for those that `is_hidden` leaves out.
HIDDEN = "hidden files"
HIDDEN_FOLDER = "hidden folders"
OF_SYSTEMS = ("__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
"""Folders that archives, Python and file systems leave beside those of the user"""


class SkippedFiles:
    """The files that were skipped below one folder, counted by kind. The kind is usually the extension."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, kind: str | None = None) -> None:
        """Count a skipped file. `kind`: in place of its extension."""
        kind = kind or os.path.splitext(name)[1].lower() or "no extension"
        self._names.setdefault(one_line(kind), []).append(one_line(name))

    def line(self) -> str:
        """Describe the skipped files, the largest kind first, as 'skipped .heic 3 (photo.heic, ...)'; '' for none."""
        if not self._names:
            return ""
        kinds = []
        for kind, names in sorted(self._names.items(), key=lambda item: (-len(item[1]), item[0])):
            shown_names = names[:MOST_NAMES]
            if len(names) > MOST_NAMES:
                shown_names.append("...")
            kinds.append(f"{kind} {len(names):,} ({', '.join(shown_names)})")
        shown_kinds = kinds[:MOST_KINDS]
        if len(kinds) > MOST_KINDS:
            shown_kinds.append("...")
        return f"skipped {', '.join(shown_kinds)}"

    def warn(self, where: str) -> None:
        """Log a warning about the skipped files, if any, once per process and place."""
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
    """Yield the paths, relative to `folder`, of all images below it, found by their extensions `endings`.

    The folder's own images come first, in the order of their names, then those of each subfolder. Links to folders are
    followed, unless they lead back to a folder above. Files that are no images are counted in `skipped`.

    `inside` and `above` are for the recursion into subfolders: the prefix of the paths, and the device and inode of
    each folder on the way down.
    """
    try:
        stat = os.stat(folder)
        folder_id = stat.st_dev, stat.st_ino
        if folder_id in above:
            return
        with os.scandir(folder) as scanned:
            entries = sorted((entry.name, is_folder_entry(entry), is_odd_entry(entry)) for entry in scanned)
    except FileNotFoundError:  # a split may lack the folder of a class, which is then reported as empty
        return
    except OSError as error:
        log.warning("Skipping the folder %s, which cannot be read: %s.", one_line(folder), error.strerror)
        return
    skipped = SkippedFiles() if skipped is None else skipped
    for name, is_folder, is_odd in entries:
        if is_hidden(name):
            skipped.add(name, HIDDEN_FOLDER if is_folder else HIDDEN)
        elif is_odd:
            skipped.add(name, "pipes and devices")
        elif not is_folder and name.lower().endswith(endings):
            yield f"{inside}{name}"
        elif not is_folder:
            skipped.add(name)
    folders_above = (*above, folder_id)
    for name, is_folder, _ in entries:
        if is_folder and not is_hidden(name):
            yield from images_below(
                f"{folder}/{name}", skipped, inside=f"{inside}{name}/", above=folders_above, endings=endings
            )


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder is skipped for its name: it is hidden, or of a system (`OF_SYSTEMS`)."""
    return name.startswith(".") or name in OF_SYSTEMS


def is_folder_entry(entry: os.DirEntry[str]) -> bool:
    """Tell whether a directory entry is a folder. A broken or circular link counts as a file: reading it gives a clear
    error.
    """
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_odd_entry(entry: os.DirEntry[str]) -> bool:
    """Tell whether a directory entry is a pipe, a socket or a device, or a link to one.

    For a plain file or folder, this needs no call of the system.
    """
    try:
        # A broken link does not exist. It counts as a file: reading it gives a clear error.
        return not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path)
    except OSError:
        return False


SECONDS_TO_REPORT = 5.0
"""Time between the progress lines of a long listing"""
IMAGES_PER_LOOK = 1000
"""Images after which a listing looks at the clock: looking at each image would be slow"""


def with_progress(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths of images unchanged, and log every SECONDS_TO_REPORT how many there are so far."""
    due = time.monotonic() + SECONDS_TO_REPORT
    for number, path in enumerate(paths, start=1):
        if number % IMAGES_PER_LOOK == 0 and time.monotonic() > due:
            log.info("Listing images: %s so far, the last: %s", f"{number:,}", one_line(path))
            due = time.monotonic() + SECONDS_TO_REPORT
        yield path


class PathTable:
    """A list of paths in one block of bytes.

    A million Python strings would be copied into every loading process as soon as it reads them, because reading
    changes their reference counts.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        """Read the paths into the block, one by one, and log the progress of a long list."""
        block = bytearray()
        path_ends = array("q", [0])  # path i is between the values i and i + 1
        for path in with_progress(paths):
            block += os.fsencode(path)
            path_ends.append(len(block))
        self.block: bytes | memoryview = bytes(block)
        self.ends = np.array(path_ends, dtype=np.int64)

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
"""Separator between the paths of one image that is several files; no path has this character"""


class FileSamples(Samples):
    """One split of a data set whose images are files. One image may be several files, with its channels."""

    def __init__(
        self, root: Path | str, paths: Iterable[str] | PathTable, labels: np.ndarray, classes: list[str] | None
    ) -> None:
        """`paths`: one per image, relative to the folder `root`, or absolute if `root` is ''.

        Several files of one image are one path, joined by OF_SEVERAL.
        """
        self.root = root
        self.labels = labels
        self.classes = classes
        self.paths = paths if isinstance(paths, PathTable) else PathTable(paths)

    def read(self, index: int) -> bytes:
        """Return the image file's bytes; several files are joined to one zip.

        Raises Unreadable if one of several files is missing, and OSError if one cannot be read.
        """
        paths = self._paths(index)
        if len(paths) == 1:
            return read_regular(paths[0], self.most_bytes)
        # Before any file is read: with a missing one, the image is broken whatever the others are.
        for path in paths:
            if not os.path.exists(path):
                raise Unreadable(f"its file {one_line(path)} does not exist")
        contents = []
        for path in paths:
            try:
                contents.append(read_regular(path, self.most_bytes))
            except OSError as error:
                # The message names the image by its first file, so add which file it is.
                reason = error.strerror or error
                error.strerror = f"its file {one_line(path)}: {reason}"
                raise
        from vitamp.bands import together

        return together(contents, [one_line(path) for path in paths])

    def name(self, index: int) -> str:
        return one_line(self._paths(index)[0])

    def size(self, index: int) -> int:
        return sum(os.stat(path).st_size for path in self._paths(index))

    def stamp(self, index: int) -> str:
        return " ".join(map(stamp_of, self._paths(index)))

    def _paths(self, index: int) -> list[str]:
        return [os.path.join(self.root, relative) for relative in self.paths[index].split(OF_SEVERAL)]

    def names(self) -> Iterator[bytes | memoryview]:
        yield from (self.paths.block, self.paths.ends.data)


def split_files(files: FileSamples, data: DataConfig, part: Part | None) -> FileSamples:
    """Return the split `part` of files that come unsplit, as `split_rows` chooses it.

    None for `part` means that the files are one split already: all are returned. Either way, `files` get the groups of
    DATA.GROUP: a table has given them already, or DATA.GROUP is a pattern in the paths.
    """
    if data.GROUP is not None and files.groups is None:
        files.groups = groups_in_paths(files.paths, data)
    if part is None:
        return files
    paths = files.paths
    groups = files.groups
    indices = split_rows(files.labels, data, part, files.root, groups)
    split = FileSamples(files.root, map(paths.__getitem__, indices), files.labels[indices], files.classes)
    split.groups = groups and [groups[index] for index in indices]
    return split


def data_folder(data: DataConfig) -> Path:
    """Return DATA_PATH as a folder that exists and can be read; else raise UserError."""
    if data.DATA_PATH is None:
        raise UserError(f"DATA.DATASET {data.DATASET} needs DATA.DATA_PATH (-data_path): the folder its images are in.")
    return readable_folder(data.DATA_PATH)


def readable_folder(path: str) -> Path:
    """Return `path`, which was given as DATA_PATH, as a folder that exists and can be read; else raise UserError."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = kind_of_path(folder)
        problem = f"is {kind}, not a folder" if kind else f"does not exist{suggested_path(folder)}"
        raise UserError(f"DATA.DATA_PATH (-data_path): {folder} {problem}.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError(f"DATA.DATA_PATH (-data_path): no permission to read {folder}.")
    return folder


def in_any_case(folder: Path, name: str) -> Path:
    """Return the path of a file or folder in `folder`, also if its name differs in capital letters.

    If there is none, this is the path of exactly this name.
    """
    exact = folder / name
    if exact.exists():
        return exact
    for entry in sorted(folder.glob("*")):
        if entry.name.lower() == name.lower():
            return entry
    return exact


def no_file(path: Path) -> str:
    """Describe a path that is not a file: 'there is no file X' or 'X is a folder, not a file', for an error message.

    A file of the same name in a subfolder, or one with a similar name, is suggested.
    """
    kind = kind_of_path(path)
    if kind:
        return f"{path} is {kind}, not a file"
    in_subfolder = next(path.parent.glob(f"*/{glob.escape(path.name)}"), None)
    suggestion = f" (there is {in_subfolder})" if in_subfolder else suggested_path(path)
    return f"there is no file {path}{suggestion}"


PROBED = 8
"""Images of a list whose existence is checked before the run: enough to notice a list for another folder."""


def read_list(file: Path, num_classes: int) -> tuple[PathTable, np.ndarray]:
    """Read the paths and labels of a list file, and check every line.

    Each line is a path relative to the file, then a label. Raises UserError with the number of a line that is wrong.
    """
    labels: list[int] = []

    def paths() -> Iterator[str]:
        """Yield the paths one by one, and append each label to `labels`.

        So a million lines never exist as Python strings at once.
        """
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
    """Raise UserError if one of the first images in a list or table does not exist. Those of DATA.EXCLUDE need not.

    `file`: the list, which the message names. `paths`: one per image; several files of an image are joined by
    OF_SEVERAL. `root`: the folder that `paths` are relative to; None: that of `file`.
    """
    from datasets.exclude import below, excluded

    root = root or file.parent
    excluded_names = excluded(data) if data.EXCLUDE else {}
    prefix = name_prefix(data)
    for index in range(min(PROBED, len(paths))):
        files_of_image = paths[index].split(OF_SEVERAL)
        # DATA.EXCLUDE names images by their path below DATA_PATH.
        name = below(str(root / files_of_image[0]), prefix)
        if name in excluded_names:
            continue
        for path in files_of_image:
            image_file = root / path
            if not image_file.is_file():
                raise UserError(f"{file} names {path}, but {no_file(image_file)}. {where_images_are(data)}")


def where_images_are(data: DataConfig) -> str:
    """Say what the paths in a list or table are relative to, for an error about a missing image."""
    dataset = data.DATASET
    if dataset == "csv":
        dataset = f"{CSV_PREFIX}{data.DATA_PATH}"
    if dataset.startswith(CSV_PREFIX):
        return f"Paths are relative to the table, or with -dataset {dataset} -data_path FOLDER to that folder."
    return "Paths in a list are relative to it."


def leads_out(path: str) -> bool:
    """Tell whether a path can leave the folder that it is relative to: it is absolute or has a '..'."""
    return path.startswith("/") or (".." in path and ".." in path.split("/"))


def check_path(path: str, where: str) -> str:
    """Return the path of an image in a list or table; raise UserError if it is empty or leaves the data folder.

    `where` begins the message: the file and the line.
    """
    if not path:
        raise UserError(f"{where}: the path is empty.")
    if leads_out(path):
        raise UserError(f"{where}: {path} leads out of the data folder; give a relative path, without '..'.")
    return path
