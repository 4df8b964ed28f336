"""The run's folder: finds it, creates it, checks that it is writable and that no other run is overwritten."""

import contextlib
import errno
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import UserError
from utils.log import LOG
from utils.program import INSTALLED, ROOT, as_typed
from utils.record.history import METRICS_FILE
from utils.text import redacted
from vitamp import __version__
from vitamp.checkpoints import CHECKPOINTS, INDEX, read_index
from vitamp.files import read_json, write_atomically

CONFIG = "config.yaml"
ABOUT = "run.json"
STARTED = time.strftime("%Y-%m-%dT%H:%M:%S%z")
"""Time at which this process began."""
DATA = "data.json"
"""File with the findings about the data before training."""
FOLDS = "probe_in_folds"
"""Key in a run's choices for the top-1 accuracy that its probe had in folds."""
ALIKE = "alike_in_validation"
"""Key in a run's choices for how many validation images look like training images, of how many compared."""
ALIKE_IMAGES = "alike_images"
"""Key in a run's choices for the indices of these images; they are left out if they are more than MOST_ALIKE."""
MOST_ALIKE = 10_000
FILES_OF_A_RUN = (CONFIG, ABOUT, METRICS_FILE, CHECKPOINTS)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder has a file that a run writes."""
    return any(os.path.exists(folder / name) for name in FILES_OF_A_RUN)


def missing_from(folder: Path, best: str | None = None) -> list[str]:
    """Paths of the files that are missing in the folder of a run that has written a checkpoint.

    best: name of its best checkpoint; None if there is none
    """
    names = [CONFIG, ABOUT, METRICS_FILE, LOG, f"{CHECKPOINTS}/{INDEX}"]
    last = read_index(folder / CHECKPOINTS)["last"]
    for checkpoint in dict.fromkeys((last, best)):  # which may be the same one
        if checkpoint:
            names.append(f"{CHECKPOINTS}/{checkpoint}")
    return [name for name in names if not (folder / name).exists()]


def is_config_of_run(file: Path) -> bool:
    """Whether a file is the config.yaml of a run, perhaps someone else's; a config.yaml alone in a folder is not."""
    return file.name == CONFIG and any((file.parent / name).exists() for name in FILES_OF_A_RUN if name != CONFIG)


def check_output(output: str | None, save: str, resumed: Path | None) -> None:
    """Check, before anything is built, that the run's folder can be used; create nothing.

    output: -output; None for a new folder in `save`
    resumed: folder of the run that is resumed; None without one
    """
    folder = Path(save if output is None else output)
    with os_errors_as_user_errors(folder):  # such as a name that is too long
        if output is not None and folder.exists() and not folder.is_dir():
            raise UserError(f"-output {folder}: this is a file; name a folder for the run.")
        is_run = output is not None and is_run_folder(folder)
        # A folder with a config.yaml alone looks like that of a run, but the file may be the user's. Every run has a
        # log.txt, too, even if it was killed early.
        has_log = (folder / LOG).exists()
        is_config_of_user = is_run and not has_log and not is_config_of_run(folder / CONFIG)
        if is_config_of_user:
            raise UserError(f"-output {folder}: its {CONFIG} is yours, which is not overwritten; name another folder.")
        if is_run and (resumed is None or resumed.resolve() != folder.resolve()):
            raise UserError(
                f"-output {folder}: this folder already contains a run, which is not overwritten. "
                f"Resume it with -resume auto, or name another folder."
            )
        check_writable(folder)


def check_writable(folder: Path) -> None:
    """Check that `folder`, or its nearest parent that exists, is a writable folder."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UserError(
            f"{folder}: {parent} is a file, so the folder cannot be created; choose another -output or SAVE."
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: this user cannot write to {parent}; choose another -output or SAVE.")


def make_folder(output: str | None, save: str, kind: str) -> Path:
    """Create the run's folder: -output itself, or a new folder in SAVE, named by kind and time."""
    try:
        if output is not None:
            folder = Path(output)
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        stem = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1, 100):
            name = stem if number == 1 else f"{stem}-{number}"
            folder = Path(save) / name
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
        raise UserError(f"{save}: too many runs were started in the same second; start this one again.")
    except OSError as error:
        place = Path(output or save)
        raise UserError(f"{place}: the run's folder cannot be created ({reason(error, place)}).") from None


