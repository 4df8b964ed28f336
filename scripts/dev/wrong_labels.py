"""How many wrong labels check_labels.py finds: labels are changed on purpose, and its suspects compared with them.

    python scripts/dev/wrong_labels.py -model tf_efficientnet_lite0 -pretrained w.safetensors -data_path DIR \\
        -image_size 128 -similar airplane-ship,cat-dog -json out.json
    python scripts/dev/wrong_labels.py -cfg small_images -folds 3 -data_path DIR -similar 4-9,3-5 -json out.json
    python scripts/dev/wrong_labels.py -model ... -data_path DIR -image_size 128 -clean 60 -json out.json

Beside it, on the same images and labels: cleanlab with the same classifier's probabilities, and with a support vector
machine and a linear classifier of pixels. Needs cleanlab and scikit-learn. -clean counts how often wrong labels are
found among 1,000 images with the labels as given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from cleanlab.filter import find_label_issues
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.svm import SVC

from engine.evaluation.linear import FOLDS, fit
from tools.check_labels.noise import find_wrong
from tools.check_labels.search import ByFeatures, ByTraining, Images, open_images, suspects_of
from tools.common.command_line import POOL, Tool, ToolLine, tool
from utils.flags import Flag, whole
from utils.log import log
from utils.program import typed

RATES, SEEDS = (0.0, 0.02, 0.05, 0.1), (0, 1, 2)
SIDE = 16
"""Pixels of images for classifiers of pixels"""
PIXELS = ("uniform", 0.05, 0)
"""Where these are tried"""
CLEAN = 1000
"""Images of a draw by -clean"""
OWN = (
    replace(POOL, about="features"),
    Flag("similar", "pairs of classes that are taken for each other", "A-B,C-D", default=""),
    Flag("folds", "train the recipe on N folds", "N", kind=whole(2)),
    Flag("clean", "search N draws of images, with the labels as given", "N", kind=whole(1)),
    Flag("json", "results", "FILE", default="wrong_labels.json"),
)
TOOL = Tool("dev/wrong_labels.py", __doc__, OWN)


def flipped(images: Images, fraction: float, seed: int, similar: dict[int, int] | None) -> np.ndarray:
    """Labels of which some are changed: to any other class, or to the similar one."""
    generator, labels = np.random.default_rng(seed), images.labels.copy()
    known = np.arange(len(labels)) if similar is None else np.flatnonzero(np.isin(labels, list(similar)))
    for index in generator.permutation(known)[: round(fraction * len(labels))]:
        shift = int(generator.integers(1, len(images.classes)))
        labels[index] = (
            (labels[index] + shift) % len(images.classes) if similar is None else similar[int(labels[index])]
        )
    return labels


def by_training(line: ToolLine, images: Images, labels: np.ndarray, seed: int) -> np.ndarray:
    """Logits of trained folds, which read the labels from class folders."""
    with tempfile.TemporaryDirectory() as folder:
        for index, label in enumerate(labels):
            link = Path(folder, "images", images.classes[label], images.name(index).replace("/", "_"))
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(Path(str(images.data.DATA_PATH)) / images.name(index), link)
        flags = {**line.run.flags, "DATA.DATA_PATH": (f"{folder}/images", "")}
        line = replace(line, run=replace(line.run, flags=flags))
        again = open_images(line.load({"MODEL.NUM_CLASSES": ("auto", "")}).config, "all")
        logits = ByTraining(line, line.asked.folds, Path(folder, "runs")).logits(again, seed)[again.copy_of]
        place = {again.name(index).partition("/")[2]: index for index in range(len(labels))}
        return logits[[place[images.name(index).replace("/", "_")] for index in range(len(labels))]]


def search_clean(images: Images, features: np.ndarray, draws: int) -> dict[str, Any]:
    """How often wrong labels are found among CLEAN images that are drawn at random."""
    rows = []
    for seed in range(draws):
        chosen = np.random.default_rng(seed).permutation(images.distinct)[:CLEAN]
        labels, fold_of = images.labels[chosen], np.arange(CLEAN) % FOLDS
        logits = fit(features[chosen], labels, fold_of, len(images.classes), torch.device("cpu"))[1]
        found = find_wrong(logits, labels, seed)
        rows.append({"seed": seed, "look_wrong": found.number, "if_right": found.if_right, "found": found.clear})
        log.info("%s", rows[-1])
    return {"images": CLEAN, "found": sum(row["found"] for row in rows), "draws": rows}


@tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    line.asked.path = line.asked.budget_min = None
    loaded = line.load({"MODEL.NUM_CLASSES": ("auto", "")})
    images = open_images(loaded.config, "all")
    method = None if line.asked.folds else ByFeatures.of(line, loaded.config)
    about: dict[str, Any] = {"command": typed("scripts/dev/wrong_labels.py", argv)}
    if line.asked.clean and method is not None:
        method.logits(images, 0)
        about |= search_clean(images, np.asarray(method.features), line.asked.clean)
        Path(line.asked.json).write_text(json.dumps(about, indent=1) + "\n")
        return 0
    pixels = [images.dataset.__getitems__([(0, row)]).images for row in range(len(images.labels))]
    pixels = F.adaptive_avg_pool2d(torch.cat(pixels).float() / 255, SIDE).flatten(1).numpy()
    pairs = [tuple(map(images.classes.index, pair.split("-"))) for pair in line.asked.similar.split(",")]
    similar = {a: b for one, other in pairs for a, b in ((one, other), (other, one))}
    plans = [("uniform", rate, None) for rate in RATES] + [("similar", rate, similar) for rate in RATES[1:]]
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        for kind, rate, pattern in plans:
            labels = flipped(images, rate, seed, pattern)
            wrong, again = labels != images.labels, replace(images, labels=labels)
            if method is None:
                logits = by_training(line, images, labels, seed)
            else:
                logits = method.logits(again, seed)[images.copy_of]
            suspects, if_right, clear = suspects_of(again, logits, seed, np.empty(0))
            of_logits = np.exp(logits - logits.max(1, keepdims=True))
            by = {
                "check_labels": [one.image for one in suspects] if clear else [],
                "cleanlab, same classifier": find_label_issues(
                    labels, np.asarray(of_logits / of_logits.sum(1, keepdims=True))
                ),
            }
            # These take minutes, so once.
            of_pixels = {
                "SVC": CalibratedClassifierCV(SVC()),
                "linear": LogisticRegression(C=1e-2, max_iter=200),
            }
            for name, model in of_pixels.items() if (kind, rate, seed) == PIXELS else ():
                guesses = cross_val_predict(model, pixels, labels, method="predict_proba", cv=5)
                by[f"cleanlab, {name} of pixels"] = find_label_issues(labels, np.asarray(guesses))
            for name, named in by.items():
                chosen = np.zeros(len(labels), bool)
                chosen[named] = True
                both = int((chosen & wrong).sum())
                row = {"kind": kind, "rate": rate, "seed": seed, "by": name, "named": int(chosen.sum()), "right": both}
                row |= {"wrong": int(wrong.sum()), "images": len(labels)}
                if name == "check_labels":
                    row |= {"look_wrong": len(suspects), "if_right": if_right}
                rows.append(row)
                log.info("%s", row)
            about["rows"] = rows
            Path(line.asked.json).write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
