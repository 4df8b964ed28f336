"""The table of speeds on the pages is made of their results files."""

from __future__ import annotations

import pytest

from scripts.dev.gpu_table import PAGES, kept_table
from tests.program import ROOT


@pytest.mark.parametrize("page", PAGES)
def test_speeds_on_the_pages_are_measured(page: str) -> None:
    made = kept_table()
    assert len(made) > 5, "a row for each model"
    assert "\n".join(made) in (ROOT / page).read_text(encoding="utf-8")
