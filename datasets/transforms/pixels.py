"""Preprocess one image: from the stored file to pixels of the model's size, not yet normalised.

Photographs stay in uint8. Bands, of other depths or numbers of channels, are float32, in which no value is lost.

Numbers come before pixels: the header gives the size, the sample's random numbers the crop, and only then is the image
decoded. The crop and the resizing do not depend on the decoder.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from PIL import Image

from datasets.base import PAD, Box, Encoded, shades_of_mean
from datasets.decoding import Reader, decoder_of_jpeg, decoding_errors
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from utils.seeding import seed_host
from vitamp.resize import resized_size
from vitamp.sizes import sides

if TYPE_CHECKING:
    from datasets.transforms.augment import ImageChange

TRIES = 10
"""Random shapes to try before falling back to a centre crop, as in torchvision and timm."""
REACH = {"bicubic": 2, "bilinear": 1}
"""Radius of the interpolation filter, in pixels of the smaller image."""


class View(NamedTuple):
    """The part of an image that the model sees, and how it is resized.

    It begins at (`left`, `top`) of the image and becomes `columns` x `rows` pixels, each of which covers `x_scale` x
    `y_scale` pixels of the image. `box` holds all image pixels that contribute. In training these are the crop itself.
    In validation, the surrounding pixels contribute at the borders, because the image is resized before it is cropped.
    """

    box: Box
    left: float
    top: float
    x_scale: float
    y_scale: float
    columns: int
    rows: int


def whole(box: Box, data: DataConfig) -> View:
    """Return the view of a whole `box`, resized to the model's input."""
    rows, columns = sides(data.IMAGE_SIZE)
    x_scale = box.width / columns
    y_scale = box.height / rows
    return View(box, box.left, box.top, x_scale, y_scale, columns, rows)


