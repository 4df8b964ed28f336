"""Defaults that other settings change: MODEL.TYPE, the model's family, and the settings in IMPLIED.

The schema has the defaults of ViT; `paddlevit/families.yaml` has those of the other families.
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
"""A setting that changes defaults -> how the log calls these defaults."""
TRUE_WORDS = ("true", "yes", "on", "1", "t", "y")
"""Words that pydantic reads as true."""
TAUGHT = ("deit", "levit", "pit", "xcit")
"""Families that PaddleViT distils, always from the same teacher."""
RGB_ONLY = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
CHANNELS = "DATA.IMAGE_CHANNELS"
DEPTH = "DATA.BITS"


def defaults_by(given: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """Return the defaults that the settings of a run change, by dotted key, and lines for the log about them.

    The lines name only defaults of settings that are not in `given`. If a recipe of `configs/` has the mean and std of
    images with other channels or bits than the run's, these are removed from `given`.
    """
    family_name = type_of(given)
    family_defaults = dict[str, Any]()
    if family_name != "vit":
        from utils.config.paddlevit import defaults_of

        family_defaults |= defaults_of(family_name)
    entries, notes = _without_rgb(given, family_defaults)

    # Each row: the key that changes defaults, its name in sources, its value in the log, and the defaults.
    rows = [(TYPE, family_name, family_name, family_defaults)]
    for changing_key, values in IMPLIED.items():
        if text_of(given, changing_key) in TRUE_WORDS:
            rows.append((changing_key, changing_key, "true", values))
    for changing_key, source_name, changing_value, values in rows:
        source = Source(f"default ({source_name})", Kind.DEFAULT)
        entries |= {key: Entry(value, source) for key, value in values.items()}
        taken = [f"{key} {one_line(value)}" for key, value in values.items() if key not in given]
        if taken:
            cause = f"{changing_key} {changing_value} ({given[changing_key].source})"
            notes.append(f"{cause}: defaults {WORDS[changing_key]}: {', '.join(taken)}")

    if family_name in ("deit", "levit") and "TRAIN.DISTILLATION_TYPE" not in given:
        notes.append(
            f"MODEL.TYPE {family_name}: TRAIN.DISTILLATION_TYPE is not set, so there is no teacher; PaddleViT's "
            "default is hard distillation: TRAIN.DISTILLATION_TYPE=hard"
        )
    return entries, notes


def _without_rgb(given: dict[str, Entry], family_defaults: dict[str, Any]) -> tuple[dict[str, Entry], list[str]]:
    """Remove the mean and std of RGB images from `given` and `family_defaults`, if the run has other images.

    From `given`, only those of a recipe are removed. Returns `auto` as the default for them, by key, and lines for the
    log; both are empty for RGB images.
    """
    channels = text_of(given, CHANNELS)
    is_rgb_or_grey = channels in ("", "1", "3") and text_of(given, DEPTH) in ("", "8")
    if is_rgb_or_grey and channels != "1":
        return {}, []
    auto_entry = Entry(AUTO, Source(f"default ({CHANNELS}, {DEPTH})", Kind.DEFAULT))
    # Grey images keep the schema's default of equal numbers; that of other images must be measured.
    entries: dict[str, Entry] = {} if is_rgb_or_grey else dict.fromkeys(RGB_ONLY, auto_entry)
    notes: list[str] = []
    for key in RGB_ONLY:
        family_defaults.pop(key, None)
        if key not in given:
            continue
        source = given[key].source
        differs_by_channel = len(set(as_names(given[key].value))) > 1
        if (differs_by_channel or not is_rgb_or_grey) and source.kind in (Kind.RECIPE, Kind.OTHER_MODEL):
            notes.append(f"{key} auto: {source} has that of images of other channels or bits")
            del given[key]
            entries[key] = auto_entry
    return entries, notes
