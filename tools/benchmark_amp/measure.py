"""Contenders of benchmark_amp.py take turns until all rounds are done or the time is up; a file keeps every turn."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tools.benchmark_amp.frame import Contender, Figures, Found, Plan, Table, failures, is_anything, with_todays_name
from tools.common.command_line import ToolLine
from tools.common.progress import progress_bar
from tools.common.tables import in_columns, in_markdown
from tools.common.turns import Budget
from utils.cpus import processors
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.output_file import writing
from utils.run_folder import git_state, versions, write_json

NOT_OF_THE_MEASUREMENT = ("-budget_min", "-json", "-plot", "-out")
"""Flags that may differ between a call and the one that goes on from its file."""


class Notebook:
    """All turns so far, written down after each where there is a file."""

    def __init__(self, table: str, plan: Plan, path: Path | None, words: Sequence[str], anew: bool) -> None:
        self._path = path
        self.found: Found = {
            "table": table,
            "date": time.strftime("%Y-%m-%d"),
            "command": command_line(words),
            "device": plan.device,
            "versions": versions(),
            "git": git_state(),
            "clock_mhz": [],
            "settings": json.loads(json.dumps(plan.settings)),
            "rounds": plan.rounds,
            "left_out": plan.left_out,
            "remarks": plan.remarks,
            "ceiling": plan.ceiling,
            "cut": False,
            "turns": {contender.name: [] for contender in plan.contenders},
        }
        if path is not None and not anew and (before := kept(path)) is not None:
            self._go_on(path, before)

    def _go_on(self, path: Path, before: Found) -> None:
        for key in ("table", "device", "versions", "settings"):
            if before.get(key) != self.found[key]:
                what = _difference(key, before.get(key), self.found[key])
                raise UserError(
                    f"-json {path}: it holds another measurement, {what}. "
                    "Give the same flags to go on with it, name another file, or replace it by -overwrite."
                )
        for name in self.found["turns"]:
            self.found["turns"][name] = before["turns"].get(name, [])
        self.found |= {key: before[key] for key in ("date", "command", "clock_mhz", "git", "ceiling")}
        done = min(map(len, self.found["turns"].values()), default=0)
        log.info("%s: going on after %d of %d rounds", path, done, self.found["rounds"])

    def add(self, name: str, figures: Figures, clock: float | None) -> None:
        self.found["turns"][name].append(figures)
        if clock is not None:
            self.found["clock_mhz"].append(round(clock))
        self.write()

    def write(self) -> None:
        if self._path is not None:
            with writing(self._path, "-json"):
                write_json(self._path, self.found)


def kept(path: Path) -> Found | None:
    """What a file of -json holds; None where there is none."""
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if all(key in found for key in ("table", "command", "rounds", "turns")):
            return with_todays_name(found)
    except (OSError, ValueError, TypeError):
        pass
    raise UserError(
        f"{path}: this is there already, and was not written by benchmark_amp.py; "
        "name another, or give -overwrite to replace it."
    )


def plan_and_measure(
    table: Table, line: ToolLine, words: Sequence[str], budget: Budget, path: Path | None, anew: bool = False
) -> Found:
    """`words`: what `line` was read from. `anew`: take no turn from the file, but replace it."""
    return measure(table, table.plan(line), budget, path, [table.name, *words], anew)


def measure(
    table: Table, plan: Plan, budget: Budget, path: Path | None, words: Sequence[str] = (), anew: bool = False
) -> Found:
    """All rounds of the plan, as far as the time allows; what a file holds already is not measured again.

    `words`: of the command line.
    """
    try:
        notebook = Notebook(table.name, plan, path, words, anew)
        log.info("%s: %s on %s", table.name, ", ".join(contender.name for contender in plan.contenders), plan.device)
        for line in [*plan.remarks, *failures(notebook.found)]:
            log.info("%s", line)
        done = sum(map(len, notebook.found["turns"].values()))
        with progress_bar(len(plan.contenders) * plan.rounds, "turns") as bar:
            bar.update(done)
            _take_turns(plan, notebook, budget, bar)
    finally:
        for contender in plan.contenders:
            contender.close()
    found = notebook.found
    found["cut"] = budget.cut
    notebook.write()
    if not is_anything(found):
        if budget.cut:
            raise TrainingError("the time was up (-budget_min) before anything was measured; give more of it.")
        raise TrainingError("nothing could be measured:\n" + "\n".join(f"  {line}" for line in failures(found)))
    return found


def _take_turns(plan: Plan, notebook: Notebook, budget: Budget, bar: tqdm) -> None:
    turns = notebook.found["turns"]
    longest: dict[str, float] = {}
    for nth in range(plan.rounds):
        # There and back: what is first in one round is last in the next, so that none profits from a drift.
        for contender in plan.contenders[:: -1 if nth % 2 else 1]:
            done: list[Figures] = turns[contender.name]
            if len(done) > nth or any("failed" in turn for turn in done):
                continue
            if not budget.allows(longest.get(contender.name, max(longest.values(), default=0.0))):
                return
            began = time.monotonic()
            figures = contender.turn()
            took = time.monotonic() - began
            longest[contender.name] = max(longest.get(contender.name, 0.0), took)
            notebook.add(contender.name, figures, clock_mhz(plan.gpu))
            _tell(contender, nth, plan.rounds, figures, took)
            bar.update()


def _tell(contender: Contender, nth: int, rounds: int, figures: Figures, took: float) -> None:
    told = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if isinstance(value, float))
    told = figures.get("failed") or told
    log.info("  round %d of %d, %s: %s [%.1f s]", nth + 1, rounds, contender.name, told, took)


def command_line(words: Sequence[str]) -> str:
    """As a reader would type it again, to whatever file."""
    told, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, _, value = word.replace("--", "-", 1).partition("=")
        if flag == "-overwrite":
            continue
        if flag in NOT_OF_THE_MEASUREMENT:
            if not value and rest:
                rest.pop(0)
        elif not word.startswith("DATA.CACHE="):
            told.append(word)
    return shlex.join(["python", "scripts/benchmark_amp.py", *told])


def clock_mhz(gpu: str | None) -> float | None:
    """The clock as it is at this moment: of the GPU, or the middle of the CPU's cores. None where none is told."""
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


