"""The candidates of auto.py: models whose pretrained weights are at hand, and linear probes of their features."""

from __future__ import annotations

import time
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datasets import source_of
from datasets.sources.split import split_rows
from engine.evaluation.features import Features, features_of
from engine.evaluation.linear import Classifier, fit, folds_of
from engine.trained.model import Trained, pretrained, split_of_run
from models.weights.find import local_weights, locate
from tools.auto.data import read_table
from tools.common.command_line import ToolLine
from tools.common.evaluation import measured
from utils.config import Config
from utils.config.keys import deciding
from utils.config.kinds import AUTO
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.statistics.groups import Groups, effective_images
from utils.statistics.paired import SIGNIFICANCE, agresti_min, mcnemar
from utils.statistics.proportions import wilson
from vitamp.pooling import pool_of

ON_CPU = ("mobilenetv3_large_100", "tf_efficientnet_lite0", "vit_tiny_patch16_224", "resnet18")
ON_GPU = ("resnet50", "convnext_tiny", "vit_small_patch16_224", "vit_base_patch16_224")
OF_DATA = deciding("source", "images", "training images", "split", "random split")
"""Settings that the table of splits takes the place of"""
RECIPE = "finetune"
"""The recipe of all runs, unless -cfg names another"""
TIMED = 16
"""Images of the batch that measures the speed of a model"""
TIMES = 4
"""Number of times that this batch is computed; the fastest one counts, since other programs slow the others"""
HALVINGS = 2
"""Number of times that training images are halved, to see what fewer would have brought"""


class Candidate(NamedTuple):
    """A model with pretrained weights, perhaps at an image size of its own."""

    model: str
    weights: str
    image_size: str
    bytes: int
    """Size of the weights, by which candidates are ordered"""

    def load(self, line: ToolLine, table: Path | None = None, more: Mapping[str, Any] | None = None) -> Config:
        """Return the settings of a run of this candidate: the recipe's, those of the command line, and `more`.

        `table`: names the splits; without one, the data is read as the command line says.
        """
        root = Path(line.asked.data).expanduser()
        settings: dict[str, Any] = {"MODEL.NAME": self.model, "MODEL.PRETRAINED": self.weights}
        settings |= {"TRAIN.NUM_EPOCHS": AUTO, "DATA.DATA_PATH": f"{root}", "DATA.KEEP_TEST": True}
        replaced = set[str]()
        if table is not None:
            replaced.update(OF_DATA)
            folder = root if root.is_dir() else root.parent
            settings |= {"DATA.DATASET": f"csv:{table}", "DATA.DATA_PATH": f"{folder.absolute()}"}
            settings["DATA.KEEP_TEST"] = False
            groups = [row["group"] for row in read_table(table)]
            if len(set(groups)) < len(groups):
                settings["DATA.GROUP"] = "group"
        if self.image_size:
            settings["DATA.IMAGE_SIZE"] = self.image_size
        settings |= more or {}
        replaced.update(settings)
        flags = {key: value for key, value in line.run.flags.items() if key not in replaced}
        flags |= {key: (value, "auto.py") for key, value in settings.items()}
        words = {key: value for key, value in line.run.words.items() if key not in replaced}
        run = replace(line.run, cfg=line.run.cfg or RECIPE, flags=flags, words=words)
        return replace(line, run=run).load().config


def find_candidates(text: str | None, defaults: Sequence[str]) -> tuple[dict[str, Candidate], list[str]]:
    """Return the candidates whose weights can be had, the smallest first, and the names of the others.

    `text`: the value of -weights, in which a word is a name of timm or MODEL=FILE; a model may be followed by an image
    size, as in resnet18@96. Raises UserError for a word that is neither, and if there is no candidate.
    """
    found = dict[str, Candidate]()
    missing = []
    for word in text.split(",") if text else defaults:
        named, _, file = word.strip().partition("=")
        model, _, image_size = named.partition("@")
        weights = file or model
        # `local_weights` raises UserError for what is neither a path nor a name of timm.
        if local_weights(weights) is not None and not file:
            raise UserError(f"-weights {word}: is a path; name its model, too: MODEL={word}.")
        try:
            files = locate(weights)
        except UserError:
            missing.append(model)
            continue
        assert files is not None, "downloaded"
        size = sum(path.stat().st_size for path in files.files)
        name = named if named not in found else word.strip()
        candidate = Candidate(model, weights, image_size, size)
        if candidate in found.values():
            raise UserError(f"-weights {word}: is listed twice.")
        found[name] = candidate
    if not found:
        raise UserError(
            f"No pretrained weights on this machine, and none can be fetched: {', '.join(missing)}. Give weights by "
            "-weights MODEL=FILE, such as -weights resnet18=resnet18.safetensors."
        )
    smallest_first = sorted(found, key=lambda name: (found[name].bytes, found[name].image_size.zfill(9)))
    return {name: found[name] for name in smallest_first}, missing


class Gain(NamedTuple):
    """What has brought a probe so many points here, and may bring more of them."""

    points: float
    words: str

    @classmethod
    def of(cls, what: str, gain: tuple[float, float, float], where: str) -> Gain:
        """`gain`: as a fraction, with the ends of its interval."""
        value, low, high = (100 * fraction for fraction in gain)
        chance = ", which may be chance," if low <= 0 <= high else ""
        return cls(value, f"{what}: {value:+.1f} points ({low:+.1f} to {high:+.1f}){chance} {where}")


