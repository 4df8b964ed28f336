"""Conflicts between settings, each valid by itself, notes on settings without effect, and warnings.

Rules that no table can hold, because they calculate, are functions here; `fields.py` has the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from utils.config.data import DataConfig
from utils.config.fields import Rule, broken, rules_of
from utils.config.keys import allowed, choices, default_of, settings, value_of
from utils.config.kinds import AUTO, one_line
from utils.config.read import Entry
from utils.config.schema import ATTENTION, Config
from utils.config.train import TrainConfig
from utils.errors import either, nearest
from vitamp.metrics import KNN

Problem = tuple[str, str]
"""(the key to change, what is wrong with its value)"""
SCALE = "TRAIN.LINEAR_SCALED_LR"
LEARNING_RATES = ("TRAIN.BASE_LR", "TRAIN.WARMUP_START_LR", "TRAIN.END_LR")


def conflicts(config: Config) -> list[Problem]:
    """All conflicts, to be reported together."""
    read = partial(value_of, config)
    return [
        *((key, rule.error(key, read)) for key, rule in _broken_rules(config) if rule.is_error),
        *_data(config.DATA),
        *_model(config),
        *_train(config),
        *_best_by(config),
        *_shortcuts(config),
        *_speed(config),
    ]


def _broken_rules(config: Config) -> Iterator[tuple[str, Rule]]:
    read = partial(value_of, config)
    for key, field in settings().items():
        if rules := rules_of(field):
            yield from ((key, rule) for rule in broken(rules, read(key), default_of(key), read))


def _data(data: DataConfig) -> Iterator[Problem]:
    needed = "1" if data.IMAGE_CHANNELS == 1 else f"1 or {data.IMAGE_CHANNELS}"
    for key, values in (("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN), ("DATA.IMAGENET_STD", data.IMAGENET_STD)):
        equal_for_grey = data.IMAGE_CHANNELS == 1 and len(set(values)) == 1
        if len(values) not in (1, data.IMAGE_CHANNELS) and not equal_for_grey:
            count = f"{one_line(values)} has {len(values)} numbers"
            yield key, f"{count}; DATA.IMAGE_CHANNELS {data.IMAGE_CHANNELS} needs {needed}"
    if any(value <= 0 for value in data.IMAGENET_STD):
        yield "DATA.IMAGENET_STD", f"{one_line(data.IMAGENET_STD)} must be above 0; images are divided by it"
    low, high = data.CROP_SCALE
    if not 0 < low <= high <= 1:
        rule = "must be the smallest and the largest fraction, 0 < smallest <= largest <= 1"
        yield "DATA.CROP_SCALE", f"{one_line(data.CROP_SCALE)} {rule}"
    low, high = data.CROP_RATIO
    if not 0 < low <= high:
        rule = "must be the smallest and the largest ratio, 0 < smallest <= largest"
        yield "DATA.CROP_RATIO", f"{one_line(data.CROP_RATIO)} {rule}"


def _model(config: Config) -> Iterator[Problem]:
    model, size = config.MODEL, config.DATA.IMAGE_SIZE
    if model.PATCH_SIZE and AUTO not in (model.PATCH_SIZE, size) and size % model.PATCH_SIZE:
        below = size - size % model.PATCH_SIZE
        near = either([below, below + model.PATCH_SIZE] if below else [model.PATCH_SIZE])
        yield "DATA.IMAGE_SIZE", f"{size} is not divisible by MODEL.PATCH_SIZE {model.PATCH_SIZE}; nearest: {near}"
    heads, width = model.NUM_HEADS, model.EMBED_DIM
    if isinstance(heads, int) and width and width % heads:
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        near = either(sorted(sorted(divisors, key=lambda n: abs(n - heads))[:2]))
        yield "MODEL.NUM_HEADS", f"{heads} does not divide MODEL.EMBED_DIM {width}; nearest: {near}"
    if model.UNFREEZE_EPOCH is not None and not config.EVAL:
        yield from _unfreezing(model.UNFREEZE_EPOCH, config.TRAIN.NUM_EPOCHS)


def _best_by(config: Config) -> Iterator[Problem]:
    """A metric that does not exist, or that this run does not measure."""
    key, by, kind = "SAVE_BEST_BY", config.SAVE_BEST_BY, config.task
    if by in config.VALIDATE_METRICS:
        return
    if by not in choices(key):
        known = f"expected {either(kind.deciding)}, got {by}.{nearest(by, [*choices(key), *config.VALIDATE_METRICS])}"
        yield key, f"{known} A metric of your own must also be in VALIDATE_METRICS"
    elif by not in kind.deciding:
        yield key, f"{by} is not measured {kind.words}; leave SAVE_BEST_BY out, or use {either(kind.deciding)}"
    elif by == KNN.name and not config.measures_knn:
        yield key, f"{by} needs images with labels; set TRAIN.KNN too"


def _unfreezing(epoch: int, epochs: int) -> Iterator[Problem]:
    key = "MODEL.UNFREEZE_EPOCH"
    if epoch == 1:
        yield key, "1 leaves no epoch in which MODEL.FREEZE has an effect; give 2 or more, or leave both out"
    if epoch > epochs:
        near = f"give {epochs} or less, or null" if epochs > 1 else "give null"
        yield key, f"{epoch} is after the last epoch, TRAIN.NUM_EPOCHS {epochs}; {near}"


def _train(config: Config) -> Iterator[Problem]:
    train = config.TRAIN
    if train.LAST_EPOCH >= train.NUM_EPOCHS and not config.EVAL:
        yield "TRAIN.LAST_EPOCH", f"{train.LAST_EPOCH} leaves no epoch of TRAIN.NUM_EPOCHS {train.NUM_EPOCHS} to train"
    if train.own_loss and not config.USE:
        near = nearest(train.LOSS, choices("TRAIN.LOSS"))
        yield (
            "TRAIN.LOSS",
            f"expected {allowed('TRAIN.LOSS')}, got {train.LOSS}.{near} A loss of your own needs -use FILE",
        )
    yield from _bce(config)
    yield from _cutmix(train, config.DATA.IMAGE_SIZE)
    betas = train.OPTIMIZER.BETAS
    if betas is not None and not all(0 <= beta < 1 for beta in betas):
        yield "TRAIN.OPTIMIZER.BETAS", f"{one_line(betas)} must both be >= 0 and < 1"
    limit = config.MAX_TIME
    if limit is not None and (not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", limit) or not limit.strip("0:")):
        yield "MAX_TIME", f"{limit} is not a time above 0 in the form HH:MM:SS, such as 11:30:00"


def _cutmix(train: TrainConfig, size: int) -> Iterator[Problem]:
    if train.CUTMIX_MINMAX is None:
        return
    low, high = train.CUTMIX_MINMAX
    if not 0 <= low < high <= 1 or int(size * low) >= int(size * high):
        yield (
            "TRAIN.CUTMIX_MINMAX",
            f"{one_line(train.CUTMIX_MINMAX)} must be the smallest and the largest side of a box, 0 <= smallest < "
            f"largest <= 1, at least one pixel apart (DATA.IMAGE_SIZE {size}), as in [0.2, 0.8]",
        )


def _bce(config: Config) -> Iterator[Problem]:
    """A threshold that makes all targets equal, because smoothing comes before it."""
    train = config.TRAIN
    if train.LOSS == "ce" or train.BCE_TARGET_THRESH is None or not isinstance(config.MODEL.NUM_CLASSES, int):
        return
    low, high = _smoothed(config)
    if not low <= train.BCE_TARGET_THRESH < high:
        yield (
            "TRAIN.BCE_TARGET_THRESH",
            f"{train.BCE_TARGET_THRESH:g} makes all targets equal: TRAIN.SMOOTHING {train.SMOOTHING:g} turns 0 and "
            f"1 into {low:.4g} and {high:.4g}, on the same side of the threshold; set SMOOTHING=0, or a threshold "
            "between the two",
        )


def _smoothed(config: Config) -> tuple[float, float]:
    """Targets that smoothing makes of 0 and 1; without a number of classes, for very many."""
    classes = 2 if config.DATA.MULTI_LABEL else config.MODEL.NUM_CLASSES
    low = config.TRAIN.SMOOTHING / classes if isinstance(classes, int) else 0.0
    return low, 1 - config.TRAIN.SMOOTHING + low


def _shortcuts(config: Config) -> Iterator[Problem]:
    """Conflicts of token dropping and of growing images."""
    train, full, patch = config.TRAIN, config.DATA.IMAGE_SIZE, config.MODEL.PATCH_SIZE
    if train.TOKEN_DROP and train.TOKEN_DROP_TAIL >= train.NUM_EPOCHS:
        tail = f"{train.TOKEN_DROP_TAIL} leaves no epoch of TRAIN.NUM_EPOCHS {train.NUM_EPOCHS} for TRAIN.TOKEN_DROP"
        yield "TRAIN.TOKEN_DROP_TAIL", f"{tail}; give a smaller number"
    steps = train.SIZE_SCHEDULE
    if not steps:
        return
    starts = [train.epochs_before(start) for start, _ in steps]
    if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)) or starts[-1] >= train.NUM_EPOCHS:
        yield (
            "TRAIN.SIZE_SCHEDULE",
            f"{one_line(steps)}: the first start must be 0, and each later start above the previous one and below "
            f"TRAIN.NUM_EPOCHS {train.NUM_EPOCHS}, as in [[0, 160], [0.75, 224]]; a start below 1 is a fraction of the "
            "run and is converted to epochs before this check",
        )
    if full != AUTO and steps[-1][1] != full:
        yield (
            "TRAIN.SIZE_SCHEDULE",
            f"{one_line(steps)} ends with size {steps[-1][1]}; it must end with DATA.IMAGE_SIZE {full}, the size of "
            "validation",
        )
    if patch and patch != AUTO and (odd := sorted({size for _, size in steps if size % patch and size != full})):
        yield "TRAIN.SIZE_SCHEDULE", f"{one_line(tuple(odd))}: not divisible by MODEL.PATCH_SIZE {patch}"


def _speed(config: Config) -> Iterator[Problem]:
    words = config.SPEED
    twice = {"auto", "plain"}.issubset(words) or any(f"-{word[1:]}" in words for word in words if word[0] == "+")
    if twice or sum(f"+{kind}" in words for kind in ATTENTION) > 1:
        yield (
            "SPEED",
            f"{one_line(words)} contradicts itself: give auto or plain, each name with + or -, and + for one kernel of "
            f"attention ({', '.join(ATTENTION)})",
        )


def notes(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    """Lines for the log about settings without the expected effect. `given`: keys that were set -> where."""
    yield from _schedule_notes(config.TRAIN)
    for key, rule in _broken_rules(config):
        if key in given and not rule.is_error:
            yield f"{given[key]}: {rule.note(key, partial(value_of, config))}"
    yield from _bce_notes(config)


def _bce_notes(config: Config) -> Iterator[str]:
    train, equal_parts = config.TRAIN, sum(_smoothed(config)) / 2
    threshold = train.BCE_TARGET_THRESH
    if train.LOSS == "bce" and threshold is not None and equal_parts <= threshold and train.mixes:
        yield (
            f"TRAIN.BCE_TARGET_THRESH {threshold:g} with mixup or CutMix: an image mixed of two equal "
            f"parts has no positive class; with a threshold below {equal_parts:.4g}, every mixed image has one"
        )


def _schedule_notes(train: TrainConfig) -> Iterator[str]:
    """The default warm-up is longer than a short run. It stays as it is: a resume may lengthen the run."""
    if train.WARMUP_EPOCHS > train.NUM_EPOCHS:
        yield (
            f"TRAIN.WARMUP_EPOCHS {train.WARMUP_EPOCHS:g} is more than TRAIN.NUM_EPOCHS {train.NUM_EPOCHS}: "
            f"clipped to {train.NUM_EPOCHS}, so the learning rate rises until the end"
        )
    elif train.LR_SCHEDULER.NAME == "wsd" and train.epochs_before_decay == train.WARMUP_EPOCHS > 0:
        yield (
            f"TRAIN.WARMUP_EPOCHS {train.WARMUP_EPOCHS:g} leaves {train.NUM_EPOCHS - train.WARMUP_EPOCHS:g} of "
            f"TRAIN.NUM_EPOCHS {train.NUM_EPOCHS} for the decay of wsd, and none for a constant learning rate"
        )
    if train.LR_SCHEDULER.NAME in ("wsd", "cosine", "warmupcosine") and train.END_LR > train.BASE_LR:
        yield f"TRAIN.END_LR {train.END_LR:g} is above TRAIN.BASE_LR {train.BASE_LR:g}: the learning rate will rise"


def warnings(config: Config, layers: Sequence[Mapping[str, Entry]], sources: Mapping[str, str]) -> Iterator[str]:
    """`layers`: the settings of BASE files, file and command line; the last one wins. `sources`: key -> where."""
    yield from _scaled_learning_rates(config, layers, sources)
    if config.DATA.SAMPLER == "balanced" and config.TRAIN.CLASS_WEIGHTS is not None:
        yield (
            f"DATA.SAMPLER balanced draws all classes equally often, and TRAIN.CLASS_WEIGHTS "
            f"{config.TRAIN.CLASS_WEIGHTS} weighs their images besides: rare classes may count too much. Use one of "
            "the two."
        )


def _scaled_learning_rates(
    config: Config, layers: Sequence[Mapping[str, Entry]], sources: Mapping[str, str]
) -> Iterator[str]:
    """A warning about learning rates that LINEAR_SCALED_LR multiplies though their setter may not expect it.

    That is where a rate is set in a later layer than the scale: on the command line over a file, in a file over its
    BASE.
    """
    reference = config.TRAIN.scale_reference
    if reference is None:
        return

    def layer_of(key: str) -> int:
        return max((number for number, layer in enumerate(layers) if key in layer), default=-1)

    later = [key for key in LEARNING_RATES if layer_of(key) > layer_of(SCALE) and value_of(config, key)]
    if later:
        rates = ", ".join(f"{key} {one_line(value_of(config, key))} ({sources[key]})" for key in later)
        yield (
            f"{rates}: multiplied by (global batch / {reference:g}), because {SCALE} is {reference:g} "
            f"({sources[SCALE]}). Set {SCALE}=null to train at the given learning rate"
        )
