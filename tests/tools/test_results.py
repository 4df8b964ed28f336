"""The tables of speeds and of the verdict's errors on the pages are made of their results files."""

from __future__ import annotations

import json

import pytest

from scripts.dev.gpu_table import PAGES, kept_table
from tests.program import ROOT


@pytest.mark.parametrize("page", PAGES)
def test_speeds_on_the_pages_are_measured(page: str) -> None:
    made = kept_table()
    assert len(made) > 5, "a row for each model"
    assert "\n".join(made) in (ROOT / page).read_text(encoding="utf-8")


def verdict_table() -> list[str]:
    """A row for each kind of contenders: false claims over all its rows, and power with 1,000 images and 3 seeds."""
    rows = json.loads((ROOT / "docs" / "results" / "verdict_error.json").read_text())["rows"]
    made = []
    for kind in dict.fromkeys(name.partition(";")[0] for name in rows):
        of_kind, cells = [row for name, row in rows.items() if name.startswith(f"{kind};")], [kind.partition(" (")[0]]
        usual = rows.get(f"{kind}; 1,000 images, 3 seeds, 2 contenders", {})
        for method in ("seeds alone", "verdict"):
            wrong = [row[method].get("false claims", row[method].get("missed")) for row in of_kind if method in row]
            cells.append(f"{min(wrong):.0f} to {max(wrong):.0f} %" if wrong else "")
        cells += [f"{usual[method]['power']:.0f} %" if usual else "" for method in ("seeds alone", "verdict")]
        made.append("| " + " | ".join(cells) + " |")
    return made


def test_errors_of_the_verdict_on_its_page_are_measured() -> None:
    made = verdict_table()
    assert len(made) > 8, "a row for each kind"
    assert "\n".join(made) in (ROOT / "docs" / "compare.md").read_text(encoding="utf-8"), "\n".join(made)
