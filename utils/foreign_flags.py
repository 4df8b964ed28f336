"""Flags of other training programs, and our flag or setting for each; docs/migrating.md says what differs."""

from __future__ import annotations

from pydantic import ValidationError

from utils.config.keys import nested, settings
from utils.config.schema import Config
from utils.config.words import allowed, suggest
from utils.errors import closest, either, nearest

ELSEWHERE = {
    "-accum_iter": ("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches"),
    "-amp": ("precision", "native_amp"),
    "-amp O1": ("amp_impl", "apex_amp"),
    "-amp O3-bf16": ("model_dtype bfloat16",),
    "-amp O3-fp16": ("model_dtype", "model_dtype float16"),
    "-amp bf16": ("amp_dtype bfloat16", "bf16"),
    "-amp fp16": ("amp_dtype", "amp_dtype float16", "fp16", "half"),
    "-batch_size": ("b", "bs", "per_device_train_batch_size"),
    "-batch_size_eval": ("vb", "validation_batch_size", "eval_batch_size", "per_device_eval_batch_size"),
    "-cfg": ("c", "config", "cfg_file"),
    "-data_path": ("data_dir", "data", "root"),
    "-dataset": ("class_map",),
    "-epochs": ("num_train_epochs",),
    "-eval": ("test_only", "e", "validate"),
    "-image_size": ("val_crop_size", "train_crop_size", "resolution"),
    "-log_freq": ("log_interval", "print_freq"),
    "-lr": ("learning_rate",),
    "-model": ("arch",),
    "-ngpus": ("nproc", "nproc_per_node"),
    "-num_workers": ("j", "nw"),
    "-output": ("experiment", "log_dir", "o", "save_dir"),
    "-pretrained": ("initial_checkpoint", "no_resume_opt", "weights"),
    "-validate_freq": ("val_interval",),
    "-weight_decay": ("wd",),
    "DATA.CROP_PCT=...": ("val_resize_size",),
    "DATA.CROP_RATIO": ("ratio",),
    "DATA.CROP_SCALE": ("scale",),
    "DATA.DOWNLOAD=true": ("dataset_download",),
    "DATA.FLIP": ("hflip",),
    "DATA.IMAGENET_MEAN": ("mean",),
    "DATA.IMAGENET_STD": ("std",),
    "DATA.IMAGE_CHANNELS": ("in_chans",),
    "DATA.INTERPOLATION": ("train_interpolation",),
    "DATA.REPEATED_AUGMENT": ("aug_repeats", "ra_reps"),
    "DATA.REPEATED_AUGMENT=3": ("ra_sampler",),
    "DATA.VAL_FRACTION=...": ("train_split", "val_split"),
    "DETERMINISTIC=true": ("use_deterministic_algorithms",),
    "KEEP_LAST": ("checkpoint_hist",),
    "MODEL.DROPOUT": ("drop",),
    "MODEL.DROPPATH": ("drop_path",),
    "SAVE_BEST_BY": ("eval_metric",),
    "SAVE_BEST_BY=acc1": ("eval_metric top1",),
    "SAVE_EVERY_UPDATES": ("recovery_interval",),
    "SPEED=+channels_last": ("channels_last",),
    "TRAIN.AUTO_AUGMENT=true": ("auto_augment",),
    "TRAIN.BASE_LR": ("lr_base", "blr"),
    "TRAIN.COMPILE=blocks": ("torchcompile",),
    "TRAIN.CUTMIX_ALPHA": ("cutmix",),
    "TRAIN.DISTILLATION_TAU": ("kd_temperature",),
    "TRAIN.END_LR": ("min_lr", "lr_min"),
    "TRAIN.GRAD_CHECKPOINT=blocks": ("grad_checkpointing",),
    "TRAIN.GRAD_CLIP": ("clip_grad", "clip_grad_norm"),
    "TRAIN.LINEAR_SCALED_LR": ("lr_base_size",),
    "TRAIN.LOSS=bce": ("bce_loss",),
    "TRAIN.LR_SCHEDULER.DECAY_EPOCHS": ("lr_step_size",),
    "TRAIN.LR_SCHEDULER.DECAY_RATE": ("lr_gamma",),
    "TRAIN.LR_SCHEDULER.MILESTONES": ("decay_milestones",),
    "TRAIN.LR_SCHEDULER.NAME": ("sched", "lr_scheduler", "scheduler"),
    "TRAIN.MIXUP_ALPHA": ("mixup",),
    "TRAIN.OPTIMIZER.BETAS": ("opt_betas",),
    "TRAIN.OPTIMIZER.EPS": ("opt_eps",),
    "TRAIN.OPTIMIZER.NAME": ("opt", "optim", "optimizer"),
    "TRAIN.RANDOM_ERASE_COUNT": ("recount",),
    "TRAIN.RANDOM_ERASE_MODE": ("remode",),
    "TRAIN.RANDOM_ERASE_PROB": ("reprob", "random_erase"),
    "TRAIN.RANDOM_ERASE_SPLIT": ("resplit",),
    "TRAIN.RAND_AUGMENT=true": ("aa", "auto_augment"),
    "TRAIN.RAND_AUGMENT_MAGNITUDE=...": ("ra_magnitude",),
    "TRAIN.SMOOTHING": ("label_smoothing",),
    "TRAIN.TEACHER_MODEL": ("kd_model_name",),
    "TRAIN.AUGMENT=trivial": ("auto_augment",),
    "TRAIN.WARMUP_EPOCHS": ("lr_warmup_epochs", "warmup"),
    "TRAIN.WARMUP_START_LR": ("warmup_lr",),
    "TRAIN.WARMUP_START_LR=...": ("lr_warmup_decay",),
    "TRAIN.WEIGHT_DECAY_ALL=false": ("norm_weight_decay", "bias_weight_decay"),
    "WANDB": ("log_wandb", "wandb_project"),
}
"""Our flag or setting -> flags of others, or flags with a value. Left out: those that are spelt nearly as ours are."""
ABSENT = {
    "not needed: the learning rate is set at every update": ("sched_on_updates",),
    "not needed: there is nothing to set here": ("pin_mem", "no_prefetcher", "fast_norm", "use_v2", "cache_dataset"),
    "not needed: torchrun is detected": ("from_torch",),
    "not needed: set CUDA_VISIBLE_DEVICES=0,1 before the command": ("gpus", "gpu", "gpu_ids"),
    "not available here": (
        "bce_sum",
        "torchcompile_mode",
        "save_images",
        "tta",
        "split_bn",
        "jsd_loss",
        "naflex_loader",
        "vflip",
        "gp",
    ),
    "not available here: schedules have no cycles and no noise": ("lr_cycle_mul", "lr_k_decay", "lr_noise"),
    "not available here: each setting has its own key, so a misspelt key is an error": ("opt_kwargs", "model_kwargs"),
}
ANY_VALUE = "..."
"""After `KEY=`: the value of the other program means something else here."""


