"""Conflicts between settings, each valid by itself, and notes on settings without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from utils.config.data import DataConfig
from utils.config.fields import why_without_effect
from utils.config.keys import default_of, settings, value_of
from utils.config.kinds import AUTO
from utils.config.schema import Config
from utils.config.train import TrainConfig
from utils.config.write import one_line
from utils.errors import either

Problem = tuple[str, str]
"""(the key to change, what is wrong with its value)"""
POLICIES = ("TRAIN.RAND_AUGMENT", "TRAIN.AUTO_AUGMENT", "TRAIN.TRIVIAL_AUGMENT", "TRAIN.THREE_AUGMENT")
"""Augmentation policies that were never meant to be combined."""
OVERRIDDEN_BY = {
    "TRAIN.RAND_AUGMENT": ("TRAIN.AUTO_AUGMENT", "TRAIN.COLOR_JITTER"),
    "TRAIN.AUTO_AUGMENT": ("TRAIN.COLOR_JITTER",),
    "TRAIN.TRIVIAL_AUGMENT": ("TRAIN.COLOR_JITTER",),
}
EFFECTIVE_WITHOUT_AMP = {"AMP.ENABLED", "AMP.TF32"}


def conflicts(config: Config) -> list[Problem]:
    """All conflicts, to be reported together."""
    return [
        *_data(config.DATA, config.EVAL),
        *_model(config),
        *_train(config),
        *_labels(config),
        *_shortcuts(config),
        *_augmentation(config),
        *_dist(config),
        *_run(config),
    ]


def _data(data: DataConfig, evaluates: bool) -> Iterator[Problem]:
    if data.PART not in (AUTO, "val") and not evaluates:
        yield "DATA.PART", f"{data.PART} is for -eval; training always validates on the validation split"
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
    if model.PATCH_SIZE and size % model.PATCH_SIZE:
        below = size - size % model.PATCH_SIZE
        near = either([below, below + model.PATCH_SIZE] if below else [model.PATCH_SIZE])
        yield "DATA.IMAGE_SIZE", f"{size} is not divisible by MODEL.PATCH_SIZE {model.PATCH_SIZE}; nearest: {near}"
    heads, width = model.NUM_HEADS, model.EMBED_DIM
    if isinstance(heads, int) and width and model.ATTN_HEAD_SIZE is None and width % heads:
        divisors = [n for n in range(1, width + 1) if width % n == 0]
        near = either(sorted(sorted(divisors, key=lambda n: abs(n - heads))[:2]))
        yield "MODEL.NUM_HEADS", f"{heads} does not divide MODEL.EMBED_DIM {width}; nearest: {near}"
    if model.UNFREEZE_EPOCH is not None and not config.EVAL:
        yield from _unfreezing(model.UNFREEZE_EPOCH, model.FREEZE, config.TRAIN.NUM_EPOCHS)
    if model.RESUME == AUTO and config.OUTPUT is None:
        yield "MODEL.RESUME", "auto looks in the run's own folder; name it with -output"


def _unfreezing(epoch: int, frozen: tuple[str, ...], epochs: int) -> Iterator[Problem]:
    key = "MODEL.UNFREEZE_EPOCH"
    if not frozen:
        yield key, f"{epoch} has nothing to unfreeze; set MODEL.FREEZE too, for example to backbone, or leave {key} out"
    if epoch == 1:
        yield key, "1 leaves no epoch in which MODEL.FREEZE has an effect; give 2 or more, or leave both out"
    if epoch > epochs:
        near = f"give {epochs} or less, or null" if epochs > 1 else "give null"
        yield key, f"{epoch} is after the last epoch, TRAIN.NUM_EPOCHS {epochs}; {near}"


def _train(config: Config) -> Iterator[Problem]:
    train = config.TRAIN
    if train.LAST_EPOCH >= train.NUM_EPOCHS and not config.EVAL:
        yield "TRAIN.LAST_EPOCH", f"{train.LAST_EPOCH} leaves no epoch of TRAIN.NUM_EPOCHS {train.NUM_EPOCHS} to train"
    if train.CLASS_WEIGHTS is not None and train.DISTILLATION_TYPE is not None and not config.EVAL:
        yield (
            "TRAIN.CLASS_WEIGHTS",
            f"{train.CLASS_WEIGHTS} is not possible with TRAIN.DISTILLATION_TYPE, because the teacher's loss has no "
            "class weights; use DATA.SAMPLER=balanced instead, or no teacher",
        )
    yield from _bce(config)
    betas = train.OPTIMIZER.BETAS
    if betas is not None and not all(0 <= beta < 1 for beta in betas):
        yield "TRAIN.OPTIMIZER.BETAS", f"{one_line(betas)} must both be >= 0 and < 1"
    if train.OPTIMIZER.MUON.ADAMW_LR is not None and not train.BASE_LR:
        yield (
            "TRAIN.OPTIMIZER.MUON.ADAMW_LR",
            f"{train.OPTIMIZER.MUON.ADAMW_LR:g} follows the schedule of TRAIN.BASE_LR, which is 0; set BASE_LR above 0",
        )


def _labels(config: Config) -> Iterator[Problem]:
    """Settings that cannot have several labels per image, or need them."""
    train, data, by = config.TRAIN, config.DATA, config.SAVE_BEST_BY
    if not data.MULTI_LABEL:
        if by == "map":
            yield "SAVE_BEST_BY", "map needs DATA.MULTI_LABEL true; with one label per image use acc1, acc5 or loss"
        return
    why = "is not possible with DATA.MULTI_LABEL"
    if train.LOSS == "ce":
        yield "TRAIN.LOSS", f"ce {why}: cross-entropy has one class per image; leave it out, or use bce"
    if by in ("acc1", "acc5"):
        yield "SAVE_BEST_BY", f"{by} {why}: accuracy has one class per image; leave it out, or use map or loss"
    if data.SAMPLER == "balanced":
        yield (
            "DATA.SAMPLER",
            f"balanced {why}: drawing an image for one of its labels draws the others too; use "
            "TRAIN.CLASS_WEIGHTS=balanced instead",
        )
    if train.DISTILLATION_TYPE is not None and not config.EVAL:
        yield (
            "TRAIN.DISTILLATION_TYPE",
            f"{train.DISTILLATION_TYPE} {why}: its loss is a softmax cross-entropy over the classes; leave it out",
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
    if steps[-1][1] != full:
        yield (
            "TRAIN.SIZE_SCHEDULE",
            f"{one_line(steps)} ends with size {steps[-1][1]}; it must end with DATA.IMAGE_SIZE {full}, the size of "
            "validation",
        )
    if patch and (odd := sorted({size for _, size in steps if size % patch and size != full})):
        yield "TRAIN.SIZE_SCHEDULE", f"{one_line(tuple(odd))}: not divisible by MODEL.PATCH_SIZE {patch}"


def _augmentation(config: Config) -> Iterator[Problem]:
    train, data = config.TRAIN, config.DATA
    on = [key for key in POLICIES if value_of(config, key)]
    if len(on) > 1 and set(on) != {"TRAIN.RAND_AUGMENT", "TRAIN.AUTO_AUGMENT"}:
        yield on[-1], f"true cannot be combined with {' and '.join(on[:-1])}; set only one of them to true"
    if train.mixes and data.BATCH_SIZE == 1 and not config.EVAL:
        yield "DATA.BATCH_SIZE", "1 is too small for mixup and cutmix, which mix images of a batch; use 2 or more"
    if train.CUTMIX_MINMAX is not None:
        low, high = train.CUTMIX_MINMAX
        if not 0 <= low < high <= 1 or int(data.IMAGE_SIZE * low) >= int(data.IMAGE_SIZE * high):
            yield (
                "TRAIN.CUTMIX_MINMAX",
                f"{one_line(train.CUTMIX_MINMAX)} must be the smallest and the largest side of a box, 0 <= smallest < "
                f"largest <= 1, at least one pixel apart (DATA.IMAGE_SIZE {data.IMAGE_SIZE}), as in [0.2, 0.8]",
            )


def _dist(config: Config) -> Iterator[Problem]:
    dist = config.DIST
    by_hand = {"HOST": dist.HOST, "PORT": dist.PORT, "RANK": dist.RANK, "WORLD_SIZE": dist.WORLD_SIZE}
    missing = [name for name, value in by_hand.items() if value is None]
    ranks_are_given = dist.RANK is not None or dist.WORLD_SIZE is not None  # else a launcher may give them
    if missing and ranks_are_given:
        given = [name for name in by_hand if name not in missing]
        flags = " ".join(f"-{name.lower()}" for name in missing)
        yield f"DIST.{given[0]}", f"-host, -port, -rank and -world_size are needed together; missing: {flags}"
    if dist.RANK is not None and dist.WORLD_SIZE is not None and dist.RANK >= dist.WORLD_SIZE:
        yield "DIST.RANK", f"{dist.RANK} is not below DIST.WORLD_SIZE {dist.WORLD_SIZE}; ranks count from 0"
    if dist.HSDP and dist.STRATEGY != "fsdp":
        yield "DIST.HSDP", "true works only with fsdp; set DIST.STRATEGY=fsdp as well, or leave DIST.HSDP out"
    if dist.STATIC_GRAPH and config.TRAIN.ACCUM_ITER > 1:
        way_out = "set TRAIN.ACCUM_ITER=1, or leave DIST.STATIC_GRAPH out"
        yield "DIST.STATIC_GRAPH", f"true works only without accumulation; {way_out}"
    yield from _without_ddp(config)
    if dist.STRATEGY == "fsdp":
        yield from _fsdp(config)


def _without_ddp(config: Config) -> Iterator[Problem]:
    """Settings of DDP, where DDP does not all-reduce the gradients."""
    dist, amp = config.DIST, config.AMP
    if dist.STRATEGY == "fsdp":
        why = "with DIST.STRATEGY fsdp, which reduces gradients in its own way"
    elif amp.ENABLED and amp.LEVEL in ("O2", "NAIVE"):
        why = f"at AMP.LEVEL {amp.LEVEL}, where the gradients of the fp32 masters are all-reduced once per update"
    else:
        return
    for key in ("STATIC_GRAPH", "BF16_GRADIENTS"):
        if getattr(dist, key):
            yield f"DIST.{key}", f"true is not possible {why}; leave DIST.{key} out"


def _fsdp(config: Config) -> Iterator[Problem]:
    amp = config.AMP
    if config.DEVICE == "mps":
        yield "DIST.STRATEGY", "fsdp needs several devices; DEVICE mps is a single device"
    if config.DATA.BATCH_SIZE == AUTO:
        yield "DATA.BATCH_SIZE", "auto is not possible with DIST.STRATEGY fsdp; give a number"
    if config.TRAIN.MODEL_EMA_FORCE_CPU:
        yield (
            "TRAIN.MODEL_EMA_FORCE_CPU",
            "true does not work with DIST.STRATEGY fsdp, which shards the EMA; use false",
        )
    if not amp.ENABLED:
        return
    if amp.DTYPE == "fp8":
        yield "AMP.DTYPE", "fp8 does not work with DIST.STRATEGY fsdp; use bf16 or fp16, or DIST.STRATEGY=ddp"
    if amp.LEVEL == "O3":
        yield "AMP.LEVEL", "O3 does not work with DIST.STRATEGY fsdp; use O1, O2 or NAIVE"
    if amp.AUTO_FP32:
        yield (
            "AMP.AUTO_FP32",
            "true is not possible with DIST.STRATEGY fsdp, which does not replay skipped updates to find the module "
            "that overflowed; name the modules in AMP.FP32_MODULES",
        )
    if amp.LEVEL in ("O2", "NAIVE") and not amp.EVAL:
        yield (
            "AMP.EVAL",
            f"false asks for validation in fp32, but DIST.STRATEGY fsdp with AMP.LEVEL {amp.LEVEL} gathers weights "
            "only in half precision; leave AMP.EVAL true, or use O1",
        )


def _run(config: Config) -> Iterator[Problem]:
    limit = config.MAX_TIME
    if limit is not None and (not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", limit) or not limit.strip("0:")):
        yield "MAX_TIME", f"{limit} is not a time above 0 in the form HH:MM:SS, such as 11:30:00"


def notes(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    """Lines for the log about settings without the expected effect. `given`: keys that were set -> where."""
    yield from _warmup(config)
    for key, field in settings().items():
        why = why_without_effect(field)
        if why and key in given and value_of(config, key) != default_of(key):
            yield f"{given[key]}: {key} has no effect: {why}"
    yield from _overridden(config, given)
    unused = [key for key in given if key.startswith("AMP.") and key not in EFFECTIVE_WITHOUT_AMP]
    if unused and not config.AMP.ENABLED and any(value_of(config, key) != default_of(key) for key in unused):
        yield f"AMP is off (-amp turns it on), so these settings have no effect: {', '.join(sorted(unused))}"
    yield from _muon_notes(config, given)
    yield from _bce_notes(config, given)
    yield from _schedule_notes(config.TRAIN, given)
    yield from _model_notes(config, given)
    yield from _data_notes(config.DATA, given)


def _bce_notes(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    train, equal_parts = config.TRAIN, sum(_smoothed(config)) / 2
    if train.LOSS == "ce":
        for key in ("TRAIN.BCE_TARGET_THRESH", "TRAIN.BCE_SUM"):
            if key in given and value_of(config, key) != default_of(key):
                yield f"{given[key]}: {key} has no effect: TRAIN.LOSS is ce, not bce"
    elif train.BCE_TARGET_THRESH is not None and equal_parts <= train.BCE_TARGET_THRESH and train.mixes:
        yield (
            f"TRAIN.BCE_TARGET_THRESH {train.BCE_TARGET_THRESH:g} with mixup or CutMix: an image mixed of two equal "
            f"parts has no positive class; with a threshold below {equal_parts:.4g}, every mixed image has one"
        )


def _schedule_notes(train: TrainConfig, given: Mapping[str, str]) -> Iterator[str]:
    name, fraction = train.LR_SCHEDULER.NAME, "TRAIN.LR_SCHEDULER.DECAY_FRACTION"
    if fraction in given and name != "wsd" and default_of(fraction) != train.LR_SCHEDULER.DECAY_FRACTION:
        yield f"{given[fraction]}: {fraction} has no effect: TRAIN.LR_SCHEDULER.NAME is {name}, not wsd"
    if name in ("wsd", "cosine", "warmupcosine") and train.END_LR > train.BASE_LR:
        yield f"TRAIN.END_LR {train.END_LR:g} is above TRAIN.BASE_LR {train.BASE_LR:g}: the learning rate will rise"


def _warmup(config: Config) -> Iterator[str]:
    """The default is longer than a short run. The setting stays as it is: a resume may lengthen the run."""
    train = config.TRAIN
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


def _overridden(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    """As in PaddleViT and timm, RandAugment overrides AutoAugment, and every policy but ThreeAugment colour jitter."""
    for policy, others in OVERRIDDEN_BY.items():
        if value_of(config, policy):
            for key in others:
                if key in given and value_of(config, key):
                    yield f"{given[key]}: {key} has no effect: {policy} overrides it"
            return


def _muon_notes(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    name = config.TRAIN.OPTIMIZER.NAME
    for key in sorted(key for key in given if key.startswith("TRAIN.OPTIMIZER.MUON.")):
        if value_of(config, key) == default_of(key):
            continue
        if not name.casefold().endswith("muon"):
            yield f"{given[key]}: {key} has no effect: TRAIN.OPTIMIZER.NAME is {name}, not Muon"
        elif key.endswith("NS_DTYPE") and name.casefold().endswith("adamuon"):
            yield f"{given[key]}: {key} has no effect: timm's {name} computes in bf16"


def _model_notes(config: Config, given: Mapping[str, str]) -> Iterator[str]:
    model = config.MODEL
    resumes = model.RESUME is not None and model.RESUME != AUTO
    if resumes and "MODEL.PRETRAINED" in given and model.PRETRAINED:
        yield "MODEL.PRETRAINED has no effect when a run is resumed: the run's own weights are loaded"
    if model.RESUME_EMA and not (model.PRETRAINED or resumes):
        yield "MODEL.RESUME_EMA has no effect: -pretrained or -resume must name a run, and -resume auto does not"
    if config.EVAL and resumes and "MODEL.RESUME_EMA" in given:
        yield "MODEL.RESUME_EMA has no effect with -eval -resume, which evaluates the plain weights and the EMA"
    if model.NEW_CLASSIFIER and not model.PRETRAINED:
        yield "MODEL.NEW_CLASSIFIER has no effect without weights to start from (-pretrained)"


def _data_notes(data: DataConfig, given: Mapping[str, str]) -> Iterator[str]:
    if data.fold is not None and "DATA.VAL_FRACTION" in given:
        yield f"DATA.VAL_FRACTION has no effect: DATA.FOLD {data.fold} validates on 1/{data.fold.folds} of the images"
    if data.SAMPLER == "balanced" and "DATA.SHARD_WINDOW" in given:
        yield "DATA.SHARD_WINDOW has no effect: DATA.SAMPLER balanced draws from all tar files at once"
