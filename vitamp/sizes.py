"""Size of the model's input: one number for a square, else height and width, as in timm."""

from __future__ import annotations

from collections.abc import Sequence

ImageSize = int | tuple[int, int]


def size_of(high: int, wide: int) -> ImageSize:
    """The size as settings, weights and messages have it."""
    return high if high == wide else (high, wide)


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def in_pixels(size: int | Sequence[int]) -> str:
    """`224 x 448`: height and width."""
    return "{} x {}".format(*sides(size))
