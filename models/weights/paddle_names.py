"""Conversion of PaddleViT's weights to timm's names and torch's layout: here ViT, DeiT and Swin.

The other families are in paddle_rules.yaml.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.build import is_timm_name
from models.weights.paddle_rules import Rules as FamilyRules
from models.weights.paddle_rules import rules_of

Rules = tuple[tuple[str, str], ...]

# For all versions of PaddleViT: its first ViT nested everything in `transformer`, its first DeiT was close to timm.
BLOCK = r"(?:transformer\.)?(?:encoder\.)?layers\.(\d+)\."
VIT: Rules = (
    (r"(?:(?:transformer\.embeddings|patch_embedding)\.)?(?:cls_token|class_token)", "cls_token"),
    (r"(?:(?:transformer\.embeddings|patch_embedding)\.)?(?:position_embeddings?|pos_embed)", "pos_embed"),
    (r"dist_token|distill_token", "dist_token"),
    (
        r"(?:transformer\.embeddings\.patch_embeddings|patch_embedding\.patch_embedding|patch_embed\.proj)\.(\w+)",
        r"patch_embed.proj.\1",
    ),
    (BLOCK + r"(?:attn_norm|norm1)\.(\w+)", r"blocks.\1.norm1.\2"),
    (BLOCK + r"(?:mlp_norm|norm2)\.(\w+)", r"blocks.\1.norm2.\2"),
    (BLOCK + r"attn\.(?:out|proj)\.(\w+)", r"blocks.\1.attn.proj.\2"),
    (BLOCK + r"(attn\.qkv|mlp\.fc1|mlp\.fc2)\.(\w+)", r"blocks.\1.\2.\3"),
    (r"(?:(?:transformer\.)?encoder\.encoder_norm|norm)\.(\w+)", r"norm.\1"),
    (r"(?:classifier|head)\.(weight|bias)", r"head.\1"),
    (r"(?:classifier_dist|head_distill)\.(\w+)", r"head_dist.\1"),
)
SWIN: Rules = (
    (r"patch_embedding\.patch_embed\.(\w+)", r"patch_embed.proj.\1"),
    (r"patch_embedding\.norm\.(\w+)", r"patch_embed.norm.\1"),
    (
        r"stages\.(\d+)\.blocks\.(\d+)\.((?:norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.\w+)",
        r"layers.\1.blocks.\2.\3",
    ),
    (
        r"stages\.(\d+)\.blocks\.(\d+)\.attn\.relative_position_bias_table",
        r"layers.\1.blocks.\2.attn.relative_position_bias_table",
    ),
    (r"norm\.(\w+)", r"norm.\1"),
    (r"fc\.(\w+)", r"head.fc.\1"),
)
MERGING = r"stages\.(\d+)\.downsample\.(reduction\.weight|norm\.\w+)"
"""PaddleViT merges patches at the end of a stage, timm at the beginning of the next one."""
COMPUTED = re.compile(r"stages\.\d+\.blocks\.\d+\.(?:attn\.relative_position_index|attn_mask)")
"""Buffers that follow from the sizes"""
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
    by_rules: bool = False
    """Whether by paddle_rules.yaml: then every tensor gets a name, which timm's model may not have"""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)
    """Name in the file -> timm's name, the first of several"""
    unused: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    """Left out because timm computes them"""
    folded: list[str] = field(default_factory=list)
    """Biases that the batch norm behind them has taken up"""

    @property
    def left_over(self) -> list[str]:
        """Tensors that timm's model does not have, so that it would differ from the trained model."""
        return [name for name in self.unused if not name.startswith(OF_A_CLASSIFIER)]


def convert(arrays: dict[str, np.ndarray], where: object = "the file") -> Converted:
    """Rename the arrays, and transpose the weights of linear layers, which Paddle stores the other way round."""
    if rules := rules_of(arrays):
        return _converted_by(rules, arrays, where)
    swin = any(name.startswith("stages.") for name in arrays)
    deit = any(name in ("dist_token", "distill_token", "class_token") for name in arrays)
    converted = Converted("swin" if swin else "deit" if deit else "vit")
    for name, array in arrays.items():
        if swin and COMPUTED.fullmatch(name):
            converted.computed.append(name)
            continue
        new = _renamed(name, SWIN if swin else VIT)
        if new is None or new in converted.tensors:
            converted.unused.append(name)
            continue
        converted.used[name] = new
        converted.tensors[new] = _tensor(array, transposed=is_transposed(name, array))
    return converted


