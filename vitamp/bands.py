"""Reads images of any number of channels and any depth as arrays, for `vitamp.load` and for training.

Values stay as they are stored, except that the slope and window of DICOM files are applied. If an image has several
files, they are handled as one zip file.
"""

import importlib
import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitamp.errors import UserError
from vitamp.files import NUMPY, ZIP, read_regular
from vitamp.sizes import BYTES_PER_PIXEL, MOST_BYTES, refuse_large

DEEP_PNG = (b"\x89PNG", 16)
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BY_PILLOW = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "JPEG2000")
MODES = ("L", "LA", "RGB", "RGBA", "F", "I", "I;16", "I;16B", "I;16L")
DTYPES = {"8": "uint8", "16": "uint16", "float": "float32"}
"""DATA.BITS -> type of the values; floats may also have 16 or 64 bits."""
DEFLATED = "1.2.840.10008.1.2.1.99"
"""Transfer syntax of DICOM files that are compressed as a whole."""


def read_bands(image: bytes | np.ndarray, channels: int, bits: int | str, most: int = MOST_BYTES) -> np.ndarray:
    """Read an image file, or arrange an array, as height x width x channels.

    image: the bytes of a file, of a zip with the files of one image (see `together`), or an array
    channels, bits: DATA.IMAGE_CHANNELS and DATA.BITS; a ValueError unless the image has these
    most: largest number of bytes of the pixels; a ValueError if there are more

    The message of a ValueError continues a sentence about the image: 'it has 4 channels; ...'.
    """
    paths = getattr(image, "paths", ())  # only `SeveralFiles`, which `together` makes, have paths
    arrays = list[np.ndarray]()
    bytes_left = most
    for index, part in enumerate(_parts(image, most)):
        try:
            array = part if isinstance(part, np.ndarray) else _read(part, bytes_left)
            arrays.append(_arranged(array, channels))
        except Exception as error:
            if paths:
                error.add_note(f"its file {paths[index]}")
            raise
        bytes_left -= array.nbytes
    kinds = [f"{array.shape[1]} x {array.shape[0]} of {array.dtype.name}" for array in arrays]
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            place = f" ({paths[index]})" if paths else ""
            raise ValueError(f"its files differ: {kinds[0]} and {kind}{place}")
    pixels = np.concatenate(arrays, axis=2)
    _check(pixels, channels, bits)
    return pixels


def _check(pixels: np.ndarray, channels: int, bits: int | str) -> None:
    """Raise ValueError unless a model of these channels and bits takes these pixels (height x width x channels)."""
    if pixels.size == 0:
        raise ValueError(f"its shape is {' x '.join(map(str, pixels.shape))}, which has no pixels")
    dtype = pixels.dtype
    expected = DTYPES[str(bits)]
    if dtype.kind == "i":
        raise ValueError(
            f"its values are {dtype.name}, which have a sign; store uint16, or floats with DATA.BITS=float"
        )
    is_float = dtype.kind == "f"
    # Floats of any size are taken, because they are converted to float32 later.
    is_expected = is_float if expected == "float32" else dtype.name == expected
    if not is_expected:
        raise ValueError(f"its values are {dtype.name}; DATA.BITS {bits} takes {expected}")
    if pixels.shape[2] != channels:
        advice = "" if pixels.shape[2] > channels else ", or name its other files in a table: docs/bands.md"
        raise ValueError(f"it has {pixels.shape[2]} channels; DATA.IMAGE_CHANNELS is {channels}{advice}")
    if is_float:
        not_finite = pixels.size - int(np.isfinite(pixels).sum())
        if not_finite:
            raise ValueError(f"{not_finite:,} of its {pixels.size:,} values are NaN or infinity")


