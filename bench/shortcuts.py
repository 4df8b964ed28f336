"""Which shortcuts vitamp finds: in sets made of photographs, in real sets, and in labels drawn at random.

    python bench/shortcuts.py -photographs PHOTOGRAPHS -real bees=BEES hands=HANDS -out docs/results/shortcuts.json

PHOTOGRAPHS: any folder of photographs; two classes are drawn at random, and one of them gets a shortcut, in all of its
images, or in 80 % of them and in 20 % of the other's. BEES: a folder with train/ and val/, or one subfolder per class,
of which a fifth is for validation. The real sets with -without (names) have no shortcut: their labels are drawn at
random, and so are classes of the photographs; whatever is said of them is a false alarm.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from datasets.decoding import ENDINGS
from datasets.examine import findings
from datasets.examine.findings import Shortcut
from datasets.examine.headers import look_at_headers
from datasets.examine.shortcuts import find_shortcuts, with_thumbnails
from datasets.examine.training import PIXEL_SECONDS, VALIDATION_IMAGES
from datasets.sources.files import FileSamples
from utils.config.data import DataConfig
from utils.statistics.proportions import wilson

TRAINING = 240
VALIDATION = 60
SIDE = 256
"""Longer side of the made photographs"""
STRENGTHS = (1.0, 0.8)
CLASSES = (2, 5, 10)
"""Numbers of classes that are drawn at random"""
IMAGES = 400
"""Images of a set whose labels are drawn at random"""
FULL = DataConfig(CHECK="full")

IMPORT = """
import time
import torch
begin = time.process_time()
import scipy.stats, sklearn.feature_extraction, sklearn.tree
print(time.process_time() - begin)
"""
"""Prints the seconds of CPU time that scikit-learn takes to import, once in a training"""

Write = Callable[[Image.Image, Path, bool, int], None]
"""Writes a photograph of a name, with a shortcut or without, at a JPEG quality"""


def jpeg(image: Image.Image, path: Path, quality: int, **how: Any) -> None:
    image.save(path.with_suffix(".jpg"), quality=quality, **how)


def of_nothing(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    del has
    jpeg(image, path, quality)


def of_size(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    jpeg(image.resize((SIDE, SIDE)) if has else image, path, quality)


def of_scale(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    """Smaller, at the same shape"""
    jpeg(image.reduce(2) if has else image, path, quality)


def of_format(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    if has:
        image.save(path.with_suffix(".png"))
    else:
        jpeg(image, path, quality)


def of_grey(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    jpeg(image.convert("L") if has else image, path, quality)


def of_quality(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    jpeg(image, path, 60 if has else quality)


def of_recompression(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    """Compressed strongly once, then as all others: only the bytes show it."""
    del quality
    if has:
        jpeg(image, path, 20)
        image = Image.open(path.with_suffix(".jpg")).convert("RGB")
    jpeg(image, path, 90)


def of_border(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    if has:
        ImageDraw.Draw(image).rectangle((0, 0, *image.size), outline=(0, 0, 0), width=10)
    jpeg(image, path, quality)


def of_marker(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    if has:
        ImageDraw.Draw(image).rectangle((6, 6, 26, 26), fill=(255, 255, 255))
    jpeg(image, path, quality)


def of_camera(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    exif = Image.Exif()
    exif[0x10F] = "Maker" if has else "Other"
    jpeg(image, path, quality, exif=exif)


def of_name(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    jpeg(image, path.with_name(f"IMG_{path.name}" if has else f"{path.name}-a"), quality)


def of_blur(image: Image.Image, path: Path, has: bool, quality: int) -> None:
    """What the images show differs, not their files."""
    jpeg(image.filter(ImageFilter.GaussianBlur(8)) if has else image, path, quality)


MADE: dict[str, Write] = {
    "nothing": of_nothing,
    "size: a square": of_size,
    "size: half as large": of_scale,
    "format: PNG": of_format,
    "format: grey": of_grey,
    "JPEG quality 60, others 75 to 95": of_quality,
    "JPEG quality 20, then all 90": of_recompression,
    "frame: black border of 10 pixels": of_border,
    "frame: white marker of 20 pixels in a corner": of_marker,
    "camera": of_camera,
    "name": of_name,
    "nothing of the file: blurred pictures": of_blur,
}


def photographs_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)


def split_of(root: Path, paths: Sequence[Path], classes: Sequence[str]) -> FileSamples:
    names = [str(path.relative_to(root)) for path in paths]
    return FileSamples(root, names, np.array([classes.index(path.parent.name) for path in paths]), list(classes))


def small(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        opened.draft("RGB", (SIDE, SIDE))
        image = opened.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    return image


def made(images: Sequence[Image.Image], write: Write, strength: float, folder: Path) -> list[Shortcut]:
    rng = np.random.default_rng(0)
    splits = []
    for part, of_part in (("train", images[:TRAINING]), ("val", images[TRAINING:])):
        for number, image in enumerate(of_part):
            name = str(rng.choice(["other", "marked"]))
            has = (name == "marked") == (rng.random() < strength)
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            write(image.copy(), place / f"{number}", has, int(rng.integers(75, 96)))
        splits.append(split_of(folder / part, photographs_of(folder / part), ["other", "marked"]))
    return found_in(*splits)


def looked_at(samples: FileSamples, title: str = "training") -> list[findings.Image]:
    return look_at_headers(title, samples, FULL)


def found_in(train: FileSamples, validation: FileSamples) -> list[Shortcut]:
    return find_shortcuts(looked_at(train), lambda: looked_at(validation, "validation"), float("inf"))


def rounded(value: Any) -> Any:
    """Round all numbers within a value to one digit."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return round(value, 1) if isinstance(value, float) else value


