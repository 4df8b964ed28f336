"""Fixtures for tests of several tools."""

from __future__ import annotations

import pytest

from tests.tools.packing import Pack
from tools.pack_images.command import main


@pytest.fixture
def pack() -> Pack:
    """Call pack_images.py in this process: starting another takes seconds."""
    return lambda *words: main([str(word) for word in words])
