"""Images of any number of channels and any depth as arrays: for `vitamp.load`, and for training.

Values stay as they are stored; of DICOM, slope and window are applied. Several files of one image are a zip of them.
"""

import importlib
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitamp.errors import UserError

ENDINGS = (".npy", ".npz", ".dcm")
"""Of the files that only this module reads"""
NUMPY, ZIP, DEEP_PNG = b"\x93NUMPY", b"PK\x03\x04", (b"\x89PNG", 16)
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BY_PILLOW = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "JPEG2000")
MODES = ("L", "LA", "RGB", "RGBA", "F", "I", "I;16", "I;16B", "I;16L")
DTYPES = {"8": "uint8", "16": "uint16", "float": "float32"}
"""DATA.BITS -> type of the values; floats may have 16 or 64 bits, too"""
MOST_BYTES = 2**32
"""Limit against small files that decode to more than the memory holds"""


def read_bands(image: bytes | np.ndarray, channels: int, bits: int | str) -> np.ndarray:
    """An image file, or an array, as height x width x channels.

    ValueError, in half a sentence, unless a model of these channels and bits takes it.
    """
    parts: list[bytes | np.ndarray] = [image]
    if isinstance(image, bytes) and image.startswith(ZIP):
        with zipfile.ZipFile(io.BytesIO(image)) as files:
            _refuse_large(sum(info.file_size for info in files.infolist()))
            parts = [files.read(info) for info in files.infolist()]
    paths = getattr(image, "paths", ())
    arrays = []
    for number, part in enumerate(parts):
        try:
            arrays.append(_arranged(part if isinstance(part, np.ndarray) else _read(part), channels))
        except Exception as error:
            if paths:
                error.add_note(f"its file {paths[number]}")
            raise
    kinds = [f"{one.shape[1]} x {one.shape[0]} of {one.dtype.name}" for one in arrays]
    if other := next((number for number, kind in enumerate(kinds) if kind != kinds[0]), 0):
        place = f" ({paths[other]})" if paths else ""
        raise ValueError(f"its files differ: {kinds[0]} and {kinds[other]}{place}")
    pixels = np.concatenate(arrays, axis=2)
    kind, wanted = pixels.dtype, DTYPES[str(bits)]
    if kind.kind == "i":
        raise ValueError(f"its values are {kind.name}, which have a sign; store uint16, or floats with DATA.BITS=float")
    if kind.name != wanted and not (wanted == "float32" and kind.kind == "f"):
        raise ValueError(f"its values are {kind.name}; DATA.BITS {bits} takes {wanted}")
    if pixels.shape[2] != channels:
        files = "" if pixels.shape[2] > channels else ", or name its other files in a table: docs/bands.md"
        raise ValueError(f"it has {pixels.shape[2]} channels; DATA.IMAGE_CHANNELS is {channels}{files}")
    if kind.kind == "f" and (wrong := pixels.size - int(np.isfinite(pixels).sum())):
        raise ValueError(f"{wrong:,} of its {pixels.size:,} values are NaN or infinity")
    return pixels


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


def planes_of(image: str | Path | Sequence[str | Path] | np.ndarray, channels: int, bits: int | str) -> torch.Tensor:
    """The values of a file, of the files of one image, or of an array, as channels x height x width."""
    if not isinstance(image, np.ndarray):
        contents = [Path(path).read_bytes() for path in ([image] if isinstance(image, str | Path) else image)]
        image = read_bands(contents[0] if len(contents) == 1 else together(contents), channels, bits)
    pixels = read_bands(image, channels, bits)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32))


def _arranged(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Height x width x channels. Of three axes, that of the channels is the first or the last, and short."""
    pixels = pixels.squeeze() if pixels.ndim > 3 else pixels
    if pixels.ndim == 2:
        return pixels[:, :, None]
    if pixels.ndim != 3:
        raise ValueError(f"its shape is {' x '.join(map(str, pixels.shape))}; an image has height, width and channels")
    first, last = pixels.shape[0], pixels.shape[2]
    return pixels.transpose(1, 2, 0) if first == channels or (last != channels and first < last) else pixels


def _read(content: bytes) -> np.ndarray:
    """The array that one file holds, with its axes as they are stored."""
    if content.startswith(NUMPY):
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    if content[128:132] == b"DICM":  # such files may begin as a TIFF does
        return _of_dicom(content)
    if content.startswith(TIFF):
        tifffile = _package("tifffile")
        tifffile.logger().setLevel("CRITICAL")  # the reason that is raised says enough
        with tifffile.TiffFile(io.BytesIO(content)) as file:
            _refuse_large(file.series[0].nbytes)
            return file.series[0].asarray()
    with Image.open(io.BytesIO(content), formats=BY_PILLOW) as image:
        _refuse_large(8 * image.width * image.height)
        if (content[:4], content[24]) == DEEP_PNG:  # Pillow keeps 8 bits of colours
            from torchvision.io import ImageReadMode, decode_image

            encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            return decode_image(encoded, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
        if image.mode not in MODES:
            raise ValueError(f"its colour mode is {image.mode}; store grey, RGB or RGBA")
        # Mode "I" is Pillow's of 16-bit PGM.
        return np.asarray(image).astype(np.uint16) if image.mode == "I" else np.asarray(image)


def has_window(content: bytes | np.ndarray) -> bool:
    """Whether a DICOM file has a window, whose ends become 0 and 1. A broken one has none."""
    about = _package("pydicom").dcmread(io.BytesIO(bytes(content)), stop_before_pixels=True, force=True)
    return about.get("WindowCenter") is not None


def _of_dicom(content: bytes) -> np.ndarray:
    """The stored values with slope and intercept; scaled to 0..1 over the window, if there is one. White is high."""
    pixels = _package("pydicom.pixels")
    about = _package("pydicom").dcmread(io.BytesIO(content))
    _refuse_large(about.get("Rows", 0) * about.get("Columns", 0) * int(about.get("NumberOfFrames") or 1) * 8)
    values = about.pixel_array
    if about.get("PhotometricInterpretation") == "PALETTE COLOR":  # the values number colours
        return pixels.apply_color_lut(values, about)
    if about.get("SamplesPerPixel", 1) != 1:
        return values
    least = -(2 ** (about.BitsStored - 1)) if about.PixelRepresentation else 0
    ends = np.array([least, least + 2**about.BitsStored - 1])
    values, (low, high) = (pixels.apply_modality_lut(one, about) for one in (values, ends))
    if about.get("WindowCenter") is not None:
        low, high = pixels.apply_windowing(np.array([-1e12, 1e12]), about)  # beyond the window
        values = (pixels.apply_windowing(values, about) - low) / (high - low)
        low, high = 0, 1
    if about.get("PhotometricInterpretation") == "MONOCHROME1":  # low values are white
        values = float(low) + float(high) - values
    return values.astype(np.float32)


def _refuse_large(size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"it decodes to {size:,} bytes; {MOST_BYTES:,} are allowed")


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