def random_view(data: DataConfig, width: int, height: int) -> View:
    """Draw a random crop with the distribution of torchvision's RandomResizedCrop.

    The ratios of DATA.CROP_RATIO are multiples of the ratio of the model's input: otherwise, training would distort
    images for an input that is no square, and validation never does. `width`, `height`: those of the image.
    """
    rows, columns = sides(data.IMAGE_SIZE)
    draw = random.random
    smallest, largest = data.CROP_SCALE  # fractions of the image's area
    aspect = columns / rows
    narrowest, widest = (ratio * aspect for ratio in data.CROP_RATIO)
    log_narrowest = math.log(narrowest)
    log_widest = math.log(widest)
    for _ in range(TRIES):
        area = width * height * (smallest + (largest - smallest) * draw())
        ratio = math.exp(log_narrowest + (log_widest - log_narrowest) * draw())
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(draw() * (width - w + 1))
            top = int(draw() * (height - h + 1))
            return whole(Box(left, top, w, h), data)
    # No crop fitted into the image: take its centre, in the ratio that is nearest to the image's own.
    ratio = min(max(width / height, narrowest), widest)
    w = min(width, max(1, round(height * ratio)))
    h = min(height, max(1, round(width / ratio)))
    return whole(Box((width - w) // 2, (height - h) // 2, w, h), data)


def squeezed_view(data: DataConfig, width: int, height: int) -> View:
    """Return the view of the whole image, squeezed into the model's input."""
    return whole(Box(0, 0, width, height), data)


def middle_view(data: DataConfig, width: int, height: int) -> View:
    """Return the view of the centre of the resized image, which can be smaller than the model's input.

    `width`, `height`: those of the image.
    """
    resized_width, resized_height = resized_size(data.CROP_MODE, data.IMAGE_SIZE, data.CROP_PCT, width, height)
    rows, columns = sides(data.IMAGE_SIZE)
    rows = min(rows, resized_height)
    columns = min(columns, resized_width)
    # Image pixels per pixel of the resized image.
    x_scale = width / resized_width
    y_scale = height / resized_height
    # The centre in the resized image.
    left = round((resized_width - columns) / 2)
    top = round((resized_height - rows) / 2)
    # The image is decoded from its first pixel to the last one that contributes. From the centre of the last resized
    # pixel (- 0.5), the filter reaches `reach` pixels of the smaller image, with 1 image pixel to be on the safe side.
    reach = REACH[data.INTERPOLATION]
    right = math.ceil((left + columns - 0.5) * x_scale + reach * max(x_scale, 1.0) + 1)
    bottom = math.ceil((top + rows - 0.5) * y_scale + reach * max(y_scale, 1.0) + 1)
    box = Box(0, 0, min(width, right), min(height, bottom))
    return View(box, left * x_scale, top * y_scale, x_scale, y_scale, columns, rows)


Resize = Callable[[np.ndarray, View, np.ndarray | None], np.ndarray]
"""(pixels of the view's box: height x width x channels, the view, output array) -> rows x columns x channels

The result is the output array if resizing can write into it, else a new array.
"""


class TorchResize:
    """Resizes with torch, directly on uint8 or float32."""

    def __init__(self, interpolation: str) -> None:
        # The kernel is called directly, because torch.nn.functional.interpolate takes either a size or a scale, and a
        # view needs both; nor does it write into a given tensor.
        self.kernel = getattr(torch.ops.aten, f"_upsample_{interpolation}2d_aa").out
        self.by_pil = PilResize(interpolation)
        self.interpolation = interpolation
        # Raw pixels are read-only, which is fine here. torch warns of such an array, but only of the first one in a
        # process: let it warn here, where warnings are ignored.
        with warnings.catch_warnings(action="ignore"):
            torch.from_numpy(np.frombuffer(b"read only", dtype=np.uint8))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the kernel, which cannot be pickled: spawned loading processes look it up themselves."""
        return TorchResize, (self.interpolation,)

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:
        """Resize the pixels of the view's box (height x width x channels) to the view's rows and columns.

        The result is `place` if its shape allows the kernel to write into it, else a new array.
        """
        # The kernel has no offset: pixels left of and above the view are resized too, and then cut off. These are their
        # numbers, in resized pixels.
        left = round((view.left - view.box.left) / view.x_scale)
        top = round((view.top - view.box.top) / view.y_scale)
        if left > view.columns or top > view.rows:
            return self.by_pil(pixels, view)  # such a long strip that most of the work would be cut off
        height, width, channels = pixels.shape
        shape = (top + view.rows, left + view.columns, channels)
        # The kernel ignores the scale of an axis whose length does not change.
        ignores_y_scale = shape[0] == height and view.y_scale != 1
        ignores_x_scale = shape[1] == width and view.x_scale != 1
        if ignores_y_scale or ignores_x_scale:
            return self.by_pil(pixels, view)
        if place is not None and place.shape == shape:  # only if nothing has to be cut off
            resized = place
        else:
            resized = np.empty(shape, dtype=pixels.dtype)
        # Channels-last, in and out, as the kernel works; planes would cost a slow conversion.
        source, out = (torch.from_numpy(array).permute(2, 0, 1)[None] for array in (pixels, resized))
        align_corners = False
        self.kernel(source, shape[:2], align_corners, 1 / view.y_scale, 1 / view.x_scale, out=out)
        return resized if resized is place else resized[top:, left:]


class PilResize:
    """Resizes with PIL: slower, and the reference for TorchResize."""

    def __init__(self, interpolation: str) -> None:
        self.filter = Image.Resampling[interpolation.upper()]

    def __call__(self, pixels: np.ndarray, view: View, place: np.ndarray | None = None) -> np.ndarray:
        """Resize the pixels of the view's box (height x width x channels) to the view's rows and columns.

        The result is a new array: PIL cannot write into `place`.
        """
        # The part of `pixels` that the view shows, with fractions of pixels.
        left = view.left - view.box.left
        top = view.top - view.box.top
        right = left + view.columns * view.x_scale
        bottom = top + view.rows * view.y_scale
        height, width, channels = pixels.shape
        shown_box = (left, top, min(right, width), min(bottom, height))  # rounding can exceed the image by a tiny bit
        # PIL has images of 8 bits with 1 or 3 channels. Bands, which are float32, are one image each.
        parts = [pixels] if pixels.dtype == np.uint8 else np.split(pixels, channels, axis=2)
        images = [Image.fromarray(part.squeeze(2) if part.shape[2] == 1 else part) for part in parts]
        size = (view.columns, view.rows)
        resized_images = [np.asarray(image.resize(size, self.filter, box=shown_box)) for image in images]
        return np.dstack(resized_images).reshape(view.rows, view.columns, channels)


class Pixels:
    """Writes the pixels of one sample into its batch.

    Random numbers come from the generators of python, numpy and torch, which the caller seeds for the sample.
    """

    def __init__(self, data: DataConfig, train: bool, augmentation: TrainConfig | None = None) -> None:
        """Choose the steps by the DATA settings. `augmentation`: the TRAIN settings, if a training split uses them."""
        self.channels, self.rows, self.columns = data.shape
        self.reader = Reader(data)
        if not train:
            view = squeezed_view if data.CROP == "none" else middle_view
        elif data.CROP == "random":
            view = random_view
        else:  # the whole image; with DATA.CROP pad, `finish` shifts it
            view = squeezed_view
        self.views = partial(view, data)  # (width, height) of an image -> its view
        resize = PilResize if decoder_of_jpeg() == "pil" else TorchResize
        self.resize: Resize = resize(data.INTERPOLATION)
        self.pad = PAD if train and data.CROP == "pad" else 0  # width of the black margin
        self.flip = data.FLIP if train else 0.0
        self.vertical_flip = data.VERTICAL_FLIP if train else 0.0
        self.mean = shades_of_mean(data)
        # Values around an image that is smaller than the model's input: those of the mean colour, or black.
        self.border = self.mean if data.CROP_MODE == "border" else (0,) * self.channels
        self.changes: list[ImageChange] = []
        self.is_plain = data.is_plain
        if train and augmentation and augmentation.single_image_keys:
            from datasets.transforms.augment import image_changes

            self.changes += image_changes(data, augmentation)
        if train and data.has_affine:
            from datasets.transforms.augment import affine_change

            self.changes.append(affine_change(data))

    def __call__(self, encoded: Encoded, out: torch.Tensor) -> None:
        """Write the pixels to `out` (C x H x W, best in channels-last). Raises Unreadable for a bad image."""
        pixels, view = self.decode(encoded)
        place = out.numpy().transpose(1, 2, 0)
        # All steps work channels-last: if `out` is, resizing writes straight into it, without a copy.
        self.finish(self.resize(pixels, view, place if place.flags.c_contiguous else None), place)

    def decode(self, encoded: Encoded) -> tuple[np.ndarray, View]:
        """Decode the part of the image that the sample shows; returns its pixels and the view to resize them by."""
        with decoding_errors(encoded):
            stored = self.reader.open(encoded)
            view = self.views(stored.width, stored.height)
            return stored.cut(view.box), view

    def finish(self, pixels: np.ndarray, place: np.ndarray) -> None:
        """Pad, mirror and augment the resized pixels, and write them to `place` (H x W x C), the sample in its batch.

        Resizing may have written the pixels there already: then `pixels` is `place`. Pixels smaller than `place` get a
        border: of the mean colour by CROP_MODE border, black by a CROP_PCT above 1.
        """
        height, width, _ = pixels.shape
        if height < self.rows or width < self.columns:
            place[:] = self.border
            # From here on, `place` is the window inside the border. Such pixels are not in it yet.
            top = (self.rows - height) // 2
            left = (self.columns - width) // 2
            place = place[top : top + height, left : left + width]
        if self.pad > 0:
            # A black margin, and a crop of the original size at a random place.
            top = int(random.random() * (2 * self.pad + 1))
            left = int(random.random() * (2 * self.pad + 1))
            padded = np.pad(pixels, ((self.pad, self.pad), (self.pad, self.pad), (0, 0)))
            pixels = padded[top : top + height, left : left + width]
        for axis, chance in ((1, self.flip), (0, self.vertical_flip)):
            if chance > 0 and random.random() < chance:
                pixels = torch.from_numpy(pixels).flip(axis).numpy()  # seven times as fast as numpy
        if self.changes:
            pixels = self.changed(pixels) if self.is_plain else self.changed_bands(pixels)
        if pixels is not place:  # else resizing wrote them there, and no step has made new ones
            np.copyto(place, pixels)  # broadcasts one channel to three

    def changed(self, pixels: np.ndarray) -> np.ndarray:
        """Augment a photograph, whose size stays. A grey one gets the channels of the model's input."""
        is_grey = pixels.shape[2] == 1
        image = Image.fromarray(pixels[:, :, 0] if is_grey else pixels)
        if is_grey and self.channels == 3:
            image = image.convert("RGB")
        for change in self.changes:
            image = change(image)
        return np.asarray(image).reshape(self.rows, self.columns, self.channels)

    def changed_bands(self, pixels: np.ndarray) -> np.ndarray:
        """Augment each band as an image of its own, with the same random numbers. Uncovered corners get its mean."""
        seed = random.getrandbits(32)
        changed = list[np.ndarray]()
        for band, mean in zip(np.moveaxis(pixels, 2, 0), self.mean, strict=True):
            seed_host(seed, "bands")
            # Augmentations fill uncovered corners with 0, which is the mean once it is subtracted.
            image = Image.fromarray(band - np.float32(mean))
            for change in self.changes:
                image = change(image)
            changed.append(np.asarray(image) + np.float32(mean))
        return np.dstack(changed)
