"""What mixed precision and this program's update are worth on this machine: one command a table.

    python scripts/benchmark_amp.py amp -model vit_base_patch16_224 -batch_size 64
    python scripts/benchmark_amp.py TABLE -h                         # what there is to say of one
    python scripts/benchmark_amp.py TABLE -budget_min 9 -json F.json # once more, to go on where the time was up

Contenders take turns, each after a warm-up, forwards in one round and backwards in the next; figures are medians of the
turns, ratios are taken turn by turn, and one contender takes part twice, so that its ratio to itself shows what chance
is. A file given by -json is written after every turn. All flags and settings of main_single_gpu.py hold.
"""

from __future__ import annotations

from pathlib import Path

from tools.benchmark_amp.frame import FORMER_NAMES, Found, Table
from tools.benchmark_amp.measure import draw_table, lines, plan_and_measure
from tools.benchmark_amp.tables import TABLES
from tools.common.command_line import OVERWRITE, Tool, first_word, run_tool
from tools.common.turns import Budget
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from utils.flags import Flag
from utils.log import log

OWN = (
    Flag("budget_min", "minutes in all; the same call goes on from its -json (default 10)", "M", ("BUDGET_MIN",)),
    Flag("json", "keep every turn here, with device, versions and command", "FILE", ("JSON",)),
    Flag("plot", "draw it", "FILE.png", ("PLOT",), old=("out",)),
    OVERWRITE,
)
NAME = "benchmark_amp.py"
COMMANDS = {name: Tool(NAME, table.about, (*table.flags, *OWN), command=name) for name, table in TABLES.items()}
LOOP = (
    "for table in amp precisions scaling timm; do "
    "python scripts/benchmark_amp.py $table -json $table.json -plot $table.png -budget_min 9; done"
)


def main(argv: list[str]) -> int:
    return run_tool(_benchmark, argv)


def _benchmark(argv: list[str]) -> int:
    name = _table(argv)
    table, line = TABLES[name], COMMANDS[name].read(argv[1:])
    json_file = line.file("JSON", ".json", fresh=False) if "JSON" in line.own else None
    # The call that goes on from a file draws its picture anew.
    again = json_file is not None and json_file.exists()
    picture = line.file("PLOT", ".png", fresh=not again) if "PLOT" in line.own else None
    budget = Budget(60 * line.above_zero("BUDGET_MIN", 10))
    try:
        found = plan_and_measure(table, line, argv[1:], budget, json_file, anew=bool(line.asked.overwrite))
    except KeyboardInterrupt:
        if json_file is None or not json_file.exists():
            raise
        log.warning("interrupted; every turn so far is in %s, and the same call goes on from there", json_file)
        return EXIT_INTERRUPTED
    _report(table, found, json_file, picture)
    return EXIT_DONE


def _table(argv: list[str]) -> str:
    if argv[:1] == ["all"]:
        raise UserError(f"all: there is no such table any more. Each resumes by itself; the same in a shell: {LOOP}")
    abouts = {name: (tool.about or "").splitlines()[0] for name, tool in COMMANDS.items()}
    return first_word(argv or ["-h"], NAME, __doc__, abouts, "table", FORMER_NAMES)


def _report(table: Table, found: Found, json_file: Path | None, picture: Path | None) -> None:
    print("\n".join(lines(table, found)))
    if found["cut"]:
        more = "the same call goes on" if json_file else "with -json FILE the same call could go on"
        log.warning("the time was up (-budget_min) before all rounds were done; %s", more)
    if json_file is not None:
        log.info("all figures: %s", json_file)
    if picture is not None:
        draw_table(table, found, picture)
        log.info("the picture: %s", picture)
