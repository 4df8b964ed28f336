"""Speeds, errors of verdicts and intervals, and label searches on the pages are those of results files."""

import json

from bench.gpu_table import PAGE, kept_table
from tests.program import ROOT


def test_speeds_in_readme_are_measured() -> None:
    made = kept_table()
    assert len(made) > 5, "a row for each model"
    assert "\n".join(made) in PAGE.read_text(encoding="utf-8")


def test_errors_of_the_verdict_on_its_page_are_measured() -> None:
    """False claims over all rows, and power with 1,000 images and 3 seeds, where seeds shift and where they do not."""
    rows = json.loads((ROOT / "docs" / "results" / "verdict_error.json").read_text())["rows"]
    page = " ".join((ROOT / "docs" / "compare.md").read_text(encoding="utf-8").split())
    usual = {name: row for name, row in rows.items() if name.endswith("; 1,000 images, 3 seeds, 2 contenders")}
    for method, words in (
        ("verdict", "the verdict claims a difference in {} % of cases"),
        ("seeds alone", "seeds alone in {} % ("),
    ):
        claims = [row[method].get("false claims", row[method].get("missed")) for row in rows.values() if method in row]
        said = words.format(f"{min(claims):.0f} to {max(claims):.0f}")
        assert said in page, said
    for method, words in (
        ("verdict", "it sees 3 points in {} % of cases, or in {} % if a seed shifts"),
        ("seeds alone", "seeds alone in {} %, or in {} %."),
    ):
        still = list[float]()
        shifting = list[float]()
        for name, row in usual.items():
            if "power" in row.get(method, {}):
                (shifting if "shift" in name else still).append(row[method]["power"])
        said = words.format(*(f"{min(each):.0f} to {max(each):.0f}" for each in (still, shifting)))
        assert said in page, said


def test_label_searches_on_their_page_are_measured() -> None:
    rows = json.loads((ROOT / "docs" / "results" / "label_searches.json").read_text())["rows"]
    page = " ".join((ROOT / "docs" / "check_labels.md").read_text(encoding="utf-8").split())
    found = []
    for changed in (0.0, 0.02):
        of_kind = [row["found"] for row in rows if row["changed"] == changed]
        found.append(f"in {sum(of_kind)} of {len(of_kind)}")
    said = f"all labels right {found[0]}, and with 2 % changed {found[1]}: never in icons and photographs"
    assert said in page, said
    assert not any(row["found"] for row in rows if row["changed"] and row["data"].startswith(("icons", "photo")))


def interval_table() -> list[str]:
    """How often intervals of groups miss the truth, beside a bootstrap, and how wide they are."""
    about = json.loads((ROOT / "docs" / "results" / "interval_error.json").read_text())

    def span(rows: list[dict[str, dict[str, float]]], kinds: list[str], what: str) -> str:
        values = [row[kind][what] for row in rows for kind in kinds if kind in row]
        return f"{min(values):.0f} to {max(values):.0f}"

    of_groups = []
    for design in dict.fromkeys(name.partition(";")[0] for name in about["groups"]):
        rows = [row for name, row in about["groups"].items() if name.startswith(f"{design};")]
        cells = [design]
        for kind in ("top-1", "comparison"):
            cells += [f"{span(rows, [each], 'missed')} %" for each in (kind, f"{kind}, bootstrap")]
        cells.append(span(rows, ["top-1"], "width"))
        of_groups.append("| " + " | ".join(cells) + " |")
    return of_groups


def test_errors_of_intervals_on_their_page_are_measured() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    made = interval_table()
    assert len(made) > 3, "a row for each design"
    assert "\n".join(made) in page, "\n".join(made)
    drops = json.loads((ROOT / "docs" / "results" / "interval_error.json").read_text())["drops"]
    most = max(kind["missed"] for name, row in drops.items() if ", a drop" in name for kind in row.values())
    assert f"comparisons miss at most {most:.0f} %" in " ".join(page.split()), most
