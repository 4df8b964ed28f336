"""Images that are nearly the same, though not pixel for pixel: encoded again, or resized."""

from collections.abc import Iterator

import numpy as np

SIDE = 32
"""Pixels along each side of a thumbnail"""
CELLS = 16
"""Along each side of it, compared in lightness"""
BLOCKS = 8
"""Along each side of it, compared in colour"""
FLAT = 6.0
"""Contrast (standard deviation in a channel, of 255 shades) of images almost of one colour: they have no near copies"""
# Most shades by which near copies of SIDE x SIDE pixels differ. JPEG and resizing change pixels much and areas little.
# The limits shrink as the images grow, since thumbnails show less of either.
MOST_APART = {1: 30.0, 2: 9.0, 4: 4.0}
"""In lightness, in squares of so many cells along each side"""
MOST_IN_COLOUR = 9.0
"""In a channel, in squares of 2 x 2 blocks"""
SMALLEST = 16
LARGEST = 128
"""Pixels of a shorter side between which the limits shrink"""
FAINT = 15.0
"""Contrast of blocks below which the limits shrink with it"""
CORRELATED = 0.999
"""Of the thumbnails of two images that are not small, from which on they may be twice as far apart: by resizing"""
LIGHTNESS = {1: np.ones(1, np.float32), 3: np.array([0.299, 0.587, 0.114], np.float32)}
"""Weights of channels, by their number: JPEG keeps lightness better than colour. Bands count alike."""
MOST_BRIGHTER = 30.0
"""Difference of brightness, in shades, that copies may have"""
MOST_CONTRAST = 1.25
"""Ratio of contrasts that copies may have"""
BITS = 64
"""Of a code"""
BANDS = 4
"""Parts of a code by which images are looked up"""
MOST_BITS = 8
"""Different bits of two codes; those of 99 % of the copies of icons of 32 x 32 pixels differ in fewer"""
PAIRS = 1 << 20
"""Pairs held in memory at once"""
AT_ONCE = 1024
"""Images, or pairs, whose pixels are held in memory at once"""
PIXELS_OF_EACH = (1, 2, 3)
"""Axes"""

Pairs = tuple[np.ndarray, np.ndarray]


