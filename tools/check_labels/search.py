"""The images whose labels are searched, models that did not see them, and the suspects."""

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
from datasets.labels import ANY_LABEL, distinct_names, images_of_classes
from engine.evaluation.alike import similarity_of_edited
from engine.evaluation.data import data_for_evaluation
from engine.evaluation.features import Features, features_of
from engine.evaluation.linear import FOLDS, Classifier, fit, folds_of
from engine.task.several import scores_of
from engine.trained.model import Trained, batches_of, load_trained, pretrained, split_of_run
from tools.check_data.near import near_pairs
from tools.check_data.scan import scan_split, thumbnails_of
from tools.check_labels.noise import CHANGED, LEARNT, WRONG, Calibration, Wrong, find_wrong, nearest
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
from utils.statistics.proportions import wilson
from utils.text import counted
from vitamp.checkpoints import read_index
from vitamp.files import write_atomically
from vitamp.metrics import AVERAGE, PLAIN
from vitamp.pooling import POOLED, check_pool, pool_of


class OutOfTimeError(Exception):
    """-budget_min is spent before all folds are trained."""


class Suspect(NamedTuple):
    image: int
    """Its index"""
    given: str
    proposed: str
    """Names of classes; of several, separated by |"""
    wrong: float
    """Probability that the label is wrong"""
    of_given: float
    of_proposed: float
    """Probabilities of both from pixels alone"""
    certain: bool = False
    """Whether a copy, or nearly one, has the proposed label"""
    equal: bool = False
    """Whether a copy of the same bytes has another label: of nearly the same images, each label may be right"""


@dataclass
class Images:
    """Images that are searched, with their labels as given."""

    data: DataConfig
    dataset: ImageDataset
    samples: Samples
    classes: list[str]
    labels: np.ndarray
    """See `Samples.labels`"""
    distinct: np.ndarray
    """Indices of the images of which no earlier one has the same bytes"""
    copy_of: np.ndarray
    """Of each image, the place in `distinct` of the one with the same bytes"""
    bytes_of: np.ndarray
    """Of each image, the index of the first with the same bytes"""

    @property
    def contradicted(self) -> list[int]:
        """Places in `distinct` of images whose copies have other labels."""
        differ = (self.labels != self.labels[self.distinct[self.copy_of]]).reshape(len(self.labels), -1).any(1)
        return np.unique(self.copy_of[differ]).tolist()

    def name(self, index: int) -> str:
        return path_in_list(self.samples.name(index), self.data)

    @cached_property
    def kinds(self) -> np.ndarray:
        """The number of each image's label, or of its labels together."""
        return np.unique(self.labels, axis=0, return_inverse=True)[1].reshape(-1)

    @cached_property
    def groups(self) -> np.ndarray:
        """The number of each image's group, if most groups have one label; else none shares its number."""
        groups = np.unique(self.samples.groups or [""], return_inverse=True)[1]
        if self.samples.groups:
            kinds = np.unique(np.stack([groups, self.kinds]), axis=1)[0]  # of each group, once per label
            if (np.bincount(kinds) > 1).sum() < (np.bincount(groups) > 1).sum() / 2:
                return groups
        return np.arange(len(self.labels))

    def same_thing(self, index: int, likeness: np.ndarray, limit: float) -> tuple[np.ndarray, str]:
        """Which images show what that one shows, and in words that they have several labels; '' if they have one.

        These are its copies, with images as similar as `limit`, unless they are many; else those of its group.
        `likeness`: of all images to that one.
        """
        alike = self.copy_of == self.copy_of[index]
        similar = likeness >= limit
        if similar.sum() < MANY:
            alike = alike | similar
        for same, said in (
            (alike, "these {} images look alike and have {} labels"),
            (self.groups == self.groups[index], "the {} images of its group have {} labels"),
        ):
            labels = len(np.unique(self.kinds[same]))
            if labels > 1:
                return same, said.format(same.sum(), labels)
        return alike, ""

    def line(self, one: Suspect) -> str:
        return line_of(self.samples.name(one.image), f"labelled {one.given}, looks like {one.proposed}", self.data)

    def label_words(self, label: np.ndarray) -> str:
        """The name of a class, or those of several."""
        chosen = np.flatnonzero(label) if label.ndim else [int(label)]
        return "|".join(self.classes[one] for one in chosen)


