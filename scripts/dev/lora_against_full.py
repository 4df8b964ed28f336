#!/usr/bin/env python3
"""Compare LoRA with training everything and with training the classifier only: memory and speed, then top-1 on digits.

    python scripts/dev/lora_against_full.py -json docs/results/lora_cpu.json

Memory and speed are those of a ViT-B/16 on random images, by the engine's own update; the contenders take turns. For
top-1, a small ViT learns the digits 0 to 4, and is then fine-tuned on 20 images of each of the digits 5 to 9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from datasets.sources.digits import read_digits  # noqa: E402
from engine.checkpoint.state import state_of, tensors_of  # noqa: E402
from engine.evaluate import evaluate  # noqa: E402
from engine.machine.context import Run  # noqa: E402
from engine.machine.device import processor  # noqa: E402
from engine.machine.memory import LiveMemory  # noqa: E402
from engine.measure.progress import Best, Position  # noqa: E402
from engine.setup import ReadyToTrain, build_for_training  # noqa: E402
from engine.update import train_update  # noqa: E402
from models import count_parameters  # noqa: E402
from tools.common.turns import alternating_order  # noqa: E402
from utils.config import load_config  # noqa: E402
from utils.distributed.world import ALONE  # noqa: E402

MODEL, CLASSES = "vit_base_patch16_224", 100
ALL = "q,k,v,proj,fc1,fc2"
CONTENDERS = {
    "everything": {},
    f"LoRA, rank 8, {ALL.replace(',', ', ')}": {"MODEL.LORA.RANK": "8", "MODEL.LORA.TARGETS": ALL},
    "LoRA, rank 8, q, v": {"MODEL.LORA.RANK": "8"},
    "classifier only": {"MODEL.FREEZE": "backbone"},
}
UNLIMITED = 2**62
CPU = torch.device("cpu")
RATES = ("1e-3", "3e-3", "1e-2")
"""Learning rates that each contender is given in the second part"""
OLD, NEW = range(5), range(5, 10)
DIGITS = {
    "DATA.DATASET": "imagefolder",
    "DATA.IMAGE_SIZE": "8",
    "DATA.CROP": "none",
    "DATA.FLIP": "0",
    "DATA.SHIFT": "0",
    "DATA.ROTATE": "0",
    "DATA.DROP_LAST": "false",
    "DATA.NUM_WORKERS": "0",
    "MODEL.NUM_CLASSES": "5",
    "TRAIN.MODEL_EMA": "false",
    "DEVICE": "cpu",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-batch_size", type=int, default=8, help="of the ViT-B (default 8)")
    parser.add_argument("-rounds", type=int, default=5, help="timed updates of each contender (default 5)")
    parser.add_argument("-seeds", type=int, default=5, help="runs on digits of each learning rate (default 5)")
    parser.add_argument("-json", type=Path, required=True, help="where the results go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fields = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else about(args)
    for part, measure in (("lora", measure_costs), ("runs", train_on_digits)):
        with tempfile.TemporaryDirectory() as folder:
            fields[part] = fields.get(part) or measure(Path(folder), args)
        args.json.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return 0


def about(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": f"{MODEL}, {CLASSES} classes, batch {args.batch_size}, AdamW, fp32, one thread",
        "device": f"cpu: {processor()}",
        "versions": {name: version(name) for name in ("torch", "timm")},
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python scripts/dev/lora_against_full.py -json docs/results/{args.json.name}",
    }


def measure_costs(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Memory of one update, size of a checkpoint, and seconds of each timed update."""
    batch, rounds = args.batch_size, args.rounds
    weights = folder / f"{MODEL}.safetensors"
    save_file(timm.create_model(MODEL, num_classes=CLASSES).state_dict(), weights)
    settings = {
        "DATA.DATASET": "synthetic",
        "DATA.SYNTHETIC_TRAIN": f"{batch * (rounds + 4)}",
        "DATA.BATCH_SIZE": f"{batch}",
        "MODEL.NAME": MODEL,
        "MODEL.NUM_CLASSES": f"{CLASSES}",
        "MODEL.PRETRAINED": f"{weights}",
        "DEVICE": "cpu",
    }
    built, found = {}, {}
    for name, more in CONTENDERS.items():
        with LiveMemory(CPU, UNLIMITED) as live:
            ready = build(settings | more)
            updates = Updates(ready)
            updates.next()  # makes the optimiser's state
            live.take_peak()
            updates.next()
            peak = live.take_peak()
        total, trained = count_parameters(ready.model)
        state = state_of(ready.parts, Position(), Best(), batch, {})
        saved = bytes_in((tensors_of(ready.parts), state))
        found[name] = {"contender": name, "trained": trained, "parameters": total, "peak_bytes": peak}
        found[name] |= {"checkpoint_bytes": saved, "seconds": []}
        built[name] = updates
        print(f"{name}: {trained:,} trained, {peak / 1e9:.2f} GB, checkpoint {saved / 1e6:.1f} MB", flush=True)
    for _, name in alternating_order([*built], range(rounds)):
        found[name]["seconds"].append(built[name].next())
    for name, about in found.items():
        print(f"{name}: {statistics.median(about['seconds']):.2f} s per update", flush=True)
    return [*found.values()]


