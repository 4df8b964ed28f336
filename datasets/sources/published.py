"""The published data sets, which torchvision can download: caltech101, caltech256, cifar10 and cifar100."""

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datasets.base import UNSPLIT, Part, Source
from datasets.labels import check_class_count
from datasets.memory import ArraySamples
from datasets.sources.files import FileSamples, data_folder, in_any_case, split_files
from datasets.sources.imagefolder import class_files, subfolders
from utils.arrays_only import ArraysOnly, Refused
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
    stalled_before = socket.getdefaulttimeout()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with process_lock(target.parent / f".{target.name}.lock", f"fetches {target}"):
            if target.exists():
                return
            if scratch.exists():
                # Left by a process that died: otherwise it would hold the lock.
                log.warning("An earlier download was interrupted: removing %s and starting again.", scratch)
                shutil.rmtree(scratch)
            log.info("Fetching %s.", target)
            scratch.mkdir()
            try:
                socket.setdefaulttimeout(STALLED_AFTER)
                fetch(scratch)
                for path in (scratch / target.name).iterdir():
                    if path.is_file() and path.name.endswith(ARCHIVES):
                        path.unlink()  # unpacked by now
                os.replace(scratch / target.name, target)
            except Exception as error:  # the network, the disk and archives have errors of many types
                reason = str(error) or type(error).__name__
                raise UserError(f"DATA.DOWNLOAD: {target.name} could not be fetched: {reason}. {by_hand}") from None
            finally:
                socket.setdefaulttimeout(stalled_before)
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error}. {by_hand}") from None


@dataclass(frozen=True)
class Published:
    """Folder, download and error messages of a published data set."""

    fetcher: str
    """Class in torchvision.datasets that downloads it"""
    megabytes: int
    """Size of the download"""
    page: str
    folder: str
    """Folder below DATA_PATH, named as torchvision names it"""
    required: tuple[str, ...]
    """Files and folders that it must contain"""
    layout: str
    """Further lines of the layout, below the folder"""

    def folder_of(self, data: DataConfig) -> Path:
        """The folder of the data set: one in DATA_PATH, or DATA_PATH itself. Downloaded if missing, with DOWNLOAD."""
        if data.DOWNLOAD and data.DATA_PATH is not None:
            root = Path(data.DATA_PATH).expanduser()
            if self._find(root) is None:
                import torchvision.datasets as fetchers

                by_hand = f"Try again, or fetch it yourself from {self.page} and unpack it. {self._expected(root)}"
                fetcher = getattr(fetchers, self.fetcher)
                fetch_once(root / self.folder, lambda scratch: fetcher(str(scratch), download=True), by_hand)
        root = data_folder(data)
        folder = self._find(root)
        if folder is None:
            raise UserError(
                f"DATA.DATA_PATH (-data_path): there is no {data.DATASET} in {root}. {self._expected(root)}\n"
                f"DATA.DOWNLOAD=true fetches it ({self.megabytes:,} MB)."
            )
        for name in self.required:
            if not in_any_case(folder, name).exists():
                raise self.damaged(folder, f"there is no {name}")
        return folder

    def damaged(self, folder: Path, why: str) -> UserError:
        """The error for a data set that is incomplete or damaged."""
        return UserError(
            f"{folder} is incomplete or damaged: {why}. {self._expected(folder.parent)}\n"
            f"Remove the folder, and DATA.DOWNLOAD=true fetches it again ({self.megabytes:,} MB)."
        )

    def _find(self, root: Path) -> Path | None:
        folder = in_any_case(root, self.folder)
        if folder.is_dir():
            return folder
        is_root = root.name.lower() == self.folder or all(in_any_case(root, name).exists() for name in self.required)
        return root if is_root and root.is_dir() else None

    def _expected(self, root: Path) -> str:
        lines = "\n".join(f"  {root}/{self.folder}/{line}" for line in self.layout.splitlines())
        return f"Expected layout:\n{lines}"


