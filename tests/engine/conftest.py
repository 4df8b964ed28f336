"""Fixtures for the tests of the engine."""

from __future__ import annotations

import pytest

from engine.speed.amx import build


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for CPUs with AMX: by AMX where it is, else by emulated tiles; skipped without AVX-512."""
    if build.why_unavailable():
        monkeypatch.setenv(build.EMULATED, "1")
    if why := build.why_unavailable():
        pytest.skip(why)
