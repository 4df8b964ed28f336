"""The search for wrong labels: the suspects, and what to make of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from datasets.labels import images_of_classes
from engine.task.several import scores_of
from tools.check_labels.methods import Method
from tools.check_labels.searched_images import Images, Suspect
from tools.check_labels.wrong_labels import CHANGED, LEARNT, WRONG, Calibration, Verdict, find_wrong, nearest
from utils.errors import UserError
from utils.statistics.groups import Groups, effective_images
from utils.statistics.proportions import wilson
from utils.text import counted

BEYOND = (
    "Beyond what this search can find: a class of which the models learnt a third or more of the images under one "
    "other label."
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

    likeliest_label_of = _copies_that_disagree(images, distinct_row, labels, verdict)

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


def _copies_that_disagree(
    images: Images, distinct_row: np.ndarray, labels: np.ndarray, verdict: Verdict
) -> dict[int, int]:
    """Return the rows of copies that do not have the likeliest label of all copies of their image, with that label."""
    likeliest_label_of = dict[int, int]()
    for contradicted in images.contradicted_rows:
        copies = np.flatnonzero(distinct_row == contradicted)
        if len(copies):
            given_labels = labels[copies]
            likeliest = given_labels[verdict.class_probabilities[copies[0], given_labels].argmax()]
            for row in copies[given_labels != likeliest].tolist():
                likeliest_label_of[row] = int(likeliest)
    return likeliest_label_of


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
