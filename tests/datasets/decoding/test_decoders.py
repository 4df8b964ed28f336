"""JPEG decoding: only the rows that the crop needs, and the settings of decoding."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch

from datasets import check_dataset
from datasets.base import Box
from datasets.decoding import JpegStored, decoder_of_jpeg
from datasets.transforms.pixels import Pixels
from tests.datasets.pictures import encoded, picture, square
from utils.config.data import DataConfig

Settings = Callable[..., DataConfig]


def jpeg(subsampling: str, width: int, height: int) -> bytes:
    return simplejpeg.encode_jpeg(np.asarray(picture(width, height)), 90, "RGB", subsampling)


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
@pytest.mark.parametrize("size", [(97, 131), (160, 128)])
def test_partial_jpeg_decoding_equals_full_decoding(subsampling: str, size: tuple[int, int]) -> None:
    file = jpeg(subsampling, *size)
    stored = JpegStored(file, 3)
    width, height = stored.width, stored.height
    complete = stored.cut(Box(0, 0, width, height))
    assert complete.shape == (height, width, 3)
    for bottom in range(1, height + 1):
        rows = stored._rows(bottom)
        assert bottom <= len(rows) <= height
        assert np.array_equal(rows[:bottom], complete[:bottom])
    assert len(stored._rows(1)) <= 32


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}])
def test_part_of_a_jpeg_is_decoded_once(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Progressive files and those with restarts are decoded in full, the others down to the last row needed."""
    calls: list[int] = []
    stored = JpegStored(encoded(picture(97, 131), **how), 3)
    decode = stored.decode

    def counted(*args: Any, **kwargs: Any) -> np.ndarray:
        calls.append(1)
        return decode(*args, **kwargs)

    monkeypatch.setattr(stored, "decode", counted)
    found = stored.cut(Box(5, 3, 20, 9))
    assert len(calls) == 1
    assert np.array_equal(found, stored.cut(Box(0, 0, 97, 131))[3:12, 5:25])


def test_pil_decodes_where_simplejpeg_is_missing(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    data, file = settings(DATASET="synthetic"), encoded(picture(60, 50))
    check_dataset(data, 10)
    assert (decoder_of_jpeg(), caplog.text) == ("simplejpeg", "")
    expected = square(data, True, file, 0, "pil")
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    check_dataset(data, 10)
    assert decoder_of_jpeg() == "pil"
    assert "pip install simplejpeg" in caplog.text
    random.seed(0)
    out = torch.empty_like(expected)
    Pixels(data, True)(file, out)
    assert torch.equal(out, expected)
