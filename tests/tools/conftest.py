"""Fixtures for tests of several tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.program import Result, train_tiny
from tests.tools.timm_alone import Tool
from tools.export import command as export


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that DATA.CACHE names if it is not set, in this process."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("utils.cache.DEFAULT", str(folder))
    return folder


@pytest.fixture
def bf16_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, -amp chooses bf16 whatever the CPU."""
    monkeypatch.setattr("engine.amp.precision.cpu_computes_in_bf16", lambda: True)


@pytest.fixture
def in_process(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[list[str]], int]], Callable[..., Result]]:
    """A tool that is called with its words in this process."""

    def of(command: Callable[[list[str]], int]) -> Callable[..., Result]:
        def call(*words: object) -> Result:
            capsys.readouterr()
            code = command([str(word) for word in words])
            said = capsys.readouterr()
            return Result(code, said.out, said.err)

        return call

    return of


@pytest.fixture
def export_tool(capfd: pytest.CaptureFixture[str]) -> Iterator[Tool]:
    """Call export.py in this process."""
    threads = torch.get_num_threads()

    def call(*words: object) -> tuple[int, str]:
        capfd.readouterr()
        code = export.main([str(word) for word in words])
        return code, "".join(capfd.readouterr())

    yield call
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def unlabelled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned from 12 images without labels. Not to be changed: tests share it."""
    place = tmp_path_factory.mktemp("unlabelled_run")
    (place / "images").mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "images" / f"{number}.png")
    words = ("-mae_pretrain", "MODEL.DECODER.EMBED_DIM=16", "MODEL.DECODER.DEPTH=1", "MODEL.DECODER.NUM_HEADS=2")
    data = ("-dataset", "images", "-data_path", place / "images", "-batch_size", 4)
    return train_tiny(place, *words, *data, "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0")
