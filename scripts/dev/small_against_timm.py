#!/usr/bin/env python3
"""Train on few small images from scratch, with configs/small_images.yaml and with timm's train.py, and compare top-1.

    cd /tmp/packages
    apt-get download gnome-icon-theme oxygen-icon-theme fonts-dejavu-core fonts-lato ...    # see ICONS and FONTS
    for file in *.deb; do dpkg -x $file ${file%%_*}; done
    python scripts/dev/small_against_timm.py -packages /tmp/packages -json docs/results/small_images.json \
        -length short -timm_train ~/pytorch-image-models/train.py -timm_version 1.0.28

The sets are icons of 48x48 pixels, whose classes are the categories of Debian's icon themes, and letters and digits in
many fonts. The validation split has other font families than the training split. Both programs train the same model for
the same number of epochs: with `-length recipe` those of the recipe, with `-length short` fewer, and a smaller model.
vitamp trains each seed with each of `-rates`. timm first trains one seed with each of `-tried`, and then each seed with
the best. The same command goes on with the runs that the results lack.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import string
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
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
EPOCHS = {"short": (30, 2), "recipe": (200, 10)}
"""Of training and of warm-up, for each length"""
SIZES = {"short": (64, 4, 2), "recipe": (128, 6, 4)}
"""Width, blocks and heads. The short length is for one core and some minutes"""
RATES = ["4e-3", "1e-2"]
TRIED = ["--opt adamw --lr 2e-3", "--opt muon --lr 2e-3", "--opt muon --lr 4e-3", "--opt muon --lr 1e-2"]


def of_vitamp(length: str) -> str:
    (epochs, warmup), (width, depth, heads) = EPOCHS[length], SIZES[length]
    return (
        f"MODEL.EMBED_DIM={width} MODEL.DEPTH={depth} MODEL.NUM_HEADS={heads} TRAIN.NUM_EPOCHS={epochs} "
        f"TRAIN.WARMUP_EPOCHS={warmup} VALIDATE_FREQ=30 THREADS=1"
    )


def of_timm(length: str) -> str:
    """The recipe's settings as timm's train.py spells them."""
    (epochs, warmup), (width, depth, heads) = EPOCHS[length], SIZES[length]
    return (
        f"--model-kwargs img_size={SIDE} patch_size=6 embed_dim={width} depth={depth} num_heads={heads} "
        f"--img-size {SIDE} --epochs {epochs} --warmup-epochs {warmup} -b 32 --weight-decay 0.05 --clip-grad 1 "
        "--sched cosine --sched-on-updates --warmup-lr 1e-6 --min-lr 1e-5 --scale 0.6 1.0 --crop-pct 1.0 --hflip 0 "
        "--color-jitter 0 --train-interpolation bicubic --interpolation bicubic --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 "
        "--smoothing 0.1 --drop-path 0.1 --model-ema --model-ema-decay 0.998 --model-ema-warmup --val-interval 10"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-packages", type=Path, required=True, help="folder with the unpacked packages")
    parser.add_argument("-timm_train", type=Path, required=True, help="train.py of timm's repository")
    parser.add_argument("-timm_version", required=True, help="release or commit of that repository, for the results")
    parser.add_argument("-length", choices=[*SIZES], required=True, help="of the training")
    parser.add_argument("-seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("-jobs", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("-sets", nargs="+", choices=["icons", "letters"], default=["icons", "letters"])
    parser.add_argument("-rates", nargs="+", default=RATES, help="vitamp's learning rates")
    parser.add_argument("-tried", nargs="+", default=TRIED, help="timm's optimisers and learning rates, each in quotes")
    parser.add_argument("-json", type=Path, required=True, help="where the results go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        bench = Bench(args.timm_train.resolve(), Path(folder))
        write_icons(args.packages, bench.folder / "icons")
        write_letters(args.packages, bench.folder / "letters")
        results = Results(args.json, args.length, args.timm_version)
        for name in args.sets:
            first = [pool.submit(results.run, by_timm, bench, name, 0, flags) for flags in args.tried]
            ours = [
                pool.submit(results.run, by_vitamp, bench, name, seed, rate)
                for seed in range(args.seeds)
                for rate in args.rates
            ]
            best = max((run.result() for run in first), key=lambda run: run["acc1"])["flags"]
            others = [pool.submit(results.run, by_timm, bench, name, seed, best) for seed in range(1, args.seeds)]
            for run in [*ours, *others]:
                run.result()
    return 0


class Results:
    """The file of results. A run that it has is not trained again."""

    def __init__(self, file: Path, length: str, timm_train: str) -> None:
        self.length, self._file, self._lock = length, file, Lock()
        about_all = {"timm_train": timm_train, **about(of_timm(length)), "vitamp": of_vitamp(length)}
        self._fields = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"runs": [], **about_all}
        for field in ("settings", "vitamp", "timm_train"):
            if self._fields[field] != about_all[field]:
                sys.exit(f"{file}: its {field} are {self._fields[field]}, this command's {about_all[field]}")

    def run(self, train: Callable[..., float], bench: Bench, name: str, seed: int, flags: str) -> dict[str, Any]:
        program = train.__name__.removeprefix("by_")
        new = {"program": f"{name}: {program}, {flags}", "flags": flags, "seed": seed}
        for run in self._fields["runs"]:
            if all(run[field] == value for field, value in new.items()):
                return run
        done = new | {"acc1": train(bench, self.length, name, seed, flags)}
        print(f"{done['program']}, seed {seed}: {done['acc1']:.2f} %", flush=True)
        with self._lock:
            runs = [*self._fields["runs"], done]
            self._fields["runs"] = sorted(runs, key=lambda run: (run["program"], run["seed"]))
            self._file.write_text(json.dumps(self._fields, indent=2) + "\n", encoding="utf-8")
        return done


def by_vitamp(bench: Bench, length: str, name: str, seed: int, rate: str) -> float:
    """As many updates as timm's, which leaves out the incomplete batch at the end of an epoch."""
    images, run = bench.folder / name, bench.folder / f"{name}-vitamp-{rate}-{seed}"
    words = f"{of_vitamp(length)} -lr {rate} DATA.DROP_LAST=batch DATA.NUM_WORKERS=1 -device cpu SEED={seed}".split()
    bench.execute(ROOT / "main_single_gpu.py", "-cfg", RECIPE, "-data_path", images, "-output", run, *words)
    return History.of_run(run).last(TOP1)[AVERAGE]


def by_timm(bench: Bench, length: str, name: str, seed: int, flags: str) -> float:
    images = bench.folder / name
    words = [*of_timm(length).split(), *flags.split(), "--num-classes", str(len(list((images / "train").iterdir())))]
    return last_of_timm(bench.run_timm(images, f"{name}-{flags.replace(' ', '')}-{seed}", seed, *words))


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


def write_letters(packages: Path, folder: Path, most: int = 2) -> None:
    """Write the letters of some fonts of each package, at most so many for training.

    The fonts of every third package are the validation split.
    """
    for number, package in enumerate(FONTS.split()):
        split, fonts = ("val", 4) if number % 3 == 2 else ("train", most)
        usable = list(fonts_with_letters(packages / f"fonts-{package}"))
        for font in usable[:: -(-len(usable) // fonts)]:
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
