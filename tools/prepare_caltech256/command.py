"""Make a table of Caltech-256 for `-dataset csv`: image_path, target, class_name.

    python scripts/prepare_caltech256.py -data_path /data              # writes /data/caltech256.csv
    python scripts/prepare_caltech256.py -data_path /data -download    # fetches the images first, 1,183 MB

-data_path is the folder that caltech256/256_ObjectCategories lies in, or the folder caltech256 itself, whatever it is
called. The folder 257.clutter is no class and is left out. Targets are whole numbers from 0, in the order of the
folders; the lines are in the order of class and file, and training draws its own. Paths are relative to the table.

Training splits the table: DATA.VAL_FRACTION=0.1 DATA.SPLIT_SEED=42, as configs/caltech256_resnet50.yaml has it, keep a
tenth of every class for validation, the same images on every machine.

A tree that is not whole (a class missing, fewer images than were published, an empty file) is refused, and no table is
written; -partial takes it as it is. Exit codes: 0 done, 2 anything wrong with the command, the data, or the disk.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tools.common.command_line import run_tool, tool_parser
from utils.config.data import DataConfig
from utils.errors import EXIT_DONE, UserError
from utils.log import log
from utils.output_file import check_output_file, writing
from utils.run_folder import replace_text

if TYPE_CHECKING:
    from datasets.sources.caltech import Tree

CLASSES = 256
VAL_FRACTION, SPLIT_SEED = 0.1, 42


def main(argv: list[str]) -> int:
    return run_tool(_prepare, argv)


def _prepare(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    out: Path = asked.out or asked.data_path / "caltech256.csv"
    if asked.out is not None or asked.data_path.is_dir():  # which a download makes otherwise
        out = check_output_file(out, "-out")

    # Only now, with the command known to be right: importing torch takes seconds.
    from datasets.sources.caltech import CALTECH256
    from datasets.sources.split import split

    data = DataConfig(DATASET="caltech256", DATA_PATH=str(asked.data_path), DOWNLOAD=asked.download)
    try:
        found = CALTECH256.published.prepare(data)
        tree = CALTECH256.tree(found, data, num_classes=CLASSES)
    except UserError as error:
        raise UserError(f"{error}\nHere DATA.DOWNLOAD=true is -download.") from None
    missing = _missing(tree, CALTECH256.images)
    if missing and not asked.partial:
        raise UserError(
            f"{tree.folder} is not whole: {'; '.join(missing)}. No table was written. Unpack the archive anew "
            f"(or remove {found} and give -download), or take what there is by -partial."
        )
    train, validation = split(tree.labels, VAL_FRACTION, SPLIT_SEED)
    _write(tree, out)
    if missing:
        log.warning("Not the whole data set (-partial): %s.", "; ".join(missing))
    log.info("%s: %s images of %d classes, clutter left out.", out, f"{len(tree.paths):,}", len(tree.classes))
    log.info(
        "DATA.VAL_FRACTION=%s DATA.SPLIT_SEED=%d: %s images for training, %s for validation.",
        VAL_FRACTION,
        SPLIT_SEED,
        f"{len(train):,}",
        f"{len(validation):,}",
    )
    return EXIT_DONE


def _missing(tree: Tree, published: int) -> list[str]:
    """What a whole tree would have; nothing lists its images, so their number must do."""
    found = []
    if len(tree.classes) < CLASSES:
        found.append(f"{len(tree.classes)} folders of classes, {CLASSES} were published")
    if len(tree.paths) < published:
        found.append(f"{len(tree.paths):,} images, {published:,} were published")
    without = sorted(set(range(len(tree.classes))).difference(tree.labels.tolist()))
    if without:
        found.append(f"{len(without)} folders without an image, first {tree.classes[without[0]]}")
    empty = [path for path in tree.paths if not (tree.folder / path).stat().st_size]
    if empty:
        found.append(f"{len(empty)} empty files, first {empty[0]}")
    return found


def _write(tree: Tree, out: Path) -> None:
    above = os.path.relpath(tree.folder, out.absolute().parent)
    if above.split(os.sep)[0] == os.pardir:
        raise UserError(
            f"-out {out}: paths in a table are relative to it and must not lead out of its folder; put it into "
            f"{tree.folder.parent} or a folder above."
        )
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("image_path", "target", "class_name"))
    for path, label in zip(tree.paths, tree.labels.tolist(), strict=True):
        table.writerow((Path(above, path).as_posix(), label, tree.classes[label]))
    with writing(out, "-out"):
        replace_text(out, text.getvalue())


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser("prepare_caltech256.py", __doc__)
    parser.add_argument("-data_path", "--data_path", type=Path, required=True, metavar="DIR", help="where it lies")
    parser.add_argument(
        "-out", "--out", type=Path, metavar="FILE.csv", help="the table (default DIR/caltech256.csv); replaced if there"
    )
    parser.add_argument("-download", "--download", action="store_true", help="fetch the images where they are missing")
    parser.add_argument("-partial", "--partial", action="store_true", help="take a tree that is not whole as it is")
    return parser
