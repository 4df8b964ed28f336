"""Find images that are nearly the same, though not pixel for pixel: encoded again, or resized."""

from collections.abc import Iterator

import numpy as np

SIDE = 32
"""Pixels along each side of a thumbnail"""
BLOCKS = 8
"""Blocks along each side of a thumbnail. JPEG and resizing change pixels much, and blocks little."""
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
"""Weights of the channels in lightness, by their number. Other numbers are bands, which count alike."""
MOST_BRIGHTER = 30.0
"""Difference of brightness, in shades, that copies may have"""
MOST_CONTRAST = 1.25
"""Ratio of contrasts that copies may have"""
BITS = 64
"""Length of a code"""
BANDS = 4
"""Parts of a code by which images are looked up"""
MOST_BITS = 8
"""Different bits of two codes; those of 99 % of the copies of icons of 32 x 32 pixels differ in fewer"""
PAIRS = 1 << 20
"""Pairs held in memory at once"""
AT_ONCE = 4096
"""Images, or pairs, whose pixels are held in memory at once"""
PIXELS_OF_EACH = (1, 2, 3)
"""Axes over which the mean of each image is taken"""


class Thumbnails:
    """The properties of thumbnails by which near copies are found.

    `pixels`: images x channels x SIDE x SIDE, uint8. `sides`: pixels of the shorter side of each image.
    """

    def __init__(self, pixels: np.ndarray, sides: np.ndarray) -> None:
        count, channels = pixels.shape[:2]
        self.sides = sides
        self.flat = np.zeros(count, bool)
        self.brightness = np.zeros(count, np.float32)
        self.contrast = np.zeros(count, np.float32)
        # Lightness of all blocks, then lightness and colour of all squares of 2 x 2 blocks, as if all images had the
        # same brightness and contrast. Each value is divided by its limit above.
        width = BLOCKS**2 + (1 + channels) * (BLOCKS // 2) ** 2
        self.looks = np.zeros((count, width), np.float16)
        # Each bit of a code says on which side of a random plane the looks are. So similar looks have similar codes.
        self.codes = np.zeros(count, np.uint64)
        directions = np.random.default_rng(0).standard_normal((width, BITS)).astype(np.float32)
        lightness_weights = LIGHTNESS.get(channels, np.full(channels, 1 / channels, np.float32))
        for first in range(0, count, AT_ONCE):
            part = slice(first, first + AT_ONCE)
            planes = pixels[part].astype(np.float32)
            blocks = _means_of_squares(planes, SIDE // BLOCKS)
            brightness = blocks.mean(PIXELS_OF_EACH)
            # The contrast of blocks, since resizing takes contrast from thin lines.
            contrast = np.maximum(np.sqrt(blocks.var((2, 3)).mean(1)), 1.0)
            colour = (blocks - brightness[:, None, None, None]) / contrast[:, None, None, None]
            lightness = np.einsum("nchw,c->nhw", colour, lightness_weights)[:, None]
            properties = (
                lightness / IN_BLOCKS,
                _means_of_squares(lightness, 2) / IN_AREAS,
                _means_of_squares(colour, 2) / IN_COLOUR,
            )
            looks = np.concatenate([values.reshape(len(planes), -1) for values in properties], axis=1)
            self.flat[part] = np.sqrt(planes.var((2, 3)).mean(1)) < FLAT
            self.brightness[part] = brightness
            self.contrast[part] = contrast
            self.looks[part] = looks
            self.codes[part] = np.packbits(looks @ directions > 0, axis=1).view(np.uint64)[:, 0]

    def nearly_same(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Compare pairs of images, given by the indices of their first and second ones: a mask of the near copies."""
        smaller = np.minimum(self.sides[first], self.sides[second])
        larger = np.maximum(self.sides[first], self.sides[second])
        # Images that are both enlarged to thumbnails lose nothing by that.
        side = np.where(larger < SIDE, SIDE, smaller.clip(SMALLEST, LARGEST))
        low_contrast = np.minimum(self.contrast[first], self.contrast[second])
        high_contrast = np.maximum(self.contrast[first], self.contrast[second])
        # The largest difference in any property, in the contrast that the images have.
        difference = np.abs(self.looks[first] - self.looks[second]).max(1) * low_contrast.clip(FAINT)
        brighter = np.abs(self.brightness[first] - self.brightness[second])
        similar_contrast = high_contrast < MOST_CONTRAST * low_contrast
        return (difference < SIDE / side) & (brighter < MOST_BRIGHTER) & similar_contrast


def _means_of_squares(planes: np.ndarray, side: int) -> np.ndarray:
    """Average planes (images x channels x height x width) over squares of `side` x `side` pixels."""
    return planes.reshape(*planes.shape[:2], planes.shape[2] // side, side, -1, side).mean((3, 5))


def near_pairs(thumbnails: Thumbnails) -> np.ndarray:
    """Find the pairs of images that are nearly the same: pairs x 2, the first index below the second."""
    not_flat = np.flatnonzero(~thumbnails.flat)
    found = [np.empty((0, 2), np.int64)]
    for candidates in _candidates(thumbnails.codes[not_flat]):
        pairs = not_flat[candidates]
        for begin in range(0, len(pairs), AT_ONCE):
            part = pairs[begin : begin + AT_ONCE]
            found.append(part[thumbnails.nearly_same(part[:, 0], part[:, 1])])
    return np.unique(np.concatenate(found), axis=0)


def _candidates(codes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield pairs of codes that differ in few bits, some of them several times; the first index below the second.

    If two codes differ in at most 7 bits, one of their 4 bands differs in at most one bit; so do most that differ in 8.
    So each band is looked up as it is and with each of its bits changed, in the list of images sorted by that band. No
    image is compared with all others.
    """
    width = BITS // BANDS
    changes = [0] + [1 << bit for bit in range(width)]
    for band in range(BANDS):
        values = (codes >> np.uint64(band * width)).astype(np.int64) & ((1 << width) - 1)
        order = np.argsort(values, kind="stable")
        # The images with the value v are in `order` from begins[v] to begins[v + 1].
        begins = np.searchsorted(values[order], np.arange((1 << width) + 1))
        counts = np.diff(begins)
        for change in changes:
            wanted = values ^ change
            for first, place in _places_of_images(begins[wanted], counts[wanted]):
                second = order[place]
                near = (first < second) & (np.bitwise_count(codes[first] ^ codes[second]) <= MOST_BITS)
                yield np.stack([first[near], second[near]], axis=1)


def _places_of_images(begins: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield each image with each of its places, as two arrays of about PAIRS numbers at once.

    Each image has as many places as `counts` says, one after another from the one in `begins` on.
    """
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        pairs_before = ends[first - 1] if first else 0
        end = max(first + 1, int(np.searchsorted(ends, pairs_before + PAIRS, side="right")))
        part = slice(first, end)
        images = np.repeat(np.arange(first, end), counts[part])
        first_pair_of_image = np.repeat(ends[part] - counts[part] - pairs_before, counts[part])
        number_of_place = np.arange(len(images)) - first_pair_of_image  # from 0 for each image
        yield images, begins[images] + number_of_place
        first = end
