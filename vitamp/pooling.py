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
    """List the poolings in POOLS that a model supports: fewer if it has no tokens, or no class token."""
    timm_model: Any = model
    if not (hasattr(model, "num_prefix_tokens") and hasattr(model, "embed_dim")):
        return (POOLED,)
    if getattr(model, "cls_token", None) is None:
        return (POOLED, "mean")
    # CaiT, XCiT and ConViT have a class token in their last layers only. So timm cannot return one of each block, which
    # "blocks", the last of POOLS, needs.
    has_token_in_blocks = "return_prefix_tokens" in signature(timm_model.forward_intermediates).parameters
    return POOLS if has_token_in_blocks else POOLS[:-1]


def check_pool(model: nn.Module, pool: str, where: str = "-pool") -> None:
    """Raise UserError unless a model can give the features of this pooling.

    pool: one of POOLS, or PATCHES: all patches, without pooling, which any model with tokens can give
    where: the flag or setting that names the pooling, for the error
    """
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise UserError(f"{type(model).__name__} has no features: it needs timm's forward_features and forward_head.")
    supported = pools_of(model)
    has_tokens = len(supported) > 1  # Without tokens, a model supports POOLED alone.
    is_possible = has_tokens if pool == PATCHES else pool in supported
    if not is_possible:
        raise UserError(
            f"{where} {pool}: this {type(model).__name__} has no such tokens; use {' or '.join(supported)}."
        )


def pool_of(model: nn.Module) -> str:
    """The pooling that the model's classifier sees."""
    return vars(model).get(OWN_POOL, POOLED)


def pooled_features(module: nn.Module, pixels: Tensor, *pools: str) -> Tensor:
    """Compute the features of normalised images in fp32, with those of several poolings side by side.

    The result is B x D, and B x N x D if the only pooling is PATCHES. A masked autoencoder sees all patches here.

    pools: one or more of these:
        POOLED: the pooling of timm's model
        PATCHES: all patches, without pooling
        "class": the class token
        "mean": the mean of the patches
        "both": the class token, then the mean of the patches
        "blocks": the class tokens of the last BLOCKS blocks, then the mean of the patches
    """
    import torch

    model: Any = module
    # A model in half precision (AMP level O3) converts pixels in its own forward, which is not called here.
    pixels = pixels.to(next(model.parameters()).dtype)
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
        if pool != "class":  # "mean", "both" or "blocks"
            features.append(patches.mean(1))
    return torch.cat(features, 1).float()


def pool_by(module: nn.Module, pool: str) -> None:
    """Replace the model's classifier by a new linear layer, of zeros, whose input are the features of a pooling.

    pool: "class", "mean", "both" or "blocks"; see `pooled_features`
    """
    from torch import nn

    check_pool(module, pool, "MODEL.POOL")
    model: Any = module
    # The width of the features, in multiples of the embedding dimension: the number of tokens and means side by side.
    class_tokens = min(BLOCKS, len(model.blocks))
    widths = {"class": 1, "mean": 1, "both": 2, "blocks": class_tokens + 1}
    old_classifier = model.get_classifier()
    if not isinstance(old_classifier, nn.Linear) or model.head is not old_classifier:
        raise UserError(f"MODEL.POOL {pool}: the classifier of this {type(model).__name__} is not one linear layer.")
    model.head = nn.Linear(widths[pool] * model.embed_dim, old_classifier.out_features).to(old_classifier.weight)
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
