"""Check a data set: read every image once, as training does, and report defects.

    python scripts/check_data.py -dataset imagefolder -data_path /data/flowers -num_classes 102
    python scripts/check_data.py -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet -fix exclude.txt

Defects: unreadable and damaged images, labels out of range, classes without training images, duplicates (equal bytes or
pixels) in training, images that are in two splits, or nearly so (encoded again, resized), and duplicates with different
labels, also near ones. The test split is checked too, if there is one. Notes: other duplicates within a split, also
near ones, images of one colour, tiny classes, classes without validation images, images in another format or much
larger than nearly all, images that must be converted or turned, and images smaller than IMAGE_SIZE.

Exit codes: 0 no defects, 1 defects or an unfinished check, 2 anything wrong with the command or the data set.

Takes the flags and settings of main_single_gpu.py; -num_workers is the number of checking processes. The processes of
torchrun, srun or mpirun share the work.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from itertools import chain, combinations
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


def fractions(text: str) -> tuple[float, ...]:
    """Convert the value of -parts, three shares of 100 or of 1, to fractions of 1."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    total = round(sum(shares), 6)
    if len(shares) != 3 or min(shares) <= 0 or total not in (1, 100):
        raise ValueError(
            "takes three numbers above 0 that add up to 100, the shares of training, validation and test, such as "
            "70,15,15"
        )
    return tuple(share / total for share in shares)


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
    Flag(
        "split",
        "write a table that divides all images anew, with groups (DATA.GROUP) and copies in one part; with weights, "
        "also images that look like edited copies",
        "FILE",
    ),
    Flag(
        "parts",
        "-split: shares of training, validation and test, in percent or as fractions of 1",
        "A,B,C",
        default_text="70,15,15",
        kind=fractions,
    ),
    Flag("json", "write all findings as JSON", "FILE"),
    OVERWRITE,
)
TOOL = Tool("check_data.py", __doc__, OWN)


class Asked(NamedTuple):
    """Results that the command asks for; None for those that it does not."""

    fix: Path | None
    """File for the list of images to exclude"""
    json: Path | None
    """File for all findings"""
    alike: Path | None
    """Folder for the page of images that look alike"""
    split: Path | None
    """File for a table with a new split"""
    fractions: tuple[float, ...]
    """Fractions of the images for its parts"""
    near: bool
    """Whether the list to exclude has nearly equal images too"""


@tool
def main(argv: list[str]) -> int:
    """Read the command line, check the data set that it describes, and return the exit code."""
    line = TOOL.read(argv)
    exclude_file = line.file("fix")
    json_file = line.file("json")
    split_file = line.file("split", ".csv")
    flags_of_files = {"-fix": exclude_file, "-json": json_file, "-split": split_file}
    for (flag, file), (other_flag, other_file) in combinations(flags_of_files.items(), 2):
        if file is not None and file == other_file:
            raise UserError(f"{flag} and {other_flag} both name {file}; give each its own file.")
    if line.asked.parts is not None and split_file is None:
        raise UserError("-parts: it gives the sizes of the parts of -split FILE.csv, which is missing.")
    alike_folder = line.asked.alike
    if alike_folder is not None:
        alike_folder = results_folder(alike_folder)
    with ranks_of_launcher(argv, line.run.ranks) as world:
        config = on_every_rank(world, line.load).config
        if alike_folder is not None and not config.MODEL.PRETRAINED:
            raise UserError("-alike compares images by a model's features: give -model NAME -pretrained FILE.")
        if alike_folder is not None and config.DATA.RELABEL:
            raise UserError("DATA.RELABEL: -alike compares all images; leave the table out.")
        return _check(
            config,
            Asked(
                fix=exclude_file,
                json=json_file,
                alike=alike_folder,
                split=split_file,
                fractions=line.asked.parts or (0.7, 0.15, 0.15),
                near=line.asked.near,
            ),
            world,
        )


def _check(config: Config, asked: Asked, world: World) -> int:
    """Scan all images, report the findings, and return the exit code. All ranks scan; rank 0 reports.

    The exit code says whether there are defects. Images that only look like others (-alike) do not count.
    """
    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from datasets import auto_workers
    from datasets.examine.findings import UNLIKE
    from engine.report.trust import doubts
    from tools.check_data.findings import find_problems
    from tools.check_data.report import as_json
    from tools.check_data.scan import scan_split

    data = config.DATA
    workers = auto_workers(world, data.NUM_WORKERS)
    samples_of, test_is_unread = open_splits(config)
    splits = [scan_split(title, samples, data, workers, world) for title, samples in samples_of.items()]
    if not splits or not world.first:
        return EXIT_DONE
    _check_images_exist(splits, data)
    findings = find_problems(splits, config.MODEL.NUM_CLASSES, data)
    _report(findings, splits, data, asked)
    if asked.json is not None:
        with writing(asked.json, "-json"):
            write_atomically(asked.json, json.dumps(redacted_values(as_json(findings)), indent=1) + "\n")

    # The result in words
    result = "No defects." if findings.clean else "There are defects."
    if findings.clean and doubts(asdict(findings)):
        result = "No defects, but reasons to doubt an accuracy: see above."
    if asked.alike is not None:
        from tools.check_data.alike import write_alike

        possible_copies = write_alike(config, splits, asked.alike)  # number of images
        other_defects = "no other defects" if findings.clean else "there are other defects"
        if possible_copies is None:
            result = f"Whether images are copies cannot be told; {other_defects}."
        elif possible_copies > 0:
            result = f"Defects: {counted(possible_copies, 'image')} may be copies; {other_defects}."
    in_rare_format = findings.by_kind[UNLIKE]
    if asked.split is not None:
        from tools.check_data.new_split import write_split

        write_split(config, splits, asked.fractions, asked.split)
    if in_rare_format:
        result += f" Look at {counted(len(in_rare_format), 'image')} in another format: perhaps placeholders."
    if test_is_unread:
        result += " The test split was not checked."
    log.info("\n%s", result)
    return EXIT_DONE if findings.clean and not test_is_unread else EXIT_FAILED


