"""Fills in the settings that a user left open, from the data set (`auto`) and from the pretrained weights.

Weights of one of our runs, or with a header that one of our tools wrote, give the sizes of the model and its
preprocessing. Any other file, a timm name or timm's description of the model gives the preprocessing only.

Each `with_...` function takes the loaded settings and returns them with values, notes and warnings added.
"""

import contextlib
import json
import math
from dataclasses import asdict
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch

from datasets import ImageDataset, count_classes, open_dataset, source_of
from datasets.base import Samples, background_of
from datasets.damage import Failure, allowed, failure_or
from datasets.decoding import Reader
from datasets.shards.index import open_store
from datasets.shards.source import ShardSet
from models.build import is_timm_name, sizes_in, timm_weights
from models.build import resolve as timm_base
from models.refusals import similar_models
from models.sizes import RESIZED, given_sizes
from models.weights.find import local_weights, model_of_run, weights_of_name
from utils.cache import cache_folder, process_lock
from utils.config import Config, DataConfig, Loaded, ModelConfig
from utils.config.keys import CLASSES, IMAGE_SIZE, MEASURED, PATCH_SIZE, value_of
from utils.config.kinds import AUTO, one_line
from utils.config.read import Kind
from utils.config.words import choices
from utils.errors import UserError
from utils.log import log
from utils.machine.cpus import cores
from utils.text import some_of
from vitamp.files import parse_json, read_json, write_atomically
from vitamp.meta import META, Input, check_fields, unchecked_meta
from vitamp.metrics import NO_LABELS, ONE_LABEL
from vitamp.sizes import in_pixels, sides, size_of
from vitamp.weights import read_header

HEADERS = 500
"""Number of DICOM files whose headers are compared"""
SIZES = range(32, 97)
"""Image sizes that `auto` chooses from"""
PATCHES = range(4, 9)
"""Patch sizes that `auto` chooses from"""
PATCHES_PER_ROW = 8
"""Number of patches that a patch size of `auto` comes closest to"""


def with_classes(loaded: Loaded) -> Loaded:
    """Set MODEL.NUM_CLASSES to the number of classes in the data set.

    It is counted in the training split; an evaluation whose data has none counts in the validation split.
    """
    config = loaded.config
    try:
        number = count_classes(_without_auto(config.DATA), train=True)
    except UserError:
        if config.task == NO_LABELS:  # the data set has no classes of its own
            return loaded.with_values({CLASSES: 1}, "no labels are read", [])
        if not config.EVAL:
            raise
        number = count_classes(_without_auto(config.DATA), train=False)  # an evaluation needs no training split
    number = max(number, 1)  # 0 or less if labels are negative: the check of the data reports their lines later
    name = source_of(config.DATA)
    if number == 1 and config.task == ONE_LABEL and not config.EVAL:
        from datasets.recognise import offering_layout

        error = UserError(f"{name} has one class, so there is nothing to learn. Give the data with all classes.")
        raise offering_layout(error, config.DATA)  # the same error, with other layouts that DATA_PATH has
    note = f"{CLASSES} {number}: classes of {name}"
    return loaded.with_values({CLASSES: number}, f"classes of {name}", [note])


def with_model(loaded: Loaded, given: set[str], source: str | None, of_run: bool) -> Loaded:
    """Fill in what MODEL.NAME and the first weights decide: sizes, preprocessing and the shape of the images.

    If the user typed a MODEL.NAME but no weights, and the recipe names timm's weights of another model, these are
    replaced by timm's weights of MODEL.NAME.

    `given`: keys of the settings that were typed.
    `source`: the weights that the run begins with, a path or timm's name; None without any.
    `of_run`: the settings are those of a run, not of a tool. Only in a run is there a note that the weights may be
    those of a similar model.
    """
    if "MODEL.NAME" in given:
        loaded = _with_warning_of_name(loaded, given)
    if source is not None:
        only_name_typed = "MODEL.NAME" in given and "MODEL.PRETRAINED" not in given
        weights = weights_of_name(loaded.config.MODEL.NAME, source) if only_name_typed else None
        if weights:
            note = f"MODEL.PRETRAINED {weights}: timm's own weights of MODEL.NAME, in place of the recipe's {source}"
            loaded = loaded.with_values({"MODEL.PRETRAINED": weights}, "timm's of MODEL.NAME", [note])
            source = weights
        loaded = _with_sizes(loaded, source)
        loaded = _with_preprocessing(loaded, source, of_run)
    return _with_oblong_size(loaded) if loaded.is_default(IMAGE_SIZE) else loaded


