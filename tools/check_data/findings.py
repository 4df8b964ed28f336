"""Scan of a data set, in which every image is decoded once; near copies; defects and notes, and their report."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch.utils.data import DataLoader, Dataset

from datasets import decoding
from datasets.base import Encoded, Key, Samples, dtype_of
from datasets.damage import Failure, failure_or
from datasets.examine import RARE, rare_formats
from datasets.exclude import line_of, name_prefix, text_of
from datasets.labels import distinct_names, images_of_classes
from datasets.loading.loader import Plan
from datasets.loading.workers import LoadingProcesses
from datasets.transforms.pixels import Pixels
from engine.inputs.batches import Inputs
from tools.common.ranks import gather
from utils.config.data import DataConfig
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError
from utils.log import log
from utils.program import started_as
from utils.progress import Progress
from utils.text import some_of
from vitamp.sizes import ImageSize, sides

SIDE, CELLS, BLOCKS = 32, 16, 8
"""Pixels along each side of a thumbnail; its cells, compared in lightness, and its blocks, compared in colour"""
FLAT = 6.0
"""Contrast (standard deviation in a channel, of 255 shades) of images almost of one colour: they have no near copies"""
MOST_APART = {1: 30.0, 2: 9.0, 4: 4.0}
MOST_IN_COLOUR = 9.0
"""Most shades by which near copies of SIDE x SIDE pixels differ: in lightness, in squares of so many cells along each
side; and in a channel, in squares of 2 x 2 blocks. JPEG and resizing change pixels much and areas little.

