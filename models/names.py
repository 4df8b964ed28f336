"""Choice of the timm model by MODEL.TYPE and MODEL.NAME."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer

from utils.config.model import ModelConfig
from utils.errors import UserError, either, nearest

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


MOST_SUGGESTED = 3
"""Models suggested for a name that several begin with."""


@dataclass(frozen=True)
class Base:
    """The timm model a build starts from."""

    timm_name: str
    is_label: bool
    """MODEL.NAME is not a timm name, only a label"""


def is_timm_name(name: str) -> bool:
    """Whether timm has a model of this name; a tag after the dot must be one that timm has weights for."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        return False
    return not tag or name in timm.list_pretrained(f"{architecture}.*")


def resolve(model: ModelConfig, sizes_given: bool) -> Base:
    """The timm model for these settings. With `sizes_given`, NAME may be any label."""
    name = model.NAME.strip()
    if name in RECIPES:
        return Base(RECIPES[name], is_label=False)
    if is_timm_name(name):
        return Base(name, is_label=False)
    if name.casefold() in DEFAULTS:
        return Base(DEFAULTS[name.casefold()], is_label=True)
    if model.TYPE in DEFAULTS and sizes_given:
        return Base(DEFAULTS[model.TYPE], is_label=True)
    if sizes_given and model.TYPE not in DEFAULTS and "." not in name:
        raise UserError(
            f"MODEL.TYPE: '{model.TYPE}' cannot be built from sizes (MODEL.EMBED_DIM, ...); only "
            f"{', '.join(DEFAULTS)} can: set TYPE to one of them.{nearest(model.TYPE, DEFAULTS)} Or set MODEL.NAME "
            f"to a timm model; '{name}' is not one.{similar_models(name)}"
        )
    raise UserError(_unknown(model, name))


def _unknown(model: ModelConfig, name: str) -> str:
    architecture, _, tag = name.partition(".")
    if tag and timm.is_model(architecture):
        tags = timm.list_pretrained(f"{architecture}.*")
        return f"MODEL.NAME: timm has no tag '{tag}' for {architecture}; it has {', '.join(tags) or 'none'}."
    if model.TYPE in DEFAULTS:
        why = (
            f"and no sizes (MODEL.EMBED_DIM, ...) are given to build a model of MODEL.TYPE {model.TYPE} with that name"
        )
    else:
        why = f"and MODEL.TYPE '{model.TYPE}' is not one of {', '.join(DEFAULTS)}"
    return f"MODEL.NAME: '{name}' is not a timm model, {why}.{similar_models(name)} -list_models shows all names."


def similar_models(name: str, more: Sequence[str] = ()) -> str:
    """' Did you mean A, B or C?': the models with most weights whose names begin so, or the most similar name.

    `more`: other names that are possible, such as those of weights.
    """
    beginning = [one for one in timm.list_models() if one.startswith(name.casefold())] if name else []
    beginning.sort(key=lambda one: (-len(timm.list_pretrained(f"{one}.*")), one))
    most = beginning[:MOST_SUGGESTED]
    return f" Did you mean {either(most)}?" if most else nearest(name, [*timm.list_models(), *RECIPES, *more])


def family_problem(model: ModelConfig, reference: Any) -> str | None:
    """Message if TYPE is deit or swin and NAME is of another family. TYPE vit, the default, contradicts no NAME."""
    kind = type(reference).__name__
    contradicts = (model.TYPE == "swin" and "Swin" not in kind) or (
        model.TYPE == "deit" and not isinstance(reference, VisionTransformer)
    )
    if not contradicts:
        return None
    return (
        f"MODEL.TYPE {model.TYPE} and MODEL.NAME {model.NAME} contradict each other: timm's model of that name is a "
        f"{kind}. Set NAME to a {model.TYPE} model such as {DEFAULTS[model.TYPE]}, or leave TYPE out."
    )