def _parts(image: bytes | np.ndarray, most: int) -> Iterator[bytes | np.ndarray]:
    """Yield the content of each file in a zip, at most `most` bytes in all; yield an image that is no zip as it is."""
    if isinstance(image, np.ndarray) or not image.startswith(ZIP):
        yield image
        return
    with zipfile.ZipFile(io.BytesIO(image)) as files:
        refuse_large(sum(info.file_size for info in files.infolist()), most)
        for info in files.infolist():
            # With other methods, a small file could fill the memory before its size is checked.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("its files are compressed by another method than deflate")
            with files.open(info) as file:
                yield file.read(info.file_size)  # The limit matters if the recorded size is wrong.


class SeveralFiles(bytes):
    """The files of one image as one zip, so that code that handles the bytes of an image handles them, too."""

    paths: Sequence[str] = ()
    """Paths of the files, for errors. They are not in the bytes, so that equal images have equal bytes."""


def together(contents: Sequence[bytes], paths: Sequence[str] = ()) -> SeveralFiles:
    """Pack the contents of an image's files into one zip. `paths`: their paths, for errors."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zip_file:
        for number, content in enumerate(contents, start=1):
            zip_file.writestr(zipfile.ZipInfo(f"{number}"), content)
    files = SeveralFiles(archive.getvalue())
    files.paths = paths
    return files


def planes_of(
    image: str | Path | Sequence[str | Path] | np.ndarray, channels: int, bits: int | str, most: int = MOST_BYTES
) -> torch.Tensor:
    """Read a file, the files of one image, or an array, as a float tensor of channels x height x width.

    See `read_bands` for the parameters.
    """
    if isinstance(image, np.ndarray):
        encoded = image
    else:
        paths = [image] if isinstance(image, str | Path) else image
        contents = [read_regular(path, most) for path in paths]
        encoded = contents[0] if len(contents) == 1 else together(contents)
    pixels = read_bands(encoded, channels, bits, most)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32))


def _arranged(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Arrange the axes of an array as height x width x channels.

    With three axes, the first or the last one is that of the channels: the one with the expected number, else the
    shorter one.
    """
    if pixels.ndim > 3:
        pixels = pixels.squeeze()
    if pixels.ndim == 2:
        return pixels[:, :, None]
    if pixels.ndim != 3:
        raise ValueError(f"its shape is {' x '.join(map(str, pixels.shape))}; an image has height, width and channels")
    first = pixels.shape[0]
    last = pixels.shape[2]
    channels_first = first == channels or (last != channels and first < last)
    return pixels.transpose(1, 2, 0) if channels_first else pixels


