"""What precedes the start of processes: settings that the data and the weights decide, and checks without memory."""

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
"""Open files that a run may need, of which a batch from a loading process is one or more"""


def check(config: Config) -> None:
    """Raise UserError for the first problem."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # negative: no limit
    if 0 <= most < LEAST_FILES:
        raise UserError(f"ulimit -n is {most}; a run may need {LEAST_FILES} open files at once: `ulimit -n 1024`.")
    if 0 <= allowed < LEAST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, most))
    if config.MODEL.RESUME is not None:
        from engine.checkpoint.find import check_resumable

        check_resumable(config)
    check_output(target_folder(config), config.SAVE, resumed_run(config))
    check_dataset(config.DATA, config.MODEL.NUM_CLASSES, train=not config.EVAL)
    optimizer_name(config.TRAIN.OPTIMIZER.NAME)
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
    memory = total_memory(torch.device("cpu"))  # in which weights are initialised
    check_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS, shortcuts_of(config), memory)
    weights = _first_weights(config)
    if weights:  # last: it may ask the network
        from models.weights.find import locate

        locate(weights, download=False)


def _check_training(config: Config) -> None:
    """What an evaluation need not keep."""
    train = config.TRAIN
    steps = train.SIZE_SCHEDULE
    full = config.DATA.IMAGE_SIZE
    by = config.SAVE_BEST_BY
    if metric_named(by).trivial >= config.MODEL.NUM_CLASSES:
        raise UserError(f"SAVE_BEST_BY {by}: always 100 % with {config.MODEL.NUM_CLASSES} classes; use acc1.")
    if train.NUM_EPOCHS == AUTO:
        from engine.memory.dry_run import check_open_epochs

        check_open_epochs(config)
    if steps and steps[-1][1] != full:  # checked here, since the data or the weights may have given the full size
        ends = f"TRAIN.SIZE_SCHEDULE: {one_line(steps)} ends with size {one_line(steps[-1][1])}"
        raise UserError(f"{ends}; it must end with DATA.IMAGE_SIZE {one_line(full)}, the size of validation.")
    if train.AUGMENT or not config.DATA.is_plain:
        from datasets.transforms.augment import check_augmentations

        check_augmentations(train, config.DATA)
    check_class_weights(train)
    if train.BCE_TARGET_THRESH is not None:
        task_of(config).loss(train, None)  # which refuses a threshold beside its targets
    for key, project in config.trackers.items():
        from engine.report.trackers import check_project

        check_project(key, project)


def _first_weights(config: Config) -> str | None:
    """The pretrained weights that the run begins with; None for one that is resumed."""
    resume = resume_of(values_by_key(config)) if config.MODEL.PRETRAINED else None
    return config.MODEL.PRETRAINED if resume is None or resume.begins_anew else None


# Settings that only the data and the pretrained weights know: layout, number of classes, preprocessing, image size.
#
# Each process resolves them for itself, before anything is built; config.yaml stores the result. A resumed run has them
# from its checkpoint instead (utils/config/resumed.py).


def with_data_set(loaded: Loaded) -> Loaded:
    """The settings with the data set that is recognised in DATA_PATH, unless the user has named one."""
    place = loaded.config.DATA.DATA_PATH
    if place is None or not loaded.is_default(DATASET):
        return loaded
    from datasets.recognise import recognise

    found = recognise(place, needs_labels=not loaded.config.MODEL.MAE_PRETRAIN)
    if found is None:
        return loaded
    name, why = found
    return loaded.with_values({DATASET: name}, f"recognised in {place}", [f"{DATASET} {name}: {why}"])


def fill_in(loaded: Loaded, of_run: bool = True) -> Loaded:
    """The settings with numbers for `auto`, the layout of DATA_PATH, and the preprocessing of the weights.

    For an evaluation also with the split to evaluate. `of_run`: of a run, not of a tool.
    """
    loaded = with_data_set(loaded)
    given = {key for key, source in loaded.sources.items() if source.is_typed}
    loaded = _with_typed_data(loaded, given)
    of_model = [key for key in loaded.sources if key.startswith("MODEL.") and key != "MODEL.NUM_CLASSES"]
    if of_run and all(map(loaded.is_default, of_model)) and loaded.sources[DATASET].kind is Kind.FOUND:
        loaded = loaded.with_warning(
            "Nothing chooses a model, so a ViT-B/16 learns from scratch, which takes very many images. "
            "-cfg finetune begins with trained weights, -cfg small_images suits images of up to 96 pixels."
        )
    if loaded.config.MODEL.NUM_CLASSES == AUTO:
        from engine.inputs.auto import with_classes

        loaded = with_classes(loaded)
    weights = _first_weights(loaded.config)
    if "MODEL.NAME" in given or weights is not None or loaded.is_default(IMAGE_SIZE):
        from engine.inputs.auto import with_model

        loaded = with_model(loaded, given, weights, of_run)
    if loaded.config.DATA.DATASET == "shards" and not loaded.config.EVAL:
        from engine.inputs.auto import with_packing

        loaded = with_packing(loaded)
    if loaded.config.TRAIN.DISTILLATION_TYPE is not None:
        from engine.distill.teacher import default_teacher

        found = default_teacher(loaded.config)
        if found is not None:
            name, note = found
            loaded = loaded.with_values({"TRAIN.TEACHER_MODEL": name}, "PaddleViT's default", [note])
    if any(value_of(loaded.config, key) == AUTO for key in AUTO_BY_DATA):
        from engine.inputs.auto import with_image_size, with_measurements, with_patch_size

        loaded = with_measurements(with_patch_size(with_image_size(loaded)))
    if loaded.config.TRAIN.BASE_LR == AUTO and not loaded.config.EVAL:
        from engine.inputs.auto import with_rate

        loaded = with_rate(loaded)
    if not loaded.config.EVAL:
        return loaded
    from engine.evaluation.data import evaluated_weights, settings_for_evaluation

    if loaded.sources[DATASET].kind is not Kind.RUN:
        given.add(DATASET)
    values, notes = settings_for_evaluation(loaded.config, evaluated_weights(loaded.config), given)
    return loaded.with_values(values, "the evaluated data", notes)


def _with_typed_data(loaded: Loaded, given: set[str]) -> Loaded:
    """Refuse a DATA_PATH of the command line that is not read, and warn of splits that are not made."""
    config = loaded.config
    if config.EVAL:
        return loaded
    unread = unread_path(config.DATA) if "DATA.DATA_PATH" in given else None
    if unread:
        raise UserError(unread)
    if not config.TRAIN.KNN and "DATA.VAL_FRACTION" in given and not comes_unsplit(config.DATA):
        kept = "; DATA.KEEP_TEST=true makes one of train" if validates_on_test(config.DATA) else ""
        loaded = loaded.with_warning(
            f"DATA.VAL_FRACTION has no effect: {source_of(config.DATA)} comes with its own validation split{kept}"
        )
    if config.DATA.KEEP_TEST and not (comes_unsplit(config.DATA) and has_test(config.DATA)):
        why = "has no split test" if comes_unsplit(config.DATA) else "comes with its own validation split"
        loaded = loaded.with_warning(f"DATA.KEEP_TEST has no effect: {source_of(config.DATA)} {why}")
    return loaded
