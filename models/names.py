"""From MODEL.TYPE and MODEL.NAME to the timm model that is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
from timm.models.vision_transformer import VisionTransformer

from utils.config.model import ModelConfig
from utils.errors import UserError, nearest

# What a TYPE stands for where NAME says nothing. PaddleViT's default for NAME is the TYPE's own word.
DEFAULTS = {
    "vit": "vit_base_patch16_224",
    "deit": "deit_base_patch16_224",
    "swin": "swin_tiny_patch4_window7_224",
}

# Recipes of PaddleViT that timm knows as a tag of another name.
RECIPES = {
    "swin_base_patch4_window7_224_21k_1k": "swin_base_patch4_window7_224.ms_in22k_ft_in1k",
    "swin_base_patch4_window12_384_21k_1k": "swin_base_patch4_window12_384.ms_in22k_ft_in1k",
}


@dataclass(frozen=True)
class Base:
    """The timm model a build starts from."""

    timm_name: str
    is_label: bool  # NAME is no timm name: it only labels what the sizes describe


def is_timm_name(name: str) -> bool:
    """Whether timm builds this name; a tag after the dot counts only if timm has weights by it."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        return False
    return not tag or name in timm.list_pretrained(f"{architecture}.*")


def resolve(model: ModelConfig, sizes_given: bool) -> Base:
    """The timm model for these settings; `sizes_given` says that NAME may be a word of the user's own."""
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
            f"MODEL.TYPE: '{model.TYPE}' is no family that is built from sizes ({', '.join(DEFAULTS)} are)."
            f"{nearest(model.TYPE, DEFAULTS)} Or set MODEL.NAME to a model of timm, which '{name}' is not."
            f"{nearest(name, [*timm.list_models(), *RECIPES])}"
        )
    raise UserError(_unknown(model, name))


def _unknown(model: ModelConfig, name: str) -> str:
    architecture, _, tag = name.partition(".")
    if tag and timm.is_model(architecture):
        tags = timm.list_pretrained(f"{architecture}.*")
        return f"MODEL.NAME: timm has no tag '{tag}' for {architecture}; it has {', '.join(tags) or 'none'}."
    if model.TYPE in DEFAULTS:
        why = f"and no sizes (MODEL.EMBED_DIM, ...) are given for MODEL.TYPE {model.TYPE} to build one under that label"
    else:
        why = f"and MODEL.TYPE '{model.TYPE}' gives no architecture ({', '.join(DEFAULTS)} do)"
    hint = nearest(name, [*timm.list_models(), *RECIPES])
    return f"MODEL.NAME: '{name}' is no model of timm, {why}.{hint} -list_models shows all names."


def family_problem(model: ModelConfig, reference: Any) -> str | None:
    """TYPE deit or swin beside a NAME of another family. TYPE vit is the default, so it contradicts no NAME."""
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
