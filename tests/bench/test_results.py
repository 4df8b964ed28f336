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


def interval_tables() -> tuple[list[str], list[str]]:
    """How often intervals miss the truth, and their widths: of groups, beside a bootstrap; and of drops."""
    about = json.loads((ROOT / "docs" / "results" / "interval_error.json").read_text())

    def span(rows: list[dict[str, dict[str, float]]], kinds: list[str], what: str) -> str:
        values = [row[kind][what] for row in rows for kind in kinds if kind in row]
        return f"{min(values):.0f} to {max(values):.0f}"

    of_groups = []
    for design in dict.fromkeys(name.partition(";")[0] for name in about["groups"]):
        rows = [row for name, row in about["groups"].items() if name.startswith(f"{design};")]
        cells = [design]
        for kind in ("top-1", "comparison", "paired"):
            cells += [f"{span(rows, [each], 'missed')} %" for each in (kind, f"{kind}, bootstrap")]
        cells += [span(rows, [each], "width") for each in ("top-1", "top-1, bootstrap")]
        of_groups.append("| " + " | ".join(cells) + " |")
    of_drops = []
    for images in dict.fromkeys(name.partition(", a")[0] for name in about["drops"]):
        rows = [row for name, row in about["drops"].items() if name.startswith(f"{images}, a drop")]
        cells = [images]
        for kind in ("the same images", "other images by seed"):
            cells += [f"{span(rows, [kind], 'missed')} %", span(rows, [kind], "width")]
        of_drops.append("| " + " | ".join(cells) + " |")
    return of_groups, of_drops


def test_errors_of_intervals_on_their_page_are_measured() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for made in interval_tables():
        assert len(made) > 3, "a row for each design"
        assert "\n".join(made) in page, "\n".join(made)