The limits shrink as the images grow, since thumbnails show less of either.
"""
SMALLEST, LARGEST = 16, 128
"""Pixels of a shorter side between which the limits shrink"""
FAINT = 15.0
"""Contrast of blocks below which the limits shrink with it"""
CORRELATED = 0.999
"""Of the thumbnails of two images that are not small, from which on they may be twice as far apart: by resizing"""
LIGHTNESS = {1: np.ones(1, np.float32), 3: np.array([0.299, 0.587, 0.114], np.float32)}
"""Weights of channels, by their number: JPEG keeps lightness better than colour. Bands count alike."""
SHADES = 48
"""Of a standard deviation in thumbnails of bands"""
MOST_BRIGHTER, MOST_CONTRAST = 30.0, 1.25
"""Difference of brightness, in shades, and ratio of contrasts that copies may have"""
BITS, BANDS = 64, 4
MOST_BITS = 8
"""Different bits of two codes; those of 99 % of the copies of icons of 32 x 32 pixels differ in fewer"""
PAIRS = 1 << 20
"""Pairs held in memory at once"""

Pairs = tuple[np.ndarray, np.ndarray]


class Thumbnails:
    """What is compared of thumbnails (images x channels x SIDE x SIDE, uint8).

    `sides`: pixels of the shorter side of each image.
    """

    def __init__(self, thumbnails: np.ndarray, sides: np.ndarray) -> None:
        self.sides, self.pixels = sides, thumbnails
        count, channels = thumbnails.shape[:2]
        self.flat = np.zeros(count, bool)
        self.brightness, self.contrast = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self.cells = np.zeros((count, 1, CELLS, CELLS), np.float16)
        self.blocks = np.zeros((count, channels, BLOCKS, BLOCKS), np.float16)
        self.codes = np.zeros(count, np.uint64)
        lightness = LIGHTNESS.get(channels, np.full(channels, 1 / channels, np.float32))
        directions = np.random.default_rng(0).standard_normal((channels * BLOCKS**2, BITS)).astype(np.float32)
        for begin in range(0, count, 1024):
            part = slice(begin, begin + 1024)
            planes = thumbnails[part].astype(np.float32)
            self.flat[part] = np.sqrt(planes.var((2, 3)).mean(1)) < FLAT
            self.cells[part] = np.einsum("nchw,c->nhw", _squares(planes, SIDE // CELLS), lightness)[:, None]
            self.blocks[part] = blocks = _squares(planes, SIDE // BLOCKS)
            self.brightness[part] = blocks.mean((1, 2, 3))
            # The contrast of blocks, since resizing takes contrast from thin lines.
            self.contrast[part] = np.maximum(np.sqrt(blocks.var((2, 3)).mean(1)), 1.0)
            pattern = (blocks - blocks.mean((2, 3), keepdims=True)).reshape(len(blocks), -1)
            self.codes[part] = np.packbits(pattern @ directions > 0, axis=1).view(np.uint64)[:, 0]

    def difference(self, planes: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Difference of the cells or blocks of pairs, in `planes`, at the same brightness and contrast."""
        scale = np.sqrt(self.contrast[other] / self.contrast[one])[:, None, None, None]
        level = self.brightness[:, None, None, None]
        return (planes[one] - level[one]) * scale - (planes[other] - level[other]) / scale

    def correlation(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Of the pixels of pairs."""
        first, second = (self.pixels[images].astype(np.float32) for images in (one, other))
        first, second = (planes - planes.mean((1, 2, 3), keepdims=True) for planes in (first, second))
        both, each, of_other = (planes.sum((1, 2, 3)) for planes in (first * second, first**2, second**2))
        return both / np.sqrt(each * of_other)

    def limits(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Factors of the limits of pairs. Images that are both enlarged to thumbnails lose nothing by that."""
        smaller, larger = np.minimum(self.sides[one], self.sides[other]), np.maximum(self.sides[one], self.sides[other])
        side = np.where(larger < SIDE, SIDE, smaller.clip(SMALLEST, LARGEST))
        return SIDE / side * np.minimum(1, np.minimum(self.contrast[one], self.contrast[other]) / FAINT)


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
    for band in range(BANDS):
        values = (codes >> np.uint64(band * width)).astype(np.int64) & ((1 << width) - 1)
        order = np.argsort(values, kind="stable")
        begins = np.searchsorted(values[order], np.arange((1 << width) + 1))
        for flipped in (0, *(1 << bit for bit in range(width))):
            begin, counts = begins[values ^ flipped], np.diff(begins)[values ^ flipped]
            ends = np.cumsum(counts)
            at = 0
            while at < len(codes):
                past = ends[at - 1] if at else 0
                until = max(at + 1, int(np.searchsorted(ends, past + PAIRS, side="right")))
                one = np.repeat(np.arange(at, until), counts[at:until])
                inside = np.arange(len(one)) - np.repeat(ends[at:until] - counts[at:until] - past, counts[at:until])
                other = order[begin[one] + inside]
                near = (one < other) & (np.bitwise_count(codes[one] ^ codes[other]) <= MOST_BITS)
                if near.any():
                    yield one[near], other[near]
                at = until


def _alike(thumbnails: Thumbnails, one: np.ndarray, other: np.ndarray) -> Pairs:
    """Those pairs that are nearly the same."""
    kept: list[np.ndarray] = [np.empty(0, np.int64)]
    contrast, brightness = thumbnails.contrast, thumbnails.brightness
    ratio = np.maximum(contrast[one], contrast[other]) / np.minimum(contrast[one], contrast[other])
    likely = np.flatnonzero((np.abs(brightness[one] - brightness[other]) < MOST_BRIGHTER) & (ratio < MOST_CONTRAST))
    for begin in range(0, len(likely), 1024):
        pairs = likely[begin : begin + 1024]
        both = one[pairs], other[pairs]
        light, colour = (thumbnails.difference(planes, *both) for planes in (thumbnails.cells, thumbnails.blocks))
        compared = [(light, side, most) for side, most in MOST_APART.items()] + [(colour, 2, MOST_IN_COLOUR)]
        apart = [np.abs(_squares(planes, side)).max((1, 2, 3)) / most for planes, side, most in compared]
        most, limits = np.max(apart, axis=0), thumbnails.limits(*both)
        same = most < limits
        large = np.minimum(*(thumbnails.sides[images] for images in both)) >= LARGEST
        large &= np.minimum(*(contrast[images] for images in both)) >= FAINT
        rest = np.flatnonzero(large & ~same & (most < 2 * limits))
        same[rest] = thumbnails.correlation(*(images[rest] for images in both)) >= CORRELATED
        kept.append(pairs[same])
    pairs = np.concatenate(kept)
    return one[pairs], other[pairs]


CHUNK = 32
PREFETCH = 2
"""Chunks per loading process that are under way at once."""
KINDS = {"empty": decoding.EMPTY, "no image": decoding.UNKNOWN_FORMAT, "too large": decoding.TOO_LARGE}
"""Kind of problem -> words of the decoder about it"""


class Scan(NamedTuple):
    """Result for one image."""

    problem: str
    """Kind of problem in a word; '' where the image can be read"""
    reason: str
    digest: bytes
    """Equal for images of equal bytes; b'' where they cannot be read"""
    same: bytes
    """Equal for images of equal pixels too, unless they are of one colour"""
    header: decoding.Header
    damage: str = ""
    """The decoder's warning about an image that it could read all the same"""
    thumbnail: bytes = b""
    """Pixels of the whole image, channels x SIDE x SIDE; b'' where it cannot be read"""


@dataclass
class Split:
    """Split of a data set with the scans of its images."""

    title: str
    samples: Samples
    scans: list[Scan]

    @cached_property
    def names(self) -> list[str]:
        """Of the classes, if known"""
        return distinct_names(self.samples.classes or ())


def scan_split(title: str, samples: Samples, data: DataConfig, workers: int, world: World = ALONE) -> Split:
    """Scan every image of a split; of several ranks, each scans some, and rank 0 gets all."""
    chunks = [np.arange(begin, min(begin + CHUNK, len(samples))) for begin in range(0, len(samples), CHUNK)]
    chunks = chunks[world.rank :: world.size]
    plan = Plan()
    loader = DataLoader(
        _Scanner(samples, data),
        batch_sampler=plan,
        num_workers=min(workers, len(chunks)),
        prefetch_factor=PREFETCH if workers and chunks else None,
        collate_fn=list,
        generator=torch.Generator(),
        persistent_workers=bool(workers and chunks),
    )
    scanned: list[list[Scan]] = []
    bar = Progress(None, sum(map(len, chunks)), "images", title, world.first)
    with warnings.catch_warnings(action="ignore"), bar:
        processes = LoadingProcesses(loader) if loader.num_workers else None
        plan.begin((0, chunk) for chunk in chunks)
        try:
            if processes is not None:
                processes.begin()
            for chunk in processes or loader:
                scanned.append(chunk)
                bar.update(len(chunk))
        except TrainingError as death:
            first = samples.name(int(chunks[len(scanned)][0]))
            near = f"{first} or one of the next {CHUNK * workers * PREFETCH * world.size - 1} images"
            raise TrainingError(f"{death} If an image caused this, it is {near} of the {title} split.") from None
        finally:
            if processes is not None:
                processes.end()
    return Split(title, samples, list(itertools.chain.from_iterable(gather(scanned, world))))


def thumbnails_of(scans: Sequence[Scan]) -> Thumbnails:
    """Of images that can be read."""
    pixels = np.frombuffer(b"".join(scan.thumbnail for scan in scans), np.uint8)
    return Thumbnails(pixels.reshape(len(scans), -1, SIDE, SIDE), np.array([min(scan.header.size) for scan in scans]))


class _Scanner(Dataset[Any]):
    def __init__(self, samples: Samples, data: DataConfig) -> None:
        self.samples, self.data, self.inputs = samples, data, Inputs(data)
        # Images are decoded whole: training's fastest decoders may stop at the end of a crop and miss damage behind it.
        # And they are resized whole, to the thumbnails that are compared with each other.
        self.pixels = Pixels(data.changed(CROP="none", IMAGE_SIZE=SIDE), train=False)
        self.by_simplejpeg = decoding.decoder_of_jpeg() == "simplejpeg"
        self.out = torch.empty(data.IMAGE_CHANNELS, SIDE, SIDE, dtype=dtype_of(data))
        self.storage_failures = 0  # in a row

    def __getitems__(self, keys: list[Key]) -> list[Scan]:
        indices = [index for _, index in keys]
        self.samples.prefetch(indices)
        return [self._scan(index) for index in indices]

    def _scan(self, index: int) -> Scan:
        def decode() -> tuple[Encoded, np.ndarray]:
            read = self.samples.read(index)
            whole, view = self.pixels.decode(read)
            self.pixels.finish(self.pixels.resize(whole, view, None), self.out.numpy().transpose(1, 2, 0))
            return read, whole

        decoded, damage = failure_or(decode, self.storage_failures), ""
        if isinstance(decoded, Failure):
            self.storage_failures += decoded.kind == "storage"
            problem = next((kind for kind, reason in KINDS.items() if reason in decoded.reason), decoded.kind)
            return Scan(problem, decoded.reason, b"", b"", decoding.Header("", (0, 0)))
        encoded, whole = decoded
        self.storage_failures = 0
        if self.by_simplejpeg and isinstance(encoded, bytes) and encoded.startswith(decoding.JPEG_START):
            damage = decoding.damage_of(encoded)
        digest = same = hashlib.blake2b(bytes(encoded), digest_size=16).digest()
        if (whole != whole[0, 0]).any():
            same = hashlib.blake2b(whole.tobytes(), digest_size=16, key=str(whole.shape).encode()).digest()
        header = decoding.header_of(encoded, self.data)
        if self.data.is_plain:
            return Scan("", "", digest, same, header, damage, self.out.numpy().tobytes())
        blank = [str(number + 1) for number, band in enumerate(self.out) if band.min() == band.max()]
        header = header._replace(mode=f"blank: band {', '.join(blank)}" if blank else "")
        # Shades by mean and deviation, so that images of 12 of 16 bits are no copies of each other.
        shades = (self.inputs(self.out[None])[0] * SHADES + 128).round().clamp(0, 255).byte()
        return Scan("", "", digest, same, header, damage, shades.numpy().tobytes())


PIXELS = "pixels"


class Found(NamedTuple):
    """One image with a defect or a note."""

    split: str
    name: str
    about: str
    kind: str = ""
    """Kind of problem of an unreadable image; PIXELS of a copy in other bytes"""
    copy_of: str = ""
    """Name of the image that it is a copy of"""
    contradicts: bool = False
    """It is a copy of an image of another split that has another label"""


@dataclass
class Findings:
    """Defects, which spoil training or its metrics, and notes, which do not."""

    classes: dict[str, dict[str, int]]
    """Images per class, by split"""
    images: dict[str, int]
    """By split"""
    unlabelled: dict[str, int]
    """Images without a label, by split; empty where every image has exactly one"""
    defects: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """By kind: images, each Found, or names of classes"""
    notes: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    @property
    def clean(self) -> bool:
        return not any(self.defects.values())


UNREADABLE, DAMAGED = "unreadable", "damaged but readable"
LABELS, DUPLICATES, OVERLAP = "label out of range", "duplicate", "in both parts"
CONFLICTS = "conflicting labels"
EMPTY_CLASSES, UNVALIDATED = "empty classes", "classes without validation images"
TINY = "tiny classes"
SMALL, MODES, BLANK = "smaller than IMAGE_SIZE", "not plain", "blank bands"
UNLIKE, LARGE, TURNED = "in another format", "much larger", "to be turned"
SOURCES = "of another source"
AT_LEAST = 20
"""Images of a format, of colours or of a size, from which on these are compared with classes and splits"""
TIMES_LARGER = 4
"""Side of an image over the median, from which on it is called much larger, if few are"""
NEAR_CONFLICTS = "nearly the same with conflicting labels"
NEAR_OVERLAP, NEAR_DUPLICATES, FLAT_IMAGES = "nearly in both parts", "nearly duplicate", "of one colour"
FEW = 5
"""Training images below which a class is called tiny"""


class _Image(NamedTuple):
    split: Split
    number: int

    @property
    def header(self) -> decoding.Header:
        return self.split.scans[self.number].header

    @property
    def label(self) -> str:
        """The name of the class, or of all of them, as in cat;dog; numbers where classes have no names."""
        label, names = self.split.samples.labels[self.number], self.split.names
        numbers = [int(label)] if np.ndim(label) == 0 else np.flatnonzero(label).tolist()
        return ";".join(names[one] if 0 <= one < len(names) else f"label {one}" for one in numbers) or "no label"

    def report(self, findings: Findings, num_classes: int, image_size: ImageSize) -> None:
        """Add what is wrong with this image alone, and what may be."""
        scan, label = self.split.scans[self.number], self.split.samples.labels[self.number]
        if scan.problem:
            findings.defects[UNREADABLE].append(self.found(scan.reason, scan.problem))
        if scan.damage:
            findings.defects[DAMAGED].append(self.found(scan.damage))
        if np.ndim(label) == 0 and not 0 <= label < num_classes:
            about = f"label {label}; MODEL.NUM_CLASSES {num_classes} allows 0 to {num_classes - 1}"
            findings.defects[LABELS].append(self.found(about))
        if mode := scan.header.mode:
            findings.notes[MODES if scan.header.format else BLANK].append(self.found(mode))
        high, wide = sides(image_size)
        if min(size := scan.header.size) > 0 and (size[0] < wide or size[1] < high):
            findings.notes[SMALL].append(self.found(f"{size[0]} x {size[1]}"))

    def found(self, about: str, kind: str = "", copy_of: str = "", contradicts: bool = False) -> Found:
        return Found(self.split.title, self.split.samples.name(self.number), about, kind, copy_of, contradicts)

    def copy_of(self, other: _Image, alike: str = "") -> Found:
        """Finding of this image, which has the bytes or the pixels of `other`; `alike`: else how alike they are."""
        same_bytes = self.split.scans[self.number].digest == other.split.scans[other.number].digest
        kind = "" if alike or same_bytes else PIXELS
        alike = alike or ("the same bytes as" if same_bytes else "the same pixels, in other bytes, as")
        labels = "" if self.label == other.label else f", but {self.label} instead of {other.label}"
        name = other.split.samples.name(other.number)
        where = "" if self.split is other.split else f" in the {other.split.title} split"
        return self.found(f"{alike} {name}{where}{labels}", kind, name, bool(labels and where))


def find_problems(splits: list[Split], num_classes: int, data: DataConfig) -> Findings:
    """Findings of all splits, of which training comes first."""
    counts = _counts(splits, num_classes)
    rows = {split.title: split.samples.labels for split in splits if split.samples.labels.ndim == 2}
    unlabelled = {title: int((labels.sum(1) == 0).sum()) for title, labels in rows.items()}
    findings = Findings(counts, {split.title: len(split.samples) for split in splits}, unlabelled)
    of_training, of_validation = (counts.get(title, {}) for title in ("training", "validation"))
    empty = findings.defects[EMPTY_CLASSES] = [name for name, count in of_training.items() if not count]
    findings.notes[UNVALIDATED] = [name for name, count in of_validation.items() if not count and name not in empty]
    findings.notes[TINY] = [f"{name} ({count})" for name, count in of_training.items() if 0 < count < FEW]
    headers = [scan.header for split in splits for scan in split.scans]
    rare, known = rare_formats(headers), [side for header in headers if (side := min(header.size))]
    large = TIMES_LARGER * np.median(known) if known else np.inf
    few = sum(side >= large for side in known) * RARE <= len(known)
    images = (_Image(split, index) for split in splits for index in range(len(split.scans)))
    for image, header in zip(images, headers, strict=True):
        image.report(findings, num_classes, data.IMAGE_SIZE)
        size = f"{header.size[0]} x {header.size[1]}"
        if header.format in rare:
            findings.notes[UNLIKE].append(image.found(header.format))
        if few and min(header.size) >= large:
            findings.notes[LARGE].append(image.found(size))
        if header.turned and not data.EXIF_ROTATE:
            findings.notes[TURNED].append(image.found(size))
    findings.notes[SOURCES] = [*_sources(splits, "grey" if data.IMAGE_CHANNELS == 1 else "RGB")]
    _add_copies(findings, splits)
    _add_near(findings, splits)
    return findings


def _sources(splits: list[Split], usual: str) -> Iterator[str]:
    """Formats, colours and sizes that tell a class, or that a split has not: those of another camera or website.

    `usual`: the colours that the model takes.
    """
    images = [_Image(split, index) for split in splits for index in range(len(split.scans))]
    images = [image for image in images if image.header.format]
    if not images:  # unknown of arrays and bands
        return
    labels, label_of = np.unique([image.label for image in images], return_inverse=True)
    part_of = np.repeat(range(len(splits)), [sum(bool(scan.header.format) for scan in split.scans) for split in splits])
    for what, of_images in (
        ("format", [image.header.format for image in images]),
        ("colours", [image.header.mode or usual for image in images]),
        ("size", [f"{image.header.size[0]} x {image.header.size[1]}" for image in images]),
    ):
        values, value_of, counts = np.unique(of_images, return_inverse=True, return_counts=True)
        ones = np.ones(len(images), np.int64)
        by_class = csr_array((ones, (value_of, label_of)), (len(values), len(labels)))  # ImageNet has many of both
        by_part = csr_array((ones, (value_of, part_of)), (len(values), len(splits))).toarray()
        of_class, of_part = by_class.sum(0), by_part.sum(0)
        told = list[np.ndarray]()
        for at in np.argsort(counts, kind="stable")[counts >= AT_LEAST].tolist():
            value, count, row = values[at], counts[at], by_class[[at]].toarray()[0]
            common = bool(count > len(images) / 2)
            chosen = _told_by(row, of_class, common)
            if chosen is not None and not any(np.array_equal(chosen, one) for one in told):
                told += [chosen, ~chosen]
                named = chosen if 2 * chosen.sum() <= len(chosen) else ~chosen
                have, elsewhere = row[named].sum(), row[~named].sum()
                of, rest = of_class[named].sum(), of_class[~named].sum()
                many = f"{'all' if have == of else f'{have:,} of'} {of:,} images of {some_of(labels[named].tolist())}"
                yield f"{what} {value}: {many}, {elsewhere:,} of {rest:,} of the other classes; a model may go by it"
            for split, has, size in zip(splits, by_part[at], of_part, strict=True):
                expected = count * size / len(images)
                if expected >= FEW and not has and not common:
                    yield f"{what} {value}: none of {count:,} images in {split.title}, where chance puts {expected:.0f}"


def _told_by(have: np.ndarray, images: np.ndarray, common: bool) -> np.ndarray | None:
    """Which classes a property tells from the others; None if it tells none.

    `have`: images of each class that have it, of so many `images`; `common`: more than half of all have it.
    """
    if not common:  # then nearly all of those may be of one class, of which others lack it
        label = have.argmax()
        without = (images[label] - have[label]) / (images.sum() - have.sum())
        if have[label] >= 0.9 * have.sum() and without <= 0.5:
            return np.arange(len(have)) == label
    most = 2 * have > images
    sizes = [images[most].sum(), images[~most].sum()]
    if min(sizes) < AT_LEAST or images.sum() < AT_LEAST * len(images):  # few images of a class are alike by chance
        return None
    clear = have[most].sum() >= 0.9 * sizes[0] and have[~most].sum() <= 0.1 * sizes[1]
    return most if clear else None


MOST_KEPT = 0.6
"""Fraction of an image that a validation crop keeps, from which on nothing is said of it"""


def kept_by_crop(splits: list[Split], data: DataConfig) -> str:
    """How much of the images a square validation crop keeps; '' if it is most of them."""
    sizes = np.array([scan.header.size for split in splits for scan in split.scans if min(scan.header.size) > 0])
    high, wide = sides(data.IMAGE_SIZE)
    if not len(sizes) or high != wide or data.CROP_MODE != "center" or data.CROP == "none":
        return ""
    shorter = sizes.min(1) * min(data.CROP_PCT, 1)
    kept = np.minimum(shorter**2 / sizes.prod(1), 1)
    if (median := float(np.median(kept))) > MOST_KEPT:
        return ""
    return (
        f"The crop of validation (CROP_PCT {data.CROP_PCT:g}) keeps {100 * median:.0f} % of an image (the median; the "
        f"least: {100 * kept.min():.0f} %). Where what counts may be at the margin, DATA.CROP_MODE=squash "
        "DATA.CROP_PCT=1 keeps all."
    )


def _counts(splits: list[Split], num_classes: int) -> dict[str, dict[str, int]]:
    """Images per class, by split: by name, with the label where classes share one, and by label where it has no class.

    Without names, the labels from 0 to the largest valid one are the names.
    """
    first = splits[0].samples
    several, names = first.labels.ndim == 2, splits[0].names
    if not names:
        labels = np.unique(np.concatenate([split.samples.labels for split in splits]))
        largest = labels[(labels >= 0) & (labels < num_classes)].max(initial=-1)
        names = [str(label) for label in range(first.labels.shape[1] if several else int(largest) + 1)]
    counts = {split.title: dict.fromkeys(names, 0) for split in splits}
    for split in splits:
        labels = split.samples.labels
        each = np.unique(labels, return_counts=True)
        found = enumerate(images_of_classes(labels, len(names))) if several else zip(*each, strict=True)
        for label, count in found:
            counts[split.title][names[label] if 0 <= label < len(names) else f"label {label}"] = int(count)
    return counts


def _add_copies(findings: Findings, splits: list[Split]) -> None:
    """Images of the same bytes or pixels: all whose labels differ, else all but one, in the last split."""
    copies: dict[bytes, list[_Image]] = defaultdict(list)
    for split in splits:
        for index, scan in enumerate(split.scans):
            copies[scan.same].append(_Image(split, index))
    copies.pop(b"", None)
    for same in (images for images in copies.values() if len(images) > 1):
        if len({copy.label for copy in same}) > 1:  # every copy is listed, since no label is known to be right
            for copy in same:
                other = next(one for one in same if one.label != copy.label)
                findings.defects[CONFLICTS].append(copy.copy_of(other))
            continue
        by_split = [list(of_split) for _, of_split in itertools.groupby(same, key=lambda copy: copy.split.title)]
        for first, *later in by_split:  # in validation and test they count twice, but spoil no training
            duplicates = findings.defects if first.split.title == "training" else findings.notes
            duplicates[DUPLICATES] += [copy.copy_of(first) for copy in later]
        for of_split in by_split[:-1]:
            findings.defects[OVERLAP] += [copy.copy_of(by_split[-1][0]) for copy in of_split]


def _add_near(findings: Findings, splits: list[Split]) -> None:
    """Images that are nearly the same, though not pixel for pixel; of identical ones, one stands for all.

    The last split comes first, so that an image of the training split is reported as a copy of one in validation.
    """
    by_digest: dict[bytes, _Image] = {}
    for split in reversed(splits):
        for index, scan in enumerate(split.scans):
            if scan.thumbnail:
                by_digest.setdefault(scan.same, _Image(split, index))
    if not by_digest:
        return
    images = list(by_digest.values())
    thumbnails = thumbnails_of([one.split.scans[one.number] for one in images])
    for index in np.flatnonzero(thumbnails.flat).tolist():
        findings.notes[FLAT_IMAGES].append(images[index].found("almost of one colour, as the model sees it"))
    reported: set[tuple[int, str]] = set()
    for first, second in near_pairs(thumbnails).tolist():
        one, other = images[first], images[second]
        conflict = one.split is other.split and one.label != other.label
        if (second, one.split.title) in reported and not conflict:  # once for each split
            continue
        reported.add((second, one.split.title))
        found = other.copy_of(one, "nearly the same image as")
        if conflict:
            findings.defects[NEAR_CONFLICTS].append(found)
        elif one.split is other.split:
            findings.notes[NEAR_DUPLICATES].append(found)
        else:
            findings.defects[NEAR_OVERLAP].append(found)


SHOWN = 5
"""Lines of each kind of finding; twice as many of the table of classes"""
HEADINGS = {
    EMPTY_CLASSES: "classes without training images",
    UNVALIDATED: UNVALIDATED,
    TINY: f"classes with fewer than {FEW} training images",
    UNREADABLE: "cannot be read",
    DAMAGED: "damaged, although they can be read",
    LABELS: "labels out of range",
    CONFLICTS: "the same bytes with different labels",
    NEAR_CONFLICTS: "nearly the same with different labels: one is wrong, unless classes differ in details",
    DUPLICATES: "duplicates within a split",
    OVERLAP: "in two splits (training images in another, or validation images in test)",
    NEAR_OVERLAP: "nearly the same in two splits (encoded again, resized)",
    NEAR_DUPLICATES: "nearly the same within a split",
    FLAT_IMAGES: "almost of one colour; if they should not be, see DATA.BACKGROUND",
    UNLIKE: "perhaps placeholders: in another format than nearly all others",
    SOURCES: "properties (format, colours, size) that tell classes or splits apart, perhaps of another source",
    LARGE: f"at least {TIMES_LARGER} times as large as most others",
    TURNED: "to be turned by their EXIF data, but read as they are stored; DATA.EXIF_ROTATE=true turns them",
    MODES: "colours are converted when read (transparent parts become DATA.BACKGROUND)",
    BLANK: "bands that are blank",
    SMALL: "smaller than IMAGE_SIZE; enlarged when read",
}


def text(findings: Findings, data: DataConfig, advice: list[str]) -> str:
    """Report for the terminal: numbers, the `advice`, then SHOWN lines of each kind, with names below DATA_PATH."""
    kinds = {f"DEFECT: {HEADINGS[kind]}": found for kind, found in findings.defects.items()}
    kinds |= {f"note: {HEADINGS[kind]}": found for kind, found in findings.notes.items()}
    summary = []
    for split, counts in findings.classes.items():
        summary.append(f"{split.capitalize()} split: {findings.images[split]:,} images in {len(counts):,} classes")
        if split in findings.unlabelled:
            without = f"{findings.unlabelled[split]:,} images without a label"
            summary[-1] += f", with {sum(counts.values()):,} labels; {without}"
    small, images = len(findings.notes.get(SMALL, ())), sum(findings.images.values())
    if 2 * small > images:  # a size of the data set, not of some images
        del kinds[f"note: {HEADINGS[SMALL]}"]
        summary.append(f"note: {small:,} of {images:,} images are {HEADINGS[SMALL]}, which adds no detail")
    for heading, found in kinds.items():
        if found:
            other = sum(isinstance(one, Found) and one.contradicts for one in found)
            more = f", {other:,} with another label in another split" if other else ""
            pixels = sum(isinstance(one, Found) and one.kind == PIXELS for one in found)
            more += f", {pixels:,} with the same pixels in other bytes" if pixels else ""
            summary.append(f"{heading}: {len(found):,}{more}")
    if modes := Counter(found.about for found in findings.notes.get(MODES, ())):
        summary.append(f"note: colour modes: {', '.join(f'{mode} {count:,}' for mode, count in modes.items())}")
    blocks = [summary, advice, _table(findings.classes)]
    blocks += [[f"{heading}:", *_lines(found, name_prefix(data))] for heading, found in kinds.items() if found]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _table(classes: dict[str, dict[str, int]]) -> list[str]:
    """Images per class of each split, of the smallest and the largest classes."""
    names = list(dict.fromkeys(itertools.chain(*classes.values())))
    rows = sorted(([of_split.get(name, 0) for of_split in classes.values()], name) for name in names)
    shown = rows if len(rows) <= 2 * SHOWN else [*rows[:SHOWN], *rows[-SHOWN:]]
    lines = [f"  {' '.join(f'{count:>9,}' for count in counts)}  {name}" for counts, name in shown]
    return [f"Images per class ({', '.join(classes)}), {len(shown)} of {len(rows)} classes:", *lines]


def _lines(found: Sequence[str | Found], prefix: str) -> list[str]:
    """Lines of one kind of finding. Of two copies, each may be listed for -json and -fix; here one line names both."""
    lines: dict[str | frozenset[str], str] = {}
    for one in sorted(found, key=lambda one: isinstance(one, str) or not one.contradicts):  # those first
        if isinstance(one, str):
            lines[one] = f"    {one}"
            continue
        about = one.about.replace(one.copy_of, one.copy_of.removeprefix(prefix))
        lines.setdefault(frozenset({one.name, one.copy_of}), f"    {one.name.removeprefix(prefix)}: {about}")
    more = [f"    ... and {len(lines) - SHOWN:,} more; -json FILE lists all"] if len(lines) > SHOWN else []
    return [*lines.values()][:SHOWN] + more


def as_json(findings: Findings) -> dict[str, Any]:
    """Content of the -json file."""

    def listed(kinds: dict[str, list[Any]]) -> dict[str, Any]:
        return {kind.replace(" ", "_").lower(): [*map(in_json, found)] for kind, found in kinds.items()}

    def in_json(one: str | Found) -> Any:
        if isinstance(one, str):
            return one
        return {"part": one.split, "name": one.name, "about": one.about} | ({"kind": one.kind} if one.kind else {})

    return {
        "clean": findings.clean,
        "classes": findings.classes,
        **({"images_without_label": findings.unlabelled} if findings.unlabelled else {}),
        "defects": listed(findings.defects),
        "notes": listed(findings.notes),
    }


REASONS = {
    UNREADABLE: "cannot be read",
    DAMAGED: "damaged",
    OVERLAP: "also in another split, byte for byte",
    NEAR_OVERLAP: "nearly the same as one of another split",
    CONFLICTS: "copies with different labels, of which none is known to be right",
    DUPLICATES: "duplicates",
}
"""Defects whose images the exclude list has"""


def exclude_list(findings: Findings, splits: list[Split], data: DataConfig, near: bool) -> tuple[str, str, int]:
    """Content of the exclude list; what it removes and why, one line per split and reason; and how many images.

    Images that are nearly the same as one of another split are removed if `near`. Copies are removed from the training
    split alone, so that results on the other splits stay comparable.
    Lines of the current DATA.EXCLUDE stay, since those images were not checked.
    Images with storage errors are comments, because the storage may return later.
    """
    chosen: dict[tuple[str, str], tuple[str, Found]] = {}
    validating = {split.samples.name(index) for split in splits[1:] for index in range(len(split.samples))}
    for kind in (kind for kind in REASONS if near or kind != NEAR_OVERLAP):
        for found in findings.defects.get(kind, ()):
            intact = kind not in (UNREADABLE, DAMAGED)
            twice = found.name == found.copy_of or (found.split == "training" and found.name in validating)
            if intact and twice:  # a line would remove both
                log.warning("%s: is listed twice; correct the table, which DATA.EXCLUDE cannot.", found.name)
            elif not intact or found.split == "training":
                chosen.setdefault((found.split, found.name), (kind, found))
    lines = [("# " if one.kind == "storage" else "") + line_of(one.name, one.about, data) for _, one in chosen.values()]
    counts = Counter(
        (found.split, kind, found.kind == PIXELS) for kind, found in chosen.values() if found.kind != "storage"
    )
    if lost := len(chosen) - counts.total():
        log.warning("Images not excluded, because of storage errors: %d. Check again when the storage is back.", lost)
    words = []
    for (split, kind, by_pixels), count in counts.items():
        reason = REASONS[kind]
        if by_pixels:
            reason = f"{reason.removesuffix(', byte for byte')} (the same pixels in other bytes)"
        words.append(f"  {count:>7,} {split} images: {reason}")
    return text_of_list(lines, data), "\n".join(words), counts.total()


def text_of_list(lines: list[str], data: DataConfig) -> str:
    """Content of a list of images to exclude, after the lines of the one in use."""
    before, today = text_of(data).rstrip("\n"), datetime.date.today().isoformat()
    head = f"# Images to exclude (DATA.EXCLUDE), found by {started_as('scripts/check_data.py')} on {today}"
    return "\n".join([*([before] if before else []), head, *lines, ""])
