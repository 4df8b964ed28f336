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
"""Names of the hidden folders of this module: of one that is written, replaced or removed"""


def write_files(folder: Path, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    """Write all files of a checkpoint but meta.json. `tensors`: by the name of their file, then by their own name."""
    write_tensors(folder, tensors)
    with raising_os_errors(folder / STATE), (folder / STATE).open("wb") as file:
        torch.save(state, file)


def write_tensors(folder: Path, tensors: Mapping[str, dict[str, Tensor]]) -> None:
    """Write one safetensors file per entry of `tensors`: file name -> tensors by name."""
    for file_name, tensors_of_file in tensors.items():
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors_of_file.items()}
        with raising_os_errors(folder / file_name):
            safetensors.torch.save_file(on_host, folder / file_name, metadata={"format": "pt"})


@contextlib.contextmanager
def raising_os_errors(path: Path) -> Iterator[None]:
    """Raise an error of the system, such as a full disk, as OSError with `path`.

    safetensors and torch raise errors of other classes instead: SafetensorError, with the number of the system's error
    only in its text; and RuntimeError, with the OSError as its context.
    """
    try:
        yield
    except safetensors.SafetensorError as error:
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from None
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from None


@contextlib.contextmanager
def new_checkpoint(root: Path, update: int, meta: dict[str, Any]) -> Iterator[Path]:
    """Yield a hidden folder to write a checkpoint's files into; then sync it to the disk and rename it.

    `meta` is completed by the files' hashes and written to meta.json. The folder replaces an earlier checkpoint of
    this update. An error, also inside the `with` block, removes the hidden folder and keeps that earlier checkpoint.
    """
    hidden = root / f".tmp-{update}-{os.getpid()}"
    final = root / folder_name(update)
    root.mkdir(parents=True, exist_ok=True)

    # A run that was killed while saving may have left hidden folders. Complete checkpoints among them are restored.
    bring_back(root)
    for leftover in root.glob(".tmp-*"):
        if re.fullmatch(_HIDDEN, leftover.name, re.ASCII):
            shutil.rmtree(leftover, ignore_errors=True)

    try:
        hidden.mkdir()
        yield hidden  # the caller writes the files
        meta = {"format": FORMAT, **meta, "files": _sync_and_hash(hidden)}
        meta[META_HASH] = hash_of(meta)
        write_atomically(hidden / META, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
        _sync_folder(hidden)
        # If the process is killed between the two renames, the next call of `bring_back` restores the replaced one.
        replaced = _hide(final, REPLACED)
        hidden.rename(final)
        _sync_folder(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        bring_back(root)
        raise


def _sync_and_hash(folder: Path) -> dict[str, Any]:
    """Sync all files of a folder to the disk. Returns the size and hash of each, by its name.

    All files get the permissions of state.pt, because safetensors makes files that only their owner may read.
    """
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # a file system without permissions
            shutil.copymode(folder / STATE, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = {"size": path.stat().st_size, "sha256": digest}
    return files


def bring_back(root: Path) -> None:
    """Rename hidden checkpoints back that have no replacement.

    A checkpoint is hidden before a newer one of the same update takes its name. A process that is killed in between
    leaves it hidden.
    """
    for hidden in root.glob(f"{REPLACED}*"):
        checkpoint = root / hidden.name.removeprefix(REPLACED)
        if update_in(checkpoint.name) is not None and not checkpoint.exists():
            with contextlib.suppress(OSError):
                hidden.rename(checkpoint)


def _hide(folder: Path, prefix: str) -> Path:
    """Put `prefix` before the name of a checkpoint that is about to be removed, and return the new path.

    Removing takes a while. If the process is killed meanwhile, no incomplete checkpoint is left under the old name.
    A folder that does not exist is no error: there is nothing to rename then.
    """
    hidden = folder.with_name(f"{prefix}{folder.name}")
    if folder.exists():
        folder.rename(hidden)
    return hidden


def _sync_folder(folder: Path) -> None:
    """Sync the list of a folder's files to the disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(handle)


def prune(root: Path, keep: int, last: str, best: str | None, every: int | None = None) -> None:
    """Remove old checkpoints once the checkpoint named `last` is on the disk.

    Of the checkpoints up to `last`, the newest `keep` stay (0: all), the one named `best`, and those saved at the end
    of each `every`th epoch. Newer ones than `last` stay as well.
    """
    newest = update_in(last) or 0
    # A folder without meta.json is not a checkpoint of ours: those get their name once they are complete.
    folders = [path for update, path in checkpoints_in(root).items() if update <= newest and (path / META).exists()]
    names_to_keep = {folder.name for folder in folders[-keep:]} | {best}  # all folders if `keep` is 0
    for folder in folders:
        if folder.name in names_to_keep or folder.is_symlink():
            continue
        # An unreadable meta.json raises UserError. The checkpoint stays: it may be one of an `every`th epoch.
        with contextlib.suppress(UserError):
            if every:
                meta = read_meta(folder / META)
                if meta["epoch_finished"] and meta["epoch"] % every == 0:
                    continue
            hidden = _hide(folder, REMOVED)
            shutil.rmtree(hidden, ignore_errors=True)
