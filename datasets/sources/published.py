"""The published data sets, which torchvision can download: caltech101, caltech256, cifar10 and cifar100."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets.base import ImageDataset, Part, Source, comes_unsplit, part_of, parts_read
from datasets.images import image_source
from datasets.labels import check_class_count, log_unused_outputs
from datasets.memory import ArraySamples, open_arrays
from datasets.sources.files import FileList, FileSamples, data_folder, split_files
from datasets.sources.imagefolder import class_files, subfolders
from utils.cache import process_lock
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log
from vitamp.files import only_regular

STALLED_AFTER = 60.0
"""Seconds without data after which a download fails."""
ARCHIVES = (".tgz", ".tar.gz", ".tar", ".zip")


def fetch_once(target: Path, fetch: Callable[[Path], object], by_hand: str) -> None:
    """Make the folder `target` with `fetch(scratch)`, which creates a folder of that name in `scratch`.

    Any number of processes may call this at once: one downloads and the others wait. It downloads into a folder beside
    the target and renames it at the end, so `target` is complete or absent. `by_hand` ends the message of a failure.
    """
    scratch = target.parent / f".{target.name}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with process_lock(target.parent / f".{target.name}.lock", f"fetches {target}"):
            if target.exists():
                return
            if scratch.exists():
                # Left by a process that died: otherwise it would hold the lock.
                log.warning("An earlier download was interrupted: removing %s and starting again.", scratch)
                shutil.rmtree(scratch)
            _fetch(target, scratch, fetch, by_hand)
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error}. {by_hand}") from None


def _fetch(target: Path, scratch: Path, fetch: Callable[[Path], object], by_hand: str) -> None:
    log.info("Fetching %s.", target)
    scratch.mkdir()
    before = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(STALLED_AFTER)
        fetch(scratch)
        if not (scratch / target.name).is_dir():
            raise RuntimeError(f"the download left no folder {target.name}")
        for path in (scratch / target.name).iterdir():
            if path.is_file() and path.name.endswith(ARCHIVES):
                path.unlink()  # unpacked by now
        os.replace(scratch / target.name, target)
    except Exception as error:  # the network, the disk and archives have errors of many types
        reason = str(error) or type(error).__name__
        raise UserError(f"DATA.DOWNLOAD: {target.name} could not be fetched: {reason}. {by_hand}") from None
    finally:
        socket.setdefaulttimeout(before)
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class Published:
    """Folder, download and error messages of a published data set."""

    folder: str
    """Folder below DATA_PATH, named as torchvision names it"""
    required: tuple[str, ...]
    """Files and folders that it must contain"""
    layout: str
    """Further lines of the layout, below the folder"""
    fetcher: str
    """Class in torchvision.datasets that downloads it"""
    megabytes: int
    """Size of the download"""
    page: str

    def fetched_folder(self, data: DataConfig) -> Path:
        """The folder of the data set, downloaded if it is missing and DATA.DOWNLOAD is set."""
        if data.DOWNLOAD and data.DATA_PATH is not None:
            root = Path(data.DATA_PATH).expanduser()
            if self._find(root) is None:
                fetch_once(root / self.folder, self._fetch, self._by_hand(root))
        return self.existing_folder(data)

    def existing_folder(self, data: DataConfig) -> Path:
        """The folder of the data set: one in DATA_PATH, or DATA_PATH itself."""
        root = data_folder(data)
        folder = self._find(root)
        if folder is None:
            raise UserError(
                f"DATA.DATA_PATH (-data_path): there is no {data.DATASET} in {root}. {self._expected(root)}\n"
                f"DATA.DOWNLOAD=true fetches it ({self.megabytes:,} MB)."
            )
        missing = [name for name in self.required if not (folder / name).exists()]
        if missing:
            raise self.damaged(folder, f"there is no {missing[0]}")
        return folder

    def damaged(self, folder: Path, why: str) -> UserError:
        """The error for a data set that is incomplete or damaged."""
        return UserError(
            f"{folder} is incomplete or damaged: {why}. {self._expected(folder.parent)}\n"
            f"Remove the folder, and DATA.DOWNLOAD=true fetches it again ({self.megabytes:,} MB)."
        )

    @contextlib.contextmanager
    def reading(self, folder: Path, name: str) -> Iterator[None]:
        """Report any error while the file `name` is read: a damaged file can raise nearly anything."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise self.damaged(folder, f"{name} cannot be read ({type(error).__name__}: {error})") from None

    def _find(self, root: Path) -> Path | None:
        if (root / self.folder).is_dir():
            return root / self.folder
        is_root = root.name == self.folder or all((root / name).exists() for name in self.required)
        return root if is_root and root.is_dir() else None

    def _fetch(self, scratch: Path) -> None:
        import torchvision.datasets

        getattr(torchvision.datasets, self.fetcher)(str(scratch), download=True)

    def _expected(self, root: Path) -> str:
        lines = "\n".join(f"  {root}/{self.folder}/{line}" for line in self.layout.splitlines())
        return f"Expected layout:\n{lines}"

    def _by_hand(self, root: Path) -> str:
        return f"Try again, or fetch it yourself from {self.page} and unpack it. {self._expected(root)}"


