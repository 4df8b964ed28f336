"""Check a data set: read every image once, as training does, and report defects.

    python scripts/check_data.py -dataset imagefolder -data_path /data/flowers -num_classes 102
    python scripts/check_data.py -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet -fix exclude.txt

Defects: unreadable and damaged images, labels out of range, classes without training images, duplicates (equal bytes)
in training, images that are in two splits, or nearly so (encoded again, resized), and duplicates with different labels,
also near ones. The test split is checked too, if there is one. Notes: other duplicates within a split, also near ones,
images of one colour, tiny classes, classes without validation images, images in another format or much larger than
nearly all, images that must be converted or turned, and images smaller than IMAGE_SIZE.
Exit codes: 0 no defects, 1 defects or an unfinished check, 2 anything wrong with the command or the data set.

Takes the flags and settings of main_single_gpu.py; -num_workers is the number of checking processes. The processes of
torchrun, srun or mpirun share the work.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tools.common.command_line import OVERWRITE, Tool, tool
from tools.common.output_file import results_folder, writing
from tools.common.ranks import ranks_of_launcher
from utils.config.kinds import AUTO
from utils.distributed.world import World, on_every_rank
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.flags import Flag
from utils.log import log
from utils.text import counted, redacted_values
from vitamp.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from datasets.base import Samples
    from datasets.examine.findings import Findings, Split
    from utils.config import Config
    from utils.config.data import DataConfig

OWN = (
    Flag(
        "fix",
        "write a list for DATA.EXCLUDE: unreadable and damaged images, and training images that are duplicates, have "
        "conflicting labels, or are in another split too",
        "FILE",
    ),
    Flag("near", "-fix: list training images that are nearly the same as one of another split too; look at them first"),
    Flag(
        "alike",
        "with weights (-cfg of a recipe that has them, or -model NAME -pretrained FILE): write a page of images that "
        "look like one of another split, such as mirrored or turned copies, and a table to split by looks",
        "DIR",
        kind=Path,
    ),
    Flag("json", "write all findings as JSON", "FILE"),
    OVERWRITE,
)
TOOL = Tool("check_data.py", __doc__, OWN)


class Asked(NamedTuple):
    """Results that the command asks for, and whether the list of -fix has nearly equal images."""

    fix: Path | None
    json: Path | None
    alike: Path | None
    near: bool


@tool
def main(argv: list[str]) -> int:
    line = TOOL.read(argv)
    fix = line.file("fix")
    json_file = line.file("json")
    alike = line.asked.alike
    if fix is not None and fix == json_file:
        raise UserError(f"-fix and -json both name {fix}; give each its own file.")
    if alike is not None:
        alike = results_folder(alike)
    with ranks_of_launcher(argv, line.run.ranks) as world:
        config = on_every_rank(world, line.load).config
        if alike is not None and not config.MODEL.PRETRAINED:
            raise UserError("-alike compares images by a model's features: give -model NAME -pretrained FILE.")
        if alike is not None and config.DATA.RELABEL:
            raise UserError("DATA.RELABEL: -alike compares all images; leave the table out.")
        return _check(config, Asked(fix, json_file, alike, line.asked.near), world)


def _check(config: Config, asked: Asked, world: World) -> int:
    """Scan the images, and report, which rank 0 does; returns the exit code."""
    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from datasets import auto_workers
    from datasets.examine.findings import UNLIKE
    from tools.check_data.findings import find_problems
    from tools.check_data.report import as_json
    from tools.check_data.scan import scan_split

    data = config.DATA
    workers = auto_workers(world, data.NUM_WORKERS)
    opened, unread = _open_splits(config)
    splits = [scan_split(title, samples, data, workers, world) for title, samples in opened.items()]
    if not splits or not world.first:
        return EXIT_DONE
    _check_existing(splits)
    findings = find_problems(splits, config.MODEL.NUM_CLASSES, data)
    _report(findings, splits, data, asked)
    if asked.json is not None:
        with writing(asked.json, "-json"):
            write_atomically(asked.json, json.dumps(redacted_values(as_json(findings)), indent=1) + "\n")
    result = "No defects." if findings.clean else "There are defects."
    if asked.alike is not None:
        from tools.check_data.alike import write_alike

        count = write_alike(config, splits, asked.alike)
        if count:
            others = "no other defects" if findings.clean else "there are others"
            result = f"Defects: {counted(count, 'image')} may be copies; {others}."
    doubtful = findings.found[UNLIKE]
    if doubtful:
        result += f" Look at {counted(len(doubtful), 'image')} in another format: perhaps placeholders."
    if unread:
        result += " The test split was not checked."
    log.info("\n%s", result)
    return EXIT_DONE if findings.clean and not unread else EXIT_FAILED


def _check_existing(splits: Iterable[Split]) -> None:
    """Raise UserError for a split none of whose images exists."""
    from datasets.sources.files import no_file

    for split in splits:
        if split.scans and all(scan.problem == "missing" for scan in split.scans):
            where = no_file(Path(split.samples.name(0)))
            raise UserError(f"None of {counted(len(split.scans), f'{split.title} image')} exists: {where}.")


def _report(findings: Findings, splits: list[Split], data: DataConfig, asked: Asked) -> None:
    """Log what was found, and write the list of -fix."""
    from datasets.examine.headers import kept_by_crop
    from tools.check_data.report import exclude_list, text

    scans = chain.from_iterable(split.scans for split in splits)
    headers = [scan.header for scan in scans]
    if not data.is_plain:
        found = Counter(header.size for header in headers if min(header.size) > 0).most_common(5)
        sizes = ", ".join(f"{wide} x {high} ({count:,})" for (wide, high), count in found)
        log.info("Images of %d channels, DATA.BITS %s, by size: %s", data.IMAGE_CHANNELS, data.BITS, sizes)
    kept = kept_by_crop(headers, data)
    if kept:
        log.info("%s", kept)
    excluded = exclude_list(findings, splits, data, asked.near)
    advice = list[str]()
    if excluded.images:
        listed = asked.fix or "the list that -fix FILE writes"
        advice += [f"Excluded by {listed}:", excluded.words]
    if asked.fix is not None:
        with writing(asked.fix, "-fix"):
            write_atomically(asked.fix, excluded.content)
        how = f"; to exclude them, add DATA.EXCLUDE={asked.fix}" if excluded.images else ""
        advice.append(f"{counted(excluded.images, 'image')} to exclude{how}")
    advice += _what_stays(findings, asked)
    if findings.companions:
        log.warning("%s.", findings.companions)
    if findings.series and data.GROUP is not None:
        log.warning("%s.", findings.series)
    elif findings.series:
        advice.append(f"{findings.series}.")
    log.info(text(findings, data, advice))


def _open_splits(config: Config) -> tuple[dict[str, Samples], bool]:
    """The splits whose images are read one by one, by title, and whether a test split could not be opened."""
    import torch

    from datasets import has_test, open_dataset, open_test, source_of, warn_of_splits
    from datasets.labels import ANY_LABEL, warn_alike_names
    from datasets.sources.split import TooFewToSplit

    data = config.DATA
    opened: dict[str, Samples] = {}
    for title in ("training", "validation"):
        try:
            # With any label, so that labels out of range are reported with all other defects.
            split = open_dataset(data, title == "training", ANY_LABEL, config.SEED, torch.device("cpu"))
        except TooFewToSplit as error:
            log.warning("%s Here all images are checked as training images.", error)
            continue
        samples = split.single_images()
        if samples is None:
            log.info("The %s split of %s is held in memory: there are no files to check.", title, data.DATASET)
        else:
            opened[title] = samples
    test = open_test(data)
    if test is not None:
        opened["test"] = test
    training = opened.get("training")
    warn_of_splits(data, training, opened.get("validation"))
    if training is not None:
        warn_alike_names(training.classes or (), source_of(data))
    unread = test is None and has_test(data) and data.PART in (AUTO, "val")  # a warning says why
    return opened, unread


def _what_stays(findings: Findings, asked: Asked) -> Iterator[str]:
    """Defects that the list of -fix leaves, and what to do."""
    from datasets.examine.findings import DUPLICATES_OF_OTHERS, NEAR_CONFLICTS, NEAR_OVERLAP

    if not asked.near and any(one.split == "training" for one in findings.found[NEAR_OVERLAP]):
        way = "-near -overwrite" if asked.fix else "-fix FILE -near"
        yield f"Images that are nearly the same as one of another split stay: look at them, then add {way}."
    if findings.found[DUPLICATES_OF_OTHERS]:
        yield (
            "Duplicates within validation or test stay, and count twice there. To leave them out, list all but one in "
            "DATA.EXCLUDE; runs are then compared on fewer images."
        )
    if findings.found[NEAR_CONFLICTS]:
        yield (
            "Nearly the same images with different labels stay: see which label is right, then list the other image in "
            "DATA.EXCLUDE, or another label for it in DATA.RELABEL."
        )
