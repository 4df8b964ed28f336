#!/usr/bin/env python3
"""Write the tables of the docs from the results in docs/results/.

    python scripts/dev/results.py tables            # rewrite the tables in README.md and docs/
    python scripts/dev/results.py tables --check    # exit 1 if a table differs from its JSON file
    python scripts/dev/results.py ages              # how many commits ago each result was measured

The -json files of scripts/benchmark_amp.py are results as they are. A table is between `<!-- results: digits -->` and
`<!-- end -->` in a Markdown file; `h200_summary` has one row per model of the H200 comparison with timm.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmark_amp.command import TABLES  # noqa: E402
from tools.benchmark_amp.results import Results, markdown  # noqa: E402
from tools.common.comparison.verdict import spread  # noqa: E402
from tools.common.tables import at_commit, in_markdown  # noqa: E402
from utils.text import counted  # noqa: E402

RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(name: str) -> str:
    """Markdown of a results file."""
    if name == "h200_summary":
        return h200_summary()
    fields = read(name)
    if "table" in fields:
        results = Results(fields)
        return markdown(TABLES[results["table"]].section(results), results, f"LINK/{name}.json")
    lines = by_model(fields["runs"])
    return "\n".join([*lines[:-1], "", f"{lines[-1]} All runs: [{name}.json](LINK/{name}.json)."]) + "\n"


def by_model(runs: list[dict[str, Any]]) -> list[str]:
    """One row per model and precision: mean and standard deviation over the seeds; then how it was measured."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["model"], run["precision"]), []).append(run)
    rows = [["model", "precision", "seeds", "best top-1 (%)", "last top-1 (%)", "skipped"]]
    for names, of_one in groups.items():
        best, last = (spread([run[key] for run in of_one], 2) for key in ("best_acc1", "last_acc1"))
        rows.append([*names, str(len(of_one)), best, last, str(sum(run["skipped"] for run in of_one))])
    of = "plain weights and EMA" if all("best_of" in run for run in runs) else "the plain weights"
    first, versions = runs[0], runs[0]["versions"]
    how = (
        f"Best top-1: the highest in all validations of {of}. Both top-1 columns: mean and standard deviation over the "
        "seeds. Skipped: updates skipped by loss scaling, in all runs of the row. "
        f"Measured on {first['device']}, torch {versions['torch']}, timm {versions['timm']}, {first['date']}; "
        f"the first command: `{first['command']}`."
    )
    return [*in_markdown(rows), how]


def h200_summary() -> str:
    """One row per model: images/s of timm's loop, of timm with its best flags, and ours, all in bf16; then how."""
    rows = [
        [
            "model, batch",
            "timm, bf16",
            "timm, fused AdamW, compiled",
            "vitamp, compiled",
            "speed-up over each timm column",
        ]
    ]
    for size in ("small", "base", "large"):
        results = Results(read(f"peers_h200_{size}"))
        names = ("timm, bf16", "timm, fused, compiled, bf16", "ours, compiled, bf16")
        plain, best, ours = (statistics.median(results.per_turn(name, "images_per_second")) for name in names)
        words = results["command"].split()
        model, batch = (words[words.index(flag) + 1] for flag in ("-model", "-batch_size"))
        speeds = f"{plain:,.0f} images/s", f"{best:,.0f}", f"**{ours:,.0f}**"
        rows.append([f"{model}, {batch}", *speeds, f"{ours / plain:.2f}x, {ours / best:.2f}x"])
    how = "benchmark_amp.py timm -model MODEL -batch_size N -precisions bf16 -compile -timm_train train.py"
    when = f"{results['date']}{at_commit(results)}"
    about = f"Measured with `python scripts/{how}`, {when}: on one GPU, without dropout, {results['rounds']} rounds."
    # What is known of `-amp` alone, which is fp16 on a GPU.
    modes = Results(read("modes_h200_base"))
    fp16, bf16 = (modes.median(f"{mode}, synthetic", "images_per_second") or 0.0 for mode in ("fp16", "bf16"))
    advice = (
        "To train in this way, use `-amp bf16 TRAIN.COMPILE=whole` on one GPU. `-amp` alone is fp16 with loss scaling "
        f"on a GPU. Not compiled, a ViT-B in fp16 was {100 * (1 - fp16 / bf16):.0f} % slower than in bf16 "
        f"({fp16:,.0f} and {bf16:,.0f} images/s, {counted(modes['rounds'], 'round')}, batch 128); compiled, fp16 is "
        "unmeasured."
    )
    return "\n".join([*in_markdown(rows), "", about, "", advice]) + "\n"


def ages() -> list[str]:
    """For each results file that names its commit: how many commits ago that was."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        fields = json.loads(path.read_text(encoding="utf-8"))
        commit = (fields.get("git") or fields).get("commit")
        if commit:
            found = subprocess.run(
                ["git", "rev-list", "--count", f"{commit}..HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            age = f"{found.stdout.strip()} commits ago" if found.returncode == 0 else "not in this history"
            lines.append(f"{path.name:30} {commit[:7]}, {age}")
    return lines


def filled(page: Path) -> str:
    """The page with every table generated from its JSON file."""
    link = "docs/results" if page.parent == ROOT else "results"
    text = page.read_text(encoding="utf-8")
    return MARKED.sub(lambda match: match[1] + table(match[2]).replace("LINK", link) + match[3], text)


def main(words: list[str]) -> int:
    if words in (["tables"], ["tables", "--check"]):
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
        stale = [page for page in pages if filled(page) != page.read_text(encoding="utf-8")]
        for page in stale:
            print(f"{page.relative_to(ROOT)}: {'stale' if '--check' in words else 'rewritten'}")
            if "--check" not in words:
                page.write_text(filled(page), encoding="utf-8")
        return 1 if stale and "--check" in words else 0
    if words == ["ages"]:
        print("\n".join(ages()))
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