def build(settings: dict[str, str], recipe: Path | None = None) -> ReadyToTrain:
    config = load_config(None if recipe is None else str(recipe), words=settings).config
    ready = build_for_training(Run(config, ALONE, CPU, threads=1), None)
    ready.parts.assemble()
    return ready


class Updates:
    """The updates of a training, one by one."""

    def __init__(self, ready: ReadyToTrain) -> None:
        self._ready, self._windows, self._done = ready, iter(ready.train_loader.epoch(1)), 0

    def next(self) -> float:
        """Train one update; returns its seconds."""
        window = next(self._windows)
        began = time.perf_counter()
        self._done += 1
        train_update(self._ready.parts, window, self._done)
        return time.perf_counter() - began


def bytes_in(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def train_on_digits(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Last top-1 of each contender, learning rate and seed."""
    old = write_digits(folder / "old", OLD, train=140, val=30)
    new = write_digits(folder / "new", NEW, train=20, val=60)
    base = train({"DATA.DATA_PATH": f"{old}", "TRAIN.NUM_EPOCHS": "30"})
    print(f"digits 0 to 4: {top1(base):.2f} %", flush=True)
    weights = folder / "base.safetensors"
    save_file(base.model.state_dict(), weights)
    start = {"DATA.DATA_PATH": f"{new}", "MODEL.PRETRAINED": f"{weights}", "MODEL.NEW_CLASSIFIER": "true"}
    start["TRAIN.NUM_EPOCHS"] = "60"
    runs = []
    for seed in range(args.seeds):
        for name, settings in CONTENDERS.items():
            for rate in RATES:
                acc1 = top1(train({**start, **settings, "TRAIN.BASE_LR": rate, "SEED": f"{seed}"}))
                runs.append({"contender": name, "learning_rate": rate, "seed": seed, "acc1": acc1})
                print(f"{name}, learning rate {rate}, seed {seed}: {acc1:.2f} %", flush=True)
    return runs


def train(settings: dict[str, str]) -> ReadyToTrain:
    """A whole training with the recipe of the digits, without augmentation."""
    ready = build(DIGITS | settings, ROOT / "configs" / "vit_digits.yaml")
    update = 0
    for epoch in range(1, int(settings["TRAIN.NUM_EPOCHS"]) + 1):
        for window in ready.train_loader.epoch(epoch):
            train_update(ready.parts, window, update := update + 1)
    return ready


def top1(ready: ReadyToTrain) -> float:
    parts = ready.parts
    found = evaluate(
        ready.model, ready.val_loader, len(ready.val_set), ready.inputs, parts.precision, ALONE, ready.task
    )
    acc1 = found.fields()["acc1"]
    assert acc1 is not None  # one label per image
    return acc1


def write_digits(folder: Path, classes: range, train: int, val: int) -> Path:
    """Write so many images of each class for training and for validation."""
    pixels, labels = read_digits()
    written = dict.fromkeys(classes, 0)
    for number, (digit, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        if written.get(label, train + val) < train + val:
            file = folder / ("train" if written[label] < train else "val") / str(label) / f"{number}.png"
            written[label] += 1
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digit).convert("L").save(file)
    return folder


if __name__ == "__main__":
    sys.exit(main())
