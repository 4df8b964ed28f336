"""scripts/dev/results.py: tables of the docs."""

from __future__ import annotations

import json

from scripts.dev.results import RESULTS, ages, main, table


def test_tables_of_the_pages_are_those_of_their_files() -> None:
    assert main(["tables", "--check"]) == 0


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
    assert {line.split()[0] for line in lines} >= {"peers_h200_base.json", "compare_digits.json"}
    assert all(line.endswith((" commits ago", "not in this history")) for line in lines)
