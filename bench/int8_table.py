"""Int8 files beside fp32 ones and those of onnxruntime's own defaults: accuracy, changed answers, size and speed.

    OMP_NUM_THREADS=1 python bench/int8_table.py -cifar DIR -lite0 FILE -mnist DIR -out docs/results/int8.json

A classifier on the frozen features of EfficientNet-Lite0 (FILE: its weights), fitted to 500 photographs of CIFAR-10 at
128 pixels, and small ViTs on 4,000 digits of MNIST (idx files) and on scikit-learn's digits. Rows that are there stay.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from sys import executable, path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.quantization import quantize_static
from PIL import Image

path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine.trained.model import load_trained
from tools.export.check import images_for_check
from tools.export.formats import INPUT, LOGITS, Export, Onnx, run_onnx
from tools.export.int8 import Int8, calibration_images, reader
from utils.arrays_only import ArraysOnly

SEEDS = 5
VALIDATION = 2000
TURNS = 9
SECONDS_EACH = 0.2
PROBE = "configs/finetune.yaml MODEL.FREEZE=backbone TRAIN.NUM_EPOCHS=0 TRAIN.WARMUP_EPOCHS=0 DATA.IMAGE_SIZE=128 "
PROBE += "-model tf_efficientnet_lite0 -pretrained"
OF_MNIST = "configs/vit_digits.yaml -epochs 6 DATA.IMAGE_SIZE=28 MODEL.PATCH_SIZE=4 DATA.FLIP=0 DATA.CROP_SCALE=[0.8,1]"


def cifar(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with file.open("rb") as opened:
        table = ArraysOnly(opened, encoding="latin1").load()
    return table["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.asarray(table["labels"])


def mnist(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.fromfile(folder / f"{part}-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 28, 28)
    return pixels, np.fromfile(folder / f"{part}-labels-idx1-ubyte", np.uint8)[8:]


def write_images(place: Path, pixels: np.ndarray, labels: np.ndarray, count: int, seed: int) -> None:
    for row in np.random.default_rng(seed).permutation(len(labels))[:count].tolist():
        file = place / f"{labels[row]}" / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row]).save(file)


def times_as_fast(files: dict[str, Path], batch: np.ndarray, threads: int) -> dict[str, float]:
    options = onnxruntime.SessionOptions()
    seconds = {name: list[float]() for name in files}
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    sessions = {name: onnxruntime.InferenceSession(str(file), options) for name, file in files.items()}
    for _ in range(TURNS):
        for name, session in sessions.items():
            begin = time.perf_counter()
            number = 0
            while time.perf_counter() - begin < SECONDS_EACH:
                session.run(None, {INPUT: batch})
                number += 1
            seconds[name].append((time.perf_counter() - begin) / number)
    return {name: round(median(np.divide(seconds["fp32"], own)), 2) for name, own in seconds.items()}


def measure(run: Path, place: Path) -> dict[str, Any]:
    trained = load_trained(run, device="cpu", amp="off")
    images = images_for_check(trained, None, None, "val")
    calibration = calibration_images(trained)
    files = {name: place / f"{name}.onnx" for name in ("fp32", "naive", "int8")}
    kind = Int8(calibration, ())
    Onnx().write(Export(trained, images, "fp32", False), files["fp32"])
    kind.write(Export(trained, images, "int8", False), files["int8"])
    batches = [batch.numpy() for batch in images.batches(trained, False)]
    quantize_static(files["fp32"], files["naive"], reader(calibration.batches(trained, False)))
    fast = {threads: times_as_fast(files, batches[0], threads) for threads in (1, 2)}
    found: dict[str, Any] = {"images": len(images.names), "kept": sorted(kind.fp32_layers)}
    right = np.asarray(images.labels)
    expected = np.array([])
    for name, file in files.items():
        guesses = np.concatenate([*run_onnx(str(file), name, LOGITS, batches)]).argmax(1)
        expected = guesses if name == "fp32" else expected
        top1 = round(100 * float((guesses == right).mean()), 2)
        changed = int((guesses != expected).sum())
        found[name] = {"top1": top1, "changed": changed, "bytes": file.stat().st_size}
        found[name] |= {f"times_as_fast_{threads}": fast[threads][name] for threads in fast}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("-cifar", "-lite0", "-mnist", "-out"):
        parser.add_argument(flag, type=Path, required=True)
    asked = parser.parse_args()
    photographs = (cifar(asked.cifar / "cifar-10-batches-py" / name) for name in ("data_batch_1", "test_batch"))
    models: dict[str, tuple[Any, ...]] = {
        "EfficientNet-Lite0, CIFAR-10": ([*PROBE.split(), asked.lite0], 500, *photographs),
        "ViT, digits": (("configs/vit_digits.yaml", "-epochs", "15"), 0),
        "ViT, MNIST": (OF_MNIST.split(), 4000, *(mnist(asked.mnist, part) for part in ("train", "t10k"))),
    }
    about: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"rows": {}}
    for seed, (name, (words, count, *data)) in ((seed, one) for seed in range(SEEDS) for one in models.items()):
        if (title := f"{name}; seed {seed}") in about["rows"]:
            continue
        place = Path(tempfile.mkdtemp())
        for part, number, (pixels, labels) in zip(("train", "val"), (count, VALIDATION), data, strict=False):
            write_images(place / "data" / part, pixels, labels, number, seed)
        files = ("-data_path", place / "data", "-dataset", "imagefolder") if data else ()
        own = (f"SEED={seed}", "-output", place / "run", *files)
        command = (executable, "main_single_gpu.py", "-device", "cpu", "THREADS=1", *own, "-cfg", *words)
        subprocess.run([str(word) for word in command], cwd=path[0], check=True, stdout=subprocess.DEVNULL)
        about["rows"][title] = measure(place / "run", place)
        shutil.rmtree(place)
        about |= {"date": time.strftime("%Y-%m-%d"), "script": "bench/int8_table.py"}
        asked.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
