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
