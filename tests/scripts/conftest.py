"""What tests of several tools need."""

from __future__ import annotations

import pytest

from scripts.pack_images import main
from tests.scripts.packing import Pack


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Pack:
    """The program's own function: a process of its own takes seconds to begin. Its flags do not stay behind."""
    from utils import cli

    monkeypatch.setattr(cli, "FLAGS", cli.FLAGS)

    def call(*words: object) -> int:
        flags, by_name = dict(cli.FLAGS), dict(cli.BY_NAME)
        try:
            return main([str(word) for word in words])
        finally:
            for table, before in ((cli.FLAGS, flags), (cli.BY_NAME, by_name)):
                table.clear()  # pyright: ignore[reportAttributeAccessIssue]
                table.update(before)  # pyright: ignore

    return call
