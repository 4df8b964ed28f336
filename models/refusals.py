"""Why a model cannot be built as the MODEL section says, and what to write instead."""

from collections.abc import Iterator, Sequence
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.sizes import DEFAULTS, RECIPES, Shortcuts, arguments_of
from utils.config.kinds import one_line
from utils.config.model import ModelConfig
from utils.errors import closest, either, nearest
from vitamp.sizes import ImageSize, sides, size_of

MOST_SUGGESTED = 3
"""Models suggested for a name that several begin with"""


def unknown_name(model: ModelConfig, name: str, sizes_given: bool) -> str:
    """Message for a MODEL.NAME that timm does not know, and with which no model can be built from sizes."""
    architecture, _, tag = name.partition(".")
    if tag and timm.is_model(architecture):
        tags = timm.list_pretrained(f"{architecture}.*")
        return f"MODEL.NAME: timm has no tag '{tag}' for {architecture}; it has {', '.join(tags) or 'none'}."
    similar = f"{similar_models(name)} -list_models shows all names."
    if model.TYPE in DEFAULTS:
        why = f"no sizes (MODEL.EMBED_DIM, ...) are given to build a model of MODEL.TYPE {model.TYPE} with that name"
        return f"MODEL.NAME: '{name}' is not a timm model, and {why}.{similar}"
    if sizes_given:
        return (
            f"MODEL.TYPE: '{model.TYPE}' cannot be built from sizes (MODEL.EMBED_DIM, ...); only "
            f"{', '.join(DEFAULTS)} can: set TYPE to one of them.{nearest(model.TYPE, DEFAULTS)} Or set MODEL.NAME "
            f"to a timm model; '{name}' is not one.{similar}"
        )
    why = f"MODEL.TYPE '{model.TYPE}' is not one of {', '.join(DEFAULTS)}"
    return f"MODEL.NAME: '{name}' is not a timm model, and {why}.{similar}"


def contradiction(model: ModelConfig, reference: nn.Module) -> str | None:
    """Message for a MODEL.TYPE that timm's model of MODEL.NAME is not. TYPE vit, the default, contradicts no name."""
    kind = type(reference).__name__
    belongs = {"swin": "Swin" in kind, "deit": isinstance(reference, VisionTransformer)}
    if belongs.get(model.TYPE, True):
        return None
    return (
        f"MODEL.TYPE {model.TYPE} and MODEL.NAME {model.NAME} contradict each other: timm's model of that name is "
        f"a {kind}. Set NAME to a {model.TYPE} model such as {DEFAULTS[model.TYPE]}, or leave TYPE out."
    )


def similar_models(name: str, more: Sequence[str] = ()) -> str:
    """' Did you mean A, B or C?': the models with most weights whose names begin so, or the most similar name.

    `more`: other names that are possible, such as those of weights.
    """
    known, meant = timm.list_models(), name.casefold()
    if not any(one.startswith(meant) for one in known):
        # Whole names are long: a mistyped short one, such as vit_tny, is nearest to the beginning of some.
        words = [one.split("_") for one in known]
        beginnings = {"_".join(of[:number]) for of in words for number in range(1, len(of) + 1)}
        meant = closest(name, [*beginnings, *RECIPES, *more])
        if meant in {*known, *RECIPES, *more}:
            return f" Did you mean {meant}?"
    found = [one for one in known if meant and one.startswith(meant)]
    found.sort(key=lambda one: (-len(timm.list_pretrained(f"{one}.*")), one))
    return f" Did you mean {either(found[:MOST_SUGGESTED])}?" if found else ""


def geometry_problems(module: nn.Module, sizes: dict[str, Any], patch: int | None, image_size: ImageSize) -> list[str]:
    """Messages for heads that do not divide the width of a ViT or of a Swin's stages, and patches that do not fit.

    `sizes`: of the wanted model. `patch`: its patch size, also of a model whose other sizes cannot be chosen.
    """
    problems = [*_head_problems(*(sizes.get(key) for key in ("EMBED_DIM", "NUM_HEADS", "STAGE_DEPTHS")))]
    if patch and (possible := divisible_sizes(image_size, patch)):
        other = ", or another PATCH_SIZE" if arguments_of(module) else ""
        fault = f"DATA.IMAGE_SIZE {one_line(image_size)} is not divisible by MODEL.PATCH_SIZE {patch}"
        problems.append(f"{fault}; possible: IMAGE_SIZE {' or '.join(map(one_line, possible))}{other}")
    return problems


def _head_problems(width: Any, heads: Any, depths: Any) -> Iterator[str]:
    """Of a ViT (`depths` None), which has one number of heads, or of a Swin, which has one per stage."""
    if depths is None and isinstance(heads, tuple):
        yield f"MODEL.NUM_HEADS {list(heads)}: this model has no stages and takes one number"
    elif depths is not None and not isinstance(heads, tuple):
        yield f"MODEL.NUM_HEADS {heads}: a Swin takes one number per stage, such as [3, 6, 12, 24]"
    elif isinstance(heads, tuple) and len(heads) != len(depths or ()):
        yield f"MODEL.NUM_HEADS {list(heads)} and MODEL.STAGE_DEPTHS {one_line(depths)} differ in length"
    elif width and heads:
        for stage, count in enumerate(heads if isinstance(heads, tuple) else (heads,)):
            if (width << stage) % count:  # each stage of a Swin doubles the width
                key = f"MODEL.NUM_HEADS[{stage}]" if isinstance(heads, tuple) else "MODEL.NUM_HEADS"
                own = f"MODEL.EMBED_DIM {width}"
                if stage:
                    own += f": in stage {stage + 1}, the width {width << stage}"
                yield f"{own} is not divisible by {key} {count}; give a number of heads that divides it"


def divisible_sizes(size: ImageSize, step: int) -> list[ImageSize]:
    """The next smaller and the next larger size that `step` divides, each side by itself; none if it divides `size`."""
    both = sides(size)
    if not any(side % step for side in both):
        return []
    below = [side // step * step for side in both]
    above = [-(-side // step) * step for side in both]
    return [size_of(both) for both in (below, above) if all(both)]


def shortcut_problems(shortcuts: Shortcuts, reference: nn.Module, patch: int | None) -> list[str]:
    """Why this model does not support these options."""
    if not isinstance(reference, VisionTransformer):
        options = {"TOKEN_DROP": shortcuts.token_drop, "SIZE_SCHEDULE": shortcuts.sizes}
        return [
            f"TRAIN.{key}: {type(reference).__name__} does not support it. Leave the key out, or use a model of timm's "
            "class VisionTransformer, such as a ViT or DeiT"
            for key, value in options.items()
            if value
        ]
    side = patch or 1
    odd = [one_line(size) for size in shortcuts.sizes if divisible_sizes(size, side)]
    return [f"TRAIN.SIZE_SCHEDULE: image size {size} is not divisible by the patch size {side}" for size in odd]


def unchangeable(key: str, value: Any, module: nn.Module, has: dict[str, Any]) -> str:
    """Message for a size that this kind of model does not take from its settings."""
    kind = type(module).__name__
    if key not in has:
        return f"MODEL.{key} {one_line(value)}: {kind} has no such size; leave the key out, also of the file of -cfg"
    why = f"this {kind} has {one_line(has[key])}"
    return f"MODEL.{key} {one_line(value)}: {why}, which this key cannot change; leave the key out or give that value"
