#!/usr/bin/env python3
"""Train on small sets of images with a recipe and nothing set, beside timm's train.py.

    python bench/finetune_bench.py SETS -weights lite0.safetensors -timm pytorch-image-models -json bench.json
    python bench/finetune_bench.py SETS -backbone vit -weights vit.safetensors -timm ... -size 32 -json vit.json
    python bench/finetune_bench.py SETS -backbone scratch -timm ... -size 32 -epochs 50 -json scratch.json

SETS has one folder per set of images, with `pool/CLASS` and `aside/CLASS`. Draw 0 trains on some images of the pool and
is validated on others of it; there, timm's learning rate is chosen among three. The other draws train on other images
of the pool, with another seed, and are evaluated on those set aside. Runs that the JSON file holds are not run again.
"""

import argparse
import csv
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from math import hypot, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]


class Backbone(NamedTuple):
    ours: str
    """Flags of vitamp"""
    timms: str
    rates: tuple[float | str, ...]
    """Learning rates of timm; RATE --opt NAME is one of another optimiser"""


BACKBONES = {
    "lite0": Backbone(
        "configs/finetune.yaml -pretrained {weights} -model tf_efficientnet_lite0",
        "--pretrained --pretrained-path {weights} --model tf_efficientnet_lite0"
        " -b 32 --warmup-epochs 0 --head-init-scale 1e-6",
        (2e-4, 5e-4, 1e-3),
    ),
    # That of configs/vit_cifar10_small.yaml: -weights is the model.safetensors of a run.
    "vit": Backbone(
        "configs/finetune.yaml -pretrained {weights} MODEL.PATCH_SIZE=4",
        "--pretrained --pretrained-path {weights} --model deit_tiny_patch16_224"
        " --model-kwargs img_size=32 patch_size=4 embed_dim=96 depth=6 num_heads=3"
        " --mean 0.4914 0.4822 0.4465 --std 0.2470 0.2435 0.2616 --crop-pct 1.0 -b 16 --warmup-epochs 1",
        (5e-4, 1e-3, 2e-3),
    ),
    # Without weights, smaller than in the recipe; timm's crops are those of the recipe.
    "scratch": Backbone(
        "configs/small_images.yaml MODEL.EMBED_DIM=64 MODEL.DEPTH=4 MODEL.NUM_HEADS=2",
        "--model deit_tiny_patch16_224 --model-kwargs img_size=32 patch_size=4 embed_dim=64 depth=4 num_heads=2"
        " --crop-pct 1.0 -b 32 --warmup-epochs 5 --drop-path 0.1 --model-ema --model-ema-decay 0.998"
        " --model-ema-warmup --scale 0.6 1.0 --hflip 0 --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --amp --amp-dtype bfloat16",
        (5e-4, 1e-3, 2e-3, "1e-2 --opt muon"),
    ),
}
OURS = (
    "main_single_gpu.py -cfg {backbone} -amp -data_path {data}"
    " -epochs {epochs} -image_size {size} -device cpu THREADS=1 DATA.NUM_WORKERS=0 VALIDATE_FREQ={epochs} SEED={seed}"
    " -output {out}"
)
TIMMS = (
    "train.py --data-dir {data} --train-split train"
    " --val-split val --num-classes {classes} --epochs {epochs} --input-size 3 {size} {size} --device cpu -j 1"
    " --no-prefetcher --channels-last --val-interval {epochs} --seed {seed} --output {out} --experiment run"
    " -vb 100 --opt adamw --weight-decay 0.05 --sched cosine --sched-on-updates --min-lr 1e-6"
    " --clip-grad 1.0 --scale 0.3 1.0 --smoothing 0.1 --color-jitter 0 {backbone} --lr {lr}"
)


def link(images: list[Path], folder: Path) -> None:
    for number, image in enumerate(images):
        place = folder / image.parent.name / f"{number}{image.suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(image.resolve(), place)


