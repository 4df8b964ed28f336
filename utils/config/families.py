"""Defaults by model family: MODEL.TYPE chooses the defaults of settings that are not set.

The values are those of PaddleViT, whose ViT, DeiT and Swin have a `config.py` each, and of their random crop in
`datasets.py`. ViT's values are the schema's defaults. Two of DeiT's are left out: a teacher
(`TRAIN.DISTILLATION_TYPE: hard` needs a file that only the user can name), and an EMA in host memory
(`TRAIN.MODEL_EMA_FORCE_CPU`), which gives the same weights more slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.config.kinds import AUTO, as_names, one_line
from utils.config.read import TYPE, Entry, type_of
from utils.program import ROOT
from vitamp.metrics import NO_LABELS, SEVERAL_LABELS

MULTI_LABEL, MAE = "DATA.MULTI_LABEL", "MODEL.MAE_PRETRAIN"
IMPLIED: dict[str, dict[str, Any]] = {
    MULTI_LABEL: {"TRAIN.LOSS": "bce", "SAVE_BEST_BY": SEVERAL_LABELS.best.name},
    MAE: {"SAVE_BEST_BY": NO_LABELS.best.name, "MODEL.NUM_CLASSES": "auto"},
}
"""A setting that is on -> the defaults that it changes."""
WORDS = {TYPE: "of this family", MULTI_LABEL: "for several labels", MAE: "without labels"}
TRUE_WORDS = ("true", "yes", "on", "1", "t", "y")
"""Words that pydantic reads as true"""
_DEIT_AND_SWIN: dict[str, Any] = {
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
        **_DEIT_AND_SWIN,
        "MODEL.NAME": "deit_base_patch16_224",
        "TRAIN.WARMUP_EPOCHS": 5,
        "TRAIN.MODEL_EMA": True,
    },
    "swin": {
        **_DEIT_AND_SWIN,
        "DATA.CROP_PCT": 0.9,
        "MODEL.NAME": "swin_tiny_patch4_window7_224",
        "MODEL.DROPPATH": 0.1,
        "TRAIN.WARMUP_EPOCHS": 20,
        "TRAIN.WARMUP_START_LR": 5e-7,
        "TRAIN.END_LR": 5e-6,
        "TRAIN.GRAD_CLIP": 5.0,
    },
    "mae": {
        "DATA.IMAGENET_MEAN": (0.485, 0.456, 0.406),
        "DATA.IMAGENET_STD": (0.229, 0.224, 0.225),
        "DATA.CROP_SCALE": (0.05, 1.0),
        "TRAIN.NUM_EPOCHS": 800,
        "TRAIN.WARMUP_EPOCHS": 40,
        "TRAIN.WEIGHT_DECAY": 0.05,
        "TRAIN.BASE_LR": 1.5e-4,
        "TRAIN.LINEAR_SCALED_LR": 256,
        "TRAIN.OPTIMIZER.BETAS": (0.9, 0.95),
        "TRAIN.SMOOTHING": 0.1,
        "TRAIN.RAND_AUGMENT_LAYERS": 9,
        "TRAIN.RAND_AUGMENT_MAGNITUDE": 5.0,
        "TRAIN.MIXUP_ALPHA": 0.8,
        "TRAIN.CUTMIX_ALPHA": 1.0,
        "SAVE_FREQ": 1,
        "REPORT_FREQ": 100,
        "VALIDATE_FREQ": 100,
    },
}
"""TYPE -> dotted key -> the family's default, where it differs from the schema's."""
TAUGHT = ("deit", "levit", "pit", "xcit")
"""Families that PaddleViT distils, always from the same teacher"""
RGB_ONLY = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
CHANNELS, DEPTH = "DATA.IMAGE_CHANNELS", "DATA.BITS"


def defaults_by(given: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """The defaults that the settings of a run change, by key, and lines for the log about those that it takes.

    Removes the mean and std of a recipe of `configs/` that are for images of other channels or bits.
    """
    kind = type_of(given)
    of_family: Mapping[str, Any] | None = FAMILIES.get(kind)
    if of_family is None:
        from utils.config.paddlevit import families

        of_family = families()[kind].defaults if kind in families() else {}
    channels, bits = (str(given[key].value).strip() if key in given else "" for key in (CHANNELS, DEPTH))
    plain = channels in ("", "1", "3") and bits in ("", "8")
    rgb = channels in ("", "3") and plain
    family = {key: value for key, value in of_family.items() if rgb or key not in RGB_ONLY}
    on = [by for by in IMPLIED if by in given and str(given[by].value).strip().casefold() in TRUE_WORDS]
    opened = Entry(AUTO, f"default ({CHANNELS}, {DEPTH})")
    entries: dict[str, Entry] = {} if plain else dict.fromkeys(RGB_ONLY, opened)
    notes = []
    for key in (key for key in RGB_ONLY if key in given and not rgb):
        source, several = given[key].source, len({*as_names(given[key].value)}) > 1
        if (several or not plain) and Path(source.rpartition(":")[0] or "/").resolve().parent == ROOT / "configs":
            notes.append(f"{key} auto: {source} has that of images of other channels or bits")
            del given[key]
            entries[key] = opened
    for by, word, values in [(TYPE, kind, family), *((by, "true", IMPLIED[by]) for by in on)]:
        entries |= {key: Entry(value, f"default ({kind if by == TYPE else by})") for key, value in values.items()}
        if taken := [f"{key} {one_line(value)}" for key, value in values.items() if key not in given]:
            notes.append(f"{by} {word} ({given[by].source}): defaults {WORDS[by]}: {', '.join(taken)}")
    if kind in ("deit", "levit") and "TRAIN.DISTILLATION_TYPE" not in given:
        notes.append(
            f"MODEL.TYPE {kind}: TRAIN.DISTILLATION_TYPE is not set, so there is no teacher; PaddleViT's default is "
            "hard distillation: TRAIN.DISTILLATION_TYPE=hard"
        )
    return entries, notes
