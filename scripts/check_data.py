#!/usr/bin/env python3
"""What is wrong with a data set? Reads every image of it once, as training will.

    python scripts/check_data.py -dataset imagefolder -data_path /data/flowers -num_classes 102
    python scripts/check_data.py -cfg configs/vit_base.yaml -data_path /data/imagenet -out broken.txt

Defects: images that cannot be read, labels out of range, classes without training images, duplicates (the same bytes),
images that training and validation share. Notes: images that are not stored as the model takes them, and small ones.
Ends with 0 where there is no defect, 1 where there is one, 2 for wrong usage.

The flags and settings of main_single_gpu.py hold; -num_workers: processes that look. Flags of its own:
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.cli import BY_NAME, FLAGS, CommandLine, Flag, parse  # noqa: E402
from utils.config import Config, load_config  # noqa: E402
from utils.errors import EXIT_DONE, EXIT_FAILED, UserError  # noqa: E402
from utils.log import log  # noqa: E402
from utils.run_folder import replace_text  # noqa: E402
from utils.script import help_asked, run_tool  # noqa: E402

if TYPE_CHECKING:
    from datasets.samples import Samples
    from scripts.check_data_look import Seen

OWN = (
    Flag("out", "write the list that DATA.EXCLUDE takes: what cannot be read", "FILE", ("OUT",)),
    Flag("exclude_duplicates", "let it name later duplicates too, and what both parts share", keys=("DUPLICATES",)),
    Flag("exclude_small", "let it name images smaller than IMAGE_SIZE too", keys=("SMALL",)),
    Flag("json", "write all that was found for machines", "FILE", ("JSON",)),
)


def main(argv: list[str]) -> int:
    return run_tool(_check, argv)


def _check(argv: list[str]) -> int:
    if help_asked(argv, __doc__, OWN):
        return EXIT_DONE
    FLAGS["The check"] = OWN
    BY_NAME.update({flag.name: flag for flag in OWN})
    command = parse(argv, "scripts/check_data.py")
    if command.action != "train":
        raise UserError(f"check_data.py has no -{command.action}; main_single_gpu.py has, with the same flags.")
    own = {key for flag in OWN for key in flag.keys}
    given = {key: command.flags[key][0] for key in own & command.flags.keys()}
    out, machines = _file(command, "OUT"), _file(command, "JSON")
    if out is None and given.keys() & {"DUPLICATES", "SMALL"}:
        raise UserError("-exclude_duplicates and -exclude_small say what the list of -out FILE names; give that too.")
    config = load_config(command.cfg, {k: v for k, v in command.flags.items() if k not in own}, command.words).config

    # Only now, with the settings known to be right: importing torch takes seconds.
    from scripts import check_data_find, check_data_report

    parts = _look(config)
    if not parts:
        return EXIT_DONE
    findings = check_data_find.find(parts, config.MODEL.NUM_CLASSES, config.DATA.IMAGE_SIZE)
    log.info(check_data_report.text(findings))
    if machines is not None:
        replace_text(machines, json.dumps(check_data_report.as_json(findings), indent=1) + "\n")
    if out is not None:
        chosen = check_data_report.to_exclude(findings, "DUPLICATES" in given, "SMALL" in given)
        replace_text(out, check_data_report.exclude_list(chosen, config.DATA))
        log.info("\n%d images to leave out: DATA.EXCLUDE=%s", len(chosen), out)
    log.info("\n%s", "No defects." if findings.clean else "Defects were found.")
    return EXIT_DONE if findings.clean else EXIT_FAILED


def _look(config: Config) -> list[Seen]:
    """Both parts, training first, as far as they are made of files."""
    from datasets import auto_workers, tell_unmatched
    from scripts.check_data_look import look_at

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

    from datasets import open_dataset, samples_of
    from datasets.labels import ANY_LABEL

    classes, cpu = config.MODEL.NUM_CLASSES, torch.device("cpu")
    try:
        return samples_of(open_dataset(config.DATA, train, classes, config.SEED, cpu))
    except UserError as error:
        # Labels that do not fit the classifier are to be found with all else, and not one by one.
        try:
            return samples_of(open_dataset(config.DATA, train, ANY_LABEL, config.SEED, cpu))
        except UserError:
            raise error from None


def _file(command: CommandLine, key: str) -> Path | None:
    if key not in command.flags:
        return None
    text, flag = command.flags[key]
    path = Path(text).expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else f"the folder {path.absolute().parent} does not exist"
        raise UserError(f"{flag} {text}: {what}; name a file.")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
