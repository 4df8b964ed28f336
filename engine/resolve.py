"""Settings that only the data and the pretrained weights know: layout, number of classes, preprocessing.

Each process resolves them for itself, before anything is built; config.yaml stores the result. A resumed run has them
from its checkpoint instead (utils/config/resumed.py).
"""

from __future__ import annotations

from datasets import count_classes, source_of
from engine.task import task_of
from utils.config import Loaded
from utils.config.kinds import AUTO
from utils.config.read import Entry
from utils.errors import UserError

CLASSES, DATASET = "MODEL.NUM_CLASSES", "DATA.DATASET"


def resolve(loaded: Loaded) -> Loaded:
    """The settings with a number for `auto` classes, the layout of DATA_PATH, and the preprocessing of the weights.

    For an evaluation also with the split to evaluate.
    """
    loaded = _with_classes(_with_dataset(loaded))
    if loaded.config.MODEL.PRETRAINED is not None:
        from engine.checkpoint.preprocessing import with_preprocessing

        loaded = with_preprocessing(loaded, loaded.config.MODEL.PRETRAINED)
    return _with_part(loaded) if loaded.config.EVAL else loaded


def _with_dataset(loaded: Loaded) -> Loaded:
    place = loaded.config.DATA.DATA_PATH
    if place is None or not loaded.is_default(DATASET):
        return loaded
    from datasets.recognise import recognise

    found = recognise(place)
    if found is None:
        return loaded
    name, what = found
    note = f"{DATASET} {name}: {what}"
    return loaded.with_values({DATASET: Entry(name, f"recognised in {place}")}, [note])


def _with_classes(loaded: Loaded) -> Loaded:
    config = loaded.config
    if config.MODEL.NUM_CLASSES != AUTO:
        return loaded
    try:
        number = count_classes(config.DATA, train=True)
    except UserError:
        if not config.EVAL:
            raise
        number = count_classes(config.DATA, train=False)  # an evaluation needs no training split
    number = max(number, 1)  # the check of the data reports negative labels, with their lines
    name = source_of(config.DATA)
    note = f"{CLASSES} {number}: classes of {name}"
    if number < task_of(config).fewest_classes:
        note += ". With one class there is nothing to learn: is DATA.DATA_PATH the folder that holds the class folders?"
    return loaded.with_values({CLASSES: Entry(number, f"classes of {name}")}, [note])


def _with_part(loaded: Loaded) -> Loaded:
    from engine.evaluated_data import evaluated_weights, settings_for_evaluation

    given = {key for key, source in loaded.sources.items() if source.startswith("-") or source == "command line"}
    found, notes = settings_for_evaluation(loaded.config, evaluated_weights(loaded.config), given)
    return loaded.with_values({key: Entry(value, "the evaluated data") for key, value in found.items()}, notes)
