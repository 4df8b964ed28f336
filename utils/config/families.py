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
MEAN_AND_STD = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
CHANNELS = "DATA.IMAGE_CHANNELS"
DEPTH = "DATA.BITS"


def defaults_by(given: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """Return the defaults that the settings of a run change, by dotted key, and lines for the log about them.

    The lines name only defaults of settings that the run does not set. If a recipe of `configs/` has the mean and std
    of images with other channels or bits than the run's, this mean and std are removed from `given`.

    given: the settings of the run that are set, by dotted key
    """
    family_name = type_of(given)
    family_defaults = dict[str, Any]()
    if family_name != "vit":
        from utils.config.paddlevit import defaults_of

        family_defaults |= defaults_of(family_name)
    default_entries, notes = _remove_rgb_normalisation(given, family_defaults)

    # Each row: a setting that changes defaults, its value, its name in the source `default (name)`, and the defaults.
    rows = [(TYPE, family_name, family_name, family_defaults)]
    for changing_key, values in IMPLIED.items():
        if text_of(given, changing_key) in TRUE_WORDS:
            rows.append((changing_key, "true", changing_key, values))
    for changing_key, changing_value, source_name, values in rows:
        source = Source(f"default ({source_name})", Kind.DEFAULT)
        default_entries |= {key: Entry(value, source) for key, value in values.items()}
        used_defaults = [f"{key} {one_line(value)}" for key, value in values.items() if key not in given]
        if used_defaults:
            cause = f"{changing_key} {changing_value} ({given[changing_key].source})"
            notes.append(f"{cause}: defaults {WORDS[changing_key]}: {', '.join(used_defaults)}")

    if family_name in ("deit", "levit") and "TRAIN.DISTILLATION_TYPE" not in given:
        notes.append(
            f"MODEL.TYPE {family_name}: TRAIN.DISTILLATION_TYPE is not set, so there is no teacher; PaddleViT's "
            "default is hard distillation: TRAIN.DISTILLATION_TYPE=hard"
        )
    return default_entries, notes


def _remove_rgb_normalisation(
    given: dict[str, Entry], family_defaults: dict[str, Any]
) -> tuple[dict[str, Entry], list[str]]:
    """Remove the mean and std of RGB images from a run's settings and defaults, if the run has other images.

    For RGB images of 8 bits, nothing is removed. For grey images of 8 bits, mean and std with one number for all
    channels are kept, and the schema's default is of this kind. For all others, mean and std must be measured (`auto`).
    Returns the new defaults, by key, and lines for the log.

    given: the settings of the run; mean and std are only removed if they are those of a recipe
    family_defaults: the defaults of the model's family, by key
    """
    channels = text_of(given, CHANNELS)
    has_8_bits = text_of(given, DEPTH) in ("", "8")
    is_rgb = has_8_bits and channels in ("", "3")
    is_grey = has_8_bits and channels == "1"
    if is_rgb:
        return {}, []

    auto_entry = Entry(AUTO, Source(f"default ({CHANNELS}, {DEPTH})", Kind.DEFAULT))
    default_entries: dict[str, Entry] = {} if is_grey else dict.fromkeys(MEAN_AND_STD, auto_entry)
    notes: list[str] = []
    for key in MEAN_AND_STD:
        family_defaults.pop(key, None)
        if key not in given:
            continue
        source = given[key].source
        is_from_recipe = source.kind in (Kind.RECIPE, Kind.OTHER_MODEL)
        differs_by_channel = len(set(as_names(given[key].value))) > 1
        is_unusable = differs_by_channel or not is_grey
        if is_unusable and is_from_recipe:
            notes.append(f"{key} auto: {source} has that of images of other channels or bits")
            del given[key]
            default_entries[key] = auto_entry
    return default_entries, notes
