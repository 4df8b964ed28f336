"""What an unknown flag, word or key may mean: a typo, or one of another training program.

Imported only where there is a mistake; docs/migrating.md says what differs between flags of other programs and ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from utils.config.families import FAMILIES, TYPE, type_of
from utils.config.keys import nested, settings
from utils.config.read import Entry
from utils.config.schema import Config
from utils.config.words import allowed, suggest
from utils.errors import UserError, closest, either, nearest
from utils.flags import BY_NAME, IGNORED, Flag
from utils.precisions import AMP_WORDS, amp_settings_of

ELSEWHERE = {
    "-accum_iter": ("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches"),
    "-amp": ("precision", "native_amp", "use_amp", "a yes", "a no"),
    "-amp O1": ("amp_impl", "apex_amp"),
    "-amp O3-bf16": ("model_dtype bfloat16", "precision bf16-true"),
    "-amp bf16": ("amp_dtype bfloat16", "bf16", "precision bf16"),
    "-amp off": ("use_amp 0", "a 0", "precision 32", "fp16 False", "bf16 False"),
    "-amp fp16": ("amp_dtype", "amp_dtype float16", "fp16", "half", "precision 16"),
    "-batch_size": ("b", "bs", "per_device_train_batch_size"),
    "-batch_size_eval": (
        "vb",
        "val_batch_size",
        "validation_batch_size",
        "eval_batch_size",
        "per_device_eval_batch_size",
    ),
    "-cfg": ("c", "config", "cfg_file"),
    "-data_path": ("data_dir", "data", "root"),
    "-epochs": ("num_train_epochs",),
    "-eval": ("test_only", "e", "validate"),
    "-host": ("master_addr",),
    "-image_size": ("input_size", "val_crop_size", "train_crop_size", "resolution"),
    "-log_freq": ("log_interval", "print_freq"),
    "-lr": ("learning_rate",),
    "-model": ("arch", "a"),
    "-ngpus": ("nproc", "nproc_per_node"),
    "-num_workers": ("j", "nw"),
    "-output": ("experiment", "log_dir", "o", "save_dir"),
    "-port": ("master_port",),
    "-pretrained": ("initial_checkpoint", "no_resume_opt", "weights"),
    "-validate_freq": ("val_interval",),
    "-weight_decay": ("wd",),
    "DATA.CROP_PCT=...": ("val_resize_size",),
    "DATA.CROP_SCALE": ("scale",),
    "DATA.CROP_RATIO": ("ratio",),
    "DATA.DOWNLOAD=true": ("dataset_download",),
    "DATA.FLIP": ("hflip", "hflip_prob"),
    "DATA.IMAGENET_MEAN": ("mean",),
    "DATA.IMAGENET_STD": ("std",),
    "DATA.IMAGE_CHANNELS": ("in_chans",),
    "DATA.INTERPOLATION": ("train_interpolation",),
    "DATA.REPEATED_AUGMENT": ("aug_repeats",),
    "DATA.REPEATED_AUGMENT=3": ("ra_sampler",),
    "KEEP_LAST": ("checkpoint_hist",),
    "MODEL.DROPOUT": ("drop",),
    "MODEL.DROPPATH": ("drop_path",),
    "MODEL.POOL": ("gp",),
    "SAVE_BEST_BY": ("eval_metric",),
    "SAVE_BEST_BY=acc1": ("eval_metric top1",),
    "SAVE_EVERY_UPDATES": ("recovery_interval",),
    "SPEED=+channels_last": ("channels_last",),
    "TRAIN.AUGMENT=three": ("aa 3a",),
    "TRAIN.AUGMENT=trivial": ("auto_augment ta_wide",),
    "TRAIN.AUTO_AUGMENT=true": ("aa original", "aa originalr", "auto_augment imagenet"),
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
    "TRAIN.LR_SCHEDULER.MILESTONES=...": ("decay_milestones",),
    "TRAIN.LR_SCHEDULER.NAME": ("sched", "lr_scheduler", "scheduler"),
    "TRAIN.MAX_UPDATES": ("max_steps",),
    "TRAIN.MIXUP_ALPHA": ("mixup",),
    "TRAIN.MODEL_EMA_DECAY": ("ema_decay",),
    "TRAIN.MODEL_EMA_DECAY=...": ("model_ema_decay",),
    "TRAIN.OPTIMIZER.BETAS=...": ("opt_betas",),
    "TRAIN.OPTIMIZER.EPS": ("opt_eps",),
    "TRAIN.OPTIMIZER.NAME": ("opt", "optim", "optimizer"),
    "TRAIN.OPTIMIZER.NAME=nesterov": ("opt sgd", "opt sgd_nesterov"),
    "TRAIN.OPTIMIZER.NAME=SGD": ("opt sgd",),
    "TRAIN.RANDOM_ERASE_COUNT": ("recount",),
    "TRAIN.RANDOM_ERASE_MODE": ("remode",),
    "TRAIN.RANDOM_ERASE_PROB": ("reprob", "random_erase"),
    "TRAIN.RAND_AUGMENT=true": ("aa", "auto_augment"),
    "TRAIN.SIZE_SCHEDULE=...": ("train_img_sizes", "train_size_schedule"),
    "TRAIN.SMOOTHING": ("label_smoothing",),
    "TRAIN.TEACHER_MODEL": ("kd_model_name",),
    "TRAIN.WARMUP_EPOCHS": ("lr_warmup_epochs", "warmup"),
    "TRAIN.WARMUP_START_LR": ("warmup_lr",),
    "TRAIN.WARMUP_START_LR=...": ("lr_warmup_decay",),
    "TRAIN.WEIGHT_DECAY_ALL=false": ("norm_weight_decay", "bias_weight_decay"),
    "WANDB": ("log_wandb", "wandb_project"),
}
"""Our flag or setting -> flags of others, or flags with a value. Left out: those that are spelt nearly as ours are."""
ALSO: dict[str, str] = dict.fromkeys(("lr_base", "blr"), " and TRAIN.LINEAR_SCALED_LR=256")
"""Flag of others -> the end of its advice: what it does besides"""
ABSENT = {
    "Not needed: there is nothing to set": (
        "pin_mem",
        "no_prefetcher",
        "fast_norm",
        "sched_on_updates",
        "dist_eval",
        "cache_mode",
    ),
    "Not needed: splits are found, or made by DATA.VAL_FRACTION": ("train_split", "val_split"),
    "Not needed: torchrun is detected": ("from_torch",),
    "Not needed: write CUDA_VISIBLE_DEVICES=... before the command": ("gpus", "gpu", "gpu_ids"),
    "Not available here: all images of an epoch have one size": ("multi_scale_sampler_ddp",),
    "Not available here: TRAIN.GRAD_CLIP limits the norm of all gradients": ("clip_mode",),
    "Not available here: no schedule waits for a plateau; TRAIN.PATIENCE ends the run": ("patience_epochs",),
    "Not available here: each process normalises its own images": ("dist_bn", "split_bn", "sync_bn"),
    "Not available here: TRAIN.CLASS_WEIGHTS=balanced weighs positives by class": ("bce_pos_weight",),
    "Not available here: ours are in docs/augmentation.md": ("aa augmix", "aa v0", "aa v0r", "auto_augment augmix"),
    "Not available here: TRAIN.COLOR_JITTER changes every image": ("color_jitter_prob",),
    "Not available here": ("bce_sum", "epoch_repeats", "fuser", "save_images", "torchcompile_mode", "train_crop_mode"),
    "Not available here: each setting has its own key, so a misspelt key is an error": ("opt_kwargs", "model_kwargs"),
}
ANY_VALUE = "..."
"""After `KEY=`: the value of the other program means something else here."""


def unknown_flags(
    unknown: Iterable[tuple[str, str]], strays: list[UserError], known: Mapping[str, Flag], takes_settings: bool
) -> UserError:
    """The error for flags, each with its values, that are none of the `known`, and for `strays`, other words."""
    names = [name for name in known if name != IGNORED.name]
    lines = [f"{flag}.{suggest_flag(flag, value, names, takes_settings)}" for flag, value in dict(unknown).items()]
    if len(lines) + len(strays) == 1:
        return strays[0] if strays else UserError(f"unknown flag {lines[0]} -h lists all flags.")
    found = "".join(f"\n  {line}" for line in (*strays, *lines))
    what = f"{len(lines) + len(strays)} unknown {'arguments' if strays else 'flags'}"
    return UserError(f"{what}; -h lists all flags, docs/migrating.md those of other programs:{found}")


def suggest_flag(flag: str, value: str, known: list[str], takes_settings: bool) -> str:
    """' Did you mean TRAIN.SMOOTHING=0.1?' for `-label_smoothing 0.1`; '' if nothing is close. `known`: our flags."""
    name = flag.lstrip("-").replace("-", "_")
    for spelt in (f"{name} {value}", f"{name} {value.partition('-')[0]}", name):
        ours = [
            _with_value(one, value)
            for one, flags in ELSEWHERE.items()
            if spelt in flags and (one.split()[0][1:] in known if one.startswith("-") else takes_settings)
        ]
        if ours:
            return f" Did you mean {either(ours)}{ALSO.get(name, '')}?"
        for why, flags in ABSENT.items():
            if spelt in flags:
                return f" {why}."
    same = [key for key in settings() if takes_settings and key.rpartition(".")[2] == name.upper()]
    if len(same) == 1:
        return f" Did you mean {_with_value(same[0], value)}?"
    if intended := closest(name, known, cutoff=0.9):
        return f" Did you mean -{intended}?"
    setting = suggest(name.upper()) if same else ""
    harmless = [one for one in known if one != "use" or "_" not in name]  # -use executes files
    return setting.replace("?", f"={value or ANY_VALUE}?") or nearest(name, harmless).replace("mean ", "mean -")


def _with_value(ours: str, value: str) -> str:
    """`ours`, or for -amp or a setting without a value, the same with `value`, if it allows this value."""
    if ours == "-amp" and value and amp_settings_of(value) is not None:
        return f"-amp {value}"
    if ours.startswith("-") or "=" in ours:
        return ours
    if not value:
        return f"{ours}={'true' if 'true' in allowed(ours) else ANY_VALUE}"
    try:
        Config.model_validate(nested({ours: value}))
    except ValidationError:
        return f"{ours}={ANY_VALUE}"
    return f"{ours}={value}"


def _setting_for(key: str) -> str:
    """Our setting for a key of another program, such as one in timm's args.yaml; '' if there is none."""
    name = key.rpartition(".")[2].casefold()
    ours = next((one for one, flags in ELSEWHERE.items() if name in flags), f"-{name}")
    if not ours.startswith("-"):
        return ours.partition("=")[0]
    flag = BY_NAME.get(ours[1:])
    return flag.keys[0] if flag and flag.keys else ""


