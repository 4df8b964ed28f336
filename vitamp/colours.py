"""Converts images of any mode to the colours that a model takes, for `vitamp.load` and for training."""

import numpy as np
from PIL import Image

OPAQUE = 255


def as_rgb_or_grey(image: Image.Image, channels: int, background: tuple[int, ...] | None) -> tuple[Image.Image, bool]:
    """Convert an image of any mode to RGB, or to grey for one channel; also return whether it has transparent pixels.

    background: colour behind transparent pixels; None: the colours stored under them appear

    Raises ValueError if the image's value for white is unknown.
    """
    has_transparent_pixels = False
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range; store 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255, which turns most 16-bit images white. Mode "I" has 32 bits; Pillow uses
        # it for 16-bit files of some formats, such as PGM, and scales their values to 65535.
        stored = np.asarray(image)
        transparent_shade = image.info.get("transparency")  # a number if one shade is transparent
        image = Image.fromarray((stored.clip(0, 65535) >> 8).astype(np.uint8))
        if isinstance(transparent_shade, int):  # It has 16 bits, as the stored values have.
            image.putalpha(Image.fromarray(np.where(stored == transparent_shade, 0, OPAQUE).astype(np.uint8)))
    if image.has_transparency_data:
        if image.mode != "RGBA":
            image = image.convert("RGBA")
        lowest_alpha = image.getchannel("A").getextrema()[0]
        has_transparent_pixels = lowest_alpha != OPAQUE
        if has_transparent_pixels and background is not None:
            canvas = Image.new("RGBA", image.size, (*background, OPAQUE))
            image = Image.alpha_composite(canvas, image)
    return image.convert("L" if channels == 1 else "RGB"), has_transparent_pixels
