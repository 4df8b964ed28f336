"""Checks that need no process group, no open data and no memory: they run before any process starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from datasets import check_dataset, count_classes, open_dataset, source_of
from engine.amp.precision import check_amp
from engine.inputs.batches import shortcuts_of
from engine.machine.memory import total_memory
from engine.optim.build import optimizer_name
from engine.task import task_of
from models.build import check_model
from utils.config import Config, DataConfig, Loaded
from utils.config.keys import CLASSES, DATASET, IMAGE_SIZE, PATCH_SIZE
from utils.config.kinds import AUTO
from utils.config.read import Entry
from utils.errors import UserError
from utils.record.resumed_run import resumed_run, target_folder
from utils.record.run_folder import check_output
from vitamp.metrics import NO_LABELS


def check(config: Config, sources: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise UserError for the first problem. `sources`: where each setting comes from."""
    if config.MODEL.RESUME not in (None, AUTO):
        from engine.checkpoint.find import check_resumable

        check_resumable(Path(str(config.MODEL.RESUME)), config.TRAIN.LAST_EPOCH)
    check_output(target_folder(config), config.SAVE, resumed_run(config))
    check_dataset(config.DATA, config.MODEL.NUM_CLASSES, train=not config.EVAL)
    optimizer_name(config.TRAIN.OPTIMIZER.NAME)
    if config.DIST.STRATEGY == "fsdp":
        from engine.parallel.fsdp import check_sharding

        check_sharding(config)
    if not config.EVAL:
        if config.TRAIN.AUGMENT:
            from datasets.transforms.augment import check_augmentations

            check_augmentations(config.TRAIN)
        if config.WANDB is not None:
            from engine.report.trackers import check_wandb

            check_wandb(config)
    check_amp(config.AMP, config.TRAIN)
    if config.TRAIN.DISTILLATION_TYPE is not None or config.TRAIN.TEACHER_MODEL is not None:
        from engine.distill.teacher import check_teacher

        check_teacher(config)
    starts_new_run = config.MODEL.RESUME is None or (config.MODEL.RESUME == AUTO and resumed_run(config) is None)
    if config.MODEL.PRETRAINED and starts_new_run:
        from models.weights.find import check_pretrained

        check_pretrained(config.MODEL.PRETRAINED)
    if config.USE:
        from engine.task.own_code import try_own_code

        try_own_code(config)
    memory = total_memory(torch.device("cpu"))  # in which weights are initialised
    try:
        check_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS, shortcuts_of(config), memory)
    except UserError as error:
        from models.refusals import NO_SUCH_SIZE

        # The file may be a recipe for another model, chosen by -model.
        keys = re.findall(rf"(MODEL\.\w+).*{NO_SUCH_SIZE}", str(error))
        files: dict[str, list[str]] = {}
        for key in keys:
            file, _, line = sources.get(key, "").rpartition(":")
            if line.isdigit():
                files.setdefault(file, []).append(key)
        if not files:
            raise
        named = "; ".join(f"{', '.join(keys)} in {file}" for file, keys in files.items())
        raise UserError(
            f"{error}\nSet by a file of -cfg: {named}. These sizes are for another model. Use a copy of the "
            "file without these keys, or leave -cfg out and set the data on the command line (-dataset, -image_size, "
            "-num_classes)."
        ) from None


# Settings that only the data and the pretrained weights know: layout, number of classes, preprocessing, image size.
#
# Each process resolves them for itself, before anything is built; config.yaml stores the result. A resumed run has them
# from its checkpoint instead (utils/config/resumed.py).

SIZES = range(32, 97)
"""Image sizes that `auto` chooses from"""
PATCHES = range(4, 9)
"""Patch sizes that `auto` chooses from"""
TEACHER = "TRAIN.TEACHER_MODEL"
PATCHES_PER_ROW = 8
"""Number of patches that a patch size of `auto` comes closest to"""