OF_INPUT = ("IMAGE_SIZE", "IMAGE_CHANNELS", "CROP", "CROP_PCT", "CROP_MODE", "INTERPOLATION")
OF_INPUT += ("IMAGENET_MEAN", "IMAGENET_STD", "EXIF_ROTATE", "BACKGROUND")


def searched_by(trained: Trained, line: ToolLine, recipe: Config) -> Config:
    """Settings of a run's model with the images to search: those of the command line, or with -prove of `recipe`."""
    config = trained.config
    if line.asked.prove:
        data = recipe.DATA.changed(**{key: getattr(config.DATA, key) for key in OF_INPUT})
    else:
        whole = config.changed(DATA={"PART": "all"})
        data, _ = data_for_evaluation(whole, trained.chosen, {*line.run.flags, *line.run.words})
    return config.changed(DATA=data)


def open_images(config: Config, part: Part) -> Images:
    """The images of a split."""
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
    wrong = np.flatnonzero(labels < 0)
    if len(wrong):
        label = f"{samples.name(int(wrong[0]))}: the label {labels[wrong[0]]}"
        raise UserError(f"{label} is below 0. Correct it, or leave the image out by DATA.EXCLUDE.")
    scans = scan_split(TITLES[part], samples, data, auto_workers(given=data.NUM_WORKERS)).scans
    for index, scan in enumerate(scans):
        if scan.problem:
            raise UserError(f"{samples.name(index)}: cannot be read ({scan.reason}); leave it out by DATA.EXCLUDE.")
    first: dict[bytes, int] = {}
    copy_of = np.array([first.setdefault(scan.digest, index) for index, scan in enumerate(scans)])
    bytes_of = copy_of.copy()
    contradicting = int((labels != labels[copy_of]).reshape(len(labels), -1).any(1).sum())
    copies = f"{len(samples) - len(first):,} copies of others, {contradicting:,} of them with another label"
    if labels.ndim == 1:
        near = near_pairs(thumbnails_of(scans))
        near = near[(labels[near[:, 0]] != labels[near[:, 1]]) & (copy_of[near[:, 0]] != copy_of[near[:, 1]])]
        for one, other in near.tolist():  # as copies: no model that is asked saw one of them
            copy_of[copy_of == copy_of[other]] = copy_of[one]
        if len(near):
            copies += f"; {counted(len(near), 'pair')} nearly the same, with different labels"
    distinct, places = np.unique(copy_of, return_inverse=True)
    classes = distinct_names(dataset.classes or range(labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1))
    number = f"{len(samples):,}"
    log.info("%s: %s images (%s), %d classes; %s", source_of(data), number, TITLES[part], len(classes), copies)
    return Images(
        data=data,
        dataset=dataset,
        samples=samples,
        classes=classes,
        labels=labels,
        distinct=distinct,
        copy_of=places,
        bytes_of=bytes_of,
    )


