"""Measure a table of benchmark_amp.py: contenders alternate until all rounds are done or the time is up."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.benchmark_amp.results import Metrics, Results
from tools.benchmark_amp.table import Plan, Table
from tools.common.output_file import writing
from tools.common.results.section import as_typed
from tools.common.turns import Budget, alternate
from utils.errors import TrainingError, UserError
from utils.files import parse_json
from utils.log import log
from utils.machine.cpus import processors
from utils.record.run_folder import git_state, versions, write_json


class Recorder:
    """Results so far; written to the -json file, if there is one, after every turn."""

    def __init__(self, table: str, plan: Plan, path: Path | None, words: Sequence[str], overwrite: bool) -> None:
        self._path = path
        self.results = Results(
            table=table,
            date=time.strftime("%Y-%m-%d"),
            command=as_typed("benchmark_amp.py", words),
            device=plan.machine.device,
            versions=versions(),
            git=git_state(),
            clock_mhz=[],
            settings=json.loads(json.dumps(plan.settings)),
            images=plan.images,
            rounds=plan.rounds,
            left_out=plan.left_out,
            remarks=plan.remarks,
            ceiling=plan.machine.ceiling,
            cut=False,
            turns={contender.name: [] for contender in plan.contenders},
        )
        if path is not None and path.exists() and not overwrite:
            self._resume(path, read_results(path))

    def _resume(self, path: Path, before: Results) -> None:
        for key in ("table", "device", "versions", "settings"):
            if before.get(key) != self.results[key]:
                difference = _difference(key, before.get(key), self.results[key])
                raise UserError(
                    f"-json {path}: the file holds another measurement, {difference}. "
                    "To resume it, repeat its flags on the same device with the same versions. Otherwise name another "
                    "file, or replace this one with -overwrite."
                )
        turns = {name: before.turns.get(name, []) for name in self.results.turns}
        self.results |= {key: before[key] for key in ("date", "command", "clock_mhz", "git", "ceiling")}
        self.results["turns"] = turns
        done = min(map(len, turns.values()), default=0)
        log.info("%s: resuming after %d of %d rounds", path, done, self.results["rounds"])

    def is_done(self, name: str, nth: int) -> bool:
        """Whether a turn is measured already, or useless because the contender fails."""
        turns = self.results.turns[name]
        return len(turns) > nth or any("failed" in turn for turn in turns)

    def add(self, name: str, metrics: Metrics, clock: float | None) -> None:
        self.results.turns[name].append(metrics)
        if clock is not None:
            self.results["clock_mhz"].append(round(clock))
        self.write()

    def write(self) -> None:
        if self._path is not None:
            with writing(self._path, "-json"):
                write_json(self._path, self.results)


def read_results(path: Path) -> Results:
    """Contents of an existing -json file."""
    try:
        fields = parse_json(path.read_text(encoding="utf-8"))
        if all(key in fields for key in ("table", "command", "rounds", "turns")):
            return Results(fields)
    except (OSError, ValueError, TypeError):
        pass
    raise UserError(
        f"-json {path}: already exists, and was not written by benchmark_amp.py; "
        "name another file, or give -overwrite to replace it."
    )


def measure(
    table: Table, plan: Plan, budget: Budget, path: Path | None, words: Sequence[str] = (), overwrite: bool = False
) -> Results:
    """Measure the plan's turns that are not in the file yet, as far as the time allows.

    `words`: the command line. `overwrite`: start anew instead of resuming the file.
    """
    try:
        recorder = Recorder(table.name, plan, path, words, overwrite)
        results = recorder.results
        log.info("%s: %s on %s", table.name, ", ".join(results.turns), plan.machine.device)
        for line in [*plan.remarks, *results.failures()]:
            log.info("%s", line)
        contenders = {contender.name: contender for contender in plan.contenders}
        for name, nth in alternate(list(contenders), plan.rounds, budget, recorder.is_done):
            began = time.monotonic()
            metrics = contenders[name].turn()
            seconds = time.monotonic() - began
            recorder.add(name, metrics, clock_mhz(plan.machine.gpu))
            _log_turn(f"round {nth + 1} of {plan.rounds}, {name}", metrics, seconds)
    finally:
        for contender in plan.contenders:
            contender.close()
    results["cut"] = budget.cut
    recorder.write()
    if results.is_empty:
        if budget.cut:
            raise TrainingError("the time was up before anything was measured; raise -budget_min.")
        raise TrainingError("nothing could be measured:\n" + "\n".join(f"  {line}" for line in results.failures()))
    return results


def _log_turn(turn: str, metrics: Metrics, seconds: float) -> None:
    numbers = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items() if isinstance(value, float))
    log.info("  %s: %s [%.1f s]", turn, metrics.get("failed") or numbers, seconds)


def clock_mhz(gpu: str | None) -> float | None:
    """Present clock of the GPU, or the median of the CPU's cores; None if it is unknown."""
    try:
        if gpu is not None:
            query = ["nvidia-smi", "-i", gpu, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
            return float(subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout)
        speeds = sorted(float(processor["cpu MHz"]) for processor in processors() if "cpu MHz" in processor)
        return speeds[len(speeds) // 2] if speeds else None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _difference(key: str, before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*before, *now]:
            if before.get(name) != now.get(name):
                return _difference(name, before.get(name), now.get(name))
    return f"with {key} {before}, not {now}"