def summary(shortcuts: Sequence[Shortcut]) -> list[dict[str, Any]]:
    """All fields but the advice and the names of images."""
    rows = []
    for one in shortcuts:
        row = asdict(one)
        for key in ("kind", "advice", "images"):
            del row[key]
        rows.append(rounded(row))
    return rows


def real_splits(folder: Path) -> tuple[FileSamples, FileSamples]:
    if (folder / "train").is_dir():
        both = [photographs_of(folder / part) for part in ("train", "val")]
    else:
        paths = photographs_of(folder)
        order = np.random.default_rng(0).permutation(len(paths)).tolist()
        fifth = len(paths) // 5
        both = [sorted(paths[index] for index in part) for part in (order[fifth:], order[:fifth])]
    classes = sorted({path.parent.name for part in both for path in part})
    train, validation = (split_of(folder, part, classes) for part in both)
    return train, validation


def at_start(train: FileSamples, validation: FileSamples) -> dict[str, Any]:
    """What DATA.CHECK=quick finds, and the seconds of CPU time that it takes once scikit-learn is imported."""
    begin = time.process_time()
    images = look_at_headers("training", train, DataConfig())
    headers = time.process_time()
    found = find_shortcuts(
        images, lambda: look_at_headers("validation", validation, DataConfig(), VALIDATION_IMAGES), PIXEL_SECONDS
    )
    seconds = {"headers": headers - begin, "shortcuts": time.process_time() - headers}
    told = [one.properties for one in found]
    return {
        "looked_at": len(images),
        "found": told,
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
    }


