"""PaddleViT's weights: reading them, and their conversion to timm's names, by the rules in paddle_rules.yaml."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from models.build import is_timm_name
from utils.arrays_only import ArraysOnly, Refused
from utils.config.paddlevit import families
from utils.errors import UserError
from utils.log import log

EMA_KEYS = ("model_ema", "state_dict_ema")
WEIGHTS_KEYS = (*EMA_KEYS, "model", "state_dict")
"""Keys of the weights in a checkpoint; the EMA takes precedence, as in timm."""
SLICES = "UnpackBigParamInfor@@"
"""Paddle's entry about large arrays that are cut into pieces"""


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name in a file that paddle.save wrote; in a checkpoint, those of the model."""
    try:
        with open(path, "rb") as file:
            content = ArraysOnly(file, encoding="latin1").load()
        return _arrays(content, path.stat().st_size)
    except Refused as refused:
        raise UserError(
            f"{path}: {refused}. No valid file of weights does this; the file is refused, and nothing in it was run."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path} cannot be read as a file of paddle.save ({error or type(error).__name__}): it is damaged, cut "
            "off, or in another format."
        ) from None


def keys_of_weights(content: Mapping[Any, Any], where: object) -> list[str]:
    """The keys that hold weights, first the one to use; logs where that is an EMA beside others."""
    keys = [key for key in WEIGHTS_KEYS if content.get(key) is not None]
    if len(keys) > 1 and keys[0] in EMA_KEYS:
        log.info("%s holds %s: the EMA is used.", where, " and ".join(keys))
    return keys


def _arrays(content: Any, size: int) -> dict[str, np.ndarray]:
    keys = keys_of_weights(content, "The checkpoint") if isinstance(content, dict) else []
    inner = content[keys[0]] if keys else content
    if not isinstance(inner, dict):
        raise ValueError(f"it holds a {type(inner).__name__} instead of a dict of arrays by name")
    arrays: dict[str, np.ndarray] = {}
    for name, value in inner.items():
        array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
        if isinstance(array, np.ndarray) and array.dtype.kind in "biuf":
            arrays[str(name)] = array
    # Many names for the same bytes would take much more memory once they are converted.
    if sum(array.nbytes for array in arrays.values()) > size:
        raise Refused("its arrays are larger than the file")
    sliced = inner.get(SLICES) or {}
    for name, entry in sliced.items():
        pieces = [arrays.pop(piece).reshape(-1) for piece in entry["slices"]]
        shape = [int(side) for side in entry["OriginShape"]]
        arrays[str(name)] = np.concatenate(pieces).reshape(shape)
    if not arrays:
        raise ValueError("it has no arrays")
    return arrays


FILE = Path(__file__).with_name("paddle_rules.yaml")
NUMBER = re.compile(r"<(\d+)((?:[-+*/]\d+)*)>")
"""In a replacement, after its groups were filled in: <2*2+1> is 5"""
STEP = re.compile(r"([-+*/])(\d+)")
STEPS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
OF_BATCH_NORM = ((r"\._mean$", ".running_mean"), (r"\._variance$", ".running_var"))


@dataclass(frozen=True)
class FamilyRules:
    """How the weights of one family become timm's. Patterns of names are searched for, so most are anchored."""

    family: str
    """TYPE in small letters"""
    signs: Sequence[str]
    """Patterns that a file of this family has a name for, each"""
    names: Sequence[Sequence[str]] = ()
    """Patterns and replacements, applied in order; <\\1+1> is a number that is computed"""
    computed: str = "$^"
    """Names of tensors that follow from the sizes"""
    split: Sequence[tuple[str, Sequence[str]]] = ()
    """A fused linear layer, and timm's layers for its parts"""
    folded: Sequence[Sequence[str]] = ()
    """A bias that timm's layer lacks, and the mean of the batch norm behind it, which takes it up"""
    equal: Sequence[Sequence[str]] = ()
    """Weights that timm's model shares, and so must be equal in the file"""
    refused: str = ""
    """Why PaddleViT's model computes something else than timm's, if it does"""
    closed: bool = False
    """Whether tensors that no pattern names are reported; else they keep their name, which timm's model may not have"""

    @property
    def title(self) -> str:
        return families()[self.family].title

    def timm_names(self, name: str) -> list[str]:
        """One, or several for the parts of a fused layer."""
        for pattern, parts in self.split:
            if re.search(pattern, name):
                return [re.sub(pattern, part, name) for part in parts]
        for pattern, new in self.names:
            name = re.sub(pattern, new, name)
        for pattern, new in OF_BATCH_NORM:
            name = re.sub(pattern, new, name)
        return [NUMBER.sub(_computed, name)]

    def prepared(self, arrays: dict[str, np.ndarray], where: object) -> dict[str, np.ndarray]:
        """The arrays without what timm computes or lacks. Raise UserError for weights that timm's model cannot have."""
        if self.refused:
            raise UserError(f"{where}: weights of PaddleViT's {self.title} cannot be converted: {self.refused}.")
        kept = {name: array for name, array in arrays.items() if not re.search(self.computed, name)}
        for pattern, replacement in self.equal:
            for name in _matching(pattern, kept):
                other = re.sub(pattern, replacement, name)
                if other not in kept or not np.array_equal(kept[name], kept[other]):
                    raise UserError(
                        f"{where}: {name} differs from {other}, but timm's {self.title} has one tensor for both, so "
                        "the weights cannot be converted."
                    )
        for pattern, replacement in self.folded:
            for name in _matching(pattern, kept):
                mean = re.sub(pattern, replacement, name)
                if mean in kept:
                    kept[mean] = kept[mean] - kept.pop(name)
        return kept

    def describes(self, names: Collection[str]) -> bool:
        """Whether a file with these names has a name for each sign."""
        return all(_matching(sign, names) for sign in self.signs)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if re.search(pattern, name)]


