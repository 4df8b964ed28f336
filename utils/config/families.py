"""Defaults by model family: MODEL.TYPE chooses the defaults of settings that are not set.

The values are those of PaddleViT, whose ViT, DeiT and Swin have a `config.py` each, and of their random crop in
`datasets.py`. ViT's values are the schema's defaults. Two of DeiT's are left out: a teacher
(`TRAIN.DISTILLATION_TYPE: hard` needs a file that only the user can name), and an EMA in host memory
(`TRAIN.MODEL_EMA_FORCE_CPU`), which gives the same weights more slowly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from utils.config.keys import FIXED, default_of
from utils.config.kinds import is_no_value, one_line, parse_text
from utils.config.read import Entry, Layer
from vitamp.metrics import NO_LABELS, SEVERAL_LABELS

TYPE, NAME, MULTI_LABEL = "MODEL.TYPE", "MODEL.NAME", "DATA.MULTI_LABEL"
Implied = dict[str, tuple[Any, str]]
TRUE_WORDS = ("true", "yes", "on", "1", "t", "y")
"""Words that pydantic reads as true"""
FALSE_WORDS = ("false", "no", "off", "0", "f", "n")
MAE = "MODEL.MAE_PRETRAIN"
IMPLIED: dict[str, dict[str, Any]] = {
    MULTI_LABEL: {"TRAIN.LOSS": "bce", "SAVE_BEST_BY": SEVERAL_LABELS.best.name},
    MAE: {"SAVE_BEST_BY": NO_LABELS.best.name, "MODEL.NUM_CLASSES": "auto"},
}
"""A setting that is on -> the defaults that it changes."""
WORDS = {MULTI_LABEL: "for several labels", MAE: "without labels"}
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
        "TRAIN.MIXUP_ALPHA": 0.8,
        "TRAIN.CUTMIX_ALPHA": 1.0,
    },
}
"""TYPE -> dotted key -> the family's default, where it differs from the schema's."""
TAUGHT = ("deit", "levit", "pit", "xcit")
"""Families that PaddleViT distils, always from the same teacher"""
TAUGHT_BY_DEFAULT = ("deit", "levit")
RGB_ONLY = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")


def family_of(given: Mapping[str, Entry]) -> str:
    """The family of TYPE; vit, whose defaults are the schema's, for any other word."""
    word = _type_of(given)
    return word if of_type(word) is not None else "vit"


def foreign_type(given: Mapping[str, Entry]) -> str:
    """TYPE, if it is none of the families; else ''."""
    word = _type_of(given)
    return "" if of_type(word) is not None else word


def of_type(word: str) -> Mapping[str, Any] | None:
    """The defaults of a TYPE; None if it is no family."""
    if word in FAMILIES:
        return FAMILIES[word]
    from utils.config.paddlevit import families

    return families()[word].defaults if word in families() else None


def translated(given: Mapping[str, Entry], layers: Sequence[Layer]) -> list[str]:
    """Make the layers' settings ours, if they describe a model of another family of PaddleViT; lines for the log."""
    word = _type_of(given)
    if word in FAMILIES:
        return []
    from utils.config.paddlevit import families, missing, refuse_missing, translate

    if word in missing():
        refuse_missing(missing()[word], layers)
    return translate(families()[word], layers) if word in families() else []


def drop_fixed(given: dict[str, Entry]) -> list[str]:
    """Remove PaddleViT's keys that have one value here; one line for each that has another value."""
    problems = []
    swin = _type_of(given) == "swin"
    sizes = [_number(given.get(key)) for key in ("MODEL.EMBED_DIM", "MODEL.NUM_HEADS")]
    head = sizes[0] / sizes[1] if sizes[0] and sizes[1] else 32 if swin else 64
    one = {"MODEL.ATTN_HEAD_SIZE": head, "MODEL.QK_SCALE": head**-0.5, "MODEL.APE": False, "MODEL.PATCH_NORM": swin}
    why = {"MODEL.ATTN_HEAD_SIZE": " (EMBED_DIM / NUM_HEADS)", "MODEL.QK_SCALE": " (that of the width of a head)"}
    for key in FIXED:
        entry = given.pop(key, None)
        if entry is None or key not in one or entry.value is None or is_no_value(entry.value):
            continue  # each process gets its LOCAL_RANK from the launcher
        value, number = one[key], _number(entry)
        word = str(entry.value).strip().casefold()
        fits = word in TRUE_WORDS if value is True else word in FALSE_WORDS
        if not (fits if isinstance(value, bool) else number is not None and abs(number - value) < 1e-3 * value):
            has = one_line(value) if isinstance(value, bool) else f"{value:.6g}"
            problems.append(
                f"{entry.source}: {key} {entry.value}: the model has {has}{why.get(key, '')}, which cannot be changed; "
                "leave the key out"
            )
    return problems


