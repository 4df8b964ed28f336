"""The decoder of JPEG files (DATA.DECODER)."""

from __future__ import annotations

import importlib

from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log


def decoder_of(data: DataConfig) -> str:
    """Name of the JPEG decoder in use: DATA.DECODER with `auto` resolved."""
    if data.DECODER != "auto":
        return data.DECODER
    return "pil" if _simplejpeg_import_error() else "simplejpeg"


def check_decoder(data: DataConfig) -> None:
    """Raise UserError if the decoder that DATA.DECODER requires is not installed; warn if `auto` falls back to PIL."""
    if data.DECODER == "pil" or not (error := _simplejpeg_import_error()):
        return
    if data.DECODER == "simplejpeg":
        raise UserError(
            f"DATA.DECODER is simplejpeg, but simplejpeg cannot be loaded ({error}). "
            "Run `pip install simplejpeg`, or set DATA.DECODER to auto or pil."
        )
    log.warning("PIL decodes JPEG files, at half the speed of simplejpeg (%s). Run: pip install simplejpeg", error)


def _simplejpeg_import_error() -> str | None:
    """Message of the failed import; None if simplejpeg is installed."""
    try:
        importlib.import_module("simplejpeg")
    except ImportError as error:
        return str(error)
    return None
