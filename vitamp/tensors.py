"""The tensors of trained weights: joined from shards, and with adapters merged."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import create_model
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitamp.checkpoints import ADAPTER, LORA, MODEL, STATE, Checkpoint, base_file, files_of, verify
from vitamp.errors import UserError
from vitamp.meta import check_fields
from vitamp.weights import Chosen

FUSED = {"qkv": ("q", "k", "v"), "qk": ("q", "k"), "kv": ("k", "v")}
"""Layers whose rows are several targets one below the other, by the name that timm's models give them"""
OTHER_NAMES = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}


class JoinedShards(Mapping[str, Tensor]):
    """Whole tensors of several files, each read from disk when it is accessed. Equal names are joined by rows."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: list[Any] = [safe_open(str(path), framework="pt") for path in paths]
        self._where: dict[str, list[Any]] = {}
        for file in self._files:
            for name in file.keys():  # noqa: SIM118  # a file of safetensors is no mapping
                self._where.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        rows = [file.get_tensor(name) for file in self._where[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [file.get_slice(name).get_shape() for file in self._where[name]]
        shape = list(shapes[0])
        for other in shapes[1:]:
            shape[0] += other[0]
        return tuple(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def parts_of(layer: str) -> tuple[str, ...]:
    """What the rows of a layer are, by its name: one target or several."""
    own = layer.rpartition(".")[2]
    return FUSED.get(own, (OTHER_NAMES.get(own, own),))


def adapter_name(layer: str, part: str, matrix: str) -> str:
    """'blocks.0.attn.qkv.', 'q', 'A' -> the name of this weight."""
    return f"{layer}{ADAPTER}{part}_{matrix}"


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2].startswith(ADAPTER)


def factors(tensors: Mapping[str, Any], layer: str, parts: tuple[str, ...], weight: Tensor) -> tuple[Tensor, Tensor]:
    """B and A of a whole layer, whose product has the shape of its `weight`. `layer`: how its tensors' names begin."""
    rows = len(weight) // len(parts)
    ups = []
    downs = []
    for part in parts:
        down = tensors.get(adapter_name(layer, part, "A"))
        if down is None:
            ups.append(weight.new_zeros(rows, 0))  # no columns: rows of zeros in the product
        else:
            ups.append(tensors[adapter_name(layer, part, "B")])
            downs.append(down)
    if len(parts) == 1:
        return ups[0], downs[0]
    return torch.block_diag(*ups), torch.cat(downs)


class Merged(Mapping[str, Tensor]):
    """Plain weights, each computed when it is accessed. `tensors`: frozen weights, classifier and adapters."""

    def __init__(self, tensors: Any, factor: float) -> None:
        self._tensors = tensors
        self._factor = factor
        self._adapted = {name.rpartition(".")[0] for name in tensors if is_adapter(name)}
        self._names = [name for name in tensors if not is_adapter(name)]

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self._tensors[name]
        layer, _, own = name.rpartition(".")
        if own != "weight" or layer not in self._adapted:
            return weight
        inside = {key: self._tensors[key] for key in self._tensors if is_adapter(key) and key.startswith(f"{layer}.")}
        up, down = (matrix.double() for matrix in factors(inside, f"{layer}.", parts_of(layer), weight))
        return torch.addmm(weight.double(), up, down, alpha=self._factor).to(weight.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_tensors(checkpoint: Checkpoint, name: str = MODEL, merged: bool = True) -> JoinedShards | Merged:
    """The tensors of the file `name` or its shards, each read from disk when it is accessed.

    Of a run with adapters (MODEL.LORA), they are the plain model's, or with `merged` false frozen weights and adapters.
    """
    folder = checkpoint.folder
    names = files_of(name, checkpoint.meta.get("files", ())) or [name]
    files = [folder / one for one in names]
    base = base_file(folder, checkpoint.meta)
    if base is not None:
        files.insert(0, base)
    try:
        opened = JoinedShards(files)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / name}: cannot be read ({error}).") from None
    return opened if base is None or not merged else Merged(opened, checkpoint.meta[LORA]["factor"])


def read_state(checkpoint: Checkpoint, mapped: bool = False) -> dict[str, Any]:
    """Content of state.pt. `mapped`: its tensors are memory-mapped, and read when they are used."""
    file = checkpoint.folder / STATE
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged file makes the unpickler raise nearly anything
        raise UserError(f"{file}: cannot be read ({type(error).__name__}).") from None


def fp32_modules(chosen: Chosen) -> list[str]:
    """Modules that AMP.AUTO_FP32 had moved to fp32."""
    if chosen.checkpoint is None:
        return chosen.meta["fp32_modules"]
    state = read_state(chosen.checkpoint, mapped=True)  # nearly all of it is the optimiser's, and not read
    check_fields(create_model("MovedModules", fp32_modules=(list[str], ...)), state, chosen.place / STATE)
    return state["fp32_modules"]


def read_weights(chosen: Chosen) -> dict[str, Tensor]:
    """The chosen weights, after a check of their hashes."""
    name = chosen.which.file
    if chosen.checkpoint is not None:
        return dict(open_tensors(verify(chosen.checkpoint, name), name))
    with safe_open(str(chosen.place), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