def _number(entry: Entry | None) -> float | None:
    """The value, or its first number where a Swin has one per stage."""
    value = parse_text(entry.value) if entry else None
    try:
        return float(value[0] if isinstance(value, list | tuple) else value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, IndexError):
        return None


def _type_of(given: Mapping[str, Entry]) -> str:
    value = given[TYPE].value if TYPE in given else default_of(TYPE)
    return value.strip().casefold() if isinstance(value, str) else ""


def defaults_of(family: str, given: Mapping[str, Entry]) -> dict[str, Any]:
    """The family's defaults; for grey images without the mean and standard deviation of ImageNet's colours."""
    channels = given.get("DATA.IMAGE_CHANNELS")
    left_out = RGB_ONLY if channels is not None and str(channels.value).strip() == "1" else ()
    return {key: value for key, value in (of_type(family) or {}).items() if key not in left_out}


def implied_by(given: Mapping[str, Entry]) -> Implied:
    """Defaults that other settings than TYPE change: key -> (value, the setting that is on)."""
    on = [by for by in IMPLIED if by in given and str(given[by].value).strip().casefold() in TRUE_WORDS]
    return {key: (value, by) for by in on for key, value in IMPLIED[by].items()}


def implied_notes(implied: Implied, given: Mapping[str, Entry]) -> list[str]:
    """A line for the log per setting that changed defaults."""
    taken: dict[str, list[str]] = {}
    for key, (value, by) in implied.items():
        if key not in given:
            taken.setdefault(by, []).append(f"{key} {one_line(value)}")
    return [f"{by} true ({given[by].source}): defaults {WORDS[by]}: {', '.join(keys)}" for by, keys in taken.items()]


def family_note(family: str, defaults: Mapping[str, Any], given: Mapping[str, Entry]) -> list[str]:
    """Lines for the log about the family's `defaults`."""
    if TYPE not in given:
        return _name_of_another_family(given)
    notes = []
    if taken := [f"{key} {one_line(value)}" for key, value in defaults.items() if key not in given]:
        notes.append(f"MODEL.TYPE {family} ({given[TYPE].source}): defaults of this family: {', '.join(taken)}")
    if family in TAUGHT_BY_DEFAULT and "TRAIN.DISTILLATION_TYPE" not in given:
        notes.append(
            f"MODEL.TYPE {family}: TRAIN.DISTILLATION_TYPE is not set, so there is no teacher; PaddleViT's default is "
            "hard distillation: TRAIN.DISTILLATION_TYPE=hard"
        )
    return [*notes, *_one_classifier(family, given)]


def _one_classifier(family: str, given: Mapping[str, Entry]) -> Iterator[str]:
    """A line about a distilled DeiT by the name of the plain one; PaddleViT's has the teacher's token in any case."""
    taught = given["TRAIN.DISTILLATION_TYPE"].value if "TRAIN.DISTILLATION_TYPE" in given else None
    name = given[NAME].value if NAME in given else None
    if family != "deit" or not isinstance(name, str) or taught is None or is_no_value(taught):
        return
    if plain := re.fullmatch(r"(deit_(?:tiny|small|base))(_patch16_\d+)", name.strip()):
        yield (
            f"MODEL.NAME {name} has one classifier, for the labels and the teacher; PaddleViT's DeiT has a second one "
            f"for the teacher: MODEL.NAME={plain[1]}_distilled{plain[2]}"
        )


def _name_of_another_family(given: Mapping[str, Entry]) -> list[str]:
    """A note where NAME is a DeiT or a Swin without a TYPE: TYPE alone chooses the defaults."""
    value = given[NAME].value if NAME in given else ""
    named = re.match(r"(deit|swin)_", value.strip().casefold() if isinstance(value, str) else "")
    others = [key for key in FAMILIES[named[1]] if key not in given] if named else []
    if not named or not others:
        return []
    return [
        f"MODEL.NAME {value} ({given[NAME].source}), but MODEL.TYPE is not set: vit's defaults are used for "
        f"{', '.join(others)}; MODEL.TYPE={named[1]} uses those of {named[1]}"
    ]
