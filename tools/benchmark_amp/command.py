"""Benchmark mixed precision and vitamp's update on this machine. Each table is a command of its own.

    python scripts/benchmark_amp.py amp -model vit_base_patch16_224 -batch_size 64
    python scripts/benchmark_amp.py TABLE -h    # about a table, and its flags
    python scripts/benchmark_amp.py TABLE -budget_min 9 -json table.json

The same command with the same -json file resumes after the time ran out.

The contenders (the precisions, loops or sizes compared) alternate after a warm-up, in reverse order every other round.
The report shows medians, and ratios taken within a round. One contender runs twice as a control: the ratio of its two
results shows the noise. -json is written after every measurement. The settings and flags of main_single_gpu.py are
accepted; -eval and -resume are refused, and those without a meaning here, such as -output and -ngpus, have no effect.
"""

from __future__ import annotations

from pathlib import Path

from tools.benchmark_amp.measure import measure
from tools.benchmark_amp.report import lines
from tools.benchmark_amp.results import Results
from tools.benchmark_amp.table import Table
from tools.benchmark_amp.tables import TABLES
from tools.common.command_line import OVERWRITE, Tool, above_zero, first_word, run_tool
from tools.common.turns import Budget
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from utils.flags import Flag
from utils.log import log

OWN = (
    Flag("budget_min", "time limit in minutes; repeat with the same -json to resume", "M", default=10, kind=above_zero),
    Flag("json", "write every measurement to this file, with device, versions and command", "FILE"),
    Flag("plot", "draw the results", "FILE.png"),
    OVERWRITE,
)
NAME = "benchmark_amp.py"
ONE_LABEL = "benchmark_amp.py measures models with one label per image; leave it out"
COMMANDS = {
    name: Tool(NAME, table.about, (*table.flags, *OWN), command=name, one_label=ONE_LABEL)
    for name, table in TABLES.items()
}
LOOP = (
    "for table in amp precisions simplenet scaling timm startup; do "
    "python scripts/benchmark_amp.py $table -json $table.json -plot $table.png -budget_min 9; done"
)


def main(argv: list[str]) -> int:
    return run_tool(_benchmark, argv)


def _benchmark(argv: list[str]) -> int:
    name = _table(argv)
    table, line = TABLES[name], COMMANDS[name].read(argv[1:])
    json_file = line.file("json", ".json", fresh=False)
    # A resumed measurement may replace its picture.
    resumed = json_file is not None and json_file.exists()
    picture = line.file("plot", ".png", fresh=not resumed)
    budget = Budget(60 * line.asked.budget_min)
    try:
        plan = table.plan(line)
        results = measure(table, plan, budget, json_file, [name, *argv[1:]], bool(line.asked.overwrite))
    except KeyboardInterrupt:
        if json_file is None or not json_file.exists():
            raise
        log.warning("interrupted; every finished measurement is in %s, and the same command resumes", json_file)
        return EXIT_INTERRUPTED
    _report(table, results, json_file, picture)
    return EXIT_DONE


def _table(argv: list[str]) -> str:
    if argv[:1] == ["all"]:
        raise UserError(f"all: this table was removed. Each table resumes by itself; to measure all, run: {LOOP}")
    abouts = {name: (tool.about or "").splitlines()[0] for name, tool in COMMANDS.items()}
    return first_word(argv or ["-h"], NAME, __doc__, abouts, "table")


def _report(table: Table, results: Results, json_file: Path | None, picture: Path | None) -> None:
    print("\n".join(lines(table, results)))
    if results["cut"]:
        resume = "the same command resumes" if json_file else "nothing was saved to resume from; give -json FILE"
        log.warning("the time ran out (-budget_min) before all rounds were done; %s", resume)
    if json_file is not None:
        log.info("all measurements: %s", json_file)
    if picture is not None:
        from tools.common.results.picture import draw

        draw(picture, table.charts(results), f"{results.machine()}: {results['command']}")
        log.info("chart written to %s", picture)
