"""Images of any number of channels and any depth as arrays: for `vitamp.load`, and for training.

Values stay as they are stored; of DICOM, slope and window are applied. Several files of one image are a zip of them.
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
"""DATA.BITS -> type of the values; floats may have 16 or 64 bits, too"""
DEFLATED = "1.2.840.10008.1.2.1.99"
"""Transfer syntax of DICOM files that are compressed as a whole"""


def read_bands(image: bytes | np.ndarray, channels: int, bits: int | str, most: int = MOST_BYTES) -> np.ndarray:
    """An image file, or an array, as height x width x channels.

    ValueError, in half a sentence, unless a model of these channels and bits takes it, and it has at most `most` bytes.
    """
    paths = getattr(image, "paths", ())
    arrays = list[np.ndarray]()
    for number, part in enumerate(_parts(image, most)):
        try:
            array = part if isinstance(part, np.ndarray) else _read(part, most)
            arrays.append(_arranged(array, channels))
        except Exception as error:
            if paths:
                error.add_note(f"its file {paths[number]}")
            raise
        most -= array.nbytes
    kinds = [f"{one.shape[1]} x {one.shape[0]} of {one.dtype.name}" for one in arrays]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            place = f" ({paths[number]})" if paths else ""
            raise ValueError(f"its files differ: {kinds[0]} and {kind}{place}")
    pixels = np.concatenate(arrays, axis=2)
    _check(pixels, channels, bits)
    return pixels


def _check(pixels: np.ndarray, channels: int, bits: int | str) -> None:
    """ValueError unless a model of these channels and bits takes these pixels."""
    if pixels.size == 0:
        raise ValueError(f"its shape is {' x '.join(map(str, pixels.shape))}, which has no pixels")
    kind = pixels.dtype
    wanted = DTYPES[str(bits)]
    if kind.kind == "i":
        raise ValueError(f"its values are {kind.name}, which have a sign; store uint16, or floats with DATA.BITS=float")
    if kind.name != wanted and not (wanted == "float32" and kind.kind == "f"):
        raise ValueError(f"its values are {kind.name}; DATA.BITS {bits} takes {wanted}")
    if pixels.shape[2] != channels:
        files = "" if pixels.shape[2] > channels else ", or name its other files in a table: docs/bands.md"
        raise ValueError(f"it has {pixels.shape[2]} channels; DATA.IMAGE_CHANNELS is {channels}{files}")
    if kind.kind == "f":
        wrong = pixels.size - int(np.isfinite(pixels).sum())
        if wrong:
            raise ValueError(f"{wrong:,} of its {pixels.size:,} values are NaN or infinity")


def _parts(image: bytes | np.ndarray, most: int) -> Iterator[bytes | np.ndarray]:
    """The files in a zip, one after the other; of another image, that alone."""
    if isinstance(image, np.ndarray) or not image.startswith(ZIP):
        yield image
        return
    with zipfile.ZipFile(io.BytesIO(image)) as files:
        refuse_large(sum(info.file_size for info in files.infolist()), most)
        for info in files.infolist():
            # Others unpack as much as they like at once.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("its files are compressed by another method than deflate")
            with files.open(info) as file:
                yield file.read(info.file_size)  # no more, even if the file's size is a lie


class SeveralFiles(bytes):
    """Several files of one image as one zip, so that all that handles an image's bytes handles them, too."""

    paths: Sequence[str] = ()
    """Of the files, for errors: the bytes of equal images are equal, wherever these are."""


def together(contents: Sequence[bytes], paths: Sequence[str] = ()) -> SeveralFiles:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as packed:
        for number, content in enumerate(contents, start=1):
            packed.writestr(zipfile.ZipInfo(f"{number}"), content)
    files = SeveralFiles(whole.getvalue())
    files.paths = paths
    return files


def planes_of(
    image: str | Path | Sequence[str | Path] | np.ndarray, channels: int, bits: int | str, most: int = MOST_BYTES
) -> torch.Tensor:
    """The values of a file, of the files of one image, or of an array, as channels x height x width."""
    if not isinstance(image, np.ndarray):
        paths = [image] if isinstance(image, str | Path) else image
        contents = [read_regular(path, most) for path in paths]
        image = read_bands(contents[0] if len(contents) == 1 else together(contents), channels, bits, most)
    pixels = read_bands(image, channels, bits, most)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32))


