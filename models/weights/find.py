"""Where pretrained weights lie: a file, a folder of a run, or timm's name for weights on the Hugging Face hub."""

from __future__ import annotations

import json
import os
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import huggingface_hub
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open

from models.names import is_timm_name
from utils.better_weights import BOTH, Wanted, Which, choose_weights
from utils.errors import UserError, nearest
from utils.files import NotRegular, require_regular

TORCH_ENDINGS = (".pth", ".pt", ".bin", ".pth.tar")
PADDLE = ".pdparams"
ENDINGS = (".safetensors", *TORCH_ENDINGS, ".npz", PADDLE)
AVERAGE = "ema.safetensors"
HUB_FILES = ("model.safetensors", "pytorch_model.bin")
PROBE_SECONDS = 4.0  # the hub's own client tries for more than 20 s before it gives up


@dataclass(frozen=True)
class Source:
    """A file of weights on this machine, and how many leading classes of its classifier are not the data set's."""

    file: Path
    label_offset: int = 0
    words: str = ""
    """Of a run or checkpoint: which of its weights these are, and how well they validated."""


def check_pretrained(source: str, average: bool | None = False) -> None:
    """Raise what can be known about `source` without a model: there is such a thing, and it can be read."""
    found = _local(source, average)
    if found is not None:
        check_file(found.file)
    else:
        _on_hub(_timm_config(source), source, fetch=False)


def locate(source: str, average: bool | None = False) -> Source:
    """The file that `source` means; downloaded where it is a timm name that is not in the cache yet.

    `average`: of a run or checkpoint, the EMA (true), the plain weights (false), or those that validated better (None).
    """
    found = _local(source, average)
    if found is not None:
        check_file(found.file)
        return found
    config = _timm_config(source)
    file = _on_hub(config, source, fetch=True)
    assert file is not None
    return Source(file, config.label_offset or 0)


def check_file(path: Path) -> None:
    """Open the file's outside: ending, size, and the directory that each of the formats carries."""
    if not path.name.endswith(ENDINGS):
        raise UserError(f"Pretrained weights {path}: unknown kind of file; known endings are {', '.join(ENDINGS)}.")
    try:
        require_regular(path)
        if path.name.endswith(".safetensors"):
            with safe_open(str(path), framework="pt"):
                return
        with path.open("rb") as file:
            start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise UserError(
                f"Pretrained weights {path}: this is a Git LFS pointer, not the weights; run `git lfs pull`."
            )
        # torch's format of today and .npz are zip files; torch's older one is a pickle, which begins with 0x80.
        if start.startswith(b"PK"):
            zipfile.ZipFile(path).close()
        elif path.name.endswith(".npz") or not start.startswith(b"\x80"):
            raise UserError(unreadable(path, "it does not begin as such a file does"))
    except NotRegular as error:
        raise UserError(f"Pretrained weights {path}: {error.strerror}.") from None
    except (SafetensorError, zipfile.BadZipFile, OSError) as error:
        raise UserError(unreadable(path, error)) from None


def unreadable(path: Path, reason: object) -> str:
    return f"Pretrained weights {path}: the file is damaged or not of the kind its ending says ({reason})."


def _local(source: str, average: bool | None) -> Source | None:
    """The file that a path means; None where `source` is a timm name."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _better(_in_folder(path), average)
    if path.exists():
        return Source(_average_beside(path) if average else path)
    if is_timm_name(source):
        if average:
            raise UserError(
                f"MODEL.RESUME_EMA: true, but '{source}' is a name of timm's, without an average; name a run."
            )
        return None
    paddles = path.with_name(path.name + PADDLE)
    if paddles.exists():  # PaddleViT's command lines leave the ending out
        return Source(paddles)
    for candidate in (path.with_name(path.name + ending) for ending in ENDINGS):
        if candidate.exists():
            raise UserError(f"Pretrained weights {path}: no such file, but there is {candidate.name}.")
    if path.name != source or path.name.endswith(ENDINGS):
        _require(path)
    hint = nearest(source, [*timm.list_models(), *timm.list_pretrained()])
    raise UserError(f"MODEL.PRETRAINED '{source}': neither a file or folder here nor a name of timm's.{hint}")


def _require(path: Path) -> None:
    if path.exists():
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"Pretrained weights {path}: no such file; there is no folder {folder} either.")
    raise UserError(f"Pretrained weights {path}: no such file.{nearest(path.name, sorted(os.listdir(folder)))}")


def _in_folder(folder: Path) -> Path:
    """The weights in a checkpoint's folder, or in a run's folder those of its best checkpoint."""
    index = folder / "checkpoints" / "index.json"
    index = index if index.is_file() else folder / "index.json"
    if index.is_file():
        try:
            known = json.loads(index.read_text(encoding="utf-8"))
            name = known.get("best") or known.get("last")
        except (ValueError, AttributeError, OSError) as error:
            raise UserError(f"{index}: cannot be read ({error}).") from None
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index}: names no checkpoint beside it as 'best' or 'last'.")
        folder = index.parent / name
    for file in HUB_FILES:
        if (folder / file).is_file():
            return folder / file
    if any(folder.glob("model.shard-*.safetensors")):
        raise UserError(
            f"Pretrained weights {folder}: saved in shards (DIST.STRATEGY fsdp); make one file of them by "
            f"`python scripts/checkpoint.py strip {folder} -out weights.safetensors`, and give that to -pretrained."
        )
    raise UserError(
        f"Pretrained weights {folder}: no {' or '.join(HUB_FILES)} in this folder, nor checkpoints/index.json of a run."
    )


def _better(plain: Path, average: bool | None) -> Source:
    """Of a checkpoint's weights the ones asked for, else the better ones by its meta.json."""
    if average:
        _average_beside(plain)
    there: tuple[Which, ...] = BOTH if plain.with_name(AVERAGE).is_file() else ("model",)
    wanted: Wanted = "auto" if average is None else "ema" if average else "model"
    reason = "" if average is None else f"MODEL.RESUME_EMA {str(average).lower()}"
    meta = _meta_beside(plain)
    choice = choose_weights(meta, there, wanted, reason)
    file = plain if choice.which == "model" else plain.with_name(AVERAGE)
    return Source(file, words=f"{plain.parent.name}, {choice.words}" if meta else "")


