"""Decode images: JPEG files with simplejpeg, all others with PIL. The crop is chosen before pixels are decoded."""

import contextlib
import functools
import importlib
import io
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from datasets.base import NO_MEMORY, Box, Colour, Encoded, Unreadable, background_of
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log
from vitamp.colours import as_rgb_or_grey
from vitamp.files import ARRAYS, NUMPY, ZIP
from vitamp.sizes import BYTES_PER_PIXEL, refuse_large

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""Formats that PIL may open. It knows more, but one of them starts a program, and none is for photographs."""
ENDINGS = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2"),
)
"""File extensions of these formats: the one list for class folders, tar files and the tools."""


def endings_of(data: DataConfig) -> tuple[str, ...]:
    """File extensions of the images that these settings read. Beside photographs, arrays hold something else."""
    return ENDINGS if data.is_plain else (*ENDINGS, *ARRAYS)


Image.MAX_IMAGE_PIXELS = None
"""DATA.MAX_IMAGE_BYTES is the limit in place of PIL's, for all decoders"""


class Stored(ABC):
    """An image whose header has been read, and whose pixels are decoded by `cut`."""

    width: int
    height: int
    transparent = False
    """Whether the last `cut` had transparent pixels"""

    @abstractmethod
    def cut(self, box: Box) -> np.ndarray:
        """Decode the pixels of `box`, height x width x channels. Grey images may have one channel in place of three."""


class ArrayStored(Stored):
    """Raw pixels, which need no decoding."""

    def __init__(self, pixels: np.ndarray, channels: int) -> None:
        self.pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        self.height, self.width = pixels.shape[:2]
        self.channels = channels

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        return in_channels(self.pixels[top : top + height, left : left + width], self.channels)


class PilStored(Stored):
    """An image that PIL reads."""

    def __init__(self, data: bytes, channels: int, background: Colour | None = None) -> None:
        """`background`: colour behind transparent pixels; None drops the alpha channel."""
        self.image = Image.open(io.BytesIO(data), formats=_formats())
        self.channels = channels
        self.background = background
        self.width, self.height = self.image.size

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        part = self.image
        if box != Box(0, 0, part.width, part.height):
            part = part.crop((left, top, left + width, top + height))
        part, self.transparent = as_rgb_or_grey(part, self.channels, self.background)
        return np.atleast_3d(np.asarray(part))


def in_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Convert colour to grey as PIL does if `channels` is 1. Grey pixels stay: their channel is repeated at the end."""
    if channels == 1 and pixels.shape[2] != 1:
        return np.asarray(Image.fromarray(pixels).convert("L"))[:, :, None]
    return pixels


@functools.cache
def _formats() -> list[str]:
    """The formats of FORMATS that this build of PIL supports."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


COLOURS = {"YCbCr": ("RGB", 3), "RGB": ("RGB", 3), "Gray": ("GRAY", 1)}
"""Colour space of a file -> colour space and channels to decode to. PIL reads the rest: CMYK needs inverting first."""
BLOCK = 16
"""Greatest height of a row of blocks (MCUs), in pixels, in usual files."""
BLEED = 2
"""Rows below a crop that affect it: colour is stored at half resolution and smoothed when it is decoded."""
SEQUENTIAL = (0xC0, 0xC1)
"""Frame markers of files stored from top to bottom; progressive files have others. The height follows the marker."""
RESTARTS = 0xDD
"""Marker of the restart interval"""
SCAN = 0xDA
"""Marker of the start of the pixel data"""
FRAMES = range(0xC0, 0xD0)
"""Frame markers of all kinds of files; among them is HUFFMAN"""
HUFFMAN = 0xC4
"""Marker of Huffman tables"""
ONLY_CUT_OFF = re.compile(r"extraneous bytes before marker 0xd9$")
"""The decoder's only complaint about an intact file that is decoded with a smaller height: data before its end."""
OF_DAMAGE = ("Corrupt JPEG data", "Premature end")
"""Beginnings of the decoder's warnings of damaged data. Its errors, which begin otherwise, can mean a rare format."""


def decoder_of_jpeg() -> str:
    """Return the name of the decoder of JPEG files: simplejpeg, or PIL if that is not installed."""
    return "pil" if _import_error() else "simplejpeg"


def warn_of_decoder() -> None:
    """Warn if simplejpeg cannot be imported, so that PIL decodes JPEG files."""
    error = _import_error()
    if error:
        log.warning("PIL decodes JPEG files, at half the speed of simplejpeg (%s). Run: pip install simplejpeg", error)


