"""Explain in errors why a model cannot be built as the MODEL section says, and what to write instead."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.sizes import MODEL_OF_TYPE, RECIPE_MODELS, Shortcuts, size_arguments_of
from utils.config.kinds import one_line
from utils.config.model import ModelConfig
from utils.errors import closest, either, nearest
from vitamp.sizes import ImageSize, sides, size_of

MOST_SUGGESTED = 3
"""Models suggested for a name that several begin with"""


def unknown_name(model: ModelConfig, name: str, sizes_given: bool) -> str:
    """Explain why no model can be built for a MODEL.NAME that timm does not know, and suggest similar names.

    `sizes_given`: whether the settings have sizes of the model. With sizes and a MODEL.TYPE such as vit, any name would
    do; so for such a TYPE, the settings have no sizes.
    """
    architecture, _, tag = name.partition(".")
    if tag and timm.is_model(architecture):
        tags = timm.list_pretrained(f"{architecture}.*")
        return f"MODEL.NAME: timm has no tag '{tag}' for {architecture}; it has {', '.join(tags) or 'none'}."
    suggestion = f"{similar_models(name)} -list_models shows all names."
    if model.TYPE in MODEL_OF_TYPE:  # so sizes are missing
        reason = f"no sizes (MODEL.EMBED_DIM, ...) are given to build a model of MODEL.TYPE {model.TYPE} with that name"
        return f"MODEL.NAME: '{name}' is not a timm model, and {reason}.{suggestion}"
    if sizes_given:
        return (
            f"MODEL.TYPE: '{model.TYPE}' cannot be built from sizes (MODEL.EMBED_DIM, ...); only "
            f"{', '.join(MODEL_OF_TYPE)} can: set TYPE to one of them.{nearest(model.TYPE, MODEL_OF_TYPE)} "
            f"Or set MODEL.NAME to a timm model; '{name}' is not one.{suggestion}"
        )
    reason = f"MODEL.TYPE '{model.TYPE}' is not one of {', '.join(MODEL_OF_TYPE)}"
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
        f"a {class_name}. Set NAME to a {model.TYPE} model such as {MODEL_OF_TYPE[model.TYPE]}, or leave TYPE out."
    )


def similar_models(name: str, more: Sequence[str] = ()) -> str:
    """Suggest models for an unknown name, as ' Did you mean A, B or C?'; '' if none is similar.

    These are timm's models that begin with the name or with the most similar beginning, those with the most pretrained
    weights first. `more`: further names that are possible, such as those of weights.
    """
    from utils.foreign_flags import MODELS as TORCHVISION_MODELS

    timms_names = timm.list_models()
    beginning = name.casefold()
    if beginning in TORCHVISION_MODELS:
        return f" Did you mean {TORCHVISION_MODELS[beginning]}, which torchvision calls so?"
    if not any(model.startswith(beginning) for model in timms_names):
        # The name is mistyped. Full names are long, so vit_tny is more similar to the beginning vit_tiny than to any.
        full_names = [*timms_names, *RECIPE_MODELS, *more]
        beginning = closest(name, [*_beginnings(timms_names), *RECIPE_MODELS, *more])
        if beginning in full_names:
            return f" Did you mean {beginning}?"
    if not beginning:  # the name is empty, or nothing is similar to it
        return ""
    matches = [model for model in timms_names if model.startswith(beginning)]

    def most_weights_first(model: str) -> tuple[int, str]:
        pretrained_weights = timm.list_pretrained(f"{model}.*")
        return -len(pretrained_weights), model

    matches.sort(key=most_weights_first)
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

    `module`: timm's model of that name, which tells whether another patch size is possible. `sizes`: the sizes of the
    model to build, by key. `patch`: its patch size, also for a model whose other sizes cannot be chosen; None if it has
    no square patches.
    """
    problems = list(_head_problems(sizes.get("EMBED_DIM"), sizes.get("NUM_HEADS"), sizes.get("STAGE_DEPTHS")))
    # The sizes to use instead; empty if the image size is divisible.
    alternatives = nearest_divisible_sizes(image_size, patch) if patch else []
    if alternatives:
        problem = f"DATA.IMAGE_SIZE {one_line(image_size)} is not divisible by MODEL.PATCH_SIZE {patch}"
        or_patch = ", or another PATCH_SIZE" if size_arguments_of(module) else ""
        problems.append(f"{problem}; possible: IMAGE_SIZE {' or '.join(map(one_line, alternatives))}{or_patch}")
    return problems


def _head_problems(width: Any, heads: Any, depths: Any) -> Iterator[str]:
    """Explain which numbers of heads are impossible. Unknown sizes are None.

    A Swin has a tuple of heads, one number per stage, and a tuple of `depths` as long. A ViT has one number of heads,
    and its `depths` are None.
    """
    by_stage = isinstance(heads, tuple)
    is_swin = depths is not None
    if by_stage and not is_swin:
        yield f"MODEL.NUM_HEADS {list(heads)}: this model has no stages and takes one number"
        return
    if is_swin and not by_stage:
        yield f"MODEL.NUM_HEADS {heads}: a Swin takes one number per stage, such as [3, 6, 12, 24]"
        return
    if is_swin and len(heads) != len(depths):
        yield f"MODEL.NUM_HEADS {list(heads)} and MODEL.STAGE_DEPTHS {one_line(depths)} differ in length"
        return
    if not width or not heads:  # unknown, so the division cannot be checked
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


def nearest_divisible_sizes(size: ImageSize, step: int) -> list[ImageSize]:
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
    """Explain why this kind of model does not support the options in use; empty if it does.

    `reference`: timm's model of that name, with its own sizes. `patch`: the patch size of the model to build, if any.
    """
    if not isinstance(reference, VisionTransformer):
        options = {"TOKEN_DROP": shortcuts.token_drop, "SIZE_SCHEDULE": shortcuts.sizes}
        return [
            f"TRAIN.{key}: {type(reference).__name__} does not support it. Leave the key out, or use a model of timm's "
            "class VisionTransformer, such as a ViT or DeiT"
            for key, value in options.items()
            if value
        ]
    side = patch or 1
    # For a size that is divisible, the list of nearest divisible sizes is empty.
    indivisible = [one_line(size) for size in shortcuts.sizes if nearest_divisible_sizes(size, side)]
    return [f"TRAIN.SIZE_SCHEDULE: image size {size} is not divisible by the patch size {side}" for size in indivisible]


def unchangeable(key: str, value: Any, module: nn.Module, sizes: dict[str, Any]) -> str:
    """Explain that this kind of model does not take a size from the settings. `sizes`: those that it has."""
    kind = type(module).__name__
    setting = f"MODEL.{key} {one_line(value)}"
    if key not in sizes:
        return f"{setting}: {kind} has no such size; leave the key out, also of the file of -cfg"
    fact = f"this {kind} has {one_line(sizes[key])}"
    return f"{setting}: {fact}, which this key cannot change; leave the key out or give that value"
