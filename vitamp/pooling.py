"""Pools a model's tokens for its classifier (MODEL.POOL), in training and in the models that `vitamp.load` builds."""

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
"""The poolings: that of timm's model; the class token; the mean of the patches; both of these; and the class tokens of
the last blocks with the mean of the patches, as in DINOv2's evaluation. MODEL.POOL (utils/config/model.py) lists all
but the first again, because settings are read without this module."""
OWN_POOL = "own_pool"
"""Attribute of a model whose classifier sees another pooling than that of timm's model."""
BLOCKS = 4
"""Number of last blocks whose class tokens the pooling `blocks` has."""


def pools_of(model: nn.Module) -> tuple[str, ...]:
    """The poolings that a model supports: fewer if it has no tokens, or no class token."""
    timm_model: Any = model
    if not (hasattr(model, "num_prefix_tokens") and hasattr(model, "embed_dim")):
        return (POOLED,)
    if getattr(model, "cls_token", None) is None:
        return (POOLED, "mean")
    # CaiT, XCiT and ConViT have a class token in their last layers only.
    has_token_in_blocks = "return_prefix_tokens" in signature(timm_model.forward_intermediates).parameters
    return POOLS if has_token_in_blocks else POOLS[:-1]  # without "blocks"


def check_pool(model: nn.Module, pool: str, where: str = "-pool") -> None:
    """Raise UserError if the model has no features, or not the tokens for this pooling.

    where: the flag or setting that names the pooling, for the error
    """
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise UserError(f"{type(model).__name__} has no features: it needs timm's forward_features and forward_head.")
    supported = pools_of(model)
    has_patches = supported != (POOLED,)
    if pool not in supported and not (has_patches and pool == PATCHES):
        raise UserError(
            f"{where} {pool}: this {type(model).__name__} has no such tokens; use {' or '.join(supported)}."
        )


def pool_of(model: nn.Module) -> str:
    """The pooling that the model's classifier sees."""
    return vars(model).get(OWN_POOL, POOLED)


def pooled_features(module: nn.Module, pixels: Tensor, *pools: str) -> Tensor:
    """Compute the features of normalised images in fp32, with those of several poolings side by side.

    The result is B x D, and B x N x D if the only pooling is PATCHES. A masked autoencoder sees all patches here.
    """
    import torch

    model: Any = module
    pixels = pixels.to(next(model.parameters()).dtype)  # With O3, the model's forward does this.
    block_class_tokens = []
    if "blocks" in pools:
        options = {"return_prefix_tokens": True, "norm": True, "output_fmt": "NLC"}
        tokens, block_outputs = model.forward_intermediates(pixels, indices=min(BLOCKS, len(model.blocks)), **options)
        block_class_tokens = [prefix_tokens[:, 0] for _, prefix_tokens in block_outputs]
    else:
        tokens = model.forward_features(pixels)

    features = []
    for pool in pools:
        if pool == POOLED:
            features.append(model.forward_head(tokens, pre_logits=True))
            continue
        patches = tokens[:, model.num_prefix_tokens :]
        if pool == PATCHES:
            features.append(patches)
            continue
        # The class tokens come first, then the mean of the patches.
        if pool == "blocks":
            features += block_class_tokens
        elif pool in ("class", "both"):
            features.append(tokens[:, 0])
        if pool != "class":
            features.append(patches.mean(1))
    return torch.cat(features, 1).float()


def pool_by(module: nn.Module, pool: str) -> None:
    """Replace the model's classifier by a new one, of zeros, that sees this pooling."""
    from torch import nn

    check_pool(module, pool, "MODEL.POOL")
    model: Any = module
    # The width of the features, in multiples of the embedding dimension.
    widths = {"class": 1, "mean": 1, "both": 2, "blocks": 1 + min(BLOCKS, len(model.blocks))}
    old = model.get_classifier()
    if not isinstance(old, nn.Linear) or model.head is not old:
        raise UserError(f"MODEL.POOL {pool}: the classifier of this {type(model).__name__} is not one linear layer.")
    model.head = nn.Linear(widths[pool] * model.embed_dim, old.out_features).to(old.weight)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    # The layers of timm's own pooling are not used any more: DDP would wait for their gradients.
    for name, weight in model.named_parameters():
        if name.startswith(("fc_norm.", "attn_pool.")):
            weight.requires_grad_(False)
    vars(model)[OWN_POOL] = pool
    model.forward = MethodType(_forward, model)


def _forward(self: Any, pixels: Tensor) -> Tensor:
    """The forward method of a model whose classifier sees another pooling: logits of normalised images."""
    return self.head(self.head_drop(pooled_features(self, pixels, pool_of(self)).to(self.head.weight.dtype)))
