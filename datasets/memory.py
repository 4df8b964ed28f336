"""Data sets of small images in device memory, which make and augment a whole batch at once.

Each sample has its own random numbers, so its pixels do not depend on the rest of its batch.
"""

import copy

import numpy as np
import torch

from datasets.base import PAD, PADDING, Batch, ImageDataset, Key, Samples, mean_colour, sample_table
from utils.config.data import DataConfig
from utils.config.train import TrainConfig
from vitamp.resize import Resized
from vitamp.sizes import ImageSize, sides


class BatchAffine:
    """Shifts, zooms and rotates a whole batch at once, with each sample's own random numbers."""

    COLUMNS = 5

    def __init__(self, data: DataConfig, device: torch.device) -> None:
        self.data = data
        high, wide = sides(data.IMAGE_SIZE)
        y, x = ((torch.arange(side, dtype=torch.float32, device=device) * 2 + 1) / side - 1 for side in (high, wide))
        self.x = x[None, None, :]
        self.y = y[None, :, None]
        self.aspect = wide / high

    def matrices(self, uniform: np.ndarray) -> torch.Tensor:
        """Make the affine transform of each sample from its row of five uniform random numbers.

        Returns a row (a, b, c, d, e, f) per sample: the output pixel (x, y) shows the input at (a x + b y + c,
        d x + e y + f). That is the inverse of the shift, zoom and rotation that are drawn.
        """
        data = self.data
        is_changed = uniform[:, 0] < data.AFFINE_PROB
        # Numbers from -1 to 1; 0 for samples that stay as they are.
        signed = (np.where(is_changed, 2 * column - 1, 0.0) for column in uniform[:, 1:].T)
        unit_x, unit_y, unit_zoom, unit_angle = signed
        shift_x = 2 * data.SHIFT * unit_x  # both axes go from -1 to 1, so the image is 2 wide
        shift_y = 2 * data.SHIFT * unit_y
        zoom = 1 + data.ZOOM * unit_zoom
        angle = np.deg2rad(data.ROTATE * unit_angle)
        a = np.cos(angle) / zoom
        sine = np.sin(angle) / zoom
        # The rotation is one of pixels. Both axes go from -1 to 1, so the ratio of the sides enters.
        b = sine / self.aspect
        d = -sine * self.aspect
        e = a
        # The output shows the centre of the input at (shift_x, shift_y).
        c = -a * shift_x - b * shift_y
        f = -d * shift_x - e * shift_y
        rows = np.stack([a, b, c, d, e, f], axis=1)
        return torch.from_numpy(rows.astype(np.float32))

    def __call__(self, images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Transform images (uint8, B x C x H x W); both arguments are on the device."""
        # Elementwise products: the rounding of affine_grid's matrix product can depend on the batch size.
        a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
        grid = torch.stack([a * self.x + b * self.y + c, d * self.x + e * self.y + f], dim=-1)
        moved = torch.nn.functional.grid_sample(images.float(), grid, mode="bilinear", align_corners=False)
        return moved.round_().clamp_(0, 255).to(torch.uint8)


class ArraySamples(Samples):
    """Labelled images as one array of pixels (N x H x W x C, uint8)."""

    stored = "pixels"

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, classes: list[str], owner: str) -> None:
        # Channels last in memory, as from a decoder: resizing relies on it.
        self.pixels = np.ascontiguousarray(pixels)
        self.labels = labels
        self.classes = classes
        self.owner = owner

    def read(self, index: int) -> np.ndarray:
        return self.pixels[index]

    def name(self, index: int) -> str:
        return f"{self.owner}:{index}"

    def stamp(self, index: int) -> str:
        return ""


class InMemory(ImageDataset):
    """A split that is held on the device, at the size that its images are stored in."""

    in_memory = True

    def __init__(
        self, samples: ArraySamples, data: DataConfig, train: bool, seed: int, device: torch.device, cropped: bool
    ) -> None:
        """Copy the images of a split to the device. `cropped=False`: no crop and no flip, also in training."""
        self.samples = samples
        self.classes = samples.classes
        self.data = data
        self.seed = seed
        self.device = device
        self.train = train
        self.cropped = cropped
        self.images = planes(samples.pixels, data.IMAGE_CHANNELS).to(device)
        self.labels = torch.from_numpy(samples.labels).to(device)
        # Only validation cuts an image to the model's shape. In training, crops are shifts of the whole image.
        self.squeezed = not cropped or train or data.CROP == "none"
        self.margin = PAD if train and cropped and data.CROP == "pad" else 0
        self.flip = data.FLIP if train and cropped else 0.0
        self.vertical_flip = data.VERTICAL_FLIP if train and cropped else 0.0
        self.makes_crops = self.margin > 0 or self.flip > 0 or self.vertical_flip > 0
        self.affine = BatchAffine(data, device) if train and data.has_affine else None
        self._transforms: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        """Epoch -> its random crops and affine matrices; see `_transforms_of`"""

    def __len__(self) -> int:
        return len(self.labels)

    def sample_labels(self) -> np.ndarray:
        return self.samples.labels

    def augment(self, train: TrainConfig) -> ImageDataset:
        """Return this split with the single-image augmentations of TRAIN.

        They work on images read one by one, in loading processes. So a training split with such augmentations becomes
        `Images`; a split that is not cropped takes none, and logs a warning.
        """
        if not self.cropped:
            return super().augment(train)
        if self.train and train.single_image_keys:
            from datasets.images import Images

            return Images(self.samples, self.data, self.train, self.seed).augment(train)
        return self

    def at_size(self, size: ImageSize) -> ImageDataset:
        other = copy.copy(self)
        other.data = self.data.changed(IMAGE_SIZE=size)
        other.affine = BatchAffine(other.data, self.device) if self.affine else None
        other._transforms = {}
        return other

    def __getitems__(self, keys: list[Key]) -> Batch:
        """Make a batch of these samples. In training, all keys must be of one epoch."""
        indices = torch.tensor([index for _, index in keys]).to(self.device, non_blocking=True)
        chosen = indices.clamp(min=0)  # padding (-1) takes the first image, which is blackened below
        labels = self.labels[chosen]
        images = resized(self.images[chosen], self.data, self.squeezed)
        if self.train:
            epoch, _ = keys[0]
            crops, matrices = self._transforms_of(epoch)
            if crops is not None:
                images = self._cropped(images, crops[chosen])
            if self.affine is not None and matrices is not None:
                images = self.affine(images, matrices[chosen])
        images = images.expand(-1, self.data.IMAGE_CHANNELS, -1, -1).contiguous()
        # With one channel, the strides can also read as channels-last, which convolutions would pass on to their
        # outputs. A view of the same shape has the strides of a plain tensor.
        images = images.view(images.shape)
        if any(index == PADDING for _, index in keys):
            real = indices != PADDING
            images = images * real[:, None, None, None]
            labels = labels * real
        return Batch(images, labels, indices)

    def _cropped(self, images: torch.Tensor, crops: torch.Tensor) -> torch.Tensor:
        """Pad images with a black margin, crop each back to its size at its own place, and flip some.

        `images`: B x C x H x W. `crops`: for each image its crop's top and left edge in the padded image, 1 if it is
        mirrored, and 1 if it is turned upside down.
        """
        high, wide = images.shape[-2:]
        top, left, mirrored, upside_down = crops[:, :, None].unbind(1)  # each B x 1
        if self.margin > 0:
            images = torch.nn.functional.pad(images, (self.margin,) * 4)
        row = torch.arange(high, device=images.device)
        column = torch.arange(wide, device=images.device)
        # The padded image's columns and rows that each output shows: B x W and B x H.
        columns = left + torch.where(mirrored > 0, wide - 1 - column, column)
        rows = top + torch.where(upside_down > 0, high - 1 - row, row)
        # Gather from the flattened image, whose pixel (row, column) has the index row * padded width + column.
        padded_width = images.shape[-1]
        indices = (rows[:, :, None] * padded_width + columns[:, None, :]).flatten(1)
        images = images.flatten(2).gather(2, indices[:, None].expand(-1, images.shape[1], -1))
        return images.unflatten(2, (high, wide))

    def _transforms_of(self, epoch: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Draw the random crops and affine matrices of an epoch, with one row per sample; None for a kind that is off.

        A row of the crops: top edge, left edge, 1 for a mirrored image, 1 for an image turned upside down. A row of the
        matrices: see `BatchAffine.matrices`.
        """
        if epoch in self._transforms:
            return self._transforms[epoch]
        crops = matrices = None
        # The first columns of random numbers belong to the affine transform, even if it is off, so that crops are the
        # same with and without it.
        affine_columns = BatchAffine.COLUMNS
        if self.makes_crops or self.affine is not None:
            columns = affine_columns
            if self.makes_crops:
                # Top edge, left edge and mirroring take three columns, turning upside down a fourth. One column more
                # changes all numbers of the table, so runs without DATA.VERTICAL_FLIP draw only three.
                columns += 4 if self.vertical_flip > 0 else 3
            uniform = sample_table(self.seed, epoch, len(self), columns)
            if self.affine is not None:
                matrices = self.affine.matrices(uniform[:, :affine_columns]).to(self.device, non_blocking=True)
            if self.makes_crops:
                edges = (uniform[:, affine_columns : affine_columns + 2] * (2 * self.margin + 1)).astype(np.int64)
                mirrored = uniform[:, affine_columns + 2] < self.flip
                # Without DATA.VERTICAL_FLIP, the last column is another one, but no number in it is below 0.
                upside_down = uniform[:, -1] < self.vertical_flip
                crops = torch.from_numpy(np.c_[edges, mirrored, upside_down])
                crops = crops.to(self.device, non_blocking=True)
        self._transforms[epoch] = crops, matrices
        # Keep as many epochs as there are copies of a sample: `variants.Repeated` gives each copy an epoch number of
        # its own, and a batch can need the numbers of all of them.
        while len(self._transforms) > self.copies:
            del self._transforms[next(iter(self._transforms))]
        return crops, matrices


def resized(images: torch.Tensor, data: DataConfig, squeezed: bool) -> torch.Tensor:
    """Resize images (B x C x H x W) to the model's size: squeezed, or else cropped by DATA.CROP_MODE."""
    mode = "none" if squeezed else data.CROP_MODE
    if mode == "border":  # the mean may be no grey
        images = images.expand(-1, data.IMAGE_CHANNELS, -1, -1)
    border = mean_colour(data)[: images.shape[1]]
    return Resized(data.IMAGE_SIZE, mode, data.CROP_PCT, data.INTERPOLATION, border)(images)


def planes(pixels: np.ndarray, channels: int) -> torch.Tensor:
    """Convert N x H x W x C to N x C x H x W, and colour to grey with PIL's weights if `channels` is 1."""
    if channels == 1 and pixels.shape[-1] == 3:
        weighed = pixels @ np.array([19595, 38470, 7471], dtype=np.uint32) + np.uint32(0x8000)
        pixels = (weighed >> 16).astype(np.uint8)[..., None]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
