#!/usr/bin/env python3
"""Write results of runs as JSON under docs/results/, and the tables of the docs from them.

    python scripts/dev/results.py collect digits RUN [RUN ...]   # the runs' folders -> docs/results/digits.json
    python scripts/dev/results.py tables                         # rewrite the tables in README.md and docs/
    python scripts/dev/results.py tables --check                 # exit 1 if a table differs from its JSON file
    python scripts/dev/results.py ages                           # how many commits ago each result was measured

The -json files of scripts/benchmark_data.py and scripts/benchmark_amp.py, and the compare.json of scripts/compare.py,
are results as they are.

A table is between `<!-- results: digits -->` and `<!-- end -->` in a Markdown file; `h200_summary` has one row per
model of the H200 comparison with timm.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmark_amp.report import markdown as table_as_markdown  # noqa: E402
from tools.benchmark_amp.results import Results  # noqa: E402
from tools.benchmark_amp.tables import TABLES  # noqa: E402
from tools.benchmark_data.report import markdown  # noqa: E402
from tools.common.tables import at_commit  # noqa: E402
from tools.compare.table import markdown as comparison_as_markdown  # noqa: E402
from utils.config import config_of_run  # noqa: E402
from utils.errors import UserError  # noqa: E402
from utils.record.history import History  # noqa: E402
from utils.record.run_folder import read_about  # noqa: E402
from utils.record.tasks import ONE_LABEL  # noqa: E402
from utils.record.weight_sets import PLAIN  # noqa: E402
from utils.text import counted  # noqa: E402

RESULTS = ROOT / "docs" / "results"
TABLE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def one_run(folder: Path) -> Row:
    """Metrics of a finished run."""
    about, config, history = read_about(folder), config_of_run(folder), History.of_run(folder)
    best = history.best(ONE_LABEL.best)
    if not history.ended or best is None:
        raise UserError(f"{folder}: this run did not finish; only finished runs are results.")
    return {
        "model": config.MODEL.NAME,
        "data": config.DATA.DATASET,
        "precision": about["choices"]["precision"],
        "optimizer": f"{config.TRAIN.OPTIMIZER.NAME}, learning rate {config.TRAIN.BASE_LR:g}",
        "processes": about["choices"]["world_size"],
        "seed": config.SEED,
        "epochs": config.TRAIN.NUM_EPOCHS,
        "best_acc1": best.value,
        "best_of": "plain weights and EMA",
        "last_acc1": history.last(ONE_LABEL.best).get(PLAIN),
        "skipped": history.skipped,
        "seconds": history.seconds,
        "images_per_second": history.images_per_second,
        "command": _portable(about["command"]),
        "device": about["device"],
        "versions": about["versions"],
        "date": about["started"][:10],
    }


def _portable(command: str) -> str:
    """The command line as a reader would type it, without folders of the machine."""
    words = shlex.split(command)
    return shlex.join(["python", *(Path(w).name if Path(w).is_absolute() else w for w in words[1:])])


def collect(name: str, folders: Iterable[Path]) -> Path:
    rows = sorted(
        (one_run(folder) for folder in folders),
        key=lambda row: (row["model"], row["precision"], row["optimizer"], row["seed"]),
    )
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"runs": rows}, indent=2) + "\n", encoding="utf-8")
    return path


def table(name: str) -> str:
    """Markdown of a results file. benchmark_amp.py, benchmark_data.py and compare.py format their own results."""
    if name == "h200_summary":
        return h200_summary()
    fields = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    link = f"LINK/{name}.json"
    if "table" in fields:
        results = Results(fields)
        return table_as_markdown(TABLES[results["table"]], results, link)
    if "compared" in fields:
        return comparison_as_markdown(fields, link)
    if "runs" not in fields:
        return markdown(fields, link)
    if any("program" in run for run in fields["runs"]):
        return by_program(fields, name)
    if "lora" in fields:
        return lora_against_full(fields, name)
    if "update" in fields:
        return by_recipe(fields, name)
    return by_model(fields["runs"], name)


def by_model(runs: list[Row], name: str) -> str:
    """One row per model, optimiser and precision: mean and standard deviation over the seeds."""
    several = len({run.get("optimizer") for run in runs}) > 1
    groups: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        model = f"{run['model']}, {run['optimizer']}" if several else run["model"]
        groups.setdefault((model, run["precision"]), []).append(run)
    lines = [
        "| model | precision | seeds | best top-1 (%) | last top-1 (%) | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for (model, precision), rows in groups.items():
        best, last = (_spread([row[key] for row in rows]) for key in ("best_acc1", "last_acc1"))
        skipped = sum(row["skipped"] for row in rows)
        lines.append(f"| {model} | {precision} | {len(rows)} | {best} | {last} | {skipped} |")
    of = "of plain weights and EMA" if all("best_of" in run for run in runs) else "of the plain weights"
    about = (
        f"Best top-1: the highest in all validations {of}. Both top-1 columns: mean and standard deviation over the "
        "seeds. Skipped: updates skipped by loss scaling, in all runs of the row."
    )
    return "\n".join([*lines, "", f"{about} {_measured(runs, name)}"]) + "\n"


def _measured(runs: list[Row], name: str) -> str:
    first, versions = runs[0], runs[0]["versions"]
    return (
        f"Measured on {first['device']}, torch {versions['torch']}, timm {versions['timm']}, {first['date']}; "
        f"the first command: `{first['command']}`. All runs: [{name}.json](LINK/{name}.json)."
    )


def by_program(fields: Row, name: str) -> str:
    """One row per program, or start of a training: last top-1 of each seed, mean and standard deviation."""
    runs, versions = fields["runs"], fields["versions"]
    seeds = sorted({run["seed"] for run in runs})
    what = "program" if "timm_train" in fields else "start"
    lines = [
        f"| {what} | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |",
        f"| --- |{' --- |' * (len(seeds) + 1)}",
    ]
    for program in dict.fromkeys(run["program"] for run in runs):
        of = {run["seed"]: run["acc1"] for run in runs if run["program"] == program}
        cells = [f"{of[seed]:.2f}" if seed in of else "-" for seed in seeds]
        lines.append(f"| {program} | {' | '.join(cells)} | {_spread(list(of.values()))} |")
    how = f"Measured on {fields['device']}, torch {versions['torch']}, timm {versions['timm']}, {fields['date']}"
    timm = f"train.py of timm {fields['timm_train']}" if "timm_train" in fields else "each training"
    settings = f"{timm} had `{fields['settings']}`"
    if "pretraining" in fields:
        settings += f", and the learning without labels `{fields['pretraining']}`"
    return "\n".join([*lines, "", f"{how}; {settings}. All runs: [{name}.json](LINK/{name}.json)."]) + "\n"


def by_recipe(fields: Row, name: str) -> str:
    """One row per recipe: last top-1 of each seed. Below: how the time of an update was measured, and the time."""
    runs = fields["runs"]
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        f"| recipe | {' | '.join(f'seed {seed}: last top-1 (%), plain and EMA' for seed in seeds)} |",
        f"| --- |{' --- |' * len(seeds)}",
    ]
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        of = {run["seed"]: run for run in runs if run["recipe"] == recipe}
        cells = [", ".join(f"{of[seed][key]:.2f}" for key in ("last_acc1", "last_ema_acc1")) for seed in seeds]
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    update = fields["update"]
    times = ", ".join(f"{what} {ms:.1f}" for what, ms in update["milliseconds"].items())
    return "\n".join([*lines, "", f"{update['what']}: {times}.", "", _measured(runs, name)]) + "\n"


def lora_against_full(fields: Row, name: str) -> str:
    """Two tables: what each contender costs, and its top-1 on few digits by learning rate."""
    versions = fields["versions"]
    how = f"{fields['device']}, torch {versions['torch']}, timm {versions['timm']}, {fields['date']}"
    about = f"Measured on {how}, with `{fields['command']}`. All values: [{name}.json](LINK/{name}.json)."
    return "\n".join([*_costs(fields["lora"]), "", *_top1_by_rate(fields["runs"]), "", about]) + "\n"


def _costs(rows: list[Row]) -> list[str]:
    """The first row's seconds are what the others' are divided by, update by update."""
    lines = [
        "| trained | parameters | memory | time of an update | checkpoint |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        ratios = [mine / first for mine, first in zip(row["seconds"], rows[0]["seconds"], strict=True)]
        time = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        time = time if row is not rows[0] else f"1 ({statistics.median(row['seconds']):.1f} s)"
        sizes = f"{row['peak_bytes'] / 1e9:.2f} GB | {time} | {row['checkpoint_bytes'] / 1e6:.1f} MB"
        lines.append(f"| {row['contender']} | {row['trained']:,} | {sizes} |")
    return lines


def _top1_by_rate(runs: list[Row]) -> list[str]:
    rates = dict.fromkeys(run["learning_rate"] for run in runs)
    titles = " | ".join(f"learning rate {rate}" for rate in rates)
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        found.setdefault(run["contender"], {}).setdefault(run["learning_rate"], []).append(run["acc1"])
    lines = [f"| trained | {titles} |", f"| --- |{' ---: |' * len(rates)}"]
    return lines + [f"| {name} | {' | '.join(_spread(of[rate]) for rate in rates)} |" for name, of in found.items()]


def h200_summary() -> str:
    """One row per model: images/s of timm's loop, of timm with its best flags, and ours, all in bf16; then how."""
    lines = [
        "| model, batch | timm, bf16 | timm, fused AdamW, compiled | vitamp, compiled "
        "| speed-up over each timm column |",
        "|---|---|---|---|---|",
    ]
    for size in ("small", "base", "large"):
        results = Results(json.loads((RESULTS / f"peers_h200_{size}.json").read_text(encoding="utf-8")))
        names = ("timm, bf16", "timm, fused, compiled, bf16", "ours, compiled, bf16")
        plain, best, ours = (statistics.median(results.per_turn(name, "images_per_second")) for name in names)
        words = results["command"].split()
        model, batch = (words[words.index(flag) + 1] for flag in ("-model", "-batch_size"))
        speeds = f"{plain:,.0f} images/s | {best:,.0f} | **{ours:,.0f}**"
        lines.append(f"| {model}, {batch} | {speeds} | {ours / plain:.2f}x, {ours / best:.2f}x |")
    how = "benchmark_amp.py timm -model MODEL -batch_size N -precisions bf16 -compile -timm_train train.py"
    when = f"{results['date']}{at_commit(results)}"
    about = f"Measured with `python scripts/{how}`, {when}: on one GPU, without dropout, {results['rounds']} rounds."
    return "\n".join([*lines, "", about, "", *_fp16_against_bf16()]) + "\n"


