"""`startup`: seconds from the command to the first update, by what they go into."""

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

from tools.benchmark_amp.frame import (
    AGAIN,
    Chart,
    Contender,
    Figures,
    Found,
    Plan,
    Section,
    Table,
    control_line,
    middle,
    shown,
    values,
)
from tools.benchmark_amp.settings import settings_of
from tools.common.command_line import ToolLine
from tools.common.settings import told
from utils.cli import Flag

ROOT = Path(__file__).resolve().parents[2]
ABOUT = """Seconds from the command to the first update, by part: imports, model, data index, compiling.

    python scripts/benchmark_amp.py startup                     # on the digits, as README.md begins
    python scripts/benchmark_amp.py startup -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet -amp

Every turn starts main_single_gpu.py anew, as a shell does, and ends it after a few updates. Time belongs to the
innermost part: what the model imports is an import. `compiling` is what the first update takes beyond later ones.
Beside it, what Python takes to import torch and timm alone. Files are in the machine's cache after the first turn."""
FLAGS = (Flag("rounds", "turns of each (default 5)", "N", ("ROUNDS",)),)
COMMAND, FLOOR = "vitamp", "import torch, timm"
DIGITS = "configs/vit_digits.yaml"
LONGEST_SECONDS = 600
LEAST_SHOWN = 0.02
"""Of the whole; packages that take less are summed up."""
OTHERS = "import of others"


def plan(line: ToolLine) -> Plan:
    words = _words(line)
    if line.run.cfg is None and not line.run.flags and not line.run.words:
        words = ["-cfg", str(ROOT / DIGITS)]
        line = ToolLine(line.own, replace(line.run, cfg=str(ROOT / DIGITS)))
    loaded, device, remarks = settings_of(line, {})

    from tools.benchmark_amp.training import device_in_words, gpu_of

    contenders = [
        Contender(COMMAND, partial(_start, words)),
        Contender(FLOOR, partial(_import, FLOOR)),
        Contender(COMMAND + AGAIN, partial(_start, words)),
    ]
    where, gpu = device_in_words(loaded.config, device), gpu_of(device)
    return Plan(contenders, line.whole("ROUNDS", 5), told(loaded.config), where, gpu, remarks=remarks)


def _words(line: ToolLine) -> list[str]:
    """The command line of the program, without what is the benchmark's own."""
    given = {key: str(value) for key, (value, _) in line.run.flags.items()} | line.run.words
    cfg = [] if line.run.cfg is None else ["-cfg", line.run.cfg]
    return [*cfg, *(f"{key}={value}" for key, value in given.items())]


def _start(words: list[str]) -> Figures:
    """From the command to the first update, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "parts.json"
        probe = str(ROOT / "tools" / "benchmark_amp" / "startup_probe.py")
        script = [str(ROOT / "main_single_gpu.py"), *words, f"OUTPUT={folder}/run"]
        figures = _timed([probe, str(result), "BEGAN", *script])
        return figures if "failed" in figures else figures | json.loads(result.read_text(encoding="utf-8"))


def _import(what: str) -> Figures:
    return _timed(["-c", what])


def _timed(words: list[str]) -> Figures:
    before, began = _cpu_seconds(), time.monotonic()
    words = [str(began) if word == "BEGAN" else word for word in words]
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no {sys.executable} {words[0]} ended within {LONGEST_SECONDS} s"}
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines()
        return {"failed": told[-1] if told else f"exit code {done.returncode}"}
    return {"seconds": time.monotonic() - began, "cpu_seconds": _cpu_seconds() - before}


def _cpu_seconds() -> float:
    """Of all children that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sections(found: Found) -> list[Section]:
    total = middle(found, COMMAND, "seconds")
    rows = [["part", "seconds", "least", "most", "share"]]
    for name, seconds in _parts(found).items():
        middle_one = statistics.median(seconds)
        share = f"{100 * middle_one / total:.0f} %" if total else "-"
        rows.append([name, shown(middle_one), shown(min(seconds)), shown(max(seconds)), share])
    if totals := values(found, COMMAND, "seconds"):
        rows.append(["to the first update", shown(total), shown(min(totals)), shown(max(totals)), "100 %"])
    notes = [
        f"python -c '{FLOOR}' takes {shown(middle(found, FLOOR, 'seconds'))} s here",
        f"time of the cores, a few more updates and the end included: {shown(middle(found, COMMAND, 'cpu_seconds'))} s,"
        f" {shown(middle(found, FLOOR, 'cpu_seconds'))} s of the bare imports",
        control_line(found, COMMAND, "seconds"),
    ]
    return [Section("From the command to the first update", rows, notes)]


def _parts(found: Found) -> dict[str, list[float]]:
    """Seconds of each part in each turn, the longest first."""
    turns = [turn["parts"] for turn in found["turns"][COMMAND] if "parts" in turn]
    names = dict.fromkeys(name for turn in turns for name in turn)
    parts = {name: [turn.get(name, 0.0) for turn in turns] for name in names}
    least = LEAST_SHOWN * (middle(found, COMMAND, "seconds") or 0.0)
    small = [n for n, seconds in parts.items() if n.startswith("import ") and statistics.median(seconds) < least]
    if small:
        parts[OTHERS] = [sum(turn) for turn in zip(*(parts.pop(name) for name in small), strict=True)]
    return dict(sorted(parts.items(), key=lambda part: -statistics.median(part[1])))


def charts(found: Found) -> list[Chart]:
    bars = {name: statistics.median(seconds) for name, seconds in _parts(found).items()}
    return [Chart("from the command to the first update", "seconds", bars=bars)]


TABLE = Table("startup", ABOUT, FLAGS, plan, sections, charts)
