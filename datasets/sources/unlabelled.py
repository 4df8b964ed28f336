"""`images`: all images below a folder, without labels, for self-supervised training.

Images in a folder val (or valid, ...) are for validation, images in a folder test are left out, and all others are for
training. Without a folder val, DATA.VAL_FRACTION splits them.
"""

from pathlib import Path

import numpy as np

from datasets.base import SPLIT, UNSPLIT, Part, Parts, Source
from datasets.decoding import ENDINGS, endings_of
from datasets.sources.files import FileSamples, SkippedFiles, data_folder, images_below, split_files, with_progress
from datasets.sources.split import TEST, VALIDATION_NAMES, no_such_part
from utils.config.data import DataConfig
from utils.errors import UserError


def _samples(data: DataConfig, part: Part, _num_classes: int) -> FileSamples:
    """Open a split: the images of its folder, or those that `split_files` chooses. All labels are 0."""
    root = data_folder(data)
    if part == "test" and not (root / TEST).is_dir():
        raise no_such_part(part, root)
    skipped = SkippedFiles()
    paths = sorted(with_progress(images_below(str(root), skipped, endings=endings_of(data))))
    skipped.warn(str(root))
    validation = _validation_folder(root)
    if part != "all":
        # Training has no folder of its own, nor has validation if there is no folder val. Then `folder` is '', and the
        # images are those outside the folders of other splits.
        folder = {"train": "", "val": validation or "", "test": TEST}[part]
        if folder:
            paths = [path for path in paths if path.startswith(f"{folder}/")]
        else:
            other_folders = tuple(f"{name}/" for name in (validation, TEST) if name)
            paths = [path for path in paths if not path.startswith(other_folders)]
        if not paths:
            raise UserError(f"DATA.DATA_PATH (-data_path): {root / folder} has no images ({' '.join(ENDINGS)}).")
    files = FileSamples(root, paths, np.zeros(len(paths), dtype=np.int64), None)
    # With folders, these are the images of the split. Otherwise `split_files` chooses them.
    is_split = validation is not None or part == "test"
    return split_files(files, data, None if is_split else part)


def _validation_folder(root: Path) -> str | None:
    """Return the name of the folder in `root` that has the validation images; None if there is none."""
    return next((name for name in VALIDATION_NAMES if (root / name).is_dir()), None)


def _parts(data: DataConfig) -> Parts:
    return UNSPLIT if _validation_folder(data_folder(data)) is None else SPLIT


SOURCE = Source(_samples, count=lambda *_: 1, parts=_parts, groups=True, shares_list=True, labelled=False)
