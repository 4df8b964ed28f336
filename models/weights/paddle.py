"""Read PaddleViT's weights, and convert them to timm's names by the rules in paddle_rules.yaml."""

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
"""Key of Paddle's table of large arrays that are stored in pieces"""


def read_pdparams(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays in a file that paddle.save wrote, by name; in a checkpoint, those of the model.

    The file is a pickle, but no code in it is run. UserError if it is damaged, or holds more than arrays.
    """
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
    """List the keys of a checkpoint under which it has weights; the first is the one to use. Empty if it has none.

    EMA weights take precedence, as in timm. If there are other weights beside them, a log line says so; `where`, the
    checkpoint's name, begins the line.
    """
    keys = [key for key in WEIGHTS_KEYS if content.get(key) is not None]
    if len(keys) > 1 and keys[0] in EMA_KEYS:
        log.info("%s holds %s: the EMA is used.", where, " and ".join(keys))
    return keys


def _arrays(content: Any, file_size: int) -> dict[str, np.ndarray]:
    """Find the arrays in the content of a file, by name, and join those that are stored in pieces.

    Raises ValueError if there are none, and Refused if they are larger than the file (`file_size` bytes). Paddle's
    table of arrays in pieces is {name: {"slices": names of the pieces, "OriginShape": shape}}.
    """
    keys = keys_of_weights(content, "The checkpoint") if isinstance(content, dict) else []
    entries = content[keys[0]] if keys else content  # without such a key, the file is a dict of arrays itself
    if not isinstance(entries, dict):
        raise ValueError(f"it holds a {type(entries).__name__} instead of a dict of arrays by name")
    arrays: dict[str, np.ndarray] = {}
    for name, value in entries.items():
        array = value[1] if isinstance(value, tuple) and len(value) == 2 else value  # some are (name, array)
        if isinstance(array, np.ndarray) and array.dtype.kind in "biuf":  # bool, int, unsigned, float
            arrays[str(name)] = array
    # Many names for the same bytes would take much more memory once they are converted.
    if sum(array.nbytes for array in arrays.values()) > file_size:
        raise Refused("its arrays are larger than the file")
    in_pieces = entries.get(SLICES) or {}
    for name, entry in in_pieces.items():
        pieces = [arrays.pop(piece).reshape(-1) for piece in entry["slices"]]
        shape = [int(side) for side in entry["OriginShape"]]
        arrays[str(name)] = np.concatenate(pieces).reshape(shape)
    if not arrays:
        raise ValueError("it has no arrays")
    return arrays


FILE = Path(__file__).with_name("paddle_rules.yaml")
NUMBER = re.compile(r"<(\d+)((?:[-+*/]\d+)*)>")
"""Calculation in a replacement, once its groups are filled in: <2*2+1> becomes 5"""
STEP = re.compile(r"([-+*/])(\d+)")
STEPS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
OF_BATCH_NORM = ((r"\._mean$", ".running_mean"), (r"\._variance$", ".running_var"))
"""Patterns and replacements for the names of a batch norm's statistics, in all families"""


@dataclass(frozen=True)
class FamilyRules:
    """Rules that convert the weights of one of PaddleViT's families to timm's. One entry of paddle_rules.yaml.

    Patterns are regular expressions for the names of tensors. They may match anywhere in a name, so most are anchored.
    """

    family: str
    """TYPE in small letters"""
    signs: Sequence[str]
    """Patterns by which a file is recognised: each matches some name in a file of this family"""
    names: Sequence[Sequence[str]] = ()
    """Patterns and replacements, applied in order; <\\1+1> is a number that is computed"""
    computed: str = "$^"
    """Pattern of the tensors that are left out, because timm computes them from the sizes; by default none"""
    split: Sequence[tuple[str, Sequence[str]]] = ()
    """Pattern of a fused linear layer, and the names of timm's layers for its parts"""
    folded: Sequence[Sequence[str]] = ()
    """Pattern of a bias that timm's layer lacks, and name of the mean of the batch norm behind it, which takes it up"""
    equal: Sequence[Sequence[str]] = ()
    """Patterns and names of pairs of tensors that are one in timm's model, so they must be equal in the file"""
    refused: str = ""
    """Why PaddleViT's model computes something else than timm's, so that its weights are refused; '' if it does not"""
    closed: bool = False
    """Whether tensors that no pattern matches are unused and reported; else they keep their names"""

    @property
    def title(self) -> str:
        return families()[self.family].title

    def timm_names(self, name: str) -> list[str]:
        """Return timm's name for a tensor, or several names for the parts of a fused layer.

        A replacement may contain a calculation with a matched number, such as <2*2+1>, which becomes 5 in the end.
        """
        for pattern, parts in self.split:
            if re.search(pattern, name):
                return [re.sub(pattern, part, name) for part in parts]
        timm_name = name
        for pattern, replacement in self.names:
            timm_name = re.sub(pattern, replacement, timm_name)
        for pattern, replacement in OF_BATCH_NORM:
            timm_name = re.sub(pattern, replacement, timm_name)
        return [NUMBER.sub(_computed_number, timm_name)]

    def prepared(self, arrays: dict[str, np.ndarray], where: object) -> dict[str, np.ndarray]:
        """Leave out the arrays that timm computes or lacks. UserError for weights that timm's model cannot have.

        `where` names the file in messages.
        """
        if self.refused:
            raise UserError(f"{where}: weights of PaddleViT's {self.title} cannot be converted: {self.refused}.")
        remaining = {name: array for name, array in arrays.items() if not re.search(self.computed, name)}
        # Two tensors that are one in timm's model must be equal. The replacement makes one's name from the other's.
        for pattern, replacement in self.equal:
            for name in _matching(pattern, remaining):
                twin = re.sub(pattern, replacement, name)
                if twin not in remaining or not np.array_equal(remaining[name], remaining[twin]):
                    raise UserError(
                        f"{where}: {name} differs from {twin}, but timm's {self.title} has one tensor for both, so "
                        "the weights cannot be converted."
                    )
        # A bias that timm's layer lacks goes into the mean of the batch norm behind the layer.
        for pattern, replacement in self.folded:
            for bias in _matching(pattern, remaining):
                mean = re.sub(pattern, replacement, bias)
                if mean in remaining:
                    # A batch norm subtracts its mean, so a smaller mean has the effect of the bias.
                    remaining[mean] = remaining[mean] - remaining.pop(bias)
        return remaining

    def describes(self, names: Collection[str]) -> bool:
        """Tell whether each sign of this family matches one of the names in a file."""
        return all(_matching(sign, names) for sign in self.signs)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """List the names that a pattern matches."""
    return [name for name in names if re.search(pattern, name)]


def _computed_number(match: re.Match[str]) -> str:
    """Compute what a match of NUMBER says, from left to right."""
    number = int(match[1])
    for sign, operand in STEP.findall(match[2]):
        number = STEPS[sign](number, int(operand))
    return str(number)


def rules_of(names: Collection[str]) -> FamilyRules:
    """Return the rules for a file with these names of tensors. If no others fit, these are those of ViT, the last."""
    return next(rules for rules in all_rules() if rules.describes(names))


@cache
def all_rules() -> tuple[FamilyRules, ...]:
    """Read the rules of all families, in the order in which they are tried."""
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
"""(width, depth) -> size in timm's name, and number of heads, which no tensor's shape shows"""
SWIN_SIZES = {
    (96, (2, 2, 6, 2)): "tiny",
    (96, (2, 2, 18, 2)): "small",
    (128, (2, 2, 18, 2)): "base",
    (192, (2, 2, 18, 2)): "large",
}


@dataclass
class Converted:
    """Weights for timm's model, and what became of each tensor of the file."""

    family: str
    """vit, deit, swin, or another TYPE of PaddleViT"""
    closed: bool = True
    """See `FamilyRules`"""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Converted tensors by timm's names"""
    used: dict[str, str] = field(default_factory=dict)
    """Name in the file -> timm's name, the first of several"""
    unused: list[str] = field(default_factory=list)
    """Names in the file that have no place in timm's model"""
    computed: list[str] = field(default_factory=list)
    """Names in the file that are left out, because timm computes these tensors"""
    folded: list[str] = field(default_factory=list)
    """Names of biases that the batch norm behind them has taken up"""


def convert(arrays: dict[str, np.ndarray], where: object = "the file") -> Converted:
    """Convert PaddleViT's arrays to tensors of timm's model.

    They are renamed, and the weights of linear layers, which Paddle stores the other way round, are transposed.
    UserError for weights that cannot be converted; `where` names the file in it.
    """
    rules = rules_of(arrays)
    remaining = rules.prepared(arrays, where)
    converted = Converted(rules.family, rules.closed)

    # Note the arrays left out: biases that a batch norm has taken up, and tensors that timm computes.
    for name in arrays:
        if name not in remaining:
            is_bias_in_batch_norm = any(re.search(bias, name) for bias, _ in rules.folded)
            names_left_out = converted.folded if is_bias_in_batch_norm else converted.computed
            names_left_out.append(name)

    # Rename the others. A fused layer has several of timm's names, one per part.
    for name, array in remaining.items():
        timm_names = rules.timm_names(name)
        matches_rule = any(re.search(pattern, name) for pattern, _ in rules.names)
        is_taken = timm_names[0] in converted.tensors  # by another array, so this one would overwrite it
        covers_all = rules.closed  # else the names that no rule matches are timm's already
        if covers_all and (not matches_rule or is_taken):
            converted.unused.append(name)
            continue
        converted.used[name] = timm_names[0]
        tensor = _tensor(array, transposed=is_transposed(name, array))
        parts = tensor.tensor_split(len(timm_names))
        converted.tensors |= dict(zip(timm_names, parts, strict=True))

    # timm's batch norms count batches; Paddle's do not.
    for name in list(converted.tensors):
        if name.endswith(".running_mean"):
            counter = f"{name.removesuffix('.running_mean')}.num_batches_tracked"
            converted.tensors[counter] = torch.tensor(0)
    return converted


def is_transposed(name: str, array: np.ndarray) -> bool:
    """Tell whether Paddle stores an array the other way round, as it does the weights of linear layers."""
    return name.endswith(".weight") and array.ndim == 2


def _tensor(array: np.ndarray, transposed: bool) -> Tensor:
    """Make a tensor of a copy of an array. Paddle's bfloat16 becomes fp32."""
    if array.dtype == np.uint16:  # Paddle stores bfloat16 as uint16: the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    numbers = np.array(array.T if transposed else array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(numbers)


def sizes_of_weights(converted: Converted) -> dict[str, Any]:
    """Infer the sizes of a ViT or Swin from the shapes of its tensors, and return them by key of the settings.

    The keys are those of the MODEL section, and DATA's IMAGE_SIZE and IMAGE_CHANNELS. A size that no shape shows, such
    as the number of heads of an unpublished ViT, is None. KeyError if one of the first tensors is missing.
    """
    tensors = converted.tensors
    is_swin = converted.family == "swin"
    patches = tensors["patch_embed.proj.weight"]
    width = patches.shape[0]
    patch = patches.shape[-1]
    head = tensors.get("head.fc.weight" if is_swin else "head.weight")
    first_block = "layers.0.blocks.0" if is_swin else "blocks.0"
    sizes: dict[str, Any] = {
        "EMBED_DIM": width,
        "PATCH_SIZE": patch,
        "IMAGE_CHANNELS": patches.shape[1],
        "NUM_CLASSES": None if head is None else head.shape[0],
        "MLP_RATIO": tensors[f"{first_block}.mlp.fc1.weight"].shape[0] / width,
        "QKV_BIAS": f"{first_block}.attn.qkv.bias" in tensors,
    }
    family_sizes = _sizes_of_swin(tensors, patch) if is_swin else _sizes_of_vit(tensors, width, patch)
    return sizes | family_sizes


def _sizes_of_vit(tensors: dict[str, Tensor], width: int, patch: int) -> dict[str, Any]:
    """Find the sizes that only a ViT has. NUM_HEADS is None unless the model is of a published size."""
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    patches = tensors["pos_embed"].shape[1] - 1  # without the class token
    if "dist_token" in tensors:
        patches -= 1
    _, heads = VIT_SIZES.get((width, depth), ("", None))
    return {"DEPTH": depth, "NUM_HEADS": heads, "IMAGE_SIZE": math.isqrt(patches) * patch}


def _sizes_of_swin(tensors: dict[str, Tensor], patch: int) -> dict[str, Any]:
    """Find the sizes that only a Swin has, by the tables of its relative position biases."""
    table_shapes: dict[tuple[int, int], torch.Size] = {}  # by (stage, block)
    for name, tensor in tensors.items():
        if name.endswith("relative_position_bias_table"):
            _, stage, _, block, *_ = name.split(".")  # such as layers.2.blocks.5.attn.relative_position_bias_table
            table_shapes[int(stage), int(block)] = tensor.shape
    depths: list[int] = []
    heads: list[int] = []
    windows: list[int] = []
    for stage in range(1 + max(stage for stage, _ in table_shapes)):
        depths.append(1 + max(block for stage_of_block, block in table_shapes if stage_of_block == stage))
        offsets, heads_of_stage = table_shapes[stage, 0]
        heads.append(heads_of_stage)
        # A window of side w has (2 w - 1) x (2 w - 1) relative offsets.
        windows.append((math.isqrt(offsets) + 1) // 2)
    return {
        "STAGE_DEPTHS": depths,
        "NUM_HEADS": heads,
        "WINDOW_SIZE": windows[0],
        # In every published size, the window of the last stage covers the whole feature map.
        "IMAGE_SIZE": windows[-1] * patch * 2 ** (len(windows) - 1),
    }


def timm_name(converted: Converted, sizes: dict[str, Any]) -> str | None:
    """Return timm's name for a model of these sizes; None if timm has no such model."""
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
    is_published_size = size is not None  # otherwise `name` means nothing
    return name if is_published_size and is_timm_name(name) else None
