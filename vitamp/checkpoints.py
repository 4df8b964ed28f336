"""A run's checkpoints on disk: their names, the index of the last and the best, and their check by size and hash.

A run with adapters (MODEL.LORA) has its frozen weights in one file beside its checkpoints, which hold only what is
trained. meta.json names its hash, so that adapters are never added to other weights.
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
"""Field of meta.json"""
ADAPTER = "lora_"
"""How the names of the adapters' weights begin"""
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar", ".npz", ".ckpt")
MODEL = PLAIN.file
STATE = "state.pt"
INDEX = "index.json"
NAMED = ("best", "last")
"""Words for checkpoints of a run, in place of their names"""
PREFIX = "step-"
NAME = rf"{PREFIX}(\d{{9}}|[1-9]\d{{9,}})"
_SHARD = re.compile(r"\.shard-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True)
class Checkpoint:
    """Folder of a checkpoint, with the content of its meta.json."""

    folder: Path
    meta: dict[str, Any]

    def has(self, name: str) -> bool:
        """Whether the file `name` or its shards are there."""
        return bool(files_of(name, self.meta["files"]))


def folder_name(update: int) -> str:
    return f"{PREFIX}{update:09d}"


def update_in(name: str) -> int | None:
    """The update in a name that `folder_name` makes; None for any other, such as a user's `step-000000005.mine`."""
    match = re.fullmatch(NAME, name, re.ASCII)
    return int(match[1]) if match else None


def run_folder_of(path: Path) -> Path | None:
    """The run folder of a checkpoint, of a file in one, or of the run folder itself; None if there is none."""
    # No further up than this: a single checkpoint may be in any folder, and one above may be called `checkpoints`.
    folder_of_path = path.parent if path.is_file() else path
    if (folder_of_path / CHECKPOINTS).is_dir():
        return folder_of_path
    absolute = folder_of_path.absolute()
    places = absolute, absolute.parent, folder_of_path.resolve().parent  # the last one for a link to a checkpoint
    return next((one.parent for one in places if one.name == CHECKPOINTS), None)


def checkpoints_in(root: Path) -> dict[int, Path]:
    """A run's checkpoints by their update, oldest first. Folders under names of the user's own are not among them."""
    found = {}
    for path in root.glob(f"{PREFIX}*"):
        update = update_in(path.name)
        if update is not None and path.is_dir():
            found[update] = path
    return dict(sorted(found.items()))


def place_of(path: Path) -> tuple[Path | None, Path]:
    """The checkpoint that `path` is, or is in, if there is one; and the folder of a run's checkpoints."""
    folder = path.parent if path.is_file() else path
    if (folder / META).exists() or update_in(folder.name) is not None:
        return folder, folder.parent
    return None, folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder


def checkpoints_at(path: Path) -> list[Path]:
    """Checkpoint folders of a path, oldest first, at least one: all of a run, or the one that the path is or is in."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder.")
    folder, root = place_of(path)
    if path.is_file() and folder is None and path.name.endswith(WEIGHTS):
        raise UserError(f"{path}: this file holds only weights; name a run or a checkpoint.")
    if folder is not None:
        return [folder]
    found = list(checkpoints_in(root).values())
    if not found:
        raise UserError(f"{path}: no checkpoint found (looked for {root}/{PREFIX}*).")
    return found


def checkpoint_of(path: Path) -> tuple[Path, str]:
    """The checkpoint at a path, and the reason: of a run its best, else its last; no reason for a checkpoint itself."""
    checkpoints = checkpoints_at(path)
    folder, root = place_of(path)
    if folder is not None:
        return folder, ""
    by_name = {found.name: found for found in checkpoints}
    index = read_index(root)
    if index["best"] in by_name:
        return by_name[index["best"]], "the run's best"
    return by_name.get(index["last"] or "", checkpoints[-1]), "the run's last; no best is recorded"


def located(path: Path) -> Path:
    """The path, but of RUN/best and RUN/last, also in RUN/checkpoints, the checkpoint that the run calls so.

    A file or folder of this name is itself.
    """
    word = path.name
    root = path.parent if path.parent.name == CHECKPOINTS else path.parent / CHECKPOINTS
    if word not in NAMED or os.path.lexists(path) or not root.is_dir():
        return path
    by_name = {found.name: found for found in checkpoints_in(root).values()}
    name = read_index(root)["best"] if word == "best" else next(reversed(by_name), None)
    if name not in by_name:
        raise UserError(f"{path}: this run has no {word} checkpoint yet (looked in {root}).")
    return by_name[name]


def read_index(root: Path) -> dict[str, Any]:
    """Names of the last and the best checkpoint, where index.json has them."""
    names: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        names = read_json(root / INDEX)
    return {key: names[key] if isinstance(names.get(key), str) else None for key in NAMED}


def write_index(root: Path, last: str, best: str | None) -> None:
    write_atomically(root / INDEX, json.dumps({"last": last, "best": best}, indent=2) + "\n")


def best_of(root: Path, update: int | None) -> str | None:
    """Name of the best existing checkpoint: that of `update`, or else the best one before it."""
    newest = folder_name(update) if update is not None else None
    for name in (newest, read_index(root)["best"]):
        if name is not None and (root / name).is_dir():
            return name
    return None


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
    base_file(folder, meta)
    return Checkpoint(folder, meta)


def verify(checkpoint: Checkpoint, only: str | None = None) -> Checkpoint:
    """Check the hashes of all files, or of the file `only` and its shards: a flipped bit is an error.

    The frozen weights that adapters need are checked too.
    """
    files = checkpoint.meta["files"]
    try:
        verified_base(checkpoint.folder, checkpoint.meta)
        for name in files if only is None else files_of(only, files):
            with open(checkpoint.folder / name, "rb", opener=only_regular) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != files[name]["sha256"]:
                    raise UserError(f"{checkpoint.folder}: damaged, the contents of {name} are not what was written.")
    except OSError as error:  # of the disk itself, it names no file
        place = error.filename or checkpoint.folder
        reason = error.strerror or str(error)
        raise UserError(f"{place}: cannot be read ({reason}).") from None
    return checkpoint


def base_file(folder: Path, meta: Mapping[str, Any]) -> Path | None:
    """The file of frozen weights of the checkpoint `folder`, by its size; None if the checkpoint needs none."""
    if meta.get(LORA) is None:
        return None
    places = folder.absolute() / BASE, folder.absolute().parent / BASE, folder.resolve().parent / BASE
    seal = meta[LORA]["base"]
    for place in places:
        if place.is_file():
            if place.stat().st_size != seal["size"]:
                raise UserError(f"{place}: damaged or of another run, it does not have the size that {folder} records.")
            return place
    source = meta[LORA].get("source")
    made_of = f" (made of {source})" if source else ""
    raise UserError(
        f"{folder}: these are adapters (MODEL.LORA), which need the frozen weights of their run{made_of}: "
        f"{BASE} with sha256 {seal['sha256'][:12]}... is neither {places[0]} nor {places[1]}. Copy it from the run's "
        f"folder checkpoints/. To take weights elsewhere as one file, use `{started('checkpoint')} strip` or "
        f"`{started('export')}` in the run's folder: they merge the adapters."
    )


def verified_base(folder: Path, meta: Mapping[str, Any]) -> Path | None:
    """`base_file` after a check of its hash."""
    file = base_file(folder, meta)
    if file is not None and sha256_of(file) != meta[LORA]["base"]["sha256"]:
        raise UserError(f"{file}: damaged or of another run, its contents are not those that {folder} records.")
    return file


def seal_of(file: Path) -> Any:
    """What the meta.json beside a file, perhaps of another program, records of it; None if nothing."""
    seals = unchecked_meta(file.parent).get("files")
    return seals.get(file.name) if isinstance(seals, dict) else None


def sha256_of(file: Path) -> str:
    """Hash of a file, computed once for as long as the file does not change."""
    about = file.stat()
    return _digest(file.resolve(), about.st_size, about.st_mtime_ns)


@cache
def _digest(file: Path, _size: int, _changed: int) -> str:
    with open(file, "rb", opener=only_regular) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def shard_name(name: str, nth: int, count: int) -> str:
    """Name of the shard `nth` (from 0) of `count`."""
    return f"{name.removesuffix('.safetensors')}.shard-{nth + 1}-of-{count}.safetensors"


def files_of(name: str, files: Collection[str]) -> list[str]:
    """The file `name`, or its shards in order; empty if neither is complete."""
    if name in files:
        return [name]
    count = max((int(found[2]) for found in map(_SHARD.search, files) if found), default=0)
    wanted = [shard_name(name, nth, count) for nth in range(count)]
    return wanted if set(wanted) <= set(files) else []
