"""Cheaper training on fewer patches or smaller images (TRAIN.TOKEN_DROP, TRAIN.SIZE_SCHEDULE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timm.layers.patch_dropout import PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.sizes import sizes_of


@dataclass(frozen=True)
class Shortcuts:
    """Options of a model for cheaper training. The weights are those of the plain model."""

    token_drop: float = 0.0
    """Fraction of the patch tokens dropped in training"""
    sizes: tuple[int, ...] = ()
    """Image sizes that the model must support besides its own"""

    def arguments(self) -> dict[str, Any]:
        """Arguments of timm's model."""
        arguments: dict[str, Any] = {"patch_drop_rate": self.token_drop} if self.token_drop else {}
        return arguments | ({"dynamic_img_size": True} if self.sizes else {})

    def problems(self, reference: nn.Module, patch: int | None) -> list[str]:
        """Why this model does not support the options. `patch`: its patch size, if not timm's own."""
        options = {"TOKEN_DROP": self.token_drop, "SIZE_SCHEDULE": self.sizes}
        if not isinstance(reference, VisionTransformer):
            kind = type(reference).__name__
            return [
                f"TRAIN.{key}: {kind} does not support it. Leave the key out, or use a model of timm's class "
                "VisionTransformer, such as a ViT or DeiT"
                for key, value in options.items()
                if value
            ]
        side = patch or sizes_of(reference)["PATCH_SIZE"]
        odd = [size for size in self.sizes if size % side]
        return [f"TRAIN.SIZE_SCHEDULE: image size {size} is not divisible by the patch size {side}" for size in odd]

    def finish(self, module: nn.Module) -> None:
        """Never drop prefix tokens, and drop no patches until an epoch begins.

        timm creates the patch dropout before it adds the distillation token. Trials before training, such as that of
        the batch size, must see the most expensive case.
        """
        prefix = getattr(module, "num_prefix_tokens", None)
        for part in module.modules():
            if isinstance(part, PatchDropout):
                part.prob = 0.0
                part.num_prefix_tokens = part.num_prefix_tokens if prefix is None else prefix


NONE = Shortcuts()
