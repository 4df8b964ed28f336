"""Images that training and validation share through symbolic links."""

from __future__ import annotations

import os

from datasets.base import Samples
from utils.log import log
from utils.text import counted


def warn_of_links(train: Samples | None, validation: Samples | None) -> None:
    """Warn of validation images that are the same files as training images. None stands for a split in memory."""
    if train is None or validation is None or not (train.links or validation.links):
        return  # without links, a file is found once
    trained = {file: index for index, file in enumerate(_files(train)) if file}
    shared = [(trained[file], index) for index, file in enumerate(_files(validation)) if file in trained]
    if shared:
        first, same = shared[0]
        log.warning(
            "Because of %s, %d of %d validation images are the same files as training images (%s is %s): the "
            "validation accuracy is too high. Remove the links, or list such images in DATA.EXCLUDE.",
            counted(max(train.links, validation.links), "link"),
            len(shared),
            len(validation),
            validation.name(same),
            train.name(first),
        )


def _files(samples: Samples) -> list[tuple[int, int] | None]:
    """Device and inode of each image, links followed; None if it cannot be read. `os.path.realpath` is much slower."""
    return [_file(samples.name(index)) for index in range(len(samples))]


def _file(path: str) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
