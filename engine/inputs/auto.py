"""Settings that are open: `auto` sizes and classes, by what the data set has, and what pretrained weights say.

The run of the weights, or the header that one of its tools wrote, says the sizes of its model and its preprocessing;
another file, a timm name or timm's description of the model says the preprocessing alone.
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
from models.build import build_without_weights, is_timm_name, sizes_in, timm_weights
from models.build import resolve as timm_base
from models.parts import BATCH_NORM
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
"""DICOM files of which the headers are compared"""
SIZES = range(32, 97)
"""Image sizes that `auto` chooses from"""
PATCHES = range(4, 9)
"""Patch sizes that `auto` chooses from"""
PATCHES_PER_ROW = 8
"""Number of patches that a patch size of `auto` comes closest to"""
RATE = "TRAIN.BASE_LR"
RATE_WITH_BATCH_NORM = 3e-4
RATE_BY_FEATURES = 0.1
LARGEST_RATE = 1e-3


def with_classes(loaded: Loaded) -> Loaded:
    config = loaded.config
    try:
        number = count_classes(of_any_size(config.DATA), train=True)
    except UserError:
        if config.task == NO_LABELS:  # of a data set without classes of its own
            return loaded.with_values({CLASSES: 1}, "no labels are read", [])
        if not config.EVAL:
            raise
        number = count_classes(of_any_size(config.DATA), train=False)  # an evaluation needs no training split
    number = max(number, 1)  # the check of the data reports negative labels, with their lines
    name = source_of(config.DATA)
    if number == 1 and config.task == ONE_LABEL and not config.EVAL:
        from datasets.recognise import offering_layout

        one = UserError(f"{name} has one class, so there is nothing to learn. Give the data with all classes.")
        raise offering_layout(one, config.DATA)
    note = f"{CLASSES} {number}: classes of {name}"
    return loaded.with_values({CLASSES: number}, f"classes of {name}", [note])


def with_model(loaded: Loaded, given: set[str], source: str | None, of_run: bool) -> Loaded:
    """What MODEL.NAME says, and the weights that the run begins with, if any.

    `given`: settings that were typed. `of_run`: say what the weights may be otherwise.
    """
    if "MODEL.NAME" in given:
        loaded = _with_doubtful_name(loaded, given)
    if source is not None:
        is_recipes = "MODEL.NAME" in given and "MODEL.PRETRAINED" not in given
        own = weights_of_name(loaded.config.MODEL.NAME, source) if is_recipes else None
        if own:
            note = f"MODEL.PRETRAINED {own}: timm's own weights of MODEL.NAME, in place of the recipe's {source}"
            loaded = loaded.with_values({"MODEL.PRETRAINED": own}, "timm's of MODEL.NAME", [note])
            source = own
        loaded = _with_preprocessing(_with_sizes(loaded, source), source, of_run)
    return _with_own_shape(loaded) if loaded.is_default(IMAGE_SIZE) else loaded


def _with_doubtful_name(loaded: Loaded, given: set[str]) -> Loaded:
    """Warn of a MODEL.NAME beside a recipe's sizes: it may be mistyped, or timm's model may be expected."""
    model = loaded.config.MODEL
    sizes = given_sizes(model)
    if not sizes or {f"MODEL.{key}" for key in sizes} & given:
        return loaded
    by = loaded.sources["MODEL.NAME"]
    name = model.NAME.strip()
    timm_name, is_label = timm_base(model, sizes_given=True)
    if is_label:
        said = f"timm has no model {name}: it only names one of the recipe's sizes.{similar_models(name)}"
        return loaded.with_warning(f"{by}: {said}")
    own = sizes_in(model.changed(**dict.fromkeys(sizes)))
    known = timm_weights(timm_name)
    ways = [f"MODEL.{key}=null" for key, value in sizes.items() if own.get(key) != value]
    if not ways:
        return loaded
    if known is not None:
        ways.append(f"-image_size {','.join(map(str, dict.fromkeys(known.input_size[1:])))}")
        if loaded.config.TRAIN.SIZE_SCHEDULE:
            ways.append("TRAIN.SIZE_SCHEDULE=[]")
    return loaded.with_warning(
        f"{by}: this is not timm's {name}, but a model of the recipe's sizes. For timm's, take a recipe without sizes "
        f"(-cfg finetune), or add {' '.join(ways)}."
    )


def of_any_size(data: DataConfig) -> DataConfig:
    """For a look at the data while settings may still be `auto`."""
    some = {"IMAGE_SIZE": SIZES[-1], "RANGE": None, "IMAGENET_MEAN": (0.5,), "IMAGENET_STD": (0.5,)}
    return data.changed(**{key: value for key, value in some.items() if getattr(data, key) == AUTO})


def with_image_size(loaded: Loaded) -> Loaded:
    config = loaded.config
    if config.DATA.IMAGE_SIZE != AUTO:
        return loaded
    from datasets.examine.headers import median_side

    name = source_of(config.DATA)
    data = of_any_size(config.DATA)
    samples = _opened(config, data).single_images()
    side = None if samples is None else median_side(samples, data)
    if side is None:
        why = "they are in memory" if samples is None else "none of those tried can be read"
        raise UserError(
            f"{loaded.sources[IMAGE_SIZE]}: {IMAGE_SIZE} auto: the size of the images of {name} is unknown, because "
            f"{why}. Give a number, as in -image_size 32."
        )
    patch = config.MODEL.PATCH_SIZE
    step = 8 if patch == AUTO else patch or 16
    size = min((size for size in SIZES if size % step == 0), key=lambda size: abs(size - side), default=step)
    note = f"{IMAGE_SIZE} {size}: the median image of {name} has {side} pixels (shorter side)"
    if side > SIZES[-1]:
        note += f". auto chooses at most {size}; -image_size N shows the model more detail, but takes more time"
    return loaded.with_values({IMAGE_SIZE: size}, f"median image of {name}", [note])


def _opened(config: Config, data: DataConfig) -> ImageDataset:
    """The split that the run reads: training's, unless it evaluates."""
    return open_dataset(data, not config.EVAL, config.MODEL.NUM_CLASSES, config.SEED, torch.device("cpu"))


