"""Size keys of the MODEL section: the sizes of a model, the keys it accepts, and contradictions between them."""

from __future__ import annotations

from functools import reduce
from typing import Any

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
# Keys that follow from the others or from the architecture: a given value must equal the model's.
DERIVED = ("ATTN_HEAD_SIZE", "QK_SCALE")
FIXED = ("APE", "PATCH_NORM")
MOST_BLOCKS = 10_000
SIZE_KEYS = tuple(dict.fromkeys((*VIT_ARGUMENTS, *SWIN_ARGUMENTS, *DERIVED, *FIXED)))


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
        own = {
            "STAGE_DEPTHS": tuple(len(stage.blocks) for stage in stages),
            "WINDOW_SIZE": _one_if_equal([_side(block.window_size) for block in blocks]),
            "NUM_HEADS": tuple(block.attn.num_heads for block in blocks),
            "APE": False,
        }
    elif patch is not None and len(_dig(module, "blocks") or ()):
        blocks = list(_dig(module, "blocks"))
        own = {
            "DEPTH": len(blocks),
            "NUM_HEADS": _dig(blocks[0], "attn.num_heads"),
            "APE": _dig(module, "pos_embed") is not None,
        }
    else:
        return {}
    common = {
        "PATCH_SIZE": _side(patch),
        "EMBED_DIM": _dig(module, "embed_dim"),
        "MLP_RATIO": _mlp_ratio(blocks[0], _dig(module, "embed_dim")),
        "QKV_BIAS": _has_bias(blocks[0]),
        "ATTN_HEAD_SIZE": _head_size(blocks),
        "QK_SCALE": _dig(blocks[0], "attn.scale"),
        "PATCH_NORM": not isinstance(_dig(module, "patch_embed.norm"), nn.Identity | None),
    }
    return {key: value for key, value in {**own, **common}.items() if value is not None}


def _depths(arguments: dict[str, Any]) -> tuple[int, ...]:
    """Number of blocks in each stage; a ViT has one stage."""
    depths = arguments.get("depths", arguments.get("depth", ()))
    return depths if isinstance(depths, tuple) else (depths,)


def too_many_blocks(arguments: dict[str, Any]) -> int:
    """The number of blocks, if building so many would take minutes even without weights; else 0."""
    blocks = sum(_depths(arguments))
    return blocks if blocks > MOST_BLOCKS else 0


def few_blocks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the same model with at most two blocks per stage."""
    few = tuple(min(depth, 2) for depth in _depths(arguments))
    return {"depths": few} if "depths" in arguments else {"depth": few[0]}


def weights_of_others(few: nn.Module, arguments: dict[str, Any]) -> int:
    """Number of weights in the blocks that a model built with `few_blocks` lacks."""
    stages = list(few.layers.children()) if isinstance(few, SwinTransformer) else [few]
    last = [sum(weight.numel() for weight in _dig(stage, "blocks")[-1].parameters()) for stage in stages]
    return sum(max(0, depth - 2) * weights for depth, weights in zip(_depths(arguments), last, strict=True))


def same(key: str, wanted: Any, has: dict[str, Any]) -> bool:
    """Whether the model has a wanted size."""
    if key not in has:
        return False
    if key == "MLP_RATIO":  # timm rounds the width of the MLP down: 4.3636 and 48 / 11 are the same model
        return int(has["EMBED_DIM"] * wanted) == round(has["EMBED_DIM"] * has[key])
    if key == "QK_SCALE":
        return abs(wanted - has[key]) < 1e-4 * has[key]
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


def _one_if_equal(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else tuple(values)


def _mlp_ratio(block: Any, width: int | None) -> float | None:
    hidden = _dig(block, "mlp.fc1.out_features")
    return hidden / width if hidden and width else None


def _has_bias(block: Any) -> bool | None:
    qkv = _dig(block, "attn.qkv")
    return None if qkv is None else qkv.bias is not None


def _head_size(blocks: list[Any]) -> Any:
    sizes = []
    for block in blocks:
        width, heads = _dig(block, "attn.proj.in_features"), _dig(block, "attn.num_heads")
        if not width or not heads:
            return None
        sizes.append(width // heads)
    return _one_if_equal(sizes)
