"""`amp`: seconds per 100 iterations in several windows, with AMP off and on."""

from __future__ import annotations

import statistics

from tools.benchmark_amp.ceiling import of_peak, peak_line
from tools.benchmark_amp.results import AGAIN, Results, shown
from tools.benchmark_amp.settings import MODEL, changed, images_of, set_up, synthetic, users_data
from tools.benchmark_amp.table import Contender, Plan, Table
from tools.common.command_line import ToolLine
from tools.common.results.section import Chart, Section
from tools.common.settings import non_defaults
from utils.flags import Flag, whole

ABOUT = """Seconds per 100 iterations in seven windows, AMP off and AMP on; their averages and the speed-up.

    python scripts/benchmark_amp.py amp -cfg configs/vit_base_patch16_224.yaml -batch_size 64
    python scripts/benchmark_amp.py amp -model vit_small_patch16_224 -amp bf16 -iters 20 -windows 3

Images are made on the device, unless -dataset or -data_path names others. -amp chooses the precision of `AMP on`
(default: what AMP.DTYPE auto chooses on this device)."""
FLAGS = (
    MODEL,
    Flag("iters", "iterations per window", "N", kind=whole(1), default_text="100; on a CPU 10"),
    Flag("windows", "windows for AMP off and for AMP on", "N", default=7, kind=whole(1)),
)
OFF, ON = "AMP off", "AMP on"


def plan(line: ToolLine) -> Plan:
    setup = set_up(line, reads_data=True)
    updates = line.asked.iters or (10 if setup.on_cpu else 100)
    config = users_data(setup) or synthetic(setup.config, updates)

    from tools.benchmark_amp.training import AlternatingTraining, Job

    amps = {name: config.AMP.model_copy(update={"ENABLED": name == ON}) for name in (OFF, ON, OFF + AGAIN)}
    contenders: list[Contender] = []
    trainings: list[AlternatingTraining] = []
    for name, amp in amps.items():
        training = AlternatingTraining(Job(config.model_copy(update={"AMP": amp}), updates), trainings)
        contenders.append(Contender(name, training.turn, training.close))
    settings = {"iterations": updates, **non_defaults(changed(config, "AMP", ENABLED=True))}
    machine = setup.machine((amps[OFF], amps[ON]))
    return Plan(contenders, line.asked.windows, settings, machine, images_of(config), remarks=setup.remarks)


def sections(results: Results) -> list[Section]:
    windows = {name: results.per_turn(name, "seconds") for name in (OFF, ON)}
    # If the time ran out, one may have a window more: averages are over the windows of both.
    both = min(map(len, windows.values()))
    averages = {name: statistics.fmean(seconds[:both]) for name, seconds in windows.items()} if both else {}
    rows = [["", *(_ordinal(n) for n in range(1, results["rounds"] + 1)), "average", "speed-up", "of peak"]]
    for name, seconds in windows.items():
        cells = [shown(second, 4) for second in seconds[:both]] + ["-"] * (results["rounds"] - both)
        speedup = averages[OFF] / averages[ON] if name == ON and both else None
        rows.append([name, *cells, shown(averages.get(name), 4), shown(speedup, 4), of_peak(results, name)])
    iterations = results.settings["iterations"]
    title = f"Seconds per {iterations} iterations, {results.subject()}; {ON} means {results.precision(ON)}"
    notes = [
        results.control_line(OFF, "seconds"),
        peak_line(results),
        *results.choices_lines({OFF: OFF, ON: ON}),
        results.iteration_line(),
    ]
    return [Section(title, rows, notes)]


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def charts(results: Results) -> list[Chart]:
    lines = {name: list(enumerate(results.per_turn(name, "seconds"), 1)) for name in (OFF, ON, OFF + AGAIN)}
    ratios = {"AMP on": results.ratio(OFF, ON, "seconds"), "control": results.ratio(OFF, OFF + AGAIN, "seconds")}
    bars = {name: ratio.median for name, ratio in ratios.items() if ratio is not None}
    return [
        Chart(f"{results.settings['iterations']} iterations", "seconds", lines=lines, below="window"),
        Chart("speed-up", "times", bars=bars),
    ]


TABLE = Table("amp", ABOUT, FLAGS, plan, sections, charts)