def _with_own_shape(loaded: Loaded) -> Loaded:
    """Take the size of timm's model where that is no square, such as that of Sapiens 2."""
    known = timm_weights(loaded.config.MODEL.NAME.strip())
    size = 0 if known is None else size_of(known.input_size[1:])
    if isinstance(size, int):
        return loaded
    where = f"timm's {loaded.config.MODEL.NAME}"
    return loaded.with_values({IMAGE_SIZE: size}, where, [f"{IMAGE_SIZE} {one_line(size)}: that of {where}"])


def with_patch_size(loaded: Loaded) -> Loaded:
    size = loaded.config.DATA.IMAGE_SIZE
    if loaded.config.MODEL.PATCH_SIZE != AUTO:
        return loaded
    high, wide = sides(size)
    fitting = [patch for patch in PATCHES if high % patch == 0 and wide % patch == 0]
    if not fitting:
        other = ",".join(str((side + 7) // 8 * 8) for side in dict.fromkeys((high, wide)))
        raise UserError(
            f"{loaded.sources[PATCH_SIZE]}: {PATCH_SIZE} auto: no patch of {PATCHES[0]} to {PATCHES[-1]} pixels "
            f"divides {IMAGE_SIZE} {one_line(size)}. Use a multiple of 8, such as -image_size {other}."
        )
    patch = min(fitting, key=lambda patch: abs(min(high, wide) / patch - PATCHES_PER_ROW))
    patches = in_pixels((high // patch, wide // patch))
    note = f"{PATCH_SIZE} {patch}: {patches} patches of an image of {in_pixels(size)}"
    return loaded.with_values({PATCH_SIZE: patch}, f"{IMAGE_SIZE} {one_line(size)}", [note])


def with_rate(loaded: Loaded) -> Loaded:
    """BASE_LR for fine-tuning with AdamW: the wider a model, the smaller the steps that it needs.

    0.001 was best for ViTs of width 48 and 96, 0.0003 for EfficientNet-Lite0 (docs/benchmarks.md). That Adam's rate
    goes down as the width goes up is from Yang et al. 2022 (Tensor Programs V).
    """
    config = loaded.config
    optimizer = config.TRAIN.OPTIMIZER
    if not optimizer.facts.has_own_rate:
        name = optimizer.NAME.casefold()
        raise UserError(f"{loaded.sources[RATE]}: {RATE} auto is for AdamW and Adam; give a number for {name}.")
    model = build_without_weights(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS)
    features = getattr(model, "num_features", None)
    rate = RATE_WITH_BATCH_NORM
    if features is None:
        why = "the model does not say its number of features"
    elif any(isinstance(module, BATCH_NORM) for module in model.modules()):
        why = "for models with batch norm"
    else:
        rate = min(LARGEST_RATE, float(f"{RATE_BY_FEATURES / features:.2g}"))
        why = f"{RATE_BY_FEATURES} / {features} features, at most {LARGEST_RATE}"
    return loaded.with_values({RATE: rate}, "the model's features", [f"{RATE} {rate:g}: {why}"])


def with_measurements(loaded: Loaded) -> Loaded:
    """Measure mean, deviation and range on all pixels of the training split. Processes share the result."""
    config = loaded.config
    wanted = [key for key in MEASURED if value_of(config, key) == AUTO]
    if not wanted:
        return loaded
    name = source_of(config.DATA)
    data = of_any_size(config.DATA)
    split = _opened(config, data)
    samples = split.single_images() or vars(split).get("samples")
    if samples is None or config.EVAL:
        raise UserError(f"{wanted[0]} auto: only training measures, on images that can be read singly; give numbers.")
    notes = list[str]()
    if samples.name(0).lower().endswith(".dcm"):
        from vitamp.bands import has_window

        notes.append("DICOM: slope and intercept are applied; where there is a window, its ends become 0 and 1")
        first = range(min(len(samples), HEADERS))
        limit = data.MAX_IMAGE_BYTES
        if failure_or(lambda: {has_window(samples.read(index), limit) for index in first}) == {True, False}:
            said = "DICOM: some training images have a window, and so values of another unit; give it to all or none"
            loaded = loaded.with_warning(said)
    pixels, sums, squares, smallest, largest = _kept_measurement(split, samples, data, wanted)
    blank = np.flatnonzero(smallest == largest)
    if blank.size:
        raise UserError(f"{name}: channel {blank[0] + 1} has the same value in all training images; leave it out.")
    least = float(smallest.min())
    most = float(largest.max())
    low, high = (least, most) if MEASURED[0] in wanted else config.DATA.value_range
    mean = sums / pixels
    variance = squares / pixels - mean**2
    values = (low, high), (mean - low) / (high - low), np.sqrt(variance) / (high - low)
    found = {key: tuple(map(float, value)) for key, value in zip(MEASURED, values, strict=True) if key in wanted}
    bits = f" ({math.ceil(math.log2(most + 1))} of 16 bits)" if data.BITS == 16 else ""
    said = []
    for key in wanted:
        numbers = ", ".join(f"{number:.4g}" for number in found[key])
        said.append(f"{key} [{numbers}]")
    notes.append(
        f"Measured on {len(samples):,} training images, of values from {least:g} to {most:g}{bits}: {', '.join(said)}"
    )
    return loaded.with_values(found, f"measured on {name}", notes)


def _kept_measurement(split: ImageDataset, samples: Samples, data: DataConfig, wanted: list[str]) -> np.ndarray:
    """What `_measured` returns, which is kept in the cache for as long as the images are the same."""
    from engine.evaluation.features import contents_of

    name = source_of(data)
    about = (contents_of(split)[:32], data.IMAGE_CHANNELS, data.BITS, data.BACKGROUND)
    file = cache_folder(data, "measured") / f"{'-'.join(map(str, about))}.json"
    with process_lock(file.with_suffix(".lock"), f"measures {name}"):
        if not file.is_file():
            log.info("Measuring %s on %s training images of %s.", ", ".join(wanted), f"{len(samples):,}", name)
            write_atomically(file, json.dumps(_measured(samples, data).tolist()))
        return np.array(parse_json(file.read_bytes()))


def _measured(samples: Samples, data: DataConfig) -> np.ndarray:
    """Of all images, by channel: number of pixels, sum of values and of squares, smallest and largest value.

    UserError if more images cannot be read than DATA.MAX_BAD allows.
    """
    sums = np.zeros((3, data.IMAGE_CHANNELS))
    smallest = np.full(data.IMAGE_CHANNELS, np.inf)
    largest = -smallest
    broken = list[str]()
    with ThreadPool(cores()) as threads:
        each = threads.imap(partial(_of_image, samples, Reader(data)), range(len(samples)), chunksize=8)
        for index, found in enumerate(each):
            if not isinstance(found, Failure):
                sums += found[:3]
                smallest = np.minimum(smallest, found[3])
                largest = np.maximum(largest, found[4])
                continue
            broken.append(f"The training image {samples.name(index)} cannot be read: {found.reason}")
            if len(broken) > allowed(data.MAX_BAD, len(samples)):
                others = f" ({len(broken)} so far)" if len(broken) > 1 else ""
                raise UserError(f"{broken[0]}{others}. Correct images or settings, or list them in DATA.EXCLUDE.")
    return np.vstack((sums, smallest, largest))


def _of_image(samples: Samples, reader: Reader, index: int) -> np.ndarray | Failure:
    pixels = failure_or(lambda: reader.whole(samples.read(index)))
    if isinstance(pixels, Failure):
        return pixels
    values = pixels.reshape(-1, pixels.shape[2]).astype(np.float64)
    pixels_each = np.full(values.shape[1], len(values))
    return np.stack([pixels_each, values.sum(0), (values**2).sum(0), values.min(0), values.max(0)])


def with_packing(loaded: Loaded) -> Loaded:
    """Take what packing made of EXIF data and transparency, since tools have to make the same of other images."""
    data = loaded.config.DATA
    how = ShardSet(open_store(data.DATA_PATH), data).how
    place = source_of(data)
    keeps_both = how.get("kind") == "keep" and "background" not in how  # unless the kept files were packed before
    for name, key in (("upright", "DATA.EXIF_ROTATE"), ("background", "DATA.BACKGROUND")):
        packed = f"{how.get(name)}".lower()
        own = one_line(value_of(loaded.config, key))
        behind = one_line(background_of(of_any_size(loaded.config.DATA)))  # mean: a colour
        if keeps_both or packed in ("none", own, behind):
            continue
        said = f"{place} was packed with {key} {packed}"
        if loaded.sources[key].is_typed:
            raise UserError(f"{loaded.sources[key]}: {said}. Give that, or pack the original images with your value.")
        loaded = loaded.with_values({key: packed}, "packing", [said])
    if how.get("channels") == 1 and how.get("kind") != "keep" and data.IMAGE_CHANNELS == 3:
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
    values: dict[str, Any]
    """By setting, as far as they are known"""
    where: str
    """Where they are written"""


def _with_sizes(loaded: Loaded, source: str) -> Loaded:
    """Take the sizes, the pooling and the layer scale of a run's model where the settings leave them open."""
    found = local_weights(source)
    if found is None:
        return loaded
    file = found.file
    mine = loaded.config.MODEL
    own = {}
    theirs = {}
    with contextlib.suppress(UserError, ValueError):  # the build reports what is wrong
        of_run = model_of_run(file)
        if of_run:
            own = sizes_in(mine)
            theirs = sizes_in(of_run)
    if own.keys() != theirs.keys():  # another kind of model
        return loaded
    # With a MODEL.NAME, timm resizes patches and windows to those of the name.
    kept = [] if loaded.is_default("MODEL.NAME") else list(RESIZED)
    kept += [key for key in ("POOL", "INIT_VALUES") if not loaded.is_default(f"MODEL.{key}")]  # null too is an answer
    taken = {}
    for key, value in theirs.items():
        given = getattr(mine, key)
        if own[key] != value and (given == AUTO or (given is None and key not in kept)):
            taken[f"MODEL.{key}"] = value
    words = f"Open in the settings, so as in {file}: {_in_words(taken)}"
    heads = f"MODEL.{HEADS}"
    differs = own.get(HEADS) != theirs.get(HEADS) and isinstance(own[HEADS], int)
    if differs and heads not in taken:  # a Swin with others does not load
        trained = f"{file} was trained with {theirs[HEADS]}, and computes something else with another number"
        loaded = loaded.with_warning(f"{loaded.sources[heads]}: {heads} {own[HEADS]} is used; {trained}")
    return loaded.with_values(taken, f"{file}", [words]) if taken else loaded


def _with_preprocessing(loaded: Loaded, source: str, of_run: bool) -> Loaded:
    """Take the preprocessing of the weights where the settings leave it open, and note where theirs differs."""
    known = preprocessing_of(source) or _guess(loaded.config.MODEL, source)
    if known is None:
        now = _in_words({key: value_of(loaded.config, key) for key in FIELDS.values()})
        return loaded.with_warning(
            f"MODEL.PRETRAINED {source}: the preprocessing of its training images is unknown; this run uses {now}. "
            "Other values than those of its training cost accuracy: set them if you know them"
        )
    theirs, where = known
    loaded = _without_other_bands(loaded, theirs, where)
    taken = dict[str, Any]()
    differing = dict[str, Any]()
    unsupported = list[str]()
    instead = ""
    for key, value in theirs.items():
        mine = value_of(loaded.config, key)
        by = loaded.sources[key]
        if not by.is_open and mine != AUTO:
            if not _is_same(key, mine, value):
                differing[key] = value
        elif key in (INTERPOLATION, CROP_MODE) and value not in choices(key):
            unsupported.append(f"{key} {mine} is used; {where} has {value}, which is not supported")
        else:
            taken[key] = value
            if by.kind is Kind.OTHER_MODEL:
                instead = f". That of {by}, is not used"
    notes = [f"Preprocessing of {where}: {_in_words(taken)}{instead}"] if taken else []
    if where.startswith("timm's "):
        notes += _of_siblings(loaded.config.MODEL.NAME, source, of_run)
    named = where.partition(" (MODEL.NAME;")[0] if taken else where  # the first note has the rest
    loaded = _with_differences(loaded, differing, named)
    return loaded.with_values(taken, where, notes + unsupported)


def _is_same(key: str, mine: Any, theirs: Any) -> bool:
    """Whether two values of a setting make the same of images: one colour may stand for each channel."""
    return mine == theirs or (key in COLOURS and set(mine) == set(theirs) == {mine[0]})


def _guess(model: ModelConfig, source: str) -> Preprocessing | None:
    """The preprocessing of timm's own weights for the model, unless its sizes are the user's."""
    sizes_given = bool(given_sizes(model))
    name, is_label = timm_base(model, sizes_given)
    if is_label and sizes_given:
        return None
    return of_timms_name(name, f"timm's {name} (MODEL.NAME; {source} does not say its own)")


def _with_differences(loaded: Loaded, theirs: dict[str, Any], where: str) -> Loaded:
    """Say which settings are kept that the weights have otherwise: `theirs`."""
    words = dict[str, str]()
    for key, value in theirs.items():
        mine = one_line(value_of(loaded.config, key))
        words[key] = f"{key} {mine} in place of {one_line(value)} ({loaded.sources[key]})"
    size = words.pop(IMAGE_SIZE, "")
    notes = [f"{size}, the size of {where}"] if size else []
    cost = "may cost accuracy, another mean and std up to 11 points"
    said = f"{', '.join(words.values())}: other preprocessing than that of {where} {cost}"
    if any(loaded.sources[key].kind is not Kind.RECIPE for key in words):
        loaded = loaded.with_warning(said)
    elif words:  # a recipe's for its own model
        notes.append(said)
    return loaded.with_values({}, where, notes)


def _without_other_bands(loaded: Loaded, theirs: dict[str, Any], where: str) -> Loaded:
    """Remove from `theirs` what is of images of other channels or bits; if it was to be taken, it is measured."""
    data = loaded.config.DATA
    channels = len(theirs.get(COLOURS[0], ()))
    as_many = channels <= 3 if data.is_plain else channels == data.IMAGE_CHANNELS
    if theirs.pop("DATA.BITS") != data.BITS or not as_many:
        for key in MEASURED:
            theirs.pop(key, None)
        opened = [key for key in COLOURS if loaded.is_default(key)]
        if opened:
            said = f"{' and '.join(opened)} auto: {where} has those of images of other channels or bits"
            return loaded.with_values(dict.fromkeys(opened, AUTO), "default (MODEL.PRETRAINED)", [said], Kind.DEFAULT)
    elif data.IMAGE_CHANNELS == 1:  # as the first convolution of the weights gets the sum over colours
        for key in COLOURS:
            if theirs.get(key):
                theirs[key] = (sum(theirs[key]) / len(theirs[key]),)
    return loaded


def _of_siblings(name: str, source: str, unnamed: bool) -> list[str]:
    """A note on weights that are, or if `unnamed` counts may be, another model's of timm's, with another mean and std.

    timm's tf_efficientnet_b0 and efficientnet_b0, for example, have weights of the same names and shapes.
    """
    own = of_timms_name(name, "")
    model, _, tag = name.partition(".")
    found = local_weights(source)
    named = _timm_name_of(found.file) if found else source
    if own is None:
        return []
    if named:
        of_named = named.partition(".")[0]
        if of_named == model or not _other_colours(named, own):
            return []
        need = f"need another mean and std than {name}'s, and may compute otherwise: -model {of_named}"
        return [f"MODEL.PRETRAINED {source}: weights of {named} {need}"]
    if tag or not unnamed:
        return []
    twin = model.removeprefix("tf_") if model.startswith("tf_") else f"tf_{model}"
    others = timm.list_pretrained(f"{model}.*") + timm.list_pretrained(f"{twin}.*")
    different = [one for one in others if _other_colours(one, own)]
    if not different:
        return []
    need = f"add -model {different[0]}, for another mean and std"
    return [f"If the weights are of {some_of(different, 2)}, {need}"]


def _other_colours(name: str, own: Preprocessing) -> bool:
    """Whether timm's weights of a name need another mean or std."""
    theirs = of_timms_name(name, "") or own
    return any(theirs.values.get(key) != own.values.get(key) for key in COLOURS)


def preprocessing_of(source: str) -> Preprocessing | None:
    """The preprocessing that MODEL.PRETRAINED (a run, a checkpoint, a file, or a timm name) itself says, or None."""
    found = local_weights(source)
    if found is None:
        return of_timms_name(source, f"timm's {source}")
    file = found.file
    meta = file.with_name(META)
    if meta.is_file():
        return _of_fields(unchecked_meta(file.parent).get("input"), meta)
    header = read_header(file).get("input")
    if header:
        return _of_fields(header, file)
    config = file.with_name(TIMMS_CONFIG)
    if config.is_file():
        return _of_fields(read_json(config).get("pretrained_cfg"), config)
    name = _timm_name_of(file)
    return of_timms_name(name, f"timm's {name} (recognised by the name of {file})") if name else None


def _timm_name_of(file: Path) -> str | None:
    return next((name for name in (file.stem, file.name.partition(".")[0]) if is_timm_name(name)), None)


def _of_fields(fields: Any, where: Path | str) -> Preprocessing | None:
    """From our meta.json, the header of weights that checkpoint.py or export.py wrote, or timm's description of its."""
    if not isinstance(fields, dict):
        return None
    size = fields.get("input_size")  # timm's
    if isinstance(size, list | tuple) and len(size) == 3:
        fields = {**fields, "image_size": size_of(size[1:])}
    if fields.get("crop") == "none":
        fields = {**fields, "crop_mode": "squash", "crop_pct": 1.0}
    known = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
    check_fields(Input, known, Path(where))
    if not known:
        return None
    values = {"DATA.BITS": fields.get("bits", 8)}
    for name, value in known.items():
        values[FIELDS[name]] = tuple(map(float, value)) if isinstance(value, list) else value
    return Preprocessing(values, str(where))


def of_timms_name(name: str, where: str) -> Preprocessing | None:
    cfg = timm_weights(name)
    return None if cfg is None else _of_fields(asdict(cfg), where)


def _in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {one_line(value)}" for key, value in values.items())