def rows_of(images: Images, suspects: Sequence[Suspect], decision: str) -> str:
    """suspects.csv, as DATA.RELABEL takes it."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "given", "proposed", "score", "decision"])
    for name, one in {images.name(one.image): one for one in suspects}.items():  # a table may name an image twice
        rows.writerow([name, one.given, one.proposed, f"{one.wrong:.4f}", "drop" if one.equal else decision])
    return text.getvalue()


@dataclass
class ByFeatures:
    """A linear classifier of a frozen model's features."""

    trained: Trained
    pool: str
    folds: int = FOLDS
    features: np.ndarray | None = None
    """In which images are near that look alike; None for the logits"""
    classifier: Classifier | None = None
    """Of all distinct images"""
    budget: None = None

    @classmethod
    def of(cls, line: ToolLine, config: Config) -> ByFeatures:
        if line.asked.path:
            trained = load_trained(line.asked.path, given=line.run, needs_labels=False)
            log.info("%s: %s", line.asked.path, trained.chosen.words)
            log.info("If it was trained on these very images, it may have memorised wrong labels, and hides them.")
        else:
            trained = pretrained(config, ALONE)
        check_pool(trained.model, line.asked.pool or POOLED)
        return cls(trained, line.asked.pool or pool_of(trained.model))

    def _features(self, images: Images) -> Features:
        trained = self.trained
        with trained.computing(trained.config.DATA.val_batch):
            return features_of(trained, trained.config, images.dataset, images.data)

    def logits(self, images: Images, seed: int) -> np.ndarray:
        """Of the distinct images, each by a model that was trained without its fold."""
        self.features = self._features(images).of(self.pool)
        labels = images.labels[images.distinct]
        labels = labels.astype(np.int64 if labels.ndim == 1 else np.float32)
        data = images.data.changed(SPLIT_SEED=seed)
        fold_of, words = folds_of(images.dataset, labels, data, images.distinct)
        table = np.ascontiguousarray(self.features[images.distinct])
        self.classifier, logits = fit(table, labels, fold_of, len(images.classes), self.trained.precision.device)
        width = table.shape[1]
        strength = self.classifier.strength
        log.info("A linear classifier of %d features (%s), strength %.2g. %s", width, self.pool, strength, words)
        return logits

    def similarity_of_edited(self, images: Images) -> float:
        """As `Found.limit`, of the pooling that edited copies are compared by."""
        if self.features is None or self.pool != pool_of(self.trained.model):
            return np.inf
        batch = self.trained.config.DATA.val_batch
        with self.trained.computing(batch):
            return similarity_of_edited(self.trained, images.dataset, np.asarray(self.features).mean(0), batch)

    def logits_of_others(self, images: Images) -> np.ndarray:
        """Of images that were not searched."""
        assert self.classifier is not None
        return self.classifier.logits(self._features(images).of(self.pool)).numpy()


@dataclass
class ByTraining:
    """The recipe, trained once per fold, and judged by its last epoch: the best one was chosen by these very labels."""

    line: ToolLine
    folds: int
    out: Path
    budget: Budget | None = None
    """From the first training of the command on"""
    features: np.ndarray | None = None
    runs: list[Run] = field(default_factory=list)

    def logits(self, images: Images, seed: int) -> np.ndarray:
        if not comes_unsplit(images.data):
            raise UserError(
                f"{source_of(images.data)} comes with its own validation split, and -folds makes its own: name the "
                "folder of the training images alone, or give weights (-pretrained), with which -folds is not needed."
            )
        # Trainings leave out copies, and images that are set aside.
        every = open_dataset(images.data.changed(PART="all"), False, ANY_LABEL, 0, torch.device("cpu"))
        samples = every.single_images()
        searched = {images.name(index) for index in images.distinct.tolist()}
        assert samples is not None
        names = [samples.name(index) for index in range(len(samples))]
        lines = [line_of(name, "", images.data) for name in names if path_in_list(name, images.data) not in searched]
        if images.data.EXCLUDE:
            lines.append(text_of(images.data))
        # Models of other images or labels are not asked: a fold of theirs may have been another.
        about = repr([images.name(index) for index in range(len(images.labels))]) + "\n".join(lines)
        version = hashlib.sha256(about.encode(errors="surrogateescape") + images.labels.tobytes()).hexdigest()[:8]
        out = self.out / f"seed-{seed}-{version}"
        out.mkdir(parents=True, exist_ok=True)
        left_out = out / "left_out.txt"
        write_atomically(left_out, "\n".join([*lines, ""]))
        self._train(seed, out, left_out)

        place = {images.name(index): row for row, index in enumerate(images.distinct.tolist())}
        found = np.full((len(images.distinct), len(images.classes)), np.nan)
        for trained in map(trained_last, self.runs):
            dataset = split_of_run(trained)
            fold = dataset.single_images()
            assert fold is not None
            for logits, _, indices in batches_of(trained, dataset):
                # Named below the folder that the run's own settings have, which may be a link's target.
                rows = [place[path_in_list(fold.name(index), trained.config.DATA)] for index in indices.tolist()]
                found[rows] = logits.double().cpu().numpy()[:, : len(images.classes)]
        assert np.isfinite(found).all()
        return found

    def _train(self, seed: int, out: Path, left_out: Path) -> None:
        """Train the recipe on each fold, without the images in that list."""
        given = {"SEED": seed, "DATA.SPLIT_SEED": seed, "TRAIN.PATIENCE": None, "MODEL.NUM_CLASSES": "auto"}
        given["DATA.EXCLUDE"] = str(left_out)
        self.runs = []
        for number in range(1, self.folds + 1):
            fold = Fold(number, self.folds)
            more = {key: (value, "check_labels.py") for key, value in {**given, "DATA.FOLD": str(fold)}.items()}
            self.runs.append(Run("recipe", seed, load_with(self.line, more), out / f"fold{number}", fold))
        check_runs(self.runs)
        judged = judged_by(None, None, [run.config for run in self.runs])
        budget = self.line.asked.budget_min
        plan = Plan(("recipe",), judged, self.folds, tuple(self.runs), "", False, (), (), budget)
        done = train_all(plan, lambda _: None, self.budget)
        self.budget = done.budget
        if done.failed:
            raise TrainingError(f"A training failed: {next(iter(done.failed.values()))}")
        if done.left_out:
            raise OutOfTimeError("-budget_min: no time was left for all folds; repeat the command to continue.")

    def similarity_of_edited(self, _images: Images) -> float:
        return np.inf

    def logits_of_others(self, images: Images) -> np.ndarray:
        of_models = []
        for trained in map(trained_last, self.runs):
            of_models.append(torch.cat([logits for logits, _, _ in batches_of(trained, images.dataset)]))
        return torch.stack(of_models).mean(0).double().cpu().numpy()[:, : len(images.classes)]


