"""Draw the first training images of a run as the model sees them.

    python scripts/show_batch.py -cfg configs/vit_digits.yaml
    python scripts/show_batch.py -cfg configs/deit_tiny_patch16_224.yaml -data_path /data/imagenet -count 32

The images are cropped, flipped, augmented, erased and mixed exactly as in the first updates of training, in their
order. Above each is its label; a mixed image has both labels with their fractions.

Takes the flags and settings of main_single_gpu.py.
"""

from __future__ import annotations

from tools.common.command_line import OVERWRITE, Tool, run_tool
from utils.cli import Flag
from utils.config import Loaded
from utils.errors import EXIT_DONE, UserError
from utils.log import log

DEFAULT_OUT, DEFAULT_COUNT, MOST = "batch.png", 16, 256
OWN = (
    Flag("out", f"the picture to write (default {DEFAULT_OUT})", "FILE.png", ("OUT",)),
    Flag("count", f"how many images (default {DEFAULT_COUNT}, at most {MOST})", "N", ("COUNT",)),
    OVERWRITE,
)
TOOL = Tool("show_batch.py", __doc__, OWN)


def main(argv: list[str]) -> int:
    return run_tool(_show, argv)


def _show(argv: list[str]) -> int:
    line = TOOL.read(argv)
    out, count = line.file("OUT", ".png", DEFAULT_OUT), line.whole("COUNT", DEFAULT_COUNT, 1, MOST)
    loaded = line.load()
    _check(loaded)

    # Only now, with the settings known to be right: importing torch takes seconds.
    from datasets import check_dataset
    from tools.show_batch.picture import draw, first_images

    check_dataset(loaded.config.DATA, loaded.config.MODEL.NUM_CLASSES)
    for note in loaded.notes:
        log.info(note)
    shown = first_images(loaded.config, count)
    draw(out, loaded.config, shown)
    log.info("%d images as the model sees them: %s", len(shown), out)
    return EXIT_DONE


def _check(loaded: Loaded) -> None:
    if loaded.config.EVAL:
        raise UserError(f"{loaded.sources['EVAL']}: show_batch.py has no EVAL; it shows what training sees.")
