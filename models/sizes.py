"""Sizes of a model: keys of the MODEL section, timm's arguments for them, and what a built model has."""

from typing import Any, NamedTuple

from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from utils.config.model import ModelConfig
from vitamp.sizes import ImageSize

# Model of each TYPE for a NAME that is no timm model. PaddleViT's default for NAME is the TYPE itself.
DEFAULTS = {
    "vit": "vit_base_patch16_224",
    "deit": "deit_base_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
    "mae": "vit_base_patch16_224",
}
# Models of PaddleViT's recipes that timm has under another name.
RECIPES = {
    "swin_base_patch4_window7_224_21k_1k": "swin_base_patch4_window7_224.ms_in22k_ft_in1k",
    "swin_base_patch4_window12_384_21k_1k": "swin_base_patch4_window12_384.ms_in22k_ft_in1k",
}
# Key of the MODEL section -> timm's argument.
COMMON_ARGUMENTS = {
    "PATCH_SIZE": "patch_size",
    "EMBED_DIM": "embed_dim",
    "NUM_HEADS": "num_heads",
    "MLP_RATIO": "mlp_ratio",
    "QKV_BIAS": "qkv_bias",
}
VIT_ARGUMENTS = COMMON_ARGUMENTS | {"DEPTH": "depth"}
SWIN_ARGUMENTS = COMMON_ARGUMENTS | {"STAGE_DEPTHS": "depths", "WINDOW_SIZE": "window_size"}
SIZE_KEYS = tuple(VIT_ARGUMENTS | SWIN_ARGUMENTS)
SIZE_WORDS = {
    "PATCH_SIZE": "patch",
    "WINDOW_SIZE": "window",
    "EMBED_DIM": "width",
    "DEPTH": "depth",
    "STAGE_DEPTHS": "depths",
    "NUM_HEADS": "heads",
}
RESIZED = ("PATCH_SIZE", "WINDOW_SIZE")
"""Keys of sizes to which timm resizes weights"""


class Shortcuts(NamedTuple):
    """Options of a model for cheaper training. The weights are those of the plain model."""

    token_drop: float = 0.0
    """Fraction of the patch tokens dropped in training"""
    sizes: tuple[ImageSize, ...] = ()
    """Image sizes that the model must support besides its own"""

    def arguments(self) -> dict[str, Any]:
        """timm's arguments for those in use."""
        values = {"patch_drop_rate": self.token_drop, "dynamic_img_size": bool(self.sizes)}
        return {name: value for name, value in values.items() if value}


NONE = Shortcuts()


def given_sizes(model: ModelConfig) -> dict[str, Any]:
    """Size keys in the settings, with their values."""
    values = {key: getattr(model, key) for key in SIZE_KEYS}
    return {key: value for key, value in values.items() if value is not None}


def arguments_of(module: nn.Module) -> dict[str, str]:
    """Size keys that this kind of model accepts -> timm's arguments."""
    if isinstance(module, SwinTransformer):
        return SWIN_ARGUMENTS
    if isinstance(module, VisionTransformer):
        return VIT_ARGUMENTS
    return {}


def sizes_of(module: nn.Module) -> dict[str, Any]:
    """Sizes of a built model, as far as they are known; empty for models without patches and blocks."""
    patch = _dig(module, "patch_embed.patch_size")
    sizes: dict[str, Any]
    if isinstance(module, SwinTransformer):
        stages: list[Any] = list(module.layers.children())
        blocks = [stage.blocks[0] for stage in stages]
        windows = [_side(block.window_size) for block in blocks]
        sizes = {
            "STAGE_DEPTHS": tuple(len(stage.blocks) for stage in stages),
            "WINDOW_SIZE": windows[0] if len(set(windows)) == 1 else tuple(windows),
            "NUM_HEADS": tuple(block.attn.num_heads for block in blocks),
        }
    elif patch is not None and len(_dig(module, "blocks") or ()):
        blocks = list(_dig(module, "blocks"))
        sizes = {"DEPTH": len(blocks), "NUM_HEADS": _dig(blocks[0], "attn.num_heads")}
    else:
        return {}
    width = _dig(module, "embed_dim")
    hidden = _dig(blocks[0], "mlp.fc1.out_features")
    qkv = _dig(blocks[0], "attn.qkv")
    sizes["PATCH_SIZE"] = _side(patch)
    sizes["EMBED_DIM"] = width
    if hidden and width:
        sizes["MLP_RATIO"] = hidden / width
    if qkv is not None:
        sizes["QKV_BIAS"] = qkv.bias is not None
    return {key: value for key, value in sizes.items() if value is not None}


def patch_of(module: nn.Module) -> int | None:
    """Side of a model's square patches; None if it has none."""
    side = _side(_dig(module, "patch_embed.patch_size"))
    return side if isinstance(side, int) else None


def same(key: str, wanted: Any, has: dict[str, Any]) -> bool:
    """Whether the model has a wanted size."""
    if key not in has:
        return False
    if key == "MLP_RATIO":  # timm rounds the width of the MLP down: 4.3636 and 48 / 11 are the same model
        return int(has["EMBED_DIM"] * wanted) == round(has["EMBED_DIM"] * has[key])
    return wanted == has[key]


def _dig(module: Any, path: str) -> Any:
    """`module.a.b`, or None if there is no such attribute."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _side(size: Any) -> Any:
    """One number for a square, which timm stores as a pair."""
    return size[0] if isinstance(size, tuple | list) and len(set(size)) == 1 else size