Method = ByFeatures | ByTraining


def load_with(line: ToolLine, given: Mapping[str, tuple[Any, str]]) -> Config:
    """The settings with `given`, which win over those on the command line; without a limit, which would only pause."""
    given = {**given, "MAX_TIME": (None, "check_labels.py")}
    words = {key: text for key, text in line.run.words.items() if key not in given}
    return replace(line, run=replace(line.run, words=words)).load(given).config


def trained_last(run: Run) -> Trained:
    """The weights after the last epoch; the EMA, if the run has one."""
    root = run.folder / "checkpoints"
    which = AVERAGE if run.config.TRAIN.MODEL_EMA else PLAIN
    return load_trained(root / read_index(root)["last"], which.name)


@dataclass
class Found:
    suspects: list[Suspect]
    """The most probable first; where too few look wrong, also others, see `Wrong.listed`"""
    verdict: Wrong
    accuracy: str
    """Of the models on images that they did not see, in words"""
    not_judged: list[str]
    """Classes with too few images, or with all of them in one group"""
    not_learnt: list[str]
    """Classes that the models do not recognise, and how many of their images they do"""
    near: np.ndarray = field(repr=False)
    """Features of all images, in which those are near that look alike"""
    limit: float = np.inf
    """How similar they are to their edited copies, if known: as similar ones may show the same"""

    def words(self) -> list[str]:
        lines = [self.accuracy]
        if self.not_judged:
            names = ", ".join(self.not_judged)
            lines.append(f"Not judged, since they have fewer images than folds, or all in one group: {names}.")
        if self.not_learnt:
            lines.append(
                f"The models hardly recognise {', '.join(self.not_learnt)}: suspects of these classes mean nothing, as "
                "right labels look wrong there, too."
            )
        certain = sum(one.certain for one in self.suspects)
        if certain:
            have = "has" if certain == 1 else "have"
            likelier = "a copy, or nearly one, with another, likelier label; none is known to be right"
            lines.append(f"{counted(certain, 'image')} {have} {likelier}.")
        verdict = self.verdict
        if verdict.changed and not verdict.clear:
            changed = f"Of {verdict.changed:,} labels that were changed on purpose, {100 * CHANGED:.0f} % at a time"
            lines.append(f"{changed}, {verdict.changed_found:,} look wrong to this search.")
        return [*lines, self._verdict_in_words()]

    def _verdict_in_words(self) -> str:
        verdict = self.verdict
        look = "looks" if verdict.number == 1 else "look"
        count = f"{counted(verdict.number, 'label')} {look} wrong"
        chance = f"up to {verdict.if_right} would"
        if verdict.surer:  # of the nearest images
            chance = f"{verdict.agreed} of them by their nearest images, too, where {chance}"
        if verdict.clear:
            return f"{count}; {chance} if all were right. How many of them are wrong, and not hard, is unknown."
        if not verdict.number:
            return (
                "Nothing found: no label looks wrong, which does not prove that all are right. Images of none of the "
                "classes are not found this way."
            )
        few = "Too few to tell from chance"
        hard = ""
        if verdict.beyond_chance:
            few = "Too few by both"
            hard = ", as hard images look so, too"
        return (
            f"{few}: {count}; {chance} if all were right, about {verdict.expected:.1f} on average. Some of them "
            f"may be wrong, and all may be right{hard}."
        )