def unknown_keys(given: Mapping[str, Entry], unknown: Mapping[str, Entry]) -> list[str]:
    """One line per key; the keys of a model that vitamp does not build are reported with its MODEL.TYPE."""
    kind, ours = type_of(given), settings()
    foreign = [key for key in unknown if key.startswith("MODEL.") and not closest(key, ours, 0.9)]
    of_type = foreign if kind not in FAMILIES else []
    rest = {key: one.source for key, one in unknown.items() if key not in of_type}
    lines = [f"{source}: unknown key {key}.{suggest(key, _setting_for(key))}" for key, source in rest.items()]
    if of_type:
        left_out = ", ".join(of_type[:6]) + (", ..." if of_type[6:] else "")
        lines.append(
            f"{given[TYPE].source}: MODEL.TYPE {kind} is not one of {', '.join(FAMILIES)}, nor has a family of "
            "docs/migrating.md these keys. To train a model of timm, set MODEL.NAME (-list_models "
            f"'*{kind}*' lists names) and leave out MODEL.TYPE, {left_out}"
        )
    return lines


def unrecognised(text: str, before: Flag | None, known: Mapping[str, Flag], takes_settings: bool) -> UserError:
    """The error for a word, after the flag `before`, that is neither a flag, nor a flag's value, nor KEY=VALUE."""
    key, separator, value = text.partition("=")
    name = key.replace("-", "_")
    forms = "-flag value or KEY=VALUE" if takes_settings else "-flag value"
    advice = f" Arguments have the form {forms}; -h lists the flags."
    if text.endswith((".yaml", ".yml")) and "cfg" in known:
        advice = f" Did you mean -cfg {text}?"
    elif name in known:
        advice = f" Did you mean -{text if separator else name}?"
    elif separator and takes_settings:
        suggestion = suggest(key.upper(), _setting_for(key)).replace("?", f"={value}?")
        advice = suggestion or " Settings have the form KEY=VALUE, such as TRAIN.BASE_LR=1e-4."
    elif "data_path" in known and ("/" in text or Path(text).exists()):
        advice = f" Did you mean -data_path {text}?"
    elif before is not None and before.name == "amp":
        advice = f" {amp_advice(text)}"
    elif before is not None and not before.value:
        advice = f" -{before.name} takes no value."
    return UserError(f"unrecognised argument '{text}'.{advice}")


def amp_advice(value: str) -> str:
    """Advice on what to write instead of `-amp value`."""
    of_others = value.casefold() in ("none", "null", "0", "1")  # on and off elsewhere: a similar word is no help
    guess = "" if of_others else nearest(value, AMP_WORDS.split())
    return f"{guess} -amp alone turns AMP on; its values are {AMP_WORDS}.".lstrip()
