"""Size of the model's input: one number for a square, else height and width, as in timm."""

from collections.abc import Sequence

ImageSize = int | tuple[int, int]


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def size_of(size: int | Sequence[int]) -> ImageSize:
    """The size as settings, weights and messages have it."""
    high, wide = sides(size)
    return high if high == wide else (high, wide)


def in_pixels(size: int | Sequence[int]) -> str:
    """`224 x 448`: height and width."""
    return "{} x {}".format(*sides(size))


MOST_BYTES = 2**30
"""Default of DATA.MAX_IMAGE_BYTES, against small files that decode to more than the memory holds"""
BYTES_PER_PIXEL = 8
"""Of an image that Pillow decodes: it takes 4, and its array 3 of colours. DICOM files get floats of 8 bytes."""


def refuse_large(size: int, most: int) -> None:
    """ValueError for an image with more bytes of pixels than DATA.MAX_IMAGE_BYTES allows."""
    if size > most:
        raise ValueError(f"it decodes to {size:,} bytes or more; DATA.MAX_IMAGE_BYTES allows {most:,}")
