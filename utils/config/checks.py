"""Conflicts between settings, each valid by itself, notes on settings without effect, and warnings.

Rules that no table can hold, because they calculate, are here (of growing images: `words.py`); `fields.py` has the
others.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from utils.config.fields import broken, rules_of
from utils.config.keys import default_of, settings, value_of
from utils.config.kinds import AUTO, one_line
from utils.config.read import Entry, Kind, Source
from utils.config.schema import Config
from utils.config.train import LOSSES, TrainConfig
from utils.errors import either, nearest
from vitamp.metrics import KNN
from vitamp.sizes import in_pixels, sides

Problem = tuple[str, str]
"""(the key to change, what is wrong with its value)"""
SCALE = "TRAIN.LINEAR_SCALED_LR"


def conflicts(config: Config) -> list[Problem]:
    """All conflicts, to be reported together."""
    return list(_broken_rules(config, errors=True)) + list(_data(config)) + list(_train(config)) + list(_names(config))


def _broken_rules(config: Config, errors: bool) -> Iterator[Problem]:
    """The rules whose breaking is an error, or those by which a setting has no effect."""
    read = partial(value_of, config)
    for key, field in settings().items():
        for rule in broken(rules_of(field), read(key), default_of(key), read):
            if rule.is_error == errors:
                from utils.config.words import rule_error, rule_note

                in_words = rule_error if errors else rule_note
                yield key, in_words(key, rule, read)


def _data(config: Config) -> Iterator[Problem]:
    data = config.DATA
    needed = "1" if data.IMAGE_CHANNELS == 1 else f"1 or {data.IMAGE_CHANNELS}"
    for key, values in (("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN), ("DATA.IMAGENET_STD", data.IMAGENET_STD)):
        if values == AUTO:
            continue
        equal_for_grey = data.IMAGE_CHANNELS == 1 and len(set(values)) == 1
        if len(values) not in (1, data.IMAGE_CHANNELS) and not equal_for_grey:
            count = f"{one_line(values)} has {len(values)} numbers"
            yield key, f"{count}; DATA.IMAGE_CHANNELS {data.IMAGE_CHANNELS} needs {needed}, or auto"
    for key in ("DATA.CROP_SCALE", "DATA.CROP_RATIO", "TRAIN.CUTMIX_MINMAX", "DATA.RANGE"):
        pair = value_of(config, key)
        if pair not in (None, AUTO) and (pair[0] > pair[1] or (key == "DATA.RANGE" and pair[0] == pair[1])):
            yield key, f"{one_line(pair)} must be the smallest and the largest, in this order"


def _train(config: Config) -> Iterator[Problem]:
    train = config.TRAIN.spanning(1)
    if not config.EVAL:
        epochs = f"TRAIN.NUM_EPOCHS {config.TRAIN.NUM_EPOCHS}"
        if 0 < train.NUM_EPOCHS <= train.LAST_EPOCH:
            yield "TRAIN.LAST_EPOCH", f"{train.LAST_EPOCH} leaves no epoch of {epochs} to train"
        if train.NUM_EPOCHS > 0 >= train.epochs_of_schedule:
            yield "TRAIN.COOLDOWN_EPOCHS", f"{train.COOLDOWN_EPOCHS} leaves no epoch of {epochs} for the schedule"
    if train.CUTMIX_MINMAX is not None and config.DATA.IMAGE_SIZE != AUTO:
        sizes = [config.DATA.IMAGE_SIZE]
        sizes += [size for _, size in train.SIZE_SCHEDULE]
        smallest = min(sizes, key=lambda size: min(sides(size)))
        least = min(sides(smallest))
        low, high = train.CUTMIX_MINMAX
        if int(least * low) == int(least * high):
            text = f"{one_line(train.CUTMIX_MINMAX)} must be at least one pixel apart"
            yield "TRAIN.CUTMIX_MINMAX", f"{text} (in images of {in_pixels(smallest)}), as in [0.2, 0.8]"
    if train.SIZE_SCHEDULE and train.NUM_EPOCHS and not config.EVAL:
        from utils.config.words import size_problems

        for text in size_problems(config):
            yield "TRAIN.SIZE_SCHEDULE", text


def _names(config: Config) -> Iterator[Problem]:
    """A loss that does not exist, or a metric that this run does not measure."""
    loss = config.TRAIN.LOSS
    if config.TRAIN.own_loss and not config.USE:
        yield "TRAIN.LOSS", f"{loss} is not {either(LOSSES)}.{nearest(loss, LOSSES)} One of your own needs -use FILE"
    by = config.SAVE_BEST_BY
    own = list(config.VALIDATE_METRICS)
    measured = [name for name in config.task.deciding if name != KNN.name or config.measures_knn]
    if by not in measured + own:
        other = " It needs TRAIN.KNN." if by == KNN.name else nearest(by, measured + own)
        use = f"Use {either(measured)}, or a name of VALIDATE_METRICS"
        yield "SAVE_BEST_BY", f"{by} is not measured {config.task.words}.{other} {use}"


def notes(config: Config, given: Mapping[str, Entry]) -> Iterator[str]:
    """Lines for the log about settings without the expected effect. `given`: keys that were set -> where."""
    span = config.TRAIN.spanning(1)
    warmup = span.WARMUP_EPOCHS
    epochs = span.NUM_EPOCHS
    if warmup > epochs > 0 and not config.EVAL:  # it stays as it is: a resume may lengthen the run
        yield (
            f"TRAIN.WARMUP_EPOCHS {warmup:g} is more than TRAIN.NUM_EPOCHS {epochs}: clipped to {epochs}, so the "
            "learning rate rises until the end"
        )
    for key, note in _broken_rules(config, errors=False):
        # A fine-tuned run keeps what it began with; whoever resumes it has set nothing.
        if key in given and not (key == "MODEL.PRETRAINED" and given[key].source.kind is Kind.RUN):
            yield f"{given[key].source}: {note}"


def warnings(config: Config, sources: Mapping[str, Source]) -> Iterator[str]:
    """Rates and numbers of epochs with results that whoever gives some may not expect. `sources`: key -> where."""
    if config.EVAL:
        return
    reference = config.TRAIN.scale_reference
    rates = [
        f"{key} {one_line(value_of(config, key))} ({sources[key]})"
        for key in ("TRAIN.BASE_LR", "TRAIN.WARMUP_START_LR", "TRAIN.END_LR")
        if sources[key].is_typed and value_of(config, key)
    ]
    if reference is not None and rates and not sources[SCALE].is_typed:
        yield (
            f"{', '.join(rates)}: multiplied by (global batch / {reference:g}), because {SCALE} is {reference:g} "
            f"({sources[SCALE]}). Set {SCALE}=null to train at the given learning rate"
        )
    if config.DATA.IMAGENET_MEAN != AUTO and config.DATA.is_plain and max(config.DATA.IMAGENET_MEAN) > 1:
        mean = one_line(config.DATA.IMAGENET_MEAN)
        yield f"DATA.IMAGENET_MEAN {mean}: images are scaled to 0..1 before; divide mean and std by 255"
    for odd in _too_high(config.TRAIN):
        key = f"TRAIN.{odd.key}"
        limit = f"TRAIN.{odd.limit}"
        high = f"{key} {one_line(value_of(config, key))} ({sources[key]})"
        low = f"{limit} {one_line(value_of(config, limit))} ({sources[limit]})"
        yield f"{high} is too high beside {low}, so {odd.result}: set a lower {key}"


class _TooHigh(NamedTuple):
    """A setting of TRAIN that is too high beside another."""

    key: str
    limit: str
    result: str


def _too_high(train: TrainConfig) -> Iterator[_TooHigh]:
    base = train.BASE_LR
    epochs = 0 if train.NUM_EPOCHS == AUTO else train.NUM_EPOCHS
    shape = train.LR_SCHEDULER
    decays_in_steps = "step" in shape.NAME
    if base != AUTO:
        if not decays_in_steps and base < train.END_LR:
            yield _TooHigh("END_LR", "BASE_LR", "the learning rate rises")
        if train.WARMUP_EPOCHS > 0 and base < train.WARMUP_START_LR:
            yield _TooHigh("WARMUP_START_LR", "BASE_LR", "the warm-up falls")
    if decays_in_steps:
        if shape.NAME == "step":
            decay = "LR_SCHEDULER.DECAY_EPOCHS"
            first = shape.DECAY_EPOCHS
        else:
            decay = "LR_SCHEDULER.MILESTONES"
            first = min(shape.MILESTONES, default=0)
        if 0 < epochs <= first:
            yield _TooHigh(decay, "NUM_EPOCHS", "the learning rate never decays")
        if 0 < first < epochs and first <= train.WARMUP_EPOCHS:
            yield _TooHigh("WARMUP_EPOCHS", decay, "the learning rate decays as soon as the warm-up ends")
    tail = train.TOKEN_DROP_TAIL if train.TOKEN_DROP else 0
    if 0 < epochs <= tail:
        yield _TooHigh("TOKEN_DROP_TAIL", "NUM_EPOCHS", "no token is dropped")
