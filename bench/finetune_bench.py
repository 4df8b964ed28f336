#!/usr/bin/env python3
"""Train on small sets of images with a recipe and nothing set, beside timm's train.py.

    python bench/finetune_bench.py SETS -weights lite0.safetensors -timm pytorch-image-models -json bench.json
    python bench/finetune_bench.py SETS ... -images 100 500 2000 -epochs 8 20 -draws 4 -lines plain advised bce
    python bench/finetune_bench.py SETS -backbone vit -weights vit.safetensors -timm ... -size 32 -json vit.json
    python bench/finetune_bench.py SETS -backbone scratch -lines plain muon -timm ... -epochs 50 -json scratch.json

SETS has one folder per set of images, with `pool/CLASS` and `aside/CLASS`. Draw 0 trains on some images of the pool and
is validated on at most 500 others of it. There, timm's learning rate is chosen: of a grid, which is extended until the
best rate is inside. The other draws train on other images of the pool, with another seed, and predict the images set
aside. A set whose pool has too few images for an amount is left out. timm's inference.py needs pandas.

Runs that the JSON file holds are not run again, and it is written after each run. Draws follow one another over all
sets, so that a bench that was ended has as many sets as possible.

timm has lines of flags. The learning rate is chosen for each line and each set; in one more table, the line is, too:

- plain: AdamW and cosine schedule with the recipe's batch, warm-up, weight decay, clipping, crops and label smoothing.
- advised: plain with what is advised for fine-tuning. An EMA, whose window timm's author sets to 2 to 5 epochs (issue
  11 of huggingface/pytorch-image-models); `--model-ema-warmup` comes to 1 to 2 in runs as short as these. Layer decay
  is that of ConvNeXt's fine-tuning (arXiv 2201.03545, A.2), the nearest recipe for a convolutional network.
- own_head: plain with the classifier that train.py makes. In the other lines, Lite0's starts near zero.
- bce: advised with binary cross-entropy. timm's author has it in "ResNet strikes back" (arXiv 2110.00476), for training
  from scratch.
- muon: plain with Muon, for training from scratch.
- muon_aa: the same with AutoAugment, at the rate that was best for Muon with fewer epochs.
- tutorial: what PyTorch's tutorial on transfer learning has, with its learning rate.

Mixup and CutMix are off in all lines, as in ConvNeXt's fine-tuning, whose classifier starts near zero, too. timm's
author starts with a tenth of the learning rate for training from scratch (issue 25); rates below the grid are tried if
its lowest is the best. train.py has no flag that freezes batch norm, and skips the last batch if it is not full.
"""

import argparse
import csv
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from math import hypot
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.record.predictions import PREDICTIONS, PROBE
from utils.statistics.crossed import crossed_interval
from utils.statistics.differences import Difference, student_interval
from utils.statistics.paired import half_width_of_mean
from vitamp.files import write_atomically

Row = dict[str, Any]
"""A run, or the table of a set"""
ROOT = Path(__file__).resolve().parents[1]

GRID = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
STEP = 2
"""Ratio of neighbouring rates, also where the grid is extended"""
MOST_APART = 1.0
"""Points by which timm's train.py and inference.py may differ in top-1, since they normalise images differently"""


class Backbone(NamedTuple):
    ours: str
    """Flags of vitamp"""
    model: str
    """Flags of timm's train.py and inference.py"""
    training: str
    """Flags of timm's train.py"""
    grid: tuple[float, ...] = GRID
    """timm's learning rates that are always tried"""


