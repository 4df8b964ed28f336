"""Fixtures for tests of several tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.program import Result
from tests.tools.packing import Pack
from tests.tools.timm_alone import Tool
from tools.export import command as export
from tools.pack_images.command import main


@pytest.fixture
def pack() -> Pack:
    """Call pack_images.py in this process: starting another takes seconds."""
    return lambda *words: main([str(word) for word in words])


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