def find(images: Images, method: Method, seed: int) -> Found:
    distinct = method.logits(images, seed)
    logits = distinct[images.copy_of]
    labels = images.labels[images.distinct]
    accuracy = _accuracy(distinct, labels, method.folds)
    counts = images_of_classes(labels, len(images.classes))
    few = (counts > 0) & (counts < method.folds)
    if images.samples.groups:  # a fold has the whole group, and its model no image of the class
        group_of = np.array(images.samples.groups)[images.distinct]
        for label in np.flatnonzero(counts):
            has = labels[:, label] > 0 if labels.ndim == 2 else labels == label
            few[label] |= len(np.unique(group_of[has])) == 1
    few = np.flatnonzero(few)
    suspects, verdict = suspects_of(images, logits, seed, few, features=method.features)
    not_learnt = []
    if labels.ndim == 1:
        hits = np.bincount(labels[distinct.argmax(1) == labels], minlength=len(counts))
        for label in np.flatnonzero((hits < LEARNT * counts) & ~np.isin(np.arange(len(counts)), few)):
            not_learnt.append(f"{images.classes[label]} ({hits[label]} of {counted(int(counts[label]), 'image')})")
    return Found(
        suspects,
        verdict,
        accuracy,
        not_judged=[images.classes[label] for label in few],
        not_learnt=not_learnt,
        near=logits if method.features is None else np.asarray(method.features),
        limit=method.similarity_of_edited(images),
    )


def judge(images: Images, method: Method, searched: Found, seed: int) -> Found:
    """Judge labels of the validation split, by the models of a search of the training split, and their calibration."""
    logits = method.logits_of_others(images)
    suspects, verdict = suspects_of(images, logits, seed, np.empty(0, np.int64), searched.verdict.calibrations)
    about = "Labels of the validation split, by models of the training split."
    return Found(suspects, verdict, about, not_judged=[], not_learnt=searched.not_learnt, near=logits)


def suspects_of(
    images: Images,
    logits: np.ndarray,
    seed: int,
    few: np.ndarray,
    known: Sequence[Calibration | None] = (),
    features: np.ndarray | None = None,
) -> tuple[list[Suspect], Wrong]:
    """The suspects, and the verdict that they are of. `few`: labels that are not judged. `known`: of `find_wrong`.
    `features`: of all images, for a second view of images with one label."""
    known = known or [None] * len(images.classes)
    if images.labels.ndim == 2:
        return _suspects_of_each_class(images, logits, seed, few, known)
    judged = np.flatnonzero(~np.isin(images.labels, few))
    labels = images.labels[judged]
    copy_of = images.copy_of[judged]
    near = None
    if features is not None:
        own = [copy_of]
        if images.samples.groups:
            own.append(np.unique(np.array(images.samples.groups)[judged], return_inverse=True)[1])
        near = nearest(np.asarray(features)[judged], own)
    found = find_wrong(logits[judged], labels, seed, known[0], near)
    certain = dict[int, int]()  # row -> the likeliest label of its copies, if it is another
    for one in images.contradicted:
        copies = np.flatnonzero(copy_of == one)
        if len(copies):
            given = labels[copies]
            best = given[found.right[copies[0], given].argmax()]
            certain |= {int(row): int(best) for row in copies if labels[row] != best}
    of_labels = found.right[np.arange(len(judged)), labels]  # which orders equal probabilities
    likely = np.lexsort((of_labels, -found.probability))[: found.listed].tolist()
    suspects = []
    for row in dict.fromkeys([*certain, *likely]):
        index = int(judged[row])
        given = int(labels[row])
        proposed = certain.get(row, int(found.proposed[row]))
        with_bytes = images.labels[images.bytes_of == images.bytes_of[index]]
        suspects.append(
            Suspect(
                index,
                given=images.classes[given],
                proposed=images.classes[proposed],
                wrong=1.0 if row in certain else float(found.probability[row]),
                of_given=float(found.right[row, given]),
                of_proposed=float(found.right[row, proposed]),
                certain=row in certain,
                equal=row in certain and bool((with_bytes != given).any()),
            )
        )
    return suspects, found