def _fp16_against_bf16() -> list[str]:
    """What is known of `-amp` alone, which is fp16 on a GPU."""
    results = Results(json.loads((RESULTS / "modes_h200_base.json").read_text(encoding="utf-8")))
    fp16, bf16 = (results.median(f"{mode}, synthetic", "images_per_second") for mode in ("fp16", "bf16"))
    if fp16 is None or bf16 is None:
        return []
    rounds = counted(results["rounds"], "round")
    return [
        "To train in this way, use `-amp bf16 TRAIN.COMPILE=whole` on one GPU. `-amp` alone is fp16 with loss scaling "
        f"on a GPU. Not compiled, a ViT-B in fp16 was {100 * (1 - fp16 / bf16):.0f} % slower than in bf16 "
        f"({fp16:,.0f} and {bf16:,.0f} images/s, {rounds}, batch 128); compiled, fp16 is unmeasured."
    ]


def _spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


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


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def filled(page: Path) -> str:
    """The page with every table generated from its JSON file."""
    link = "docs/results" if page.parent == ROOT else "results"
    text = page.read_text(encoding="utf-8")
    return TABLE.sub(lambda match: match[1] + table(match[2]).replace("LINK", link) + match[3], text)


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
    if words == ["ages"]:
        print("\n".join(ages()))
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
