"""Search for images that are nearly the same, though not pixel for pixel: encoded again, or resized.

Thumbnails of all images are compared. Each has a short code of its looks, so that only thumbnails with similar codes
are compared in full, and no image is compared with all others.
"""

from collections.abc import Iterator

import numpy as np

SIDE = 32
"""Pixels along each side of a thumbnail"""
BLOCKS = 8
"""Blocks along each side of a thumbnail. JPEG and resizing change pixels much, and the means of blocks little."""
FLAT = 6.0
"""Contrast (standard deviation in a channel, of 255 shades) of images almost of one colour: they have no near copies"""
# By how many shades, of 255, near copies may differ whose shorter side has SIDE pixels. Larger images lose less to
# encoding and resizing in their thumbnails, so they may differ less.
MOST_IN_BLOCKS = 9.0
"""In lightness, in any block"""
MOST_IN_AREAS = 4.0
"""In lightness, in any area of 2 x 2 blocks"""
MOST_IN_COLOUR = 9.0
"""In any channel, in such an area: JPEG keeps lightness better than colour"""
SMALLEST = 16
LARGEST = 64
"""Pixels of a shorter side between which these limits shrink, as 1 / side"""
FAINT = 15.0
"""Contrast of blocks below which the limits shrink with it"""
LIGHTNESS = {1: np.ones(1, np.float32), 3: np.array([0.299, 0.587, 0.114], np.float32)}
"""Number of channels -> their weights in lightness. Other images have bands, which count alike."""
MOST_BRIGHTER = 30.0
"""Largest difference of brightness between copies, in shades"""
MOST_CONTRAST = 1.25
"""Largest ratio of contrasts between copies"""
BITS = 64
"""Bits of a code"""
BANDS = 4
"""Bands, or parts of a code, by which images are looked up"""
MOST_BITS = 8
"""Most bits in which codes of copies differ; those of 99 % of the copies of icons of 32 x 32 pixels differ in fewer"""
PAIRS = 1 << 20
"""Pairs held in memory at once"""
AT_ONCE = 4096
"""Images, or pairs, whose pixels are held in memory at once"""
PIXELS_OF_EACH = (1, 2, 3)
"""Axes of an image's pixels: channels, rows and columns"""