def _computed(found: re.Match[str]) -> str:
    number = int(found[1])
    for sign, other in STEP.findall(found[2]):
        number = STEPS[sign](number, int(other))
    return str(number)


def rules_of(names: Collection[str]) -> FamilyRules:
    """The rules for a file with these names: those of ViT, the last, where none fits."""
    return next(rules for rules in all_rules() if rules.describes(names))


@cache
def all_rules() -> tuple[FamilyRules, ...]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tuple(FamilyRules(word.partition(" ")[0], **table) for word, table in tables.items())


CLASSIFIERS = ("head.", "head_dist.")
OF_A_CLASSIFIER = ("classifier.", "classifier_dist.", "pre_logits.", "head.", "head_distill.", "fc.")
"""PaddleViT's names of the classifier, which timm's model may lack"""

VIT_SIZES = {
    (192, 12): ("tiny", 3),
    (384, 12): ("small", 6),
    (768, 12): ("base", 12),
    (1024, 24): ("large", 16),
    (1280, 32): ("huge", 16),
    (1408, 40): ("giant", 16),
}
"""(width, depth) -> size in timm's name, and number of heads, which no tensor's shape shows."""
SWIN_SIZES = {
    (96, (2, 2, 6, 2)): "tiny",
    (96, (2, 2, 18, 2)): "small",
    (128, (2, 2, 18, 2)): "base",
    (192, (2, 2, 18, 2)): "large",
}


@dataclass
class Converted:
    """Weights for timm's model, and the fate of each tensor of the file."""

    family: str
    """vit, deit, swin, or another TYPE of PaddleViT"""
    closed: bool = True
    """See `FamilyRules`"""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    """Name in the file -> timm's name, the first of several"""
    unused: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    """Left out because timm computes them"""
    folded: list[str] = field(default_factory=list)
    """Biases that the batch norm behind them has taken up"""


def convert(arrays: dict[str, np.ndarray], where: object = "the file") -> Converted:
    """Rename the arrays, and transpose the weights of linear layers, which Paddle stores the other way round."""
    rules = rules_of(arrays)
    kept = rules.prepared(arrays, where)
    converted = Converted(rules.family, rules.closed)
    for name in arrays:
        if name not in kept:
            is_folded = any(re.search(bias, name) for bias, _ in rules.folded)
            (converted.folded if is_folded else converted.computed).append(name)
    for name, array in kept.items():
        names = rules.timm_names(name)
        is_known = any(re.search(pattern, name) for pattern, _ in rules.names)
        if rules.closed and (not is_known or names[0] in converted.tensors):
            converted.unused.append(name)
            continue
        converted.used[name] = names[0]
        tensor = _tensor(array, transposed=is_transposed(name, array))
        parts = tensor.tensor_split(len(names))
        converted.tensors |= dict(zip(names, parts, strict=True))
    for name in list(converted.tensors):
        if name.endswith(".running_mean"):
            counter = f"{name.removesuffix('.running_mean')}.num_batches_tracked"  # which Paddle does not count
            converted.tensors[counter] = torch.tensor(0)
    return converted