SMALL_VIT = (
    "--crop-pct 1.0 --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --amp --amp-dtype bfloat16"
    " --model deit_tiny_patch16_224 --model-kwargs img_size=32 patch_size=4"
)
AS_SMALL_IMAGES = (
    "-b 32 --drop-path 0.1 --model-ema --model-ema-decay 0.998 --model-ema-warmup --scale 0.6 1.0 --hflip 0"
)
"""What configs/small_images.yaml sets, as timm's flags"""
BACKBONES = {
    "lite0": Backbone(
        "configs/finetune.yaml -pretrained {weights} -model tf_efficientnet_lite0",
        "--model tf_efficientnet_lite0",
        "--pretrained --pretrained-path {weights} -b 16 --head-init-scale 1e-6",
    ),
    # That of configs/vit_cifar10_small.yaml: -weights is the model.safetensors of a run.
    "vit": Backbone(
        "configs/finetune.yaml -pretrained {weights} MODEL.PATCH_SIZE=4",
        "--model deit_tiny_patch16_224 --model-kwargs img_size=32 patch_size=4 embed_dim=96 depth=6 num_heads=3"
        " --mean 0.4914 0.4822 0.4465 --std 0.2470 0.2435 0.2616 --crop-pct 1.0",
        "--pretrained --pretrained-path {weights} -b 16",
    ),
    # At 98 px, with weights for vit_small_patch14_dinov2, whose best rates are lower.
    "dinov2_s": Backbone(
        "configs/finetune.yaml -pretrained {weights} -model vit_small_patch14_dinov2",
        "--model vit_small_patch14_dinov2 --model-kwargs img_size=98",
        "--pretrained --pretrained-path {weights} -b 16",
        grid=(1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4),
    ),
    # Without weights, smaller than in the recipe, and of its size.
    "scratch": Backbone(
        "configs/small_images.yaml MODEL.EMBED_DIM=64 MODEL.DEPTH=4 MODEL.NUM_HEADS=2",
        f"{SMALL_VIT} embed_dim=64 depth=4 num_heads=2",
        f"{AS_SMALL_IMAGES} --warmup-epochs 5",
    ),
    "small_images": Backbone(
        "configs/small_images.yaml",
        f"{SMALL_VIT} embed_dim=128 depth=6 num_heads=4",
        f"{AS_SMALL_IMAGES} --warmup-epochs 10",
    ),
}
LINES = {
    "plain": "",
    "advised": "--layer-decay 0.8 --model-ema --model-ema-warmup",
    "own_head": "--head-init-scale 1",
    "bce": "--layer-decay 0.8 --model-ema --model-ema-warmup --bce-loss",
    "muon": "--opt muon",
    "muon_aa": "--opt muon --aa original",
    "tutorial": "--opt momentum --weight-decay 0 --sched step --decay-epochs 7 --decay-rate 0.1 --warmup-epochs 0"
    " --clip-grad 1e9 --scale 0.08 1.0 --smoothing 0 --head-init-scale 1 -b 4",
}
RATES = {"tutorial": 1e-3, "muon_aa": 1e-2}
"""Lines with a learning rate of their own"""
VITAMP = "vitamp"
CHOSEN = "best in draw 0"
OURS = (
    "main_single_gpu.py -cfg {backbone} -amp -data_path {data}"
    " -epochs {epochs} -image_size {size} -device cpu THREADS=1 DATA.NUM_WORKERS=0 VALIDATE_FREQ={epochs} SEED={seed}"
    " -output {out}"
)
TIMMS = (
    "train.py {model} --data-dir {data} --class-map {data}/classes.txt --num-classes {classes} --train-split train"
    " --val-split val --epochs {epochs} --input-size 3 {size} {size} --device cpu -j 1"
    " --no-prefetcher --channels-last --val-interval {epochs} --seed {seed} --output {out} --experiment run"
    " -vb 100 --opt adamw --weight-decay 0.05 --sched cosine --sched-on-updates --min-lr 1e-6 --warmup-epochs 1"
    " --clip-grad 1.0 --scale 0.3 1.0 --smoothing 0.1 --color-jitter 0 {training} {line} --lr {lr}"
)
PREDICT = (
    "inference.py {model} --data-dir {data} --class-map {data}/classes.txt --num-classes {classes} --split val"
    " --input-size 3 {size} {size} --device cpu -j 1 --channels-last -b 100 --checkpoint {out}/run/last.pth.tar"
    " --include-index --label-type none --no-console-results --results-dir {out} --results-file guesses"
)


def link(images: list[Path], folder: Path) -> None:
    for number, image in enumerate(images):
        place = folder / image.parent.name / f"{number:05}{image.suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(image.resolve(), place)


