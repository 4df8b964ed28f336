"""What tests of several tools need."""

from __future__ import annotations

import pytest

from tests.tools.packing import Pack
from tools.pack_images.command import main


@pytest.fixture
def pack() -> Pack:
    """The program's own function: a process of its own takes seconds to begin."""
    return lambda *words: main([str(word) for word in words])
