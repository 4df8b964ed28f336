"""What no single key can tell: settings that must fit together, and features that are not built yet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from utils.config.data import DataConfig
from utils.config.keys import default_of, settings, value_of
from utils.config.kinds import AUTO
from utils.config.model_checks import Problem, misfits_of_model, remarks_on_model
from utils.config.schema import Config

POLICIES = ("TRAIN.RAND_AUGMENT", "TRAIN.AUTO_AUGMENT", "TRAIN.TRIVIAL_AUGMENT", "TRAIN.THREE_AUGMENT")
"""Each changes an image in its own way, and they were never meant to act together."""
OUTDOES = {
    "TRAIN.RAND_AUGMENT": ("TRAIN.AUTO_AUGMENT", "TRAIN.COLOR_JITTER"),
    "TRAIN.AUTO_AUGMENT": ("TRAIN.COLOR_JITTER",),
    "TRAIN.TRIVIAL_AUGMENT": ("TRAIN.COLOR_JITTER",),
}

# These act without -amp too.
AMP_ALONE = {"AMP.ENABLED", "AMP.TF32"}


def misfits(config: Config) -> list[Problem]:
    """Everything that does not fit together, so that all of it can be reported at once."""
    return [
        *_data(config.DATA),
        *misfits_of_model(config),
        *_train(config),
        *_shortcuts(config),
        *_augmentation(config),
        *_dist(config),
        *_run(config),
    ]


def _data(data: DataConfig) -> Iterator[Problem]:
    needed = "1" if data.IMAGE_CHANNELS == 1 else f"1 or {data.IMAGE_CHANNELS}"
    for key, values in (("DATA.IMAGENET_MEAN", data.IMAGENET_MEAN), ("DATA.IMAGENET_STD", data.IMAGENET_STD)):
        grey_alike = data.IMAGE_CHANNELS == 1 and len(set(values)) == 1
        if len(values) not in (1, data.IMAGE_CHANNELS) and not grey_alike:
            yield (
                key,
                f"{_shown(values)} has {len(values)} numbers; DATA.IMAGE_CHANNELS {data.IMAGE_CHANNELS} needs {needed}",
            )
    if any(value <= 0 for value in data.IMAGENET_STD):
        yield "DATA.IMAGENET_STD", f"{_shown(data.IMAGENET_STD)} must be above 0; images are divided by it"
    low, high = data.CROP_SCALE
    if not 0 < low <= high <= 1:
        yield (
            "DATA.CROP_SCALE",
            f"{_shown(data.CROP_SCALE)} must be the least and the greatest share, 0 < least <= greatest <= 1",
        )
    low, high = data.CROP_RATIO
    if not 0 < low <= high:
        yield (
            "DATA.CROP_RATIO",
            f"{_shown(data.CROP_RATIO)} must be the least and the greatest ratio, 0 < least <= greatest",
        )


def _train(config: Config) -> Iterator[Problem]:
    train = config.TRAIN
    if train.LAST_EPOCH >= train.NUM_EPOCHS and not config.EVAL:
        yield "TRAIN.LAST_EPOCH", f"{train.LAST_EPOCH} leaves nothing of TRAIN.NUM_EPOCHS {train.NUM_EPOCHS} to train"
    betas = train.OPTIMIZER.BETAS
    if betas is not None and not all(0 <= beta < 1 for beta in betas):
        yield "TRAIN.OPTIMIZER.BETAS", f"{_shown(betas)} must both be >= 0 and < 1"


def _shortcuts(config: Config) -> Iterator[Problem]:
    """What makes training cheaper by showing the model less."""
    train, full, patch = config.TRAIN, config.DATA.IMAGE_SIZE, config.MODEL.PATCH_SIZE
    if train.TOKEN_DROP and train.TOKEN_DROP_TAIL >= train.NUM_EPOCHS:
        yield (
            "TRAIN.TOKEN_DROP_TAIL",
            f"{train.TOKEN_DROP_TAIL} leaves TRAIN.TOKEN_DROP none of TRAIN.NUM_EPOCHS {train.NUM_EPOCHS}; give less",
        )
    steps = train.SIZE_SCHEDULE
    if not steps:
        return
    starts = [train.epochs_before(start) for start, _ in steps]
    if starts[0] != 0 or any(a >= b for a, b in pairwise(starts)) or starts[-1] >= train.NUM_EPOCHS:
        yield (
            "TRAIN.SIZE_SCHEDULE",
            f"{_shown(steps)} must begin at 0, each start after the one before and before TRAIN.NUM_EPOCHS "
            f"{train.NUM_EPOCHS}, as in [[0, 160], [0.75, 224]]",
        )
    if steps[-1][1] != full:
        yield (
            "TRAIN.SIZE_SCHEDULE",
            f"{_shown(steps)} ends with {steps[-1][1]}; it must end with DATA.IMAGE_SIZE {full}, the size of "
            "validation",
        )
    if patch and (odd := sorted({size for _, size in steps if size % patch and size != full})):
        yield "TRAIN.SIZE_SCHEDULE", f"{_shown(tuple(odd))}: not divisible by MODEL.PATCH_SIZE {patch}"


def _augmentation(config: Config) -> Iterator[Problem]:
    train, data = config.TRAIN, config.DATA
    on = [key for key in POLICIES if value_of(config, key)]
    if len(on) > 1 and set(on) != {"TRAIN.RAND_AUGMENT", "TRAIN.AUTO_AUGMENT"}:
        yield on[-1], f"true, and so {'are' if len(on) > 2 else 'is'} {' and '.join(on[:-1])}; only one of them can act"
    if train.mixes and data.BATCH_SIZE == 1 and not config.EVAL:
        yield "DATA.BATCH_SIZE", "1 leaves mixup and cutmix nothing to mix an image with; 2 or more"
    if train.CUTMIX_MINMAX is not None:
        low, high = train.CUTMIX_MINMAX
        if not 0 <= low < high <= 1 or int(data.IMAGE_SIZE * low) >= int(data.IMAGE_SIZE * high):
            yield (
                "TRAIN.CUTMIX_MINMAX",
                f"{_shown(train.CUTMIX_MINMAX)} must be the least and the greatest side of a box, 0 <= least < "
                f"greatest <= 1, a pixel or more apart (DATA.IMAGE_SIZE {data.IMAGE_SIZE}), as in [0.2, 0.8]",
            )


def _dist(config: Config) -> Iterator[Problem]:
    dist = config.DIST
    by_hand = {"HOST": dist.HOST, "PORT": dist.PORT, "RANK": dist.RANK, "WORLD_SIZE": dist.WORLD_SIZE}
    missing = [name for name, value in by_hand.items() if value is None]
    ranks_are_given = dist.RANK is not None or dist.WORLD_SIZE is not None  # else a launcher may know them
    if missing and ranks_are_given:
        given = [name for name in by_hand if name not in missing]
        flags = " ".join(f"-{name.lower()}" for name in missing)
        yield f"DIST.{given[0]}", f"-host, -port, -rank and -world_size go together; missing: {flags}"
    if dist.RANK is not None and dist.WORLD_SIZE is not None and dist.RANK >= dist.WORLD_SIZE:
        yield "DIST.RANK", f"{dist.RANK} is not below DIST.WORLD_SIZE {dist.WORLD_SIZE}; ranks count from 0"
    if dist.HSDP and dist.STRATEGY != "fsdp":
        yield "DIST.HSDP", "true says how fsdp deals out the weights; set DIST.STRATEGY=fsdp as well, or leave it out"
    if dist.STATIC_GRAPH and config.TRAIN.ACCUM_ITER > 1:
        yield "DIST.STATIC_GRAPH", "true works only without accumulation; leave it out, or set TRAIN.ACCUM_ITER=1"
    yield from _without_ddp(config)
    if dist.STRATEGY == "fsdp":
        yield from _fsdp(config)


def _without_ddp(config: Config) -> Iterator[Problem]:
    """Settings of DDP, where another exchanges the gradients."""
    dist, amp = config.DIST, config.AMP
    if dist.STRATEGY == "fsdp":
        why = "with DIST.STRATEGY fsdp, which exchanges gradients in its own way"
    elif amp.ENABLED and amp.LEVEL in ("O2", "NAIVE"):
        why = f"at AMP.LEVEL {amp.LEVEL}, where the masters' gradients are summed up once an update, in fp32"
    else:
        return
    for key in ("STATIC_GRAPH", "BF16_GRADIENTS"):
        if getattr(dist, key):
            yield f"DIST.{key}", f"true has no place {why}; leave it out"


def _fsdp(config: Config) -> Iterator[Problem]:
    amp = config.AMP
    if config.DEVICE == "mps":
        yield "DIST.STRATEGY", "fsdp needs several devices; with DEVICE mps there is one"
    if config.DATA.BATCH_SIZE == AUTO:
        yield "DATA.BATCH_SIZE", "auto does not try with DIST.STRATEGY fsdp, whose ranks compute in step; give a number"
    if config.TRAIN.MODEL_EMA_FORCE_CPU:
        yield (
            "TRAIN.MODEL_EMA_FORCE_CPU",
            "true, but with DIST.STRATEGY fsdp a device holds but its part; set it to false",
        )
    if not amp.ENABLED:
        return
    if amp.DTYPE == "fp8":
        yield "AMP.DTYPE", "fp8 does not work with DIST.STRATEGY fsdp; use bf16 or fp16, or DIST.STRATEGY=ddp"
    if amp.LEVEL == "O3":
        yield "AMP.LEVEL", "O3 does not work with DIST.STRATEGY fsdp; use O1, O2 or NAIVE, whose fp32 masters it shards"
    if amp.AUTO_FP32:
        yield (
            "AMP.AUTO_FP32",
            "true, but with DIST.STRATEGY fsdp no skipped update is replayed to see which module overflowed; name the "
            "modules by AMP.FP32_MODULES",
        )
    if amp.LEVEL in ("O2", "NAIVE") and not amp.EVAL:
        yield (
            "AMP.EVAL",
            f"false asks for validation in fp32, but with DIST.STRATEGY fsdp AMP.LEVEL {amp.LEVEL} gathers weights in "
            "half precision only; leave it true, or use O1",
        )


def _run(config: Config) -> Iterator[Problem]:
    limit = config.MAX_TIME
    if limit is not None and (not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", limit) or not limit.strip("0:")):
        yield "MAX_TIME", f"{limit} is not a time as HH:MM:SS, such as 11:30:00"


def remarks(config: Config, given: Mapping[str, str]) -> list[str]:
    """What the log should say about settings that were given (key -> where)."""
    notes = [*_warmup(config)]
    for key, field in settings().items():
        why = _extra(field.json_schema_extra).get("accepted_because")
        if why and key in given and value_of(config, key) != default_of(key):
            notes.append(f"{given[key]}: {key} is accepted and without effect: {why}")
    notes += _outdone(config, given)
    idle = [key for key in given if key.startswith("AMP.") and key not in AMP_ALONE]
    if idle and not config.AMP.ENABLED and any(value_of(config, key) != default_of(key) for key in idle):
        notes.append(f"AMP is off (-amp turns it on), so these have no effect: {', '.join(sorted(idle))}")
    notes += remarks_on_model(config, given)
    return notes


def _warmup(config: Config) -> Iterator[str]:
    """The default is longer than a short run. The setting stays as it is: a resume may lengthen the run."""
    train = config.TRAIN
    if train.WARMUP_EPOCHS > train.NUM_EPOCHS:
        yield (
            f"TRAIN.WARMUP_EPOCHS {train.WARMUP_EPOCHS:g} is more than TRAIN.NUM_EPOCHS {train.NUM_EPOCHS}: "
            f"clipped to {train.NUM_EPOCHS}, the learning rate rises to the end"
        )


def _outdone(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    """As in PaddleViT and timm: RandAugment before AutoAugment, and colour jitter only where no policy is on."""
    for policy, others in OUTDOES.items():
        if value_of(config, policy):
            for key in others:
                if key in given and value_of(config, key):
                    yield f"{given[key]}: {key} does not act beside {policy}"
            return


def _extra(extra: Any) -> dict[str, Any]:
    return extra if isinstance(extra, dict) else {}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
