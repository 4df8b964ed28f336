"""What is wrong with a data set? Reads every image of it once, as training will.

    python scripts/check_data.py -dataset imagefolder -data_path /data/flowers -num_classes 102
    python scripts/check_data.py -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet -out broken.txt

Defects: images that cannot be read, labels out of range, classes without training images, duplicates (the same bytes),
images that training and validation share. Notes: images that are not stored as the model takes them, and small ones.
Ends with 0 where there is no defect, 1 where there is one, 2 for wrong usage.

The flags and settings of main_single_gpu.py hold; -num_workers: processes that look.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tools.common.command_line import OVERWRITE, Tool, run_tool
from utils.cli import Flag
from utils.config import Config
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError
from utils.files import write_whole
from utils.log import log
from utils.output_file import writing

if TYPE_CHECKING:
    from datasets.base import Samples
    from tools.check_data.look import Seen

OWN = (
    Flag("out", "write the list that DATA.EXCLUDE takes: what cannot be read", "FILE", ("OUT",)),
    Flag(
        "exclude_duplicates",
        "let it name later duplicates too, what both parts share, and all copies whose labels differ",
        keys=("DUPLICATES",),
    ),
    Flag("exclude_small", "let it name images smaller than IMAGE_SIZE too", keys=("SMALL",)),
    Flag("json", "write all that was found for machines", "FILE", ("JSON",)),
    OVERWRITE,
)
TOOL = Tool("check_data.py", __doc__, OWN)


def main(argv: list[str]) -> int:
    return run_tool(_check, argv)


def _check(argv: list[str]) -> int:
    line = TOOL.read(argv)
    out, machines = (line.file(key) if key in line.own else None for key in ("OUT", "JSON"))
    if out is not None and out == machines:
        raise UserError(f"-out and -json both name {out}; give each a file of its own.")
    if out is None and line.own.keys() & {"DUPLICATES", "SMALL"}:
        raise UserError("-exclude_duplicates and -exclude_small say what the list of -out FILE names; give that too.")
    config = line.load().config

    # Only now, with the settings known to be right: importing torch takes seconds.
    from tools.check_data import find as check_data_find
    from tools.check_data import report

    parts = _look(config)
    if not parts:
        return EXIT_DONE
    findings = check_data_find.find(parts, config.MODEL.NUM_CLASSES, config.DATA.IMAGE_SIZE)
    log.info(report.text(findings))
    if machines is not None:
        with writing(machines, "-json"):
            write_whole(machines, json.dumps(report.as_json(findings), indent=1) + "\n")
    if out is not None:
        chosen = report.to_exclude(findings, "DUPLICATES" in line.own, "SMALL" in line.own)
        with writing(out, "-out"):
            write_whole(out, report.exclude_list(chosen, config.DATA))
        conflicts = len(findings.defects[check_data_find.CONFLICTS]) if "DUPLICATES" in line.own else 0
        if conflicts:
            log.info(
                "\n%d of the images to leave out have the same bytes as others but another label: nothing tells which "
                "label is right, so no copy is kept. Correct the labels to keep one.",
                conflicts,
            )
        log.info("\n%d images to leave out: DATA.EXCLUDE=%s", len(chosen), out)
    log.info("\n%s", "No defects." if findings.clean else "Defects were found.")
    return EXIT_DONE if findings.clean else EXIT_FAILED


def _look(config: Config) -> list[Seen]:
    """Both parts, training first, as far as they are made of files."""
    from datasets import auto_workers, tell_unmatched
    from tools.check_data.look import look_at

    parts = {title: _open(config, title == "training") for title in ("training", "validation")}
    tell_unmatched(config.DATA, parts.values())
    workers = auto_workers(1) if config.DATA.NUM_WORKERS is None else config.DATA.NUM_WORKERS
    seen = []
    for title, samples in parts.items():
        if samples is None:
            log.info(
                "The %s part of the data set %s lies in memory: there are no files to look at.",
                title,
                config.DATA.DATASET,
            )
        else:
            seen.append(look_at(title, samples, config.DATA, workers))
    return seen


def _open(config: Config, train: bool) -> Samples | None:
    import torch

    from datasets import open_dataset
    from datasets.labels import ANY_LABEL

    classes, cpu = config.MODEL.NUM_CLASSES, torch.device("cpu")
    try:
        return open_dataset(config.DATA, train, classes, config.SEED, cpu).single_images()
    except UserError as error:
        # Labels that do not fit the classifier are to be found with all else, and not one by one.
        try:
            return open_dataset(config.DATA, train, ANY_LABEL, config.SEED, cpu).single_images()
        except UserError:
            raise error from None
