"""Benchmark mixed precision and vitamp's update on this machine. Each table is a command of its own.

    python scripts/benchmark_amp.py amp -model vit_base_patch16_224 -batch_size 64
    python scripts/benchmark_amp.py TABLE -h    # about a table, and its flags
    python scripts/benchmark_amp.py TABLE -budget_min 9 -json table.json

The contenders (the precisions or loops compared) alternate after a warm-up, in reverse order every other round. The
report shows medians, and ratios taken within a round. One contender runs twice as a control: the ratio of its two
results shows the noise. -json is written after every measurement. The settings and flags of main_single_gpu.py are
accepted; -eval and -resume are refused, and those without a meaning here, such as -output and -ngpus, have no effect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tools.benchmark_amp.plan import Plan, Results
from tools.benchmark_amp.tables import TABLES
from tools.common.command_line import OVERWRITE, Tool, above_zero, first_word, run_tool
from tools.common.output_file import writing
from tools.common.turns import Budget, alternating_order, progress_bar
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, TrainingError
from utils.flags import Flag
from utils.log import log
from utils.program import typed
from utils.record.run_folder import git_state, versions, write_json
from utils.text import redacted

OWN = (
    Flag("budget_min", "time limit in minutes; fewer rounds are measured", "M", default=10, kind=above_zero),
    Flag("json", "write every measurement to this file, with device, versions and command", "FILE"),
    OVERWRITE,
)
NAME = "benchmark_amp.py"
ONE_LABEL = "benchmark_amp.py measures models with one label per image; leave it out"


def main(argv: list[str]) -> int:
    return run_tool(_benchmark, argv)


def _benchmark(argv: list[str]) -> int:
    abouts = {name: table.about.splitlines()[0] for name, table in TABLES.items()}
    name = first_word(argv or ["-h"], NAME, __doc__, abouts, "table")
    table = TABLES[name]
    line = Tool(NAME, table.about, (*table.flags, *OWN), command=name, one_label=ONE_LABEL).read(argv[1:])
    json_file = line.file("json", ".json")
    budget = Budget(60 * line.asked.budget_min)
    try:
        results = measure(name, table.plan(line), budget, json_file, argv)
    except KeyboardInterrupt:
        if json_file is None or not json_file.exists():
            raise
        log.warning("interrupted; every finished measurement is in %s", json_file)
        return EXIT_INTERRUPTED
    print("\n".join(table.report(results)))
    if results["cut"]:
        log.warning("the time ran out (-budget_min) before all rounds were done")
    if json_file is not None:
        log.info("all measurements: %s", json_file)
    return EXIT_DONE


def measure(table: str, plan: Plan, budget: Budget, path: Path | None, words: Sequence[str] = ()) -> Results:
    """Measure the plan's turns, as far as the time allows. `path`: the -json file; `words`: the command line."""
    results = Results(
        table=table,
        date=time.strftime("%Y-%m-%d"),
        command=redacted(typed(f"scripts/{NAME}", words)),
        device=plan.device,
        versions=versions(),
        git=git_state(),
        settings=json.loads(json.dumps(plan.settings)),
        images=plan.images,
        rounds=plan.rounds,
        left_out=plan.left_out,
        remarks=plan.remarks,
        cut=False,
        turns={name: [] for name in plan.contenders},
    )

    def write() -> None:
        if path is not None:
            with writing(path, "-json"):
                write_json(path, results)

    longest: dict[str, float] = {}
    try:
        log.info("%s: %s on %s", table, ", ".join(results.turns), plan.device)
        for line in [*plan.remarks, *results.failures()]:
            log.info("%s", line)
        with progress_bar(len(plan.contenders) * plan.rounds, "turns") as bar:
            for nth, name in alternating_order(list(plan.contenders), range(plan.rounds)):
                bar.update()
                if any("failed" in turn for turn in results.turns[name]):
                    continue
                if not budget.allows(longest.get(name, max(longest.values(), default=0.0))):
                    break
                began = time.monotonic()
                metrics = plan.contenders[name].turn()
                seconds = time.monotonic() - began
                longest[name] = max(longest.get(name, 0.0), seconds)
                results.turns[name].append(metrics)
                write()
                numbers = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items() if isinstance(value, float))
                about = metrics.get("failed") or numbers
                log.info("  round %d of %d, %s: %s [%.1f s]", nth + 1, plan.rounds, name, about, seconds)
    finally:
        for contender in plan.contenders.values():
            contender.close()
    results["cut"] = budget.cut
    write()
    if all("failed" in turn for turns in results.turns.values() for turn in turns):
        if budget.cut:
            raise TrainingError("the time was up before anything was measured; raise -budget_min.")
        raise TrainingError("nothing could be measured:\n" + "\n".join(f"  {line}" for line in results.failures()))
    return results
