"""The run's folder: finds it, creates it, checks that it is writable and that no other run is overwritten."""

import contextlib
import errno
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.log import LOG
from utils.program import INSTALLED, ROOT, as_typed, tool
from utils.record.history import METRICS_FILE
from utils.text import redacted
from vitamp import __version__
from vitamp.checkpoints import CHECKPOINTS, INDEX, read_index
from vitamp.files import read_json, write_atomically

CONFIG = "config.yaml"
ABOUT = "run.json"
STARTED = time.strftime("%Y-%m-%dT%H:%M:%S%z")
"""When this process began"""
DATA = "data.json"
"""What was said of the data before training"""
FOLDS = "probe_in_folds"
"""Key under which a run's choices keep the top-1 that its probe had in folds"""
ALIKE = "alike_in_validation"
"""Key under which they keep how many validation images look like training images, of how many compared"""
FILES_OF_A_RUN = (CONFIG, ABOUT, METRICS_FILE, CHECKPOINTS)


def is_run_folder(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in FILES_OF_A_RUN)


def missing_from(folder: Path, best: str | None = None) -> list[str]:
    """Files that a run with a checkpoint has written, and that are no longer in its folder. `best`: its checkpoint."""
    names = [CONFIG, ABOUT, METRICS_FILE, LOG, f"{CHECKPOINTS}/{INDEX}"]
    last = read_index(folder / CHECKPOINTS)["last"]
    for checkpoint in dict.fromkeys((last, best)):
        if checkpoint:
            names.append(f"{CHECKPOINTS}/{checkpoint}")
    return [name for name in names if not (folder / name).exists()]


def is_config_of_run(file: Path) -> bool:
    """Whether a run has written this file, perhaps someone else's; a config.yaml by itself is the user's."""
    return file.name == CONFIG and any((file.parent / name).exists() for name in FILES_OF_A_RUN if name != CONFIG)


def check_output(output: str | None, save: str, resumed: Path | None) -> None:
    """Check, before anything is built, that the run's folder can be used; create nothing."""
    folder = Path(save if output is None else output)
    with os_errors_as_user_errors(folder):  # of a name that is too long, for example
        if output is not None and folder.exists() and not folder.is_dir():
            raise UserError(f"-output {folder}: this is a file; name a folder for the run.")
        is_run = output is not None and is_run_folder(folder)
        begun = (folder / LOG).exists()  # a run that was killed early has no other file
        if is_run and not begun and not is_config_of_run(folder / CONFIG):
            raise UserError(f"-output {folder}: its {CONFIG} is yours, which is not overwritten; name another folder.")
        if is_run and (resumed is None or resumed.resolve() != folder.resolve()):
            raise UserError(
                f"-output {folder}: this folder already contains a run, which is not overwritten. "
                f"Resume it with -resume auto, or name another folder."
            )
        check_writable(folder)


