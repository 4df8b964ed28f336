"""The run's folder: where it lies, that it may be written, and that no other run is overwritten."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import write_whole

MARKS_OF_A_RUN = ("config.yaml", "run.json", "metrics.jsonl", "checkpoints")


def holds_a_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in MARKS_OF_A_RUN)


def run_of(path: Path) -> Path | None:
    """The run's folder that a checkpoint, a file in it, or the run's folder itself belongs to."""
    # Not further up than that: a folder called `checkpoints` may lie beside a checkpoint that stands alone.
    home = path.parent if path.is_file() else path
    if (home / "checkpoints").is_dir():
        return home
    here = home.absolute()
    for folder in (here, here.parent):
        if folder.name == "checkpoints":
            return folder.parent
    return None


def check_output(output: str | None, save: str, resumed: Path | None) -> None:
    """Stop before anything is built if the folder could not be used; creates nothing."""
    if output is None:
        _check_writable(Path(save))
        return
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"-output {folder}: this is a file; name a folder for the run.")
    if holds_a_run(folder) and (resumed is None or resumed.resolve() != folder.resolve()):
        raise UserError(
            f"-output {folder}: a run already lies there, and it is not overwritten. "
            f"Go on with it by -resume auto, or name another folder."
        )
    _check_writable(folder)


def _check_writable(folder: Path) -> None:
    """The nearest folder that exists must let us write."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{folder}: {place} is a file, so no folder can be made there; choose another -output or SAVE.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: {place} cannot be written to by this user; choose another -output or SAVE.")


def make_folder(output: str | None, save: str, kind: str) -> Path:
    """The run's own folder: -output itself, or a new one named by kind and time in SAVE."""
    try:
        if output is not None:
            folder = Path(output)
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        stem = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ("", *(f"-{n}" for n in range(2, 100))):
            folder = Path(save) / (stem + suffix)
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
        raise UserError(f"{save}: too many runs were started in this second.")
    except OSError as error:
        raise UserError(f"{output or save}: the run's folder cannot be made ({error.strerror}).") from None


@contextlib.contextmanager
def nothing_trained_yet(folder: Path) -> Iterator[None]:
    """What the disk refuses before the first update is for the user to mend; later, a run goes on without."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: cannot be written ({error.strerror}). Mend that, or name another -output."
        ) from None


def describe_run(device: str, choices: dict[str, Any], tag: str | None) -> dict[str, Any]:
    """What run.json says: how this run was started, on what, with which versions."""
    return {
        "command": shlex.join([sys.executable, *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "folder": os.getcwd(),
        "host": platform.node(),
        "tag": tag,
        "device": device,
        "versions": {"python": platform.python_version(), **versions()},
        "git": git_state(),
        "choices": choices,
    }


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "torchvision", "timm", "numpy", "pydantic"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the program and whether its files differ from it; None outside a checkout."""

    def ask(*words: str) -> str:
        here = Path(__file__).resolve().parent
        answer = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
        return answer.stdout.strip()

    try:
        commit, changed = ask("rev-parse", "HEAD"), bool(ask("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": changed}


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
