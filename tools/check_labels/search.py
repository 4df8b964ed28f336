"""The search for wrong labels: which images are searched, models that did not see them, and the suspects."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datasets import ImageDataset, auto_workers, comes_unsplit, open_dataset, source_of
from datasets.base import TITLES, Part, Samples
from datasets.exclude import line_of, path_in_list, text_of
from datasets.labels import ANY_LABEL, distinct_names, images_of_classes, label_words
from engine.evaluation.alike import similarity_of_edited
from engine.evaluation.data import data_for_evaluation
from engine.evaluation.features import Features, features_of
from engine.evaluation.linear import FOLDS, Classifier, fit, folds_of
from engine.task.several import scores_of
from engine.trained.model import Trained, batches_of, load_trained, pretrained, split_of_run
from tools.check_data.near import near_pairs
from tools.check_data.scan import scan_split, thumbnails_of
from tools.check_labels.wrong_labels import CHANGED, LEARNT, WRONG, Calibration, Verdict, find_wrong, nearest
from tools.common.command_line import ToolLine
from tools.common.comparison import judged_by
from tools.common.turns import Budget
from tools.compare.runs import Plan, Run, check_runs, train_all
from utils.config import Config
from utils.config.data import DataConfig
from utils.config.kinds import Fold
from utils.distributed.world import ALONE
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.record.run_folder import MANY
from utils.statistics.groups import Groups, effective_images
from utils.statistics.proportions import wilson
from utils.text import counted
from vitamp.checkpoints import read_index
from vitamp.files import write_atomically
from vitamp.metrics import AVERAGE, PLAIN
from vitamp.pooling import POOLED, check_pool, pool_of

BEYOND = (
    "Beyond what this search can find: a class of which the models learnt a third or more of the images under one "
    "other label."
)


class OutOfTimeError(Exception):
    """-budget_min is spent before all folds are trained."""


class Suspect(NamedTuple):
    """An image that suspects.csv lists, since its label may be wrong."""

    image: int
    """Its index"""
    given: str
    proposed: str
    """Names of classes; of several, separated by |"""
    wrong_probability: float
    """Probability that the given label is wrong"""
    given_probability: float
    proposed_probability: float
    """Probabilities of both labels from pixels alone"""
    copy_disagrees: bool = False
    """Whether a copy, or nearly one, has the proposed label"""
    same_bytes_disagree: bool = False
    """Whether a copy of the same bytes has another label: of nearly the same images, each label may be right"""


@dataclass
class Images:
    """The images of the split that is searched, their labels as given, and which of them are copies of others."""

    data: DataConfig
    dataset: ImageDataset
    samples: Samples
    classes: list[str]
    labels: np.ndarray
    """See `Samples.labels`"""
    distinct: np.ndarray
    """Indices of the images of which no earlier one is a copy"""
    distinct_row: np.ndarray
    """For each image, the place in `distinct` of the image that it is a copy of, or of itself"""
    first_with_bytes: np.ndarray
    """For each image, the index of the first image with the same bytes"""

    @property
    def contradicted_rows(self) -> list[int]:
        """Places in `distinct` of the images that have a copy with another label."""
        labels_of_originals = self.labels[self.distinct[self.distinct_row]]
        return np.unique(self.distinct_row[_labels_differ(self.labels, labels_of_originals)]).tolist()

    def name(self, index: int) -> str:
        return path_in_list(self.samples.name(index), self.data)

    def groups_of(self, indices: np.ndarray) -> np.ndarray:
        """The group (DATA.GROUP) of each of these images; empty without groups."""
        return np.array(self.samples.groups)[indices] if self.samples.groups else np.empty(0)

    @cached_property
    def label_numbers(self) -> np.ndarray:
        """One number per image, equal for images with the same label, or with the same set of several labels."""
        return np.unique(self.labels, axis=0, return_inverse=True)[1].reshape(-1)

    @cached_property
    def group_numbers(self) -> np.ndarray:
        """One number per image, equal for the images of a group (DATA.GROUP).

        No two numbers are equal without groups, or if at least half of the groups with several images have several
        labels: then a group says nothing about labels.
        """
        if self.samples.groups:
            _, groups = np.unique(self.samples.groups, return_inverse=True)
            # Each different pair of a group and a label once, so a group is in as many pairs as it has labels.
            groups_in_pairs, _ = np.unique(np.stack([groups, self.label_numbers]), axis=1)
            with_several_labels = (np.bincount(groups_in_pairs) > 1).sum()
            with_several_images = (np.bincount(groups) > 1).sum()
            if with_several_labels < with_several_images / 2:
                return groups
        return np.arange(len(self.labels))

    def images_of_same_thing(self, image: int, similarities: np.ndarray, limit: float) -> tuple[np.ndarray, str]:
        """Find the images that show the same thing as one image, and count their labels if these differ.

        `similarities`: of all images to this one. Those from `limit` on count as its copies, unless at least 10 are so
        similar: then the model hardly tells such images apart. If all copies have one label, the image's group is
        tried.

        Returns a mask over all images, and a sentence that these have several labels; '' if they have one.
        """
        is_copy = self.distinct_row == self.distinct_row[image]
        is_similar = similarities >= limit
        if is_similar.sum() < MANY:
            is_copy = is_copy | is_similar
        in_group = self.group_numbers == self.group_numbers[image]
        for mask, sentence in (
            (is_copy, "these {} images look alike and have {} labels"),
            (in_group, "the {} images of its group have {} labels"),
        ):
            label_count = len(np.unique(self.label_numbers[mask]))
            if label_count > 1:
                return mask, sentence.format(mask.sum(), label_count)
        return is_copy, ""

    def exclude_line(self, suspect: Suspect) -> str:
        """A line of exclude.txt that leaves this image out, with the reason as its comment."""
        reason = f"labelled {suspect.given}, looks like {suspect.proposed}"
        return line_of(self.samples.name(suspect.image), reason, self.data)

    def label_words(self, label: np.ndarray) -> str:
        return label_words(label, self.classes)


def _labels_differ(labels: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compare labels image by image: a mask of the images whose label, or any of their labels, differs."""
    return (labels != others).reshape(len(labels), -1).any(1)


