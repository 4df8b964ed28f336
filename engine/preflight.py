"""Fills in settings that the data and the weights decide, and checks all settings, before processes are started.

The checks take little memory and time: nothing of the run is built.
"""

import resource

import torch

from datasets import check_dataset, source_of
from datasets.registry import comes_unsplit, has_test, unread_path, validates_on_test
from engine.amp.precision import check_amp
from engine.inputs.batches import shortcuts_of
from engine.machine.memory import total_memory
from engine.optim.build import optimizer_name
from engine.task import task_of
from engine.task.losses import check_class_weights
from models.build import check_model
from utils.config import Config, Loaded
from utils.config.keys import AUTO_BY_DATA, DATASET, IMAGE_SIZE, value_of, values_by_key
from utils.config.kinds import AUTO, one_line
from utils.config.read import Kind
from utils.config.resumed import resume_of, resumed_run, target_folder
from utils.errors import UserError
from utils.record.run_folder import check_output
from vitamp.metrics import metric_named

LEAST_FILES = 256
"""Open files that a run may need: each batch that comes from a loading process takes one or more"""


def check(config: Config) -> None:
    """Raise UserError for the first problem that would make the run fail. Raises the limit of open files if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # negative: no limit
    if 0 <= hard < LEAST_FILES:
        raise UserError(f"ulimit -n is {hard}; a run may need {LEAST_FILES} open files at once: `ulimit -n 1024`.")
    if 0 <= soft < LEAST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, hard))
    if config.MODEL.RESUME is not None:
        from engine.checkpoint.find import check_resumable

        check_resumable(config)
    check_output(target_folder(config), config.SAVE, resumed_run(config))
    check_dataset(config.DATA, config.MODEL.NUM_CLASSES, train=not config.EVAL)
    optimizer_name(config.TRAIN.OPTIMIZER.NAME)  # raises UserError for an unknown name
    if config.DIST.STRATEGY == "fsdp":
        from engine.parallel.fsdp import check_sharding

        check_sharding(config)
    if not config.EVAL:
        _check_training(config)
    check_amp(config.AMP, None if config.EVAL else config.TRAIN)
    if config.TRAIN.DISTILLATION_TYPE is not None or config.TRAIN.TEACHER_MODEL is not None:
        from engine.distill.teacher import check_teacher

        check_teacher(config)
    if config.USE:
        from engine.task.own_code import try_own_code

        try_own_code(config)
    memory = total_memory(torch.device("cpu"))  # weights are initialised there
    check_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS, shortcuts_of(config), memory)
    weights = _first_weights(config)
    if weights:  # last: it may ask the network
        from models.weights.find import locate

        locate(weights, download=False)


def _check_training(config: Config) -> None:
    """Raise UserError for the first problem with settings that an evaluation does not use."""
    train = config.TRAIN
    steps = train.SIZE_SCHEDULE
    full_size = config.DATA.IMAGE_SIZE
    metric = config.SAVE_BEST_BY
    most_trivial_classes = metric_named(metric).trivial  # with up to so many classes, the metric is always 100 %
    if most_trivial_classes >= config.MODEL.NUM_CLASSES:
        raise UserError(f"SAVE_BEST_BY {metric}: always 100 % with {config.MODEL.NUM_CLASSES} classes; use acc1.")
    if train.NUM_EPOCHS == AUTO:
        from engine.memory.dry_run import check_open_epochs

        check_open_epochs(config)
    # Checked here, and not with the settings, since the data or the weights may have given the full size.
    last_size = steps[-1][1] if steps else full_size
    if last_size != full_size:
        problem = f"TRAIN.SIZE_SCHEDULE: {one_line(steps)} ends with size {one_line(last_size)}"
        raise UserError(f"{problem}; it must end with DATA.IMAGE_SIZE {one_line(full_size)}, the size of validation.")
    if train.AUGMENT or not config.DATA.is_plain:
        from datasets.transforms.augment import check_augmentations

        check_augmentations(train, config.DATA)
    check_class_weights(train)
    if train.BCE_TARGET_THRESH is not None:
        task_of(config).loss(train, None)  # raises UserError for a threshold that is below or above all targets
    for key, project in config.trackers.items():
        from engine.report.trackers import check_project

        check_project(key, project)


def _first_weights(config: Config) -> str | None:
    """Return the pretrained weights that the run begins with; None without, and for a run that is resumed."""
    resume = resume_of(values_by_key(config)) if config.MODEL.PRETRAINED else None
    return config.MODEL.PRETRAINED if resume is None or resume.begins_anew else None


# Settings that only the data and the pretrained weights know: layout, number of classes, preprocessing, image size.
#
# Each process resolves them for itself, before anything is built; config.yaml stores the result. A resumed run has them
# from its checkpoint instead (utils/config/resumed.py).


def with_data_set(loaded: Loaded) -> Loaded:
    """Return the settings with the data set that is recognised in DATA_PATH, unless the user has named one."""
    path = loaded.config.DATA.DATA_PATH
    if path is None or not loaded.is_default(DATASET):
        return loaded
    from datasets.recognise import recognise

    recognised = recognise(path, needs_labels=not loaded.config.MODEL.MAE_PRETRAIN)
    if recognised is None:
        return loaded
    name, reason = recognised
    return loaded.with_values({DATASET: name}, f"recognised in {path}", [f"{DATASET} {name}: {reason}"])


def fill_in(loaded: Loaded, of_run: bool = True) -> Loaded:
    """Return the settings with the values that only the data and the weights decide.

    These values are: the data set in DATA_PATH, numbers in place of `auto`, the preprocessing of the weights, and the
    split for an evaluation. `of_run`: False if a tool asks, not a run. Each step may use what an earlier one filled in,
    so their order matters.
    """
    # The data set
    loaded = with_data_set(loaded)
    given = {key for key, source in loaded.sources.items() if source.is_typed}
    loaded = _warn_of_unused_settings(loaded, given)

    # The model and its weights
    model_keys = [key for key in loaded.sources if key.startswith("MODEL.") and key != "MODEL.NUM_CLASSES"]
    nothing_chooses_model = all(map(loaded.is_default, model_keys))
    if of_run and nothing_chooses_model and loaded.sources[DATASET].kind is Kind.FOUND:
        loaded = loaded.with_warning(
            "Nothing chooses a model, so a ViT-B/16 learns from scratch, which takes very many images. "
            "-cfg finetune begins with trained weights, -cfg small_images suits images of up to 96 pixels."
        )
    if loaded.config.MODEL.NUM_CLASSES == AUTO:
        from engine.inputs.auto import with_classes

        loaded = with_classes(loaded)
    weights = _first_weights(loaded.config)
    # The name and the weights may decide sizes and preprocessing; any model decides an image size that nobody has set.
    if "MODEL.NAME" in given or weights is not None or loaded.is_default(IMAGE_SIZE):
        from engine.inputs.auto import with_model

        loaded = with_model(loaded, given, weights, of_run)

    # Settings of the training
    if loaded.config.DATA.DATASET == "shards" and not loaded.config.EVAL:
        from engine.inputs.auto import with_packing

        loaded = with_packing(loaded)
    if loaded.config.TRAIN.DISTILLATION_TYPE is not None:
        from engine.distill.teacher import default_teacher

        teacher = default_teacher(loaded.config)
        if teacher is not None:
            name, note = teacher
            loaded = loaded.with_values({"TRAIN.TEACHER_MODEL": name}, "PaddleViT's default", [note])
    if any(value_of(loaded.config, key) == AUTO for key in AUTO_BY_DATA):
        from engine.inputs.auto import with_image_size, with_measurements, with_patch_size

        loaded = with_measurements(with_patch_size(with_image_size(loaded)))
    if not loaded.config.EVAL:
        optimizer = loaded.config.TRAIN.OPTIMIZER
        if loaded.config.TRAIN.BASE_LR == AUTO and not optimizer.facts.has_own_rate:
            given_by = loaded.sources["TRAIN.BASE_LR"]
            name = optimizer.NAME.casefold()
            raise UserError(f"{given_by}: TRAIN.BASE_LR auto is for AdamW and Adam; give a number for {name}.")
        return loaded

    # The split to evaluate. A data set that is not taken over from the run counts as given.
    from engine.evaluation.data import evaluated_weights, settings_for_evaluation

    if loaded.sources[DATASET].kind is not Kind.RUN:
        given.add(DATASET)
    values, notes = settings_for_evaluation(loaded.config, evaluated_weights(loaded.config), given)
    return loaded.with_values(values, "the evaluated data", notes)


def _warn_of_unused_settings(loaded: Loaded, given: set[str]) -> Loaded:
    """Return the settings of a training, with a warning for each setting of the splits that has no effect.

    `given`: keys on the command line. Raises UserError for a DATA_PATH there that the data set does not read.
    """
    config = loaded.config
    if config.EVAL:
        return loaded
    unread = unread_path(config.DATA) if "DATA.DATA_PATH" in given else None
    if unread:
        raise UserError(unread)
    # VAL_FRACTION may also split the images of TRAIN.KNN, so with these it is no mistake.
    if not config.TRAIN.KNN and "DATA.VAL_FRACTION" in given and not comes_unsplit(config.DATA):
        advice = "; DATA.KEEP_TEST=true makes one of train" if validates_on_test(config.DATA) else ""
        loaded = loaded.with_warning(
            f"DATA.VAL_FRACTION has no effect: {source_of(config.DATA)} comes with its own validation split{advice}"
        )
    if config.DATA.KEEP_TEST and not (comes_unsplit(config.DATA) and has_test(config.DATA)):
        reason = "has no split test" if comes_unsplit(config.DATA) else "comes with its own validation split"
        loaded = loaded.with_warning(f"DATA.KEEP_TEST has no effect: {source_of(config.DATA)} {reason}")
    return loaded