def _check_images_exist(splits: Iterable[Split], data: DataConfig) -> None:
    """Raise UserError if none of the images of a split exists."""
    from datasets.sources.files import no_file, where_images_are

    for split in splits:
        if split.scans and all(scan.problem == "missing" for scan in split.scans):
            problem = f"None of {counted(len(split.scans), f'{split.title} image')} exists"
            raise UserError(f"{problem}: {no_file(Path(split.samples.name(0)))}. {where_images_are(data)}")


def _report(findings: Findings, splits: list[Split], data: DataConfig, asked: Asked) -> None:
    """Log the report of all findings, and write the exclude list of -fix, if that was given."""
    from datasets.examine.headers import remark_on_crop
    from datasets.examine.shortcuts import why_not_examined
    from tools.check_data.report import exclude_list, report_text

    # Sizes of the images, for images of bands alone, and what the crop of training leaves of them
    scans = chain.from_iterable(split.scans for split in splits)
    headers = [scan.header for scan in scans]
    if not data.is_plain:
        common_sizes = Counter(header.size for header in headers if min(header.size) > 0).most_common(5)
        sizes = ", ".join(f"{wide} x {high} ({count:,})" for (wide, high), count in common_sizes)
        log.info("Images of %d channels, DATA.BITS %s, by size: %s", data.IMAGE_CHANNELS, data.BITS, sizes)
    crop = remark_on_crop(headers, data)
    if crop:
        log.info("%s", crop)

    # Advice. The list is made even without -fix, to say what it would exclude.
    excluded = exclude_list(findings, splits, data, asked.near)
    advice = list[str]()
    if excluded.images:
        exclude_file = asked.fix or "the list that -fix FILE writes"
        advice += [f"Excluded by {exclude_file}:", excluded.summary]
    if asked.fix is not None:
        with writing(asked.fix, "-fix"):
            write_atomically(asked.fix, excluded.content)
        usage = f"; to exclude them, add DATA.EXCLUDE={asked.fix}" if excluded.images else ""
        advice.append(f"{counted(excluded.images, 'image')} to exclude{usage}")
    advice += _advice_on_other_defects(findings, asked)

    # Remarks on names: many files belong to others, as masks do, or images of one group are in several splits.
    if findings.companions:
        log.warning("%s.", findings.companions)
    if findings.series and data.GROUP is not None:
        log.warning("%s.", findings.series)
    elif findings.series and not findings.namesakes:  # else the doubts say it
        advice.append(f"{findings.series}. {findings.series_advice}.")
    unexamined = why_not_examined(list(splits[0].images()))
    if unexamined:
        advice.append(f"Not searched for shortcuts (docs/data.md): {unexamined}.")
    log.info(report_text(findings, data, advice))


def open_splits(config: Config) -> tuple[dict[str, Samples], bool]:
    """Open the splits whose images can be checked.

    Returns their samples by title (training, validation, test), and whether there is a test split that could not be
    opened. A split in memory has no files to check, and is left out. If there are too few images for a validation
    split, it is left out too, and all images are in the training split.
    """
    import torch

    from datasets import has_test, open_dataset, open_test, source_of, warn_of_splits
    from datasets.labels import ANY_LABEL, warn_alike_names
    from datasets.sources.split import TooFewToSplit

    data = config.DATA
    samples_of: dict[str, Samples] = {}
    for title in ("training", "validation"):
        try:
            # With any label, so that labels out of range are reported with all other defects.
            dataset = open_dataset(
                data,
                train=title == "training",
                num_classes=ANY_LABEL,
                seed=config.SEED,
                device=torch.device("cpu"),
            )
        except TooFewToSplit as error:
            log.warning("%s Here all images are checked as training images.", error)
            continue
        samples = dataset.single_images()
        if samples is None:  # all images are in one array
            log.info("The %s split of %s is held in memory: there are no files to check.", title, data.DATASET)
        else:
            samples_of[title] = samples
    test = open_test(data)
    if test is not None:
        samples_of["test"] = test
    training = samples_of.get("training")
    warn_of_splits(data, training, samples_of.get("validation"))
    if training is not None:
        warn_alike_names(training.classes or (), source_of(data))
    # `open_test` has warned why. If DATA.PART names the test split, it was opened above in place of validation.
    test_is_unread = test is None and has_test(data) and data.PART in (AUTO, "val")
    return samples_of, test_is_unread


def _advice_on_other_defects(findings: Findings, asked: Asked) -> Iterator[str]:
    """Yield advice on each kind of defect whose images the exclude list does not have."""
    from datasets.examine.findings import DUPLICATES_OF_OTHERS, NEAR_CONFLICTS, NEAR_OVERLAP

    if not asked.near and any(image.split == "training" for image in findings.by_kind[NEAR_OVERLAP]):
        flags = "-near -overwrite" if asked.fix else "-fix FILE -near"
        yield f"Images that are nearly the same as one of another split stay: look at them, then add {flags}."
    if findings.by_kind[DUPLICATES_OF_OTHERS]:
        yield (
            "Duplicates within validation or test stay, and count twice there. To leave them out, list all but one in "
            "DATA.EXCLUDE; runs are then compared on fewer images."
        )
    if findings.by_kind[NEAR_CONFLICTS]:
        yield (
            "Nearly the same images with different labels stay: see which label is right, then list the other image in "
            "DATA.EXCLUDE, or another label for it in DATA.RELABEL."
        )
