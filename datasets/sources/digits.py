"""`digits`: the 1,797 handwritten digits (8 x 8, grey) of scikit-learn: real data without a download.

Crop and flip do not apply to them: an 8 x 8 digit has no margin to crop, and a mirrored digit is another digit or none.
SHIFT, ZOOM and ROTATE do apply.
"""

import gzip
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

from datasets.base import UNSPLIT, Part, Source
from datasets.labels import check_class_count
from datasets.memory import ArraySamples
from datasets.sources.split import check_fold, no_such_part, split, split_by_fold
from utils.config.data import DataConfig
from utils.errors import UserError

CLASSES = [str(digit) for digit in range(10)]
SIDE = 8
BRIGHTEST = 16
VALIDATION_FRACTION = 0.2


@cache  # both splits are in one file
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read the pixels (1797 x 8 x 8, uint8, 0..255) and labels from scikit-learn's file, without importing it.

    Each line of the file has the 64 grey values of a digit, from 0 to BRIGHTEST, and its label.
    """
    spec = importlib.util.find_spec("sklearn")
    folders = spec.submodule_search_locations if spec else None
    file = Path(folders[0]) / "datasets" / "data" / "digits.csv.gz" if folders else None
    if file is None or not file.is_file():
        raise UserError("DATA.DATASET digits: scikit-learn is missing. Run: pip install --force-reinstall scikit-learn")
    with gzip.open(file, "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",")
    pixels = np.rint(table[:, :-1] * (255 / BRIGHTEST)).astype(np.uint8)
    return pixels.reshape(-1, SIDE, SIDE), table[:, -1].astype(np.int64)


def _samples(data: DataConfig, part: Part, num_classes: int) -> ArraySamples:
    """Open a split of the digits. It is the same for every seed, unless DATA.FOLD divides them."""
    check_class_count(len(CLASSES), num_classes, "The data set digits")
    pixels, labels = read_digits()
    check_fold(data, len(labels))
    if data.fold is not None:
        train, validation = split_by_fold(labels, data.fold, data.SPLIT_SEED)
    else:
        train, validation = split(labels, VALIDATION_FRACTION, seed=0, purpose="digits")
    if part == "test":
        raise no_such_part(part, "the data set digits")
    if part == "all":
        indices = np.concatenate([train, validation])
    else:
        indices = train if part == "train" else validation
    return ArraySamples(pixels[indices, :, :, None], labels[indices], CLASSES, "digits")


SOURCE = Source(_samples, arrays="whole", parts=lambda _: UNSPLIT, reads_path=False)
