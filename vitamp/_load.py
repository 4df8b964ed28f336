"""`vitamp.load`: the model of a run, as timm builds it. Only JSON and tensors are read, and nothing is executed."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitamp._images import transform_of

META, FORMAT, CHECKPOINTS, BASE = "meta.json", 1, "checkpoints", "base.safetensors"
SETS = {"model": "", "ema": "ema_"}
"""Sets of weights -> prefix of their metrics. Their files are NAME.safetensors."""
INSTALLED = (Path(__file__).parent / "program").is_dir()
EXPORT = "vitamp export" if INSTALLED else "python scripts/export.py"
TRAIN = "vitamp train" if INSTALLED else "python main_single_gpu.py"


@dataclass(frozen=True)
class Origin:
    """`model.vitamp`: which weights a model has, and what is recorded of them."""

    path: Path
    """The checkpoint's folder, or the file of weights"""
    weights: str
    """`model`, or `ema`"""
    why: str
    """Why these weights, in words"""
    classes: list[str] | None
    """Names in the order of the outputs; None if the training data had none"""
    temperature: float
    """Of `evaluate -calibrate`: divide the logits by it for calibrated probabilities; 1 without a calibration"""
    thresholds: list[float] | None
    """With several labels per image: the probability (sigmoid) from which on each class is predicted"""


@dataclass(frozen=True)
class Stored:
    """Weights and their description, found but not read."""

    origin: Origin
    files: tuple[Path, ...]
    """One file, or its shards in order"""
    about: Mapping[str, Any]
    """Fields of meta.json, or of the file's header"""


def load_model(path: Path, weights: str) -> tuple[nn.Module, Callable[[Image.Image], Tensor]]:
    """See `vitamp.load`. ValueError, or FileNotFoundError, if there is no such model, or timm cannot build it."""
    if weights not in ("auto", *SETS):
        raise ValueError(f"weights={weights!r}: takes 'auto', 'model' or 'ema'")
    path = path.expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder. Name a run, a checkpoint, or a file of weights.")
    try:
        stored = _in_checkpoint(path, weights) or _in_file(path, weights)
        model = _build(stored.about, path)
        model.load_state_dict(_merged(_tensors(stored.files), stored.about.get("lora")))
    except (json.JSONDecodeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error}).") from None
    except RuntimeError as error:  # names or shapes of tensors differ
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ValueError(f"{path}: the weights do not fit timm's plain model ({reason}). {_export(path)}") from None
    vars(model)["vitamp"] = stored.origin
    return model.eval(), transform_of(stored.about["input"])


def _build(about: Mapping[str, Any], path: Path) -> nn.Module:
    """timm's model, without pretrained weights. The caller's random numbers stay as they are."""
    settings, call = about.get("settings", {}), about.get("timm")
    if settings.get("MODEL.MAE_PRETRAIN"):
        raise ValueError(
            f"{path}: this model learned without labels and has no classes. Fine-tune it first: {TRAIN} -cfg "
            f"RECIPE.yaml -data_path LABELLED_IMAGES -pretrained {path}"
        )
    if call is None or not timm.is_model(call["name"]):
        if about.get("own_code"):
            raise ValueError(
                f"{path}: this model is code of its run's own, which is not executed here. Export it, with your "
                f"consent, to a program that torch alone runs: {EXPORT} {path} -trust -to torch -out model.pt2"
            )
        raise ValueError(f"{path}: an earlier version wrote it, without the arguments of timm's model. {_export(path)}")
    with torch.random.fork_rng(devices=[]):
        return timm.create_model(call["name"], **call["arguments"])


def _export(path: Path) -> str:
    return f"Export it, and load the file: {EXPORT} {path} -to safetensors -out model.safetensors"


def _in_checkpoint(path: Path, weights: str) -> Stored | None:
    """The best checkpoint of a run, or the checkpoint that the path is or is in; None for a file of weights alone."""
    folder = path.parent if path.is_file() else path
    why = ""
    if not (folder / META).is_file():
        if path.is_file():
            return None
        folder, why = _best(folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder)
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if meta.get("format") != FORMAT:
        raise ValueError(f"{folder}: of format {meta.get('format')}; this version of vitamp reads format {FORMAT}.")
    files = {name: _files(f"{name}.safetensors", meta["files"]) for name in SETS}
    named = next((name for name in SETS if path.name == f"{name}.safetensors"), "auto")
    asked = weights if weights != "auto" else named
    which, reason = (asked, "as asked") if asked != "auto" else _better(meta, [name for name in SETS if files[name]])
    if not files[which]:
        raise ValueError(f"{folder}: has no {which}.safetensors; leave out weights={which!r}.")
    for name in files[which]:
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != meta["files"][name]["sha256"]:
                raise ValueError(f"{folder}: damaged, the contents of {name} are not what was written.")
    base = _frozen(folder, meta["lora"]["base"]["sha256"]) if meta.get("lora") else ()
    hashes = [meta["files"][name]["sha256"] for name in files[which]]
    words = ", ".join(filter(None, (why, f"{which}.safetensors {reason}")))
    thresholds = meta.get("thresholds", {}).get(which)
    origin = Origin(folder, which, words, meta.get("classes"), _temperature(folder, hashes), thresholds)
    return Stored(origin, (*base, *(folder / name for name in files[which])), meta)