def _import_error() -> str | None:
    try:
        importlib.import_module("simplejpeg")
    except ImportError as error:
        return str(error)
    return None


class JpegStored(Stored):
    """A JPEG file, decoded by simplejpeg. Raises ValueError for a file that PIL should read."""

    def __init__(self, data: bytes, channels: int) -> None:
        """Read the header. `channels`: those of the model's input, 1 or 3."""
        import simplejpeg

        self.decode = simplejpeg.decode_jpeg
        self.data = data
        self.channels = channels
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        self.height = int(height)
        self.width = int(width)
        if colours not in COLOURS:
            raise ValueError("PIL must read this file")
        # The colour space and the channels to decode to, which are those of the file.
        self.colours, self.decoded_channels = COLOURS[colours]

    def cut(self, box: Box) -> np.ndarray:
        left, top, width, height = box
        try:
            pixels = self._rows(top + height)
        except ValueError:  # PIL tolerates some damage, and reports the rest
            return PilStored(self.data, self.channels).cut(box)
        return in_channels(pixels[top : top + height, left : left + width], self.channels)

    def _rows(self, bottom: int) -> np.ndarray:
        """Decode the image from the top to at least row `bottom`. Decoding dominates, so the rest is left out.

        The library has no function for this. But with a smaller height in the header, the same bytes are a complete
        image followed by surplus data, about which the decoder complains only after it has decoded the image.
        """
        # With the rows below that affect the crop, rounded up to whole blocks.
        rows = -(-(bottom + BLEED) // BLOCK) * BLOCK
        offset = _height_offset(self.data) if rows < self.height else None
        if offset:
            shortened = bytearray(self.data)
            shortened[offset : offset + 2] = rows.to_bytes(2, "big")
            pixels = np.empty((rows, self.width, self.decoded_channels), dtype=np.uint8)
            try:
                self.decode(shortened, self.colours, buffer=pixels)
                return pixels
            except ValueError as error:
                if ONLY_CUT_OFF.search(str(error)):
                    return pixels  # already complete
        return self.decode(self.data, self.colours, buffer=None)


def damage_of(data: bytes) -> str:
    """Return simplejpeg's warning about a damaged JPEG file; '' if the file is intact.

    PIL may read a damaged file without a warning.
    """
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "GRAY")  # reads all the data, at less cost than in colour
    except ValueError as error:
        # Other errors can mean an intact file of a rare format.
        return str(error) if str(error).startswith(OF_DAMAGE) else ""
    return ""


def _height_offset(data: bytes) -> int | None:
    """Return the offset of the two height bytes in the header of a sequential JPEG file; None for other kinds.

    None also with restart markers: the decoder would complain about each of them, so that the whole file would have to
    be decoded after the part.
    """
    # After the 2 bytes that begin a file come segments: 0xFF, a marker, 2 bytes of length (which include themselves)
    # and the content. That of a frame begins with 1 byte of precision, 2 of height and 2 of width.
    offset = 2
    end = len(data) - 9  # a frame's first 9 bytes, up to the width
    height_offset = None
    while offset < end and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == SCAN:
            return height_offset
        if marker in SEQUENTIAL:
            height_offset = offset + 5
        elif marker == RESTARTS or (marker in FRAMES and marker != HUFFMAN):
            return None
        length = data[offset + 2] << 8 | data[offset + 3]
        offset += 2 + length
    return None


ORIENTATION = 0x0112
TURNS = {
    2: (True, False, False),
    3: (True, True, False),
    4: (False, True, False),
    5: (False, False, True),
    6: (False, True, True),
    7: (True, True, True),
    8: (True, False, True),
}
"""EXIF orientation -> steps that make the image upright: mirror horizontally, then vertically, then swap the axes."""
EXIF = ("exif", "Raw profile type exif")
"""Keys of the EXIF data in Pillow's `info`; the second is that of PNG files by ImageMagick"""
PNG_EXIF = (b"eXIf", b"Raw profile type exif")
"""Bytes in every PNG file that has EXIF data"""
EXIF_MARK = b"Exif\0\0"
SEARCHED = 2**16
"""Bytes at the start of a JPEG file to search for EXIF_MARK; the block that begins with it is no longer than this."""