def _converted_by(rules: FamilyRules, arrays: dict[str, np.ndarray], where: object) -> Converted:
    converted = Converted(rules.family, by_rules=True)
    kept = rules.prepared(arrays, where)
    folded = [name for name in arrays if name not in kept and any(re.search(bias, name) for bias, _ in rules.folded)]
    converted.computed = [name for name in arrays if name not in kept and name not in folded]
    converted.folded = folded
    for name, array in kept.items():
        news = rules.timm_names(name)
        tensor = _tensor(array, transposed=is_transposed(name, array))
        converted.used[name] = news[0]
        converted.tensors |= dict(zip(news, tensor.tensor_split(len(news)), strict=True))
    for name in [name for name in converted.tensors if name.endswith(".running_mean")]:
        counter = f"{name.removesuffix('.running_mean')}.num_batches_tracked"  # which Paddle does not count
        converted.tensors[counter] = torch.tensor(0)
    return converted


def is_transposed(name: str, array: np.ndarray) -> bool:
    return name.endswith(".weight") and array.ndim == 2


def _renamed(name: str, rules: Rules) -> str | None:
    if rules is SWIN and (merging := re.fullmatch(MERGING, name)):
        return f"layers.{int(merging[1]) + 1}.downsample.{merging[2]}"
    for pattern, new in rules:
        if match := re.fullmatch(pattern, name):
            return match.expand(new)
    return None


def _tensor(array: np.ndarray, transposed: bool) -> Tensor:
    if array.dtype == np.uint16:  # Paddle stores bfloat16 as uint16: the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    numbers = np.array(array.T if transposed else array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(numbers)


def sizes_of_weights(converted: Converted) -> dict[str, Any]:
    """MODEL's sizes, with IMAGE_SIZE and IMAGE_CHANNELS of DATA. KeyError if the first tensors are missing."""
    tensors, swin = converted.tensors, converted.family == "swin"
    patches = tensors["patch_embed.proj.weight"]
    width, channels, patch = patches.shape[0], patches.shape[1], patches.shape[-1]
    head = tensors.get("head.fc.weight" if swin else "head.weight")
    sizes: dict[str, Any] = {
        "EMBED_DIM": width,
        "PATCH_SIZE": patch,
        "IMAGE_CHANNELS": channels,
        "NUM_CLASSES": None if head is None else head.shape[0],
    }
    first = "layers.0.blocks.0" if swin else "blocks.0"
    sizes["MLP_RATIO"] = tensors[f"{first}.mlp.fc1.weight"].shape[0] / width
    sizes["QKV_BIAS"] = f"{first}.attn.qkv.bias" in tensors
    return sizes | (_of_swin(tensors, patch) if swin else _of_vit(tensors, width, patch))


def _of_vit(tensors: dict[str, Tensor], width: int, patch: int) -> dict[str, Any]:
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    tokens = tensors["pos_embed"].shape[1] - 1 - ("dist_token" in tensors)
    _, heads = VIT_SIZES.get((width, depth), ("", None))
    return {"DEPTH": depth, "NUM_HEADS": heads, "IMAGE_SIZE": math.isqrt(tokens) * patch}


def _of_swin(tensors: dict[str, Tensor], patch: int) -> dict[str, Any]:
    tables = {
        (int(name.split(".")[1]), int(name.split(".")[3])): value.shape
        for name, value in tensors.items()
        if name.endswith("relative_position_bias_table")
    }
    stages = 1 + max(stage for stage, _ in tables)
    depths = [1 + max(block for owner, block in tables if owner == stage) for stage in range(stages)]
    windows = [(math.isqrt(tables[stage, 0][0]) + 1) // 2 for stage in range(stages)]
    return {
        "STAGE_DEPTHS": depths,
        "NUM_HEADS": [tables[stage, 0][1] for stage in range(stages)],
        "WINDOW_SIZE": windows[0],
        # In every published size, the window of the last stage covers the whole feature map.
        "IMAGE_SIZE": windows[-1] * patch * 2 ** (stages - 1),
    }


def timm_name(converted: Converted, sizes: dict[str, Any]) -> str | None:
    """timm's name of a model of these sizes; None if it is not a published one."""
    width, patch, side = sizes["EMBED_DIM"], sizes["PATCH_SIZE"], sizes["IMAGE_SIZE"]
    if converted.family == "swin":
        size = SWIN_SIZES.get((width, tuple(sizes["STAGE_DEPTHS"])))
        name = f"swin_{size}_patch{patch}_window{sizes['WINDOW_SIZE']}_{side}"
    else:
        size, _ = VIT_SIZES.get((width, sizes["DEPTH"]), (None, None))
        distilled = "_distilled" if "dist_token" in converted.tensors else ""
        name = f"{converted.family}_{size}{distilled}_patch{patch}_{side}"
    return name if size and is_timm_name(name) else None