def _meta_beside(weights: Path) -> dict[str, Any]:
    """What the checkpoint says of itself; nothing where a folder merely holds weights."""
    try:
        found = json.loads(weights.with_name("meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _average_beside(weights: Path) -> Path:
    """The average that was saved with these weights."""
    found = weights.with_name(AVERAGE)
    if not found.is_file():
        raise UserError(
            f"MODEL.RESUME_EMA: no {AVERAGE} lies beside {weights}; it needs a run that kept an average "
            "(TRAIN.MODEL_EMA), or leave it out."
        )
    return found


def _timm_config(name: str) -> Any:
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        tags = timm.list_pretrained(f"{name.partition('.')[0]}*")
        instead = f" Names near by that have: {', '.join(tags[:5])}." if tags else ""
        raise UserError(f"MODEL.PRETRAINED '{name}': timm has this architecture but no weights for it.{instead}")
    return config


def _on_hub(config: Any, name: str, fetch: bool) -> Path | None:
    """The cached file of timm's weights; else, once the hub has answered, the file as downloaded if `fetch`."""
    if not config.hf_hub_id:
        return _at_url(config.url, name, fetch)
    repo, _, revision = config.hf_hub_id.partition("@")
    files = (config.hf_hub_filename,) if config.hf_hub_filename else HUB_FILES
    for file in files:
        cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision or None)
        if isinstance(cached, str):
            return Path(cached)
    hub = huggingface_hub.constants
    where = f"{' or '.join(files)} of {repo} on {hub.ENDPOINT}; cache {hub.HF_HUB_CACHE}"
    for file in files:
        url = huggingface_hub.hf_hub_url(repo, file, revision=revision or None)
        try:
            _within(PROBE_SECONDS, lambda url=url: huggingface_hub.get_hf_file_metadata(url, timeout=PROBE_SECONDS - 1))
            if not fetch:
                return None
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision or None))
        except EntryNotFoundError:
            continue
        except HfHubHTTPError as error:
            raise UserError(f"MODEL.PRETRAINED '{name}': the hub refused {url} ({error}).") from None
        except Exception as error:  # the hub's client lets those of whatever HTTP library it uses through
            raise UserError(_offline(name, where, files[0], error or type(error).__name__)) from None
    raise UserError(f"MODEL.PRETRAINED '{name}': {repo} has none of {', '.join(files)}.")


def _at_url(url: str, name: str, fetch: bool) -> Path | None:
    """The few weights of timm that lie outside the hub; torch keeps them in its own cache."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if file.is_file():
        return file
    try:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        _within(PROBE_SECONDS, lambda: urlopen(url, timeout=PROBE_SECONDS - 1).close())
        if not fetch:
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(file), progress=False)
    except OSError as error:
        raise UserError(_offline(name, f"{url}; cache {file.parent}", file.name, error)) from None
    return file


def _offline(name: str, where: str, file: str, reason: object) -> str:
    return (
        f"MODEL.PRETRAINED '{name}': the weights are not on this machine and cannot be fetched ({reason}).\n"
        f"  looked for: {where}\n"
        f"  what helps: fetch {file} where there is internet and give its path as MODEL.PRETRAINED, "
        f"or copy that machine's cache here"
    )


def _within(seconds: float, ask: Callable[[], Any]) -> None:
    """Run `ask`, but wait no longer than this: looking up a name can hang beyond any timeout of a client."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            ask()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if failed:
        raise failed[0]
