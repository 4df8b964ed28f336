"""scripts/dev/results.py: metrics of a run, and tables of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.dev.results import RESULTS, ages, one_run, table
from tests.tools.made_runs import make_run
from utils.errors import UserError


@pytest.mark.parametrize("cut", [0, 1])
def test_unfinished_run_is_refused(tmp_path: Path, cut: int) -> None:
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[: -1 if cut else 0]) + cut * '\n{"event": "ru')
    with pytest.raises(UserError, match="did not finish"):
        one_run(run)


def test_recipes_compared_by_seed_have_one_row_each() -> None:
    found = json.loads((RESULTS / "digits_shown_less.json").read_text(encoding="utf-8"))
    text = table("digits_shown_less")
    lines = text.splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {4}, "the recipe and two seeds"
    assert "| vit_digits_16_drop50 | 94.17, 95.00 | 96.39, 96.11 |" in lines
    assert sum(line.startswith("| vit_") for line in lines) == len({run["recipe"] for run in found["runs"]})
    assert "drop 50 % 30.8" in text
    assert found["runs"][0]["command"] in text


def test_speeds_stand_beside_their_command_and_commit() -> None:
    """Measured in bf16: -amp alone, which is fp16 on a GPU, does not give them."""
    text = table("h200_summary")
    git = json.loads((RESULTS / "peers_h200_large.json").read_text(encoding="utf-8"))["git"]
    assert f"commit {git['commit'][:7]}" in text
    for part in ("-precisions bf16 -compile", "`-amp bf16 TRAIN.COMPILE=whole`", "in fp16 was 13 % slower", "1 round,"):
        assert part in text
    assert f"commit {git['commit'][:7]}:" in table("peers_h200_large")


def test_ages_name_every_result_that_has_a_commit() -> None:
    """Counted in commits, or said to be of another history (a shallow clone has no commits to count)."""
    lines = ages()
    assert {line.split()[0] for line in lines} >= {"peers_h200_base.json", "compare_digits.json", "tests.json"}
    assert all(line.endswith((" commits ago", "not in this history")) for line in lines)
