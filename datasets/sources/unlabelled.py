"""`images`: all images below a folder, without labels, for learning without them. Split by DATA.VAL_FRACTION."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from datasets.base import Part, parts_read
from datasets.decoding.stored import ENDINGS
from datasets.images import image_source
from datasets.sources.files import FileList, FileSamples, data_folder, split_files
from datasets.sources.walk import SkippedFiles, images_below
from utils.config.data import DataConfig
from utils.errors import UserError


def _files(data: DataConfig) -> FileList:
    root = data_folder(data)
    skipped = SkippedFiles()
    paths = sorted(images_below(str(root), skipped))
    if not paths:
        raise UserError(f"DATA.DATA_PATH (-data_path): {root} has no images (image files end in {' '.join(ENDINGS)}).")
    skipped.warn(str(root))
    return FileList(root, paths, np.zeros(len(paths), dtype=np.int64), range(1), skipped.links)


def _samples(data: DataConfig, part: Part, _num_classes: int) -> FileSamples:
    return split_files(_files(data), data, part)


def _check(data: DataConfig, _num_classes: int, train: bool) -> None:
    split_files(_files(data), data, parts_read(data, train, ("all",))[-1])


SOURCE = replace(
    image_source(
        _samples,
        _check,
        count=lambda _data, _train: 1,
        is_unsplit=lambda _data: True,
        parts=lambda _data: ["all"],
        groups=True,
    ),
    labelled=False,
)
