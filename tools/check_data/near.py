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
# Axes of images x channels x height x width
ALL_BUT_IMAGES = (1, 2, 3)
HEIGHT_AND_WIDTH = (2, 3)


class Thumbnails:
    """The properties of thumbnails by which near copies are found.

    `pixels`: images x channels x SIDE x SIDE, uint8. `sides`: pixels of the shorter side of each image.
    """

    def __init__(self, pixels: np.ndarray, sides: np.ndarray) -> None:
        """Compute the properties of each thumbnail, AT_ONCE images at a time.

        `flat`: whether it is almost of one colour. `looks`: what is compared, computed as if all images had the same
        brightness and contrast. `codes`: 64 bits by which similar looks are looked up.
        """
        count, channels = pixels.shape[:2]
        self.sides = sides
        self.flat = np.zeros(count, bool)
        self.brightness = np.zeros(count, np.float32)
        self.contrast = np.zeros(count, np.float32)
        # Lightness of all blocks, then lightness and colour of all squares of 2 x 2 blocks. Each value is divided by
        # the most by which near copies differ in it, so that one limit holds for all.
        width = BLOCKS**2 + (1 + channels) * (BLOCKS // 2) ** 2
        self.looks = np.zeros((count, width), np.float16)
        # Each bit of a code says on which side of a random plane the looks are. So similar looks have similar codes.
        self.codes = np.zeros(count, np.uint64)
        normals_of_planes = np.random.default_rng(0).standard_normal((width, BITS)).astype(np.float32)
        lightness_weights = LIGHTNESS.get(channels, np.full(channels, 1 / channels, np.float32))
        for first in range(0, count, AT_ONCE):
            part = slice(first, first + AT_ONCE)
            planes = pixels[part].astype(np.float32)  # images x channels x height x width
            blocks = _means_of_squares(planes, side=SIDE // BLOCKS)
            brightness = blocks.mean(ALL_BUT_IMAGES)
            # The contrast of blocks, since resizing takes contrast from thin lines.
            contrast = np.maximum(np.sqrt(blocks.var(HEIGHT_AND_WIDTH).mean(1)), 1.0)
            colour = (blocks - brightness[:, None, None, None]) / contrast[:, None, None, None]
            lightness = np.einsum("nchw,c->nhw", colour, lightness_weights)[:, None]
            properties = (
                lightness / IN_BLOCKS,
                _means_of_squares(lightness, side=2) / IN_AREAS,
                _means_of_squares(colour, side=2) / IN_COLOUR,
            )
            looks = np.concatenate([values.reshape(len(planes), -1) for values in properties], axis=1)
            self.flat[part] = np.sqrt(planes.var(HEIGHT_AND_WIDTH).mean(1)) < FLAT
            self.brightness[part] = brightness
            self.contrast[part] = contrast
            self.looks[part] = looks
            bits = looks @ normals_of_planes > 0  # images x 64: 8 bytes, which are one uint64
            self.codes[part] = np.packbits(bits, axis=1).view(np.uint64)[:, 0]

    def nearly_same(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Tell which pairs of images are near copies, as a mask. The images `first[i]` and `second[i]` are a pair."""
        smaller_side = np.minimum(self.sides[first], self.sides[second])
        larger_side = np.maximum(self.sides[first], self.sides[second])
        # The thumbnail of a larger image averages over more pixels, so near copies differ less: the limit is 1 for
        # images of SIDE pixels, and shrinks as 1 / side. For smaller images it grows, but not if both are enlarged to
        # thumbnails, which loses nothing.
        side = np.where(larger_side < SIDE, SIDE, smaller_side.clip(SMALLEST, LARGEST))
        most_difference = SIDE / side
        # The largest difference in any property. The looks are in units of the contrast; times the contrast, they are
        # in units of the limits in shades.
        low_contrast = np.minimum(self.contrast[first], self.contrast[second])
        high_contrast = np.maximum(self.contrast[first], self.contrast[second])
        difference = np.abs(self.looks[first] - self.looks[second]).max(1) * low_contrast.clip(FAINT)
        brighter = np.abs(self.brightness[first] - self.brightness[second])
        has_similar_contrast = high_contrast < MOST_CONTRAST * low_contrast
        return (difference < most_difference) & (brighter < MOST_BRIGHTER) & has_similar_contrast


def _means_of_squares(planes: np.ndarray, side: int) -> np.ndarray:
    """Average planes (images x channels x height x width) over squares of `side` x `side` pixels."""
    return planes.reshape(*planes.shape[:2], planes.shape[2] // side, side, -1, side).mean((3, 5))


def near_pairs(thumbnails: Thumbnails) -> np.ndarray:
    """Find the pairs of images that are nearly the same: pairs x 2, the first index below the second."""
    # Images almost of one colour have no near copies.
    not_flat = np.flatnonzero(~thumbnails.flat)
    near = [np.empty((0, 2), np.int64)]
    for candidates in _candidates(thumbnails.codes[not_flat]):
        pairs = not_flat[candidates]  # candidates are indices in `not_flat`
        for begin in range(0, len(pairs), AT_ONCE):
            part = pairs[begin : begin + AT_ONCE]
            near.append(part[thumbnails.nearly_same(part[:, 0], part[:, 1])])
    return np.unique(np.concatenate(near), axis=0)


def _candidates(codes: np.ndarray) -> Iterator[np.ndarray]:
    """Yield pairs of codes that differ in few bits: arrays of pairs x 2 indices, the first index below the second.

    A code is 64 bits that describe an image. No image is compared with all others. Instead a code is cut into 4 bands
    of 16 bits. If two codes differ in at most 7 bits, they differ in at most one bit in some band, because 2 bits in
    each of 4 bands would be 8. So each band of each image is looked up, as it is and with each of its bits changed,
    among the same bands of all images. A pair may be yielded several times.
    """
    width = BITS // BANDS
    changes = [0] + [1 << bit for bit in range(width)]  # none, or a single bit
    for band in range(BANDS):
        values = (codes >> np.uint64(band * width)).astype(np.int64) & ((1 << width) - 1)
        # All images sorted by this band. Those with the value v are in `order` from begins[v] to begins[v + 1].
        order = np.argsort(values, kind="stable")
        begins = np.searchsorted(values[order], np.arange((1 << width) + 1))
        counts = np.diff(begins)
        for change in changes:
            values_to_find = values ^ change
            for first, place in _each_with_its_places(begins[values_to_find], counts[values_to_find]):
                second = order[place]
                different_bits = np.bitwise_count(codes[first] ^ codes[second])
                near = (first < second) & (different_bits <= MOST_BITS)
                yield np.stack([first[near], second[near]], axis=1)


def _each_with_its_places(begins: np.ndarray, counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of an image and a place, as two arrays: for image i the places from begins[i], counts[i] of them.

    For begins [5, 8] and counts [2, 1], the images are [0, 0, 1], and the places [5, 6, 8]. To save memory, about PAIRS
    pairs are yielded at once: those of as many whole images as fit, at least one.
    """
    pairs_up_to = np.cumsum(counts)  # of this image and all before it
    first = 0
    while first < len(counts):
        pairs_before = pairs_up_to[first - 1] if first > 0 else 0
        end_that_fits = int(np.searchsorted(pairs_up_to, pairs_before + PAIRS, side="right"))
        end = max(first + 1, end_that_fits)
        part = slice(first, end)
        images = np.repeat(np.arange(first, end), counts[part])
        first_pair_of_image = np.repeat(pairs_up_to[part] - counts[part] - pairs_before, counts[part])
        number_of_place = np.arange(len(images)) - first_pair_of_image  # from 0 for each image
        yield images, begins[images] + number_of_place
        first = end
