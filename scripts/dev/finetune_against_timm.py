#!/usr/bin/env python3
"""Fine-tune with timm's train.py and with vitamp, with the same settings over several seeds, and compare top-1.

    python scripts/dev/finetune_against_timm.py -timm_train ~/pytorch-image-models/train.py -timm_version 1.0.28 \
        -json docs/results/finetune_timm.json

The images are scikit-learn's digits as JPEGs. timm trains a ViT-Ti on 5 to 9, and its weights are saved as a folder for
timm's hub. Both programs then fine-tune it on 200 images of 0 to 4, and validate on 400 others.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from datasets.sources.digits import read_digits  # noqa: E402
from engine.machine.device import processor  # noqa: E402
from utils.parent import as_child  # noqa: E402
from utils.record.history import History  # noqa: E402
from utils.record.tasks import TOP1  # noqa: E402
from utils.record.weight_sets import PLAIN  # noqa: E402

MODEL, SIDE = "vit_tiny_patch16_224", 48
OLD_CLASSES, NEW_CLASSES = range(5, 10), range(5)
MEAN_STD = (0.5, 0.5, 0.5)
RECIPE = ROOT / "configs" / "finetune_vit_small.yaml"
"""SAME has its settings as timm's train.py spells them, but the EMA, which changes no weights. The learning rate is
higher, for a smaller model and fewer images."""
SAME = (
    "--epochs 20 -b 32 --opt adamw --lr 1e-3 --weight-decay 0.05 --layer-decay 0.65 --clip-grad 1 "
    "--sched cosine --sched-on-updates --warmup-epochs 1 --warmup-prefix --warmup-lr 1e-6 --min-lr 1e-6 "
    "--scale 0.3 1.0 --color-jitter 0 --train-interpolation bicubic --smoothing 0.1 --drop-path 0.1"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-timm_train", type=Path, required=True, help="train.py of timm's repository")
    parser.add_argument("-timm_version", required=True, help="release or commit of that repository, for the results")
    parser.add_argument("-seeds", type=int, default=5, help="runs of each (default 5)")
    parser.add_argument("-json", type=Path, required=True, help="where the results go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.timm_train.resolve(), Path(folder))
        weights = bench.pretrain()
        bench.write_images("new", NEW_CLASSES, train=40, val=80)
        runs = []
        for seed in range(args.seeds):
            runs += [bench.by_timm(weights, seed), bench.by_vitamp(weights, seed)]
            print(*(f"{run['program']}, seed {seed}: {run['acc1']:.2f} %" for run in runs[-2:]), sep="; ", flush=True)
    fields = {"runs": runs, "timm_train": args.timm_version, **about(SAME)}
    args.json.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    for program in ("timm", "vitamp"):
        found = [run["acc1"] for run in runs if run["program"] == program]
        print(f"{program}: {statistics.fmean(found):.2f} ± {statistics.stdev(found):.2f} %")
    return 0


class Bench:
    """The folder of images, weights and runs."""

    def __init__(self, timm_train: Path, folder: Path) -> None:
        self._timm_train, self.folder = timm_train, folder

    def write_images(self, name: str, classes: range, train: int, val: int) -> Path:
        """Write so many JPEGs of each class for training and for validation."""
        pixels, labels = read_digits()
        written = dict.fromkeys(classes, 0)
        for number, (digit, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
            if written.get(label, train + val) == train + val:
                continue
            split = "train" if written[label] < train else "val"
            written[label] += 1
            file = self.folder / name / split / str(label) / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(digit).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, quality=95)
        return self.folder / name

    def pretrain(self) -> Path:
        """Train on the other digits with timm's train.py; return its weights as a folder for timm's hub."""
        images = self.write_images("old", OLD_CLASSES, train=140, val=30)
        size = f"--img-size {SIDE} --model-kwargs img_size={SIDE}"
        words = f"{size} --epochs 15 -b 32 --opt adamw --lr 1e-3 --weight-decay 0.05 --clip-grad 1 --hflip 0"
        run = self.run_timm(images, "pretrain", 0, *words.split())
        # As many outputs as ImageNet has classes: timm would keep a classifier of as many as the new images have.
        model: Any = timm.create_model(MODEL, img_size=SIDE)
        with torch.serialization.safe_globals([argparse.Namespace]):  # train.py stores its arguments, too
            state = torch.load(run / "last.pth.tar", map_location="cpu", weights_only=True)["state_dict"]
        model.load_state_dict(state)
        weights = self.folder / "weights"
        given = {
            "mean": MEAN_STD,
            "std": MEAN_STD,
            "input_size": (3, SIDE, SIDE),
            "crop_pct": 0.9,
            "interpolation": "bicubic",
        }
        timm.models.save_for_hf(
            model,
            str(weights),
            model_config={"pretrained_cfg": model.pretrained_cfg | given},
            model_args={"img_size": SIDE},
        )
        return weights

    def by_timm(self, weights: Path, seed: int) -> dict[str, Any]:
        words = f"{SAME} --pretrained --num-classes {len(NEW_CLASSES)} --amp --amp-dtype bfloat16".split()
        run = self.run_timm(self.folder / "new", f"timm-{seed}", seed, *words, model=f"local-dir:{weights}")
        return {"program": "timm", "seed": seed, "acc1": last_of_timm(run)}

    def by_vitamp(self, weights: Path, seed: int) -> dict[str, Any]:
        images, run = self.folder / "new", self.folder / f"vitamp-{seed}"
        files = ["-cfg", RECIPE, "-data_path", images, "-pretrained", weights, "-output", run]
        words = f"-model {MODEL} -lr 1e-3 -amp bf16 -seed {seed} -device cpu".split()
        self.execute(ROOT / "main_single_gpu.py", *files, *words)
        return {"program": "vitamp", "seed": seed, "acc1": History.of_run(run).last(TOP1)[PLAIN]}

    def run_timm(self, images: Path, name: str, seed: int, *words: str, model: str = MODEL) -> Path:
        files = ["--data-dir", images, "--output", self.folder, "--experiment", name, "--model", model]
        more = f"--train-split train --val-split val --seed {seed} --device cpu -j 1 --checkpoint-hist 1".split()
        self.execute(self._timm_train, *files, *more, *words)
        return self.folder / name

    def execute(self, *words: Path | str) -> None:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(command, cwd=self.folder, env=as_child(), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def last_of_timm(run: Path) -> float:
    """Top-1 of timm's last validation."""
    with (run / "summary.csv").open(encoding="utf-8") as file:
        return float(list(csv.DictReader(file))[-1]["eval_top1"])


def about(settings: str) -> dict[str, Any]:
    return {
        "settings": settings,
        "device": f"cpu: {processor()}",
        "versions": {name: version(name) for name in ("torch", "timm")},
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
