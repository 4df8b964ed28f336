"""Finds a run's checkpoints on disk, reads the index of the last and the best, and checks them by size and hash.

A run with adapters (MODEL.LORA) has its frozen weights in one file beside its checkpoints, which hold only the trained
weights. meta.json records the hash of that file, so that adapters are never added to other weights.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitamp.errors import UserError, started
from vitamp.files import only_regular, read_json, write_atomically
from vitamp.meta import META, read_meta, unchecked_meta
from vitamp.metrics import PLAIN

CHECKPOINTS = "checkpoints"
BASE = "base.safetensors"
LORA = "lora"
"""Field of meta.json about adapters."""
ADAPTER = "lora_"
"""Beginning of the names of adapters' weights."""
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar", ".npz", ".ckpt")
MODEL = PLAIN.file
STATE = "state.pt"
INDEX = "index.json"
NAMED = ("best", "last")
"""Words that may replace the name of a run's checkpoint in a path."""
PREFIX = "step-"
NAME = rf"{PREFIX}(\d{{9}}|[1-9]\d{{9,}})"
_SHARD = re.compile(r"\.shard-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its folder, and the content of its meta.json."""

    folder: Path
    meta: dict[str, Any]

    def has(self, name: str) -> bool:
        """Whether the checkpoint has the file `name` or all of its shards."""
        return bool(files_of(name, self.meta["files"]))


def folder_name(update: int) -> str:
    """The name of a checkpoint's folder: 'step-000000088'."""
    return f"{PREFIX}{update:09d}"


def update_in(name: str) -> int | None:
    """The update in the name of a checkpoint's folder; None for another name, such as `step-000000005.mine`."""
    match = re.fullmatch(NAME, name, re.ASCII)
    return int(match[1]) if match else None


def run_folder_of(path: Path) -> Path | None:
    """Find the folder of the run to which a path leads; None if it leads to no run.

    path: a run, one of its checkpoints or its folder of checkpoints, or a file in one of these
    """
    folder = path.parent if path.is_file() else path
    if (folder / CHECKPOINTS).is_dir():
        return folder
    # The folder of the run's checkpoints is `folder` itself, or its parent; for a link to a checkpoint, also the parent
    # of the link's target. Folders further up do not count: a checkpoint may be copied to any folder, and a folder
    # above that may be called `checkpoints` by chance.
    absolute = folder.absolute()
    target = folder.resolve()
    for checkpoints_folder in (absolute, absolute.parent, target.parent):
        if checkpoints_folder.name == CHECKPOINTS:
            return checkpoints_folder.parent
    return None


def checkpoints_in(root: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their update, oldest first, without folders that the user has renamed."""
    checkpoints = {}
    for path in root.glob(f"{PREFIX}*"):
        update = update_in(path.name)
        if update is not None and path.is_dir():
            checkpoints[update] = path
    return dict(sorted(checkpoints.items()))


def place_of(path: Path) -> tuple[Path | None, Path]:
    """Find the checkpoint of a path, and the folder that contains the run's checkpoints.

    The path may be that of a checkpoint, or of a file in one. For the path of a run, or of its folder of checkpoints,
    the first is None.
    """
    folder = path.parent if path.is_file() else path
    has_checkpoint_name = update_in(folder.name) is not None  # such as step-000000088
    if (folder / META).exists() or has_checkpoint_name:
        return folder, folder.parent
    if (folder / CHECKPOINTS).is_dir():
        return None, folder / CHECKPOINTS
    return None, folder


def checkpoints_at(path: Path) -> list[Path]:
    """List all checkpoints of a run, oldest first; for the path of a checkpoint, or of a file in one, only this one.

    There is at least one; otherwise a UserError is raised.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder.")
    checkpoint, root = place_of(path)  # None, and the folder of all checkpoints, for a run
    if path.is_file() and checkpoint is None and path.name.endswith(WEIGHTS):
        raise UserError(f"{path}: this file holds only weights; name a run or a checkpoint.")
    if checkpoint is not None:
        return [checkpoint]
    checkpoints = list(checkpoints_in(root).values())
    if not checkpoints:
        raise UserError(f"{path}: no checkpoint found (looked for {root}/{PREFIX}*).")
    return checkpoints


def checkpoint_of(path: Path) -> tuple[Path, str]:
    """Choose the checkpoint at a path, and return it with the reason in words.

    For the path of a checkpoint, or of a file in one, this is the checkpoint itself, and the reason is ''. For the path
    of a run, this is its best checkpoint or, if no best one is recorded, its last.
    """
    checkpoints = checkpoints_at(path)
    checkpoint, root = place_of(path)
    if checkpoint is not None:
        return checkpoint, ""
    by_name = {folder.name: folder for folder in checkpoints}
    index = read_index(root)
    if index["best"] in by_name:
        return by_name[index["best"]], "the run's best"
    newest = checkpoints[-1]
    return by_name.get(index["last"] or "", newest), "the run's last; no best is recorded"


def located(path: Path) -> Path:
    """Replace RUN/best or RUN/last, or the same in RUN/checkpoints, by the path of that checkpoint.

    Any other path is returned as it is, also that of a file or folder which exists under this name.
    """
    word = path.name
    # The folder of checkpoints, for RUN/checkpoints/best and for RUN/best
    root = path.parent if path.parent.name == CHECKPOINTS else path.parent / CHECKPOINTS
    if word not in NAMED or os.path.lexists(path) or not root.is_dir():
        return path
    by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints_in(root).values()}
    if word == "best":
        name = read_index(root)["best"]
    else:
        name = next(reversed(by_name), None)  # the newest
    if name not in by_name:
        raise UserError(f"{path}: this run has no {word} checkpoint yet (looked in {root}).")
    return by_name[name]


def read_index(root: Path) -> dict[str, Any]:
    """Read index.json: the names of the checkpoints `best` and `last`; None for one that it does not name."""
    names: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        names = read_json(root / INDEX)
    return {key: names[key] if isinstance(names.get(key), str) else None for key in NAMED}


def write_index(root: Path, last: str, best: str | None) -> None:
    """Write index.json, with the names of the last and the best checkpoint."""
    write_atomically(root / INDEX, json.dumps({"last": last, "best": best}, indent=2) + "\n")


def best_of(root: Path, update: int | None) -> str | None:
    """Find the name of the best checkpoint of a run; None if it does not exist.

    It is the checkpoint of `update`, or, if this one does not exist, the best one in index.json.

    root: the folder of the run's checkpoints
    update: the update with the best validation; None without one
    """
    name_by_update = folder_name(update) if update is not None else None
    for name in (name_by_update, read_index(root)["best"]):
        if name is not None and (root / name).is_dir():
            return name
    return None


def inspect(folder: Path) -> Checkpoint:
    """Read a checkpoint's meta.json, and check that its files exist with the recorded sizes."""
    meta = read_meta(folder / META)
    files = meta["files"]  # file -> its size and hash
    try:
        wrong_size = [name for name, recorded in files.items() if (folder / name).stat().st_size != recorded["size"]]
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
    base_file(folder, meta)  # This raises a UserError if adapters lack their frozen weights.
    return Checkpoint(folder, meta)


def verify(checkpoint: Checkpoint, only: str | None = None) -> Checkpoint:
    """Check the hashes of a checkpoint's files, and return the checkpoint; a UserError if a file has changed.

    The frozen weights that adapters need are checked, too.

    only: name of the one file to check, which may be in shards; None: all files
    """
    files = checkpoint.meta["files"]
    names = files if only is None else files_of(only, files)
    try:
        verified_base(checkpoint.folder, checkpoint.meta)  # a UserError if these weights have changed
        for name in names:
            with open(checkpoint.folder / name, "rb", opener=only_regular) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != files[name]["sha256"]:
                    raise UserError(f"{checkpoint.folder}: damaged, the contents of {name} are not what was written.")
    except OSError as error:
        place = error.filename or checkpoint.folder  # An error while reading names no file, unlike one of opening it.
        reason = error.strerror or str(error)
        raise UserError(f"{place}: cannot be read ({reason}).") from None
    return checkpoint


def base_file(folder: Path, meta: Mapping[str, Any]) -> Path | None:
    """Find the file of frozen weights that the adapters in a checkpoint need; None if the checkpoint has no adapters.

    folder, meta: the checkpoint's folder, and the content of its meta.json

    Raises UserError if the file is missing, or does not have the size that meta.json records.
    """
    if meta.get(LORA) is None:
        return None
    # In the checkpoint, if it was copied together with the file; else beside the checkpoint, or, if `folder` is a link
    # to the checkpoint, beside its target.
    in_checkpoint = folder.absolute() / BASE
    beside_checkpoint = folder.absolute().parent / BASE
    recorded = meta[LORA]["base"]  # size and hash
    for place in (in_checkpoint, beside_checkpoint, folder.resolve().parent / BASE):
        if place.is_file():
            if place.stat().st_size != recorded["size"]:
                raise UserError(f"{place}: damaged or of another run, it does not have the size that {folder} records.")
            return place
    source = meta[LORA].get("source")
    made_of = f" (made of {source})" if source else ""
    raise UserError(
        f"{folder}: these are adapters (MODEL.LORA), which need the frozen weights of their run{made_of}: "
        f"{BASE} with sha256 {recorded['sha256'][:12]}... is neither {in_checkpoint} nor {beside_checkpoint}. Copy it "
        f"from the run's folder checkpoints/. To take weights elsewhere as one file, use `{started('checkpoint')} "
        f"strip` or `{started('export')}` in the run's folder: they merge the adapters."
    )


def verified_base(folder: Path, meta: Mapping[str, Any]) -> Path | None:
    """Find the file of frozen weights as `base_file` does, and also check its hash."""
    file = base_file(folder, meta)
    if file is not None and sha256_of(file) != meta[LORA]["base"]["sha256"]:
        raise UserError(f"{file}: damaged or of another run, its contents are not those that {folder} records.")
    return file


def seal_of(file: Path) -> Any:
    """The size and hash that the meta.json beside a file records of it; None without a record.

    The meta.json may be of another program, so that the record may be anything.
    """
    seals = unchecked_meta(file.parent).get("files")
    return seals.get(file.name) if isinstance(seals, dict) else None


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's content, computed again only if the file has changed."""
    status = file.stat()
    return _digest(file.resolve(), status.st_size, status.st_mtime_ns)


@cache
def _digest(file: Path, _size: int, _changed: int) -> str:
    """Compute the hash of a file. Size and time are only for the cache, which is not valid for a changed file."""
    with open(file, "rb", opener=only_regular) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def shard_name(name: str, nth: int, count: int) -> str:
    """The name of the shard number `nth`, counted from 0, of a file in `count` shards."""
    return f"{name.removesuffix('.safetensors')}.shard-{nth + 1}-of-{count}.safetensors"


def files_of(name: str, files: Collection[str]) -> list[str]:
    """List the names of the files that make up the file `name`: itself, or its shards in order; empty if incomplete.

    files: the names of all files of the checkpoint
    """
    if name in files:
        return [name]
    # A name such as model.shard-1-of-4.safetensors ends with the number of shards. All files of a checkpoint that are
    # in shards have equally many.
    matches = [_SHARD.search(file) for file in files]
    count = max((int(match[2]) for match in matches if match), default=0)
    shards = [shard_name(name, nth, count) for nth in range(count)]
    is_complete = set(shards) <= set(files)
    return shards if is_complete else []
