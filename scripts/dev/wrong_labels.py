"""How many wrong labels check_labels.py finds: labels are changed on purpose, and its suspects compared with them.

    python scripts/dev/wrong_labels.py -model tf_efficientnet_lite0 -pretrained w.safetensors -data_path DIR \\
        -image_size 128 -similar airplane-ship,cat-dog -json out.json

Beside it, on the same images and labels: cleanlab with the same classifier's probabilities, and with a support vector
machine and a linear classifier of pixels. Needs cleanlab and scikit-learn.
"""

from __future__ import annotations

import json
import sys
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

from tools.check_labels.search import ByFeatures, Images, open_images, suspects_of
from tools.common.command_line import POOL, Tool, run_tool
from utils.flags import Flag
from utils.log import log
from utils.program import typed

RATES, SEEDS = (0.0, 0.02, 0.05, 0.1), (0, 1, 2)
SIDE = 16
"""Pixels of images for classifiers of pixels"""
PIXELS = ("uniform", 0.05, 0)
"""Where these are tried"""
OWN = (
    replace(POOL, about="features"),
    Flag("similar", "pairs of classes that are taken for each other", "A-B,C-D"),
    Flag("json", "results", "FILE"),
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


def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    line.asked.path = None
    loaded = line.load({"MODEL.NUM_CLASSES": ("auto", "")})
    images, method = open_images(loaded.config, "all"), ByFeatures.of(line, loaded.config)
    pixels = [images.dataset.__getitems__([(0, row)]).images for row in range(len(images.labels))]
    pixels = F.adaptive_avg_pool2d(torch.cat(pixels).float() / 255, SIDE).flatten(1).numpy()
    pairs = [tuple(images.classes.index(name) for name in pair.split("-")) for pair in line.asked.similar.split(",")]
    similar = {a: b for one, other in pairs for a, b in ((one, other), (other, one))}
    plans = [("uniform", rate, None) for rate in RATES] + [("similar", rate, similar) for rate in RATES[1:]]
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        for kind, rate, pattern in plans:
            labels = flipped(images, rate, seed, pattern)
            wrong, again = labels != images.labels, replace(images, labels=labels)
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
            about = {"command": typed("scripts/dev/wrong_labels.py", argv), "rows": rows}
            Path(line.asked.json).write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
