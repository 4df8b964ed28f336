"""The images of auto.py in tables: one that names all three splits, and one in which the final run has more of them."""

import csv
import io
import shlex
from collections import Counter
from dataclasses import asdict
from itertools import count
from pathlib import Path

from datasets import auto_workers, comes_unsplit, source_of
from datasets.base import Samples
from datasets.examine.findings import NEAR_OVERLAP, OVERLAP, Split
from datasets.labels import label_words, names_of_classes
from engine.report.trust import UNWARNED, doubts
from tools.check_data.command import open_splits
from tools.check_data.findings import find_problems
from tools.check_data.new_split import TITLES, write_split, write_table
from tools.check_data.scan import scan_split
from utils.config import Config
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.program import tool
from utils.seeding import generator_of
from vitamp.files import write_atomically

FRACTIONS = (0.7, 0.15, 0.15)
"""Fractions of the images for training, validation and test, where the data has no test split"""
MOST_PROBED = 2500
"""Training images beyond which a probe has a random part of them"""
KNOWN_THINGS = (
    "If they do, the answer is about new pictures of known things; for new things, give DATA.GROUP and another -output "
    "(docs/splits.md)"
)
"""What to do if names say that images of several splits show one thing"""
MOST_KEPT = 10
"""Most groups of images that the final run validates on, which decide nothing"""


def divide(config: Config, table: Path) -> list[str]:
    """Write a table that names the split of each image, and return what was done, and doubts about the data.

    The test split of the data stays as it is, and is not looked at. Without one, all images are divided anew.
    """
    data = config.DATA
    samples_of, test_is_unread = open_splits(config)
    test = samples_of.pop("test", None)
    if test_is_unread:
        raise UserError(f"{source_of(data)}: its test split cannot be read; see the warning above.")
    if not samples_of or any(samples.stored != "files" for samples in samples_of.values()):
        raise UserError(f"{source_of(data)}: auto.py needs images that are files of their own, such as class folders.")
    workers = auto_workers(given=data.NUM_WORKERS)
    splits = [scan_split(title, samples, data, workers) for title, samples in samples_of.items()]
    if test is None:
        write_split(config.changed(MODEL={"PRETRAINED": None}), splits, FRACTIONS, table)
        origin = "divided anew"
        if not comes_unsplit(data):
            origin += ", your validation split among them"
        origin += "; copies stay together; DATA.GROUP keeps images of one thing together, too"
    else:
        _write_given_splits(splits, test, data, table)
        origin = "the data's own test split, which is not read before the end"

    sizes = Counter(row["split"] for row in read_table(table))
    numbers = f"{sizes['train']:,} training, {sizes['val']:,} validation and {sizes['test']:,} test images"
    lines = [f"Data: {source_of(data)}, {config.MODEL.NUM_CLASSES} classes: {numbers} ({origin}): {table}"]
    findings = find_problems(splits, config.MODEL.NUM_CLASSES, data)
    # Defects and doubts about splits do not count where these are made anew.
    defects = [
        f"{kind.heading}: {len(found)}"
        for kind, found in findings.of_kinds(defects=True).items()
        if found and (test is not None or kind not in (OVERLAP, NEAR_OVERLAP))
    ]
    if defects:
        command = f"{tool('check_data')} {shlex.quote(f'{data.DATA_PATH}')}"
        lines.append(f"  defects, which `{command}` lists: {'; '.join(defects)}")
    for doubt in doubts(asdict(findings)):
        if doubt.kind == "names" and test is None:  # its numbers are of another split than this one
            names = f"Judging by their names, several images may show one thing (DATA.GROUP={findings.series_group})"
            lines.append(f"  {names}. {KNOWN_THINGS}.")
        elif doubt.kind in UNWARNED:
            lines.append(f"  {doubt.words()}")
    return lines


def _write_given_splits(splits: list[Split], test: Samples, data: DataConfig, table: Path) -> None:
    """Write a table of the splits that the data has. Without DATA.GROUP, each image is a group of its own.

    Images that a scan could not read are left out of training and validation.
    """
    part_of = {title: part for part, title in TITLES.items()}
    classes = names_of_classes(splits[0].samples.classes, splits[0].samples.labels)
    rows = []
    own_group = count()
    for split in [*splits, Split("test", test)]:
        samples = split.samples
        for index, label in enumerate(samples.labels):
            if split.scans and split.scans[index].problem:
                continue
            group = samples.groups[index] if samples.groups else next(own_group)
            rows.append((samples.name(index), label_words(label, classes), group, part_of[split.title]))
    write_table(table, data, rows, classes)


def read_table(table: Path) -> list[dict[str, str]]:
    """Return the rows of a table that this tool has written."""
    with open(table, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_final(table: Path, final: Path) -> None:
    """Write the table of the final run: validation images become training images, but for those of a few groups.

    A run needs some validation images. Those that are kept come from different classes, and decide nothing.
    """
    rows = read_table(table)
    kept = dict[str, str]()  # class -> group of its first validation image
    for row in rows:
        if row["split"] == "val" and len(kept) < MOST_KEPT:
            kept.setdefault(row["target"], row["group"])
    for row in rows:
        if row["split"] == "val" and row["group"] not in kept.values():
            row["split"] = "train"
    _write_rows(final, rows)


def write_probed(table: Path, probed: Path, most: int = MOST_PROBED) -> int:
    """Write the table of a probe, which has at most about `most` training images, and return their number.

    They are a random part of the training images, in whole groups, with one group of each class at least. The other
    splits stay as they are.
    """
    rows = read_table(table)
    training = [row for row in rows if row["split"] == "train"]
    size_of_group = Counter(row["group"] for row in training)
    groups = list(size_of_group)
    order = generator_of(0, "probed").permutation(len(groups)).tolist()
    of_each_class = {row["target"]: row["group"] for row in training}
    needed = set(of_each_class.values())
    chosen = set[str]()
    images = 0
    for group in dict.fromkeys([*of_each_class.values(), *(groups[place] for place in order)]):
        if images < most or group in needed:
            chosen.add(group)
            images += size_of_group[group]
    _write_rows(probed, [row for row in rows if row["split"] != "train" or row["group"] in chosen])
    return images


def _write_rows(table: Path, rows: list[dict[str, str]]) -> None:
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(table, lines.getvalue())