@contextlib.contextmanager
def os_errors_as_user_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a UserError, as is right before the first update.

    After the first update, a run continues without a file that it cannot write.
    """
    try:
        yield
    except OSError as error:
        why = reason(error, folder)
        place = error.filename or folder
        raise UserError(f"{place}: cannot be written ({why}). Fix this, or choose another -output.") from None


def reason(error: OSError, path: Path) -> str:
    """Return the reason of an error about a path, in the system's words.

    If the disk has no free inode, this is added: the system then reports that no space is left, although there is.
    """
    words = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        nearest_existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        disk = os.statvfs(nearest_existing)
        limits_inodes = disk.f_files > 0  # Some file systems have no fixed number of inodes, and report 0.
        if limits_inodes and disk.f_favail == 0:
            words += ": it has no inode for another file; remove files"
    return words


def describe_run(device: str, choices: dict[str, Any], tag: str | None) -> dict[str, Any]:
    """The content of run.json: how this run was started, on which device, with which versions."""
    return {
        "command": as_typed(sys.argv),
        "started": STARTED,
        "folder": os.getcwd(),
        "host": platform.node(),
        "tag": tag,
        "device": device,
        "versions": {"python": platform.python_version(), "vitamp": __version__, **versions()},
        "git": git_state(),
        "choices": choices,
    }


def versions(*packages: str) -> dict[str, str]:
    """Package -> version, of these packages, or of the main ones without arguments; a package may be missing."""
    installed = {}
    for name in packages or ("torch", "torchvision", "timm", "numpy", "pydantic"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def git_state() -> dict[str, Any] | None:
    """Return the program's git commit, and whether its files differ from it; None outside a checkout."""
    if INSTALLED:  # A checkout around an installed program belongs to another project.
        return None
    try:
        commit = _git("rev-parse", "HEAD")
        changed = bool(_git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": changed}


def _git(*arguments: str) -> str:
    """Return the output of a git command in the program's folder."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file of a run, without passwords of URLs."""
    write_atomically(path, redacted(json.dumps(content, indent=2, ensure_ascii=False)) + "\n")


def read_about(folder: Path) -> dict[str, Any]:
    """The content of a run's run.json."""
    return read_json(folder / ABOUT)


def start_of(run: Path | None) -> str:
    """The folder in which a run was started; '' if unknown. Runs of an earlier version save paths relative to it."""
    with contextlib.suppress(UserError, KeyError):
        return str(read_about(run)["folder"]) if run else ""
    return ""


def read_data(folder: Path) -> dict[str, Any]:
    """The content of a run's data.json; empty if the run has none, as without image files, or if it is damaged."""
    with contextlib.suppress(UserError):
        return read_json(folder / DATA)
    return {}


class LookAlikes(NamedTuple):
    """Numbers of images of one split that look like images of another.

    They are in the list `alike` in data.json, which `Nearest.counted` returns. It is empty if nothing was counted, and
    shorter if an earlier version counted.
    """

    images: int = 0
    """How many images look like another one."""
    compared: int = 0
    """How many images were compared."""
    median_others: int = 0
    """How many other images such an image looks like (median)."""
    same_label: int | None = None
    """How many of them have the label of the most similar image."""
    same_label_if_less_similar: int | None = None
    """How many of them have the label of the most similar image among those that do not look alike."""


MANY = 10
"""If an image looks like so many others, they are probably no copies."""
FEWEST_WITH_TWO_LABELS = 3
"""With fewer pairs of two labels, images that look alike are probably copies, some of them with a wrong label."""
FRACTION_WITH_TWO_LABELS = 1 / 3
"""The same limit, as a fraction of the number of pairs of less similar images that have two labels."""


def share_a_style(alike: Sequence[int]) -> bool:
    """Whether images that look like others are probably no copies, because most pairs have two labels.

    alike: the numbers of LookAlikes, or only the first ones
    """
    counts = LookAlikes(*alike)
    if counts.same_label is None or counts.median_others >= MANY:
        return False
    return 2 * counts.same_label < counts.images


def copies_unknown(alike: Sequence[int]) -> bool:
    """Whether images that look like others may be no copies, by their labels.

    A pair of a copy and its original has one label. A pair that merely looks alike often has two labels. So copies are
    doubtful if pairs that look alike have two labels about as often as pairs of less similar images.

    alike: the numbers of LookAlikes, or only the first ones
    """
    if share_a_style(alike):
        return True
    counts = LookAlikes(*alike)
    if counts.same_label is None or counts.same_label_if_less_similar is None or counts.median_others >= MANY:
        return False
    two_labels = counts.images - counts.same_label
    two_labels_if_less_similar = counts.images - counts.same_label_if_less_similar
    least = FRACTION_WITH_TWO_LABELS * two_labels_if_less_similar
    return two_labels >= FEWEST_WITH_TWO_LABELS and two_labels >= least


def may_be_copies(alike: Sequence[int]) -> bool:
    """Whether images that look like others count as their relatives, so that a model may know them.

    They do not if each looks like many others, or if their labels say that they may be no copies.

    alike: the numbers of LookAlikes, or only the first ones
    """
    return LookAlikes(*alike).median_others < MANY and not copies_unknown(alike)


def alike_in_words(alike: Sequence[int], look: str = "validation images look like training images") -> str:
    """Return a sentence, without its full stop, about images that look like others; '' if there are none.

    alike: the numbers of LookAlikes, or only the first ones
    look: which images they are, after their number
    """
    counts = LookAlikes(*alike)
    if counts.images == 0:
        return ""
    beginning = f"{counts.images:,} of {counts.compared:,} {look}, "
    if share_a_style(alike):
        return (
            f"{beginning}but only {counts.same_label:,} of them like one of their own label: if labels are right, they "
            "share a style or a background, and are no copies"
        )
    if copies_unknown(alike):
        same_label, same_label_if_less_similar = alike[3:5]  # Both are known then.
        two_labels = 100 * (1 - same_label / counts.images)
        two_labels_if_less_similar = 100 * (1 - same_label_if_less_similar / counts.images)
        return (
            "Whether edited copies are in both splits cannot be told here, where different images look as alike: of "
            f"pairs as similar as copies, {two_labels:.0f} % have two labels, of the next similar ones "
            f"{two_labels_if_less_similar:.0f} %"
        )
    if counts.median_others < MANY:
        return f"{beginning}as edited copies do, or photographs of one thing or place"
    return (
        f"{beginning}half of them like {counts.median_others:,} or more: too many for copies. Either they are series "
        "of one thing, which DATA.GROUP keeps together, or the model hardly tells such images apart"
    )


KNOWN = 0.05
"""If training knows this fraction of the validation images, they are no good for choosing between models."""


def known_to_training(data: dict[str, Any]) -> bool:
    """Whether training knows the fraction KNOWN of the validation images, or more.

    An image is known if it has the bytes of a training image, or if it looks like one. Images that look alike do not
    count if they are probably, or by their labels possibly, no copies. Either number may reach the fraction.

    data: the content of data.json
    """
    copies = data.get("copies") or {}
    alike = data.get("alike") or []
    counts = LookAlikes(*alike)
    look_alike = counts.images
    if not may_be_copies(alike):
        look_alike = 0
    pairs = [(copies.get("found", 0), copies.get("compared", 0)), (look_alike, counts.compared)]
    return any(known and known >= KNOWN * compared for known, compared in pairs)
