"""The images that a model is evaluated on: DATA.PART, and settings that other data than the run's does not inherit."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from datasets import check_dataset, comes_unsplit, has_labels, has_test, identity_of, source_of, validates_on_test
from datasets.base import TITLES, ImageDataset
from datasets.examine.copies import QUICK_SECONDS, find_copies
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
from utils.record.run_folder import copies_in_words
from vitamp.checkpoints import CHECKPOINTS, read_index, run_folder_of
from vitamp.metrics import NO_LABELS
from vitamp.weights import Chosen, chosen_at

PART = "DATA.PART"
CROP = "DATA.CROP"
OF_RUN = ("same place", "moved")
"""What `whose_data` says of the run's own images"""
Origin = Literal["same place", "moved", "other", "unknown"]


def settings_for_evaluation(
    config: Config, saved: Chosen | None, given: Collection[str], needs_labels: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Settings of DATA that an evaluation of the weights `saved` changes, by key, and notes for the log.

    `given`: the settings on the command line, which stay. `needs_labels`: whatever the run learned from.
    """
    changes: dict[str, Any] = {}
    notes: list[str] = []
    if "DATA.DATA_PATH" in given:
        found = None if DATASET in given else _other_layout(config.DATA, needs_labels)
        if found:
            changes[DATASET] = found[0]
            notes.append(f"{DATASET} {': '.join(found)}")
            config = config.changed(**nested(changes))
        unread = unread_path(config.DATA)
        if unread:
            raise UserError(unread)
    origin = whose_data(config, saved)
    part = config.DATA.PART
    trained_on = origin in OF_RUN
    if trained_on and part in ("train", "all"):
        which = "are" if part == "train" else "include"
        notes.append(
            f"{PART} {part}: these {which} the images that the model was trained on, so the result does not show how "
            "well it recognises new images"
        )
    if saved is not None and origin == "same place":
        check_split(config, saved, part)
    elif saved is not None and not trained_on:
        _leave_own_settings(config, saved, given, changes, notes)
    if part == AUTO:
        changes[PART], why = _part_of(config, origin, comes_unsplit(config.changed(**nested(changes)).DATA))
        if why:
            notes.append(f"{PART} {changes[PART]}: {why}")
        unlisted = saved is not None and "DATA.DATA_PATH" not in settings_of(saved) and config.DATA.EXCLUDE is None
        if origin == "other" and unlisted:
            notes.append("If only some images or labels differ, give DATA.EXCLUDE or DATA.RELABEL")
    return changes, notes


def _leave_own_settings(
    config: Config, saved: Chosen, given: Collection[str], changes: dict[str, Any], notes: list[str]
) -> None:
    """Add changes for data that is not the run's: it does not inherit what fits the run's own data alone."""
    changes |= {key: default_of(key) for key in OF_OWN_DATA if key not in given}
    if CROP not in given and squeezes(DataConfig(DATASET=settings_of(saved).get(DATASET, config.DATA.DATASET))):
        changes[CROP] = "none"  # its own data set squeezes images whatever CROP is, as digits
    if config.DATA.EXCLUDE is not None and "DATA.EXCLUDE" in changes:
        notes.append(
            f"DATA.EXCLUDE {config.DATA.EXCLUDE} of the run has no effect: {source_of(config.DATA)} is other data"
        )


def _part_of(config: Config, origin: Origin, unsplit: bool) -> tuple[str, str]:
    """The value for DATA.PART auto, and why. `unsplit`: the data has no validation split of its own."""
    place = source_of(config.DATA)
    if origin == "moved":
        return "val", f"{place} is the data that the model was trained on, in another place"
    if origin == "other":
        part, why = ("all", "; it has no validation split of its own") if unsplit else ("val", "")
        return part, f"{place} has other file names or labels than the training, though perhaps the same images{why}"
    if origin == "same place" or not unsplit:
        return "val", ""
    try:
        with unheard():
            check_dataset(config.DATA.changed(PART="val"), ANY_LABEL, train=False)
    except TooFewToSplit:
        return "all", f"{place} has one image per class, so nothing can be split off"
    return "val", (
        f"whether the model was trained on {place} is unknown, so the split of a training (DATA.VAL_FRACTION) is "
        "evaluated; -part all evaluates all images"
    )


def _other_layout(data: DataConfig, needs_labels: bool) -> tuple[str, str] | None:
    """What `recognise` finds in DATA_PATH; None if the data set that DATA names is there, or nothing is recognised."""
    with unheard(), suppress(UserError):
        if not unread_path(data) and (has_labels(data) or not needs_labels):
            check_dataset(data.changed(DOWNLOAD=False), ANY_LABEL, train=False)
            return None
    with suppress(UserError):  # the check of the data set that DATA names reports what is missing
        found = recognise(str(data.DATA_PATH))
        return found if found and found[0] != data.DATASET else None


def whose_data(config: Config, saved: Chosen | None) -> Origin:
    """Whether DATA names the data of the run that trained the weights `saved`."""
    own = settings_of(saved) if saved else {}
    if saved is None or "DATA.DATASET" not in own:
        return "unknown"
    place = {"DATASET": own["DATA.DATASET"], "DATA_PATH": own.get("DATA.DATA_PATH")}
    if place_of(config.DATA) == place_of(config.DATA.changed(**place)):
        return "same place"
    if not saved.samples:
        return "unknown"
    for key, read in (("EXCLUDE", excluded), ("RELABEL", read_rows)):
        try:  # without the run's list, its own images would be taken for others
            if getattr(config.DATA, key):
                read(config.DATA)
        except UserError as error:
            raise UserError(f"{error} For other images than the run's, give DATA.{key}=null.") from None
    as_trained = config.changed(DATA={key: own.get(f"DATA.{key}") for key in ("EXCLUDE", "RELABEL")})
    # An evaluation may leave out others.
    for one in (config,) if as_trained.DATA == config.DATA else (config, as_trained):
        with suppress(UserError):
            if _has_samples(one, saved.samples):
                return "moved"
    return "other"


def check_split(config: Config, saved: Chosen, part: str) -> None:
    """Refuse to evaluate a run whose images would now be split otherwise than in its training.

    Its lists of images to leave out or to relabel apply after the split, and may have changed: then it is not known.
    """
    own = config_of_weights(saved)
    if part not in (AUTO, "val") or not comes_unsplit(config.DATA) or own.task == NO_LABELS:
        return
    same = all(value_of(own, key) == value_of(config, key) for key in keys_of_split(config.DATA))
    if same and saved.samples and not own.DATA.EXCLUDE and not own.DATA.RELABEL:
        # Each class is split by itself, so other labels make another split.
        now = {key: getattr(config.DATA, key) for key in ("CACHE", "DOWNLOAD", "COLUMNS")}
        same = _has_samples(own.changed(DATA=now), saved.samples)
    elif same:
        # Versions that split groups otherwise by VAL_FRACTION did not note how many there were.
        same = own.DATA.GROUP is None or own.DATA.FOLD is not None or "groups" in (saved.samples or {})
        same = same and own.DATA.COLUMNS == config.DATA.COLUMNS
    if not same:
        keys = ", ".join(("DATA.COLUMNS", *deciding("split", "random split")))
        raise UserError(
            f"{saved.place}: {source_of(config.DATA)} would now be split otherwise than in its training, so images "
            f"that it was trained on would be evaluated. The files have changed, or {keys}, or the version of vitamp. "
            "Restore them, or name images that it was not trained on with -data_path."
        )


def _has_samples(config: Config, samples: dict[str, Any]) -> bool:
    """Whether the training split has the names and labels of these samples, the `identity_of` a run's."""
    field = "data" if "data" in samples else "order"  # checkpoints of 0.1.0 may have no data
    # The weights of classes may be in a file that is gone, and augmentations in one that is not executed here.
    plain = {"CLASS_WEIGHTS": None, "AUGMENT": config.TRAIN.AUGMENT and ("trivial",)}
    one_by_one = config.changed(DATA={"BATCH_SIZE": 1, "PART": AUTO}, TRAIN=plain)
    with unheard():  # the split that is made here is not evaluated
        train_set, loader = training_data(one_by_one, ALONE, torch.device("cpu"))
    return identity_of(train_set, loader.order).get(field) == samples.get(field)


def data_for_evaluation(
    config: Config, saved: Chosen | None, given: Collection[str], needs_labels: bool = False
) -> tuple[DataConfig, list[str]]:
    """DATA as `settings_for_evaluation` changes it, and the notes."""
    changes, notes = settings_for_evaluation(config, saved, given, needs_labels)
    return config.changed(**nested(changes)).DATA, notes


def title_of(data: DataConfig) -> str:
    """'imagefolder in /data/flowers, validation split'."""
    part = "val" if data.PART == AUTO else data.PART
    kept = " but those of test" if part == "all" and comes_unsplit(data) and has_test(data) else ""
    if part == "val" and validates_on_test(data):
        part = "test"
    return f"{source_of(data)}, {TITLES[part]}{kept}"


def copies_evaluated(config: Config, saved: Chosen | None, images: int) -> str:
    """One line, if `images` are those of the run's validation split, and some are also in training."""
    run = run_folder_of(saved.place) if saved else None
    if run is None or config.DATA.PART not in ("val", AUTO) or whose_data(config, saved) != "same place":
        return ""
    return copies_in_words(run, images)


def warn_of_images(config: Config, saved: Chosen | None, dataset: ImageDataset) -> None:
    """Warn of images of other data whose bytes the model was trained on, and of those that are left out."""
    samples = dataset.single_images()
    left_out = len(samples.lines) if isinstance(samples, Remaining) else 0
    if samples is not None and left_out:
        of = f"{left_out:,} of {left_out + len(samples):,} images here"
        log.info("DATA.EXCLUDE leaves out %s. If a model's mistakes chose them, the metrics flatter it.", of)
    found = copies_of_training(config, saved, dataset)
    if found:
        warn_once(found[0])


def copies_of_training(config: Config, saved: Chosen | None, dataset: ImageDataset) -> tuple[str, float] | None:
    """What to say of such images, and their percentage of those that were compared; None without any."""
    own_images = config.DATA.PART != "test" and saved is not None and whose_data(config, saved) in OF_RUN
    if saved is None or own_images or "DATA.DATASET" not in settings_of(saved):
        return None
    train = None
    evaluated = dataset.single_images()
    with unheard(), suppress(UserError):  # it may be gone, or on another machine
        own = config_of_weights(saved).DATA.changed(DOWNLOAD=False)
        if "://" not in str(own.DATA_PATH):
            train = open_dataset(own, True, ANY_LABEL, 0, torch.device("cpu")).single_images()
    if not (train and evaluated) or evaluated.remote or "pixels" in (train.stored, evaluated.stored):
        return None
    copies = find_copies(train, evaluated, QUICK_SECONDS)
    if not copies.examples:
        return None
    copy, original = copies.examples[0]
    said = (
        f"{copies.found:,} of {copies.compared:,} compared images have the bytes of training images ({copy} is "
        f"{original}); at most {len(evaluated) - copies.found:,} are new, and only these show what to expect."
    )
    return said, 100 * copies.found / copies.compared


def validations_of(config: Config, saved: Chosen) -> int:
    """Number of validations, on the images that DATA names, of which `saved` is the best; 0 for others."""
    run = run_folder_of(saved.place)
    if run is None or config.DATA.PART not in ("val", AUTO) or whose_data(config, saved) not in OF_RUN:
        return 0
    return len(History.of_run(run).of("val")) if read_index(run / CHECKPOINTS)["best"] == saved.place.name else 0


def evaluated_weights(config: Config) -> Chosen | None:
    """The weights that -eval evaluates; None if nothing is known of their training."""
    wanted = config.MODEL.RESUME
    source = config.MODEL.PRETRAINED
    try:
        run = resumed_run(config)
        if run:
            return chosen_at(run)
        if wanted not in (None, AUTO):
            return chosen_at(Path(str(wanted)))
        found = local_weights(source) if source else None
        return chosen_at(found.file) if found else None
    except UserError:  # loading the weights reports it, if it is one
        return None