def false_alarms(name: str, samples: FileSamples, tries: int) -> dict[str, Any]:
    """What is said of labels drawn at random, of which no property can tell."""
    rng = np.random.default_rng(0)
    images = with_thumbnails(looked_at(samples)[:IMAGES], float("inf"))
    samples.classes = [f"class {number}" for number in range(max(CLASSES))]
    for image in images:
        vars(image.split).pop("class_names", None)
    said = list[list[str]]()
    for number in range(tries):
        classes = CLASSES[number % len(CLASSES)]
        shares = rng.dirichlet(np.full(classes, 3.0))  # unequal classes
        samples.labels = rng.choice(classes, len(samples), p=shares)
        validation = images[: len(images) // 5]
        found = find_shortcuts(images[len(images) // 5 :], lambda validation=validation: validation)
        if found:
            said.append([one.sentence for one in found])
    print(name, tries, len(said), flush=True)
    return {"images": len(images), "tries": tries, "false_alarms": len(said), "said": said}


Keep = Callable[[str, Any], None]
"""Writes a result, by its key, into the file of results"""


def measure_made(photographs: Sequence[Path], results: dict[str, Any], keep: Keep) -> None:
    """Search made sets of each kind and strength; those of an interrupted bench stay."""
    rows = results.get("made", {}).get("sets", {})
    images = [small(path) for path in photographs[: TRAINING + VALIDATION]]
    for strength, kind in itertools.product(STRENGTHS, MADE):
        title = f"{kind}; {strength:.0%}"
        if title in rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[title] = summary(made(images, MADE[kind], strength, Path(folder)))
        print(title, [row["properties"] for row in rows[title]], flush=True)
        keep("made", {"training": TRAINING, "validation": VALIDATION, "sets": rows})


def measure_real(folders: dict[str, Path], results: dict[str, Any], keep: Keep) -> None:
    """Search real sets as at the start of a training, and whole. What was seen of them by eye stays in the results."""
    keep("import_seconds", round(float(subprocess.check_output([sys.executable, "-c", IMPORT])), 1))
    known = results.get("real", {})
    rows = {}
    for name, folder in folders.items():
        train, validation = real_splits(folder)
        quick = at_start(train, validation)
        classes = Counter(train.labels.tolist())
        row = {"training": len(train), "validation": len(validation), "classes": len(classes), "quick": quick}
        own_look = known.get(name, {}).get("own_look", "")
        rows[name] = {**row, "said": summary(found_in(train, validation)), "own_look": own_look}
        print(name, quick, [one["properties"] for one in rows[name]["said"]], flush=True)
        keep("real", rows)


def measure_random(sets: dict[str, FileSamples], tries: int, results: dict[str, Any], keep: Keep) -> None:
    """Count false alarms for labels drawn at random, and give their rate with its interval."""
    rows = results.get("random", {}).get("sets", {})
    for name, samples in sets.items():
        if name not in rows:
            rows[name] = false_alarms(name, samples, tries)
            keep("random", {"sets": rows})
    all_tries = sum(row["tries"] for row in rows.values())
    percent = 100 * sum(row["false_alarms"] for row in rows.values()) / all_tries
    low, high = wilson(percent, all_tries)
    keep("random", {"percent": percent, "interval": [round(low, 2), round(high, 2)], "sets": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-photographs", type=Path, required=True)
    parser.add_argument("-real", nargs="*", default=[], metavar="NAME=FOLDER")
    parser.add_argument("-without", nargs="*", default=[], metavar="NAME")
    parser.add_argument("-tries", type=int, default=100)
    parser.add_argument("-only", nargs="*", default=["made", "real", "random"])
    parser.add_argument("-out", type=Path, required=True)
    asked = parser.parse_args()
    results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    results |= {"date": time.strftime("%Y-%m-%d"), "script": "bench/shortcuts.py"}

    def keep(key: str, value: Any) -> None:
        results[key] = value
        asked.out.write_text(json.dumps(results, indent=1) + "\n")

    paths = photographs_of(asked.photographs)
    shuffled = [paths[index] for index in np.random.default_rng(0).permutation(len(paths)).tolist()]
    folders = {name: Path(folder) for name, _, folder in (words.partition("=") for words in asked.real)}
    if "made" in asked.only:
        measure_made(shuffled, results, keep)
    if "real" in asked.only:
        measure_real(folders, results, keep)
    if "random" in asked.only:
        sets = {"photographs": split_of(asked.photographs, shuffled, sorted({path.parent.name for path in paths}))}
        for name in asked.without:
            sets[name], _ = real_splits(folders[name])
        measure_random(sets, asked.tries, results, keep)


if __name__ == "__main__":
    main()
