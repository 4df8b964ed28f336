"""An image of any mode in the colours that a model takes: for `vitamp.load`, and for training."""

import numpy as np
from PIL import Image

OPAQUE = 255


def as_rgb_or_grey(image: Image.Image, channels: int, background: tuple[int, ...] | None) -> tuple[Image.Image, bool]:
    """An image of any mode as RGB, or as grey for one channel; and whether it has transparent pixels.

    They are composited on `background`; without one, the colours stored under them appear. ValueError if the image's
    value for white is unknown.
    """
    transparent = False
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range; store 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255, which turns most 16-bit images white. Mode "I" has 32 bits; Pillow uses
        # it for 16-bit files of some formats, such as PGM, and scales their values to 65535.
        stored = np.asarray(image)
        clear = image.info.get("transparency")
        image = Image.fromarray((stored.clip(0, 65535) >> 8).astype(np.uint8))
        if isinstance(clear, int):  # a shade of 16 bits
            image.putalpha(Image.fromarray(np.where(stored == clear, 0, OPAQUE).astype(np.uint8)))
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        transparent = image.getchannel("A").getextrema()[0] != OPAQUE
        if transparent and background is not None:
            behind = Image.new("RGBA", image.size, (*background, OPAQUE))
            image = Image.alpha_composite(behind, image)
    return image.convert("L" if channels == 1 else "RGB"), transparent
