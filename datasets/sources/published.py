"""Published data sets that torchvision can download: caltech101, caltech256, cifar10 and cifar100."""

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
    """Download the folder `target` unless it exists.

    `fetch` is called with a temporary folder, in which it creates a folder with the name of `target`. That one is
    renamed at the end, so `target` is complete or absent. Any number of processes may call this at once: one downloads
    and the others wait. `by_hand` ends the message of a failure; it says how to get the data set otherwise.
    """
    scratch = target.parent / f".{target.name}.part"
    timeout_before = socket.getdefaulttimeout()  # set again at the end
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with process_lock(target.parent / f".{target.name}.lock", f"fetches {target}"):
            if target.exists():
                return
            if scratch.exists():
                # A process that is still downloading would hold the lock, so this one died.
                log.warning("An earlier download was interrupted: removing %s and starting again.", scratch)
                shutil.rmtree(scratch)
            log.info("Fetching %s.", target)
            scratch.mkdir()
            try:
                socket.setdefaulttimeout(STALLED_AFTER)
                fetch(scratch)  # creates the folder scratch / target.name
                for path in (scratch / target.name).iterdir():
                    if path.is_file() and path.name.endswith(ARCHIVES):
                        path.unlink()  # unpacked by now
                os.replace(scratch / target.name, target)
            except Exception as error:  # the network, the disk and archives have errors of many types
                reason = str(error) or type(error).__name__
                raise UserError(f"DATA.DOWNLOAD: {target.name} could not be fetched: {reason}. {by_hand}") from None
            finally:
                socket.setdefaulttimeout(timeout_before)
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{target} cannot be made: {error}. {by_hand}") from None


@dataclass(frozen=True)
class Published:
    """Facts about a published data set, with which its folder is found, downloaded and checked."""

    fetcher: str
    """Name of the class in torchvision.datasets that downloads it"""
    megabytes: int
    """Size of the download"""
    page: str
    """Web page where the user can download it by hand"""
    folder: str
    """Name of its folder in DATA_PATH, as torchvision names it"""
    required: tuple[str, ...]
    """Files and folders that its folder must contain"""
    layout: str
    """Lines that describe the contents of its folder, for error messages"""

    def folder_of(self, data: DataConfig) -> Path:
        """Find the folder of the data set, and download it first if it is missing and DATA.DOWNLOAD allows it.

        It is a folder in DATA_PATH, or DATA_PATH itself. Raises UserError if it is missing or incomplete.
        """
        if data.DOWNLOAD and data.DATA_PATH is not None:
            root = Path(data.DATA_PATH).expanduser()
            if self._find(root) is None:
                import torchvision.datasets

                layout = self._expected_layout(root)
                by_hand = f"Try again, or fetch it yourself from {self.page} and unpack it. {layout}"
                fetcher = getattr(torchvision.datasets, self.fetcher)  # a class whose constructor downloads
                fetch_once(root / self.folder, lambda scratch: fetcher(str(scratch), download=True), by_hand)
        root = data_folder(data)  # raises UserError without DATA_PATH
        folder = self._find(root)
        if folder is None:
            raise UserError(
                f"DATA.DATA_PATH (-data_path): there is no {data.DATASET} in {root}. {self._expected_layout(root)}\n"
                f"DATA.DOWNLOAD=true fetches it ({self.megabytes:,} MB)."
            )
        for name in self.required:
            if not in_any_case(folder, name).exists():
                raise self.damaged(folder, f"there is no {name}")
        return folder

    def damaged(self, folder: Path, reason: str) -> UserError:
        """Make the error for a data set that is incomplete or damaged."""
        return UserError(
            f"{folder} is incomplete or damaged: {reason}. {self._expected_layout(folder.parent)}\n"
            f"Remove the folder, and DATA.DOWNLOAD=true fetches it again ({self.megabytes:,} MB)."
        )

    def _find(self, root: Path) -> Path | None:
        """Return the folder of the data set: one in `root`, or `root` itself; None if it is neither."""
        folder = in_any_case(root, self.folder)
        if folder.is_dir():
            return folder
        is_root = root.name.lower() == self.folder or all(in_any_case(root, name).exists() for name in self.required)
        return root if is_root and root.is_dir() else None

    def _expected_layout(self, root: Path) -> str:
        """Describe the files and folders that should be below `root`, for an error message."""
        lines = "\n".join(f"  {root}/{self.folder}/{line}" for line in self.layout.splitlines())
        return f"Expected layout:\n{lines}"