def _with_warning_of_name(loaded: Loaded, given: set[str]) -> Loaded:
    """Warn if the user typed a MODEL.NAME, but a recipe sets the model's sizes, which override those of the name.

    The name may be mistyped, or the user may expect timm's model of that name. There is no warning if the user typed
    any size too, or if timm's model has the same sizes. `given`: keys of the settings that were typed.
    """
    model = loaded.config.MODEL
    sizes = given_sizes(model)
    typed_sizes = {f"MODEL.{key}" for key in sizes} & given
    if not sizes or typed_sizes:
        return loaded
    name_source = loaded.sources["MODEL.NAME"]
    name = model.NAME.strip()
    timm_name, is_label = timm_base(model, sizes_given=True)
    if is_label:  # the name is not timm's: the model has timm's architecture `timm_name` with the recipe's sizes
        warning = f"timm has no model {name}: it only names one of the recipe's sizes.{similar_models(name)}"
        return loaded.with_warning(f"{name_source}: {warning}")

    # The settings that would give timm's model.
    without_sizes = model.changed(**dict.fromkeys(sizes))  # all set to None
    timm_sizes = sizes_in(without_sizes)
    pretrained = timm_weights(timm_name)
    remedies = [f"MODEL.{key}=null" for key, value in sizes.items() if timm_sizes.get(key) != value]
    if not remedies:
        return loaded
    if pretrained is not None:
        height_and_width = dict.fromkeys(pretrained.input_size[1:])  # one number for a square, in which both are equal
        remedies.append(f"-image_size {','.join(map(str, height_and_width))}")
        if loaded.config.TRAIN.SIZE_SCHEDULE:
            remedies.append("TRAIN.SIZE_SCHEDULE=[]")
    return loaded.with_warning(
        f"{name_source}: this is not timm's {name}, but a model of the recipe's sizes. For timm's, take a recipe "
        f"without sizes (-cfg finetune), or add {' '.join(remedies)}."
    )


def _without_auto(data: DataConfig) -> DataConfig:
    """Replace each `auto` by an arbitrary value, so that the data can be opened before `auto` is decided."""
    placeholders = {"IMAGE_SIZE": SIZES[-1], "RANGE": None, "IMAGENET_MEAN": (0.5,), "IMAGENET_STD": (0.5,)}
    return data.changed(**{key: value for key, value in placeholders.items() if getattr(data, key) == AUTO})


def with_image_size(loaded: Loaded) -> Loaded:
    """Set DATA.IMAGE_SIZE `auto` to a multiple of the patch size, from SIZES, that is nearest to the median image.

    UserError if the size of the images is unknown, because they are in memory or none can be read.
    """
    config = loaded.config
    if config.DATA.IMAGE_SIZE != AUTO:
        return loaded
    from datasets.examine.headers import median_side

    name = source_of(config.DATA)
    data = _without_auto(config.DATA)
    samples = _open_split(config, data).single_images()  # None if the images are in memory
    side = None if samples is None else median_side(samples, data)
    if side is None:
        reason = "they are in memory" if samples is None else "none of those tried can be read"
        raise UserError(
            f"{loaded.sources[IMAGE_SIZE]}: {IMAGE_SIZE} auto: the size of the images of {name} is unknown, because "
            f"{reason}. Give a number, as in -image_size 32."
        )
    patch = config.MODEL.PATCH_SIZE
    if patch == AUTO:
        step = 8  # `with_patch_size` then finds a patch in PATCHES that divides the size, such as 4 or 8
    else:
        step = patch or 16  # 16 is the patch size of most models
    multiples = [size for size in SIZES if size % step == 0]
    size = min(multiples, key=lambda size: abs(size - side), default=step)
    note = f"{IMAGE_SIZE} {size}: the median image of {name} has {side} pixels (shorter side)"
    if side > SIZES[-1]:
        note += f". auto chooses at most {size}; -image_size N shows the model more detail, but takes more time"
    return loaded.with_values({IMAGE_SIZE: size}, f"median image of {name}", [note])


