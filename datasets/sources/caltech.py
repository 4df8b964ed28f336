"""`caltech101` and `caltech256`: class folders, one of which is clutter. They have no validation split of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from datasets.base import Part, Source, parts_read
from datasets.images import image_source
from datasets.labels import check_class_count, log_unused_outputs
from datasets.sources.files import FileList, FileSamples, split_files
from datasets.sources.imagefolder import class_files, subfolders
from datasets.sources.published import Published
from utils.config.data import DataConfig
from utils.log import log


@dataclass(frozen=True)
class Caltech(Published):
    clutter: str
    """Folder of images that belong to no class"""
    images: int
    """Number of published images, without clutter"""

    def source(self) -> Source:
        return image_source(self.samples, self.check, fetches=True, is_unsplit=lambda _data: True)

    def samples(self, data: DataConfig, part: Part, num_classes: int) -> FileSamples:
        return split_files(self._files(self.existing_folder(data), data, num_classes), data, part)

    def check(self, data: DataConfig, num_classes: int, train: bool) -> None:
        files = self._files(self.fetched_folder(data), data, num_classes)
        log_unused_outputs(len(files.classes), num_classes, f"The data set {data.DATASET}")
        # There is no list of the images, so their number is all that can be checked.
        if len(files.paths) < self.images:
            log.warning("%s has %s images; %s were published.", files.root, f"{len(files.paths):,}", f"{self.images:,}")
        split_files(files, data, parts_read(data, train, ("all",))[-1])

    def _files(self, folder: Path, data: DataConfig, num_classes: int) -> FileList:
        inner = folder / self.required[0]
        classes = [name for name in subfolders(inner) if name != self.clutter]
        if not classes:
            raise self.damaged(folder, f"{inner.name} has no class folders")
        check_class_count(len(classes), num_classes, f"The data set {data.DATASET}")
        files = class_files(inner, classes, data)
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
