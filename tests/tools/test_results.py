"""Speeds beside timm in the README and on the page of benchmarks are those of their results files."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.program import ROOT

LOOPS = ("timm, bf16", "timm, fused, compiled, bf16", "ours, compiled, bf16")


@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_speeds_on_the_pages_are_measured(size: str) -> None:
    results = json.loads((ROOT / f"docs/results/peers_h200_{size}.json").read_text(encoding="utf-8"))
    turns = [[turn["images_per_second"] for turn in results["turns"][name]] for name in LOOPS]
    timm, best, ours = map(statistics.median, turns)
    row = f"{timm:,.0f} images/s | {best:,.0f} | **{ours:,.0f}** | {ours / timm:.2f}x, {ours / best:.2f}x |"
    for page in ("README.md", "docs/benchmarks.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert row in text
        assert f"commit {results['git']['commit'][:7]}" in text