def lay_out(of: Path, draw: int, images: int, folder: Path) -> int:
    """Make train/ and val/ of one draw; returns the number of images in val/."""
    pool = sorted(path for path in (of / "pool").rglob("*") if path.is_file())
    random.Random(f"{of.name}{draw}").shuffle(pool)
    images = min(images, len(pool) if draw else len(pool) * 2 // 3)
    validation = sorted(path for path in (of / "aside").rglob("*") if path.is_file()) if draw else pool[images:][:500]
    link(pool[:images], folder / "train")
    link(validation, folder / "val")
    return len(validation)


def run(asked: argparse.Namespace, of: Path, draw: int, rate: float | str | None) -> dict[str, Any]:
    """Train once; `rate` is timm's learning rate, None means vitamp."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "data")
        out = Path(scratch, "out")
        backbone = BACKBONES[asked.backbone]
        validated = lay_out(of, draw, asked.images, data)
        weights = asked.weights if rate is None else asked.timm_weights or asked.weights
        template, flags = (OURS, backbone.ours) if rate is None else (TIMMS, backbone.timms)
        command = template.replace("{backbone}", flags).format(
            weights=weights and weights.resolve(),
            data=data,
            epochs=asked.epochs,
            size=asked.size,
            seed=draw,
            out=out,
            lr=rate,
            classes=len(list((data / "train").iterdir())),
        )
        before = os.times()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        place = ROOT if rate is None else asked.timm
        command = [sys.executable, *command.split()]
        done = subprocess.run(command, check=True, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)
        after = os.times()
        row = {"set": of.name, "draw": draw, "program": "vitamp" if rate is None else "timm", "images": validated}
        if rate is None:
            first, *_, last = re.findall(r"Validation Loss: .*?Acc@1: ([\d.]+)", done.stdout)
            row |= {"acc1": float(last)} | ({"probe": float(first)} if weights else {})
        else:
            *_, last = csv.DictReader((out / "run/summary.csv").open())
            row |= {"lr": rate, "acc1": float(last["eval_top1"])}
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return row | {"cpu_minutes": round(used / 60, 2)}


def best_rate(rows: list[dict[str, Any]], name: str) -> float | str:
    """timm's rate with the best top-1 in draw 0."""
    tried = [row for row in rows if (row["set"], row["draw"], row["program"]) == (name, 0, "timm")]
    return max(tried, key=lambda row: row["acc1"])["lr"]


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Means over the draws; `reach` is of a 95 % interval of the difference for other images like those set aside.

    It takes the two programs' answers as independent, which is too wide where they err on the same images.
    """
    of: dict[str, list[dict[str, Any]]] = {"vitamp": [], "timm": []}
    for row in rows:
        if row["set"] == name and row["draw"]:
            of[row["program"]].append(row)
    acc1 = {program: mean(row["acc1"] for row in runs) for program, runs in of.items()}
    images = of["vitamp"][0]["images"]
    variance = sum(value * (100 - value) / images for value in acc1.values())
    return {
        "set": name,
        "images": images,
        **({"probe": round(mean(row["probe"] for row in of["vitamp"]), 1)} if "probe" in of["vitamp"][0] else {}),
        "timm_lr": best_rate(rows, name),
        **{program: round(value, 1) for program, value in acc1.items()},
        "difference": round(acc1["vitamp"] - acc1["timm"], 1),
        "reach": round(1.96 * sqrt(variance), 1),
        **{
            f"{program}_cpu_minutes": round(mean(row["cpu_minutes"] for row in runs), 2) for program, runs in of.items()
        },
    }


def over_backbones(tables: list[list[dict[str, Any]]]) -> dict[str, float]:
    """As `over_sets`, of each set's mean over backbones; `tables`: of each backbone, its sets."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for one in (one for table in tables for one in table):
        by_set.setdefault(one["set"], []).append(one)
    means = [
        {
            "difference": mean(row["difference"] for row in rows),
            "reach": hypot(*(row["reach"] for row in rows)) / len(rows),
        }
        for rows in by_set.values()
    ]
    return over_sets(means)


def over_sets(summaries: list[dict[str, Any]]) -> dict[str, float]:
    """The mean difference, and the reach of its 95 % interval for other sets, and for other images of these."""
    differences = [one["difference"] for one in summaries]
    sets = len(summaries)
    of_sets = student.ppf(0.975, sets - 1) * stdev(differences) / sqrt(sets)
    return {
        "difference": round(mean(differences), 1),
        "reach": round(float(of_sets), 1),
        "reach_of_images": round(hypot(*(one["reach"] for one in summaries)) / sets, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    parser.add_argument("-backbone", choices=BACKBONES, default="lite0")
    parser.add_argument("-weights", type=Path, help="of the backbone")
    parser.add_argument("-timm_weights", type=Path, help="without a decoder, where -weights are of masked pre-training")
    parser.add_argument("-timm", type=Path, required=True, help="a checkout of timm, for its train.py")
    parser.add_argument("-json", type=Path, required=True)
    parser.add_argument("-images", type=int, default=500, help="training images of a draw")
    parser.add_argument("-epochs", type=int, default=8)
    parser.add_argument("-size", type=int, default=96, help="image size in pixels")
    parser.add_argument("-draws", type=int, default=2)
    parser.add_argument(
        "-others", type=Path, nargs="*", default=[], help="JSON of other backbones, for a mean over all"
    )
    asked = parser.parse_args()
    held = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    rows: list[dict[str, Any]] = held.get("runs", [])
    backbone = BACKBONES[asked.backbone]
    names = sorted(folder.name for folder in asked.sets.iterdir() if (folder / "pool").is_dir())

    def add(name: str, draw: int, rate: float | str | None) -> None:
        program = "vitamp" if rate is None else "timm"
        if not any((r["set"], r["draw"], r["program"], r.get("lr")) == (name, draw, program, rate) for r in rows):
            rows.append(run(asked, asked.sets / name, draw, rate))
            asked.json.write_text(json.dumps(held | {"runs": rows}, indent=1))

    for name in names:
        for rate in backbone.rates:
            add(name, 0, rate)
        for draw in range(1, asked.draws + 1):
            add(name, draw, None)
            add(name, draw, best_rate(rows, name))
    summaries = [summary(rows, name) for name in names]
    commands = {
        "vitamp": f"python {OURS.replace('{backbone}', backbone.ours)}",
        "timm": f"python {TIMMS.replace('{backbone}', backbone.timms)}",
    }
    held |= {"commands": commands, "sets": summaries, "over_sets": over_sets(summaries), "runs": rows}
    if asked.others:
        held["over_backbones"] = over_backbones(
            [summaries, *(json.loads(one.read_text())["sets"] for one in asked.others)]
        )
    asked.json.write_text(json.dumps(held, indent=1) + "\n")
    print(json.dumps(held["sets"], indent=1), held["over_sets"])


if __name__ == "__main__":
    main()