def resolve(loaded: Loaded) -> Loaded:
    """The settings with numbers for `auto`, the layout of DATA_PATH, and the preprocessing of the weights.

    For an evaluation also with the split to evaluate.
    """
    place = loaded.config.DATA.DATA_PATH
    if place is not None and loaded.is_default(DATASET):
        from datasets.recognise import recognise

        if (found := recognise(place, needs_labels=not loaded.config.MODEL.MAE_PRETRAIN)) is not None:
            name, what = found
            note = f"{DATASET} {name}: {what}"
            loaded = loaded.with_values({DATASET: Entry(name, f"recognised in {place}")}, [note])
    loaded = _with_classes(loaded)
    if loaded.config.MODEL.PRETRAINED is not None:
        from engine.checkpoint.preprocessing import with_preprocessing

        loaded = with_preprocessing(loaded, loaded.config.MODEL.PRETRAINED)
    if loaded.config.TRAIN.DISTILLATION_TYPE is not None:
        from engine.distill.teacher import default_teacher

        if (found := default_teacher(loaded.config)) is not None:
            loaded = loaded.with_values({TEACHER: Entry(found[0], "PaddleViT's default")}, [found[1]])
    loaded = _with_patch_size(_with_image_size(loaded))
    if not loaded.config.EVAL:
        return loaded
    from engine.evaluated_data import evaluated_weights, settings_for_evaluation

    given = {key for key, source in loaded.sources.items() if source.startswith("-") or source == "command line"}
    values, notes = settings_for_evaluation(loaded.config, evaluated_weights(loaded.config), given)
    return loaded.with_values({key: Entry(value, "the evaluated data") for key, value in values.items()}, notes)


def _with_classes(loaded: Loaded) -> Loaded:
    config = loaded.config
    if config.MODEL.NUM_CLASSES != AUTO:
        return loaded
    try:
        number = count_classes(_of_any_size(config.DATA), train=True)
    except UserError:
        if config.task == NO_LABELS:  # of a data set without classes of its own
            return loaded.with_values({CLASSES: Entry(1, "no labels are read")}, [])
        if not config.EVAL:
            raise
        number = count_classes(_of_any_size(config.DATA), train=False)  # an evaluation needs no training split
    number = max(number, 1)  # the check of the data reports negative labels, with their lines
    name = source_of(config.DATA)
    note = f"{CLASSES} {number}: classes of {name}"
    if number < task_of(config).fewest_classes:
        note += ". With one class there is nothing to learn: is DATA.DATA_PATH the folder that holds the class folders?"
    return loaded.with_values({CLASSES: Entry(number, f"classes of {name}")}, [note])


def _of_any_size(data: DataConfig) -> DataConfig:
    """For a look at the data while DATA.IMAGE_SIZE may still be `auto`."""
    return data.model_copy(update={"IMAGE_SIZE": SIZES[-1]}) if data.IMAGE_SIZE == AUTO else data


def _with_image_size(loaded: Loaded) -> Loaded:
    config = loaded.config
    if config.DATA.IMAGE_SIZE != AUTO:
        return loaded
    from datasets.examine import median_side

    name, classes = source_of(config.DATA), config.MODEL.NUM_CLASSES
    data = _of_any_size(config.DATA)
    samples = open_dataset(data, not config.EVAL, classes, config.SEED, torch.device("cpu")).single_images()
    side = None if samples is None else median_side(samples, data)
    if side is None:
        raise UserError(
            f"{loaded.sources[IMAGE_SIZE]}: {IMAGE_SIZE} auto: the size of the images of {name} is unknown, because "
            f"{'they are in memory' if samples is None else 'none of those tried can be read'}. Give a number, as in "
            "-image_size 32."
        )
    patch = config.MODEL.PATCH_SIZE
    step = 8 if patch == AUTO else patch or 16
    size = min((size for size in SIZES if size % step == 0), key=lambda size: abs(size - side), default=step)
    note = f"{IMAGE_SIZE} {size}: the median image of {name} has {side} pixels (shorter side)"
    if side > SIZES[-1]:
        note += f". auto chooses at most {size}; -image_size N shows the model more detail, but takes more time"
    return loaded.with_values({IMAGE_SIZE: Entry(size, f"median image of {name}")}, [note])


def _with_patch_size(loaded: Loaded) -> Loaded:
    config, size = loaded.config, loaded.config.DATA.IMAGE_SIZE
    if config.MODEL.PATCH_SIZE != AUTO:
        return loaded
    fitting = [patch for patch in PATCHES if size % patch == 0]
    if not fitting:
        raise UserError(
            f"{loaded.sources[PATCH_SIZE]}: {PATCH_SIZE} auto: no patch of {PATCHES[0]} to {PATCHES[-1]} pixels "
            f"divides {IMAGE_SIZE} {size}. Use a multiple of 8, such as -image_size {(size + 7) // 8 * 8}."
        )
    patch = min(fitting, key=lambda patch: abs(size / patch - PATCHES_PER_ROW))
    note = f"{PATCH_SIZE} {patch}: {size // patch} x {size // patch} patches of an image of {size} x {size}"
    return loaded.with_values({PATCH_SIZE: Entry(patch, f"{IMAGE_SIZE} {size}")}, [note])
