"""How many images with relatives in training a run finds, and top-1 on them, before and after a new split.

    python bench/relatives.py RADIOGRAPHS PHOTOGRAPHS LITE0.safetensors FOLDER docs/results/relatives.json

Radiographs: chest X-rays, whose names begin with the patient's number. Photographs: animals and other things; edited
copies of training images are planted in validation and test. Lite0 learns each set for an epoch, check_data.py -split
divides it anew, and Lite0 learns that. `true`: images that have a relative in training; `said`: those by the program.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.alike import as_jpeg, cropped
from engine.report.trust import Result
from engine.trained.model import batches_of, load_trained, name_of, split_of_run
from tools.common.trust import add_relatives
from utils.record.run_folder import alike_in_words, read_data
from utils.statistics.groups import effective_images
from utils.statistics.proportions import wilson
from vitamp.metrics import TOP1

EDITS: dict[str, Any] = {
    "crop": lambda image: cropped(image, 0.1),
    "encoding": lambda image: as_jpeg(image, 40),
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "mirror": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}
PARTS = ("train", "val", "test")
COPIED = 80  # training images: 10 by each edit into validation, and into test


def thing_of(name: str) -> str:
    return re.split("[_+]", Path(name).stem)[0]


def write(source: Path, target: Path, edit: str = "") -> None:
    with Image.open(source) as image:
        picture = image.convert("RGB")
    picture.thumbnail((256, 256))
    target.parent.mkdir(parents=True, exist_ok=True)
    (EDITS[edit](picture) if edit else picture).save(target, quality=92)


def write_photographs(files: list[Path], root: Path) -> None:
    for place, index in enumerate(np.random.default_rng(0).permutation(len(files)).tolist()):
        wnid = files[index].parent.name
        kind = "animal" if wnid < "n0266" else "other"
        part = PARTS[np.searchsorted([0.7, 0.85], place / len(files), side="right")]
        write(files[index], root / part / kind / f"{wnid}.jpg")
        if place < COPIED:
            edit = list(EDITS)[place % 4]
            write(files[index], root / PARTS[1 + place // 4 % 2] / kind / f"{wnid}+{edit}.jpg", edit)


def top1(is_right: np.ndarray, things: np.ndarray) -> str:
    percent = 100 * float(is_right.mean())
    interval = wilson(percent, effective_images(is_right, things))
    return f"{percent:.1f} % ({interval.words()}) of {len(is_right)}"


def measured(run: Path, part: str) -> dict[str, Any]:
    trained = load_trained(run)
    data: Any = read_data(run)
    dataset = split_of_run(trained, part)
    labels = dataset.sample_labels()
    is_right = torch.cat([logits.argmax(1) for logits, _, _ in batches_of(trained, dataset)]).numpy() == labels
    names = [name_of(dataset, index) for index in range(len(dataset))]
    training = split_of_run(trained, "train")
    result = Result(TOP1, 0.0)
    findings = add_relatives(result, trained, dataset, labels)
    related = set(result.related)
    sentence = alike_in_words(findings.get("alike") or [], "images look like training images")
    if part == "val":  # as the run has found them
        related, sentence = set(data["related"]), " ".join([*data["warnings"], data["series"], data["series_advice"]])
    said = np.isin(np.arange(len(labels)), list(related))
    things = np.array([thing_of(name) for name in names])
    true = np.isin(things, [thing_of(name_of(training, index)) for index in range(len(training))])
    found: dict[str, Any] = {"images": len(labels), "sentences": sentence.replace(f"{run.parent}/", "")}
    found |= {"true": int(true.sum()), "said": int(said.sum()), "both": int((true & said).sum())}
    for name, chosen in {"true": true, "not true": ~true, "said": said, "not said": ~said}.items():
        if chosen.any():
            found[f"top-1, {name}"] = top1(is_right[chosen], things[chosen])
    for edit in EDITS:
        is_edit = np.array([f"+{edit}." in name for name in names])
        found[f"{edit}: said, planted"] = [int(said[is_edit].sum()), int(is_edit.sum())]
    return found


def main() -> None:
    radiographs, photographs, lite0, folder, out = map(Path, sys.argv[1:])
    for file in radiographs.rglob("*_*.png"):
        write(file, folder / "radiographs" / file.parent.name / file.name)
    write_photographs(sorted(photographs.rglob("*.[jJ]*")), folder / "photographs")
    about: dict[str, Any] = {"script": "bench/relatives.py", "date": time.strftime("%Y-%m-%d"), "sets": {}}
    recipe = ["-cfg", "configs/finetune.yaml", "-model", "tf_efficientnet_lite0", "-pretrained", str(lite0)]
    recipe += ["-image_size", "96", f"DATA.CACHE={folder / 'cache'}"]
    for title in ("photographs", "photographs, new", "radiographs", "radiographs, new", "radiographs, new by patient"):
        root = ["-data_path", str(folder / title.partition(",")[0])]
        data = [*root, "DATA.VAL_FRACTION=0.2"]
        if "new" in title:
            table = str(folder / f"{title}.csv")
            groups = ["DATA.GROUP=name_start"] if "patient" in title else []
            words = [*recipe, *data, *groups, "-num_classes", "2", "-split", table]
            subprocess.run([sys.executable, "scripts/check_data.py", *words], check=False)
            data = ["-dataset", f"csv:{table}", *root]
        run = folder / f"run of {title}"
        words = [*recipe, *data, "-epochs", "1", "-output", str(run)]
        subprocess.run([sys.executable, "main_single_gpu.py", *words], check=True)
        parts = PARTS[1:2] if title == "radiographs" else PARTS[1:]
        about["sets"][title] = {part: measured(run, part) for part in parts}
        out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
