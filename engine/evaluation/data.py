"""Settles which images a model is evaluated on (DATA.PART), and which settings of the run do not fit other data."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from datasets import check_dataset, comes_unsplit, has_labels, has_test, identity_of, source_of, validates_on_test
from datasets.base import TITLES, ImageDataset, Samples
from datasets.examine.copies import QUICK_SECONDS, find_copies
from datasets.examine.findings import Copies
from datasets.exclude import Remaining, excluded, read_rows
from datasets.labels import ANY_LABEL
from datasets.recognise import recognise
from datasets.registry import open_dataset, squeezes, unread_path
from datasets.sources.split import TooFewToSplit, keys_of_split
from engine.evaluation.knn import OF_OWN_DATA, place_of
from engine.setup import training_data
from models.weights.find import local_weights
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.keys import DATASET, deciding, default_of, nested, value_of
from utils.config.kinds import AUTO
from utils.config.load import config_of_weights
from utils.config.resumed import resumed_run, settings_of
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.log import log, unheard, warn_once
from utils.record.history import History
from utils.record.run_folder import read_data
from vitamp.checkpoints import CHECKPOINTS, read_index, run_folder_of
from vitamp.metrics import NO_LABELS
from vitamp.weights import Chosen, chosen_at

PART = "DATA.PART"
CROP = "DATA.CROP"
OF_RUN = ("same place", "moved")
"""Origins of the run's own images"""
Origin = Literal["same place", "moved", "other", "unknown"]
"""How the images that are evaluated relate to those that the model was trained on, see `whose_data`"""