@dataclass(frozen=True)
class Caltech(Published):
    clutter: str
    """Folder of images that belong to no class"""
    images: int
    """Number of published images, without clutter"""

    def source(self) -> Source:
        return image_source(self.samples, self.check, fetches=True, parts=comes_unsplit)

    def samples(self, data: DataConfig, part: Part, num_classes: int) -> FileSamples:
        return split_files(self._files(self.existing_folder(data), data, num_classes), data, part)

    def check(self, data: DataConfig, num_classes: int, train: bool) -> None:
        files = self._files(self.fetched_folder(data), data, num_classes)
        log_unused_outputs(len(files.classes), num_classes, f"The data set {data.DATASET}")
        # There is no list of the images, so their number is all that can be checked.
        if len(files.paths) < self.images:
            log.warning("%s has %s images; %s were published.", files.root, f"{len(files.paths):,}", f"{self.images:,}")
        split_files(files, data, parts_read(data, train, comes_unsplit(data))[-1])

    def _files(self, folder: Path, data: DataConfig, num_classes: int) -> FileList:
        inner = folder / self.required[0]
        classes = [name for name in subfolders(inner) if name != self.clutter]
        if not classes:
            raise self.damaged(folder, f"{inner.name} has no class folders")
        check_class_count(len(classes), num_classes, f"The data set {data.DATASET}")
        files = class_files(inner, classes)
        if not files.paths:
            raise self.damaged(folder, f"the class folders in {inner.name} have no images")
        return files


def _caltech(classes: int, clutter: str, images: int, example: str, megabytes: int, record: str) -> Source:
    inner = f"{classes}_ObjectCategories"
    return Caltech(
        folder=f"caltech{classes}",
        required=(inner,),
        layout=f"{inner}/{example}",
        fetcher=f"Caltech{classes}",
        megabytes=megabytes,
        page=f"https://data.caltech.edu/records/{record}",
        clutter=clutter,
        images=images,
    ).source()


CALTECH101 = _caltech(101, "BACKGROUND_Google", 8677, "accordion/image_0001.jpg", 137, "20086")
CALTECH256 = _caltech(256, "257.clutter", 29780, "001.ak47/001_0001.jpg", 1183, "20087")


SHAPE = (3, 32, 32)
# Callables in the pickle of a numpy array, by their names in older and newer versions of numpy.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
}


@dataclass(frozen=True)
class Cifar(Published):
    train: tuple[str, ...]
    """Files of the training split"""
    validation: str
    meta: str
    names: str
    """Key of the class names"""
    labels: str
    """Key of the labels"""

    def open(self, data: DataConfig, train: bool, num_classes: int, seed: int, device: torch.device) -> ImageDataset:
        folder = self.existing_folder(data)
        classes = self._classes(folder, data, num_classes)
        part = part_of(data, train)
        files = (*(self.train if part in ("train", "all") else ()), *([self.validation] if part != "train" else ()))
        contents = [self._read(folder, name, len(classes)) for name in files]
        pixels = np.concatenate([pixels for pixels, _ in contents])
        labels = np.concatenate([labels for _, labels in contents])
        owner = f"{data.DATASET}:{'test' if part == 'val' else part}"
        return open_arrays(ArraySamples(pixels, labels, classes, owner), data, train, seed, device)

    def check(self, data: DataConfig, num_classes: int, train: bool) -> None:
        folder = self.fetched_folder(data)
        classes = self._classes(folder, data, num_classes)
        log_unused_outputs(len(classes), num_classes, f"The data set {data.DATASET}")
        for name in (*(self.train if train else ()), self.validation):
            self._read(folder, name, len(classes))

    def _classes(self, folder: Path, data: DataConfig, num_classes: int) -> list[str]:
        (classes,) = self._entries(folder, self.meta, self.names)
        check_class_count(len(classes), num_classes, f"The data set {data.DATASET}")
        return [str(name) for name in classes]

    def _read(self, folder: Path, name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels (N x H x W x C) and labels of one file."""
        pixels, labels = map(np.asarray, self._entries(folder, name, "data", self.labels))
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), int(np.prod(SHAPE))) or not len(labels):
            raise self.damaged(folder, f"{name} does not hold images of 32 x 32")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
            raise self.damaged(folder, f"{name} has labels beyond its {classes} classes")
        return pixels.reshape(-1, *SHAPE).transpose(0, 2, 3, 1), labels.astype(np.int64)

    def _entries(self, folder: Path, name: str, *keys: str) -> list[Any]:
        """Values of these keys in a file."""
        with self.reading(folder, name), open(folder / name, "rb", opener=only_regular) as opened:
            table = _ArraysOnly(opened, encoding="latin1").load()
            return [table[key] for key in keys]


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of arrays. A pickle can name any function and have it called; this one allows those of arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise UserError(
            f"A file of the data set calls {module}.{name}, which no CIFAR file does: it may be malicious. Nothing was "
            f"run. Remove the data set and fetch it from its publisher."
        )


def _cifar(classes: int, folder: str, megabytes: int, **files: Any) -> Source:
    cifar = Cifar(
        folder=folder,
        required=(*files["train"], files["validation"], files["meta"]),
        layout=f"{', '.join(files['train'])}    the training split\n{files['validation']}    the validation split\n"
        f"{files['meta']}    the names of the classes",
        fetcher=f"CIFAR{classes}",
        megabytes=megabytes,
        page="https://www.cs.toronto.edu/~kriz/cifar.html (the python version)",
        **files,
    )
    return Source(cifar.open, cifar.check, arrays="cropped", fetches=True)


CIFAR10 = _cifar(
    10,
    "cifar-10-batches-py",
    171,
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    validation="test_batch",
    meta="batches.meta",
    names="label_names",
    labels="labels",
)
CIFAR100 = _cifar(
    100,
    "cifar-100-python",
    169,
    train=("train",),
    validation="test",
    meta="meta",
    names="fine_label_names",
    labels="fine_labels",
)
