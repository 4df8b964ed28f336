"""Predictions of images by models that did not see them: classifiers of frozen features, or trainings of the recipe."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets import comes_unsplit, open_dataset, source_of
from datasets.exclude import line_of, path_in_list, text_of
from datasets.labels import ANY_LABEL
from engine.evaluation.alike import similarity_of_edited
from engine.evaluation.features import Features, features_of
from engine.evaluation.linear import FOLDS, Classifier, fit, folds_of
from engine.trained.model import Trained, batches_of, load_trained, pretrained, split_of_run
from tools.check_labels.searched_images import Images
from tools.common.command_line import ToolLine
from tools.common.comparison import judged_by
from tools.common.turns import Budget
from tools.compare.runs import Plan, Run, check_runs, train_all
from utils.config import Config
from utils.config.kinds import Fold
from utils.distributed.world import ALONE
from utils.errors import TrainingError, UserError
from utils.log import log
from vitamp.checkpoints import read_index
from vitamp.files import write_atomically
from vitamp.metrics import AVERAGE, PLAIN
from vitamp.pooling import check_pool, pool_of


class OutOfTimeError(Exception):
    """-budget_min is spent before all folds are trained."""


@dataclass
class ByFeatures:
    """Predicts images by a linear classifier of a frozen model's features, fitted once per fold to the other folds."""

    trained: Trained
    pool: str
    folds: int = FOLDS
    features: np.ndarray | None = None
    """Of the images that are searched, where images that look alike are near; None before the search"""
    classifier: Classifier | None = None
    """Fitted to all distinct images"""
    budget: None = None

    @classmethod
    def of(cls, line: ToolLine, config: Config) -> ByFeatures:
        """Load the run or checkpoint that the command line names, else the weights of the recipe `config`.

        Features are pooled by -pool, or else as the model usually does.
        """
        asked = line.asked
        if asked.path:
            trained = load_trained(asked.path, given=line.run, needs_labels=False)
            log.info("%s: %s", asked.path, trained.chosen.words)
            log.info("If it was trained on these very images, it may have memorised wrong labels, and hides them.")
        else:
            trained = pretrained(config, ALONE)
        pool = asked.pool or pool_of(trained.model)
        check_pool(trained.model, pool)
        return cls(trained, pool)

    def _features(self, images: Images) -> Features:
        trained = self.trained
        with trained.computing(trained.config.DATA.val_batch):
            return features_of(trained, trained.config, images.dataset, images.data)

    def logits(self, images: Images, seed: int) -> np.ndarray:
        """Compute logits of the distinct images: of each, by the classifier that was fitted without its fold.

        The features of all images and the classifier of all folds are kept for later: see the class's fields.
        """
        self.features = self._features(images).of(self.pool)
        labels = images.labels[images.distinct]
        labels = labels.astype(np.int64 if labels.ndim == 1 else np.float32)
        data = images.data.changed(SPLIT_SEED=seed)
        fold_of, about_folds = folds_of(images.dataset, labels, data, images.distinct)
        features = np.ascontiguousarray(self.features[images.distinct])  # images x features
        self.classifier, logits = fit(features, labels, fold_of, len(images.classes), self.trained.precision.device)
        width = features.shape[1]
        strength = self.classifier.strength
        log.info("A linear classifier of %d features (%s), strength %.2g. %s", width, self.pool, strength, about_folds)
        return logits

    def similarity_of_edited(self, images: Images) -> float:
        """Measure how similar images are to their edited copies by these features, for `SearchResult.limit`.

        The result is infinite with another pooling than the model's usual one, because it is measured for that alone.
        """
        has_usual_pool = self.pool == pool_of(self.trained.model)
        if self.features is None or not has_usual_pool:
            return np.inf
        batch = self.trained.config.DATA.val_batch
        with self.trained.computing(batch):
            # The function of engine/evaluation/alike.py, not this method
            return similarity_of_edited(self.trained, images.dataset, np.asarray(self.features).mean(0), batch)

    def logits_of_unsearched(self, images: Images) -> np.ndarray:
        """Compute logits of images that were not searched, by the classifier of all that were."""
        assert self.classifier is not None
        return self.classifier.logits(self._features(images).of(self.pool)).numpy()


