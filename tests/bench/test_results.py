"""The tables of speeds, and of errors of the verdict and of label searches, on the pages are made of results files."""

import json

import pytest

from bench.gpu_table import PAGES, kept_table
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


def label_table() -> list[str]:
    """A row for each set: how often wrong labels are found, and precision and recall of the lists."""
    rows = json.loads((ROOT / "docs" / "results" / "label_searches.json").read_text())["rows"]
    made = []
    for name in sorted({row["data"] for row in rows}):
        right, changed = ([row for row in rows if (row["data"], row["changed"]) == (name, how)] for how in (0.0, 0.02))
        cells = [
            name,
            *(f"{sum(row['found'] for row in each)} of {len(each)}" if each else "" for each in (right, changed)),
        ]
        hits = sum(row["right"] for row in changed)
        for of_all in ("look_wrong", "wrong"):
            cells.append(f"{hits / sum(row[of_all] for row in changed):.2f}" if changed else "")
        made.append("| " + " | ".join(cells) + " |")
    return made


def test_label_searches_on_their_page_are_measured() -> None:
    made = label_table()
    assert len(made) > 6, "a row for each set"
    assert "\n".join(made) in (ROOT / "docs" / "check_labels.md").read_text(encoding="utf-8"), "\n".join(made)