def images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def lay_out(of: Path, draw: int, images: int, folder: Path) -> list[int]:
    """Make train/, val/ and timm's classes.txt of one draw; returns the class of each image in val/."""
    pool = images_in(of / "pool")
    random.Random(f"{of.name}{draw}").shuffle(pool)
    one_of_class = list({image.parent.name: image for image in pool}.values())
    pool = one_of_class + [image for image in pool if image not in one_of_class]
    if draw:
        validation = images_in(of / "aside")
    else:
        images = min(images, len(pool) * 2 // 3)
        validation = sorted(pool[images:][:500])
    link(pool[:images], folder / "train")
    link(validation, folder / "val")
    classes = sorted(image.parent.name for image in one_of_class)
    (folder / "classes.txt").write_text("\n".join(classes))
    return labels_of(validation, pool)


def labels_of(images: list[Path], pool: list[Path]) -> list[int]:
    """Return the class of each image: the place of its folder among those of the pool, sorted."""
    classes = sorted({image.parent.name for image in pool})
    return [classes.index(image.parent.name) for image in images]


def train(asked: argparse.Namespace, task: Row) -> Row:
    """Train once and predict the images in val/; returns the task with its results."""
    ours = task["line"] == VITAMP
    backbone = BACKBONES[asked.backbone]
    weights = asked.weights if ours else asked.timm_weights or asked.weights
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "data")
        out = Path(scratch, "out")
        labels = lay_out(asked.sets / task["set"], task["draw"], task["images"], data)
        values = {"weights": weights and weights.resolve(), "data": data, "out": out, "seed": task["draw"]}
        values["classes"] = len((data / "classes.txt").read_text().splitlines())
        template = (OURS if ours else TIMMS).replace("{backbone}", backbone.ours)
        template = template.replace("{model}", backbone.model).replace("{training}", backbone.training)

        def call(template: str) -> None:
            command = [sys.executable, *template.format(**task | values | {"line": LINES.get(task["line"])}).split()]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, cwd=ROOT if ours else asked.timm, env=environment, stdout=sys.stderr)

        before = os.times()
        call(template)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        row = task | {"cpu_seconds": round(used, 1), "seconds": round(after.elapsed - before.elapsed, 1)}
        if ours:
            table = load_file(out / PREDICTIONS)
            assert table["labels"].tolist() == labels, "images in another order"
            row["guesses"] = " ".join(map(str, table["guess"]))
            row["acc1"] = top1(table["guess"], labels)
            if PROBE in table:
                row["probe"] = top1(table[PROBE], labels)
            return row
        *_, last = csv.DictReader((out / "run/summary.csv").open())
        row["acc1"] = float(last["eval_top1"])
        if task["draw"]:
            call(PREDICT.replace("{model}", backbone.model))
            table = sorted(csv.DictReader((out / "guesses.csv").open()), key=lambda image: image["filename"])
            guesses = np.array([int(image["index"]) for image in table])
            row["guesses"] = " ".join(map(str, guesses))
            assert abs(row["acc1"] - top1(guesses, labels)) < MOST_APART, "inference.py differs from train.py"
            row["acc1"] = top1(guesses, labels)
        return row


def top1(guesses: np.ndarray, labels: list[int]) -> float:
    return round(100 * float(np.mean(guesses == np.array(labels))), 4)


