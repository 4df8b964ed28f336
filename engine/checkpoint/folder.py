"""Checkpoints on disk: one folder each, which appears complete or not at all, with hashes that reveal damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from engine.checkpoint.fields import FORMAT, META_HASH, hash_of, read_meta
from engine.checkpoint.shard_files import JoinedShards, files_of
from utils.errors import UserError
from utils.files import parse_json, write_atomically
from utils.record.weight_sets import PLAIN

WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar", ".npz", ".ckpt")
REPLACED, REMOVED = ".tmp-old-", ".tmp-gone-"
_NAME = r"step-(\d{9}|[1-9]\d{9,})"
_HIDDEN = rf"\.tmp-(\d+-\d+|(old|gone)-{_NAME})"
MODEL, STATE, META, INDEX = PLAIN.file, "state.pt", "meta.json", "index.json"


@dataclass(frozen=True)
class Checkpoint:
    """Folder of a checkpoint, with the content of its meta.json."""

    folder: Path
    meta: dict[str, Any]

    def has(self, name: str) -> bool:
        """Whether the file `name` or its shards are there."""
        return bool(files_of(name, self.meta["files"]))

    def tensors(self, name: str = MODEL) -> dict[str, Tensor]:
        """All tensors of the file `name` or its shards."""
        return dict(self.lazy_tensors(name))

    def lazy_tensors(self, name: str = MODEL) -> JoinedShards:
        """`tensors`, each read from disk when it is accessed."""
        try:
            return JoinedShards([self.folder / file for file in files_of(name, self.meta.get("files", ())) or [name]])
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{self.folder / name}: cannot be read ({error}).") from None

    def state(self, mapped: bool = False) -> dict[str, Any]:
        """Content of state.pt. `mapped`: its tensors are memory-mapped, and read when they are used."""
        try:
            return torch.load(self.folder / STATE, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # a damaged file makes the unpickler raise nearly anything
            raise UserError(f"{self.folder / STATE}: cannot be read ({type(error).__name__}).") from None


def folder_name(update: int) -> str:
    return f"step-{update:09d}"


def update_in(name: str) -> int | None:
    """The update in a name that `folder_name` makes; None for any other, such as a user's `step-000000005.mine`."""
    match = re.fullmatch(_NAME, name, re.ASCII)
    return int(match[1]) if match else None


def checkpoints_in(root: Path) -> dict[int, Path]:
    """A run's checkpoints by their update, oldest first. Folders under names of the user's own are not among them."""
    found = {
        update: path for path in root.glob("step-*") if (update := update_in(path.name)) is not None and path.is_dir()
    }
    return dict(sorted(found.items()))


def place_of(path: Path) -> tuple[Path | None, Path]:
    """The checkpoint that `path` is, or is in, if there is one; and the folder of a run's checkpoints."""
    folder = path.parent if path.is_file() else path
    if (folder / META).exists() or update_in(folder.name) is not None:
        return folder, folder.parent
    return None, folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


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
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    except RuntimeError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from None


@contextlib.contextmanager
def new_checkpoint(root: Path, update: int, meta: dict[str, Any]) -> Iterator[Path]:
    """Yield a hidden folder to write a checkpoint's files into; then sync it to the disk and rename it.

    meta.json is added here. An error inside the `with` block removes the hidden folder.
    """
    hidden, final = root / f".tmp-{update}-{os.getpid()}", root / folder_name(update)
    root.mkdir(parents=True, exist_ok=True)
    bring_back(root)
    for leftover in root.glob(".tmp-*"):  # of a run that was killed while saving
        if re.fullmatch(_HIDDEN, leftover.name, re.ASCII):
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        hidden.mkdir()
        yield hidden
        files = {path.name: _seal(path) for path in sorted(hidden.iterdir())}
        meta = {"format": FORMAT, **meta, "files": files}
        meta[META_HASH] = hash_of(meta)
        with (hidden / META).open("w", encoding="utf-8") as file:
            file.write(json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(hidden)
        replaced = _hide(final, REPLACED)
        hidden.rename(final)
        _sync_folder(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        bring_back(root)
        raise


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


def _seal(path: Path) -> dict[str, Any]:
    """Sync a file to the disk, and return its size and hash."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_index(root: Path) -> dict[str, Any]:
    """Names of the last and the best checkpoint, where index.json has them."""
    index: Any = None
    with contextlib.suppress(OSError, ValueError):
        index = parse_json((root / INDEX).read_text(encoding="utf-8"))
    names = index if isinstance(index, dict) else {}
    return {key: names[key] if isinstance(names.get(key), str) else None for key in ("last", "best")}


def write_index(root: Path, last: str, best: str | None) -> None:
    write_atomically(root / INDEX, json.dumps({"last": last, "best": best}, indent=2) + "\n")


def best_of(root: Path, update: int | None) -> str | None:
    """Name of the best existing checkpoint: that of `update`, or else the best one before it."""
    newest = folder_name(update) if update is not None else None
    existing = (name for name in (newest, read_index(root)["best"]) if name is not None and (root / name).is_dir())
    return next(existing, None)


def prune(root: Path, keep: int, last: str, best: str | None, every: int | None = None) -> None:
    """Remove checkpoints up to `last`, but keep the newest `keep` (0: all), the best, and each `every`th epoch's.

    Called once `last` is on the disk.
    """
    newest = update_in(last) or 0
    # A folder without meta.json is not a checkpoint of ours: those get their name once they are complete.
    folders = [path for update, path in checkpoints_in(root).items() if update <= newest and (path / META).exists()]
    kept = {folder.name for folder in folders[-keep:]} | {best}
    for folder in folders:
        if folder.name not in kept and not folder.is_symlink() and not (every and _ends_kept_epoch(folder, every)):
            shutil.rmtree(_hide(folder, REMOVED), ignore_errors=True)


def _ends_kept_epoch(folder: Path, every: int) -> bool:
    try:
        meta = inspect(folder).meta
    except UserError:  # damaged: not worth keeping
        return False
    return meta["epoch_finished"] and meta["epoch"] % every == 0


def inspect(folder: Path) -> Checkpoint:
    """Read a checkpoint's meta.json, and check that its files exist with the recorded sizes."""
    meta = read_meta(folder / META)
    files = meta["files"]
    try:
        wrong_size = [name for name, seal in files.items() if (folder / name).stat().st_size != seal["size"]]
    except FileNotFoundError as error:
        raise UserError(f"{folder}: incomplete checkpoint, {Path(error.filename).name} is missing.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read ({type(error).__name__}: {error}).") from None
    if not files_of(MODEL, files) or STATE not in files:
        raise UserError(f"{folder / META}: damaged, the field 'files' does not name {MODEL} and {STATE}.")
    if update_in(folder.name) not in (None, meta["update"]):
        raise UserError(
            f"{folder}: damaged, {META} is of update {meta['update']}. If you renamed the folder, name it "
            f"{folder_name(meta['update'])} again."
        )
    if wrong_size:
        raise UserError(f"{folder}: damaged, {', '.join(wrong_size)} does not have the size that was written.")
    return Checkpoint(folder, meta)


def verify(checkpoint: Checkpoint) -> Checkpoint:
    """Check the hashes of all files: a flipped bit is an error."""
    for name, seal in checkpoint.meta["files"].items():
        with (checkpoint.folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != seal["sha256"]:
                raise UserError(f"{checkpoint.folder}: damaged, the contents of {name} are not what was written.")
    return checkpoint
