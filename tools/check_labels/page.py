"""What a search writes: two lists, and report.html, in which each suspect is shown and decided about."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datasets import source_of
from datasets.base import TITLES
from datasets.exclude import text_of
from engine.evaluation.alike import directions
from engine.trained.model import picture_of
from tools.check_labels.noise import WRONG
from tools.check_labels.search import Found, Images, Suspect, rows_of
from tools.common.output_file import writing
from tools.common.report_page.evaluations import data_uri, pictured
from tools.common.report_page.page import write_template
from tools.common.turns import progress_bar
from utils.log import log
from utils.text import counted
from vitamp.files import write_atomically

MOST_SHOWN = 200
"""Suspects with pictures"""
NEIGHBOURS = 2
"""Images of each of the two classes"""
SMALL = 48
"""Pixels of their pictures"""
MOST_PAIRS = 20


def write(images: Images, found: Found, table: Path) -> None:
    """Write `table`, of the suspects, and the list and the page beside it; log what was found."""
    listed = table.with_name("exclude.txt")
    page = table.with_name("report.html")
    table.parent.mkdir(parents=True, exist_ok=True)
    verdict = found.verdict
    validation = images.data.PART == "val"
    # In validation, suspects are mostly mistakes of the model: without them, metrics would flatter it.
    drops = verdict.clear and not validation
    before = text_of(images.data).rstrip("\n")
    decision = "drop" if drops else "keep"
    dropped = [one for one in found.suspects if one.equal or drops]
    excluded = [before] if before else []
    excluded += map(images.line, dropped)
    rows = rows_of(images, found.suspects, decision)
    for file, content in ((table, rows), (listed, "".join(f"{line}\n" for line in excluded))):
        with writing(file, "-output"):
            write_atomically(file, content)

    _write_page(images, found, page, decision=decision, before=before)
    log.info("%s\n", "\n".join(found.words()))
    for (given, proposed), count in confused(found).most_common(5):
        log.info("  %s looks like %s: %s", given or "no class", proposed or "no class", counted(count, "image"))
    log.info("Look at them: %s" if verdict.clear else "Look at the most doubtful images, to decide: %s", page)
    if validation:
        log.info("Only copies are dropped: the rest may be mistakes of the model, which looks too good without them.")
        log.info("DATA.EXCLUDE=%s leaves out what you drop; DATA.RELABEL changes training alone.", listed)
    elif dropped:
        log.info("Edit its decisions (keep, drop, relabel), then train with DATA.RELABEL=%s.", table)
        log.info("DATA.EXCLUDE=%s leaves out those to drop, in validation, too.", listed)
    else:
        log.info("%s keeps their labels: edit its decisions, then train with DATA.RELABEL=%s.", table, table)


def _write_page(images: Images, found: Found, page: Path, decision: str, before: str) -> None:
    """Write report.html. `decision`: about suspects of which no copy has another label. `before`: lines of the list
    in use, which the new one may have replaced."""
    verdict = found.verdict
    wrong = [one for one in found.suspects if one.wrong >= WRONG]
    words = np.array([images.label_words(label) for label in images.labels])
    decisions = {}
    for one in found.suspects:
        row = rows_of(images, [one], "").partition("\n")[2].rpartition(",")[0] + ","
        decided = "drop" if one.equal else decision
        decisions[images.name(one.image)] = row, decided, images.line(one)
    shown = []
    for one, about in _pictured(images, found, words, [one.image for one in wrong]):
        shown.append({**about, "row": decisions.pop(images.name(one.image), None)})
    tiles = [(f"{len(images.labels):,}", "images searched"), (f"{verdict.number:,}", "labels look wrong")]
    if verdict.surer:
        tiles.append((f"{verdict.agreed:,}", "of them by the nearest images, too"))
    tiles.append((f"{verdict.if_right:,}", "at most would, if all were right"))
    pairs = confused(found)
    counts = []
    for (given, proposed), count in pairs.most_common(MOST_PAIRS):
        counts.append((given, proposed, count, 100 * count / (words == given).sum()))
    write_template(
        "labels.html",
        page,
        "-output",
        title=f"Labels of {source_of(images.data)}, {TITLES[images.data.PART]}",
        words=found.words(),
        tiles=tiles,
        pairs=counts,
        more_pairs=max(0, len(pairs) - MOST_PAIRS),
        shown=shown,
        left_out=len(found.suspects) - len(shown),
        unseen=decisions.values(),
        heading=rows_of(images, [], "").rstrip("\n"),
        before=before,
        clear=verdict.clear,
        validation=images.data.PART == "val",
    )


def confused(found: Found) -> Counter[tuple[str, str]]:
    """How many labels look wrong, by given and proposed class."""
    return Counter((one.given, one.proposed) for one in found.suspects if one.wrong >= WRONG)


def _pictured(
    images: Images, found: Found, words: np.ndarray, wrong: list[int]
) -> Iterator[tuple[Suspect, dict[str, Any]]]:
    """The first suspects, with pictures of them and of the most similar images of their two classes.

    `words`: the labels of all images. `wrong`: images whose labels look wrong, which show no class.
    """
    features = directions(found.near, found.near.mean(0))
    suspected = np.zeros(len(words), bool)
    suspected[wrong] = True
    for one in progress_bar(found.suspects[:MOST_SHOWN], "pictures"):
        likeness = features @ features[one.image]
        same, differ = images.same_thing(one.image, likeness, found.limit)
        # A copy of the image says nothing of its label; those with other labels are shown.
        hidden = suspected | (images.copy_of == images.copy_of[one.image])
        if differ:
            hidden &= ~same
        likeness[hidden] = -np.inf
        likeness[one.image] = -np.inf
        near = {}
        for name in (one.given, one.proposed):
            members = np.flatnonzero((words == name) & np.isfinite(likeness))
            nearest = members[np.argsort(-likeness[members], kind="stable")[:NEIGHBOURS]]
            near[name] = [data_uri(picture_of(images.dataset, index), SMALL) for index in nearest.tolist()]
        about = {**one._asdict(), "name": images.name(one.image), "near": near, "differ": differ}
        yield one, {**about, **pictured(images.dataset, one.image, images.data)}
