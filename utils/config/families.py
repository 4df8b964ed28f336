"""Defaults by model family: MODEL.TYPE chooses the defaults of settings that are not set.

ViT's are those of the schema; `paddlevit/families.yaml` has the others.
"""

from typing import Any

from utils.config.kinds import AUTO, as_names, one_line
from utils.config.read import TYPE, Entry, Kind, Source, text_of, type_of
from vitamp.metrics import NO_LABELS, SEVERAL_LABELS

MULTI_LABEL = "DATA.MULTI_LABEL"
MAE = "MODEL.MAE_PRETRAIN"
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
CHANNELS = "DATA.IMAGE_CHANNELS"
DEPTH = "DATA.BITS"


def defaults_by(given: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """The defaults that the settings of a run change, by key, and lines for the log about those that it takes.

    Removes the mean and std of a recipe of `configs/` that are for images of other channels or bits.
    """
    kind = type_of(given)
    family = dict[str, Any]()
    if kind != "vit":
        from utils.config.paddlevit import defaults_of

        family |= defaults_of(kind)
    entries, notes = _without_rgb(given, family)
    rows = [(TYPE, kind, kind, family)]
    for by, values in IMPLIED.items():
        if text_of(given, by) in TRUE_WORDS:
            rows.append((by, by, "true", values))
    for by, name, word, values in rows:
        source = Source(f"default ({name})", Kind.DEFAULT)
        entries |= {key: Entry(value, source) for key, value in values.items()}
        taken = [f"{key} {one_line(value)}" for key, value in values.items() if key not in given]
        if taken:
            notes.append(f"{by} {word} ({given[by].source}): defaults {WORDS[by]}: {', '.join(taken)}")
    if kind in ("deit", "levit") and "TRAIN.DISTILLATION_TYPE" not in given:
        notes.append(
            f"MODEL.TYPE {kind}: TRAIN.DISTILLATION_TYPE is not set, so there is no teacher; PaddleViT's default is "
            "hard distillation: TRAIN.DISTILLATION_TYPE=hard"
        )
    return entries, notes


def _without_rgb(given: dict[str, Entry], family: dict[str, Any]) -> tuple[dict[str, Entry], list[str]]:
    """Take the mean and std of RGB images out of the settings for other images. Returns defaults and lines."""
    channels = text_of(given, CHANNELS)
    is_plain = channels in ("", "1", "3") and text_of(given, DEPTH) in ("", "8")
    if is_plain and channels != "1":
        return {}, []
    opened = Entry(AUTO, Source(f"default ({CHANNELS}, {DEPTH})", Kind.DEFAULT))
    entries: dict[str, Entry] = {} if is_plain else dict.fromkeys(RGB_ONLY, opened)
    notes: list[str] = []
    for key in RGB_ONLY:
        family.pop(key, None)
        if key not in given:
            continue
        source = given[key].source
        has_several = len(set(as_names(given[key].value))) > 1
        if (has_several or not is_plain) and source.kind in (Kind.RECIPE, Kind.OTHER_MODEL):
            notes.append(f"{key} auto: {source} has that of images of other channels or bits")
            del given[key]
            entries[key] = opened
    return entries, notes
