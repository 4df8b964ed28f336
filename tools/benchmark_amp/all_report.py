"""How far the tables of `all` are, and what they gave: on the terminal, and as overview.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmark_amp.all_jobs import Job
from tools.benchmark_amp.frame import Found, failure, failures, is_anything, is_whole
from tools.benchmark_amp.measure import lines, markdown
from tools.common.tables import in_columns, in_markdown
from utils.run_folder import replace_text

OVERVIEW = "overview.md"
DONE, BEGUN, LEFT, FAILED = "done", "begun", "left", "failed"


@dataclass(frozen=True)
class State:
    """How far a table is."""

    job: Job
    kind: str
    words: str
    found: Found | None
    """Where there are figures to show."""
    why: str = ""
    """Where it failed."""


def state_of(job: Job, why: str | None) -> State:
    """`why`: it failed in this call."""
    found = job.kept()
    figures = found if found is not None and is_anything(found) else None
    if found is not None and figures is None and is_whole(found):
        why = "; ".join(failures(found))
    if why is not None:
        return State(job, FAILED, FAILED, figures, " ".join(why.split()))
    if figures is None:
        return State(job, LEFT, LEFT, None)
    if is_whole(figures):
        return State(job, DONE, DONE, figures)
    rounds = min(len(turns) for name, turns in figures["turns"].items() if not failure(figures, name))
    return State(job, BEGUN, f"{rounds} of {figures['rounds']} rounds", figures)


def shown(states: Sequence[State]) -> str:
    """The tables one after another, and how far each is."""
    reports = [line for state in states if state.found is not None for line in lines(state.job.table, state.found)]
    return "\n".join([*reports, "", *in_columns(_rows(states)), *(f"  {line}" for line in _failures(states))])


def write_overview(folder: Path, states: Sequence[State]) -> Path:
    told = ["# What benchmark_amp.py measured", "", *in_markdown(_rows(states)), ""]
    told += [*(f"- {line}" for line in _failures(states)), ""]
    for state in states:
        if state.found is not None:
            told += [f"## {state.job.name}", "", markdown(state.job.table, state.found, state.job.file.name)]
            told += [f"![{state.job.name}]({state.job.picture.name})", ""]
    path = folder / OVERVIEW
    replace_text(path, "\n".join(told))
    return path


def _rows(states: Sequence[State]) -> list[list[str]]:
    rows = [[state.job.table.name, state.job.of, state.words, state.job.file.name] for state in states]
    return [["table", "model", "state", "file"], *rows]


def _failures(states: Sequence[State]) -> list[str]:
    return [f"{state.job.name}: {state.why}" for state in states if state.kind == FAILED]


def how_far(states: Sequence[State]) -> str:
    """By kinds: 'done 2 (windows, peers), left 1 (modes)'."""
    told = []
    for kind in (DONE, BEGUN, LEFT, FAILED):
        if names := [state.job.file.stem for state in states if state.kind == kind]:
            told.append(f"{kind} {len(names)} ({', '.join(names)})")
    return ", ".join(told)
