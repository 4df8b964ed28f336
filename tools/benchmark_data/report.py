"""What benchmark_data.py tells: tables, a verdict in words, a file with all figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tools.common.tables import in_columns, in_markdown
from tools.common.turns import OURS, TIMM, TORCHVISION
from utils.files import write_atomically
from utils.log import log
from utils.output_file import writing

Found = dict[str, Any]
TITLES = {
    "train": "Training: images a second of one core's time",
    "val": "Validation: images a second of one core's time",
}
ENOUGH = 1.1
"""A loader that is faster than the model by no more than this will keep it waiting now and then."""


def lines(found: Found) -> list[str]:
    """Everything as tables for the terminal."""
    about = found["images"]
    told = [
        f"{about['count']} images, about {about['width']} x {about['height']} and {about['kilobytes']:.0f} KB, "
        f"{100 * about['jpeg']:.0f} % JPEG; {found['rounds']} rounds of {found['images_a_round']}"
    ]
    for part, title in TITLES.items():
        if found.get(part):
            told += ["", title, *in_columns(_per_core_rows(found[part]))]
    if found.get("loader"):
        told += ["", f"Through the loaders, batches of {found['batch']}: images a second by the clock"]
        told += in_columns(_loader_rows(found["loader"]))
    if found.get("stages"):
        told += ["", "Where a core's time goes, in milliseconds an image (training)"]
        told += in_columns([["stage", "ms"], *([name, f"{ms:.3f}"] for name, ms in found["stages"].items())])
    return told


def _per_core_rows(part: Found) -> list[list[str]]:
    rows = [["", "images/s", f"to {TIMM}", f"to {TORCHVISION}"]]
    for name, row in part.items():
        rows.append([name, f"{row['images_per_second']:.0f}", *(_ratio(row["to"].get(o)) for o in (TIMM, TORCHVISION))])
    return rows


def _loader_rows(part: Found) -> list[list[str]]:
    rows = [["workers", OURS, TIMM, "ratio", "by core time"]]
    for workers, row in part.items():
        rows.append(
            [workers, f"{row[OURS]:.0f}", f"{row[TIMM]:.0f}", _ratio(row["to"]), _ratio(row["to_by_core_time"])]
        )
    return rows


def _ratio(found: dict[str, float] | None) -> str:
    return "" if found is None else f"{found['median']:.2f} ({found['least']:.2f} to {found['most']:.2f})"


def verdict(found: Found, appetite: float) -> str:
    """Does loading keep up with a model that takes `appetite` images a second, and if not, what would?"""
    rates = {int(workers): row[OURS] for workers, row in found.get("loader", {}).items()}
    per_core = found.get("train", {}).get(OURS, {}).get("images_per_second")
    if not rates:
        if per_core is None:
            return "Nothing was measured that could be held against -appetite: it needs the part loader or train."
        return f"The model takes {appetite:.0f} images/s: about {math.ceil(appetite / per_core)} cores' work to load."
    workers = max(rates, key=lambda count: rates[count])
    best = rates[workers]
    said = f"The model takes {appetite:.0f} images/s; loading gives {best:.0f} at best, with {workers} workers"
    if best >= ENOUGH * appetite:
        enough = min(count for count, rate in rates.items() if rate >= ENOUGH * appetite)
        return f"{said}: loading is not the bottleneck. {enough} workers are enough."
    waits = 100 * max(0.0, 1 - best / appetite)
    wait = f"{said}: loading is the bottleneck, the model would wait {waits:.0f} % of its time."
    if per_core is not None:
        cores = math.ceil(ENOUGH * appetite / per_core)
        wait += f" About {cores} cores would keep up."
        packed = {name: row for name, row in found["train"].items() if name.startswith(f"{OURS}, ")}
        wait += " With images packed by scripts/pack_images.py:" if packed else ""
        for name, row in packed.items():
            cores = math.ceil(ENOUGH * appetite / row["images_per_second"])
            wait += f" {name.removeprefix(f'{OURS}, ')}: {cores}."
    return wait


def markdown(found: Found, link: str) -> str:
    """The same as tables of a page, and where and when it was measured."""
    told: list[str] = []
    for part, title in TITLES.items():
        if found.get(part):
            told += [f"{title}, and ratios within the run (median, least and greatest round):", ""]
            told += [*in_markdown(_per_core_rows(found[part])), ""]
    if found.get("loader"):
        told += ["Batches of bytes arriving in the process that trains, images a second by the clock:", ""]
        told += [*in_markdown(_loader_rows(found["loader"])), ""]
    if found.get("stages"):
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in found["stages"].items())
        told += [f"Our training path by stage, milliseconds of a core for an image: {stages}.", ""]
    cut = ", fewer where the time was up" if found["cut"] else ""
    about, versions = found["images"], ", ".join(f"{name} {v}" for name, v in found["versions"].items())
    told.append(
        f"{about['count']} JPEGs of about {about['width']} x {about['height']}, {about['kilobytes']:.0f} KB; "
        f"{found['rounds']} rounds of {found['images_a_round']} images{cut}. Measured on {found['machine']}, "
        f"{versions}, {found['date']}: `{found['command']}`. All figures: [{Path(link).name}]({link})."
    )
    return "\n".join(told) + "\n"


def report(found: Found, appetite: float | None, json_file: Path | None) -> None:
    """Print it, and write it where that was asked for."""
    for line in lines(found):
        print(line)
    if found["cut"]:
        log.warning("the time was up (-budget_min) before all rounds were done; the figures are of fewer")
    if appetite is not None:
        found["appetite"], found["verdict"] = appetite, verdict(found, appetite)
        print(f"\n{found['verdict']}")
    if json_file is not None:
        with writing(json_file, "-json"):
            write_atomically(json_file, json.dumps(found, indent=2) + "\n")
        log.info("all figures: %s", json_file)
