"""Writes the tensors of a checkpoint: its folder appears complete or not at all, with hashes of its files."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from utils.errors import UserError
from vitamp.checkpoints import META, NAME, STATE, checkpoints_in, folder_name, update_in
from vitamp.files import write_atomically
from vitamp.meta import FORMAT, META_HASH, hash_of, read_meta

REPLACED = ".tmp-old-"
REMOVED = ".tmp-gone-"
_HIDDEN = rf"\.tmp-(\d+-\d+|(old|gone)-{NAME})"


def write_files(folder: Path, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    write_tensors(folder, tensors)
    with raising_os_errors(folder / STATE), (folder / STATE).open("wb") as file:
        torch.save(state, file)


def write_tensors(folder: Path, tensors: Mapping[str, dict[str, Tensor]]) -> None:
    for name, named in tensors.items():
        plain = {key: value.detach().cpu().contiguous() for key, value in named.items()}
        with raising_os_errors(folder / name):
            safetensors.torch.save_file(plain, folder / name, metadata={"format": "pt"})


@contextlib.contextmanager
def raising_os_errors(path: Path) -> Iterator[None]:
    """Raise the system's error about `path` as OSError: torch and safetensors wrap it in errors of their own."""
    try:
        yield
    except safetensors.SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from None


@contextlib.contextmanager
def new_checkpoint(root: Path, update: int, meta: dict[str, Any]) -> Iterator[Path]:
    """Yield a hidden folder to write a checkpoint's files into; then sync it to the disk and rename it.

    meta.json is added here. An error inside the `with` block removes the hidden folder.
    """
    hidden = root / f".tmp-{update}-{os.getpid()}"
    final = root / folder_name(update)
    root.mkdir(parents=True, exist_ok=True)
    bring_back(root)
    for leftover in root.glob(".tmp-*"):  # of a run that was killed while saving
        if re.fullmatch(_HIDDEN, leftover.name, re.ASCII):
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        hidden.mkdir()
        yield hidden
        meta = {"format": FORMAT, **meta, "files": _sealed(hidden)}
        meta[META_HASH] = hash_of(meta)
        write_atomically(hidden / META, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
        _sync_folder(hidden)
        replaced = _hide(final, REPLACED)
        hidden.rename(final)
        _sync_folder(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        bring_back(root)
        raise


def _sealed(folder: Path) -> dict[str, Any]:
    """Sync the files of a folder to the disk. Returns the size and hash of each."""
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # safetensors makes files that only their owner may read
            shutil.copymode(folder / STATE, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = {"size": path.stat().st_size, "sha256": digest}
    return files


def bring_back(root: Path) -> None:
    """Rename a hidden checkpoint back: a kill between two renames left it hidden, without its replacement."""
    for hidden in root.glob(f"{REPLACED}*"):
        name = root / hidden.name.removeprefix(REPLACED)
        if update_in(name.name) is not None and not name.exists():
            with contextlib.suppress(OSError):
                hidden.rename(name)


def _hide(folder: Path, mark: str) -> Path:
    """Rename a checkpoint before it is removed, so that a kill in between leaves no half of one under its name."""
    hidden = folder.with_name(f"{mark}{folder.name}")
    if folder.exists():
        folder.rename(hidden)
    return hidden


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(handle)


def prune(root: Path, keep: int, last: str, best: str | None, every: int | None = None) -> None:
    """Remove checkpoints up to `last`, but keep the newest `keep` (0: all), the best, and each `every`th epoch's.

    Called once `last` is on the disk.
    """
    newest = update_in(last) or 0
    # A folder without meta.json is not a checkpoint of ours: those get their name once they are complete.
    folders = [path for update, path in checkpoints_in(root).items() if update <= newest and (path / META).exists()]
    kept = {folder.name for folder in folders[-keep:]} | {best}
    for folder in folders:
        if folder.name in kept or folder.is_symlink():
            continue
        with contextlib.suppress(UserError):  # unreadable, perhaps only for now: it may be one of an `every`th epoch
            if every:
                meta = read_meta(folder / META)
                if meta["epoch_finished"] and meta["epoch"] % every == 0:
                    continue
            shutil.rmtree(_hide(folder, REMOVED), ignore_errors=True)