def lines(table: Table, found: Found) -> list[str]:
    """The report for the terminal."""
    told: list[str] = []
    for section in table.sections(found):
        told += ["", section.title, *in_columns(section.rows), *(f"  {note}" for note in section.notes)]
    return [*told, "", *(f"  {line}" for line in failures(found)), f"  {where(found)}", f"  {found['command']}"]


def markdown(table: Table, found: Found, link: str) -> str:
    """The same for a page of the docs."""
    told: list[str] = []
    for section in table.sections(found):
        told += [f"{section.title}:", "", *in_markdown(section.rows), ""]
        told += [f"{'. '.join(note[0].upper() + note[1:] for note in section.notes)}.", ""] if section.notes else []
    told += [f"- {line}" for line in failures(found)] + [""] * bool(failures(found))
    rounds = f"{found['rounds']} round{'s' * (found['rounds'] != 1)}"
    rounds += ", fewer where the time was up" if found["cut"] else ""
    told.append(
        f"Measured in turns, {rounds}, on {where(found)}: `{found['command']}`. "
        f"All figures: [{Path(link).name}]({link})."
    )
    return "\n".join(told) + "\n"


def draw_table(table: Table, found: Found, path: Path) -> None:
    from tools.benchmark_amp.picture import draw

    draw(path, table.charts(found), f"{where(found)}: {found['command']}")


def where(found: Found) -> str:
    named = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    clock = found["clock_mhz"]
    ticks = f"clock {min(clock)} to {max(clock)} MHz" if clock else "clock unknown"
    return f"{found['device']}, {ticks}, {named}, {found['date']}"