def is_transposed(name: str, array: np.ndarray) -> bool:
    return name.endswith(".weight") and array.ndim == 2


def _tensor(array: np.ndarray, transposed: bool) -> Tensor:
    if array.dtype == np.uint16:  # Paddle stores bfloat16 as uint16: the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    numbers = np.array(array.T if transposed else array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(numbers)


def sizes_of_weights(converted: Converted) -> dict[str, Any]:
    """MODEL's sizes, with IMAGE_SIZE and IMAGE_CHANNELS of DATA. KeyError if the first tensors are missing."""
    tensors = converted.tensors
    is_swin = converted.family == "swin"
    patches = tensors["patch_embed.proj.weight"]
    width = patches.shape[0]
    patch = patches.shape[-1]
    head = tensors.get("head.fc.weight" if is_swin else "head.weight")
    first = "layers.0.blocks.0" if is_swin else "blocks.0"
    sizes: dict[str, Any] = {
        "EMBED_DIM": width,
        "PATCH_SIZE": patch,
        "IMAGE_CHANNELS": patches.shape[1],
        "NUM_CLASSES": None if head is None else head.shape[0],
        "MLP_RATIO": tensors[f"{first}.mlp.fc1.weight"].shape[0] / width,
        "QKV_BIAS": f"{first}.attn.qkv.bias" in tensors,
    }
    own = _sizes_of_swin(tensors, patch) if is_swin else _sizes_of_vit(tensors, width, patch)
    return sizes | own


def _sizes_of_vit(tensors: dict[str, Tensor], width: int, patch: int) -> dict[str, Any]:
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    tokens = tensors["pos_embed"].shape[1] - 1
    if "dist_token" in tensors:
        tokens -= 1
    _, heads = VIT_SIZES.get((width, depth), ("", None))
    return {"DEPTH": depth, "NUM_HEADS": heads, "IMAGE_SIZE": math.isqrt(tokens) * patch}


def _sizes_of_swin(tensors: dict[str, Tensor], patch: int) -> dict[str, Any]:
    tables: dict[tuple[int, int], torch.Size] = {}  # (stage, block) -> shape of its bias table
    for name, value in tensors.items():
        if name.endswith("relative_position_bias_table"):
            _, stage, _, block, *_ = name.split(".")
            tables[int(stage), int(block)] = value.shape
    depths: list[int] = []
    heads: list[int] = []
    windows: list[int] = []
    for stage in range(1 + max(stage for stage, _ in tables)):
        depths.append(1 + max(block for owner, block in tables if owner == stage))
        offsets, number = tables[stage, 0]
        heads.append(number)
        windows.append((math.isqrt(offsets) + 1) // 2)
    return {
        "STAGE_DEPTHS": depths,
        "NUM_HEADS": heads,
        "WINDOW_SIZE": windows[0],
        # In every published size, the window of the last stage covers the whole feature map.
        "IMAGE_SIZE": windows[-1] * patch * 2 ** (len(windows) - 1),
    }


def timm_name(converted: Converted, sizes: dict[str, Any]) -> str | None:
    """timm's name of a model of these sizes; None if it is not a published one."""
    width = sizes["EMBED_DIM"]
    patch = sizes["PATCH_SIZE"]
    side = sizes["IMAGE_SIZE"]
    if converted.family == "swin":
        size = SWIN_SIZES.get((width, tuple(sizes["STAGE_DEPTHS"])))
        name = f"swin_{size}_patch{patch}_window{sizes['WINDOW_SIZE']}_{side}"
    else:
        size, _ = VIT_SIZES.get((width, sizes["DEPTH"]), (None, None))
        distilled = "_distilled" if "dist_token" in converted.tensors else ""
        name = f"{converted.family}_{size}{distilled}_patch{patch}_{side}"
    return name if size and is_timm_name(name) else None