class Thumbnails:
    """Features of thumbnails by which they are compared: brightness, contrast, looks, and a code for the search.

    The looks of an image are the means of its blocks at equal brightness and contrast, in units of the limits above.
    """

    def __init__(self, pixels: np.ndarray, sides: np.ndarray) -> None:
        """Compute the features of `pixels` (images x channels x SIDE x SIDE, uint8).

        `sides` has the shorter side of each image, before it became a thumbnail.
        """
        self.sides = sides
        count, channels = pixels.shape[:2]
        self.flat = np.zeros(count, bool)
        """Whether an image is almost of one colour"""
        self.brightness = np.zeros(count, np.float32)
        self.contrast = np.zeros(count, np.float32)
        features = BLOCKS**2 + (1 + channels) * (BLOCKS // 2) ** 2  # blocks, areas in lightness and in each channel
        self.looks = np.zeros((count, features), np.float16)
        self.codes = np.zeros(count, np.uint64)
        """A bit says on which side of a random plane the looks are, so similar looks have similar codes"""
        lightness_weights = LIGHTNESS.get(channels, np.full(channels, 1 / channels, np.float32))
        directions = np.random.default_rng(0).standard_normal((features, BITS)).astype(np.float32)
        for begin in range(0, count, AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            planes = pixels[part].astype(np.float32)
            self.flat[part] = np.sqrt(planes.var((2, 3)).mean(1)) < FLAT
            blocks = _means_of_squares(planes, SIDE // BLOCKS)
            brightness = blocks.mean(PIXELS_OF_EACH)
            # The contrast is that of blocks, since resizing takes contrast from thin lines.
            contrast = np.maximum(np.sqrt(blocks.var((2, 3)).mean(1)), 1.0)
            colour = (blocks - brightness[:, None, None, None]) / contrast[:, None, None, None]
            lightness = np.einsum("nchw,c->nhw", colour, lightness_weights)[:, None]
            in_limits = (
                lightness / MOST_IN_BLOCKS,
                _means_of_squares(lightness, 2) / MOST_IN_AREAS,
                _means_of_squares(colour, 2) / MOST_IN_COLOUR,
            )
            looks = np.concatenate([means.reshape(len(planes), -1) for means in in_limits], axis=1)
            self.brightness[part] = brightness
            self.contrast[part] = contrast
            self.looks[part] = looks
            self.codes[part] = np.packbits(looks @ directions > 0, axis=1).view(np.uint64)[:, 0]

    def nearly_same(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Say for each pair of images whether they are nearly the same. The arrays have the indices of the two."""
        smaller_side = np.minimum(self.sides[first], self.sides[second])
        larger_side = np.maximum(self.sides[first], self.sides[second])
        # Images that are both enlarged to thumbnails lose nothing by that, so their limits are those of SIDE.
        limiting_side = np.where(larger_side < SIDE, SIDE, smaller_side.clip(SMALLEST, LARGEST))
        lower_contrast = np.minimum(self.contrast[first], self.contrast[second])
        higher_contrast = np.maximum(self.contrast[first], self.contrast[second])
        # The largest difference in units of the limits, at the contrast of the image with the lower one
        difference = np.abs(self.looks[first] - self.looks[second]).max(1) * lower_contrast.clip(FAINT)
        brighter = np.abs(self.brightness[first] - self.brightness[second])
        similar_contrast = higher_contrast < MOST_CONTRAST * lower_contrast
        return (difference < SIDE / limiting_side) & (brighter < MOST_BRIGHTER) & similar_contrast


def _means_of_squares(planes: np.ndarray, side: int) -> np.ndarray:
    """Average squares of `side` x `side` values, in planes of images x channels x rows x columns."""
    return planes.reshape(*planes.shape[:2], planes.shape[2] // side, side, -1, side).mean((3, 5))


def near_pairs(thumbnails: Thumbnails) -> np.ndarray:
    """Find the pairs of images that are nearly the same, without images almost of one colour.

    Returns their indices (pairs x 2), each pair once, with the first index below the second.
    """
    not_flat = np.flatnonzero(~thumbnails.flat)
    near = [np.empty((0, 2), np.int64)]
    for candidates in _candidates(thumbnails.codes[not_flat]):
        pairs = not_flat[candidates]
        for begin in range(0, len(pairs), AT_ONCE):
            block = pairs[begin : begin + AT_ONCE]
            near.append(block[thumbnails.nearly_same(block[:, 0], block[:, 1])])
    return np.unique(np.concatenate(near), axis=0)


def _candidates(codes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield pairs of codes that differ in few bits (pairs x 2), some pairs several times.

    The first index of a pair is below the second. If two codes differ in 7 bits, one of the 4 bands differs in at most
    one bit. So each band is looked up with each of its bits changed, in the list of images sorted by that band.
    """
    bits = BITS // BANDS
    changes = [0, *(1 << bit for bit in range(bits))]
    for band in range(BANDS):
        values = (codes >> np.uint64(band * bits)).astype(np.int64) & ((1 << bits) - 1)
        order = np.argsort(values, kind="stable")
        begins = np.searchsorted(values[order], np.arange((1 << bits) + 1))
        for change in changes:
            wanted_values = values ^ change
            for first, position in _images_with_positions(begins[wanted_values], np.diff(begins)[wanted_values]):
                second = order[position]
                near = (first < second) & (np.bitwise_count(codes[first] ^ codes[second]) <= MOST_BITS)
                yield np.stack([first[near], second[near]], axis=1)


def _images_with_positions(begins: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each image with each of its positions, as two arrays of equal length, about PAIRS values at once.

    The positions of image i are the `counts[i]` numbers from `begins[i]` on.
    """
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        pairs_before = ends[first - 1] if first else 0
        until = max(first + 1, int(np.searchsorted(ends, pairs_before + PAIRS, side="right")))
        block = slice(first, until)
        images = np.repeat(np.arange(first, until), counts[block])
        number_in_image = np.arange(len(images)) - np.repeat(ends[block] - counts[block] - pairs_before, counts[block])
        yield images, begins[images] + number_in_image
        first = until
