#!/usr/bin/env python3
"""Results of runs as JSON under docs/results/, and the tables of the docs made from them.

    python scripts/dev/results.py collect digits RUN [RUN ...]   # the runs' folders -> docs/results/digits.json
    python scripts/dev/results.py tables                         # rewrite the tables in README.md and docs/
    python scripts/dev/results.py tables --check                 # exit 1 if a table is not what its JSON says

What scripts/benchmark_data.py and scripts/benchmark_amp.py write (-json), and the compare.json of scripts/compare.py,
is a result as it is.

A table stands between `<!-- results: digits -->` and `<!-- end -->` in a Markdown file; `h200_summary` is one line per
model of the H200 comparison with timm.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmark_amp.frame import with_todays_name  # noqa: E402
from tools.benchmark_amp.measure import markdown as table_as_markdown  # noqa: E402
from tools.benchmark_amp.tables import TABLES  # noqa: E402
from tools.benchmark_data.report import markdown  # noqa: E402
from tools.common.runs import best_top1, read_lines, seconds, warm  # noqa: E402
from tools.compare.table import markdown as comparison_as_markdown  # noqa: E402
from utils.config import load_config  # noqa: E402
from utils.errors import UserError  # noqa: E402

RESULTS = ROOT / "docs" / "results"
TABLE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def one_run(folder: Path) -> Row:
    """What a finished run says of itself."""
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    config = load_config(str(folder / "config.yaml")).config
    lines = read_lines(folder)
    train, val = ([line for line in lines if line["event"] == kind] for kind in ("train", "val"))
    best = best_top1(lines)
    if not lines or lines[-1]["event"] != "run" or lines[-1]["what"] != "end" or best is None:
        raise UserError(f"{folder}: this run did not end; only whole runs are results.")
    return {
        "model": config.MODEL.NAME,
        "data": config.DATA.DATASET,
        "precision": about["choices"]["precision"],
        "processes": about["choices"]["world_size"],
        "seed": config.SEED,
        "epochs": config.TRAIN.NUM_EPOCHS,
        "best_acc1": best[0],
        "best_of": "plain weights and EMA",
        "last_acc1": val[-1]["acc1"],
        "skipped": train[-1]["skipped"],
        "seconds": seconds(lines),
        "images_per_second": statistics.median(warm(lines, "train", "images_per_second")),
        "command": _portable(about["command"]),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _portable(command: str) -> str:
    """The command line as a reader would type it: no folders of the machine it ran on."""
    words = shlex.split(command)
    return shlex.join(["python", *(Path(w).name if Path(w).is_absolute() else w for w in words[1:])])


def collect(name: str, folders: Iterable[Path]) -> Path:
    rows = sorted(
        (one_run(folder) for folder in folders), key=lambda row: (row["model"], row["precision"], row["seed"])
    )
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": rows}, indent=2) + "\n", encoding="utf-8")
    return path


def table(name: str) -> str:
    """One line a model and precision: mean and spread over the seeds, and where and when it was measured.

    What benchmark_data.py, benchmark_amp.py and compare.py wrote has tables of its own.
    """
    if name == "h200_summary":
        return h200_summary()
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if "table" in found:
        found = with_todays_name(found)
        return table_as_markdown(TABLES[found["table"]], found, f"LINK/{name}.json")
    if "compared" in found:
        return comparison_as_markdown(found, f"LINK/{name}.json")
    if "runs" not in found:
        return markdown(found, f"LINK/{name}.json")
    runs = found["runs"]
    if "update" in found:
        return by_recipe(found, name)
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        groups.setdefault((run["model"], run["precision"]), []).append(run)
    lines = [
        "| model | precision | seeds | best top-1 (%) | last top-1 (%) | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for (model, precision), rows in groups.items():
        best, last = (_spread([row[key] for row in rows]) for key in ("best_acc1", "last_acc1"))
        skipped = sum(row["skipped"] for row in rows)
        lines.append(f"| {model} | {precision} | {len(rows)} | {best} | {last} | {skipped} |")
    versions = runs[0]["versions"]
    of = "of plain weights and EMA alike" if all("best_of" in run for run in runs) else "of the plain weights"
    lines += [
        "",
        f"Best top-1: the highest of all validations, {of}. Mean and standard deviation over the seeds. "
        f"Measured on {runs[0]['device']}, torch {versions['torch']}, timm {versions['timm']}, {runs[0]['date']}; "
        f"first of the commands: `{runs[0]['command']}`. Every run is in [{name}.json](LINK/{name}.json).",
    ]
    return "\n".join(lines) + "\n"


def by_recipe(found: Row, name: str) -> str:
    """One line per recipe: last top-1 of each seed. Below: the time of an update, and how it was measured."""
    runs = found["runs"]
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        f"| recipe | {' | '.join(f'seed {seed}: last top-1 (%), EMA' for seed in seeds)} |",
        f"| --- |{' --- |' * len(seeds)}",
    ]
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        of = {run["seed"]: run for run in runs if run["recipe"] == recipe}
        cells = [", ".join(f"{of[seed][key]:.2f}" for key in ("last_acc1", "last_ema_acc1")) for seed in seeds]
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    update, versions = found["update"], runs[0]["versions"]
    times = ", ".join(f"{what} {ms:.1f}" for what, ms in update["milliseconds"].items())
    lines += [
        "",
        f"{update['what']}: {times}.",
        "",
        f"Measured on {runs[0]['device']}, torch {versions['torch']}, timm {versions['timm']}, {runs[0]['date']}; "
        f"first of the commands: `{runs[0]['command']}`. Every run is in [{name}.json](LINK/{name}.json).",
    ]
    return "\n".join(lines) + "\n"


def h200_summary() -> str:
    """One line per model: images/s of timm's loop, of timm with its best flags, and ours, all in bf16."""
    lines = [
        "| model, batch | timm, bf16 | timm, fused AdamW, compiled | vitamp, compiled | vitamp against the two |",
        "|---|---|---|---|---|",
    ]
    for size in ("small", "base", "large"):
        found = json.loads((RESULTS / f"peers_h200_{size}.json").read_text(encoding="utf-8"))
        names = ("timm, bf16", "timm, fused, compiled, bf16", "ours, compiled, bf16")
        plain, best, ours = (_images_per_second(found, name) for name in names)
        words = found["command"].split()
        model, batch = (words[words.index(flag) + 1] for flag in ("-model", "-batch_size"))
        speeds = f"{plain:,.0f} images/s | {best:,.0f} | **{ours:,.0f}**"
        lines.append(f"| {model}, {batch} | {speeds} | {ours / plain:.2f}x, {ours / best:.2f}x |")
    return "\n".join(lines) + "\n"


def _images_per_second(found: Row, name: str) -> float:
    return statistics.median(turn["images_per_second"] for turn in found["turns"][name])


def _spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def filled(page: Path) -> str:
    """The page with every table as its JSON says."""
    link = "docs/results" if page.parent == ROOT else "results"
    text = page.read_text(encoding="utf-8")
    return TABLE.sub(lambda found: found[1] + table(found[2]).replace("LINK", link) + found[3], text)


def main(words: list[str]) -> int:
    if words[:1] == ["collect"] and len(words) > 2:
        print(collect(words[1], map(Path, words[2:])))
        return 0
    if words in (["tables"], ["tables", "--check"]):
        stale = [page for page in pages() if filled(page) != page.read_text(encoding="utf-8")]
        for page in stale:
            print(f"{page.relative_to(ROOT)}: {'stale' if '--check' in words else 'rewritten'}")
            if "--check" not in words:
                page.write_text(filled(page), encoding="utf-8")
        return 1 if stale and "--check" in words else 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