def _frozen(folder: Path, sha256: str) -> tuple[Path]:
    """The frozen weights of a run with adapters (MODEL.LORA), beside its checkpoints."""
    places = folder.absolute() / BASE, folder.absolute().parent / BASE
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{folder}: needs the frozen weights of its run; neither {places[0]} nor {places[1]}.")
    with file.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
            raise ValueError(f"{file}: damaged or of another run, its contents are not those that {folder} records.")
    return (file,)


def _merged(tensors: dict[str, Tensor], lora: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Plain weights: the product of each adapter's matrices is added to its rows of the layer's weight."""
    for name in [name for name in tensors if lora and re.search(r"\.lora_\w+_A$", name)]:
        layer, _, own = name.rpartition(".")
        part, fused = own[len("lora_") : -len("_A")], layer.rpartition(".")[2]
        down, up = tensors.pop(name).double(), tensors.pop(f"{name[:-1]}B").double()
        begin = fused.index(part) * len(up) if fused in ("qkv", "qk", "kv") else 0
        rows = tensors[f"{layer}.weight"][begin : begin + len(up)]
        rows.copy_(torch.addmm(rows.double(), up, down, alpha=lora["factor"] if lora else 1))
    return tensors


def _best(root: Path) -> tuple[Path, str]:
    index: Any = {}
    if (root / "index.json").is_file():
        index = json.loads((root / "index.json").read_text(encoding="utf-8"))
    found = {file.parent.name: file.parent for file in root.glob(f"step-*/{META}")}
    for key in ("best", "last"):
        if (folder := found.get(index.get(key))) is not None:
            return folder, f"the run's {key}"
    if not found:
        raise FileNotFoundError(f"{root.parent}: no checkpoint found (looked for {root}/step-*).")
    return found[max(found, key=lambda name: (len(name), name))], "the run's last"


def _files(name: str, known: Iterable[str]) -> list[str]:
    """The file, or its shards in order."""
    shard = re.compile(rf"{re.escape(name.removesuffix('.safetensors'))}\.shard-(\d+)-of-\d+\.safetensors")
    shards = {int(found[1]): one for one in known if (found := shard.fullmatch(one))}
    return [name] if name in known else [shards[number] for number in sorted(shards)]


def _better(meta: Mapping[str, Any], available: list[str]) -> tuple[str, str]:
    """The set of weights that validated better, as predict.py chooses it, and why."""
    by = meta.get("settings", {}).get("SAVE_BEST_BY") or "acc1"
    metrics = meta.get("metrics") or {}
    values = {name: metrics.get(prefix + by) for name, prefix in SETS.items()}
    values = {name: value for name, value in values.items() if isinstance(value, int | float) and math.isfinite(value)}
    if len(available) == 1:
        return available[0], "is the only one"
    if values:
        better = (min if by == "loss" else max)(values, key=lambda name: values[name])
        return better, f"validated better ({', '.join(f'{name}: {by} {value:.4g}' for name, value in values.items())})"
    kind = (meta.get("best") or {}).get("kind", "")
    return ("ema" if kind.startswith("ema_") else "model"), "was the better one in the run's best validation"


def _temperature(folder: Path, hashes: list[str]) -> float:
    """The temperature that was fitted to exactly these weights."""
    file = folder.parent.parent / "calibration.json"
    if folder.parent.name != CHECKPOINTS or not file.is_file():
        return 1.0
    fitted = json.loads(file.read_text(encoding="utf-8"))["temperatures"]
    return next((one["temperature"] for one in fitted if one["sha256"] == hashes), 1.0)


def _in_file(path: Path, weights: str) -> Stored:
    """A file that `export -to safetensors` or `checkpoint strip` wrote."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: not weights of vitamp. Name a run, a checkpoint, or a .safetensors file.")
    with safe_open(str(path), framework="pt") as file:
        header: dict[str, str] = file.metadata() or {}
    about = json.loads(header["vitamp"]) if "vitamp" in header else {key: _value(text) for key, text in header.items()}
    if about.get("made_by") != "vitamp":
        raise ValueError(f"{path}: vitamp did not write it, so its model is unknown.")
    if "timm_name" in about:  # an export has all at the top
        call = {"name": about["timm_name"], "arguments": about["timm_arguments"]}
        about = {**about, "timm": call, "input": about}
    which = "ema" if re.search(r"\bema\b", str(about.get("weights")), re.IGNORECASE) else "model"
    if weights not in ("auto", which):
        raise ValueError(f"{path}: has no {weights} weights; leave out weights={weights!r}.")
    temperature = (about.get("calibration") or {}).get("temperature", 1.0)
    thresholds = (about.get("thresholds") or {}).get(which)
    return Stored(Origin(path, which, "the file's", about.get("classes"), temperature, thresholds), (path,), about)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of a file; of shards, with their rows joined."""
    rows: dict[str, list[Tensor]] = {}
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                rows.setdefault(name, []).append(file.get_tensor(name))
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()}