class Thumbnails:
    """What is compared of thumbnails (images x channels x SIDE x SIDE, uint8).

    `sides`: pixels of the shorter side of each image.
    """

    def __init__(self, thumbnails: np.ndarray, sides: np.ndarray) -> None:
        self.pixels = thumbnails
        self.sides = sides
        count, channels = thumbnails.shape[:2]
        self.flat = np.zeros(count, bool)
        self.brightness = np.zeros(count, np.float32)
        self.contrast = np.zeros(count, np.float32)
        self.cells = np.zeros((count, 1, CELLS, CELLS), np.float16)
        self.blocks = np.zeros((count, channels, BLOCKS, BLOCKS), np.float16)
        self.codes = np.zeros(count, np.uint64)
        lightness = LIGHTNESS.get(channels, np.full(channels, 1 / channels, np.float32))
        directions = np.random.default_rng(0).standard_normal((channels * BLOCKS**2, BITS)).astype(np.float32)
        for begin in range(0, count, AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            planes = thumbnails[part].astype(np.float32)
            blocks = _squares(planes, SIDE // BLOCKS)
            self.flat[part] = np.sqrt(planes.var((2, 3)).mean(1)) < FLAT
            self.cells[part] = np.einsum("nchw,c->nhw", _squares(planes, SIDE // CELLS), lightness)[:, None]
            self.blocks[part] = blocks
            self.brightness[part] = blocks.mean(PIXELS_OF_EACH)
            # The contrast of blocks, since resizing takes contrast from thin lines.
            self.contrast[part] = np.maximum(np.sqrt(blocks.var((2, 3)).mean(1)), 1.0)
            pattern = (blocks - blocks.mean((2, 3), keepdims=True)).reshape(len(blocks), -1)
            self.codes[part] = np.packbits(pattern @ directions > 0, axis=1).view(np.uint64)[:, 0]

    def nearly_same(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Which pairs are."""
        light = self.difference(self.cells, one, other)
        colour = self.difference(self.blocks, one, other)
        compared = [(light, side, most) for side, most in MOST_APART.items()]
        compared.append((colour, 2, MOST_IN_COLOUR))
        apart = [np.abs(_squares(planes, side)).max(PIXELS_OF_EACH) / most for planes, side, most in compared]
        farthest = np.max(apart, axis=0)

        # Images that are both enlarged to thumbnails lose nothing by that.
        smaller = np.minimum(self.sides[one], self.sides[other])
        larger = np.maximum(self.sides[one], self.sides[other])
        side = np.where(larger < SIDE, SIDE, smaller.clip(SMALLEST, LARGEST))
        contrast = np.minimum(self.contrast[one], self.contrast[other])
        limits = SIDE / side * np.minimum(1, contrast / FAINT)

        same = farthest < limits
        large = (smaller >= LARGEST) & (contrast >= FAINT)
        rest = np.flatnonzero(large & ~same & (farthest < 2 * limits))
        same[rest] = self.correlation(one[rest], other[rest]) >= CORRELATED
        return same

    def difference(self, planes: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Difference of the cells or blocks of pairs, in `planes`, at the same brightness and contrast."""
        scale = np.sqrt(self.contrast[other] / self.contrast[one])[:, None, None, None]
        level = self.brightness[:, None, None, None]
        return (planes[one] - level[one]) * scale - (planes[other] - level[other]) / scale

    def correlation(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Of the pixels of pairs."""

        def from_mean(images: np.ndarray) -> np.ndarray:
            planes = self.pixels[images].astype(np.float32)
            return planes - planes.mean(PIXELS_OF_EACH, keepdims=True)

        first = from_mean(one)
        second = from_mean(other)
        product = (first * second).sum(PIXELS_OF_EACH)
        return product / np.sqrt((first**2).sum(PIXELS_OF_EACH) * (second**2).sum(PIXELS_OF_EACH))


def _squares(planes: np.ndarray, side: int) -> np.ndarray:
    """Means of squares of `side` x `side`."""
    return planes.reshape(*planes.shape[:2], planes.shape[2] // side, side, -1, side).mean((3, 5))


def near_pairs(thumbnails: Thumbnails) -> np.ndarray:
    """Pairs of images that are nearly the same (pairs x 2, the first index below the second)."""
    chosen = np.flatnonzero(~thumbnails.flat)
    found = [np.empty((0, 2), np.int64)]
    for one, other in _candidates(thumbnails.codes[chosen]):
        first, second = _alike(thumbnails, chosen[one], chosen[other])
        found.append(np.stack([np.minimum(first, second), np.maximum(first, second)], axis=1))
    return np.unique(np.concatenate(found), axis=0)


def _candidates(codes: np.ndarray) -> Iterator[Pairs]:
    """Pairs of codes that differ in few bits, some of them several times.

    Of 7 different bits, one of 4 bands has at most one. So each band is looked up with each of its bits changed, in the
    list of images sorted by that band; no image is compared with all others.
    """
    width = BITS // BANDS
    changes = [0, *(1 << bit for bit in range(width))]
    for band in range(BANDS):
        values = (codes >> np.uint64(band * width)).astype(np.int64) & ((1 << width) - 1)
        order = np.argsort(values, kind="stable")
        begins = np.searchsorted(values[order], np.arange((1 << width) + 1))
        for change in changes:
            wanted = values ^ change
            for one, place in _looked_up(begins[wanted], np.diff(begins)[wanted]):
                other = order[place]
                near = (one < other) & (np.bitwise_count(codes[one] ^ codes[other]) <= MOST_BITS)
                if near.any():
                    yield one[near], other[near]


def _looked_up(begins: np.ndarray, counts: np.ndarray) -> Iterator[Pairs]:
    """Each image with each of its places, which are `counts` from `begins` on; about PAIRS of them at once."""
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        past = ends[first - 1] if first else 0
        until = max(first + 1, int(np.searchsorted(ends, past + PAIRS, side="right")))
        some = slice(first, until)
        one = np.repeat(np.arange(first, until), counts[some])
        inside = np.arange(len(one)) - np.repeat(ends[some] - counts[some] - past, counts[some])
        yield one, begins[one] + inside
        first = until


def _alike(thumbnails: Thumbnails, one: np.ndarray, other: np.ndarray) -> Pairs:
    """Those pairs that are nearly the same."""
    brightness = thumbnails.brightness
    contrast = thumbnails.contrast
    ratio = np.maximum(contrast[one], contrast[other]) / np.minimum(contrast[one], contrast[other])
    likely = np.flatnonzero((np.abs(brightness[one] - brightness[other]) < MOST_BRIGHTER) & (ratio < MOST_CONTRAST))
    kept = [np.empty(0, np.int64)]
    for begin in range(0, len(likely), AT_ONCE):
        pairs = likely[begin : begin + AT_ONCE]
        kept.append(pairs[thumbnails.nearly_same(one[pairs], other[pairs])])
    pairs = np.concatenate(kept)
    return one[pairs], other[pairs]