def settings_for_evaluation(
    config: Config, saved: Chosen | None, given: Collection[str], needs_labels: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of DATA that change for an evaluation of the weights `saved`, by key, and notes for the log.

    `given`: keys on the command line, which stay as they are. `needs_labels`: the evaluation needs labels, even if the
    run learned without them.
    """
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if "DATA.DATA_PATH" in given:
        layout = None if DATASET in given else _other_layout(config.DATA, needs_labels)
        if layout:
            dataset, description = layout
            changes[DATASET] = dataset
            notes.append(f"{DATASET} {dataset}: {description}")
            config = config.changed(**nested(changes))
        unread = unread_path(config.DATA)
        if unread:
            raise UserError(unread)

    # Settings that do not fit the images, if they are not those of the run.
    origin = whose_data(config, saved)
    part = config.DATA.PART
    is_data_of_run = origin in OF_RUN
    if is_data_of_run and part in ("train", "all"):
        which = "are" if part == "train" else "include"
        notes.append(
            f"{PART} {part}: these {which} the images that the model was trained on, so the result does not show how "
            "well it recognises new images"
        )
    if saved is not None and origin == "same place":
        check_split(config, saved, part)
    elif saved is not None and not is_data_of_run:
        _add_resets(config, saved, given, changes, notes)

    # The split to evaluate.
    if part == AUTO:
        unsplit = comes_unsplit(config.changed(**nested(changes)).DATA)
        changes[PART], reason = _choose_part(config, saved, origin, unsplit)
        if reason:
            notes.append(f"{PART} {changes[PART]}: {reason}")
        # Weights that do not record the run's path may not record its lists either: perhaps only these differ.
        unlisted = saved is not None and "DATA.DATA_PATH" not in settings_of(saved) and config.DATA.EXCLUDE is None
        if origin == "other" and unlisted:
            notes.append("If only some images or labels differ, give DATA.EXCLUDE or DATA.RELABEL")
    return changes, notes


def _add_resets(
    config: Config, saved: Chosen, given: Collection[str], changes: dict[str, Any], notes: list[str]
) -> None:
    """Add to `changes` and `notes`, in place, the settings to reset because the data is not the run's.

    These settings, such as the list of excluded images, fit the run's own data alone. `given`: keys on the command
    line, which stay as they are.
    """
    changes |= {key: default_of(key) for key in OF_OWN_DATA if key not in given}
    run_data = DataConfig(DATASET=settings_of(saved).get(DATASET, config.DATA.DATASET))
    if CROP not in given and squeezes(run_data):
        # The run's data set, such as digits, squeezes its images into a square whatever CROP is: do so here, too.
        changes[CROP] = "none"
    if config.DATA.EXCLUDE is not None and "DATA.EXCLUDE" in changes:
        notes.append(
            f"DATA.EXCLUDE {config.DATA.EXCLUDE} of the run has no effect: {source_of(config.DATA)} is other data"
        )


def _choose_part(config: Config, saved: Chosen | None, origin: Origin, unsplit: bool) -> tuple[str, str]:
    """Return the value for DATA.PART auto, and the reason for the log; '' if it is the usual one.

    `origin`: how the data relates to the run's, see `whose_data`. `unsplit`: the data has no validation split of its
    own.
    """
    source = source_of(config.DATA)
    if saved is not None and origin == "moved":
        return "val", f"{source} {_how_moved(config.DATA, saved)}"
    if origin == "other":
        reason = f"{source} has other file names or labels than the training, though perhaps the same images"
        if unsplit:
            return "all", f"{reason}; it has no validation split of its own"
        return "val", reason
    if origin == "same place" or not unsplit:
        return "val", ""
    # The origin is unknown, and the program makes the split.
    try:
        with unheard():
            check_dataset(config.DATA.changed(PART="val"), ANY_LABEL, train=False)
    except TooFewToSplit:
        return "all", f"{source} has one image per class, so nothing can be split off"
    return "val", (
        f"whether the model was trained on {source} is unknown, so the split of a training (DATA.VAL_FRACTION) is "
        "evaluated; -part all evaluates all images"
    )


def _how_moved(data: DataConfig, saved: Chosen) -> str:
    """Say whether data with the names and labels of the run's data is the run's, by the bytes of training images."""
    with unheard():
        train_set = open_dataset(data, True, ANY_LABEL, 0, torch.device("cpu"))
    copies = copies_in_training(saved, train_set.single_images())
    if copies is None or not copies.compared:
        return "has the names and labels of the data that the model was trained on"
    if copies.found == copies.compared:
        return "is the data that the model was trained on, in another place"
    return (
        "has the names and labels of the data that the model was trained on, but other bytes in "
        f"{copies.compared - copies.found:,} of {copies.compared:,} compared training images. If these are other "
        "images, -part all evaluates all"
    )


def _other_layout(data: DataConfig, needs_labels: bool) -> tuple[str, str] | None:
    """Recognise how the images in DATA_PATH are laid out, unless the data set that DATA names can read them.

    Returns the name of the data set that reads them, and a description; None if the named one does, or no layout is
    recognised. `needs_labels`: the evaluation needs labels, so a data set without any does not do.
    """
    with unheard(), suppress(UserError):  # an error of the check: another data set may read them
        path_is_read = not unread_path(data)
        if path_is_read and (has_labels(data) or not needs_labels):
            check_dataset(data.changed(DOWNLOAD=False), ANY_LABEL, train=False)
            return None
    with suppress(UserError):  # unrecognised: the later check of the data set that DATA names says what is missing
        layout = recognise(str(data.DATA_PATH))
        return layout if layout and layout[0] != data.DATASET else None


def whose_data(config: Config, saved: Chosen | None) -> Origin:
    """Tell whether DATA names the data of the run that trained the weights `saved`.

    "same place": the data set and path are the run's. "moved": another path, but the names and labels of the run's
    training split. "other": neither. "unknown": nothing is recorded of the run's data.
    """
    run_settings = settings_of(saved) if saved else {}
    if saved is None or "DATA.DATASET" not in run_settings:
        return "unknown"
    run_place = {"DATASET": run_settings["DATA.DATASET"], "DATA_PATH": run_settings.get("DATA.DATA_PATH")}
    if place_of(config.DATA) == place_of(config.DATA.changed(**run_place)):
        return "same place"
    if not saved.samples:
        return "unknown"
    # If a file of DATA.EXCLUDE or DATA.RELABEL is gone, raise its error: without these lists, the split has other
    # names and labels, so the run's own images would be taken for other ones.
    for key, read in (("EXCLUDE", excluded), ("RELABEL", read_rows)):
        try:
            if getattr(config.DATA, key):
                read(config.DATA)
        except UserError as error:
            raise UserError(f"{error} For other images than the run's, give DATA.{key}=null.") from None
    # Compare the split with the lists of now, and with those of the training: the user may have changed them since.
    run_lists = {key: run_settings.get(f"DATA.{key}") for key in ("EXCLUDE", "RELABEL")}
    as_trained = config.changed(DATA=run_lists)
    candidates = [config]
    if as_trained.DATA != config.DATA:
        candidates.append(as_trained)
    for candidate in candidates:
        with suppress(UserError):  # images that cannot be read so are not the run's
            if _has_training_split(candidate, saved.samples):
                return "moved"
    return "other"


def check_split(config: Config, saved: Chosen, part: str) -> None:
    """Raise UserError if the program would now split the images of a run otherwise than in its training.

    Then images that the model was trained on would be evaluated. The settings of the split are compared, and if
    possible the names and labels of the training split. That is not possible if the run has DATA.EXCLUDE or
    DATA.RELABEL: these lists change the images and labels after the split, and the lists may have changed.

    `part`: the split to evaluate (DATA.PART).
    """
    trained = config_of_weights(saved)
    if part not in (AUTO, "val") or not comes_unsplit(config.DATA) or trained.task == NO_LABELS:
        return
    same_split = all(value_of(trained, key) == value_of(config, key) for key in keys_of_split(config.DATA))
    has_lists = trained.DATA.EXCLUDE or trained.DATA.RELABEL
    if same_split and saved.samples and not has_lists:
        # Split the images by the labels (COLUMNS) of now: each class is split by itself, so other labels would show as
        # another training split.
        current = {key: getattr(config.DATA, key) for key in ("CACHE", "DOWNLOAD", "COLUMNS")}
        same_split = _has_training_split(trained.changed(DATA=current), saved.samples)
    elif same_split:
        # The training split cannot be compared. Early versions split groups by VAL_FRACTION in another way, and did
        # not record the number of groups.
        recorded = saved.samples or {}
        is_early_split = trained.DATA.GROUP is not None and trained.DATA.FOLD is None and "groups" not in recorded
        same_split = not is_early_split and trained.DATA.COLUMNS == config.DATA.COLUMNS
    if not same_split:
        keys = ", ".join(("DATA.COLUMNS", *deciding("split", "random split")))
        raise UserError(
            f"{saved.place}: {source_of(config.DATA)} would now be split otherwise than in its training, so images "
            f"that it was trained on would be evaluated. The files have changed, or {keys}, or the version of vitamp. "
            "Restore them, or name images that it was not trained on with -data_path."
        )


def _has_training_split(config: Config, samples: dict[str, Any]) -> bool:
    """Whether the training split of `config` has the same names and labels as the training split of a run.

    `samples`: the fingerprint of the run's split, which its checkpoint recorded (`identity_of`).
    """
    # Hash of names and labels; checkpoints of 0.1.0 may have only the hash of the order.
    field = "data" if "data" in samples else "order"
    # Names and labels do not depend on these settings, so they are replaced by values that always work: the weights of
    # classes may be in a file that is gone, the augmentations in own code that is not executed here, and the batch size
    # may be `auto`.
    built_in = config.TRAIN.AUGMENT and ("trivial",)
    simplified = config.changed(
        DATA={"BATCH_SIZE": 1, "PART": AUTO}, TRAIN={"CLASS_WEIGHTS": None, "AUGMENT": built_in}
    )
    with unheard():  # log lines about this split would mislead: it is not evaluated
        train_set, loader = training_data(simplified, ALONE, torch.device("cpu"))
    return identity_of(train_set, loader.order).get(field) == samples.get(field)


def data_for_evaluation(
    config: Config, saved: Chosen | None, given: Collection[str], needs_labels: bool = False
) -> tuple[DataConfig, list[str]]:
    """Return DATA as `settings_for_evaluation` changes it, and its notes for the log."""
    changes, notes = settings_for_evaluation(config, saved, given, needs_labels)
    return config.changed(**nested(changes)).DATA, notes


def title_of(data: DataConfig) -> str:
    """Name the evaluated images for log and tables: 'imagefolder in /data/flowers, validation split'."""
    part = "val" if data.PART == AUTO else data.PART
    exception = " but those of test" if part == "all" and comes_unsplit(data) and has_test(data) else ""
    if part == "val" and validates_on_test(data):
        part = "test"
    return f"{source_of(data)}, {TITLES[part]}{exception}"


def found_in_own_data(config: Config, saved: Chosen | None) -> dict[str, Any]:
    """Return what the start of the run found in its data; empty if other images than its validation are evaluated.

    `saved`: the evaluated weights; None if they have no record.
    """
    run = run_folder_of(saved.place) if saved else None
    is_validation_split = config.DATA.PART in ("val", AUTO)  # AUTO is val for the run's own data
    if run is None or not is_validation_split or whose_data(config, saved) != "same place":
        return {}
    return read_data(run)


def warn_of_images(config: Config, saved: Chosen | None, dataset: ImageDataset) -> None:
    """Warn of evaluated images that DATA.EXCLUDE leaves out, and of those with the same bytes as training images."""
    samples = dataset.single_images()
    left_out = len(samples.lines) if isinstance(samples, Remaining) else 0
    if samples is not None and left_out:
        counts = f"{left_out:,} of {left_out + len(samples):,} images here"
        log.info("DATA.EXCLUDE leaves out %s. If a model's mistakes chose them, the metrics flatter it.", counts)
    copies = copies_of_training(config, saved, dataset)
    if copies:
        message, _ = copies
        warn_once(message)


def copies_of_training(config: Config, saved: Chosen | None, dataset: ImageDataset) -> tuple[str, float] | None:
    """Look for evaluated images whose bytes are those of a training image, for some seconds.

    Returns a message about them, and their percentage of the compared images. None if there are none; if they cannot be
    compared; or for a training or validation split of the run's own data: its start has looked for copies there.
    """
    is_own_split = config.DATA.PART != "test" and saved is not None and whose_data(config, saved) in OF_RUN
    copies = None if saved is None or is_own_split else copies_in_training(saved, dataset.single_images())
    if copies is None or not copies.examples:
        return None
    copy, original = copies.examples[0]
    message = (
        f"{copies.found:,} of {copies.compared:,} compared images have the bytes of training images ({copy} is "
        f"{original}); at most {len(dataset) - copies.found:,} are new, and only these show what to expect."
    )
    return message, 100 * copies.found / copies.compared


def copies_in_training(saved: Chosen, samples: Samples | None) -> Copies | None:
    """Look for images that have the bytes of an image that the model was trained on; None if they cannot be compared.

    `samples`: the images; None if they are in memory.
    """
    train = training_images_of(saved)
    if train is None or samples is None or samples.remote:
        return None
    if "pixels" in (train.stored, samples.stored):  # then there are no bytes of a file to compare
        return None
    return find_copies(train, samples, QUICK_SECONDS)


def training_images_of(saved: Chosen) -> Samples | None:
    """Return the images that a model was trained on; None if they are unknown, gone, in memory or elsewhere."""
    with unheard(), suppress(UserError):
        data = config_of_weights(saved).DATA.changed(DOWNLOAD=False)
        # Without DATA.DATASET, the data is unknown.
        if "://" not in str(data.DATA_PATH) and "DATA.DATASET" in settings_of(saved):
            return open_dataset(data, True, ANY_LABEL, 0, torch.device("cpu")).single_images()
    return None


def validations_of(config: Config, saved: Chosen) -> int:
    """Count the run's validations on the evaluated images, if the checkpoint `saved` was the best of them; else 0.

    Its metric on these images is the luckiest of so many.
    """
    run = run_folder_of(saved.place)
    is_validation_split = config.DATA.PART in ("val", AUTO)  # AUTO is val for the run's own data
    if run is None or not is_validation_split or whose_data(config, saved) not in OF_RUN:
        return 0
    is_best = read_index(run / CHECKPOINTS)["best"] == saved.place.name
    return len(History.of_run(run).of("val")) if is_best else 0


def evaluated_weights(config: Config) -> Chosen | None:
    """Find the weights that -eval evaluates, with the record of their training; None if they have no record."""
    resume = config.MODEL.RESUME
    source = config.MODEL.PRETRAINED
    try:
        run = resumed_run(config)
        if run:
            return chosen_at(run)
        if resume not in (None, AUTO):  # a checkpoint outside of a run's folder
            return chosen_at(Path(str(resume)))
        local = local_weights(source) if source else None  # None for a name of timm
        return chosen_at(local.file) if local else None
    except UserError:  # if it prevents the evaluation, loading the weights reports it
        return None
