"""Flags of other training programs, and our flag or setting for each."""

from __future__ import annotations

from utils.config.keys import allowed, settings, suggest
from utils.errors import closest, nearest

SETTINGS = {
    "DATA.CROP_PCT": "crop_pct",
    "DATA.CROP_RATIO": "ratio",
    "DATA.CROP_SCALE": "scale",
    "DATA.DOWNLOAD": "dataset_download",
    "DATA.FLIP": "hflip",
    "DATA.IMAGE_CHANNELS": "in_chans",
    "DATA.IMAGENET_MEAN": "mean",
    "DATA.IMAGENET_STD": "std",
    "DATA.INTERPOLATION": "interpolation train_interpolation",
    "DATA.REPEATED_AUGMENT": "aug_repeats",
    "DIST.SYNC_BATCHNORM": "sync_bn",
    "MODEL.DROPOUT": "drop",
    "MODEL.DROPPATH": "drop_path",
    "TRAIN.BASE_LR": "blr lr_base",
    "TRAIN.CHANNELS_LAST": "channels_last",
    "TRAIN.COLOR_JITTER": "color_jitter",
    "TRAIN.COMPILE_MODE": "torchcompile_mode",
    "TRAIN.CUTMIX_ALPHA": "cutmix",
    "TRAIN.CUTMIX_MINMAX": "cutmix_minmax",
    "TRAIN.DISTILLATION_TAU": "kd_temperature",
    "TRAIN.END_LR": "min_lr",
    "TRAIN.GRAD_CLIP": "clip_grad clip_grad_norm",
    "TRAIN.LAYER_DECAY": "layer_decay",
    "TRAIN.LINEAR_SCALED_LR": "lr_base_size",
    "TRAIN.LR_SCHEDULER.DECAY_EPOCHS": "decay_epochs",
    "TRAIN.LR_SCHEDULER.DECAY_RATE": "decay_rate",
    "TRAIN.LR_SCHEDULER.MILESTONES": "decay_milestones",
    "TRAIN.LR_SCHEDULER.NAME": "sched scheduler lr_scheduler",
    "TRAIN.MIXUP_ALPHA": "mixup",
    "TRAIN.MIXUP_MODE": "mixup_mode",
    "TRAIN.MIXUP_PROB": "mixup_prob",
    "TRAIN.MIXUP_SWITCH_PROB": "mixup_switch_prob",
    "TRAIN.MODEL_EMA": "model_ema",
    "TRAIN.MODEL_EMA_DECAY": "model_ema_decay",
    "TRAIN.MODEL_EMA_FORCE_CPU": "model_ema_force_cpu",
    "TRAIN.MODEL_EMA_WARMUP": "model_ema_warmup",
    "TRAIN.OPTIMIZER.BETAS": "opt_betas",
    "TRAIN.OPTIMIZER.EPS": "opt_eps",
    "TRAIN.OPTIMIZER.MOMENTUM": "momentum",
    "TRAIN.OPTIMIZER.NAME": "opt optim optimizer",
    "TRAIN.RANDOM_ERASE_COUNT": "recount",
    "TRAIN.RANDOM_ERASE_MODE": "remode",
    "TRAIN.RANDOM_ERASE_PROB": "reprob random_erase",
    "TRAIN.RANDOM_ERASE_SPLIT": "resplit",
    "TRAIN.SMOOTHING": "label_smoothing smoothing",
    "TRAIN.TEACHER_MODEL": "kd_model_name",
    "TRAIN.WARMUP_EPOCHS": "warmup lr_warmup_epochs warmup_epochs",
    "TRAIN.WARMUP_START_LR": "warmup_lr",
}
FLAGS = {
    "accum_iter": "grad_accum_steps gradient_accumulation_steps accumulation_steps",
    "amp": "fp16 bf16 half precision amp_dtype native_amp",
    "batch_size": "b bs batch train_batch_size per_device_train_batch_size",
    "batch_size_eval": "vb validation_batch_size eval_batch_size",
    "cfg": "c config cfg_file",
    "data_path": "data data_dir root",
    "epochs": "max_epochs n_epochs epoch",
    "eval": "e evaluate validate",
    "gpus": "gpu gpu_ids",
    "image_size": "img_size input_size resolution",
    "last_epoch": "start_epoch",
    "log_freq": "log_interval print_freq",
    "lr": "learning_rate",
    "model": "arch model_name",
    "ngpus": "nproc num_gpus n_gpus nproc_per_node",
    "num_workers": "j workers nw",
    "output": "experiment o out output_dir save_dir",
    "pretrained": "pretrained_path initial_checkpoint",
    "weight_decay": "wd",
}
ANSWERS = {
    "aa": "TRAIN.RAND_AUGMENT=true",
    "grad_checkpointing": "TRAIN.GRAD_CHECKPOINT=blocks",
    "torchcompile": "TRAIN.COMPILE=blocks",
}
"""Flags whose value means nothing here."""
PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "float16": "fp16", "bfloat16": "bf16"}
NOT_NEEDED = "pin_mem no_prefetcher sched_on_updates"
_KEY = {word: key for key, words in SETTINGS.items() for word in words.split()}
_FLAG = {word: flag for flag, words in FLAGS.items() for word in words.split()}


def suggest_flag(name: str, value: str | None, known: list[str]) -> str:
    """' Did you mean TRAIN.SMOOTHING=0.1?' for `-label_smoothing 0.1`; '' if nothing is close. `known`: our flags."""
    if name in NOT_NEEDED.split():
        return " Leave it out: there is nothing to set here."
    if precision := PRECISIONS.get(name if name != "amp_dtype" else value or ""):
        return f" Did you mean -amp {precision}?"
    if name in ANSWERS:
        return f" Did you mean {ANSWERS[name]}?"
    if name in _FLAG and _FLAG[name] in known:
        return f" Did you mean -{_FLAG[name]}?"
    if name in _KEY:
        default = "true" if "true" in allowed(_KEY[name]) else "..."
        return f" Did you mean {_KEY[name]}={value or default}?"
    if intended := closest(name, known, cutoff=0.9):
        return f" Did you mean -{intended}?"
    setting = suggest(name.upper()) if name.upper() in {key.rpartition(".")[2] for key in settings()} else ""
    return setting.replace("?", f"={value or '...'}?") or nearest(name, known).replace("mean ", "mean -")