class Turned(Stored):
    """An image that its EXIF orientation turns upright. Boxes refer to the upright image."""

    def __init__(self, stored: Stored, orientation: int) -> None:
        self.stored = stored
        self.mirrored, self.upside_down, self.swapped = TURNS[orientation]
        size = stored.width, stored.height
        self.width, self.height = size[::-1] if self.swapped else size

    def cut(self, box: Box) -> np.ndarray:
        """Decode the pixels of a box in the upright image."""
        # Find the box in the stored image: undo the steps of TURNS, last first.
        left, top, width, height = box
        if self.swapped:
            left, top, width, height = top, left, height, width
        if self.mirrored:
            left = self.stored.width - left - width
        if self.upside_down:
            top = self.stored.height - top - height
        pixels = self.stored.cut(Box(left, top, width, height))
        if self.mirrored:
            pixels = pixels[:, ::-1]
        if self.upside_down:
            pixels = pixels[::-1]
        return np.ascontiguousarray(pixels.swapaxes(0, 1) if self.swapped else pixels)


def exif_of(image: Image.Image, encoded: bytes) -> Image.Exif:
    """Return the EXIF data of an image; empty without it. Pillow alone would also read orientations from XMP."""
    if image.format == "PNG" and EXIF[0] not in image.info and any(mark in encoded for mark in PNG_EXIF):
        image.load()  # the EXIF data may come after the pixels
    without_xmp = Image.new("1", (1, 1))
    without_xmp.info = {key: image.info[key] for key in EXIF if key in image.info}
    return without_xmp.getexif()


TRANSPARENT = "transparent"
GREY = "grey"
DEEP = "16 bits and more"


Facts = Mapping[str, str | float]
"""Words for properties of an image -> their values"""


class Header(NamedTuple):
    """Facts about an image, from its header."""

    mode: str
    """Words for colours that are converted for the model; '' if none are, or if that is unknown"""
    size: tuple[int, int]
    """Width and height; (0, 0) if unknown"""
    turned: bool = False
    """Whether its EXIF data says that it is to be turned"""
    format: str = ""
    """Name of the format, such as JPEG; '' if unknown"""
    encoding: Facts = {}  # noqa: RUF012 - it is never changed
    """How the file was written: colours, JPEG tables and the like; empty if unknown, or if the model reads bands"""
    camera: Facts = {}  # noqa: RUF012
    """What the EXIF data says of the camera and the date; empty as `encoding`"""
    bytes: int = 0
    """Size of the file; 0 if unknown"""


def header_of(encoded: Encoded, data: DataConfig) -> Header:
    """Read the header of an image, without decoding its pixels if that is possible.

    A header that cannot be read gives a `Header` with nothing known.
    """
    if isinstance(encoded, np.ndarray):
        return Header(mode="", size=encoded.shape[1::-1])
    if not data.is_plain:
        # The reader refuses all images that need a conversion for the model.
        pixels = Reader(data).whole(encoded)
        return Header(mode="", size=pixels.shape[1::-1])
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(encoded)) as image:
            refuse_large(BYTES_PER_PIXEL * image.width * image.height, data.MAX_IMAGE_BYTES)
            mode = _unusual_mode(image, data.IMAGE_CHANNELS)
            exif = exif_of(image, encoded)
            turned = exif.get(ORIENTATION) in TURNS
            # MPO files are of cameras: JPEG with a preview.
            image_format = "JPEG" if image.format == "MPO" else image.format or ""
            encoding = _encoding_of(image)
            return Header(mode, image.size, turned, image_format, encoding, _camera_of(exif), len(encoded))
    except Exception:  # only another decoder than Pillow can read it, or a damaged header, which can raise anything
        return Header(mode="", size=(0, 0))


def _encoding_of(image: Image.Image) -> Facts:
    """Return how the program that wrote the file encoded the pixels."""
    tables: Mapping[int, Sequence[int]] = getattr(image, "quantization", {})  # the first is that of lightness
    return {
        "colours": GREY if image.mode in ("L", "1") else image.mode,
        "JPEG table's sum": float(sum(tables.get(0, ()))),
        "DPI": str(image.info.get("dpi", "none")),
        "progressive": "yes" if image.info.get("progressive") else "no",
    }


def _camera_of(tags: Image.Exif) -> Facts:
    """Return what the EXIF data says of the camera and the date of a photograph."""
    date = tags.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal, "none")
    camera = f"{tags.get(ExifTags.Base.Make, '')} {tags.get(ExifTags.Base.Model, '')}"
    return {"EXIF entries": float(len(tags)), "camera": camera.strip() or "none", "day": str(date)[:10]}


