"""Converts the size of the model's input: one number for a square, else height and width, as in timm."""

from collections.abc import Sequence

ImageSize = int | tuple[int, int]


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """The height and width of a size."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def size_of(size: int | Sequence[int]) -> ImageSize:
    """A size as settings, weights and messages have it: one number for a square."""
    height, width = sides(size)
    return height if height == width else (height, width)


def in_pixels(size: int | Sequence[int]) -> str:
    """A size in words, with its height first: `224 x 448`."""
    return "{} x {}".format(*sides(size))


MOST_BYTES = 2**30
"""Default of DATA.MAX_IMAGE_BYTES, against small files that decode to more than the memory holds."""
BYTES_PER_PIXEL = 8
"""Memory per pixel of an image that Pillow decodes (4 bytes, and 3 in its array) or of DICOM (floats of 8 bytes)."""


def refuse_large(size: int, most: int) -> None:
    """Raise ValueError if the pixels of an image need more bytes (`size`) than DATA.MAX_IMAGE_BYTES (`most`) allows."""
    if size > most:
        raise ValueError(f"it decodes to {size:,} bytes or more; DATA.MAX_IMAGE_BYTES allows {most:,}")
