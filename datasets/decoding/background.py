"""The colour behind transparent pixels (DATA.BACKGROUND), for everything that reads images."""

from __future__ import annotations

from PIL import Image

from utils.config.data import DataConfig
from utils.config.values import one_line

Colour = tuple[int, int, int]
NAMED: dict[str, Colour] = {"white": (255, 255, 255), "black": (0, 0, 0)}
OPAQUE = 255

_transparent = 0


def background_of(data: DataConfig) -> Colour | None:
    """DATA.BACKGROUND as a colour; None if the alpha channel is dropped."""
    chosen = data.BACKGROUND
    if chosen == "drop":
        return None
    return mean_colour(data) if chosen == "mean" else NAMED[chosen] if isinstance(chosen, str) else chosen


def mean_colour(data: DataConfig) -> Colour:
    """The colour that normalisation maps to 0."""
    shades = [min(255, max(0, round(255 * value))) for value in data.IMAGENET_MEAN]
    red, green, blue = shades if len(shades) == data.IMAGE_CHANNELS == 3 else [shades[0]] * 3
    return red, green, blue


def on_background(image: Image.Image, colour: Colour | None) -> Image.Image:
    """An image with transparent pixels, composited on `colour`; other images stay as they are.

    Without a colour the alpha channel is dropped, so that the colours stored under it appear.
    """
    global _transparent
    if not image.has_transparency_data:
        return image
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    least, _ = image.getchannel("A").getextrema()
    if least == OPAQUE:
        return image
    _transparent += 1
    return image if colour is None else Image.alpha_composite(Image.new("RGBA", image.size, (*colour, OPAQUE)), image)


def take_transparent() -> int:
    """How many images with transparent pixels this process has read since the last call."""
    global _transparent
    count, _transparent = _transparent, 0
    return count


def background_words(data: DataConfig) -> str:
    """What happens to transparent pixels, for the log."""
    if data.BACKGROUND == "drop":
        return "their transparency is dropped, and the colours stored under it appear (DATA.BACKGROUND: drop)"
    return f"composited on {one_line(data.BACKGROUND)} (DATA.BACKGROUND)"
