#!/usr/bin/env python3
"""Train on few small images from scratch, with configs/small_images.yaml and with timm's train.py, and compare top-1.

    cd /tmp/packages
    apt-get download gnome-icon-theme oxygen-icon-theme fonts-dejavu-core fonts-lato ...    # see ICONS and FONTS
    for file in *.deb; do dpkg -x $file ${file%%_*}; done
    python scripts/dev/small_against_timm.py -packages /tmp/packages -json docs/results/small_images.json \
        -timm_train ~/pytorch-image-models/train.py -timm_version 1.0.28

The sets are icons of 48x48 pixels, whose classes are the categories of Debian's icon themes, and letters and digits in
many fonts. The validation split has other font families than the training split. Both programs train the same model for
the same number of epochs. vitamp trains all seeds with each of RATES. timm first trains
one seed with each setting of TRIED, and then all seeds with the best.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import string
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.dev.finetune_against_timm import Bench, about, last_of_timm  # noqa: E402
from utils.record.history import History  # noqa: E402
from utils.record.tasks import TOP1  # noqa: E402
from utils.record.weight_sets import AVERAGE  # noqa: E402

ICONS = "gnome-icon-theme oxygen-icon-theme"
FONTS = (
    "cantarell comfortaa courier-prime crosextra-caladea crosextra-carlito dancingscript dejavu-core ebgaramond "
    "firacode freefont-ttf go hack inconsolata junction lato liberation linuxlibertine lobster oldstandard open-sans "
    "play quicksand roboto-unhinted sil-gentium-basic texgyre urw-base35"
)
LETTERS = string.ascii_uppercase
SIDE = 48
ICON_CLASSES = ("actions", "apps", "categories", "devices", "mimetypes", "places", "status")
MOST_ICONS = 150
"""Icons per category, so that actions do not outnumber all others"""
RECIPE = ROOT / "configs" / "small_images.yaml"
SMALLER = (
    "MODEL.EMBED_DIM=64 MODEL.DEPTH=4 MODEL.NUM_HEADS=2 TRAIN.NUM_EPOCHS=30 TRAIN.WARMUP_EPOCHS=2 VALIDATE_FREQ=30 "
    "THREADS=1"
)
"""A smaller model and fewer epochs than the recipe's, to train on one core in some minutes"""
SAME = (
    f"--model-kwargs img_size={SIDE} patch_size=6 embed_dim=64 depth=4 num_heads=2 --img-size {SIDE} --epochs 30 -b 32 "
    "--weight-decay 0.05 --clip-grad 1 --sched cosine --sched-on-updates --warmup-epochs 2 --warmup-lr 1e-6 "
    "--min-lr 1e-5 --scale 0.6 1.0 --crop-pct 1.0 --hflip 0 --color-jitter 0 --train-interpolation bicubic "
    "--interpolation bicubic --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --smoothing 0.1 --drop-path 0.1 --model-ema "
    "--model-ema-decay 0.998 --model-ema-warmup"
)
"""The recipe's settings, with SMALLER, as timm's train.py spells them"""
RATES = ("TRAIN.BASE_LR=4e-3", "TRAIN.BASE_LR=1e-2")
TRIED = ("--opt adamw --lr 2e-3", "--opt muon --lr 2e-3", "--opt muon --lr 4e-3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-packages", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("-timm_train", type=Path, required=True, help="train.py of timm's repository")
    parser.add_argument("-timm_version", required=True, help="release or commit of that repository, for the results")
    parser.add_argument("-seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("-jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("-sets", nargs="+", choices=["icons", "letters"], default=["icons", "letters"])
    parser.add_argument("-json", type=Path, required=True, help="where the results go")
    args = parser.parse_args()
    runs, tried = [], []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        bench = Bench(args.timm_train.resolve(), Path(folder))
        seeds = range(args.seeds)
        write_icons(args.packages, bench.folder / "icons")
        write_letters(args.packages, bench.folder / "letters")
        begun = {
            name: (
                [pool.submit(by_timm, bench, name, 0, words) for words in TRIED],
                [pool.submit(by_vitamp, bench, name, seed, words) for words in RATES for seed in seeds],
            )
            for name in args.sets
        }
        for name, (first, ours) in begun.items():
            tried += (results := [run.result() for run in first])
            best = max(results, key=lambda run: run["acc1"])
            others = [pool.submit(by_timm, bench, name, seed, best["flags"]) for seed in seeds[1:]]
            runs += [best, *(run.result() for run in [*others, *ours])]
    fields = {"runs": runs, "tried": tried, "timm_train": args.timm_version, **about(SAME), "vitamp": SMALLER}
    args.json.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return 0


def by_vitamp(bench: Bench, name: str, seed: int, rate: str) -> dict[str, Any]:
    """As many updates as timm's, which leaves out the incomplete batch at the end of an epoch."""
    images, run = bench.folder / name, bench.folder / f"{name}-vitamp-{rate}-{seed}"
    words = f"{SMALLER} {rate} DATA.DROP_LAST=batch DATA.NUM_WORKERS=1 -device cpu SEED={seed}".split()
    bench.execute(ROOT / "main_single_gpu.py", "-cfg", RECIPE, "-data_path", images, "-output", run, *words)
    return noted({"program": f"{name}: vitamp, {rate}", "seed": seed, "acc1": History.of_run(run).last(TOP1)[AVERAGE]})


def by_timm(bench: Bench, name: str, seed: int, flags: str) -> dict[str, Any]:
    images = bench.folder / name
    words = [*SAME.split(), *flags.split(), "--num-classes", str(len(list((images / "train").iterdir())))]
    run = bench.run_timm(images, f"{name}-{flags.replace(' ', '')}-{seed}", seed, *words, "--val-interval", "10")
    return noted({"program": f"{name}: timm, {flags}", "flags": flags, "seed": seed, "acc1": last_of_timm(run)})


def noted(run: dict[str, Any]) -> dict[str, Any]:
    print(f"{run['program']}, seed {run['seed']}: {run['acc1']:.2f} %", flush=True)
    return run


def write_icons(packages: Path, folder: Path) -> None:
    """Write a quarter of each category of icons as the validation split. Transparent pixels become white."""
    for category in ICON_CLASSES:
        files = [
            file
            for package in ICONS.split()
            for file in sorted((packages / package).glob(f"**/{SIDE}x{SIDE}/{category}/*.png"))
            if not file.is_symlink()
        ]
        different = list({hashlib.md5(file.read_bytes()).digest(): file for file in files}.values())
        order = np.random.default_rng(0).permutation(len(different))[:MOST_ICONS]
        for place, number in enumerate(order.tolist()):
            icon = Image.open(different[number]).convert("RGBA")
            white = Image.new("RGBA", icon.size, "white")
            split = "val" if place % 4 == 0 else "train"
            save(Image.alpha_composite(white, icon).convert("RGB"), folder / split / category, f"{place}.png")


def write_letters(packages: Path, folder: Path) -> None:
    """Write the letters of some fonts of each package. The fonts of every third package are the validation split."""
    for number, package in enumerate(FONTS.split()):
        split, most = ("val", 4) if number % 3 == 2 else ("train", 2)
        usable = list(fonts_with_letters(packages / f"fonts-{package}"))
        for font in usable[:: -(-len(usable) // most)]:
            for letter, glyph in glyphs_of(font).items():
                save(glyph, folder / split / letter, f"{package}-{font.stem.replace(' ', '')}.png")


def fonts_with_letters(package: Path) -> Iterator[Path]:
    """The fonts in which all letters look different, unlike in fonts of symbols."""
    for file in sorted([*package.glob("**/*.ttf"), *package.glob("**/*.otf")]):
        if len({glyph.tobytes() for glyph in glyphs_of(file).values()}) == len(LETTERS):
            yield file


def glyphs_of(file: Path) -> dict[str, Image.Image]:
    font, glyphs = ImageFont.truetype(str(file), round(0.75 * SIDE)), {}
    for letter in LETTERS:
        glyphs[letter] = Image.new("L", (SIDE, SIDE), "white")
        ImageDraw.Draw(glyphs[letter]).text((SIDE / 2, SIDE / 2), letter, fill="black", font=font, anchor="mm")
    return glyphs


def save(image: Image.Image, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / name)


if __name__ == "__main__":
    sys.exit(main())
