"""What a classifier sees of a model's tokens (MODEL.POOL): `vitamp.load` needs it too, to build such a model."""

from __future__ import annotations

from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

from vitamp.errors import UserError

if TYPE_CHECKING:  # command lines have these names before torch is needed
    from torch import Tensor, nn

POOLED = "pooled"
PATCHES = "patches"
POOLS = (POOLED, "class", "mean", "both", "blocks")
"""What the model's own classifier sees; the class token; the mean of the patches; both; and the class tokens of the
last blocks with the mean of the patches, as DINOv2's evaluation has them. MODEL.POOL (utils/config/model.py) names
all but the first again: settings are read without this module"""
OWN_POOL = "own_pool"
"""Attribute of a model whose classifier sees another pooling than timm's"""
BLOCKS = 4
"""The last ones, whose class tokens `blocks` has"""


def pools_of(model: nn.Module) -> tuple[str, ...]:
    """Those that the model has: without tokens, or without a class token, fewer."""
    own: Any = model
    if not (hasattr(model, "num_prefix_tokens") and hasattr(model, "embed_dim")):
        return (POOLED,)
    if getattr(model, "cls_token", None) is None:
        return (POOLED, "mean")
    # CaiT, XCiT and ConViT have a class token in their last layers only.
    return POOLS if "return_prefix_tokens" in signature(own.forward_intermediates).parameters else POOLS[:-1]


def check_pool(model: nn.Module, pool: str, where: str = "-pool") -> None:
    """Raise UserError if the model does not have features, or the tokens for this pooling."""
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise UserError(f"{type(model).__name__} has no features: it needs timm's forward_features and forward_head.")
    known = pools_of(model)
    has_patches = known != (POOLED,)
    if pool not in known and not (has_patches and pool == PATCHES):
        raise UserError(f"{where} {pool}: this {type(model).__name__} has no such tokens; use {' or '.join(known)}.")


def pool_of(model: nn.Module) -> str:
    """What its classifier sees."""
    return vars(model).get(OWN_POOL, POOLED)


def pooled_features(module: nn.Module, pixels: Tensor, *pools: str) -> Tensor:
    """Features in fp32 of normalised images, those of several poolings side by side: B x D; patches alone B x N x D.

    A masked autoencoder sees all patches here.
    """
    import torch

    model: Any = module
    pixels = pixels.to(next(model.parameters()).dtype)  # O3 casts in the model's forward
    blocks = []
    if "blocks" in pools:
        how = {"return_prefix_tokens": True, "norm": True, "output_fmt": "NLC"}
        tokens, found = model.forward_intermediates(pixels, indices=min(BLOCKS, len(model.blocks)), **how)
        blocks = [prefix[:, 0] for _, prefix in found]
    else:
        tokens = model.forward_features(pixels)
    columns = []
    for pool in pools:
        if pool == POOLED:
            columns.append(model.forward_head(tokens, pre_logits=True))
            continue
        patches = tokens[:, model.num_prefix_tokens :]
        if pool == PATCHES:
            columns.append(patches)
            continue
        if pool == "blocks":
            columns += blocks
        elif pool != "mean":
            columns.append(tokens[:, 0])
        if pool != "class":
            columns.append(patches.mean(1))
    return torch.cat(columns, 1).float()


def pool_by(module: nn.Module, pool: str) -> None:
    """Let the model's classifier see this: a new one, of zeros, in the place of its own."""
    from torch import nn

    check_pool(module, pool, "MODEL.POOL")
    model: Any = module
    parts = {"class": 1, "mean": 1, "both": 2, "blocks": 1 + min(BLOCKS, len(model.blocks))}[pool]
    old = model.get_classifier()
    if not isinstance(old, nn.Linear) or model.head is not old:
        raise UserError(f"MODEL.POOL {pool}: the classifier of this {type(model).__name__} is not one linear layer.")
    model.head = nn.Linear(parts * model.embed_dim, old.out_features).to(old.weight)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    for name, weight in model.named_parameters():
        if name.startswith(("fc_norm.", "attn_pool.")):  # not used now: DDP would wait for their gradients
            weight.requires_grad_(False)
    vars(model)[OWN_POOL] = pool
    model.forward = MethodType(_forward, model)


def _forward(self: Any, pixels: Tensor) -> Tensor:
    return self.head(self.head_drop(pooled_features(self, pixels, pool_of(self)).to(self.head.weight.dtype)))
