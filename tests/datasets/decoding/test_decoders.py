"""JPEG decoding: only the rows that the crop needs, and the settings of decoding."""

from __future__ import annotations

import builtins
import io
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError

from datasets import check_dataset
from datasets.decoding.choice import decoder_of
from datasets.decoding.jpeg import JpegStored
from datasets.decoding.stored import Box, PilStored
from tests.datasets.pictures import encoded, picture, square
from tests.program import Result
from utils.config.data import DataConfig
from utils.errors import UserError

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


def test_a_format_for_which_pil_would_start_a_program_is_refused() -> None:
    """An EPS file named .jpg: PIL knows the format and has Ghostscript run what is in it."""
    file = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    assert Image.open(io.BytesIO(file)).format == "EPS"
    with pytest.raises(UnidentifiedImageError):
        PilStored(file, 3)


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


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make packages impossible to import."""

    def hide(name: str) -> None:
        real = builtins.__import__

        def refuse(wanted: str, *args: Any, **kwargs: Any) -> Any:
            if wanted.split(".")[0] == name:
                raise ModuleNotFoundError(f"No module named {wanted!r}")
            return real(wanted, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
        for loaded in [module for module in sys.modules if module.split(".")[0] == name]:
            monkeypatch.setitem(sys.modules, loaded, None)

    return hide


def test_decoder_auto_falls_back_to_pil(
    settings: Settings,
    without: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vitamp"), "propagate", True)
    auto, file = settings(DATASET="synthetic"), encoded(picture(60, 50))
    check_dataset(auto, 10)
    assert (decoder_of(auto), caplog.text) == ("simplejpeg", "")
    expected = square(settings(DECODER="pil"), True, file)
    without("simplejpeg")
    check_dataset(auto, 10)
    assert decoder_of(auto) == "pil"
    assert "pip install simplejpeg" in caplog.text
    assert torch.equal(square(auto, True, file), expected)


def test_missing_decoder_is_refused_before_the_run(settings: Settings, without: Callable[[str], None]) -> None:
    without("simplejpeg")
    with pytest.raises(UserError) as caught:
        check_dataset(settings(DATASET="synthetic", DECODER="simplejpeg"), 10)
    assert "DATA.DECODER is simplejpeg" in str(caught.value)
    assert "pip install simplejpeg" in str(caught.value)


def test_run_json_names_the_decoder(imagenet: Path, vitamp: Callable[..., Result], tmp_path: Path) -> None:
    words = ["MODEL.NAME=tiny", "MODEL.PATCH_SIZE=8", "MODEL.EMBED_DIM=16", "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2"]
    words += ["MODEL.NUM_CLASSES=4", "DATA.IMAGE_SIZE=16", "TRAIN.NUM_EPOCHS=1", "DEVICE=cpu", "DATA.NUM_WORKERS=0"]
    for decoder, named in (("auto", "simplejpeg"), ("pil", "pil")):
        folder = tmp_path / decoder
        done = vitamp(
            *("-dataset", "imagenet2012", "-data_path", imagenet, "-batch_size", 8, "-output", folder),
            *(f"DATA.DECODER={decoder}", *words),
        )
        assert done.code == 0, done.text
        assert json.loads((folder / "run.json").read_text())["choices"]["decoder"] == named
