"""Defaults by model family: MODEL.TYPE chooses the defaults of settings that are not set.

ViT's are those of the schema; `paddlevit/families.yaml` has the others.
"""

from typing import Any

from utils.config.kinds import AUTO, as_names, one_line
from utils.config.read import TYPE, Entry, Kind, Source, text_of, type_of
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
TAUGHT = ("deit", "levit", "pit", "xcit")
"""Families that PaddleViT distils, always from the same teacher"""
RGB_ONLY = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
CHANNELS, DEPTH = "DATA.IMAGE_CHANNELS", "DATA.BITS"


def defaults_by(given: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """The defaults that the settings of a run change, by key, and lines for the log about those that it takes.

    Removes the mean and std of a recipe of `configs/` that are for images of other channels or bits.
    """
    kind, channels, family = type_of(given), text_of(given, CHANNELS), dict[str, Any]()
    if kind != "vit":
        from utils.config.paddlevit import defaults_of

        family |= defaults_of(kind)
    plain = channels in ("", "1", "3") and text_of(given, DEPTH) in ("", "8")
    opened, notes = Entry(AUTO, Source(f"default ({CHANNELS}, {DEPTH})", Kind.DEFAULT)), list[str]()
    entries: dict[str, Entry] = {} if plain else dict.fromkeys(RGB_ONLY, opened)
    for key in RGB_ONLY if channels == "1" or not plain else ():
        family.pop(key, None)
        if key not in given:
            continue
        source, several = given[key].source, len({*as_names(given[key].value)}) > 1
        if (several or not plain) and source.kind in (Kind.RECIPE, Kind.OTHER_MODEL):
            notes.append(f"{key} auto: {source} has that of images of other channels or bits")
            del given[key]
            entries[key] = opened
    rows = [(TYPE, kind, kind, family)]
    rows += [(by, by, "true", values) for by, values in IMPLIED.items() if text_of(given, by) in TRUE_WORDS]
    for by, name, word, values in rows:
        entries |= {key: Entry(value, Source(f"default ({name})", Kind.DEFAULT)) for key, value in values.items()}
        if taken := [f"{key} {one_line(value)}" for key, value in values.items() if key not in given]:
            notes.append(f"{by} {word} ({given[by].source}): defaults {WORDS[by]}: {', '.join(taken)}")
    if kind in ("deit", "levit") and "TRAIN.DISTILLATION_TYPE" not in given:
        notes.append(
            f"MODEL.TYPE {kind}: TRAIN.DISTILLATION_TYPE is not set, so there is no teacher; PaddleViT's default is "
            "hard distillation: TRAIN.DISTILLATION_TYPE=hard"
        )
    return entries, notes