def _open_split(config: Config, data: DataConfig) -> ImageDataset:
    """Open the split that the run reads: validation if it evaluates, else training."""
    return open_dataset(data, not config.EVAL, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))


def _with_oblong_size(loaded: Loaded) -> Loaded:
    """Set DATA.IMAGE_SIZE to the size of timm's model if that is not a square, as with Sapiens 2."""
    pretrained = timm_weights(loaded.config.MODEL.NAME.strip())
    if pretrained is None:
        return loaded
    size = size_of(pretrained.input_size[1:])
    if isinstance(size, int):  # a square
        return loaded
    where = f"timm's {loaded.config.MODEL.NAME}"
    return loaded.with_values({IMAGE_SIZE: size}, where, [f"{IMAGE_SIZE} {one_line(size)}: that of {where}"])


def with_patch_size(loaded: Loaded) -> Loaded:
    """Set MODEL.PATCH_SIZE `auto` to the size in PATCHES that gives about PATCHES_PER_ROW patches per row.

    UserError if none of PATCHES divides the image size.
    """
    size = loaded.config.DATA.IMAGE_SIZE
    if loaded.config.MODEL.PATCH_SIZE != AUTO:
        return loaded
    height, width = sides(size)
    fitting = [patch for patch in PATCHES if height % patch == 0 and width % patch == 0]
    if not fitting:
        next_multiples = ",".join(str((side + 7) // 8 * 8) for side in dict.fromkeys((height, width)))
        raise UserError(
            f"{loaded.sources[PATCH_SIZE]}: {PATCH_SIZE} auto: no patch of {PATCHES[0]} to {PATCHES[-1]} pixels "
            f"divides {IMAGE_SIZE} {one_line(size)}. Use a multiple of 8, such as -image_size {next_multiples}."
        )
    patch = min(fitting, key=lambda patch: abs(min(height, width) / patch - PATCHES_PER_ROW))
    grid = in_pixels((height // patch, width // patch))
    note = f"{PATCH_SIZE} {patch}: {grid} patches of an image of {in_pixels(size)}"
    return loaded.with_values({PATCH_SIZE: patch}, f"{IMAGE_SIZE} {one_line(size)}", [note])


def with_measurements(loaded: Loaded) -> Loaded:
    """Set DATA.RANGE, mean and std where they are `auto`, as measured on all pixels of the training split.

    Mean and std are those of images scaled to 0..1 by the range. The processes of a run share one measurement.
    UserError if the images cannot be read singly, or if a channel is constant.
    """
    config = loaded.config
    wanted = [key for key in MEASURED if value_of(config, key) == AUTO]
    if not wanted:
        return loaded
    name = source_of(config.DATA)
    data = _without_auto(config.DATA)
    split = _open_split(config, data)
    samples = split.single_images() or vars(split).get("samples")  # those in memory can be read here, too
    if samples is None or config.EVAL:
        raise UserError(f"{wanted[0]} auto: only training measures, on images that can be read singly; give numbers.")
    notes = list[str]()
    if samples.name(0).lower().endswith(".dcm"):
        from vitamp.bands import has_window

        notes.append("DICOM: slope and intercept are applied; where there is a window, its ends become 0 and 1")
        checked = range(min(len(samples), HEADERS))
        limit = data.MAX_IMAGE_BYTES
        have_windows = failure_or(lambda: {has_window(samples.read(index), limit) for index in checked})
        if have_windows == {True, False}:  # some have, and some have not; a failure is reported by the measurement
            warning = "DICOM: some training images have a window, and so values of another unit; give it to all or none"
            loaded = loaded.with_warning(warning)

    # Each of these has a number per channel.
    pixels, sums, squares, smallest, largest = _cached_measurement(split, samples, data, wanted)
    constant_channels = np.flatnonzero(smallest == largest)
    if constant_channels.size:
        number = constant_channels[0] + 1
        raise UserError(f"{name}: channel {number} has the same value in all training images; leave it out.")

    # The values that range, mean and std would have; only the wanted ones are taken.
    least = float(smallest.min())
    most = float(largest.max())
    low, high = (least, most) if "DATA.RANGE" in wanted else config.DATA.value_range
    mean = sums / pixels
    variance = squares / pixels - mean**2
    values = (low, high), (mean - low) / (high - low), np.sqrt(variance) / (high - low)
    measured = {key: tuple(map(float, value)) for key, value in zip(MEASURED, values, strict=True) if key in wanted}

    # The note on what was measured.
    bits = ""
    if data.BITS == 16:
        used_bits = math.ceil(math.log2(most + 1))
        bits = f" ({used_bits} of 16 bits)"
    texts = []
    for key in wanted:
        numbers = ", ".join(f"{number:.4g}" for number in measured[key])
        texts.append(f"{key} [{numbers}]")
    notes.append(
        f"Measured on {len(samples):,} training images, of values from {least:g} to {most:g}{bits}: {', '.join(texts)}"
    )
    return loaded.with_values(measured, f"measured on {name}", notes)


def _cached_measurement(split: ImageDataset, samples: Samples, data: DataConfig, wanted: list[str]) -> np.ndarray:
    """Return the measured values of the images by channel (`_measure`), from the cache or by measuring them now.

    A cached result is valid as long as the images are the same. `wanted`: settings to name in the log.
    """
    from engine.evaluation.features import contents_of

    name = source_of(data)
    hash_of_images = contents_of(split)[:32]
    identity = (hash_of_images, data.IMAGE_CHANNELS, data.BITS, data.BACKGROUND)
    file = cache_folder(data, "measured") / f"{'-'.join(map(str, identity))}.json"
    with process_lock(file.with_suffix(".lock"), f"measures {name}"):
        if not file.is_file():
            log.info("Measuring %s on %s training images of %s.", ", ".join(wanted), f"{len(samples):,}", name)
            write_atomically(file, json.dumps(_measure(samples, data).tolist()))
        return np.array(parse_json(file.read_bytes()))


def _measure(samples: Samples, data: DataConfig) -> np.ndarray:
    """Measure the values of all images together. Returns five rows with a column per channel.

    The rows: number of pixels, sum of the values, sum of their squares, smallest value, largest value. UserError if
    more images cannot be read than DATA.MAX_BAD allows.
    """
    sums = np.zeros((3, data.IMAGE_CHANNELS))  # the first three rows are sums over the images
    smallest = np.full(data.IMAGE_CHANNELS, np.inf)
    largest = np.full(data.IMAGE_CHANNELS, -np.inf)
    errors = list[str]()
    with ThreadPool(cores()) as threads:
        results = threads.imap(partial(_measure_image, samples, Reader(data)), range(len(samples)), chunksize=8)
        for index, result in enumerate(results):
            if not isinstance(result, Failure):
                *sums_of_image, smallest_of_image, largest_of_image = result
                sums += sums_of_image
                smallest = np.minimum(smallest, smallest_of_image)
                largest = np.maximum(largest, largest_of_image)
                continue
            errors.append(f"The training image {samples.name(index)} cannot be read: {result.reason}")
            if len(errors) > allowed(data.MAX_BAD, len(samples)):
                count = f" ({len(errors)} so far)" if len(errors) > 1 else ""
                raise UserError(f"{errors[0]}{count}. Correct images or settings, or list them in DATA.EXCLUDE.")
    return np.vstack((sums, smallest, largest))


def _measure_image(samples: Samples, reader: Reader, index: int) -> np.ndarray | Failure:
    """Measure one image. Returns five rows with a column per channel, or the failure if it cannot be read.

    The rows: number of pixels, sum of the values, sum of their squares, smallest value, largest value.
    """
    pixels = failure_or(lambda: reader.whole(samples.read(index)))
    if isinstance(pixels, Failure):
        return pixels
    values = pixels.reshape(-1, pixels.shape[2]).astype(np.float64)
    pixel_counts = np.full(values.shape[1], len(values))
    return np.stack([pixel_counts, values.sum(0), (values**2).sum(0), values.min(0), values.max(0)])


def with_packing(loaded: Loaded) -> Loaded:
    """Set DATA.EXIF_ROTATE and DATA.BACKGROUND to the values that the images were packed with.

    Packing has applied both, and the model's tools must treat other images in the same way. UserError if the user
    typed another value. A note is added if the images were packed in grey and the model is for colour.
    """
    data = loaded.config.DATA
    packing = ShardSet(open_store(data.DATA_PATH), data).how
    place = source_of(data)
    # Files that were packed unchanged (kind `keep`) have neither applied: the run's settings apply to them. But if they
    # came from an earlier packing, which has applied both, the shards record its background.
    applies_nothing = packing.get("kind") == "keep" and "background" not in packing
    for name, key in (("upright", "DATA.EXIF_ROTATE"), ("background", "DATA.BACKGROUND")):
        packed = f"{packing.get(name)}".lower()  # in words, as in a setting: "true", "white", "none" if not recorded
        setting = one_line(value_of(loaded.config, key))
        # DATA.BACKGROUND mean stands for a colour, and packing records that. (It cannot equal a value of EXIF_ROTATE.)
        colour = one_line(background_of(_without_auto(loaded.config.DATA)))
        if applies_nothing or packed in ("none", setting, colour):
            continue
        message = f"{place} was packed with {key} {packed}"
        if loaded.sources[key].is_typed:
            raise UserError(
                f"{loaded.sources[key]}: {message}. Give that, or pack the original images with your value."
            )
        loaded = loaded.with_values({key: packed}, "packing", [message])
    if packing.get("channels") == 1 and packing.get("kind") != "keep" and data.IMAGE_CHANNELS == 3:
        note = "was packed in grey, but tools will see other images in colour; to prevent that, DATA.IMAGE_CHANNELS=1"
        loaded = loaded.with_values({}, "packing", [f"{place} {note}"])
    return loaded


INTERPOLATION = "DATA.INTERPOLATION"
CROP_MODE = "DATA.CROP_MODE"
HEADS = "NUM_HEADS"
FIELDS = {
    "image_size": "DATA.IMAGE_SIZE",
    "crop_pct": "DATA.CROP_PCT",
    "crop_mode": CROP_MODE,
    "interpolation": INTERPOLATION,
    "mean": "DATA.IMAGENET_MEAN",
    "std": "DATA.IMAGENET_STD",
    "range": "DATA.RANGE",
}
"""Field of a checkpoint's meta.json, and of a header of weights -> setting."""
COLOURS = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
TIMMS_CONFIG = "config.json"
"""File beside the weights in a folder that timm saved for the hub."""


class Preprocessing(NamedTuple):
    """What was done to the images that weights were trained on."""

    values: dict[str, Any]
    """Setting -> value, of the settings that are known"""
    where: str
    """Where the values are written, for messages"""


def _with_sizes(loaded: Loaded, source: str) -> Loaded:
    """Take sizes, pooling and layer scale from the model of the weights, for settings that are `auto` or not set.

    Only weights of one of our runs record them, so other weights change nothing. A warning is added if the settings
    have another number of heads: such weights load, but compute something else. `source`: the weights.
    """
    weights = local_weights(source)
    if weights is None:
        return loaded
    file = weights.file
    model = loaded.config.MODEL
    sizes = {}
    trained_sizes = {}
    with contextlib.suppress(UserError, ValueError):  # the build reports what is wrong
        trained_model = model_of_run(file)
        if trained_model:
            sizes = sizes_in(model)
            trained_sizes = sizes_in(trained_model)
    if sizes.keys() != trained_sizes.keys():  # another kind of model
        return loaded

    # A setting that is null is open, but for two kinds. Patches and windows are those of a given MODEL.NAME, to which
    # timm resizes the weights. And if the user or a file sets POOL or INIT_VALUES to null, that is a choice.
    decided_by_null = [] if loaded.is_default("MODEL.NAME") else list(RESIZED)
    decided_by_null += [key for key in ("POOL", "INIT_VALUES") if not loaded.is_default(f"MODEL.{key}")]
    taken = {}
    for key, trained_value in trained_sizes.items():
        setting = getattr(model, key)
        is_open = setting == AUTO or (setting is None and key not in decided_by_null)
        if is_open and sizes[key] != trained_value:
            taken[f"MODEL.{key}"] = trained_value

    # Only for a single number: a Swin has a list of heads, and its weights do not load with another list.
    heads = f"MODEL.{HEADS}"
    differs = sizes.get(HEADS) != trained_sizes.get(HEADS) and isinstance(sizes[HEADS], int)
    if differs and heads not in taken:
        reason = f"{file} was trained with {trained_sizes[HEADS]}, and computes something else with another number"
        loaded = loaded.with_warning(f"{loaded.sources[heads]}: {heads} {sizes[HEADS]} is used; {reason}")
    if not taken:
        return loaded
    note = f"Open in the settings, so as in {file}: {_in_words(taken)}"
    return loaded.with_values(taken, f"{file}", [note])


def _with_preprocessing(loaded: Loaded, source: str, of_run: bool) -> Loaded:
    """Take the preprocessing of the weights where the settings leave it open, and report where the settings differ.

    `source`: the weights, a path or timm's name. `of_run`: the settings are those of a run, not of a tool.
    """
    known = preprocessing_of(source) or _preprocessing_of_name(loaded.config.MODEL, source)
    if known is None:
        used = _in_words({key: value_of(loaded.config, key) for key in FIELDS.values()})
        return loaded.with_warning(
            f"MODEL.PRETRAINED {source}: the preprocessing of its training images is unknown; this run uses {used}. "
            "Other values than those of its training cost accuracy: set them if you know them"
        )
    trained_values, where = known
    loaded = _without_other_bands(loaded, trained_values, where)

    # Take each value of the training, or record why not.
    taken = dict[str, Any]()
    differing = dict[str, Any]()
    unsupported = list[str]()
    unused = ""
    for key, trained_value in trained_values.items():
        value = value_of(loaded.config, key)
        value_source = loaded.sources[key]
        is_open = value_source.is_open or value == AUTO
        if not is_open and _is_same(key, value, trained_value):
            continue
        if not is_open:
            differing[key] = trained_value
        elif key in (INTERPOLATION, CROP_MODE) and trained_value not in choices(key):
            unsupported.append(f"{key} {value} is used; {where} has {trained_value}, which is not supported")
        else:
            taken[key] = trained_value
            if value_source.kind is Kind.OTHER_MODEL:  # a recipe's preprocessing for another model
                unused = f". That of {value_source}, is not used"

    # Report both.
    notes = [f"Preprocessing of {where}: {_in_words(taken)}{unused}"] if taken else []
    if where.startswith("timm's "):
        notes += _notes_on_similar_models(loaded.config.MODEL.NAME, source, of_run)
    # The first note has said all of `where`, with the words in brackets of `_preprocessing_of_name`: once is enough.
    short_where = where.partition(" (MODEL.NAME;")[0] if taken else where
    loaded = _with_differences(loaded, differing, short_where)
    return loaded.with_values(taken, where, notes + unsupported)


def _is_same(key: str, value: Any, trained_value: Any) -> bool:
    """Return whether two values of a setting are equivalent: a mean of (0.5,) is one of (0.5, 0.5, 0.5)."""
    return value == trained_value or (key in COLOURS and set(value) == set(trained_value) == {value[0]})


def _preprocessing_of_name(model: ModelConfig, source: str) -> Preprocessing | None:
    """Return the preprocessing of timm's own weights for MODEL.NAME, as a guess for weights that do not say theirs.

    None if MODEL.NAME is only a label for the user's own sizes, or if timm has no weights of that name. `source`: the
    weights, for the message.
    """
    sizes_given = bool(given_sizes(model))
    timm_name, is_label = timm_base(model, sizes_given)
    if is_label and sizes_given:
        return None
    return timm_preprocessing(timm_name, f"timm's {timm_name} (MODEL.NAME; {source} does not say its own)")


def _with_differences(loaded: Loaded, trained_values: dict[str, Any], where: str) -> Loaded:
    """Report the settings that differ from the preprocessing of the weights' training.

    Another image size is a note. All other settings are one warning, since they may cost accuracy; but if a recipe
    chose every one of these, they are a note, too: it chose them for its own model.
    `trained_values`: setting -> value of the training, for settings that differ. `where`: where these are written.
    """
    texts = dict[str, str]()
    for key, trained_value in trained_values.items():
        value = one_line(value_of(loaded.config, key))
        texts[key] = f"{key} {value} in place of {one_line(trained_value)} ({loaded.sources[key]})"
    size = texts.pop(IMAGE_SIZE, "")
    notes = [f"{size}, the size of {where}"] if size else []
    if texts:
        cost = "may cost accuracy, another mean and std up to 11 points"
        message = f"{', '.join(texts.values())}: other preprocessing than that of {where} {cost}"
        if all(loaded.sources[key].kind is Kind.RECIPE for key in texts):
            notes.append(message)
        else:
            loaded = loaded.with_warning(message)
    return loaded.with_values({}, where, notes)  # only adds the notes


def _without_other_bands(loaded: Loaded, trained_values: dict[str, Any], where: str) -> Loaded:
    """Remove the range, mean and std from `trained_values` if they are those of images with other channels or bits.

    Settings of mean and std that are the default then become `auto`, to be measured; the settings are returned. For
    grey images, a mean and std of colours is replaced by its average. `trained_values`: the preprocessing of the
    weights, by setting. It is changed in place, and its number of bits is removed from it.
    """
    data = loaded.config.DATA
    channels = len(trained_values.get("DATA.IMAGENET_MEAN", ()))
    # Images in grey or colour with 8 bits fit together: their channels are converted.
    same_channels = channels <= 3 if data.is_plain else channels == data.IMAGE_CHANNELS
    same_bits = trained_values.pop("DATA.BITS") == data.BITS
    if not same_bits or not same_channels:
        for key in MEASURED:
            trained_values.pop(key, None)
        default_keys = [key for key in COLOURS if loaded.is_default(key)]
        if default_keys:
            note = f"{' and '.join(default_keys)} auto: {where} has those of images of other channels or bits"
            automatic = dict.fromkeys(default_keys, AUTO)
            return loaded.with_values(automatic, "default (MODEL.PRETRAINED)", [note], Kind.DEFAULT)
    elif data.IMAGE_CHANNELS == 1:  # the weights of the first convolution are summed over colours, too
        for key in COLOURS:
            colours = trained_values.get(key)
            if colours:
                trained_values[key] = (sum(colours) / len(colours),)
    return loaded


def _notes_on_similar_models(name: str, source: str, of_run: bool) -> list[str]:
    """Return a note if the weights may be of a similar model of timm that needs another mean and std, else [].

    timm's tf_efficientnet_b0 and efficientnet_b0, for example, have weights of the same names and shapes.
    `name`: MODEL.NAME. `source`: the weights. `of_run`: the settings are those of a run, not of a tool.
    """
    expected = timm_preprocessing(name, "")
    if expected is None:
        return []
    model, _, tag = name.partition(".")
    weights = local_weights(source)  # None for a name of timm
    weights_name = _timm_name_of(weights.file) if weights else source

    # Weights that are named after a model of timm.
    if weights_name:
        weights_model = weights_name.partition(".")[0]
        if weights_model == model or not _needs_other_colours(weights_name, expected):
            return []
        advice = f"need another mean and std than {name}'s, and may compute otherwise: -model {weights_model}"
        return [f"MODEL.PRETRAINED {source}: weights of {weights_name} {advice}"]

    # Other files may be weights of MODEL.NAME or of its twin. With a tag, MODEL.NAME says which weights they are.
    if tag or not of_run:
        return []
    twin = model.removeprefix("tf_") if model.startswith("tf_") else f"tf_{model}"
    candidates = timm.list_pretrained(f"{model}.*") + timm.list_pretrained(f"{twin}.*")
    different = [candidate for candidate in candidates if _needs_other_colours(candidate, expected)]
    if not different:
        return []
    advice = f"add -model {different[0]}, for another mean and std"
    return [f"If the weights are of {some_of(different, 2)}, {advice}"]


def _needs_other_colours(name: str, expected: Preprocessing) -> bool:
    """Return whether timm's weights `name` need another mean or std than `expected`; false if they are unknown."""
    needed = timm_preprocessing(name, "") or expected
    return any(needed.values.get(key) != expected.values.get(key) for key in COLOURS)


def preprocessing_of(source: str) -> Preprocessing | None:
    """Return the preprocessing that the weights themselves give; None if they give none.

    `source`: a run, a checkpoint, a file, or a timm name. It is looked up in this order: our meta.json beside the file,
    the file's header, timm's config.json beside it, timm's description of the model that the file is named after.
    """
    weights = local_weights(source)
    if weights is None:
        return timm_preprocessing(source, f"timm's {source}")
    file = weights.file
    meta = file.with_name(META)
    if meta.is_file():
        return _parse_fields(unchecked_meta(file.parent).get("input"), meta)
    header = read_header(file).get("input")
    if header:
        return _parse_fields(header, file)
    config = file.with_name(TIMMS_CONFIG)
    if config.is_file():
        return _parse_fields(read_json(config).get("pretrained_cfg"), config)
    name = _timm_name_of(file)
    if name is None:
        return None
    return timm_preprocessing(name, f"timm's {name} (recognised by the name of {file})")


def _timm_name_of(file: Path) -> str | None:
    """Return the timm name that a file is named after, with its tag or without; None if there is none."""
    for name in (file.stem, file.name.partition(".")[0]):
        if is_timm_name(name):
            return name
    return None


def _parse_fields(fields: Any, where: Path | str) -> Preprocessing | None:
    """Convert fields that describe a model's input image to settings; None if no field is known.

    `fields`: from our meta.json, from the header of weights that checkpoint.py or export.py wrote, or from timm's
    description of its weights. `where`: where they are written, for messages. UserError for a value of a wrong type.
    """
    if not isinstance(fields, dict):
        return None
    # The size and the crop may be described in other words.
    size = fields.get("input_size")  # timm's: channels, height, width
    if isinstance(size, list | tuple) and len(size) == 3:
        fields = {**fields, "image_size": size_of(size[1:])}
    if fields.get("crop") == "none":
        fields = {**fields, "crop_mode": "squash", "crop_pct": 1.0}
    known = dict[str, Any]()
    for name in FIELDS:
        value = fields.get(name)
        if value is not None:
            known[name] = list(value) if isinstance(value, tuple) else value  # the check knows lists, as in JSON
    check_fields(Input, known, Path(where))
    if not known:
        return None
    values = {"DATA.BITS": fields.get("bits", 8)}
    for name, value in known.items():
        setting = FIELDS[name]
        values[setting] = tuple(map(float, value)) if isinstance(value, list) else value
    return Preprocessing(values, str(where))


def timm_preprocessing(name: str, where: str) -> Preprocessing | None:
    """Return the preprocessing of timm's weights `name`; None if timm has none. `where`: a name for messages."""
    cfg = timm_weights(name)
    return None if cfg is None else _parse_fields(asdict(cfg), where)


def _in_words(values: dict[str, Any]) -> str:
    """Join settings and values for a message: 'DATA.IMAGE_SIZE 224, DATA.CROP_PCT 0.9'."""
    return ", ".join(f"{key} {one_line(value)}" for key, value in values.items())