def _read(content: bytes, most: int) -> np.ndarray:
    """Decode one file of any format to an array, with its axes as they are stored.

    The format is recognised by the content: NumPy, DICOM, TIFF, or one that Pillow reads.

    most: largest number of bytes of the pixels, checked before they are decoded; a ValueError if there are more
    """
    if content.startswith(NUMPY):
        # The size is in the header, whose form differs between version 1 and later ones.
        file = io.BytesIO(content)
        is_version_1 = np.lib.format.read_magic(file) == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if is_version_1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        refuse_large(math.prod(shape) * dtype.itemsize, most)
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)

    # A DICOM file has this mark after 128 bytes of any content. They may begin as a TIFF, so DICOM comes before TIFF.
    if content[128:132] == b"DICM":
        return _pixels_of_dicom(content, most)

    if content.startswith(TIFF):
        tifffile = _package("tifffile")
        tifffile.logger().setLevel("CRITICAL")  # The exception has the reason; tifffile would also log it.
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            refuse_large(file.series[0].nbytes, most)
            return file.series[0].asarray()

    with Image.open(io.BytesIO(content), formats=BY_PILLOW) as image:
        refuse_large(BYTES_PER_PIXEL * image.width * image.height, most)
        # The bit depth of a PNG is in its byte 24. Pillow would keep only 8 bits of 16-bit colours.
        is_16_bit_png = (content[:4], content[24]) == DEEP_PNG
        if is_16_bit_png:
            from torchvision.io import ImageReadMode, decode_image

            encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            return decode_image(encoded, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
        if image.mode not in MODES:
            raise ValueError(f"its colour mode is {image.mode}; store grey, RGB or RGBA")
        array = np.asarray(image)
        # Pillow reads files with 16 bits of some formats, such as PGM, as mode "I", with 32 bits.
        return array.astype(np.uint16) if image.mode == "I" else array


def has_window(content: bytes | np.ndarray, most: int) -> bool:
    """Whether a DICOM file has a window, whose ends become 0 and 1; False for a broken file."""
    return _read_dicom(bytes(content), most, stop_before_pixels=True).get("WindowCenter") is not None


def _read_dicom(content: bytes, most: int, **options: bool) -> Any:
    """Read a DICOM file with pydicom, and return its data set (fields by name).

    most: largest number of bytes of the unpacked file; a ValueError if there are more
    options: for pydicom's dcmread
    """
    file = io.BytesIO(content)
    reader = _package("pydicom.filereader")
    reader.read_preamble(file, force=True)
    if reader._read_file_meta_info(file).get("TransferSyntaxUID") == DEFLATED:
        # pydicom would unpack the rest of the file as a whole. So it is unpacked here piece by piece, only to count.
        size = 0
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        while part := file.read(2**16):
            size += len(unpacker.decompress(part))
            refuse_large(size, most)
    file.seek(0)
    return _package("pydicom").dcmread(file, force=True, **options)


def _pixels_of_dicom(content: bytes, most: int) -> np.ndarray:
    """Read the pixels of a DICOM file, and apply its slope and intercept.

    If the file has a window, the values are then scaled so that the ends of the window become 0 and 1. High values are
    white: images in which low values are white are inverted. The pixels of colour images stay as they are stored.

    most: largest number of bytes of the pixels; a ValueError if there are more
    """
    pixels = _package("pydicom.pixels")
    fields = _read_dicom(content, most)
    frames = int(fields.get("NumberOfFrames") or 1)
    refuse_large(fields.get("Rows", 0) * fields.get("Columns", 0) * frames * BYTES_PER_PIXEL, most)
    values = fields.pixel_array
    if fields.get("PhotometricInterpretation") == "PALETTE COLOR":
        return pixels.apply_color_lut(values, fields)
    if fields.get("SamplesPerPixel", 1) != 1:
        return values

    # `low` and `high`: the smallest and the largest value that the file could have, after slope and intercept.
    is_signed = fields.PixelRepresentation
    smallest_stored = -(2 ** (fields.BitsStored - 1)) if is_signed else 0
    stored_ends = np.array([smallest_stored, smallest_stored + 2**fields.BitsStored - 1])
    values = pixels.apply_modality_lut(values, fields)
    low, high = pixels.apply_modality_lut(stored_ends, fields)
    if fields.get("WindowCenter") is not None:
        # Values far outside the window become its ends.
        window_low, window_high = pixels.apply_windowing(np.array([-1e12, 1e12]), fields)
        values = (pixels.apply_windowing(values, fields) - window_low) / (window_high - window_low)
        low = 0
        high = 1
    if fields.get("PhotometricInterpretation") == "MONOCHROME1":  # Low values are white: swap low and high.
        values = float(low) + float(high) - values
    return values.astype(np.float32)


def _package(name: str) -> Any:
    """Import a package that only some kinds of files need; a UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is needed to read these images ({error}). Run: pip install {package}") from None


def picture_of_bands(pixels: np.ndarray) -> Image.Image:
    """Make a picture of pixels (height x width x channels): of floats, the first three bands, or the first in grey."""
    bands = pixels[:, :, : 3 if pixels.shape[2] >= 3 else 1]
    if bands.dtype != np.uint8:
        low, high = np.percentile(bands, (2, 98), axis=(0, 1))
        bands = ((bands - low) / np.maximum(high - low, 1e-12) * 255).clip(0, 255).astype(np.uint8)
    return Image.fromarray(bands[:, :, 0] if bands.shape[2] == 1 else bands)


def shown_bands(channels: int) -> str:
    return f"bands 1, 2, 3 of {channels} in false colour" if channels >= 3 else f"band 1 of {channels}"
