"""Showing a model less than it will see: fewer of its patches, or smaller images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timm.layers.patch_dropout import PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.sizes import sizes_of


@dataclass(frozen=True)
class Shortcuts:
    """What training asks of a model so that it costs less. The weights are those of the plain model."""

    token_drop: float = 0.0
    """Share of the patch tokens left out in training"""
    sizes: tuple[int, ...] = ()
    """Sides of images it is to take besides its own"""

    def arguments(self) -> dict[str, Any]:
        """timm's arguments for them."""
        arguments: dict[str, Any] = {"patch_drop_rate": self.token_drop} if self.token_drop else {}
        return arguments | ({"dynamic_img_size": True} if self.sizes else {})

    def problems(self, reference: nn.Module, patch: int | None) -> list[str]:
        """Why this kind of model cannot; `patch`: the side of its patches, where that is not timm's own."""
        asked = {"TOKEN_DROP": self.token_drop, "SIZE_SCHEDULE": self.sizes}
        if not isinstance(reference, VisionTransformer):
            kind = type(reference).__name__
            needs = "a model that takes its patches as tokens of one row, such as a ViT or DeiT; leave the key out"
            return [f"TRAIN.{key}: {kind} cannot; it needs {needs}" for key, value in asked.items() if value]
        side = patch or sizes_of(reference)["PATCH_SIZE"]
        odd = [size for size in self.sizes if size % side]
        return [f"TRAIN.SIZE_SCHEDULE: images of {size} are not divisible by the patches of {side}" for size in odd]

    def finish(self, module: nn.Module) -> None:
        """Keep all tokens that are no patches: a distillation token joins the class token too late for timm to know.

        And show them all until an epoch says otherwise: what is tried before training then is the dearest to come.
        """
        prefix = getattr(module, "num_prefix_tokens", None)
        for part in module.modules():
            if isinstance(part, PatchDropout):
                part.prob = 0.0
                part.num_prefix_tokens = part.num_prefix_tokens if prefix is None else prefix


NONE = Shortcuts()
