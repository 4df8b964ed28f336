#!/usr/bin/env python3
"""Train with ten labelled images per class, from scratch and from weights that learned without labels; compare top-1.

    python scripts/dev/few_labels.py -packages /tmp/packages -json docs/results/few_labels.json

The images are letters in fonts of Debian's packages; scripts/dev/small_against_timm.py says how to get them. Each seed
has a pretraining, its own ten fonts, and a training from each start. The validation split has other font families,
which no training has seen. The same command goes on with the runs that the results lack. It also measures the CPU time
of an update without labels and of one with labels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models import build_model  # noqa: E402
from scripts.dev.finetune_against_timm import Bench, about  # noqa: E402
from scripts.dev.small_against_timm import LETTERS, write_letters  # noqa: E402
from utils.config import load_config  # noqa: E402
from utils.record.history import History  # noqa: E402
from utils.record.tasks import TOP1  # noqa: E402
from utils.record.weight_sets import AVERAGE  # noqa: E402

LABELS = 10
BATCH, TURNS = 4, 3
"""For the time of an update"""
MODEL = "MODEL.EMBED_DIM=64 MODEL.DEPTH=4 MODEL.NUM_HEADS=2 THREADS=1 DATA.NUM_WORKERS=0"
"""Smaller than the recipe's, to train on one core in some minutes"""
PRETRAINING = f"{MODEL} TRAIN.NUM_EPOCHS=60 TRAIN.WARMUP_EPOCHS=5 VALIDATE_FREQ=20"
STARTS = {
    "from scratch": "-lr 4e-3",
    "from scratch, learning rate 1e-2": "-lr 1e-2",
    "pretrained without labels": "-lr 4e-3",
}
TRAINING = f"{MODEL} TRAIN.NUM_EPOCHS=100 TRAIN.WARMUP_EPOCHS=5 VALIDATE_FREQ=50"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-packages", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("-seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("-json", type=Path, required=True, help="where the results go")
    args = parser.parse_args()
    fields = {"runs": [], **about(TRAINING), "pretraining": PRETRAINING}
    if args.json.is_file():
        fields = json.loads(args.json.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(), Path(folder))
        fields.setdefault("update", {f"vit_{size}_patch16_224": times(size) for size in ("base", "large")})
        write_letters(args.packages, bench.folder / "all", most=6)
        for seed in range(args.seeds):
            if any(run["seed"] == seed for run in fields["runs"]):
                continue
            fields["runs"] += runs_of(bench, seed)
            args.json.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return 0


def runs_of(bench: Bench, seed: int) -> list[dict[str, Any]]:
    """A pretraining on all training images, then a training on the labelled ones from each start."""
    start = bench.folder / f"pretrained-{seed}"
    images = bench.folder / "all" / "train"
    train(bench, start, "mae_small_images", images, *f"{PRETRAINING} SEED={seed}".split())
    labelled = with_labels(bench.folder / "all", bench.folder / f"labelled-{seed}", seed)
    runs = []
    for number, (program, words) in enumerate(STARTS.items()):
        weights = ["-pretrained", start] if program.startswith("pretrained") else []
        run = bench.folder / f"run-{seed}-{number}"
        train(bench, run, "small_images", labelled, *weights, *f"{TRAINING} SEED={seed} {words}".split())
        runs.append({"program": program, "flags": words, "seed": seed, "acc1": History.of_run(run).last(TOP1)[AVERAGE]})
        print(f"{program}, seed {seed}: {runs[-1]['acc1']:.2f} %", flush=True)
    return runs


def times(size: str) -> dict[str, Any]:
    """Seconds of CPU time of an update in fp32 on one thread, without labels and with; medians of turns."""
    torch.set_num_threads(1)
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(0, 1000, (BATCH,))
    names = {"without labels": f"mae_vit_{size}", "with labels": f"vit_{size}_patch16_224"}
    contenders = {}
    for which, name in names.items():
        model = build_model(load_config(str(ROOT / "configs" / f"{name}.yaml")).config.MODEL, 224, 3).train()
        contenders[which] = model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = {which: [] for which in names}
    for _ in range(TURNS + 1):
        for which, (model, optimizer) in contenders.items():
            start = time.process_time()
            outputs = model(images)
            loss = outputs[:, 0].mean() if which == "without labels" else F.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[which].append(time.process_time() - start)
    medians = {which: statistics.median(of[1:]) for which, of in seconds.items()}  # the first turn warms up
    return {"batch": BATCH, "seconds": medians, "ratio": medians["without labels"] / medians["with labels"]}


def train(bench: Bench, run: Path, recipe: str, images: Path, *words: Path | str) -> None:
    files = ["-cfg", ROOT / "configs" / f"{recipe}.yaml", "-data_path", images, "-output", run, "-device", "cpu"]
    bench.execute(ROOT / "main_single_gpu.py", *files, *words)


def with_labels(images: Path, folder: Path, seed: int) -> Path:
    """A folder with some training images of each letter, in fonts drawn by the seed, and all validation images."""
    random = np.random.default_rng(seed)
    for letter in LETTERS:
        files = sorted((images / "train" / letter).iterdir())
        (folder / "train" / letter).mkdir(parents=True)
        for number in random.permutation(len(files))[:LABELS]:
            shutil.copy(files[number], folder / "train" / letter)
    shutil.copytree(images / "val", folder / "val")
    return folder


if __name__ == "__main__":
    sys.exit(main())