def best_rate(tried: dict[float, float]) -> float:
    """Return the learning rate with the highest top-1; of several, the middle one. `tried`: rate -> top-1."""
    highest = max(tried.values())
    best = sorted(rate for rate, acc1 in tried.items() if acc1 == highest)
    return best[len(best) // 2]


def next_rate(tried: dict[float, float], grid: tuple[float, ...]) -> float | None:
    """Return the learning rate to try next; None if the best one has a worse, or an equal, one on either side."""
    missing = [rate for rate in grid if rate not in tried]
    if missing:
        return missing[0]
    best = best_rate(tried)
    if best == max(tried):
        return best * STEP
    if best == min(tried):
        return best / STEP
    return None


class Runs:
    """Runs in a JSON file, to which it adds those that are missing."""

    def __init__(self, asked: argparse.Namespace):
        self.asked = asked
        self.held: Row = json.loads(asked.json.read_text()) if asked.json.exists() else {}
        self.rows: list[Row] = self.held.setdefault("runs", [])

    def of(self, **task: Any) -> list[Row]:
        """Return the runs with these values."""
        return [row for row in self.rows if task.items() <= row.items()]

    def run(self, **task: Any) -> Row:
        """Return the run of a task, from the file or by training."""
        done = self.of(**task)
        if not done:
            done = [train(self.asked, task)]
            self.rows.extend(done)
            self.save()
        return done[0]

    def rate(self, **where: Any) -> float:
        """Return timm's best learning rate in draw 0, trying rates until it is inside those tried.

        Lines with a learning rate of their own have that.
        """
        if where["line"] in RATES:
            return RATES[where["line"]]
        tried = dict[float, float]()
        grid = BACKBONES[self.asked.backbone].grid
        rate = next_rate(tried, grid)
        while rate is not None:
            tried[rate] = self.run(draw=0, lr=rate, **where)["acc1"]
            rate = next_rate(tried, grid)
        return best_rate(tried)

    def save(self) -> None:
        """Write the runs, and the tables of those that are complete."""
        backbone = BACKBONES[self.asked.backbone]
        timms = TIMMS.replace("{model}", backbone.model).replace("{training}", backbone.training)
        self.held["versions"] = {name: version(name) for name in ("torch", "timm")}
        self.held["commands"] = {
            VITAMP: f"python {OURS.replace('{backbone}', backbone.ours)}",
            "timm": f"python {timms}",
        }
        self.held["lines"] = LINES
        self.held["cpu_hours"] = round(sum(row["cpu_seconds"] for row in self.rows) / 3600, 2)
        self.held["tables"] = self.tables()
        write_atomically(self.asked.json, json.dumps(self.held, indent=1) + "\n")

    def tables(self) -> list[Row]:
        """Return a table for each amount of images, length and line of timm, and for the line chosen in draw 0."""
        tables = list[Row]()
        names = sorted({row["set"] for row in self.rows})
        sizes = sorted({(row["images"], row["epochs"], row["size"]) for row in self.rows})
        for (images, epochs, size), line in itertools.product(sizes, [*LINES, CHOSEN]):
            where = {"images": images, "epochs": epochs, "size": size}
            sets = list[Row]()
            for name in names:
                task = {"set": name} | where
                of_line = self.chosen_line(**task) if line == CHOSEN else line
                ours = self.of(line=VITAMP, **task)
                theirs = [row for row in self.of(line=of_line, **task) if row["draw"]]
                both = {row["draw"] for row in ours} & {row["draw"] for row in theirs}
                if both:
                    folder = self.asked.sets / name
                    labels = labels_of(images_in(folder / "aside"), images_in(folder / "pool"))
                    ours = [row for row in ours if row["draw"] in both]
                    sets.append({"set": name, "line": of_line} | compared(ours, theirs, labels))
            if sets:
                tables.append(where | {"line": line, "sets": sets, "over_sets": over_sets(sets)})
        return tables

    def chosen_line(self, **task: Any) -> str | None:
        """Return the line of timm with the best run in draw 0; None while one of them has no other run."""
        tries = self.of(draw=0, **task)
        if not tries or not all(self.of(line=row["line"], draw=1, **task) for row in tries):
            return None
        return max(tries, key=lambda row: row["acc1"])["line"]


def compared(ours: list[Row], theirs: list[Row], labels: list[int]) -> Row:
    """Compare runs of the same draws on the same images: means, and how far 95 % intervals of the difference reach.

    reach_of_images: for other images like those set aside, predicted by these runs; paired by image
    reach_of_draws: for other draws of training images and seeds, on these images. Draws share images of the pool, so
        that it is too small where they are most of it.
    reach: for other draws and other images
    That the learning rate was chosen in draw 0 is in none of them.
    """
    by_draw = {row["draw"]: row for row in theirs}
    theirs = [by_draw[row["draw"]] for row in ours]
    our_right = right(ours, labels)
    their_right = right(theirs, labels)
    differences = our_right - their_right
    means = np.array([our_right.mean(1), their_right.mean(1)])
    value = float(differences.mean())
    table: Row = {"draws": len(ours), "aside": len(labels)}
    if "probe" in ours[0]:
        table["probe"] = round(mean(row["probe"] for row in ours), 1)
    table |= {
        "lr": theirs[0]["lr"],
        VITAMP: round(float(means[0].mean()), 1),
        "timm": round(float(means[1].mean()), 1),
        "difference": round(value, 2),
        "reach_of_images": round(half_width_of_mean(differences.mean(0)), 2),
        "reach_of_draws": reach(student_interval(differences.mean(1).tolist(), 1)),
        "reach": None,
        "cpu_seconds": {
            VITAMP: round(mean(row["cpu_seconds"] for row in ours), 1),
            "timm": round(mean(row["cpu_seconds"] for row in theirs), 1),
        },
    }
    if len(ours) > 1:
        table["reach"] = reach(crossed_interval(value, our_right, their_right, means))
    return table


def right(runs: list[Row], labels: list[int]) -> np.ndarray:
    """Return draws x images: 100 where the run predicts the image right, else 0."""
    return 100.0 * (np.array([row["guesses"].split() for row in runs], int) == labels)


def reach(difference: Difference) -> float | None:
    """Return half the width of an interval; None for a single value, which has none."""
    if difference.low is None or difference.high is None:
        return None
    return round((difference.high - difference.low) / 2, 2)


def over_sets(tables: list[Row]) -> Row:
    """Return the sets' mean difference, and how far its 95 % interval reaches for other sets, and for other images."""
    of_sets = student_interval([one["difference"] for one in tables], 1)
    return {
        "sets": len(tables),
        "difference": round(of_sets.value, 2),
        "reach_of_sets": reach(of_sets),
        "reach_of_images": round(hypot(*(one["reach_of_images"] for one in tables)) / len(tables), 2),
    }


def over_backbones(tables: list[list[Row]]) -> Row:
    """As `over_sets`, of each set's mean over backbones; `tables`: of each backbone, its sets."""
    by_set: dict[str, list[Row]] = {}
    for one in itertools.chain(*tables):
        by_set.setdefault(one["set"], []).append(one)
    means = list[Row]()
    for rows in by_set.values():
        of_images = hypot(*(row["reach_of_images"] for row in rows)) / len(rows)
        means.append({"difference": mean(row["difference"] for row in rows), "reach_of_images": of_images})
    return over_sets(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", type=Path)
    parser.add_argument("-backbone", choices=BACKBONES, default="lite0")
    parser.add_argument("-weights", type=Path, help="of the backbone")
    parser.add_argument("-timm_weights", type=Path, help="without a decoder, where -weights are of masked pre-training")
    parser.add_argument("-timm", type=Path, required=True, help="a checkout of timm, for train.py and inference.py")
    parser.add_argument("-json", type=Path, required=True)
    parser.add_argument("-lines", nargs="+", choices=LINES, default=["plain", "advised"], help="of timm's flags")
    parser.add_argument("-images", type=int, nargs="+", default=[500], help="training images of a draw")
    parser.add_argument("-epochs", type=int, nargs="+", default=[8])
    parser.add_argument("-size", type=int, default=96, help="image size in pixels")
    parser.add_argument("-draws", type=int, default=4, help="without draw 0")
    parser.add_argument(
        "-others", type=Path, nargs="*", default=[], help="JSON of other backbones, for a mean over all"
    )
    asked = parser.parse_args()
    runs = Runs(asked)
    names = sorted(folder.name for folder in asked.sets.iterdir() if (folder / "pool").is_dir())
    for images, epochs in itertools.product(asked.images, asked.epochs):
        for draw, name in itertools.product(range(1, asked.draws + 1), names):
            if len(images_in(asked.sets / name / "pool")) < images:
                continue
            where = {"set": name, "images": images, "epochs": epochs, "size": asked.size}
            runs.run(line=VITAMP, lr=None, draw=draw, **where)
            for line in asked.lines:
                rate = runs.rate(line=line, **where)
                runs.run(line=line, lr=rate, draw=draw, **where)
    if asked.others:
        others = [json.loads(one.read_text())["tables"] for one in asked.others]
        for table, *same in zip(runs.held["tables"], *others, strict=True):
            table["over_backbones"] = over_backbones([table["sets"], *(one["sets"] for one in same)])
    write_atomically(asked.json, json.dumps(runs.held, indent=1) + "\n")
    print(json.dumps(runs.held["tables"], indent=1))


if __name__ == "__main__":
    main()
