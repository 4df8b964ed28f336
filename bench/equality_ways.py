"""The ways of training that bench/equality.py compares: one or more per callback that changes numbers."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

TEACHER = "{made}/teacher"
LABELS = "{made}/labels"
FAULTY = "{made}/faulty.safetensors"
"""What `make_materials` makes; a way's words are formatted with the folder."""
PHASES = ("DATA.BATCH_SIZE=256", "TRAIN.NUM_EPOCHS=3", "TRAIN.WARMUP_EPOCHS=3")
"""Epochs of five updates. So a run is resumed within epoch 2, and a second time at the start of epoch 3."""
FREEZE = ("-pretrained", TEACHER, "MODEL.FREEZE=[backbone]")
SEVERAL = (
    "-data_path",
    LABELS,
    "DATA.DATASET=csv",
    "DATA.MULTI_LABEL=true",
    "MODEL.NUM_CLASSES=auto",
    "DATA.NUM_WORKERS=0",
)
SOFT = ("TRAIN.DISTILLATION_TYPE=soft", "TRAIN.DISTILLATION_TAU=3", "TRAIN.TEACHER_MODEL=" + TEACHER)
MIXED = ("TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1.0", "TRAIN.RANDOM_ERASE_PROB=0.5", "MODEL.DROPPATH=0.1")
OVERFLOWING = ("-amp", "fp16", "-pretrained", FAULTY, "TRAIN.WARMUP_EPOCHS=0")
RESNET = ("MODEL.TYPE=timm", "MODEL.NAME=resnet18", "MODEL.PATCH_SIZE=null", "MODEL.EMBED_DIM=null", "MODEL.DEPTH=null")
RESNET += ("MODEL.NUM_HEADS=null", "MODEL.MLP_RATIO=null", "MODEL.QKV_BIAS=null", "DATA.IMAGE_SIZE=32")


class Way(NamedTuple):
    """A way of training with numerics of its own."""

    words: tuple[str, ...] = ()
    processes: int = 1
    later: int | None = None
    """Number of processes of resumed runs; None: the same number."""


WAYS = {
    "fp32": Way(),
    "bf16": Way(("-amp", "bf16")),
    "fp16": Way(("-amp", "fp16")),
    "O2": Way(("-amp", "O2", "AMP.DTYPE=bf16")),
    "O3": Way(("-amp", "O3")),
    "NAIVE": Way(("-amp", "NAIVE", "AMP.DTYPE=bf16")),
    "fp8": Way(("-amp", "fp8")),
    "op_lists": Way(("-amp", "bf16", "AMP.CUSTOM_BLACK_LIST=[linear]", "AMP.FP32_MODULES=['blocks.0.*']")),
    "compiled": Way(("-amp", "bf16", "TRAIN.COMPILE=blocks")),
    "compiled_whole": Way(("-amp", "fp16", "TRAIN.COMPILE=whole")),
    "wide": Way(("-amp", "bf16", "MODEL.EMBED_DIM=256")),
    "accumulated": Way(("-amp", "bf16", "TRAIN.ACCUM_ITER=2", "TRAIN.MIXUP_ALPHA=0.8", "MODEL.DROPPATH=0.1")),
    "last_batch": Way((*PHASES, "DATA.DROP_LAST=false", "TRAIN.ACCUM_ITER=4", "DATA.BATCH_SIZE=64")),
    "mixed": Way(MIXED),
    "bce": Way(("TRAIN.LOSS=bce", *MIXED)),
    "recomputed": Way(("-amp", "bf16", "TRAIN.GRAD_CHECKPOINT=blocks", "MODEL.DROPOUT=0.1")),
    "muon": Way(("-amp", "bf16", "TRAIN.OPTIMIZER.NAME=Muon")),
    "layer_rates": Way(("-pretrained", TEACHER, "TRAIN.LAYER_DECAY=0.7")),
    "teacher": Way(SOFT),
    "teacher_fp16": Way(("-amp", "fp16", *SOFT, *MIXED)),
    "several_labels": Way(SEVERAL),
    "class_weights": Way(("TRAIN.CLASS_WEIGHTS=balanced",)),
    "balanced": Way(("DATA.SAMPLER=balanced",)),
    "token_drop": Way((*PHASES, "TRAIN.TOKEN_DROP=0.25", "TRAIN.TOKEN_DROP_TAIL=1")),
    "growing": Way((*PHASES, "TRAIN.SIZE_SCHEDULE=[[0, 4], [1, 6], [2, 8]]")),
    "frozen": Way(FREEZE),
    "frozen_O2": Way((*FREEZE, "-amp", "O2", "AMP.DTYPE=fp16")),
    "frozen_ddp": Way(FREEZE, processes=2),
    "skips": Way(("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e9", "AMP.DECR_RATIO=0.1")),
    "auto_fp32": Way((*OVERFLOWING, "AMP.AUTO_FP32=true")),
    "auto_fp32_O2": Way((*OVERFLOWING, "AMP.AUTO_FP32=true", "AMP.LEVEL=O2")),
    "auto_fp32_ddp": Way((*OVERFLOWING, "AMP.AUTO_FP32=true"), processes=2),
    "ema_on_cpu": Way(("TRAIN.MODEL_EMA_FORCE_CPU=true", "TRAIN.MODEL_EMA_WARMUP=false")),
    "stages": Way(("REPORT_STAGES=true", "-amp", "bf16")),
    "channels_last": Way((*RESNET, "SPEED=+channels_last", "-amp", "bf16", *PHASES)),
    "batch_norm": Way((*RESNET, *PHASES, "DATA.BATCH_SIZE=128"), processes=2),
    "ddp": Way(("-amp", "bf16"), processes=2),
    "ddp_O2": Way(("-amp", "O2", "AMP.DTYPE=fp16", "TRAIN.ACCUM_ITER=2"), processes=2),
    "ddp_to_one": Way(("-amp", "bf16"), processes=2, later=1),
    "fsdp": Way(("-amp", "bf16", "DIST.STRATEGY=fsdp"), processes=2),
    "fsdp_fp16": Way(("-amp", "fp16", "DIST.STRATEGY=fsdp", "TRAIN.ACCUM_ITER=2"), processes=2),
    "fsdp_to_one": Way(("DIST.STRATEGY=fsdp",), processes=2, later=1),
}


def make_materials(made: Path) -> None:
    """Write a table with several labels per image and weights that overflow. `made` has the teacher's run."""
    (last,) = (made / "teacher" / "checkpoints").glob("step-*/model.safetensors")
    weights = load_file(last)
    weights["blocks.0.mlp.fc1.bias"] = torch.full_like(weights["blocks.0.mlp.fc1.bias"], 7e4)  # above fp16's largest
    save_file(weights, made / "faulty.safetensors")
    # Digits as PNG files; their labels are properties of the number.
    root, (pixels, numbers) = made / "labels", load_digits(return_X_y=True)
    (root / "images").mkdir(parents=True)
    lines = {"train": ["path,labels"], "val": ["path,labels"]}
    for index, (image, number) in enumerate(zip(pixels[:600], numbers, strict=False)):
        path = f"images/{index}.png"
        Image.fromarray((image * 15).astype(np.uint8).reshape(8, 8)).save(root / path)
        labels = [
            ("even" if number % 2 == 0 else ""),
            ("large" if number > 5 else ""),
            ("round" if number in {0, 8} else ""),
        ]
        lines["val" if index % 5 == 0 else "train"].append(f"{path},{';'.join(filter(None, labels))}")
    for name, rows in lines.items():
        (root / f"{name}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
