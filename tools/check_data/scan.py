"""Scan of a data set: loading processes decode every image once, whole, and note what the checks compare."""

import hashlib
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datasets import decoding
from datasets.base import Encoded, Key, Samples, dtype_of
from datasets.damage import Failure, failure_or
from datasets.examine.copies import digest_of
from datasets.examine.findings import Scan, Split
from datasets.loading.loader import Plan
from datasets.loading.workers import LoadingProcesses
from datasets.transforms.pixels import Pixels
from engine.inputs.batches import Inputs
from tools.check_data.near import SIDE, Thumbnails
from tools.common.ranks import gather
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError
from utils.progress import Progress

CHUNK = 32
"""Images that a loading process scans at once"""
PREFETCH = 2
"""Chunks per loading process that are loaded ahead"""
KINDS = {"empty": decoding.EMPTY, "no image": decoding.UNKNOWN_FORMAT, "too large": decoding.TOO_LARGE}
"""Kind of problem -> text in the decoder's message about it"""
SHADES = 48
"""Shades of a thumbnail of bands, of 255, that make one standard deviation"""


def scan_split(title: str, samples: Samples, data: DataConfig, workers: int, world: World = ALONE) -> Split:
    """Scan every image of a split in `workers` processes, or in this one for 0 workers.

    With several ranks, each scans some images; rank 0 returns the scans of all, other ranks none.
    """
    all_chunks = [np.arange(begin, min(begin + CHUNK, len(samples))) for begin in range(0, len(samples), CHUNK)]
    chunks = all_chunks[world.rank :: world.size]
    uses_processes = bool(workers and chunks)
    plan = Plan()  # sampler of the loader; gets its batches below, once the processes can begin
    loader = DataLoader(
        _Scanner(samples, data),
        batch_sampler=plan,
        num_workers=min(workers, len(chunks)),
        prefetch_factor=PREFETCH if uses_processes else None,
        collate_fn=list,
        generator=torch.Generator(),  # its own: the loader draws a seed, and torch's generator stays as it is
        persistent_workers=uses_processes,
    )
    scanned_chunks: list[list[Scan]] = []
    bar = Progress(None, sum(map(len, chunks)), "images", title, world.first)
    with warnings.catch_warnings(action="ignore"), bar:
        processes = LoadingProcesses(loader) if uses_processes else None
        plan.begin((0, chunk) for chunk in chunks)  # as (epoch, samples); a scan has no epochs
        try:
            if processes is not None:
                processes.begin()
            for scans in processes or loader:
                scanned_chunks.append(scans)
                bar.update(len(scans))
        except TrainingError as death:
            # A process died at an image of the chunk that is awaited, or of one that is loaded ahead, by any rank.
            awaited_chunk = chunks[len(scanned_chunks)]
            first_name = samples.name(int(awaited_chunk[0]))
            images_in_progress = CHUNK * workers * PREFETCH * world.size
            suspects = f"{first_name} or one of the next {images_in_progress - 1} images"
            raise TrainingError(f"{death} If an image caused this, it is {suspects} of the {title} split.") from None
        finally:
            if processes is not None:
                processes.end()
    return Split(title, samples, list(itertools.chain.from_iterable(gather(scanned_chunks, world))))


def thumbnails_of(scans: Sequence[Scan]) -> Thumbnails:
    """Put the thumbnails of these images together, so that they can be compared. All of them must be readable."""
    pixels = np.frombuffer(b"".join(scan.thumbnail for scan in scans), np.uint8)
    shorter_sides = np.array([min(scan.header.size) for scan in scans])
    return Thumbnails(pixels.reshape(len(scans), -1, SIDE, SIDE), shorter_sides)


class _Scanner(Dataset[Any]):
    """Map-style data set for a loading process, whose items are scans of images instead of their pixels."""

    def __init__(self, samples: Samples, data: DataConfig) -> None:
        self.samples = samples
        self.data = data
        self.inputs = Inputs(data)
        # Images are decoded whole: training's fastest decoders may stop at the end of a crop and miss damage behind it.
        # And they are resized whole, to the thumbnails that are compared with each other.
        self.pixels = Pixels(data.changed(CROP="none", IMAGE_SIZE=SIDE), train=False)
        self.by_simplejpeg = decoding.decoder_of_jpeg() == "simplejpeg"
        # Buffer into which each image is resized, one after another.
        self.small_image = torch.empty(data.IMAGE_CHANNELS, SIDE, SIDE, dtype=dtype_of(data))
        self.storage_failures = 0  # images in a row that could not be read from storage

    def __getitems__(self, keys: list[Key]) -> list[Scan]:
        """Scan a chunk of images. A key is an epoch, which has no effect here, and the index of an image."""
        indices = [index for _, index in keys]
        self.samples.prefetch(indices)
        return [self._scan(index) for index in indices]

    def _scan(self, index: int) -> Scan:
        """Decode an image, and return what the checks need of it: its problem, or hashes, header and thumbnail."""
        # Retried after errors of the storage, unless many images in a row had such errors.
        decoded = failure_or(lambda: self._decode(index), self.storage_failures)
        if isinstance(decoded, Failure):
            if decoded.kind == "storage":
                self.storage_failures += 1
            # The decoder's message tells more exactly what is wrong.
            problems = [kind for kind, message in KINDS.items() if message in decoded.reason]
            problem = problems[0] if problems else decoded.kind
            return Scan(decoding.Header("", (0, 0)), problem, decoded.reason)
        self.storage_failures = 0
        encoded, pixels = decoded

        # Some damaged JPEG files decode without an error; only simplejpeg can warn of them.
        damage = ""
        if self.by_simplejpeg and isinstance(encoded, bytes) and encoded.startswith(decoding.JPEG_START):
            damage = decoding.damage_of(encoded)

        # Images are the same if their pixels are. But images of one colour have equal pixels without being copies, so
        # these are compared by their bytes.
        digest_of_bytes = digest_of(encoded)
        same = digest_of_bytes
        has_several_colours = (pixels != pixels[0, 0]).any()
        if has_several_colours:
            same = hashlib.blake2b(pixels.tobytes(), digest_size=16, key=str(pixels.shape).encode()).digest()

        header = decoding.header_of(encoded, self.data)
        thumbnail = self.small_image  # `_decode` has resized the image into it
        if not self.data.is_plain:
            blank = [str(number) for number, band in enumerate(self.small_image, 1) if band.min() == band.max()]
            if blank:
                header = header._replace(mode=f"blank: band {', '.join(blank)}")
            # Normalised before it becomes 8 bits: else images that use 12 of 16 bits would all be dark, and look alike.
            normalised = self.inputs(self.small_image[None])[0]
            thumbnail = (normalised * SHADES + 128).round().clamp(0, 255).byte()
        return Scan(header, digest=digest_of_bytes, same=same, damage=damage, thumbnail=thumbnail.numpy().tobytes())

    def _decode(self, index: int) -> tuple[Encoded, np.ndarray]:
        """Read an image, write it into `small_image`, resized, and return the stored image and its pixels."""
        encoded = self.samples.read(index)
        pixels, view = self.pixels.decode(encoded)
        resized = self.pixels.resize(pixels, view, None)
        self.pixels.finish(resized, self.small_image.numpy().transpose(1, 2, 0))
        return encoded, pixels
