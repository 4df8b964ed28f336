"""Tables and verdict of benchmark_data.py, without torch."""

from __future__ import annotations

import math
from typing import Any

from tools.common.tables import Section
from tools.common.turns import Ratio
from utils.program import started_as
from utils.text import counted

OURS, TIMM = "vitamp", "timm"
"""Names of the contenders, in tables and files."""
TITLES = {
    "train": "Training: images per second of CPU time",
    "val": "Validation: images per second of CPU time",
}
ENOUGH = 1.1
"""How many times as fast as the model a loader must be, so that the model never waits."""


def sections(results: dict[str, Any]) -> list[Section]:
    """One table per part that was measured."""
    made = []
    for part, title in TITLES.items():
        rows = [["", "images / CPU s", f"to {TIMM}"]]
        for name, row in results.get(part, {}).items():
            rows.append([name, f"{row['images_per_second']:.0f}", _ratio(row["to"].get(TIMM))])
        made += [Section(title, rows)] if rows[1:] else []
    if results.get("loader"):
        rows = [["workers", OURS, TIMM, "ratio", "by CPU time"]]
        for workers, row in results["loader"].items():
            ratios = _ratio(row["to"]), _ratio(row["to_by_core_time"])
            rows.append([workers, f"{row[OURS]:.0f}", f"{row[TIMM]:.0f}", *ratios])
        ratios = f"ratios of {OURS} to {TIMM} by wall-clock time, then by CPU time (of all processes)"
        made.append(Section(f"Through the loaders, batches of {results['batch']}: images per second; {ratios}", rows))
    return made


def _ratio(fields: dict[str, float] | None) -> str:
    return "" if fields is None else str(Ratio(**fields))


def verdict(results: dict[str, Any], appetite: float) -> str:
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
        text += f" About {math.ceil(ENOUGH * appetite / per_core)} cores would keep up, or fewer after packing the "
        text += f"images ({started_as('scripts/pack_images.py')})."
    return text