def _caltech(classes: int, clutter: str, example: str, megabytes: int, record: str) -> Source:
    """Make the source of Caltech-101 or Caltech-256, which have one folder per class and no splits.

    `clutter`: the folder of images that belong to no class, which is left out. `example`: the path of an image, for
    the layout in messages. `record`: number of the page with the download.
    """
    objects_name = f"{classes}_ObjectCategories"
    published = Published(
        fetcher=f"Caltech{classes}",
        megabytes=megabytes,
        page=f"https://data.caltech.edu/records/{record}",
        folder=f"caltech{classes}",
        required=(objects_name,),
        layout=f"{objects_name}/{example}",
    )

    def samples(data: DataConfig, part: Part, num_classes: int) -> FileSamples:
        """Open a split, which the program makes of all images."""
        folder = published.folder_of(data)
        objects = in_any_case(folder, objects_name)
        class_names = [name for name in subfolders(objects) if name != clutter]
        check_class_count(len(class_names), num_classes, f"The data set {data.DATASET}")
        files = class_files(objects, class_names)
        if len(files) == 0:
            raise published.damaged(folder, f"{objects_name} has no images in class folders")
        return split_files(files, data, part)

    return Source(samples, fetches=True, parts=lambda _: UNSPLIT)  # comes without splits


CALTECH101 = _caltech(101, "BACKGROUND_Google", "accordion/image_0001.jpg", 137, "20086")
CALTECH256 = _caltech(256, "257.clutter", "001.ak47/001_0001.jpg", 1183, "20087")


SHAPE = (3, 32, 32)
"""Channels, height and width of an image of CIFAR"""


@dataclass(frozen=True)
class Cifar:
    """Reads CIFAR-10 or CIFAR-100, whose files are pickled tables of arrays. The pickles run no code here."""

    published: Published
    train: tuple[str, ...]
    """Files of the training split"""
    validation: str
    """File of the validation split, which its publisher calls test"""
    meta: str
    """File of the names of the classes"""
    prefix: str
    """Beginning of the keys in the files"""

    def entries(self, folder: Path, name: str, *keys: str) -> list[Any]:
        """Read the values of these keys from a file. UserError if it is damaged, or not as its publisher made it."""
        try:
            with open(in_any_case(folder, name), "rb", opener=only_regular) as opened:
                table = ArraysOnly(opened, encoding="latin1").load()
            # A newer Python may have stored the text of Python 2 as bytes.
            table = {key.decode() if isinstance(key, bytes) else key: value for key, value in table.items()}
            return [table[key] for key in keys]
        except Refused as refused:
            raise UserError(
                f"{folder / name}: {refused}. No CIFAR file of its publisher does this: another program wrote or "
                "changed it. Nothing was run. Remove the data set and fetch it from its publisher."
            ) from None
        except Exception as error:  # a damaged file can raise nearly anything
            reason = f"{name} cannot be read ({type(error).__name__}: {error})"
            raise self.published.damaged(folder, reason) from None

    def read(self, folder: Path, name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the pixels (N x H x W x C) and labels of one file. UserError unless labels are below `classes`."""
        pixels, labels = map(np.asarray, self.entries(folder, name, "data", f"{self.prefix}labels"))
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), int(np.prod(SHAPE))) or not len(labels):
            raise self.published.damaged(folder, f"{name} does not hold images of 32 x 32")
        is_whole_number = labels.dtype.kind in "iu"
        if not is_whole_number or labels.min() < 0 or labels.max() >= classes:
            raise self.published.damaged(folder, f"{name} has labels beyond its {classes} classes")
        return pixels.reshape(-1, *SHAPE).transpose(0, 2, 3, 1), labels.astype(np.int64)

    def samples(self, data: DataConfig, part: Part, num_classes: int) -> ArraySamples:
        """Open a split, with all of its images in memory; `val` and `test` are both the publisher's test split."""
        folder = self.published.folder_of(data)
        (stored_names,) = self.entries(folder, self.meta, f"{self.prefix}label_names")
        class_names = [name.decode() if isinstance(name, bytes) else str(name) for name in stored_names]
        check_class_count(len(class_names), num_classes, f"The data set {data.DATASET}")
        files = []
        if part in ("train", "all"):
            files += self.train
        if part != "train":
            files.append(self.validation)
        contents = [self.read(folder, file, len(class_names)) for file in files]
        pixels = np.concatenate([file_pixels for file_pixels, _ in contents])
        labels = np.concatenate([file_labels for _, file_labels in contents])
        title = "test" if part == "val" else part  # of the publisher's split, with which the images' names begin
        return ArraySamples(pixels, labels, class_names, owner=f"{data.DATASET}:{title}")


def _cifar(
    classes: int, megabytes: int, folder: str, train: tuple[str, ...], validation: str, meta: str, prefix: str
) -> Source:
    """Make the source of CIFAR-10 or CIFAR-100, whose images are held in memory.

    `megabytes`: size of the download. `folder`: name of the folder in DATA_PATH. `train`, `validation`, `meta`: files
    of the training images, of the validation images, and of the names of the classes. `prefix`: beginning of the keys
    in the files.
    """
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
