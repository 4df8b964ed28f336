"""Images that training and validation share through symbolic links."""

from __future__ import annotations

import os
from functools import cache

from datasets.base import Samples
from utils.log import log


def warn_of_links(train: Samples | None, validation: Samples | None) -> None:
    """Warn of validation images that are the same files as training images. None stands for a split in memory."""
    if train is None or validation is None or not (train.links or validation.links):
        return  # without links, a file is found once
    trained = {file: index for index, file in enumerate(_files(train))}
    shared = [(trained[file], index) for index, file in enumerate(_files(validation)) if file in trained]
    if shared:
        first, same = shared[0]
        log.warning(
            "Because of %d links, %d of %d validation images are the same files as training images (%s is %s): the "
            "validation accuracy is too high. Remove the links, or list such images in DATA.EXCLUDE.",
            max(train.links, validation.links),
            len(shared),
            len(validation),
            validation.name(same),
            train.name(first),
        )


def _files(samples: Samples) -> list[str]:
    """Each image's file, behind all links."""
    real_folder = cache(os.path.realpath)
    files = []
    for index in range(len(samples)):
        folder, name = os.path.split(samples.name(index))
        file = os.path.join(real_folder(folder), name)
        files.append(os.path.realpath(file) if os.path.islink(file) else file)
    return files