def _unusual_mode(image: Image.Image, channels: int) -> str:
    """Name how the colours of an image are stored if they must be converted for the model; '' if they fit.

    `channels`: those of the model's input.
    """
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        return TRANSPARENT
    if image.mode.startswith("I") or image.mode == "F":
        return DEEP
    if image.mode in ("L", "1"):
        return "" if channels == 1 else GREY
    if image.mode == "RGB":
        return "" if channels == 3 else "coloured"
    return "palette" if image.mode == "P" else image.mode


JPEG_START = b"\xff\xd8\xff"


class Reader:
    """Opens images as the DATA settings say. A bad image can raise any exception; see `decoding_errors`."""

    def __init__(self, data: DataConfig) -> None:
        """Keep the settings that decide how images are opened, and choose the decoder of JPEG files."""
        self.channels = data.IMAGE_CHANNELS
        self.rotates_by_exif = data.EXIF_ROTATE
        self.bits = data.BITS
        self.is_plain = data.is_plain
        self.max_bytes = data.MAX_IMAGE_BYTES
        self.background = background_of(data)
        self.by_simplejpeg = decoder_of_jpeg() == "simplejpeg"

    def open(self, encoded: Encoded) -> Stored:
        """Read the header of an image, for its pixels to be decoded later by `Stored.cut`.

        Images with other bands than photographs, and arrays, are decoded at once.
        """
        if not self.is_plain:
            from vitamp.bands import read_bands

            with warnings.catch_warnings(action="ignore"):
                pixels = read_bands(encoded, self.channels, self.bits, self.max_bytes)
            pixels = pixels.astype(np.float32, copy=False)  # in which each value of 16 bits is exact
            return ArrayStored(pixels, self.channels)
        if isinstance(encoded, np.ndarray):
            return ArrayStored(encoded, self.channels)
        # PIL warns of odd EXIF data and large sizes in images that it can read, which is noise during training.
        with warnings.catch_warnings(action="ignore"):
            if encoded.startswith((NUMPY, ZIP)):  # an array
                from vitamp.bands import read_bands

                return ArrayStored(read_bands(encoded, self.channels, self.bits, self.max_bytes), self.channels)
            stored: Stored | None = None
            if self.by_simplejpeg and encoded.startswith(JPEG_START):
                with contextlib.suppress(ValueError):  # PIL supports more kinds, and has better error messages
                    stored = JpegStored(encoded, self.channels)
            stored = stored or PilStored(encoded, self.channels, self.background)
            refuse_large(BYTES_PER_PIXEL * stored.width * stored.height, self.max_bytes)
            return _upright(stored, encoded) if self.rotates_by_exif else stored

    def whole(self, encoded: Encoded) -> np.ndarray:
        """Decode all pixels of an image. Raises Unreadable for a bad one."""
        with decoding_errors(encoded):
            stored = self.open(encoded)
            return stored.cut(Box(0, 0, stored.width, stored.height))


def _upright(stored: Stored, encoded: bytes) -> Stored:
    """Return the image as its EXIF orientation turns it; `stored` itself if it has none."""
    if isinstance(stored, PilStored):
        image = stored.image
    elif encoded.find(EXIF_MARK, 0, SEARCHED) >= 0:
        image = PilStored(encoded, 3).image  # for its EXIF data, which simplejpeg does not read
    else:
        return stored
    # PIL always rotates TIFF files itself.
    orientation = None if image.format == "TIFF" else exif_of(image, encoded).get(ORIENTATION)
    if isinstance(orientation, int) and orientation in TURNS:
        return Turned(stored, orientation)
    return stored


EMPTY = "the file is empty"
UNKNOWN_FORMAT = "not an image in a known format"
TOO_LARGE = "DATA.MAX_IMAGE_BYTES"
"""In the reason of an image with too many pixels"""


@contextlib.contextmanager
def decoding_errors(encoded: Encoded) -> Iterator[None]:
    """Turn any error of the `with` block, which decodes an image, into Unreadable with a reason."""
    try:
        yield
    except UserError:
        raise  # not the file's fault
    except MemoryError:
        raise Unreadable(NO_MEMORY) from None
    except Exception as error:  # the decoder of a damaged file can raise nearly anything
        reason = str(error) or type(error).__name__
        if len(encoded) == 0:
            reason = EMPTY
        elif isinstance(error, UnidentifiedImageError):
            reason = UNKNOWN_FORMAT
        raise Unreadable(": ".join([*getattr(error, "__notes__", ()), reason])) from None
