"""Report of benchmark_data.py: tables, a verdict in words, and a file with all measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tools.benchmark_data.rates import OURS, TIMM, TORCHVISION
from tools.common.output_file import writing
from tools.common.results.section import Chart, Section, for_docs, for_terminal
from tools.common.tables import source
from tools.common.turns import Ratio
from utils.files import write_atomically
from utils.log import log
from utils.text import counted

Results = dict[str, Any]
TITLES = {
    "train": "Training: images per second of CPU time",
    "val": "Validation: images per second of CPU time",
}
LOADER_RATIOS = f"ratios of {OURS} to {TIMM} by wall-clock time, then by CPU time (of all processes)"
NEEDED = "needed by the model (-appetite)"
ENOUGH = 1.1
"""How many times as fast as the model a loader must be, so that the model never waits."""


def lines(results: Results) -> list[str]:
    """All tables for the terminal."""
    about = results["images"]
    images = (
        f"{about['count']} images, about {about['width']} x {about['height']} and {about['kilobytes']:.0f} KB, "
        f"{100 * about['jpeg']:.0f} % JPEG; {counted(results['rounds'], 'round')} of {results['images_a_round']} images"
    )
    return [images, *for_terminal(sections(results))]


def sections(results: Results) -> list[Section]:
    """One table per part that was measured."""
    made = [Section(title, _per_core_rows(results[part])) for part, title in TITLES.items() if results.get(part)]
    if results.get("loader"):
        title = f"Through the loaders, batches of {results['batch']}: images per second; {LOADER_RATIOS}"
        made.append(Section(title, _loader_rows(results["loader"])))
    if results.get("stages"):
        rows = [["stage", "ms"], *([name, f"{ms:.3f}"] for name, ms in results["stages"].items())]
        made.append(Section("CPU time by stage: milliseconds per image (training)", rows))
    return made


def charts(results: Results, appetite: float | None) -> list[Chart]:
    """One chart per part that was measured."""
    drawn = []
    for part, title in TITLES.items():
        if rows := results.get(part):
            drawn.append(Chart(title, "images/s", bars={name: row["images_per_second"] for name, row in rows.items()}))
    if rows := results.get("loader"):
        lines = {name: [(float(workers), row[name]) for workers, row in rows.items()] for name in (OURS, TIMM)}
        if appetite is not None:
            lines[NEEDED] = [(float(workers), appetite) for workers in rows]
        title = "Through the loaders"
        drawn.append(Chart(title, "images/s", lines=lines, below="loading processes", dashed=(NEEDED,)))
    if results.get("stages"):
        drawn.append(Chart("CPU time by stage (training)", "ms per image", bars=results["stages"]))
    return drawn


def _per_core_rows(part: Results) -> list[list[str]]:
    rows = [["", "images / CPU s", f"to {TIMM}", f"to {TORCHVISION}"]]
    for name, row in part.items():
        rows.append([name, f"{row['images_per_second']:.0f}", *(_ratio(row["to"].get(o)) for o in (TIMM, TORCHVISION))])
    return rows


def _loader_rows(part: Results) -> list[list[str]]:
    rows = [["workers", OURS, TIMM, "ratio", "by CPU time"]]
    for workers, row in part.items():
        rows.append(
            [workers, f"{row[OURS]:.0f}", f"{row[TIMM]:.0f}", _ratio(row["to"]), _ratio(row["to_by_core_time"])]
        )
    return rows


def _ratio(fields: dict[str, float] | None) -> str:
    return "" if fields is None else str(Ratio(**fields))


def verdict(results: Results, appetite: float) -> str:
    """Whether loading keeps up with a model that trains `appetite` images per second, and if not, what would."""
    rates = {int(workers): row[OURS] for workers, row in results.get("loader", {}).items()}
    per_core = results.get("train", {}).get(OURS, {}).get("images_per_second")
    if not rates:
        if per_core is None:
            return "No verdict on -appetite: it needs a complete round of -parts loader or train."
        needed = counted(math.ceil(appetite / per_core), "core")
        return f"The model trains on {appetite:.0f} images/s: loading needs about {needed}."
    workers = max(rates, key=lambda count: rates[count])
    best = rates[workers]
    text = f"The model trains on {appetite:.0f} images/s; loading reaches {best:.0f} with {counted(workers, 'worker')}"
    if best >= ENOUGH * appetite:
        enough = min(count for count, rate in rates.items() if rate >= ENOUGH * appetite)
        return f"{text}: loading is not the bottleneck. {enough} workers are enough."
    waits = 100 * max(0.0, 1 - best / appetite)
    text += f": loading is the bottleneck, or nearly so. The model would wait {waits:.0f} % of its time."
    if per_core is not None:
        text += f" About {math.ceil(ENOUGH * appetite / per_core)} cores would keep up."
        packed = {name: row for name, row in results["train"].items() if name.startswith(f"{OURS}, ")}
        text += " Cores needed after scripts/pack_images.py:" if packed else ""
        for name, row in packed.items():
            cores = math.ceil(ENOUGH * appetite / row["images_per_second"])
            text += f" {name.removeprefix(f'{OURS}, ')}: {cores}."
    return text


def markdown(results: Results, link: str) -> str:
    """All tables for a page of the docs, and how they were measured. `link`: the file with all measurements."""
    text = for_docs(sections(results))
    cut = ", fewer where the time ran out" if results["cut"] else ""
    about, versions = results["images"], ", ".join(f"{name} {v}" for name, v in results["versions"].items())
    text.append(
        "Ratios are the median, minimum and maximum over the rounds. "
        f"{about['count']} JPEGs of about {about['width']} x {about['height']}, {about['kilobytes']:.0f} KB; "
        f"{counted(results['rounds'], 'round')} of {results['images_a_round']} images{cut}. Measured on "
        f"{results['machine']}, {versions}, {results['date']}: `{results['command']}`. {source(link)}"
    )
    return "\n".join(text) + "\n"


def report(results: Results, appetite: float | None, json_file: Path | None) -> None:
    """Print the tables and the verdict, and write the file."""
    for line in lines(results):
        print(line)
    if results["cut"]:
        log.warning(
            "the time ran out (-budget_min) before all rounds were done; results are medians of fewer rounds, or are "
            "missing"
        )
    if appetite is not None:
        results["appetite"], results["verdict"] = appetite, verdict(results, appetite)
        print(f"\n{results['verdict']}")
    if json_file is not None:
        with writing(json_file, "-json"):
            write_atomically(json_file, json.dumps(results, indent=2) + "\n")
        log.info("all measurements: %s", json_file)