def _arranged(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Height x width x channels. Of three axes, that of the channels is the first or the last, and short."""
    pixels = pixels.squeeze() if pixels.ndim > 3 else pixels
    if pixels.ndim == 2:
        return pixels[:, :, None]
    if pixels.ndim != 3:
        raise ValueError(f"its shape is {' x '.join(map(str, pixels.shape))}; an image has height, width and channels")
    first = pixels.shape[0]
    last = pixels.shape[2]
    channels_first = first == channels or (last != channels and first < last)
    return pixels.transpose(1, 2, 0) if channels_first else pixels


def _read(content: bytes, most: int) -> np.ndarray:
    """The array that one file holds, with its axes as they are stored."""
    if content.startswith(NUMPY):
        file = io.BytesIO(content)
        first = np.lib.format.read_magic(file) == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        refuse_large(math.prod(shape) * dtype.itemsize, most)
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    if content[128:132] == b"DICM":  # such files may begin as a TIFF does
        return _of_dicom(content, most)
    if content.startswith(TIFF):
        tifffile = _package("tifffile")
        tifffile.logger().setLevel("CRITICAL")  # the reason that is raised says enough
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            refuse_large(file.series[0].nbytes, most)
            return file.series[0].asarray()
    with Image.open(io.BytesIO(content), formats=BY_PILLOW) as image:
        refuse_large(BYTES_PER_PIXEL * image.width * image.height, most)
        if (content[:4], content[24]) == DEEP_PNG:  # Pillow keeps 8 bits of colours
            from torchvision.io import ImageReadMode, decode_image

            encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            return decode_image(encoded, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
        if image.mode not in MODES:
            raise ValueError(f"its colour mode is {image.mode}; store grey, RGB or RGBA")
        # Mode "I" is Pillow's of 16-bit PGM.
        array = np.asarray(image)
        return array.astype(np.uint16) if image.mode == "I" else array


def has_window(content: bytes | np.ndarray, most: int) -> bool:
    """Whether a DICOM file has a window, whose ends become 0 and 1. A broken one has none."""
    return _dicom(bytes(content), most, stop_before_pixels=True).get("WindowCenter") is not None


def _dicom(content: bytes, most: int, **how: bool) -> Any:
    """The fields of a DICOM file. One compressed as a whole is unpacked as a whole, so its size comes first."""
    file = io.BytesIO(content)
    reader = _package("pydicom.filereader")
    reader.read_preamble(file, True)
    if reader._read_file_meta_info(file).get("TransferSyntaxUID") == DEFLATED:
        size = 0
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        while part := file.read(2**16):
            size += len(unpacker.decompress(part))
            refuse_large(size, most)
    file.seek(0)
    return _package("pydicom").dcmread(file, force=True, **how)


def _of_dicom(content: bytes, most: int) -> np.ndarray:
    """The stored values with slope and intercept; scaled to 0..1 over the window, if there is one. White is high."""
    pixels = _package("pydicom.pixels")
    about = _dicom(content, most)
    frames = int(about.get("NumberOfFrames") or 1)
    refuse_large(about.get("Rows", 0) * about.get("Columns", 0) * frames * BYTES_PER_PIXEL, most)
    values = about.pixel_array
    if about.get("PhotometricInterpretation") == "PALETTE COLOR":  # the values number colours
        return pixels.apply_color_lut(values, about)
    if about.get("SamplesPerPixel", 1) != 1:
        return values
    least = -(2 ** (about.BitsStored - 1)) if about.PixelRepresentation else 0
    ends = np.array([least, least + 2**about.BitsStored - 1])
    values = pixels.apply_modality_lut(values, about)
    low, high = pixels.apply_modality_lut(ends, about)
    if about.get("WindowCenter") is not None:
        low, high = pixels.apply_windowing(np.array([-1e12, 1e12]), about)  # beyond the window
        values = (pixels.apply_windowing(values, about) - low) / (high - low)
        low = 0
        high = 1
    if about.get("PhotometricInterpretation") == "MONOCHROME1":  # low values are white
        values = float(low) + float(high) - values
    return values.astype(np.float32)


def _package(name: str) -> Any:
    """A package that only some kinds of files need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is needed to read these images ({error}). Run: pip install {package}") from None


def picture_of_bands(pixels: np.ndarray) -> Image.Image:
    """A picture of pixels (height x width x channels). Of floats, which bands are: the first three, or one in grey."""
    bands = pixels[:, :, : 3 if pixels.shape[2] >= 3 else 1]
    if bands.dtype != np.uint8:
        low, high = np.percentile(bands, (2, 98), axis=(0, 1))
        bands = ((bands - low) / np.maximum(high - low, 1e-12) * 255).clip(0, 255).astype(np.uint8)
    return Image.fromarray(bands[:, :, 0] if bands.shape[2] == 1 else bands)


def shown_bands(channels: int) -> str:
    return f"bands 1, 2, 3 of {channels} in false colour" if channels >= 3 else f"band 1 of {channels}"
