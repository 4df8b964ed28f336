"""Explain in errors why a model cannot be built as the MODEL section says, and what to write instead."""

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
    """Explain that timm does not know MODEL.NAME, and that no model can be built from sizes with that name.

    `sizes_given`: whether the settings have sizes of the model. Similar names are suggested.
    """
    architecture, _, tag = name.partition(".")
    if tag and timm.is_model(architecture):
        tags = timm.list_pretrained(f"{architecture}.*")
        return f"MODEL.NAME: timm has no tag '{tag}' for {architecture}; it has {', '.join(tags) or 'none'}."
    suggestion = f"{similar_models(name)} -list_models shows all names."
    if model.TYPE in DEFAULTS:
        reason = f"no sizes (MODEL.EMBED_DIM, ...) are given to build a model of MODEL.TYPE {model.TYPE} with that name"
        return f"MODEL.NAME: '{name}' is not a timm model, and {reason}.{suggestion}"
    if sizes_given:
        return (
            f"MODEL.TYPE: '{model.TYPE}' cannot be built from sizes (MODEL.EMBED_DIM, ...); only "
            f"{', '.join(DEFAULTS)} can: set TYPE to one of them.{nearest(model.TYPE, DEFAULTS)} Or set MODEL.NAME "
            f"to a timm model; '{name}' is not one.{suggestion}"
        )
    reason = f"MODEL.TYPE '{model.TYPE}' is not one of {', '.join(DEFAULTS)}"
    return f"MODEL.NAME: '{name}' is not a timm model, and {reason}.{suggestion}"


def contradiction(model: ModelConfig, reference: nn.Module) -> str | None:
    """Explain that MODEL.TYPE and MODEL.NAME name models of different kinds; None if they agree.

    `reference`: timm's model of MODEL.NAME. TYPE vit, the default, contradicts no name.
    """
    class_name = type(reference).__name__
    agrees = {"swin": "Swin" in class_name, "deit": isinstance(reference, VisionTransformer)}
    if agrees.get(model.TYPE, True):
        return None
    return (
        f"MODEL.TYPE {model.TYPE} and MODEL.NAME {model.NAME} contradict each other: timm's model of that name is "
        f"a {class_name}. Set NAME to a {model.TYPE} model such as {DEFAULTS[model.TYPE]}, or leave TYPE out."
    )


def similar_models(name: str, more: Sequence[str] = ()) -> str:
    """Suggest models for an unknown name, as ' Did you mean A, B or C?'; '' if none is similar.

    These are timm's models that begin with the name, those with the most weights first, or else the most similar name.
    `more`: further names that are possible, such as those of weights.
    """
    from utils.foreign_flags import MODELS

    timms_names = timm.list_models()
    beginning = name.casefold()
    if beginning in MODELS:
        return f" Did you mean {MODELS[beginning]}, which torchvision calls so?"
    if not any(model.startswith(beginning) for model in timms_names):
        # Names are long, so a mistyped vit_tny is nearest to the beginning of some.
        full_names = [*timms_names, *RECIPES, *more]
        beginning = closest(name, [*_beginnings(timms_names), *RECIPES, *more])
        if beginning in full_names:
            return f" Did you mean {beginning}?"
    if not beginning:
        return ""
    matches = [model for model in timms_names if model.startswith(beginning)]
    matches.sort(key=lambda model: (-len(timm.list_pretrained(f"{model}.*")), model))
    return f" Did you mean {either(matches[:MOST_SUGGESTED])}?" if matches else ""


def _beginnings(names: Iterable[str]) -> set[str]:
    """Return all beginnings of names up to a _, such as vit, vit_base and vit_base_patch16, and the whole names."""
    beginnings = set()
    for name in names:
        words = name.split("_")
        for number in range(1, len(words) + 1):
            beginnings.add("_".join(words[:number]))
    return beginnings


def geometry_problems(module: nn.Module, sizes: dict[str, Any], patch: int | None, image_size: ImageSize) -> list[str]:
    """Explain which heads do not divide the width of a ViT or of a Swin's stage, and that patches do not fit the image.

    `sizes`: those of the wanted model. `patch`: its patch size, also for a model whose other sizes cannot be chosen;
    None if it has no square patches. `module` tells whether another patch size is possible.
    """
    problems = list(_head_problems(sizes.get("EMBED_DIM"), sizes.get("NUM_HEADS"), sizes.get("STAGE_DEPTHS")))
    divisible = divisible_sizes(image_size, patch) if patch else []
    does_not_fit = len(divisible) > 0
    if does_not_fit:
        problem = f"DATA.IMAGE_SIZE {one_line(image_size)} is not divisible by MODEL.PATCH_SIZE {patch}"
        alternative = ", or another PATCH_SIZE" if arguments_of(module) else ""
        problems.append(f"{problem}; possible: IMAGE_SIZE {' or '.join(map(one_line, divisible))}{alternative}")
    return problems


def _head_problems(width: Any, heads: Any, depths: Any) -> Iterator[str]:
    """Explain which numbers of heads are impossible. Unknown sizes are None.

    A Swin has one number per stage, and as many `depths`. A ViT has one number, and no `depths` (None).
    """
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
    heads_of_stages = heads if by_stage else (heads,)
    for stage, count in enumerate(heads_of_stages):
        stage_width = width << stage  # each stage of a Swin doubles the width
        if stage_width % count == 0:
            continue
        key = f"MODEL.NUM_HEADS[{stage}]" if by_stage else "MODEL.NUM_HEADS"
        width_words = f"MODEL.EMBED_DIM {width}"
        if stage > 0:
            width_words += f": in stage {stage + 1}, the width {stage_width}"
        yield f"{width_words} is not divisible by {key} {count}; give a number of heads that divides it"


def divisible_sizes(size: ImageSize, step: int) -> list[ImageSize]:
    """Return the next smaller and the next larger size whose sides are divisible by `step`.

    Empty if both sides of `size` are divisible. A smaller size with a side of 0 is left out.
    """
    high_and_wide = sides(size)
    if not any(side % step for side in high_and_wide):
        return []
    below = [side // step * step for side in high_and_wide]
    above = [-(-side // step) * step for side in high_and_wide]
    return [size_of(candidate) for candidate in (below, above) if all(candidate)]


def shortcut_problems(shortcuts: Shortcuts, reference: nn.Module, patch: int | None) -> list[str]:
    """Explain why this kind of model does not support the options in use; empty if it does. `patch`: its patch size."""
    if not isinstance(reference, VisionTransformer):
        options = {"TOKEN_DROP": shortcuts.token_drop, "SIZE_SCHEDULE": shortcuts.sizes}
        return [
            f"TRAIN.{key}: {type(reference).__name__} does not support it. Leave the key out, or use a model of timm's "
            "class VisionTransformer, such as a ViT or DeiT"
            for key, value in options.items()
            if value
        ]
    side = patch or 1
    indivisible = [one_line(size) for size in shortcuts.sizes if divisible_sizes(size, side)]
    return [f"TRAIN.SIZE_SCHEDULE: image size {size} is not divisible by the patch size {side}" for size in indivisible]


def unchangeable(key: str, value: Any, module: nn.Module, sizes: dict[str, Any]) -> str:
    """Explain that this kind of model does not take a size from the settings. `sizes`: those that it has."""
    kind = type(module).__name__
    setting = f"MODEL.{key} {one_line(value)}"
    if key not in sizes:
        return f"{setting}: {kind} has no such size; leave the key out, also of the file of -cfg"
    fact = f"this {kind} has {one_line(sizes[key])}"
    return f"{setting}: {fact}, which this key cannot change; leave the key out or give that value"