def check_writable(folder: Path) -> None:
    """Check that `folder`, or the nearest parent that exists, is a writable folder."""
    base = folder.absolute()
    while not base.exists():
        base = base.parent
    if not base.is_dir():
        raise UserError(f"{folder}: {base} is a file, so the folder cannot be created; choose another -output or SAVE.")
    if not os.access(base, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: this user cannot write to {base}; choose another -output or SAVE.")


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
    """Turn an OSError while a run starts into a UserError; after the first update, a run continues without the file."""
    try:
        yield
    except OSError as error:
        why = reason(error, folder)
        place = error.filename or folder
        raise UserError(f"{place}: cannot be written ({why}). Fix this, or choose another -output.") from None


def reason(error: OSError, path: Path) -> str:
    """The system's words; of a disk without inodes these are that no space is left, however much is free."""
    words = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        disk = os.statvfs(next(place for place in (path, *path.absolute().parents) if place.exists()))
        if disk.f_files and not disk.f_favail:
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
    """The versions of those of these packages that are installed; by default of the main ones."""
    installed = {}
    for name in packages or ("torch", "torchvision", "timm", "numpy", "pydantic"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def git_state() -> dict[str, Any] | None:
    """The program's git commit, and whether its files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    if INSTALLED:  # a checkout around it is of another project
        return None
    try:
        commit = git("rev-parse", "HEAD")
        changed = bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": changed}


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, redacted(json.dumps(content, indent=2, ensure_ascii=False)) + "\n")


def read_about(folder: Path) -> dict[str, Any]:
    """The content of a run's run.json."""
    return read_json(folder / ABOUT)


def start_of(run: Path | None) -> str:
    """The folder in which a run was started, where relative paths of an earlier version begin; '' if unknown."""
    with contextlib.suppress(UserError, KeyError):
        return str(read_about(run)["folder"]) if run else ""
    return ""


def read_data(folder: Path) -> dict[str, Any]:
    """The content of a run's data.json; empty for a run without image files, and if the file is damaged."""
    with contextlib.suppress(UserError):
        return read_json(folder / DATA)
    return {}


MANY = 10
"""Images that an image looks like, for which copies are an unlikely cause"""


FEWEST_OTHERS, PART_OTHERS = 3, 1 / 3
"""Pairs with two labels, from which on alike images may be no copies: of wrong labels, copies have some too; and how
often they have two labels, as a part of how often less similar ones have"""


def share_a_style(alike: Sequence[int]) -> bool:
    """Whether images that look like others are hardly copies, because most of these have another label.

    `alike`: as `Nearest.counted`, or less of it, as an earlier version counted; empty: not counted.
    """
    return len(alike) > 3 and alike[2] < MANY and 2 * alike[3] < alike[0]


def copies_unknown(alike: Sequence[int]) -> bool:
    """Whether images that look like others may be no copies, by their labels (`alike`: as `share_a_style` takes it).

    A copy has the label of its image. Other images that look alike have two labels about as often as less similar ones.
    """
    if share_a_style(alike) or len(alike) < 5 or alike[2] >= MANY:
        return share_a_style(alike)
    apart, farther = alike[0] - alike[3], alike[0] - alike[4]
    return apart >= FEWEST_OTHERS and apart >= PART_OTHERS * farther


def alike_in_words(alike: Sequence[int], look: str = "validation images look like training images") -> str:
    """What was counted of images that look like others (as `share_a_style` takes it); '' for none."""
    if not alike or not alike[0]:
        return ""
    what = f"{alike[0]:,} of {alike[1]:,} {look}, "
    if copies_unknown(alike) and not share_a_style(alike):
        apart, farther = (100 * (1 - same / alike[0]) for same in alike[3:5])
        return (
            "Whether edited copies are in both splits cannot be told here, where different images look as alike: of "
            f"pairs as similar as copies, {apart:.0f} % have two labels, of the next similar ones {farther:.0f} %"
        )
    if share_a_style(alike):
        return (
            f"{what}but only {alike[3]:,} of them like one of their own label: if labels are right, they share a style "
            "or a background, and are no copies"
        )
    if len(alike) < 3 or alike[2] < MANY:
        return f"{what}as edited copies do, or photographs of one thing or place"
    return (
        f"{what}half of them like {alike[2]:,} or more: too many for copies. Either they are series of one thing, "
        "which DATA.GROUP keeps together, or the model hardly tells such images apart"
    )


KNOWN = 0.05
"""Fraction of the validation images, from which on those known to training make choices on them doubtful"""


def known_to_training(data: dict[str, Any]) -> bool:
    """Whether training knows `KNOWN` of the validation images. `data`: of `read_data`.

    That is those with the bytes of a training image or, if they are more, those that look like one, unless they look
    like so `MANY` that the model may hardly tell them apart, or may be no copies by their labels.
    """
    copies = data.get("copies") or {}
    alike = data.get("alike") or []
    found, of, each = [*alike, 0, 0, 0][:3]
    look = 0 if each >= MANY or copies_unknown(alike) else found
    counts = [(copies.get("found", 0), copies.get("compared", 0)), (look, of)]
    return any(known and known >= KNOWN * compared for known, compared in counts)


def copies_in_words(folder: Path, images: int | None = None, advice: bool = True) -> str:
    """One line for the end of a run or an evaluation, if validation images of the run are also in training.

    `images`: the number of those evaluated; if it is not that of the run's validation split, nothing is said of them.
    `advice`: with the commands that list them, which a warning before training has.
    """
    found = read_data(folder)
    try:
        copies = found["copies"]["found"]
        compared = found["copies"]["compared"]
        alike = found.get("alike") or [0]
        if images not in (None, found["images"]["validation"]):
            return ""
    except (KeyError, TypeError):  # not looked for, or a damaged file
        return ""
    check = f"{tool('check_data')} {shlex.join(['-cfg', str(folder / CONFIG), *found.get('use', ())])}"
    lines = []
    if copies:
        text = f"{copies:,} of {compared:,} validation images are also in training, which raises the metrics"
        lists = f": `{check} -fix exclude.txt` lists them, and DATA.EXCLUDE=exclude.txt trains without them"
        lines.append(f"{text}{lists}." if advice else f"{text}.")
    if alike[0] > copies:
        raises = "" if copies_unknown(alike) else " This may raise the metrics;"
        text = f"{alike_in_words(alike)}.{raises}"
        lines.append(f"{text} `{check} -alike DIR` shows them." if advice else text.replace("metrics;", "metrics."))
    return " ".join(lines)
