"""Features of images: what a model has learned to see, before its classifier."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from utils.errors import UserError

Pool = Literal["pooled", "class", "mean", "patches"]
POOLED: Pool = "pooled"
"""What the classifier sees"""


def check_pool(model: nn.Module, pool: Pool) -> None:
    """Raise UserError if the model has no tokens, or no class token, for this pooling."""
    if pool == POOLED:
        return
    kind = type(model).__name__
    if not hasattr(model, "num_prefix_tokens"):
        raise UserError(f"-pool {pool}: {kind} has no tokens as a ViT has them; use -pool pooled.")
    if pool == "class" and getattr(model, "cls_token", None) is None:
        raise UserError(f"-pool class: this {kind} has no class token; use -pool pooled or mean.")


def pooled_features(module: nn.Module, pixels: Tensor, pool: Pool = POOLED) -> Tensor:
    """Features in fp32 of normalised images: B x D; patches B x N x D. A masked autoencoder sees all patches here."""
    model: Any = module
    # O3 casts the images before the model's forward, which is not called here.
    tokens = model.forward_features(pixels.to(next(model.parameters()).dtype))
    return _pooled(model, tokens, pool).float()


def _pooled(model: Any, tokens: Tensor, pool: Pool) -> Tensor:
    match pool:
        case "pooled":
            return model.forward_head(tokens, pre_logits=True)
        case "class":
            return tokens[:, 0]
        case "mean":
            return tokens[:, model.num_prefix_tokens :].mean(1)
        case "patches":
            return tokens[:, model.num_prefix_tokens :]
