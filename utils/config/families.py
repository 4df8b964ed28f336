"""Defaults by family: what MODEL.TYPE chooses for the settings that nobody sets.

The values are those of PaddleViT, whose ViT, DeiT and Swin have a `config.py` each, and of their random crop in
`datasets.py`. Those of ViT are the schema's own. Two of DeiT's are not taken: a teacher by default
(`TRAIN.DISTILLATION_TYPE: hard` needs a file that only its owner can name), and an EMA in host memory
(`TRAIN.MODEL_EMA_FORCE_CPU`), which gives the same weights more slowly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from utils.config.keys import default_of
from utils.config.read import Entry
from utils.config.write import one_line

TYPE, NAME = "MODEL.TYPE", "MODEL.NAME"
_BOTH: dict[str, Any] = {
    "DATA.IMAGENET_MEAN": (0.485, 0.456, 0.406),
    "DATA.IMAGENET_STD": (0.229, 0.224, 0.225),
    "DATA.CROP_SCALE": (0.08, 1.0),
    "TRAIN.WEIGHT_DECAY": 0.05,
    "TRAIN.BASE_LR": 5e-4,
    "TRAIN.LINEAR_SCALED_LR": 512,
    "TRAIN.SMOOTHING": 0.1,
    "TRAIN.COLOR_JITTER": 0.4,
    "TRAIN.RAND_AUGMENT": True,
    "TRAIN.MIXUP_ALPHA": 0.8,
    "TRAIN.CUTMIX_ALPHA": 1.0,
    "TRAIN.RANDOM_ERASE_PROB": 0.25,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit": {},
    "deit": {
        **_BOTH,
        "MODEL.NAME": "deit_base_patch16_224",
        "TRAIN.WARMUP_EPOCHS": 5,
        "TRAIN.MODEL_EMA": True,
    },
    "swin": {
        **_BOTH,
        "DATA.CROP_PCT": 0.9,
        "MODEL.NAME": "swin_tiny_patch4_window7_224",
        "MODEL.DROPPATH": 0.1,
        "TRAIN.WARMUP_EPOCHS": 20,
        "TRAIN.WARMUP_START_LR": 5e-7,
        "TRAIN.END_LR": 5e-6,
        "TRAIN.GRAD_CLIP": 5.0,
    },
}
"""TYPE -> dotted key -> the family's default, where it is not the schema's."""
OF_COLOURS = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")


def family_of(given: Mapping[str, Entry]) -> str:
    """The family whose defaults hold: that of TYPE; for a word that is no family, the schema's."""
    value = given[TYPE].value if TYPE in given else default_of(TYPE)
    word = value.strip().casefold() if isinstance(value, str) else ""
    return word if word in FAMILIES else "vit"


def defaults_of(family: str, given: Mapping[str, Entry]) -> dict[str, Any]:
    """The family's defaults; the means of ImageNet's three colours are none for grey images."""
    channels = given.get("DATA.IMAGE_CHANNELS")
    left_out = OF_COLOURS if channels is not None and str(channels.value).strip() == "1" else ()
    return {key: value for key, value in FAMILIES[family].items() if key not in left_out}


def family_note(family: str, defaults: Mapping[str, Any], given: Mapping[str, Entry]) -> list[str]:
    """What the log says of the family's `defaults`."""
    if TYPE not in given:
        return _not_of_the_name(given)
    notes = []
    if taken := [f"{key} {one_line(value)}" for key, value in defaults.items() if key not in given]:
        notes.append(f"MODEL.TYPE {family} ({given[TYPE].source}): defaults of this family: {', '.join(taken)}")
    if family == "deit" and "TRAIN.DISTILLATION_TYPE" not in given:
        notes.append(
            "MODEL.TYPE deit: TRAIN.DISTILLATION_TYPE is not set, so there is no teacher; PaddleViT's default is hard, "
            "with a teacher's file"
        )
    return notes


def _not_of_the_name(given: Mapping[str, Entry]) -> list[str]:
    """NAME is of another family than TYPE's default, which stays: TYPE alone chooses."""
    value = given[NAME].value if NAME in given else ""
    named = re.match(r"(deit|swin)_", value.strip().casefold() if isinstance(value, str) else "")
    others = [key for key in FAMILIES[named[1]] if key not in given] if named else []
    if not named or not others:
        return []
    return [
        f"MODEL.NAME {value} ({given[NAME].source}), and MODEL.TYPE is not set: the defaults are those of vit for "
        f"{', '.join(others)}; MODEL.TYPE={named[1]} takes those of {named[1]}"
    ]