@dataclass
class Probe:
    """A linear classifier of a candidate's features, with the features and the model."""

    trained: Trained
    features: Features
    classifier: Classifier
    is_right: np.ndarray
    """Whether each training image is recognised by a classifier that was not fitted to its fold"""

    @property
    def pool(self) -> str:
        return pool_of(self.trained.model)

    def on_test(self) -> tuple[str, list[Gain]]:
        """Return the accuracy on test images, in words, and what the last doubling of training images has brought.

        The latter is missing if they are too few to halve them.
        """
        classifiers = {len(self.is_right): self.classifier}  # number of training images -> classifier fitted to them
        rows = np.arange(len(self.is_right))
        try:
            for _ in range(HALVINGS):
                rows, classifier = self._half(rows)
                classifiers[len(rows)] = classifier
        except UserError:
            pass  # so few images cannot be halved

        test = _features(self.trained, "test")
        columns = test.of(self.pool)
        hits = {size: one.logits(columns).argmax(1).numpy() == test.labels for size, one in classifiers.items()}
        found = accuracy(hits[len(self.is_right)], test.groups)
        *fewer, all_images = sorted(hits)
        if not fewer:
            return found, []
        steps = ", ".join(f"{100 * hits[size].mean():.1f} % with {size:,}" for size in sorted(hits))
        gain = agresti_min(hits[all_images], hits[fewer[-1]], test.groups)
        return found, [Gain.of("more images", gain, f"in the last doubling of training images: {steps}")]

    def _half(self, rows: np.ndarray) -> tuple[np.ndarray, Classifier]:
        """Return half of these training images, and a classifier that is fitted to them.

        Raises UserError if they are too few.
        """
        dataset = split_of_run(self.trained, "train")
        labels = self.features.labels
        all_groups = dataset.groups()
        groups = [all_groups[row] for row in rows] if all_groups else None
        halves = dataset.data.changed(VAL_FRACTION=0.5, FOLD=None)
        rows = rows[split_rows(labels[rows], halves, "train", source_of(halves), groups)]
        fold_of, _ = folds_of(dataset, labels[rows], dataset.data, rows)
        classes = int(self.trained.config.MODEL.NUM_CLASSES)
        columns = self.features.of(self.pool)[rows]
        classifier, _ = fit(columns, labels[rows], fold_of, classes, self.trained.precision.device)
        return rows, classifier


def build(config: Config) -> tuple[Trained, float]:
    """Build a model with its pretrained weights, and measure how many images per second it computes here."""
    trained = pretrained(config, ALONE)
    images = torch.zeros(TIMED, *config.DATA.shape, dtype=torch.uint8)
    # On a CPU, the time of this process alone counts: other programs, which slow it, must not decide between models.
    timer = time.perf_counter
    threads = 1
    if trained.precision.device.type == "cpu":
        timer = time.process_time
        threads = torch.get_num_threads()
    seconds = timeit.repeat(lambda: trained.logits(images).cpu(), repeat=TIMES, number=1, timer=timer)
    return trained, TIMED * threads / min(seconds)


def probe(trained: Trained) -> Probe:
    """Fit a linear classifier to features of the training images, which are computed unless they are kept already."""
    features = _features(trained, "train")
    labels = features.labels
    dataset = split_of_run(trained, "train")
    fold_of, _ = folds_of(dataset, labels, dataset.data)
    classes = int(trained.config.MODEL.NUM_CLASSES)
    columns = features.of(pool_of(trained.model))
    classifier, logits = fit(columns, labels, fold_of, classes, trained.precision.device)
    return Probe(trained, features, classifier, is_right=logits.argmax(1) == labels)


def _features(trained: Trained, part: str) -> Features:
    dataset = split_of_run(trained, part)
    with trained.computing(trained.config.DATA.val_batch):
        return features_of(trained, trained.config, dataset, dataset.data)


def accuracy(is_right: np.ndarray, groups: Groups) -> str:
    """Return the percentage of images that are right, with its 95 % interval, as `measured` words it."""
    percent = 100 * float(is_right.mean())
    return measured(percent, wilson(percent, effective_images(is_right, groups)))


def separate(hits: Mapping[str, np.ndarray], groups: Groups) -> tuple[list[str], list[str]]:
    """Compare candidates on the same images with the one that is most often right.

    `hits`: for each candidate, whether each image is right. Returns the names of those that are not worse beyond
    chance (McNemar's test with Bonferroni's correction), that one first, and words about each of the others.
    """
    best, *others = sorted(hits, key=lambda name: -hits[name].mean())
    equal = [best]
    words = []
    for name in others:
        gain, low, high = agresti_min(hits[name], hits[best], groups)
        p_value = min(1.0, mcnemar(hits[name], hits[best], groups) * len(others))
        verdict = "worse beyond chance"
        if p_value >= SIGNIFICANCE:
            equal.append(name)
            verdict = "not told apart"
            if high < 0:  # the test is stricter than the interval
                verdict += f" (p = {p_value:.2f})"
        words.append(f"{name} {100 * gain:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}), {verdict}")
    return equal, words


def gain_of_sizes(hits: Mapping[str, np.ndarray], groups: Groups, candidates: Mapping[str, Candidate]) -> list[Gain]:
    """Return what larger images brought to probes of the same model; nothing without two sizes of one.

    `hits`: as for `separate`, the candidates with the smallest images first.
    """
    found = list[Gain]()
    smaller = dict[tuple[str, str], str]()  # model and weights -> the candidate before with these
    for name in hits:
        candidate = candidates[name]
        before = smaller.get((candidate.model, candidate.weights))
        if before is not None:
            gain = agresti_min(hits[name], hits[before], groups)
            found.append(Gain.of("larger images", gain, f"in folds, {name} against {before}"))
        smaller[candidate.model, candidate.weights] = name
    return found