INPUT_SETTINGS = ("IMAGE_SIZE", "IMAGE_CHANNELS", "CROP", "CROP_PCT", "CROP_MODE", "INTERPOLATION")
INPUT_SETTINGS += ("IMAGENET_MEAN", "IMAGENET_STD", "EXIF_ROTATE", "BACKGROUND")
"""Settings of DATA that decide how an image becomes the input of a model"""


def config_to_search(trained: Trained, line: ToolLine, recipe: Config) -> Config:
    """Combine the settings of a run's model with those of the images to search.

    The images are those that the command line names; with -prove, those of `recipe`, in the form that the model reads.
    """
    config = trained.config
    if line.asked.prove:
        data = recipe.DATA.changed(**{key: getattr(config.DATA, key) for key in INPUT_SETTINGS})
    else:
        all_images = config.changed(DATA={"PART": "all"})
        settings_on_command_line = {*line.run.flags, *line.run.words}
        data, _ = data_for_evaluation(all_images, trained.chosen, settings_on_command_line)
    return config.changed(DATA=data)


def open_images(config: Config, part: Part) -> Images:
    """Open a split with its labels as given, find copies among its images, and log how many there are.

    Raises UserError if the images are no files on a disk, if a label is below 0, or if an image cannot be read.
    """
    data = config.DATA.changed(PART=part, FOLD=None, RELABEL=None)
    dataset = open_dataset(data, False, ANY_LABEL, config.SEED, torch.device("cpu"))
    samples = dataset.single_images()
    if samples is None or samples.remote:
        where = "held in memory, without names" if samples is None else "read over a network"
        raise UserError(
            f"{source_of(data)}: its images are {where}; check_labels.py needs them as files on a disk, such as one "
            "folder per class."
        )
    labels = np.asarray(samples.labels)
    below_zero = np.flatnonzero(labels < 0)
    if len(below_zero):
        label = f"{samples.name(int(below_zero[0]))}: the label {labels[below_zero[0]]}"
        raise UserError(f"{label} is below 0. Correct it, or leave the image out by DATA.EXCLUDE.")
    scans = scan_split(TITLES[part], samples, data, auto_workers(given=data.NUM_WORKERS)).scans
    for image, scan in enumerate(scans):
        if scan.problem:
            raise UserError(f"{samples.name(image)}: cannot be read ({scan.reason}); leave it out by DATA.EXCLUDE.")

    # Copies with equal bytes
    image_by_digest: dict[bytes, int] = {}  # the first image of each
    first_with_bytes = np.array([image_by_digest.setdefault(scan.digest, image) for image, scan in enumerate(scans)])
    contradicting = int(_labels_differ(labels, labels[first_with_bytes]).sum())
    copies = f"{len(samples) - len(image_by_digest):,} copies of others, {contradicting:,} of them with another label"

    # Nearly the same images with different labels count as copies, too. Copies share a fold, so that a model that
    # judges one has not seen another.
    original_of = first_with_bytes.copy()
    if labels.ndim == 1:
        pairs = near_pairs(thumbnails_of(scans))
        first = pairs[:, 0]
        second = pairs[:, 1]
        pairs = pairs[(labels[first] != labels[second]) & (original_of[first] != original_of[second])]
        for image, near_copy in pairs.tolist():
            # All copies of the second image's original become copies of the first image's original.
            original_of[original_of == original_of[near_copy]] = original_of[image]
        if len(pairs):
            copies += f"; {counted(len(pairs), 'pair')} nearly the same, with different labels"

    # The distinct images, and for each image the place of its original among these.
    distinct, distinct_row = np.unique(original_of, return_inverse=True)
    class_count = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    classes = distinct_names(dataset.classes or range(class_count))
    number = f"{len(samples):,}"
    log.info("%s: %s images (%s), %d classes; %s", source_of(data), number, TITLES[part], len(classes), copies)
    return Images(
        data=data,
        dataset=dataset,
        samples=samples,
        classes=classes,
        labels=labels,
        distinct=distinct,
        distinct_row=distinct_row,
        first_with_bytes=first_with_bytes,
    )


