#!/usr/bin/env python3
"""What does the model see? The first training images of a run, as a picture, after all that is done to them.

    python scripts/show_batch.py -cfg configs/vit_digits.yaml
    python scripts/show_batch.py -cfg configs/deit_tiny_patch16_224.yaml -data_path /data/imagenet -count 32

Cropped, flipped, augmented, erased and mixed as training does it: these are the very images of the first updates, in
their order. Above each stands its label; where two images are mixed, both labels with their shares.

All flags and settings of main_single_gpu.py hold. Flags of its own:
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.cli import BY_NAME, FLAGS, CommandLine, Flag, parse  # noqa: E402
from utils.config import Loaded, check_available, load_config  # noqa: E402
from utils.errors import EXIT_DONE, UserError  # noqa: E402
from utils.log import log  # noqa: E402
from utils.script import help_asked, run_tool  # noqa: E402

DEFAULT_OUT, DEFAULT_COUNT, MOST = "batch.png", 16, 256
OWN = (
    Flag("out", f"the picture to write (default {DEFAULT_OUT})", "FILE.png", ("OUT",)),
    Flag("count", f"how many images (default {DEFAULT_COUNT}, at most {MOST})", "N", ("COUNT",)),
)


def main(argv: list[str]) -> int:
    return run_tool(_show, argv)


def _show(argv: list[str]) -> int:
    if help_asked(argv, __doc__, OWN):
        return EXIT_DONE
    FLAGS["The picture"] = OWN
    BY_NAME.update({flag.name: flag for flag in OWN})
    command = parse(argv, "scripts/show_batch.py")
    out, count = _out(command), _count(command)
    own = {key for flag in OWN for key in flag.keys}
    loaded = load_config(command.cfg, {k: v for k, v in command.flags.items() if k not in own}, command.words)
    _check(loaded, command)

    # Only now, with the settings known to be right: importing torch takes seconds.
    from datasets import check_dataset
    from scripts.show_batch_picture import draw, first_images

    check_dataset(loaded.config.DATA, loaded.config.MODEL.NUM_CLASSES)
    for note in loaded.notes:
        log.info(note)
    shown = first_images(loaded.config, count)
    draw(out, loaded.config, shown)
    log.info("%d images as the model sees them: %s", len(shown), out)
    return EXIT_DONE


def _out(command: CommandLine) -> Path:
    text, flag = command.flags.get("OUT", (DEFAULT_OUT, ""))
    path = Path(text).expanduser()
    if path.suffix.lower() != ".png":
        raise UserError(f"{flag} {text}: the picture is a PNG; name it {path.stem or 'batch'}.png.")
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise UserError(f"{flag} {text}: {what}.")
    return path


def _count(command: CommandLine) -> int:
    text, flag = command.flags.get("COUNT", (str(DEFAULT_COUNT), ""))
    if not str(text).isdecimal() or not 1 <= int(text) <= MOST:
        raise UserError(f"{flag} {text}: takes a whole number from 1 to {MOST}, such as {DEFAULT_COUNT}.")
    return int(text)


def _check(loaded: Loaded, command: CommandLine) -> None:
    if command.action != "train":
        raise UserError(f"show_batch.py has no -{command.action}; main_single_gpu.py has, with the same flags.")
    if loaded.config.EVAL:
        raise UserError(f"{loaded.sources['EVAL']}: show_batch.py has no EVAL; it shows what training sees.")
    check_available(loaded.config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
