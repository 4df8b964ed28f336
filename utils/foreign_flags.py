"""Flags of other training programs, and our flag or setting for each."""

from __future__ import annotations

from utils.config.keys import settings, suggest
from utils.errors import closest, nearest

SETTINGS = {
    "TRAIN.NUM_EPOCHS": "epochs max_epochs n_epochs epoch",
    "TRAIN.BASE_LR": "lr learning_rate blr",
    "TRAIN.WARMUP_EPOCHS": "warmup lr_warmup_epochs",
    "TRAIN.WARMUP_START_LR": "warmup_lr",
    "TRAIN.END_LR": "min_lr",
    "TRAIN.WEIGHT_DECAY": "wd",
    "TRAIN.OPTIMIZER.NAME": "opt optim optimizer",
    "TRAIN.LR_SCHEDULER.NAME": "sched scheduler lr_scheduler",
    "TRAIN.GRAD_CLIP": "clip_grad clip_grad_norm",
    "TRAIN.SMOOTHING": "label_smoothing",
    "TRAIN.MIXUP_ALPHA": "mixup",
    "TRAIN.CUTMIX_ALPHA": "cutmix",
    "MODEL.NAME": "model arch model_name",
    "MODEL.DROPOUT": "drop",
    "MODEL.DROPPATH": "drop_path",
}
FLAGS = {
    "batch_size": "b bs batch train_batch_size per_device_train_batch_size",
    "batch_size_eval": "vb validation_batch_size eval_batch_size",
    "image_size": "img_size input_size resolution",
    "data_path": "data data_dir root",
    "num_workers": "j workers nw",
    "accum_iter": "grad_accum_steps gradient_accumulation_steps accumulation_steps",
    "log_freq": "log_interval print_freq",
    "output": "o out output_dir save_dir",
    "cfg": "c config cfg_file",
    "eval": "e evaluate validate",
    "gpus": "gpu gpu_ids",
    "ngpus": "nproc num_gpus n_gpus nproc_per_node",
    "amp": "fp16 bf16 half precision amp_dtype",
}
_KEY = {word: key for key, words in SETTINGS.items() for word in words.split()}
_FLAG = {word: flag for flag, words in FLAGS.items() for word in words.split()}


def suggest_flag(name: str, value: str | None, known: list[str]) -> str:
    """' Did you mean TRAIN.NUM_EPOCHS=5?' for `-epochs 5`; '' if nothing is close. `known`: the program's flags."""
    if intended := closest(name, known, cutoff=0.9):
        return f" Did you mean -{intended}?"
    if name in ("fp16", "bf16"):
        return f" Did you mean -amp {name}?"
    if name in _FLAG and _FLAG[name] in known:
        return f" Did you mean -{_FLAG[name]}?"
    setting = suggest(name.upper()) if name.upper() in {key.rpartition(".")[2] for key in settings()} else ""
    if name in _KEY:
        setting = f" Did you mean {_KEY[name]}?"
    return setting.replace("?", f"={value or '...'}?") or nearest(name, known).replace("mean ", "mean -")
