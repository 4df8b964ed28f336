"""Finds conflicts between settings that are each valid alone, settings without effect, and values to warn about.

The simple rules of `fields.py` are written beside their settings. The rules here need a calculation; the rules for
growing images are in `words.py`.
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
    return (
        list(_broken_rules(config, errors=True))
        + list(_data(config))
        + list(_train(config))
        + list(_names_of_loss_and_metric(config))
    )


def _broken_rules(config: Config, errors: bool) -> Iterator[Problem]:
    """Yield the broken rules of `fields.py`, in words.

    errors: True for rules whose break is an error; False for rules by which a setting has no effect
    """
    value_by_key = partial(value_of, config)
    for key, field in settings().items():
        for rule in broken(rules_of(field), value_by_key(key), default_of(key), value_by_key):
            if rule.is_error == errors:
                from utils.config.words import rule_error, rule_note

                describe = rule_error if errors else rule_note
                yield key, describe(key, rule, value_by_key)


def _data(config: Config) -> Iterator[Problem]:
    """Yield conflicts about mean and std for another number of channels, and about pairs in the wrong order."""
    data = config.DATA
    channels = data.IMAGE_CHANNELS
    allowed_counts = "1" if channels == 1 else f"1 or {channels}"
    for key, values in (("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN), ("DATA.IMAGENET_STD", data.IMAGENET_STD)):
        if values == AUTO:
            continue
        # Grey images may have the mean of RGB images, if its numbers are equal.
        is_equal_for_grey = channels == 1 and len(set(values)) == 1
        if len(values) not in (1, channels) and not is_equal_for_grey:
            count = f"{one_line(values)} has {len(values)} numbers"
            yield key, f"{count}; DATA.IMAGE_CHANNELS {channels} needs {allowed_counts}, or auto"

    for key in ("DATA.CROP_SCALE", "DATA.CROP_RATIO", "TRAIN.CUTMIX_MINMAX", "DATA.RANGE"):
        pair = value_of(config, key)
        if pair in (None, AUTO):
            continue
        low, high = pair
        # Pixels of an empty range could not be scaled to 0..1; the other pairs may be equal.
        is_empty_range = key == "DATA.RANGE" and low == high
        if low > high or is_empty_range:
            yield key, f"{one_line(pair)} must be the smallest and the largest, in this order"


def _train(config: Config) -> Iterator[Problem]:
    """Yield conflicts about numbers of epochs, CutMix boxes without a pixel, and the schedule of image sizes."""
    # With NUM_EPOCHS auto, the number of epochs is not known yet: numbers are checked as for a run of one epoch.
    train = config.TRAIN.with_auto_epochs(1)
    if not config.EVAL:
        epochs = f"TRAIN.NUM_EPOCHS {config.TRAIN.NUM_EPOCHS}"  # as the user set it, perhaps auto
        if 0 < train.NUM_EPOCHS <= train.LAST_EPOCH:
            yield "TRAIN.LAST_EPOCH", f"{train.LAST_EPOCH} leaves no epoch of {epochs} to train"
        if train.NUM_EPOCHS > 0 and train.epochs_of_schedule <= 0:
            yield "TRAIN.COOLDOWN_EPOCHS", f"{train.COOLDOWN_EPOCHS} leaves no epoch of {epochs} for the schedule"

    # In the smallest images, the smallest and the largest side of CutMix boxes must differ by a pixel.
    if train.CUTMIX_MINMAX is not None and config.DATA.IMAGE_SIZE != AUTO:
        sizes = [config.DATA.IMAGE_SIZE]
        sizes += [size for _, size in train.SIZE_SCHEDULE]
        smallest_size = min(sizes, key=lambda size: min(sides(size)))
        shortest_side = min(sides(smallest_size))
        low, high = train.CUTMIX_MINMAX
        if int(shortest_side * low) == int(shortest_side * high):
            yield (
                "TRAIN.CUTMIX_MINMAX",
                f"{one_line(train.CUTMIX_MINMAX)} must be at least one pixel apart (in images of "
                f"{in_pixels(smallest_size)}), as in [0.2, 0.8]",
            )

    if train.SIZE_SCHEDULE and train.NUM_EPOCHS and not config.EVAL:
        from utils.config.words import size_problems

        for text in size_problems(config):
            yield "TRAIN.SIZE_SCHEDULE", text


def _names_of_loss_and_metric(config: Config) -> Iterator[Problem]:
    """Yield conflicts about the name of a loss that does not exist, or of a metric that this run does not measure."""
    loss = config.TRAIN.LOSS
    if config.TRAIN.own_loss and not config.USE:  # a loss that is not built in, and no file of the user's code
        yield "TRAIN.LOSS", f"{loss} is not {either(LOSSES)}.{nearest(loss, LOSSES)} One of your own needs -use FILE"

    best_by = config.SAVE_BEST_BY
    built_in = [name for name in config.task.deciding if name != KNN.name or config.measures_knn]
    measured = built_in + list(config.VALIDATE_METRICS)
    if best_by not in measured:
        advice = " It needs TRAIN.KNN." if best_by == KNN.name else nearest(best_by, measured)
        use = f"Use {either(built_in)}, or a name of VALIDATE_METRICS"
        yield "SAVE_BEST_BY", f"{best_by} is not measured {config.task.words}.{advice} {use}"


def notes(config: Config, given: Mapping[str, Entry]) -> Iterator[str]:
    """Yield lines for the log about settings that do not have the effect that one would expect.

    given: dotted key -> entry, of the settings that files, the command line or a resumed run give
    """
    train = config.TRAIN.with_auto_epochs(1)  # With NUM_EPOCHS auto, the warm-up is a fraction of one epoch.
    warmup = train.WARMUP_EPOCHS
    epochs = train.NUM_EPOCHS
    # The setting itself is not clipped: a resume may lengthen the run.
    if warmup > epochs > 0 and not config.EVAL:
        yield (
            f"TRAIN.WARMUP_EPOCHS {warmup:g} is more than TRAIN.NUM_EPOCHS {epochs}: clipped to {epochs}, so the "
            "learning rate rises until the end"
        )
    for key, note in _broken_rules(config, errors=False):
        if key not in given:
            continue
        # The config.yaml of a fine-tuned run names the weights that it began with. Whoever resumes it did not set them.
        is_of_resumed_run = key == "MODEL.PRETRAINED" and given[key].source.kind is Kind.RUN
        if not is_of_resumed_run:
            yield f"{given[key].source}: {note}"


def warnings(config: Config, sources: Mapping[str, Source]) -> Iterator[str]:
    """Yield warnings about settings that are allowed, but whose result the user may not expect.

    sources: dotted key -> where the setting comes from
    """
    if config.EVAL:
        return

    # Recipes scale the learning rate by the global batch; whoever types a rate may not know that.
    reference_batch = config.TRAIN.scale_reference  # None: rates are not scaled
    typed_rates = [
        f"{key} {one_line(value_of(config, key))} ({sources[key]})"
        for key in ("TRAIN.BASE_LR", "TRAIN.WARMUP_START_LR", "TRAIN.END_LR")
        if sources[key].is_typed and value_of(config, key)
    ]
    if reference_batch is not None and typed_rates and not sources[SCALE].is_typed:
        yield (
            f"{', '.join(typed_rates)}: multiplied by (global batch / {reference_batch:g}), because {SCALE} is "
            f"{reference_batch:g} ({sources[SCALE]}). Set {SCALE}=null to train at the given learning rate"
        )

    if config.DATA.IMAGENET_MEAN != AUTO and config.DATA.is_plain and max(config.DATA.IMAGENET_MEAN) > 1:
        mean = one_line(config.DATA.IMAGENET_MEAN)
        # A mean above 1 is one of pixels of 0..255.
        yield f"DATA.IMAGENET_MEAN {mean}: images are scaled to 0..1 before; divide mean and std by 255"

    for too_high in _too_high(config.TRAIN):
        key = f"TRAIN.{too_high.key}"
        limit = f"TRAIN.{too_high.limit}"
        high = f"{key} {one_line(value_of(config, key))} ({sources[key]})"
        low = f"{limit} {one_line(value_of(config, limit))} ({sources[limit]})"
        yield f"{high} is too high beside {low}, so {too_high.result}: set a lower {key}"


class _TooHigh(NamedTuple):
    """A setting of TRAIN that is too high beside another; both keys are without `TRAIN.`."""

    key: str
    limit: str
    """Key of the setting that `key` should be below."""
    result: str
    """What happens otherwise, as the end of a sentence."""


def _too_high(train: TrainConfig) -> Iterator[_TooHigh]:
    """Yield the learning rates and numbers of epochs that are too high beside others."""
    base_lr = train.BASE_LR
    epochs = 0 if train.NUM_EPOCHS == AUTO else train.NUM_EPOCHS
    schedule = train.LR_SCHEDULER
    decays_in_steps = "step" in schedule.NAME
    if base_lr != AUTO:
        if not decays_in_steps and base_lr < train.END_LR:
            yield _TooHigh(key="END_LR", limit="BASE_LR", result="the learning rate rises")
        if train.WARMUP_EPOCHS > 0 and base_lr < train.WARMUP_START_LR:
            yield _TooHigh(key="WARMUP_START_LR", limit="BASE_LR", result="the warm-up falls")

    if decays_in_steps:
        if schedule.NAME == "step":
            decay_key = "LR_SCHEDULER.DECAY_EPOCHS"
            first_decay = schedule.DECAY_EPOCHS
        else:
            decay_key = "LR_SCHEDULER.MILESTONES"
            first_decay = min(schedule.MILESTONES, default=0)
        if 0 < epochs <= first_decay:
            yield _TooHigh(decay_key, "NUM_EPOCHS", "the learning rate never decays")
        if 0 < first_decay < epochs and first_decay <= train.WARMUP_EPOCHS:
            yield _TooHigh("WARMUP_EPOCHS", decay_key, "the learning rate decays as soon as the warm-up ends")

    epochs_without_drop = train.TOKEN_DROP_TAIL if train.TOKEN_DROP else 0
    if 0 < epochs <= epochs_without_drop:
        yield _TooHigh("TOKEN_DROP_TAIL", "NUM_EPOCHS", "no token is dropped")
