"""Size keys of the MODEL section: sizes of a model, the keys it accepts, contradictions; and cheaper training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from timm.layers.patch_dropout import PatchDropout
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from utils.config.model import ModelConfig

# Key of the MODEL section -> timm's argument.
COMMON_ARGUMENTS = {
    "PATCH_SIZE": "patch_size",
    "EMBED_DIM": "embed_dim",
    "NUM_HEADS": "num_heads",
    "MLP_RATIO": "mlp_ratio",
    "QKV_BIAS": "qkv_bias",
}
VIT_ARGUMENTS = {**COMMON_ARGUMENTS, "DEPTH": "depth"}
SWIN_ARGUMENTS = {**COMMON_ARGUMENTS, "STAGE_DEPTHS": "depths", "WINDOW_SIZE": "window_size"}
SIZE_KEYS = tuple(dict.fromkeys((*VIT_ARGUMENTS, *SWIN_ARGUMENTS)))


def given_sizes(model: ModelConfig) -> dict[str, Any]:
    """Size keys in the settings, with their values."""
    return {key: value for key in SIZE_KEYS if (value := getattr(model, key)) is not None}


def arguments_of(module: nn.Module) -> dict[str, str]:
    """Size keys that this kind of model accepts -> timm's arguments."""
    if isinstance(module, SwinTransformer):
        return SWIN_ARGUMENTS
    return VIT_ARGUMENTS if isinstance(module, VisionTransformer) else {}


def sizes_of(module: nn.Module) -> dict[str, Any]:
    """Sizes of a built model, as far as they are known; empty for models without patches and blocks."""
    patch = _dig(module, "patch_embed.patch_size")
    if isinstance(module, SwinTransformer):
        stages: list[Any] = list(module.layers.children())
        blocks = [stage.blocks[0] for stage in stages]
        windows = [_side(block.window_size) for block in blocks]
        own = {
            "STAGE_DEPTHS": tuple(len(stage.blocks) for stage in stages),
            "WINDOW_SIZE": windows[0] if len(set(windows)) == 1 else tuple(windows),
            "NUM_HEADS": tuple(block.attn.num_heads for block in blocks),
        }
    elif patch is not None and len(_dig(module, "blocks") or ()):
        blocks = list(_dig(module, "blocks"))
        own = {"DEPTH": len(blocks), "NUM_HEADS": _dig(blocks[0], "attn.num_heads")}
    else:
        return {}
    width, hidden, qkv = _dig(module, "embed_dim"), _dig(blocks[0], "mlp.fc1.out_features"), _dig(blocks[0], "attn.qkv")
    common = {
        "PATCH_SIZE": _side(patch),
        "EMBED_DIM": width,
        "MLP_RATIO": hidden / width if hidden and width else None,
        "QKV_BIAS": None if qkv is None else qkv.bias is not None,
    }
    return {key: value for key, value in {**own, **common}.items() if value is not None}


def same(key: str, wanted: Any, has: dict[str, Any]) -> bool:
    """Whether the model has a wanted size."""
    if key not in has:
        return False
    if key == "MLP_RATIO":  # timm rounds the width of the MLP down: 4.3636 and 48 / 11 are the same model
        return int(has["EMBED_DIM"] * wanted) == round(has["EMBED_DIM"] * has[key])
    return wanted == has[key]


def patch_problems(module: nn.Module, patch: int | None, image_size: int) -> list[str]:
    """Message if the image size is not a multiple of the patch size (`patch`, or the model's own)."""
    side = patch or _side(_dig(module, "patch_embed.patch_size"))
    if not isinstance(side, int) or image_size % side == 0:
        return []
    other = f", or PATCH_SIZE {_divisors(image_size, side)}" if arguments_of(module) else ""
    return [
        f"DATA.IMAGE_SIZE {image_size} is not divisible by MODEL.PATCH_SIZE {side}; possible: IMAGE_SIZE "
        f"{_multiples(image_size, side)}{other}"
    ]


def heads_problems(sizes: dict[str, Any]) -> list[str]:
    """Messages for heads that do not divide the width of a ViT or of a Swin's stages, with the nearest that do."""
    width, heads, depths = (sizes.get(key) for key in ("EMBED_DIM", "NUM_HEADS", "STAGE_DEPTHS"))
    if depths is None:
        if isinstance(heads, tuple):
            return [f"MODEL.NUM_HEADS {list(heads)}: this model has no stages and takes one number"]
        if heads and width and width % heads:
            return [_heads_problem("MODEL.EMBED_DIM", width, "MODEL.NUM_HEADS", heads)]
        return []
    if not isinstance(heads, tuple):
        return [f"MODEL.NUM_HEADS {heads}: a Swin takes one number per stage, such as [3, 6, 12, 24]"]
    if len(heads) != len(depths):
        return [f"MODEL.NUM_HEADS {list(heads)} and MODEL.STAGE_DEPTHS {list(depths)} differ in length"]
    if not width:
        return []
    where = f"MODEL.EMBED_DIM {width}: in stage {{}}, the width"  # each stage doubles it
    return [
        _heads_problem(where.format(stage + 1), width << stage, f"MODEL.NUM_HEADS[{stage}]", count)
        for stage, count in enumerate(heads)
        if (width << stage) % count
    ]


def as_text(value: Any) -> str:
    """A size as the YAML writes it."""
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _heads_problem(what: str, width: int, key: str, heads: int) -> str:
    other = f", or EMBED_DIM {_multiples(width, heads)}" if what == "MODEL.EMBED_DIM" else ""
    return f"{what} {width} is not divisible by {key} {heads}; possible: {key} {_divisors(width, heads)}{other}"


def _multiples(number: int, of: int) -> str:
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n)


def _divisors(number: int, near: int) -> str:
    """Divisors of `number` closest to `near`, on either side."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    sides = ([n for n in divisors if n < near][-1:], [n for n in divisors if n > near][:1])
    return " or ".join(str(n) for side in sides for n in side)


def _dig(module: Any, path: str) -> Any:
    """`module.a.b`, or None if there is no such attribute."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), module)


def _side(size: Any) -> Any:
    """One number for a square, which timm stores as a pair."""
    return size[0] if isinstance(size, tuple | list) and len(set(size)) == 1 else size


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
