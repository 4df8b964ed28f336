"""`all`: every table for several models by one command, which goes on where the time was up."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.benchmark_amp.all_jobs import Job, asked_for
from tools.benchmark_amp.all_report import (
    BEGUN,
    FAILED,
    LEFT,
    OVERVIEW,
    State,
    how_far,
    shown,
    state_of,
    write_overview,
)
from tools.benchmark_amp.frame import is_anything, is_whole
from tools.benchmark_amp.measure import TimeUp, draw_table, plan_and_measure
from tools.common.turns import Budget
from utils.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, TrainingError, UserError
from utils.log import log
from utils.output_file import check_output_file

FAILS = (MemoryError, RuntimeError, UserError, TrainingError)
"""What ends one table and not the others."""


def measure_all(argv: list[str]) -> int:
    asked = asked_for(argv)
    _make(asked.folder)
    budget, before = Budget(asked.seconds), _turns(asked.jobs)
    failed: dict[Path, str] = {}
    interrupted = False
    try:
        for job in asked.jobs:
            _measure(job, asked.jobs, budget, failed)
            write_overview(asked.folder, [state_of(job, failed.get(job.file)) for job in asked.jobs])
    except KeyboardInterrupt:
        interrupted = True
    states = [state_of(job, failed.get(job.file)) for job in asked.jobs]
    overview = write_overview(asked.folder, states)
    print(shown(states))
    log.info("all tables so far: %s", overview)
    return _end(argv, states, interrupted, _turns(asked.jobs) > before)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"-dir {folder}: this folder cannot be made ({error.strerror}); name another.") from None
    check_output_file(folder / OVERVIEW, "-dir")


def _turns(jobs: Sequence[Job]) -> int:
    return sum(len(turns) for job in jobs if (found := job.kept()) for turns in found["turns"].values())


def _measure(job: Job, jobs: Sequence[Job], budget: Budget, failed: dict[Path, str]) -> None:
    """Whatever is left of one table, as far as the time allows."""
    found = job.kept()
    if found is None or not is_whole(found):
        if not budget.allows(_seconds_to_begin(job, jobs)):
            return
        log.info("%s: table %d of %d, %.1f minutes left", job.name, jobs.index(job) + 1, len(jobs), budget.left() / 60)
        try:
            found = plan_and_measure(job.table, job.line(), job.words, Budget(budget.left()), job.file)
        except TimeUp:
            return
        except FAILS as error:
            failed[job.file] = str(error).strip() or type(error).__name__
            log.error("%s: %s", job.name, failed[job.file])
            return
        finally:
            _make_room()
    elif job.picture.exists():
        return
    if is_anything(found):
        draw_table(job.table, found, job.picture)


def _seconds_to_begin(job: Job, jobs: Sequence[Job]) -> float:
    """And to end one turn, as it was before: of this table, or of other models', or of whatever was measured here."""
    took = [(other, sum(found["took"].values())) for other in jobs if (found := other.kept()) and "took" in found]
    for alike in ((job,), tuple(other for other in jobs if other.table is job.table), jobs):
        if known := [seconds for other, seconds in took if other in alike]:
            return max(known)
    return 0.0


def _make_room() -> None:
    """What a table left on the device would be missing for the next one."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _end(argv: list[str], states: Sequence[State], interrupted: bool, progress: bool) -> int:
    """The last line, and the exit code."""
    same = shlex.join(["python", "scripts/benchmark_amp.py", "all", *argv])
    left = any(state.kind in (BEGUN, LEFT) for state in states)
    failed = any(state.kind == FAILED for state in states)
    if interrupted:
        log.warning("interrupted: %s; the same call goes on: %s", how_far(states), same)
        return EXIT_INTERRUPTED
    if left and not progress and not failed:
        raise TrainingError(f"the time was up (-budget_min) before anything was measured; give more of it: {same}")
    if left:
        log.warning("the time was up (-budget_min): %s; the same call goes on: %s", how_far(states), same)
    else:
        log.info("%s", how_far(states))
    return EXIT_FAILED if failed else EXIT_DONE
