"""Images of any number of channels and any depth as arrays: for `vitamp.load`, and for training.

TIFF, NumPy's files, DICOM, PNG with 16 bits and what Pillow reads; several files of one image as a zip of them. Values
stay as they are stored; of DICOM, slope and window are applied.
"""

from __future__ import annotations

import importlib
import io
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vitamp.errors import UserError

ENDINGS = (".npy", ".npz", ".dcm")
"""Of the files that only this module reads"""
NUMPY, ZIP, PNG = b"\x93NUMPY", b"PK\x03\x04", b"\x89PNG"
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
DEPTH_OF_PNG = 24
"""Place of the byte with the bits of a value"""
BY_PILLOW = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "JPEG2000")
MODES = ("L", "LA", "RGB", "RGBA", "F", "I", "I;16", "I;16B", "I;16L")
MOST_BYTES = 2**32
"""Limit against small files that decode to more than the memory holds"""
DTYPES = {"8": "uint8", "16": "uint16", "float": "float32"}
"""DATA.BITS -> type of the values; floats may have 16 or 64 bits, too"""


def read_bands(content: bytes, channels: int, bits: int | str) -> np.ndarray:
    """The image as height x width x channels. ValueError, in half a sentence, unless a model of these takes it."""
    if not content.startswith(ZIP):
        return checked(arranged(_read(content), channels), channels, bits)
    with zipfile.ZipFile(io.BytesIO(content)) as files:
        _refuse_large(sum(info.file_size for info in files.infolist()))
        parts = [arranged(_read(files.read(info)), channels) for info in files.infolist()]
    for part in parts[1:]:
        if part.shape[:2] != parts[0].shape[:2] or part.dtype != parts[0].dtype:
            one, other = (f"{one.shape[1]} x {one.shape[0]} of {one.dtype.name}" for one in (parts[0], part))
            raise ValueError(f"its files differ: {one} and {other}")
    return checked(np.concatenate(parts, axis=2), channels, bits)


def checked(pixels: np.ndarray, channels: int, bits: int | str) -> np.ndarray:
    """The pixels (height x width x channels); ValueError unless a model of these channels and bits takes them."""
    kind, wanted = pixels.dtype, DTYPES[str(bits)]
    if kind.kind == "i":
        raise ValueError(f"its values are {kind.name}, which have a sign; store uint16, or floats with DATA.BITS=float")
    if kind.name != wanted and not (wanted == "float32" and kind.kind == "f"):
        raise ValueError(f"its values are {kind.name}; DATA.BITS {bits} takes {wanted}")
    if pixels.shape[2] != channels:
        raise ValueError(f"it has {pixels.shape[2]} channels; DATA.IMAGE_CHANNELS is {channels}")
    if kind.kind == "f" and (wrong := pixels.size - int(np.isfinite(pixels).sum())):
        raise ValueError(f"{wrong:,} of its {pixels.size:,} values are NaN or infinity")
    return pixels


def together(contents: Sequence[bytes]) -> bytes:
    """Several files of one image as one zip, so that all that handles an image's bytes handles them, too."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as files:
        for number, content in enumerate(contents, start=1):
            files.writestr(zipfile.ZipInfo(f"{number}"), content)
    return whole.getvalue()


def is_dicom(content: bytes) -> bool:
    return content[128:132] == b"DICM"


def _read(content: bytes) -> np.ndarray:
    """The array that one file holds, with its axes as they are stored."""
    if content.startswith(NUMPY):
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    if content.startswith(TIFF):
        with _package("tifffile").TiffFile(io.BytesIO(content)) as file:
            series = file.series[0]
            _refuse_large(series.size * series.dtype.itemsize)
            return series.asarray()
    if is_dicom(content):
        return _of_dicom(content)
    with Image.open(io.BytesIO(content), formats=BY_PILLOW) as image:
        _refuse_large(8 * image.width * image.height)
        if content.startswith(PNG) and content[DEPTH_OF_PNG] == 16:  # Pillow keeps 8 bits of colours
            from torchvision.io import ImageReadMode, decode_image

            planes = decode_image(_as_tensor(content), ImageReadMode.UNCHANGED).numpy()
            return np.ascontiguousarray(planes.transpose(1, 2, 0))
        if image.mode not in MODES:
            raise ValueError(f"its colour mode is {image.mode}; store grey, RGB or RGBA")
        # Mode "I" is Pillow's of 16-bit PGM.
        return np.asarray(image).astype(np.uint16) if image.mode == "I" else np.asarray(image)


def _of_dicom(content: bytes) -> np.ndarray:
    """The stored values with slope and intercept; scaled to 0..1 over the window, if there is one. White is high."""
    pixels = _package("pydicom.pixels")
    about = _package("pydicom").dcmread(io.BytesIO(content))
    _refuse_large(about.get("Rows", 0) * about.get("Columns", 0) * int(about.get("NumberOfFrames") or 1) * 8)
    values = about.pixel_array
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


def arranged(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Height x width x channels. Of three axes, that of the channels is the first or the last, and short."""
    if pixels.ndim > 3:
        pixels = pixels.squeeze()
    if pixels.ndim == 2:
        return pixels[:, :, None]
    if pixels.ndim != 3:
        raise ValueError(f"its shape is {' x '.join(map(str, pixels.shape))}; an image has height, width and channels")
    first, last = pixels.shape[0], pixels.shape[2]
    return pixels.transpose(1, 2, 0) if first == channels or (last != channels and first < last) else pixels


def _refuse_large(size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"it decodes to {size:,} bytes; {MOST_BYTES:,} are allowed")


def _as_tensor(content: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _package(name: str) -> Any:
    """A package that only some kinds of files need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{package} is needed to read these images ({error}). Run: pip install {package}") from None


SHOWN = (2, 98)
"""Percentiles of a band that become black and white in a picture"""


def false_colour(pixels: np.ndarray) -> Image.Image:
    """A picture of an image (height x width x channels): of its first three bands, or of the first one in grey."""
    bands = pixels[:, :, : 3 if pixels.shape[2] >= 3 else 1].astype(np.float32)
    low, high = np.percentile(bands, SHOWN, axis=(0, 1))
    grey = ((bands - low) / np.maximum(high - low, 1e-12) * 255).clip(0, 255).astype(np.uint8)
    return Image.fromarray(grey[:, :, 0] if grey.shape[2] == 1 else grey)


def shown_bands(channels: int) -> str:
    """Which bands `false_colour` shows."""
    return f"bands 1, 2, 3 of {channels} in false colour" if channels >= 3 else f"band 1 of {channels}"
