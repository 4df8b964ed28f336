"""Why a model cannot be built as the MODEL section says, and what to write instead."""

from collections.abc import Iterable, Iterator, Sequence
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
    from utils.foreign_flags import MODELS

    known = timm.list_models()
    beginning = name.casefold()
    if beginning in MODELS:
        return f" Did you mean {MODELS[beginning]}, which torchvision calls so?"
    if not any(one.startswith(beginning) for one in known):
        possible = [*known, *RECIPES, *more]
        beginning = closest(name, [*_beginnings(known), *RECIPES, *more])
        if beginning in possible:
            return f" Did you mean {beginning}?"
    if not beginning:
        return ""
    found = [one for one in known if one.startswith(beginning)]
    found.sort(key=lambda one: (-len(timm.list_pretrained(f"{one}.*")), one))
    return f" Did you mean {either(found[:MOST_SUGGESTED])}?" if found else ""


def _beginnings(names: Iterable[str]) -> set[str]:
    """vit, vit_base, vit_base_patch16, ... Names are long: a mistyped vit_tny is nearest to the beginning of some."""
    found = set()
    for name in names:
        words = name.split("_")
        for number in range(1, len(words) + 1):
            found.add("_".join(words[:number]))
    return found


def geometry_problems(module: nn.Module, sizes: dict[str, Any], patch: int | None, image_size: ImageSize) -> list[str]:
    """Messages for heads that do not divide the width of a ViT or of a Swin's stages, and patches that do not fit.

    `sizes`: of the wanted model. `patch`: its patch size, also of a model whose other sizes cannot be chosen.
    """
    problems = list(_head_problems(sizes.get("EMBED_DIM"), sizes.get("NUM_HEADS"), sizes.get("STAGE_DEPTHS")))
    possible = divisible_sizes(image_size, patch) if patch else []
    if possible:
        fault = f"DATA.IMAGE_SIZE {one_line(image_size)} is not divisible by MODEL.PATCH_SIZE {patch}"
        other = ", or another PATCH_SIZE" if arguments_of(module) else ""
        problems.append(f"{fault}; possible: IMAGE_SIZE {' or '.join(map(one_line, possible))}{other}")
    return problems


def _head_problems(width: Any, heads: Any, depths: Any) -> Iterator[str]:
    """Of a ViT (`depths` None), which has one number of heads, or of a Swin, which has one per stage."""
    by_stage = isinstance(heads, tuple)
    if depths is None and by_stage:
        yield f"MODEL.NUM_HEADS {list(heads)}: this model has no stages and takes one number"
        return
    if depths is not None and not by_stage:
        yield f"MODEL.NUM_HEADS {heads}: a Swin takes one number per stage, such as [3, 6, 12, 24]"
        return
    if by_stage and len(heads) != len(depths or ()):
        yield f"MODEL.NUM_HEADS {list(heads)} and MODEL.STAGE_DEPTHS {one_line(depths)} differ in length"
        return
    if not width or not heads:
        return
    for stage, count in enumerate(heads if by_stage else (heads,)):
        own_width = width << stage  # each stage of a Swin doubles the width
        if own_width % count == 0:
            continue
        key = f"MODEL.NUM_HEADS[{stage}]" if by_stage else "MODEL.NUM_HEADS"
        own = f"MODEL.EMBED_DIM {width}"
        if stage:
            own += f": in stage {stage + 1}, the width {own_width}"
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
