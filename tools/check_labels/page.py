"""Write the results of a search: two lists, and report.html, where each suspect is shown and decided about."""

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
from tools.check_labels.search import SearchResult, table_of_suspects
from tools.check_labels.searched_images import Images, Suspect
from tools.check_labels.wrong_labels import WRONG
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
"""Similar images that are shown beside a suspect, of each of the two classes"""
SMALL = 48
"""Pixels of their pictures"""
MOST_PAIRS = 20
"""Pairs of a given and a proposed class in the table of the page"""


def write_results(images: Images, result: SearchResult, table: Path) -> None:
    """Write suspects.csv to `table`, exclude.txt and report.html beside it, and log the result and how to go on.

    All suspects are dropped in training, if more labels look wrong than chance explains (`verdict.clear`). Otherwise,
    the only ones dropped are copies of the same bytes with different labels: one label is wrong, unknown which.
    """
    exclude_list = table.with_name("exclude.txt")
    page = table.with_name("report.html")
    table.parent.mkdir(parents=True, exist_ok=True)
    verdict = result.verdict
    is_validation = images.data.PART == "val"
    # In validation, suspects are mostly mistakes of the model: without them, metrics would flatter it.
    drops_all = verdict.clear and not is_validation
    decision = "drop" if drops_all else "keep"
    dropped = [suspect for suspect in result.suspects if suspect.same_bytes_disagree or drops_all]

    # Write the files. exclude.txt begins with the lines of the list in use (DATA.EXCLUDE).
    lines_in_use = text_of(images.data).rstrip("\n")
    exclude_lines = [lines_in_use] if lines_in_use else []
    exclude_lines += map(images.exclude_line, dropped)
    rows = table_of_suspects(images, result.suspects, decision)
    for file, content in ((table, rows), (exclude_list, "".join(f"{line}\n" for line in exclude_lines))):
        with writing(file, "-output"):
            write_atomically(file, content)
    _write_page(images, result, page, decision=decision, lines_in_use=lines_in_use)

    # Log the result, and what to do next: validation, training with images to drop, training without any.
    log.info("%s\n", "\n".join(result.words()))
    for (given, proposed), count in confused(result).most_common(5):
        log.info("  %s looks like %s: %s", given or "no class", proposed or "no class", counted(count, "image"))
    log.info("Look at them: %s" if verdict.clear else "Look at the most doubtful images, to decide: %s", page)
    if is_validation:
        log.info("Only copies are dropped: the rest may be mistakes of the model, which looks too good without them.")
        log.info("DATA.EXCLUDE=%s leaves out what you drop; DATA.RELABEL changes training alone.", exclude_list)
    elif dropped:
        log.info("Edit its decisions (keep, drop, relabel), then train with DATA.RELABEL=%s.", table)
        log.info("DATA.EXCLUDE=%s leaves out those to drop, in validation, too.", exclude_list)
    else:
        log.info("%s keeps their labels: edit its decisions, then train with DATA.RELABEL=%s.", table, table)


def _write_page(images: Images, result: SearchResult, page: Path, decision: str, lines_in_use: str) -> None:
    """Write report.html.

    `decision`: about suspects of which no copy has another label. `lines_in_use`: the lines of the list in use
    (DATA.EXCLUDE), which the new list has, too.
    """
    verdict = result.verdict
    label_names = np.array([images.label_words(label) for label in images.labels])

    # Where people change a decision, the page's script writes suspects.csv and exclude.txt anew. It needs, for each
    # suspect: its row of the table up to the decision, the decision, and its line of the list.
    decisions = {}
    for suspect in result.suspects:
        _heading, _, row = table_of_suspects(images, [suspect], decision="").partition("\n")
        row_before_decision, comma, _ = row.rpartition(",")
        decided = "drop" if suspect.same_bytes_disagree else decision
        exclude_line = images.exclude_line(suspect)
        decisions[images.name(suspect.image)] = row_before_decision + comma, decided, exclude_line
    shown = []
    for suspect, values in _with_pictures(images, result, label_names):
        shown.append({**values, "row": decisions.pop(images.name(suspect.image), None)})

    tiles = [(f"{len(images.labels):,}", "images searched"), (f"{verdict.look_wrong:,}", "labels look wrong")]
    has_two_views = bool(verdict.surer)
    if has_two_views:
        tiles.append((f"{verdict.agreed:,}", "of them by the nearest images, too"))
    tiles.append((f"{verdict.most_if_right:,}", "at most would, if all were right"))
    pairs = confused(result)
    pair_rows = []
    for (given, proposed), count in pairs.most_common(MOST_PAIRS):
        percent = 100 * count / (label_names == given).sum()
        pair_rows.append((given, proposed, count, percent))
    write_template(
        "labels.html",
        page,
        "-output",
        title=f"Labels of {source_of(images.data)}, {TITLES[images.data.PART]}",
        words=result.words(),
        tiles=tiles,
        pairs=pair_rows,
        more_pairs=max(0, len(pairs) - MOST_PAIRS),
        shown=shown,
        left_out=len(result.suspects) - len(shown),
        unseen=decisions.values(),  # what remains: suspects without pictures
        heading=table_of_suspects(images, [], "").rstrip("\n"),
        before=lines_in_use,
        clear=verdict.clear,
        validation=images.data.PART == "val",
    )


def confused(result: SearchResult) -> Counter[tuple[str, str]]:
    """Count the labels that look wrong by given and proposed class."""
    suspects = result.suspects
    return Counter((suspect.given, suspect.proposed) for suspect in suspects if suspect.wrong_probability >= WRONG)


def _with_pictures(
    images: Images, result: SearchResult, label_names: np.ndarray
) -> Iterator[tuple[Suspect, dict[str, Any]]]:
    """Yield the first suspects, each with what the page shows of it: a picture, and those of similar images.

    These are the most similar images of the given and of the proposed class. Images whose labels look wrong are left
    out, as they do not show what the class looks like. `label_names`: of all images.
    """
    features = directions(result.features, result.features.mean(0))
    looks_wrong = np.zeros(len(label_names), bool)
    looks_wrong[[suspect.image for suspect in result.suspects if suspect.wrong_probability >= WRONG]] = True
    for suspect in progress_bar(result.suspects[:MOST_SHOWN], "pictures"):
        similarities = features @ features[suspect.image]
        of_same_thing, label_remark = images.images_of_same_thing(suspect.image, similarities, result.limit)
        # A copy of the image says nothing of its label, so it is hidden. But if images of the same thing have several
        # labels (`label_remark`), all of them are shown, copies and suspects too.
        is_copy = images.distinct_row == images.distinct_row[suspect.image]
        hidden = looks_wrong | is_copy
        if label_remark:
            hidden &= ~of_same_thing
        similarities[hidden] = -np.inf
        similarities[suspect.image] = -np.inf
        pictures = {}
        for name in (suspect.given, suspect.proposed):
            members = np.flatnonzero((label_names == name) & np.isfinite(similarities))
            order = np.argsort(-similarities[members], kind="stable")
            most_similar = members[order[:NEIGHBOURS]].tolist()
            pictures[name] = [data_uri(picture_of(images.dataset, image), SMALL) for image in most_similar]
        values = {**suspect._asdict(), "name": images.name(suspect.image), "near": pictures, "differ": label_remark}
        yield suspect, {**values, **pictured(images.dataset, suspect.image, images.data)}
