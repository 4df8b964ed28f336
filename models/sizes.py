"""Sizes of a model: the keys in the MODEL section, timm's arguments for them, and the sizes of a built model."""

from typing import Any, NamedTuple

from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from utils.config.model import ModelConfig
from vitamp.sizes import ImageSize

# MODEL.TYPE -> timm's model to begin with if MODEL.NAME is not timm's. PaddleViT's default for NAME is the TYPE itself.
MODEL_OF_TYPE = {
    "vit": "vit_base_patch16_224",
    "deit": "deit_base_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
    "mae": "vit_base_patch16_224",
}
# Models of PaddleViT's recipes that timm has under another name.
RECIPE_MODELS = {
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
"""Keys of sizes that need not be those of the weights, because timm resizes the weights"""


class Shortcuts(NamedTuple):
    """Options of a model that make training cheaper. Its weights are those of the model without them."""

    token_drop: float = 0.0
    """Fraction of the patch tokens dropped in training"""
    sizes: tuple[ImageSize, ...] = ()
    """Image sizes that the model must support besides its own"""

    def arguments(self) -> dict[str, Any]:
        """Return timm's arguments for the options in use."""
        values = {"patch_drop_rate": self.token_drop, "dynamic_img_size": bool(self.sizes)}
        return {name: value for name, value in values.items() if value}


NONE = Shortcuts()


def given_sizes(model: ModelConfig) -> dict[str, Any]:
    """Return the sizes that are set in the MODEL section, by key."""
    values = {key: getattr(model, key) for key in SIZE_KEYS}
    return {key: value for key, value in values.items() if value is not None}


def size_arguments_of(module: nn.Module) -> dict[str, str]:
    """Return timm's argument for each size that the settings can change, by key of the MODEL section.

    Empty if timm's constructor takes no sizes for this kind of model: only ViT and Swin have any.
    """
    if isinstance(module, SwinTransformer):
        return SWIN_ARGUMENTS
    if isinstance(module, VisionTransformer):
        return VIT_ARGUMENTS
    return {}


def sizes_of(module: nn.Module) -> dict[str, Any]:
    """Return the sizes of a built model by their keys in the MODEL section, as far as they are known.

    Empty for models other than Swin that have no patches or no blocks.
    """
    patch = _attribute_or_none(module, "patch_embed.patch_size")
    sizes: dict[str, Any]
    if isinstance(module, SwinTransformer):
        stages: list[Any] = list(module.layers.children())
        first_blocks = [stage.blocks[0] for stage in stages]
        windows = [_side_if_square(block.window_size) for block in first_blocks]
        have_same_window = len(set(windows)) == 1
        sizes = {
            "STAGE_DEPTHS": tuple(len(stage.blocks) for stage in stages),
            "WINDOW_SIZE": windows[0] if have_same_window else tuple(windows),
            "NUM_HEADS": tuple(block.attn.num_heads for block in first_blocks),
        }
        first_block = first_blocks[0]
    else:
        blocks = _attribute_or_none(module, "blocks") or ()
        if patch is None or len(blocks) == 0:
            return {}
        first_block = next(iter(blocks))
        sizes = {"DEPTH": len(blocks), "NUM_HEADS": _attribute_or_none(first_block, "attn.num_heads")}

    # The sizes that ViT and Swin have in common.
    width = _attribute_or_none(module, "embed_dim")
    mlp_width = _attribute_or_none(first_block, "mlp.fc1.out_features")
    qkv = _attribute_or_none(first_block, "attn.qkv")
    sizes["PATCH_SIZE"] = _side_if_square(patch)
    sizes["EMBED_DIM"] = width
    if mlp_width and width:
        sizes["MLP_RATIO"] = mlp_width / width
    if qkv is not None:
        sizes["QKV_BIAS"] = qkv.bias is not None
    return {key: value for key, value in sizes.items() if value is not None}


def patch_of(module: nn.Module) -> int | None:
    """Return the side of a model's square patches; None if it has none."""
    side = _side_if_square(_attribute_or_none(module, "patch_embed.patch_size"))
    return side if isinstance(side, int) else None


def same(key: str, wanted: Any, sizes: dict[str, Any]) -> bool:
    """Tell whether a model with these sizes has the wanted value for `key`."""
    if key not in sizes:
        return False
    if key == "MLP_RATIO":  # timm rounds the width of the MLP down: 4.3636 and 48 / 11 are the same model
        return int(sizes["EMBED_DIM"] * wanted) == round(sizes["EMBED_DIM"] * sizes[key])
    return wanted == sizes[key]


def _attribute_or_none(module: Any, path: str) -> Any:
    """Return the attribute `module.a.b` for the path 'a.b'; None if there is no such attribute."""
    value = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _side_if_square(size: Any) -> Any:
    """Return a single number for a square, which timm stores as a pair; any other size as it is."""
    return size[0] if isinstance(size, tuple | list) and len(set(size)) == 1 else size
