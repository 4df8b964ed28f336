"""JPEG files by nvImageCodec on the CPU, which decodes a region of a file and passes over the rest."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from datasets.decoding.jpeg import JpegStored
from datasets.decoding.stored import Box, in_channels

END = b"\xff\xd9"


class RegionStored(JpegStored):
    """A JPEG file of which only the crop is decoded. What this decoder cannot do falls to simplejpeg."""

    def cut(self, box: Box) -> np.ndarray:
        # The decoder does not see that the end is missing once it has the region, nor does it decode at a smaller size.
        if self.factor > 1 or not self.data.endswith(END):
            return super().cut(box)
        library, decoder, as_stored = _decoder(self.depth)
        left, top, width, height = box
        region = library.Region(top, left, top + height, left + width)
        image = decoder.decode(library.CodeStream(self.data).get_sub_code_stream(region=region), params=as_stored)
        if image is None:
            return super().cut(box)
        return in_channels(np.asarray(image), self.channels)


@functools.cache
def _decoder(depth: int) -> tuple[Any, Any, Any]:
    """The library, a decoder of this process (made at first use, so that it is never forked), and its parameters."""
    with _silence():
        nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
        # Without a list of backends it looks for a GPU, and without one decodes everything to None.
        decoder = nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
            max_num_cpu_threads=1,
            backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
        )
    colours = nvimgcodec.ColorSpec.GRAY if depth == 1 else nvimgcodec.ColorSpec.SRGB
    return nvimgcodec, decoder, nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=colours)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """It names every GPU library it does not find, past Python's own streams. None of them is needed."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
