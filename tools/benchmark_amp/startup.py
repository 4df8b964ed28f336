"""`startup`: seconds from the command to the first update, by part."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from tools.benchmark_amp.results import AGAIN, Metrics, Results, percent, shown
from tools.benchmark_amp.settings import images_of, set_up
from tools.benchmark_amp.table import Contender, Plan, Table
from tools.common.command_line import ToolLine
from tools.common.results.section import Chart, Section
from tools.common.settings import non_defaults
from utils.flags import Flag, whole
from utils.parent import as_child

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("startup_probe.py")
ABOUT = """Seconds from the command to the first update, by part: imports, model, data index, compiling.

    python scripts/benchmark_amp.py startup                     # the digits recipe of README.md
    python scripts/benchmark_amp.py startup -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet -amp

Every measurement starts main_single_gpu.py as a shell does, and ends it after a few updates. If parts are nested, time
counts for the innermost: an import by the model counts as import. `compiling` is how much longer the first update
takes than later ones. The time of `python -c 'import torch, timm'` is shown for comparison. From the second
measurement on, files are in the operating system's cache."""
FLAGS = (Flag("rounds", "how often each start is measured", "N", default=5, kind=whole(1)),)
COMMAND, FLOOR = "vitamp", "import torch, timm"
DIGITS = "configs/vit_digits.yaml"
TIMEOUT_SECONDS = 600
LEAST_SHOWN = 0.02
"""Fraction of the total; imports that take less are summed up."""
OTHERS = "other imports, each below 2 %"


def plan(line: ToolLine) -> Plan:
    words = _words(line)
    if not words:
        words = ["-cfg", str(ROOT / DIGITS)]
        line = replace(line, run=replace(line.run, cfg=str(ROOT / DIGITS)))
    setup = set_up(line, on_cpu={}, reads_data=True)
    contenders = [
        Contender(COMMAND, partial(_start, words)),
        Contender(FLOOR, partial(_run_python, ["-c", FLOOR])),
        Contender(COMMAND + AGAIN, partial(_start, words)),
    ]
    settings, images = non_defaults(setup.config), images_of(setup.config)
    return Plan(contenders, line.asked.rounds, settings, setup.machine(), images, remarks=setup.remarks)


def _words(line: ToolLine) -> list[str]:
    """The words of the command line that are for main_single_gpu.py."""
    given = {key: str(value) for key, (value, _) in line.run.flags.items()} | line.run.words
    cfg = [] if line.run.cfg is None else ["-cfg", line.run.cfg]
    return [*cfg, *(f"{key}={value}" for key, value in given.items())]


def _start(words: list[str]) -> Metrics:
    """Run the command up to the first update, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "parts.json"
        script = [str(ROOT / "main_single_gpu.py"), *words, f"OUTPUT={folder}/run"]
        # All processes of a machine share time.monotonic().
        metrics = _run_python([str(PROBE), str(result), str(time.monotonic()), *script])
        return metrics if "failed" in metrics else metrics | json.loads(result.read_text(encoding="utf-8"))


def _run_python(words: list[str]) -> Metrics:
    before, began = _cpu_seconds(), time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            env=as_child(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"{sys.executable} {words[0]} did not end within {TIMEOUT_SECONDS} s"}
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        return {"failed": output[-1] if output else f"exit code {done.returncode}"}
    return {"seconds": time.monotonic() - began, "cpu_seconds": _cpu_seconds() - before}


def _cpu_seconds() -> float:
    """CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sections(results: Results) -> list[Section]:
    total = results.median(COMMAND, "seconds")
    rows = [["part", "seconds", "least", "most", "share"]]
    for name, seconds in _parts(results).items():
        median = statistics.median(seconds)
        share = percent(median / total if total else None)
        rows.append([name, shown(median), shown(min(seconds)), shown(max(seconds)), share])
    if totals := results.per_turn(COMMAND, "seconds"):
        rows.append(["to the first update", shown(total), shown(min(totals)), shown(max(totals)), "100 %"])
    wall, *cpu = (
        shown(results.median(*of)) for of in ((FLOOR, "seconds"), (COMMAND, "cpu_seconds"), (FLOOR, "cpu_seconds"))
    )
    notes = [
        f"`python -c '{FLOOR}'` takes {wall} s here",
        f"CPU time: {cpu[0]} s for vitamp, including a few more updates and the exit; "
        f"{cpu[1]} s for `python -c '{FLOOR}'`",
        results.control_line(COMMAND, "seconds"),
    ]
    return [Section("From the command to the first update", rows, notes)]


def _parts(results: Results) -> dict[str, list[float]]:
    """Seconds of each part in each turn, the longest part first."""
    turns = [turn["parts"] for turn in results.turns[COMMAND] if "parts" in turn]
    names = dict.fromkeys(name for turn in turns for name in turn)
    parts = {name: [turn.get(name, 0.0) for turn in turns] for name in names}
    least = LEAST_SHOWN * (results.median(COMMAND, "seconds") or 0.0)
    small = [n for n, seconds in parts.items() if n.startswith("import ") and statistics.median(seconds) < least]
    if small:
        parts[OTHERS] = [sum(turn) for turn in zip(*(parts.pop(name) for name in small), strict=True)]
    return dict(sorted(parts.items(), key=lambda part: -statistics.median(part[1])))


def charts(results: Results) -> list[Chart]:
    bars = {name: statistics.median(seconds) for name, seconds in _parts(results).items()}
    return [Chart("from the command to the first update", "seconds", bars=bars)]


TABLE = Table("startup", ABOUT, FLAGS, plan, sections, charts)