def table_of_suspects(images: Images, suspects: Sequence[Suspect], decision: str) -> str:
    """Return the text of suspects.csv, a table as DATA.RELABEL takes it: a heading, and one row per image.

    `decision`: keep, drop or relabel, for each row. But suspects that have a copy of the same bytes with another label
    are dropped in any case.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "given", "proposed", "score", "decision"])
    # The data may name an image twice; the table has its last suspect.
    suspect_by_name = {images.name(suspect.image): suspect for suspect in suspects}
    for name, suspect in suspect_by_name.items():
        decided = "drop" if suspect.same_bytes_disagree else decision
        rows.writerow([name, suspect.given, suspect.proposed, f"{suspect.wrong_probability:.4f}", decided])
    return text.getvalue()


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
        check_pool(trained.model, asked.pool or POOLED)  # POOLED is the name of the usual pooling, which each model has
        return cls(trained, asked.pool or pool_of(trained.model))

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


@dataclass
class SearchResult:
    """The suspects and the verdict of a search, and sentences about them."""

    suspects: list[Suspect]
    """The most probable first; where too few look wrong, also others, see `Verdict.listed`"""
    verdict: Verdict
    accuracy: str
    """Of the models on images that they did not see, in words"""
    not_judged: list[str]
    """Classes with too few images, or with all of them in one group"""
    not_learnt: list[str]
    """Classes that the models do not recognise, and how many of their images they do"""
    features: np.ndarray = field(repr=False)
    """Features or logits of all images, where images that look alike are near"""
    limit: float = np.inf
    """Similarity of images to their edited copies, if known: images as similar as that may show the same thing"""

    def words(self) -> list[str]:
        """The result in sentences for the log and the page; the last one is the verdict."""
        lines = [self.accuracy]
        if self.not_judged:
            names = ", ".join(self.not_judged)
            lines.append(f"Not judged, since they have fewer images than folds, or all in one group: {names}.")
        if self.not_learnt:
            lines.append(
                f"The models hardly recognise {', '.join(self.not_learnt)}: suspects of these classes mean nothing, as "
                "right labels look wrong there, too."
            )
        contradicted = sum(suspect.copy_disagrees for suspect in self.suspects)
        if contradicted:
            have = "has" if contradicted == 1 else "have"
            lines.append(
                f"{counted(contradicted, 'image')} {have} a copy, or nearly one, with another, likelier label; none is "
                "known to be right."
            )
        verdict = self.verdict
        if verdict.changed and not verdict.clear:
            lines.append(  # CHANGED is the fraction of the labels that are changed at a time
                f"Of {verdict.changed:,} labels that were changed on purpose, {100 * CHANGED:.0f} % at a time, "
                f"{verdict.changed_found:,} look wrong to this search."
            )
        return [*lines, BEYOND, self._verdict_in_words()]

    def _verdict_in_words(self) -> str:
        """Say how many labels look wrong, and how many would if all were right.

        Labels are judged by up to two views of the images: the models' logits, and the labels of the nearest images.
        """
        verdict = self.verdict
        if not verdict.look_wrong:
            return (
                "Nothing found: no label looks wrong, which does not prove that all are right. Images of none of the "
                "classes are not found this way."
            )
        look = "looks" if verdict.look_wrong == 1 else "look"
        count = f"{counted(verdict.look_wrong, 'label')} {look} wrong"
        count_if_right = f"up to {verdict.most_if_right} would if all were right"
        has_two_views = bool(verdict.surer)
        if has_two_views:
            count_if_right = f"{verdict.agreed} of them by their nearest images, too, where {count_if_right}"
        if verdict.clear:
            return f"{count}; {count_if_right}. How many of them are wrong, and not hard, is unknown."

        # There are more by both views than by chance, if `beyond_chance`, but too few of those that look wrong by one.
        too_few = "Too few to tell from chance"
        reason = ""
        if verdict.beyond_chance:
            too_few = "Too few by both"
            reason = ", as hard images look so, too"
        return (
            f"{too_few}: {count}; {count_if_right}, about {verdict.mean_if_right:.1f} on average. Some of them may be "
            f"wrong, and all may be right{reason}."
        )


def find_suspects(images: Images, method: Method, seed: int) -> SearchResult:
    """Search the labels of a split: predict each image by a model that did not see it, and judge its label by that."""
    # Models predict the distinct images; a copy has the logits of its original.
    distinct_logits = method.logits(images, seed)
    logits = distinct_logits[images.distinct_row]
    distinct_labels = images.labels[images.distinct]
    groups = images.groups_of(images.distinct)
    accuracy = _accuracy(distinct_logits, distinct_labels, method.folds, groups)

    # A class is judged only if the models of all folds saw other images of it: not if it has few, or all in one group.
    counts = images_of_classes(distinct_labels, len(images.classes))
    is_unjudged = (counts > 0) & (counts < method.folds)
    if len(groups):
        for label in np.flatnonzero(counts):
            has_label = distinct_labels[:, label] > 0 if distinct_labels.ndim == 2 else distinct_labels == label
            if len(np.unique(groups[has_label])) == 1:
                is_unjudged[label] = True
    unjudged = np.flatnonzero(is_unjudged)
    suspects, verdict = judge_labels(images, logits, seed, unjudged, features=method.features)

    # Classes of which the models recognise few images
    not_learnt = []
    if distinct_labels.ndim == 1:
        is_recognised = distinct_logits.argmax(1) == distinct_labels
        recognised = np.bincount(distinct_labels[is_recognised], minlength=len(counts))
        for label in np.flatnonzero((recognised < LEARNT * counts) & ~is_unjudged):
            count = counted(int(counts[label]), "image")
            not_learnt.append(f"{images.classes[label]} ({recognised[label]} of {count})")
    return SearchResult(
        suspects,
        verdict,
        accuracy,
        not_judged=[images.classes[label] for label in unjudged],
        not_learnt=not_learnt,
        features=logits if method.features is None else np.asarray(method.features),
        limit=method.similarity_of_edited(images),
    )


def judge_validation(images: Images, method: Method, searched: SearchResult, seed: int) -> SearchResult:
    """Judge labels of the validation split, by the models of a search of the training split, and their calibration."""
    logits = method.logits_of_unsearched(images)
    no_classes = np.empty(0, np.int64)
    suspects, verdict = judge_labels(images, logits, seed, no_classes, searched.verdict.calibrations)
    accuracy = "Labels of the validation split, by models of the training split."
    return SearchResult(suspects, verdict, accuracy, not_judged=[], not_learnt=searched.not_learnt, features=logits)


def judge_labels(
    images: Images,
    logits: np.ndarray,
    seed: int,
    not_judged: np.ndarray,
    calibrations: Sequence[Calibration | None] = (),
    features: np.ndarray | None = None,
) -> tuple[list[Suspect], Verdict]:
    """Judge the labels of all images by their logits; return the suspects, and the verdict.

    Suspects are copies whose label is less likely than that of another copy, then as many other images as the verdict
    says (`Verdict.listed`). `not_judged`: classes whose labels are left out. `calibrations`: of the logits, by a search
    of other images; empty: they are fitted to these labels. `features`: of all images, for a second view of images
    with one label each.
    """
    calibrations = calibrations or [None] * len(images.classes)
    if images.labels.ndim == 2:
        return _judge_each_class(images, logits, seed, not_judged, calibrations)

    # From here on, a row is a place among the judged images.
    judged = np.flatnonzero(~np.isin(images.labels, not_judged))
    labels = images.labels[judged]
    distinct_row = images.distinct_row[judged]
    groups = images.groups_of(judged)
    neighbours = None
    if features is not None:
        related = [distinct_row]
        if len(groups):
            related.append(np.unique(groups, return_inverse=True)[1])
        neighbours = nearest(np.asarray(features)[judged], related)
    # With one label per image, a single calibration holds for all classes.
    verdict = find_wrong(logits[judged], labels, seed, calibrations[0], neighbours, groups)

    # Among copies with several labels, suspects are those that do not have the likeliest one of these labels.
    likeliest_label_of = dict[int, int]()  # by row, of such suspects
    for contradicted in images.contradicted_rows:
        copies = np.flatnonzero(distinct_row == contradicted)
        if len(copies):
            given_labels = labels[copies]
            likeliest = given_labels[verdict.class_probabilities[copies[0], given_labels].argmax()]
            for row in copies[given_labels != likeliest].tolist():
                likeliest_label_of[row] = int(likeliest)

    # The copies come first, then the labels that are most probably wrong; among equally probable ones, first the label
    # that is least probable by the pixels.
    given_probabilities = verdict.class_probabilities[np.arange(len(judged)), labels]
    doubtful = np.lexsort((given_probabilities, -verdict.wrong_probability))[: verdict.listed].tolist()
    suspects = []
    for row in dict.fromkeys([*likeliest_label_of, *doubtful]):
        image = int(judged[row])
        given = int(labels[row])
        copy_disagrees = row in likeliest_label_of
        proposed = likeliest_label_of.get(row, int(verdict.proposed[row]))
        # Of copies with equal bytes, one label is wrong. Of nearly the same images, each label may be right.
        labels_of_same_bytes = images.labels[images.first_with_bytes == images.first_with_bytes[image]]
        suspects.append(
            Suspect(
                image,
                given=images.classes[given],
                proposed=images.classes[proposed],
                wrong_probability=1.0 if copy_disagrees else float(verdict.wrong_probability[row]),
                given_probability=float(given_probabilities[row]),
                proposed_probability=float(verdict.class_probabilities[row, proposed]),
                copy_disagrees=copy_disagrees,
                same_bytes_disagree=copy_disagrees and bool((labels_of_same_bytes != given).any()),
            )
        )
    return suspects, verdict


def _judge_each_class(
    images: Images,
    logits: np.ndarray,
    seed: int,
    not_judged: np.ndarray,
    calibrations: Sequence[Calibration | None],
) -> tuple[list[Suspect], Verdict]:
    """Judge images with several labels: for each class by itself, whether an image has it. See `judge_labels`.

    Here a label is a class of an image that the image has (1) or has not (0). Counts in the verdict are sums over the
    classes that are judged.
    """
    verdicts = []
    has_class = images.labels.T.astype(np.int64)
    for column, has, calibration in zip(logits.T, has_class, calibrations, strict=True):
        two_classes = np.stack([0 * column, column], 1)  # logits of not having the class, and of having it
        verdicts.append(find_wrong(two_classes, has, seed, calibration))
    judged = [verdict for label, verdict in enumerate(verdicts) if label not in not_judged]
    together = Verdict(
        wrong_probability=np.stack([verdict.wrong_probability for verdict in verdicts], 1),
        class_probabilities=np.stack([verdict.class_probabilities[:, 1] for verdict in verdicts], 1),
        proposed=1 - images.labels,  # the opposite of each
        look_wrong=sum(verdict.look_wrong for verdict in judged),
        agreed=sum(verdict.agreed for verdict in judged),
        most_if_right=sum(verdict.most_if_right for verdict in judged),
        mean_if_right=sum(verdict.mean_if_right for verdict in judged),
        calibrations=[verdict.calibrations[0] for verdict in verdicts],  # each verdict has a single one
        changed=sum(verdict.changed for verdict in judged),
        changed_found=sum(verdict.changed_found for verdict in judged),
    )
    wrong_probability = together.wrong_probability  # images x classes
    wrong_probability[:, not_judged] = -1  # below any probability, so that they come last in the list

    # Collect the most doubtful labels by image: of each image the most doubtful one, and others if they look wrong.
    # They are sorted by the probability of being wrong; equal ones by the probability of the given label by pixels.
    given_probabilities = np.where(images.labels, together.class_probabilities, 1 - together.class_probabilities)
    most_doubtful = np.lexsort((given_probabilities.ravel(), -wrong_probability.ravel()))[: together.listed]
    doubted_labels: dict[int, list[int]] = {}
    for image, label in zip(*np.unravel_index(most_doubtful, wrong_probability.shape), strict=True):
        labels = doubted_labels.setdefault(int(image), [])
        if not labels or wrong_probability[image, label] >= WRONG:
            labels.append(int(label))

    suspects = []
    for image, labels in doubted_labels.items():
        given = images.labels[image]
        proposed = given.copy()
        proposed[labels] = 1 - given[labels]
        given_probability = float(given_probabilities[image, labels[0]])
        suspects.append(
            Suspect(
                image,
                given=images.label_words(given),
                proposed=images.label_words(proposed),
                wrong_probability=float(wrong_probability[image, labels[0]]),
                given_probability=given_probability,
                proposed_probability=1 - given_probability,
            )
        )
    return suspects, together


def _accuracy(logits: np.ndarray, labels: np.ndarray, folds: int, groups: Groups) -> str:
    """Say how accurate the models are on images that they did not see.

    Raises UserError if they are no better than guessing: then their probabilities say nothing about the labels.
    """
    models = f"Models of {folds} folds, on the images that each did not see"
    if labels.ndim == 2:
        probabilities = 1 / (1 + np.exp(-logits))
        reached = scores_of(probabilities, labels > 0).map * 100
        guessing = 100 * float(labels.mean())
        must_exceed_guessing = reached / 1.1  # mAP must be a tenth above guessing
        words = f"mAP {reached:.1f} %; ordering at random: {guessing:.1f} %"
    else:
        is_right = logits.argmax(1) == labels
        reached = 100 * float(is_right.mean())
        guessing = 100 * float(np.bincount(labels).max()) / len(labels)
        interval = wilson(reached, effective_images(is_right, groups))
        must_exceed_guessing = interval.low
        words = f"top-1 {reached:.1f} % of the labels as given; always guessing the largest class: {guessing:.1f} %"
    if must_exceed_guessing <= guessing:
        raise UserError(
            f"{models}: {words}. Their probabilities say too little of the labels: train longer, give weights "
            "(-pretrained) that know such images, or look whether the labels belong to the images."
        )
    return f"{models}: {words}."
