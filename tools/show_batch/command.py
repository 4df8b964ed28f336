"""Draw the first training images of a run as the model sees them.

    python scripts/show_batch.py -cfg configs/vit_digits.yaml
    python scripts/show_batch.py -cfg configs/deit_tiny_patch16_224.yaml -data_path /data/imagenet -count 32

The images are cropped, flipped, augmented, erased and mixed exactly as in the first updates of training, in the same
order. Above each is its label; a mixed image has both labels with their fractions.

Takes the flags and settings of main_single_gpu.py.
"""

from tools.common.command_line import OVERWRITE, Tool, tool
from utils.errors import EXIT_DONE, UserError
from utils.flags import Flag, whole
from utils.log import log, log_lines
from utils.text import counted

MOST = 256
"""Most images in a picture"""
OWN = (
    Flag("out", "picture to write", "FILE.png", default="batch.png"),
    Flag("count", f"number of images, at most {MOST}", "N", default=16, kind=whole(1, MOST)),
    OVERWRITE,
)
TOOL = Tool("show_batch.py", __doc__, OWN)


@tool
def main(argv: list[str]) -> int:
    """Check the settings as training does, and draw the images that it would begin with."""
    command_line = TOOL.read(argv)
    out = command_line.file("out", ".png")
    count = command_line.asked.count
    assert out is not None, "it has a default"
    loaded = command_line.load()
    if loaded.config.EVAL:
        raise UserError(f"{loaded.sources['EVAL']}: show_batch.py shows training images; leave this out.")

    # Imported late: torch takes seconds to import, and a wrong command should fail at once.
    from datasets import check_dataset
    from datasets.transforms.augment import check_augmentations
    from tools.show_batch.picture import draw, first_images

    check_dataset(loaded.config.DATA, loaded.config.MODEL.NUM_CLASSES)
    check_augmentations(loaded.config.TRAIN, loaded.config.DATA)
    log_lines(loaded.notes)
    images = first_images(loaded.config, count)
    draw(out, loaded.config, images)
    log.info("%s as the model sees them: %s", counted(len(images), "image"), out)
    return EXIT_DONE