def _suspects_of_each_class(
    images: Images, logits: np.ndarray, seed: int, few: np.ndarray, known: Sequence[Calibration | None]
) -> tuple[list[Suspect], Wrong]:
    """Judge each class by itself: whether an image has it."""
    each = []
    for column, has, before in zip(logits.T, images.labels.T.astype(np.int64), known, strict=True):
        each.append(find_wrong(np.stack([0 * column, column], 1), has, seed, before))
    judged = [one for label, one in enumerate(each) if label not in few]
    found = Wrong(
        probability=np.stack([one.probability for one in each], 1),
        right=np.stack([one.right[:, 1] for one in each], 1),
        proposed=1 - images.labels,
        number=sum(one.number for one in judged),
        agreed=sum(one.agreed for one in judged),
        if_right=sum(one.if_right for one in judged),
        expected=sum(one.expected for one in judged),
        calibrations=[one.calibrations[0] for one in each],
        changed=sum(one.changed for one in judged),
        changed_found=sum(one.changed_found for one in judged),
    )
    found.probability[:, few] = -1
    of_labels = np.where(images.labels, found.right, 1 - found.right)
    flat = np.lexsort((of_labels.ravel(), -found.probability.ravel()))[: found.listed]
    of_image: dict[int, list[int]] = {}  # all labels of one image together
    for index, label in zip(*np.unravel_index(flat, found.probability.shape), strict=True):
        doubted = of_image.setdefault(int(index), [])
        if not doubted or found.probability[index, label] >= WRONG:
            doubted.append(int(label))
    suspects = []
    for index, labels in of_image.items():
        given = images.labels[index]
        proposed = given.copy()
        proposed[labels] = 1 - given[labels]
        of_given = float(of_labels[index, labels[0]])
        suspects.append(
            Suspect(
                index,
                given=images.label_words(given),
                proposed=images.label_words(proposed),
                wrong=float(found.probability[index, labels[0]]),
                of_given=of_given,
                of_proposed=1 - of_given,
            )
        )
    return suspects, found


def _accuracy(logits: np.ndarray, labels: np.ndarray, folds: int) -> str:
    """The accuracy in words. UserError if it is that of guessing: then no probability says anything."""
    how = f"Models of {folds} folds, on the images that each did not see"
    if labels.ndim == 2:
        reached = scores_of(1 / (1 + np.exp(-logits)), labels > 0).map * 100
        guessing = 100 * float(labels.mean())
        least = reached / 1.1
        words = f"mAP {reached:.1f} %; ordering at random: {guessing:.1f} %"
    else:
        reached = 100 * float((logits.argmax(1) == labels).mean())
        guessing = 100 * float(np.bincount(labels).max()) / len(labels)
        least = wilson(reached, len(labels)).low
        words = f"top-1 {reached:.1f} % of the labels as given; always guessing the largest class: {guessing:.1f} %"
    if least <= guessing:
        raise UserError(
            f"{how}: {words}. Their probabilities say too little of the labels: train longer, give weights "
            "(-pretrained) that know such images, or look whether the labels belong to the images."
        )
    return f"{how}: {words}."
