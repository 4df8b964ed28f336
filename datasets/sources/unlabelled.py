"""`images`: all images below a folder, without labels, for learning without them.

Those in a folder val (or valid, ...) are for validation, those in a folder test are left out, and all others are for
training. Without a folder val, DATA.VAL_FRACTION splits them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datasets.base import Part, Parts, Source, comes_split, comes_unsplit, parts_read
from datasets.decoding import ENDINGS
from datasets.images import open_images
from datasets.sources.files import FileList, FileSamples, SkippedFiles, data_folder, images_below, split_files
from datasets.sources.split import TEST, VALIDATION_NAMES, no_such_part
from utils.config.data import DataConfig
from utils.errors import UserError


def _samples(data: DataConfig, part: Part, _num_classes: int) -> FileSamples:
    root = data_folder(data)
    if part == "test" and not (root / TEST).is_dir():
        raise no_such_part(part, root)
    skipped = SkippedFiles()
    paths = sorted(images_below(str(root), skipped))
    skipped.warn(str(root))
    validation = _validation_folder(root)
    if part != "all":  # without a folder for validation, it is taken from those of the training
        folder = {"train": None, "val": validation, "test": TEST}[part]
        paths = [path for path in paths if _split_of(path, validation) == folder]
        if not paths:
            where = root if folder is None else root / folder
            raise UserError(
                f"DATA.DATA_PATH (-data_path): {where} has no images (image files end in {' '.join(ENDINGS)})."
            )
    files = FileList(root, paths, np.zeros(len(paths), dtype=np.int64), range(1))
    return split_files(files, data, part) if validation is None and part != "test" else files.samples()


def _split_of(path: str, validation: str | None) -> str | None:
    """The folder of a split that an image is in; None: it is for training."""
    folder = path.partition("/")[0] if "/" in path else None
    return folder if folder in (validation, TEST) else None


def _validation_folder(root: Path) -> str | None:
    return next((name for name in VALIDATION_NAMES if (root / name).is_dir()), None)


def _check(data: DataConfig, num_classes: int, train: bool) -> None:
    for part in parts_read(data, train, comes_unsplit(data)):
        _samples(data, part, num_classes)


def _count(_data: DataConfig, _train: bool) -> int:
    return 1


def _parts(data: DataConfig) -> Parts:
    return comes_unsplit(data) if _validation_folder(data_folder(data)) is None else comes_split(data)


SOURCE = Source(open_images(_samples, _parts), _check, count=_count, parts=_parts, groups=True, labelled=False)