def _caltech(classes: int, clutter: str, example: str, megabytes: int, record: str) -> Source:
    """`clutter`: folder of images that belong to no class."""
    inner = f"{classes}_ObjectCategories"
    published = Published(
        fetcher=f"Caltech{classes}",
        megabytes=megabytes,
        page=f"https://data.caltech.edu/records/{record}",
        folder=f"caltech{classes}",
        required=(inner,),
        layout=f"{inner}/{example}",
    )

    def samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
        folder = published.folder_of(data)
        objects = in_any_case(folder, inner)
        names = [name for name in subfolders(objects) if name != clutter]
        check_class_count(len(names), num_classes, f"The data set {data.DATASET}")
        files = class_files(objects, names)
        if not len(files):
            raise published.damaged(folder, f"{inner} has no images in class folders")
        return split_files(files, data, part)

    return Source(samples, fetches=True, parts=lambda _: UNSPLIT)


CALTECH101 = _caltech(101, "BACKGROUND_Google", "accordion/image_0001.jpg", 137, "20086")
CALTECH256 = _caltech(256, "257.clutter", "001.ak47/001_0001.jpg", 1183, "20087")


SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Cifar:
    """The files of CIFAR-10 or CIFAR-100."""

    published: Published
    train: tuple[str, ...]
    validation: str
    meta: str
    """File of the names of the classes"""
    prefix: str
    """Of the keys in the files"""

    def entries(self, place: Path, name: str, *keys: str) -> list[Any]:
        """Values of these keys in a file."""
        try:
            with open(in_any_case(place, name), "rb", opener=only_regular) as opened:
                table = ArraysOnly(opened, encoding="latin1").load()
            # A newer Python may have stored the text of Python 2 as bytes.
            table = {key.decode() if isinstance(key, bytes) else key: value for key, value in table.items()}
            return [table[key] for key in keys]
        except Refused as refused:
            raise UserError(
                f"{place / name}: {refused}. No CIFAR file of its publisher does this: another program wrote or "
                "changed it. Nothing was run. Remove the data set and fetch it from its publisher."
            ) from None
        except Exception as error:  # a damaged file can raise nearly anything
            why = f"{name} cannot be read ({type(error).__name__}: {error})"
            raise self.published.damaged(place, why) from None

    def read(self, place: Path, name: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels (N x H x W x C) and labels of one file."""
        pixels, labels = map(np.asarray, self.entries(place, name, "data", f"{self.prefix}labels"))
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), int(np.prod(SHAPE))) or not len(labels):
            raise self.published.damaged(place, f"{name} does not hold images of 32 x 32")
        if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= number:
            raise self.published.damaged(place, f"{name} has labels beyond its {number} classes")
        return pixels.reshape(-1, *SHAPE).transpose(0, 2, 3, 1), labels.astype(np.int64)

    def samples(self, data: DataConfig, part: Part, num_classes: int) -> ArraySamples:
        place = self.published.folder_of(data)
        (found,) = self.entries(place, self.meta, f"{self.prefix}label_names")
        names = [name.decode() if isinstance(name, bytes) else str(name) for name in found]
        check_class_count(len(names), num_classes, f"The data set {data.DATASET}")
        files = []
        if part in ("train", "all"):
            files += self.train
        if part != "train":
            files.append(self.validation)
        contents = [self.read(place, name, len(names)) for name in files]
        pixels = np.concatenate([of_file for of_file, _ in contents])
        labels = np.concatenate([of_file for _, of_file in contents])
        title = "test" if part == "val" else part
        return ArraySamples(pixels, labels, names, owner=f"{data.DATASET}:{title}")


def _cifar(
    classes: int, megabytes: int, folder: str, train: tuple[str, ...], validation: str, meta: str, prefix: str
) -> Source:
    published = Published(
        fetcher=f"CIFAR{classes}",
        megabytes=megabytes,
        page="https://www.cs.toronto.edu/~kriz/cifar.html (the python version)",
        folder=folder,
        required=(*train, validation, meta),
        layout=f"{', '.join(train)}    the training split\n{validation}    the validation split\n"
        f"{meta}    the names of the classes",
    )
    return Source(Cifar(published, train, validation, meta, prefix).samples, arrays="cropped", fetches=True)


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10 = _cifar(10, 171, "cifar-10-batches-py", BATCHES, "test_batch", "batches.meta", prefix="")
CIFAR100 = _cifar(100, 169, "cifar-100-python", ("train",), "test", "meta", prefix="fine_")
