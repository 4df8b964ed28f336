"""Files like those of paddle.save, with small models."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tools.export.command import main

Arrays = dict[str, np.ndarray]
Tool = Callable[..., tuple[int, str]]

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
SWIN: dict[str, Any] = {"img_size": 56, "window_size": 7, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
SWIN |= {"num_classes": 5}
BLOCKS = {"norm1": "attn_norm", "norm2": "mlp_norm", "attn.proj": "attn.out"}
TODAY = {
    "cls_token": "cls_token",
    "dist_token": "dist_token",
    "pos_embed": "position_embedding",
    "patch_embed.proj": "patch_embedding.patch_embedding",
    "norm": "encoder.encoder_norm",
    "head": "classifier",
    "head_dist": "classifier_dist",
    "blocks": "encoder.layers",
}
SECOND = TODAY | {
    "cls_token": "patch_embedding.cls_token",
    "pos_embed": "patch_embedding.position_embeddings",
}
FIRST = TODAY | {
    "cls_token": "transformer.embeddings.cls_token",
    "pos_embed": "transformer.embeddings.position_embeddings",
    "patch_embed.proj": "transformer.embeddings.patch_embeddings",
    "norm": "transformer.encoder.encoder_norm",
    "blocks": "transformer.encoder.layers",
}
FIRST_DEIT = {
    "cls_token": "class_token",
    "dist_token": "distill_token",
    "pos_embed": "pos_embed",
    "patch_embed.proj": "patch_embed.proj",
    "norm": "norm",
    "head": "head",
    "head_dist": "head_distill",
    "blocks": "layers",
}
OF_SWIN = {"patch_embed.proj": "patch_embedding.patch_embed", "patch_embed.norm": "patch_embedding.norm"}
OF_SWIN |= {"norm": "norm", "head.fc": "fc"}


def random_weights(model: nn.Module) -> nn.Module:
    """Random values in every tensor, also norms and biases."""
    torch.manual_seed(1)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.eval()


def of_paddle(model: nn.Module, names: dict[str, str], blocks: dict[str, str]) -> Arrays:
    """Weights in PaddleViT's names and layout: the inverse of the conversion."""
    arrays = {}
    for key, value in model.state_dict().items():
        place, _, kind = key.rpartition(".")
        if block := re.fullmatch(r"blocks\.(\d+)\.(.+)", place):
            name = f"{names['blocks']}.{block[1]}.{blocks.get(block[2], block[2])}.{kind}"
        elif block := re.fullmatch(r"layers\.(\d+)\.downsample(.+)", place):
            name = f"stages.{int(block[1]) - 1}.downsample{block[2]}.{kind}"
        elif key.startswith("layers."):
            name = key.replace("layers.", "stages.", 1)
        else:
            name = f"{names[place]}.{kind}" if place else names[key]
        array = value.numpy()
        linear = kind == "weight" and array.ndim == 2
        arrays[name] = np.ascontiguousarray(array.T) if linear else array
    return arrays


def swin_of_paddle() -> tuple[nn.Module, Arrays]:
    model = random_weights(SwinTransformer(**SWIN))
    arrays = of_paddle(model, OF_SWIN, {})
    arrays["stages.0.blocks.1.attn_mask"] = np.zeros((4, 49, 49), np.float32)
    arrays["stages.0.blocks.0.attn.relative_position_index"] = np.zeros((49, 49), np.int64)
    return model, arrays


MODELS: dict[str, Callable[[], tuple[nn.Module, Arrays]]] = {
    "vit": lambda: (model := random_weights(VisionTransformer(**VIT)), of_paddle(model, TODAY, BLOCKS)),
    "vit, second": lambda: (model := random_weights(VisionTransformer(**VIT)), of_paddle(model, SECOND, BLOCKS)),
    "vit, first": lambda: (model := random_weights(VisionTransformer(**VIT)), of_paddle(model, FIRST, BLOCKS)),
    "distilled": lambda: (model := random_weights(VisionTransformerDistilled(**VIT)), of_paddle(model, TODAY, BLOCKS)),
    "distilled, first": lambda: (
        model := random_weights(VisionTransformerDistilled(**VIT)),
        of_paddle(model, FIRST_DEIT, {}),
    ),
    "swin": swin_of_paddle,
}


class Tensor:
    """Tensor as newer versions of paddle.save pickle it: a tuple of its name in the graph and its array."""

    def __init__(self, name: str, data: np.ndarray) -> None:
        self.name, self.data = name, data

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((self.name, self.data),)


def state_dict_of(arrays: Arrays) -> dict[str, Any]:
    return {**arrays, "StructuredToParameterName@@": {name: f"linear_{n}.w_0" for n, name in enumerate(arrays)}}


def training_of(arrays: Arrays) -> dict[str, Any]:
    tensors = OrderedDict((name, Tensor(f"p_{n}", array)) for n, (name, array) in enumerate(arrays.items()))
    rate = {"last_epoch": 3, "last_lr": np.float64(0.1), "betas": (0.9, None)}
    return {"model": tensors, "optimizer": {"LR_Scheduler": rate, "m": Tensor("m", np.ones(3))}, "epoch": 3}


def pieces_of(arrays: Arrays) -> dict[str, Any]:
    """Arrays of more than 60 numbers in pieces, as paddle.save cuts those beyond 1 GiB."""
    content, cut = dict[str, Any](), {}
    for name, array in arrays.items():
        if array.size <= 60:
            content[name] = array
            continue
        flat = array.flatten()
        slices = {f"{name}@@.{n}": flat[n * 60 : (n + 1) * 60] for n in range(-(-flat.size // 60))}
        content |= slices
        cut[name] = {"OriginShape": array.shape, "slices": list(slices)}
    return {**content, "UnpackBigParamInfor@@": cut, "StructuredToParameterName@@": {}}


def tool_of(capsys: pytest.CaptureFixture[str]) -> Tool:
    """Run the tool in this process: exit code and output."""

    def call(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([*map(str, words), "-to", "safetensors"])
        return code, "".join(capsys.readouterr())

    return call


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path