@dataclass
class ByTraining:
    """Predicts images by the recipe, trained once per fold on the other folds.

    The last epoch of each training predicts: the best epoch was chosen by the very labels that are judged.
    """

    line: ToolLine
    folds: int
    out: Path
    budget: Budget | None = None
    """From the first training of the command on"""
    features: np.ndarray | None = None
    runs: list[Run] = field(default_factory=list)

    def logits(self, images: Images, seed: int) -> np.ndarray:
        """Train the recipe on all folds, and compute logits of the distinct images: of each, by the run of its fold.

        Trainings of an earlier command with the same images and labels are resumed.
        """
        if not comes_unsplit(images.data):
            raise UserError(
                f"{source_of(images.data)} comes with its own validation split, and -folds makes its own: name the "
                "folder of the training images alone, or give weights (-pretrained), with which -folds is not needed."
            )
        # Trainings leave out copies, and images that are set aside: all but the distinct images of this split. List
        # them as in DATA.EXCLUDE, and after them the lines of the list in use.
        every_image = open_dataset(images.data.changed(PART="all"), False, ANY_LABEL, 0, torch.device("cpu"))
        samples = every_image.single_images()
        row_of_name = {images.name(image): row for row, image in enumerate(images.distinct.tolist())}
        assert samples is not None
        lines = []
        for image in range(len(samples)):
            name = samples.name(image)
            if path_in_list(name, images.data) not in row_of_name:
                lines.append(line_of(name, remark="", data=images.data))
        if images.data.EXCLUDE:
            lines.append(text_of(images.data))

        # Runs of other images or labels are not reused: there, an image may have been in another fold.
        identity = repr([images.name(image) for image in range(len(images.labels))]) + "\n".join(lines)
        version = hashlib.sha256(identity.encode(errors="surrogateescape") + images.labels.tobytes()).hexdigest()[:8]
        out = self.out / f"seed-{seed}-{version}"
        out.mkdir(parents=True, exist_ok=True)
        left_out = out / "left_out.txt"
        write_atomically(left_out, "\n".join([*lines, ""]))
        self._train(seed, out, left_out)

        # Each run predicts the images of its fold, its validation split.
        logits = np.full((len(images.distinct), len(images.classes)), np.nan)
        for trained in map(with_last_weights, self.runs):
            dataset = split_of_run(trained)
            fold = dataset.single_images()
            assert fold is not None
            for batch_logits, _, indices in batches_of(trained, dataset):
                # Names are relative to DATA_PATH in the run's settings. In `images.data`, it may be a link to that.
                batch_names = [path_in_list(fold.name(index), trained.config.DATA) for index in indices.tolist()]
                rows = [row_of_name[name] for name in batch_names]
                logits[rows] = batch_logits.double().cpu().numpy()[:, : len(images.classes)]
        assert np.isfinite(logits).all()
        return logits

    def _train(self, seed: int, out: Path, left_out: Path) -> None:
        """Train the recipe once per fold, without the images in the list `left_out`, into subfolders of `out`.

        Raises TrainingError if a training fails, and OutOfTimeError if -budget_min leaves no time for all.
        """
        settings = {"SEED": seed, "DATA.SPLIT_SEED": seed, "TRAIN.PATIENCE": None, "MODEL.NUM_CLASSES": "auto"}
        settings["DATA.EXCLUDE"] = str(left_out)
        self.runs = []
        for number in range(1, self.folds + 1):
            fold = Fold(number, self.folds)
            settings["DATA.FOLD"] = str(fold)
            value_and_source = {key: (value, "check_labels.py") for key, value in settings.items()}
            config = load_with(self.line, value_and_source)
            self.runs.append(Run("recipe", seed, config, out / f"fold{number}", fold))
        check_runs(self.runs)
        plan = Plan(
            contenders=("recipe",),
            judged=judged_by(name=None, weights=None, configs=[run.config for run in self.runs]),
            folds=self.folds,
            runs=tuple(self.runs),
            device="",  # only for a report, and there is none
            several_processes=False,
            remarks=(),
            budget_min=self.line.asked.budget_min,
        )

        done = train_all(plan, lambda _: None, self.budget)  # nothing is written after each run, only after all
        self.budget = done.budget
        if done.failed:
            raise TrainingError(f"A training failed: {next(iter(done.failed.values()))}")
        if done.left_out:
            raise OutOfTimeError("-budget_min: no time was left for all folds; repeat the command to continue.")

    def similarity_of_edited(self, _images: Images) -> float:
        """Infinite: there are no features by which images are compared."""
        return np.inf

    def logits_of_unsearched(self, images: Images) -> np.ndarray:
        """Compute logits of images that were not searched: the mean over the runs of all folds."""
        logits_by_run = []
        for trained in map(with_last_weights, self.runs):
            logits_by_run.append(torch.cat([logits for logits, _, _ in batches_of(trained, images.dataset)]))
        return torch.stack(logits_by_run).mean(0).double().cpu().numpy()[:, : len(images.classes)]


Method = ByFeatures | ByTraining


def load_with(line: ToolLine, given: Mapping[str, tuple[Any, str]]) -> Config:
    """Load the recipe of the command line with other settings: `given`, each as a value and who gives it.

    They win over the command line. MAX_TIME is removed: a training that it ends is unfinished, waiting to be resumed.
    """
    given = {**given, "MAX_TIME": (None, "check_labels.py")}
    words = {key: text for key, text in line.run.words.items() if key not in given}
    return replace(line, run=replace(line.run, words=words)).load(given).config


def with_last_weights(run: Run) -> Trained:
    """Load a run's model with the weights after its last epoch: those of the EMA, if the run has one."""
    root = run.folder / "checkpoints"
    weights = AVERAGE if run.config.TRAIN.MODEL_EMA else PLAIN
    return load_trained(root / read_index(root)["last"], weights.name)