def suggest_flag(name: str, value: str | None, known: list[str], takes_settings: bool = True) -> str:
    """' Did you mean TRAIN.SMOOTHING=0.1?' for `-label_smoothing 0.1`; '' if nothing is close. `known`: our flags."""
    for flag in (f"{name} {value}", name):
        ours = [one for one, flags in ELSEWHERE.items() if flag in flags]
        possible = [_with_value(one, value) for one in ours if _is_possible(one, known, takes_settings)]
        if possible:
            return f" Did you mean {either(possible)}?"
        for why, flags in ABSENT.items():
            if flag in flags:
                return f" {why[0].upper()}{why[1:]}."
    if intended := closest(name, known, cutoff=0.9):
        return f" Did you mean -{intended}?"
    same = [key for key in settings() if takes_settings and key.rpartition(".")[2] == name.upper()]
    if len(same) == 1:
        return f" Did you mean {_with_value(same[0], value)}?"
    setting = suggest(name.upper()) if same else ""
    return setting.replace("?", f"={value or ANY_VALUE}?") or nearest(name, known).replace("mean ", "mean -")


def _is_possible(ours: str, known: list[str], takes_settings: bool) -> bool:
    return ours.split()[0].removeprefix("-") in known if ours.startswith("-") else takes_settings


def _with_value(ours: str, value: str | None) -> str:
    """`ours`, or for a setting without a value, the setting with `value`, if it allows this value."""
    if ours.startswith("-") or "=" in ours:
        return ours
    if not value:
        return f"{ours}={'true' if 'true' in allowed(ours) else ANY_VALUE}"
    try:
        Config.model_validate(nested({ours: value}))
    except ValidationError:
        return f"{ours}={ANY_VALUE}"
    return f"{ours}={value}"
