"""Images that are nearly the same, though not pixel for pixel: encoded again, or resized."""

from collections.abc import Iterator

import numpy as np

SIDE = 32
"""Pixels along each side of a thumbnail"""
BLOCKS = 8
"""Along each side of it. JPEG and resizing change pixels much, and blocks little."""
FLAT = 6.0
"""Contrast (standard deviation in a channel, of 255 shades) of images almost of one colour: they have no near copies"""
# Most shades by which near copies of SIDE x SIDE pixels differ. Images that lose less in their thumbnails differ less.
IN_BLOCKS = 9.0
"""In lightness, in any block"""
IN_AREAS = 4.0
"""In lightness, in any square of 2 x 2 blocks"""
IN_COLOUR = 9.0
"""In any channel, in such a square: JPEG keeps lightness better than colour"""
SMALLEST = 16
LARGEST = 64
"""Pixels of a shorter side between which these limits shrink, as 1 / side"""
FAINT = 15.0
"""Contrast of blocks below which the limits shrink with it"""
LIGHTNESS = {1: np.ones(1, np.float32), 3: np.array([0.299, 0.587, 0.114], np.float32)}
"""Weights of channels, by their number. Bands count alike."""
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
AT_ONCE = 4096
"""Images, or pairs, whose pixels are held in memory at once"""
PIXELS_OF_EACH = (1, 2, 3)
"""Axes"""


class Thumbnails:
    """What is compared of thumbnails (images x channels x SIDE x SIDE, uint8).

    `sides`: pixels of the shorter side of each image.
    """

    def __init__(self, pixels: np.ndarray, sides: np.ndarray) -> None:
        self.sides = sides
        count, channels = pixels.shape[:2]
        self.flat = np.zeros(count, bool)
        self.brightness = np.zeros(count, np.float32)
        self.contrast = np.zeros(count, np.float32)
        width = BLOCKS**2 + (1 + channels) * (BLOCKS // 2) ** 2
        # At the same brightness and contrast, in the limits above.
        self.looks = np.zeros((count, width), np.float16)
        self.codes = np.zeros(count, np.uint64)
        lightness = LIGHTNESS.get(channels, np.full(channels, 1 / channels, np.float32))
        directions = np.random.default_rng(0).standard_normal((width, BITS)).astype(np.float32)
        for begin in range(0, count, AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            planes = pixels[part].astype(np.float32)
            self.flat[part] = np.sqrt(planes.var((2, 3)).mean(1)) < FLAT
            blocks = _squares(planes, SIDE // BLOCKS)
            brightness = blocks.mean(PIXELS_OF_EACH)
            # The contrast of blocks, since resizing takes contrast from thin lines.
            contrast = np.maximum(np.sqrt(blocks.var((2, 3)).mean(1)), 1.0)
            colour = (blocks - brightness[:, None, None, None]) / contrast[:, None, None, None]
            light = np.einsum("nchw,c->nhw", colour, lightness)[:, None]
            limited = (light / IN_BLOCKS, _squares(light, 2) / IN_AREAS, _squares(colour, 2) / IN_COLOUR)
            looks = np.concatenate([one.reshape(len(planes), -1) for one in limited], axis=1)
            self.brightness[part] = brightness
            self.contrast[part] = contrast
            self.looks[part] = looks
            self.codes[part] = np.packbits(looks @ directions > 0, axis=1).view(np.uint64)[:, 0]

    def nearly_same(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Which pairs are."""
        smaller = np.minimum(self.sides[one], self.sides[other])
        larger = np.maximum(self.sides[one], self.sides[other])
        # Images that are both enlarged to thumbnails lose nothing by that.
        side = np.where(larger < SIDE, SIDE, smaller.clip(SMALLEST, LARGEST))
        least = np.minimum(self.contrast[one], self.contrast[other])
        most = np.maximum(self.contrast[one], self.contrast[other])
        apart = np.abs(self.looks[one] - self.looks[other]).max(1) * least.clip(FAINT)
        brighter = np.abs(self.brightness[one] - self.brightness[other])
        return (apart < SIDE / side) & (brighter < MOST_BRIGHTER) & (most < MOST_CONTRAST * least)


def _squares(planes: np.ndarray, side: int) -> np.ndarray:
    """Means of squares of `side` x `side`."""
    return planes.reshape(*planes.shape[:2], planes.shape[2] // side, side, -1, side).mean((3, 5))


def near_pairs(thumbnails: Thumbnails) -> np.ndarray:
    """Pairs of images that are nearly the same (pairs x 2, the first index below the second)."""
    chosen = np.flatnonzero(~thumbnails.flat)
    found = [np.empty((0, 2), np.int64)]
    for candidates in _candidates(thumbnails.codes[chosen]):
        pairs = chosen[candidates]
        for begin in range(0, len(pairs), AT_ONCE):
            some = pairs[begin : begin + AT_ONCE]
            found.append(some[thumbnails.nearly_same(some[:, 0], some[:, 1])])
    return np.unique(np.concatenate(found), axis=0)


def _candidates(codes: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs of codes that differ in few bits, some of them several times; the first index below the second.

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
                yield np.stack([one[near], other[near]], axis=1)


def _looked_up(begins: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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
