"""Reads the tensors of trained weights, joins them from shards, and merges adapters into them."""

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
"""Fused layers, by their name in timm's models -> the targets of adapters whose rows they have, from top to bottom."""
OTHER_NAMES = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
"""Other names of layers in timm's models -> the target of adapters that they are."""


class JoinedShards(Mapping[str, Tensor]):
    """The tensors of several files by name, each read from disk when it is accessed.

    Tensors of the same name in several files are joined by rows.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._files: list[Any] = [safe_open(str(path), framework="pt") for path in paths]
        self._files_with: dict[str, list[Any]] = {}
        """Name of a tensor -> the files that have rows of it."""
        for file in self._files:
            for name in file.keys():  # noqa: SIM118  # An open safetensors file is no mapping.
                self._files_with.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        shards = [file.get_tensor(name) for file in self._files_with[name]]
        return shards[0] if len(shards) == 1 else torch.cat(shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor, without reading it."""
        shapes = [file.get_slice(name).get_shape() for file in self._files_with[name]]
        shape = list(shapes[0])
        for shard_shape in shapes[1:]:
            shape[0] += shard_shape[0]
        return tuple(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files_with)

    def __len__(self) -> int:
        return len(self._files_with)


def parts_of(layer: str) -> tuple[str, ...]:
    """The targets of adapters in a layer's rows, by the layer's name: ('q', 'k', 'v') of a fused one, else one."""
    layer_name = layer.rpartition(".")[2]
    if layer_name in FUSED:
        return FUSED[layer_name]
    return (OTHER_NAMES.get(layer_name, layer_name),)


def adapter_name(layer: str, part: str, matrix: str) -> str:
    """The name of an adapter's weight, such as that of layer 'blocks.0.attn.qkv.', part 'q' and matrix 'A'."""
    return f"{layer}{ADAPTER}{part}_{matrix}"


def is_adapter(name: str) -> bool:
    """Whether a weight with this name belongs to an adapter."""
    return name.rpartition(".")[2].startswith(ADAPTER)


def factors(tensors: Mapping[str, Any], layer: str, parts: tuple[str, ...], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low-rank matrices B and A (LoRA) of a whole layer, whose product has the shape of its weight.

    A fused layer, such as qkv, has adapters for all of its parts, or for some of them. Then A has the matrices of these
    adapters below each other, and B has theirs as blocks on its diagonal; the rows of a part without adapter are 0.

    tensors: name -> tensor, with the adapters of the layer
    layer: beginning of the names of the layer's tensors, with a dot at its end
    parts: the layer's parts, as `parts_of` returns them
    weight: the layer's weight
    """
    rows = len(weight) // len(parts)
    up_matrices = []
    down_matrices = []
    for part in parts:
        down = tensors.get(adapter_name(layer, part, "A"))
        if down is None:
            # This part has no adapter: its block in B has no columns, and A has no rows for it.
            up_matrices.append(weight.new_zeros(rows, 0))
        else:
            up_matrices.append(tensors[adapter_name(layer, part, "B")])
            down_matrices.append(down)
    if len(parts) == 1:
        return up_matrices[0], down_matrices[0]
    return torch.block_diag(*up_matrices), torch.cat(down_matrices)


class Merged(Mapping[str, Tensor]):
    """The weights of a model by name, with adapters merged into them; each is computed when it is accessed."""

    def __init__(self, tensors: Any, factor: float) -> None:
        """Merge tensors: frozen weights, the classifier and adapters, whose products are multiplied by `factor`."""
        self._tensors = tensors
        self._factor = factor
        self._adapted_layers = {name.rpartition(".")[0] for name in tensors if is_adapter(name)}
        self._names = [name for name in tensors if not is_adapter(name)]

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; to the weight of a layer with adapters, the product of their matrices is added."""
        weight: Tensor = self._tensors[name]
        layer, _, parameter = name.rpartition(".")
        if parameter != "weight" or layer not in self._adapted_layers:
            return weight
        prefix = f"{layer}."
        adapters = {key: self._tensors[key] for key in self._tensors if is_adapter(key) and key.startswith(prefix)}
        up, down = (matrix.double() for matrix in factors(adapters, prefix, parts_of(layer), weight))
        return torch.addmm(weight.double(), up, down, alpha=self._factor).to(weight.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_tensors(checkpoint: Checkpoint, name: str = MODEL, merged: bool = True) -> JoinedShards | Merged:
    """Open the tensors of a checkpoint's file, or of its shards, each read from disk when it is accessed.

    For a run with adapters (MODEL.LORA), the tensors of its file of frozen weights are added.

    name: name of the file
    merged: whether to merge adapters into the weights; otherwise, frozen weights and adapters are separate tensors
    """
    folder = checkpoint.folder
    # The file itself, or its shards; if neither is recorded, the file itself.
    names = files_of(name, checkpoint.meta.get("files", ())) or [name]
    files = [folder / file_name for file_name in names]
    frozen_file = base_file(folder, checkpoint.meta)
    if frozen_file is not None:
        files.insert(0, frozen_file)
    try:
        tensors = JoinedShards(files)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / name}: cannot be read ({error}).") from None
    if frozen_file is None or not merged:
        return tensors
    return Merged(tensors, checkpoint.meta[LORA]["factor"])


def read_state(checkpoint: Checkpoint, mapped: bool = False) -> dict[str, Any]:
    """Read state.pt. `mapped`: whether to map its tensors into memory, so that they are read when they are used."""
    file = checkpoint.folder / STATE
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # A damaged file makes the unpickler raise nearly any exception.
        raise UserError(f"{file}: cannot be read ({type(error).__name__}).") from None


def fp32_modules(chosen: Chosen) -> list[str]:
    """The modules that AMP.AUTO_FP32 moved to fp32 in the run that trained these weights."""
    if chosen.checkpoint is None:
        return chosen.meta["fp32_modules"]
    # Nearly all of the state belongs to the optimiser, and is not read.
    state = read_state(chosen.checkpoint, mapped=True)
    # A pydantic model of the one field that is read, to report a damaged file.
    needed_field = create_model("MovedModules", fp32_modules=(list[str], ...))
    check_fields(needed_field, state, chosen.place / STATE)
    return state["fp32_modules"]


def read_weights(chosen: Chosen) -> dict[str, Tensor]:
    """Read the chosen weights, by name; those of a checkpoint after a check of their hashes."""
    if chosen.checkpoint is not None:
        file_name = chosen.which.file
        return dict(open_tensors(verify(chosen.checkpoint, file_name), file_name))
    with safe_open(str(chosen.place), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
