"""Checkpoints on disk: a folder each, that appears whole or not at all, and whose damage is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from engine.checkpoint.fields import FORMAT, read_meta
from engine.checkpoint.shard_files import Joined, files_of
from utils.errors import UserError
from utils.files import write_atomically

WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar", ".npz", ".ckpt")
REPLACED, REMOVED = ".tmp-old-", ".tmp-gone-"
MODEL, EMA, STATE, META, INDEX = "model.safetensors", "ema.safetensors", "state.pt", "meta.json", "index.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint that was looked at: its folder and what its meta.json says."""

    folder: Path
    meta: dict[str, Any]

    def has(self, name: str) -> bool:
        return bool(files_of(name, self.meta["files"]))

    def tensors(self, name: str = MODEL) -> dict[str, Tensor]:
        return dict(self.one_by_one(name))

    def one_by_one(self, name: str = MODEL) -> Joined:
        """The same, each tensor read when it is asked for."""
        try:
            return Joined([self.folder / file for file in files_of(name, self.meta.get("files", ())) or [name]])
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{self.folder / name}: cannot be read ({error}).") from None

    def state(self, mapped: bool = False) -> dict[str, Any]:
        """What state.pt holds. `mapped`: its tensors are not read before they are used."""
        try:
            return torch.load(self.folder / STATE, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # whatever the unpickler stumbles over, the file is what is wrong
            raise UserError(f"{self.folder / STATE}: cannot be read ({type(error).__name__}).") from None


def folder_name(update: int) -> str:
    return f"step-{update:09d}"


def save_checkpoint(
    root: Path, update: int, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any], meta: dict[str, Any]
) -> Path:
    """Write weights, whole and in one process, and what goes with them."""
    return publish(root, update, meta, lambda folder: write_files(folder, tensors, state))


def write_files(folder: Path, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    write_tensors(folder, tensors)
    with naming_the_fault(folder / STATE), (folder / STATE).open("wb") as file:
        torch.save(state, file)


def write_tensors(folder: Path, tensors: Mapping[str, dict[str, Tensor]]) -> None:
    for name, named in tensors.items():
        plain = {key: value.detach().cpu().contiguous() for key, value in named.items()}
        with naming_the_fault(folder / name):
            safetensors.torch.save_file(plain, folder / name, metadata={"format": "pt"})


@contextlib.contextmanager
def naming_the_fault(path: Path) -> Iterator[None]:
    """Raise what the system said of `path` as OSError; torch and safetensors wrap it in errors of their own."""
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


def publish(root: Path, update: int, meta: dict[str, Any], fill: Callable[[Path], None]) -> Path:
    """Let `fill` write files into a hidden folder, make sure they are on the disk, and only then give it its name."""
    temporary, final = root / f".tmp-{update}-{os.getpid()}", root / folder_name(update)
    root.mkdir(parents=True, exist_ok=True)
    bring_back(root)
    for left in root.glob(".tmp-*"):  # of a run that was killed while saving
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir()
        fill(temporary)
        files = {path.name: _seal(path) for path in sorted(temporary.iterdir())}
        meta = {"format": FORMAT, **meta, "files": files}
        with (temporary / META).open("w", encoding="utf-8") as file:
            file.write(json.dumps(meta, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        replaced = _hide(final, REPLACED)
        temporary.rename(final)
        _sync_folder(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        bring_back(root)
        raise
    return final


def bring_back(root: Path) -> None:
    """A kill between two renames leaves a good checkpoint without its name; it was to be replaced and was not."""
    for hidden in root.glob(f"{REPLACED}*"):
        name = root / hidden.name.removeprefix(REPLACED)
        if not name.exists():
            with contextlib.suppress(OSError):
                hidden.rename(name)


def _hide(folder: Path, mark: str) -> Path:
    """Take a checkpoint's name away before it is removed: a kill in between must not leave half of one under it."""
    hidden = folder.with_name(f"{mark}{folder.name}")
    if folder.exists():
        folder.rename(hidden)
    return hidden


def _seal(path: Path) -> dict[str, Any]:
    """Size and hash of a file that has reached the disk."""
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
    found: Any = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((root / INDEX).read_text(encoding="utf-8"))
    named = found if isinstance(found, dict) else {}
    return {key: named[key] if isinstance(named.get(key), str) else None for key in ("last", "best")}


def write_index(root: Path, last: str, best: str | None) -> None:
    write_atomically(root / INDEX, json.dumps({"last": last, "best": best}, indent=2) + "\n")


def best_of(root: Path, update: int | None) -> str | None:
    """The best checkpoint that is there: that of `update`, else the best one before, until a better one is saved."""
    wanted = folder_name(update) if update is not None else None
    found = (name for name in (wanted, read_index(root)["best"]) if name is not None and (root / name).is_dir())
    return next(found, None)


def prune(root: Path, keep: int, last: str, best: str | None, every: int | None = None) -> None:
    """Remove all but the best, the `keep` (0: all) up to `last`, and each `every`th epoch's; once `last` is safe."""
    folders = [folder for folder in sorted(root.glob("step-*")) if folder.name <= last]
    kept = {folder.name for folder in folders[-keep:]} | {best}
    for folder in folders:
        if folder.name not in kept and not (every and _ends_each(folder, every)):
            shutil.rmtree(_hide(folder, REMOVED), ignore_errors=True)


def _ends_each(folder: Path, every: int) -> bool:
    try:
        found = inspect(folder)
    except UserError:  # damaged: nothing to keep for ever
        return False
    return found.meta.get("epoch_finished", False) and found.meta["epoch"] % every == 0


def inspect(folder: Path) -> Checkpoint:
    """A checkpoint whose files are all there in their sizes, or an error that says what is not."""
    meta = read_meta(folder / META)
    files = meta["files"]
    try:
        missing = [name for name, seal in files.items() if (folder / name).stat().st_size != seal["size"]]
    except FileNotFoundError as error:
        raise UserError(f"{folder}: not a whole checkpoint, {Path(error.filename).name} is missing.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read ({type(error).__name__}: {error}).") from None
    if not files_of(MODEL, files) or STATE not in files:
        raise UserError(f"{folder / META}: damaged, files does not name {MODEL} and {STATE}.")
    if missing:
        raise UserError(f"{folder}: damaged, {', '.join(missing)} has not the size that was written.")
    return Checkpoint(folder, meta)


def verify(checkpoint: Checkpoint) -> Checkpoint:
    """The contents too are what was written: a flipped bit is told, not trained on."""
    for name, seal in checkpoint.meta["files"].items():
        with (checkpoint.folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != seal["sha256"]:
                raise UserError(f"{checkpoint.folder}: damaged, the contents of {name} are not what was written.")
    return checkpoint
