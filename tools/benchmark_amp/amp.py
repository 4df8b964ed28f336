"""`amp`: seconds of so many iterations, window after window, with AMP off and on."""

from __future__ import annotations

import statistics

from tools.benchmark_amp.ceiling import ceiling, ceiling_line, of_peak
from tools.benchmark_amp.frame import (
    AGAIN,
    Chart,
    Contender,
    Found,
    Plan,
    Section,
    Table,
    choices_lines,
    control_line,
    iteration_line,
    precision_of,
    shown,
    subject,
    times_as_much,
    values,
)
from tools.benchmark_amp.settings import MODEL, changed, settings_of, synthetic
from tools.common.command_line import ToolLine
from tools.common.settings import told
from utils.cli import Flag

ABOUT = """Seconds per 100 iterations, seven windows of them, AMP off and AMP on; their averages, the speed-up.

    python scripts/benchmark_amp.py amp -cfg configs/vit_base_patch16_224.yaml -batch_size 64
    python scripts/benchmark_amp.py amp -model vit_small_patch16_224 -amp bf16 -iters 20 -windows 3

On images made on the device, unless -dataset names others. -amp says what is on in `AMP on` (default: what
AMP.DTYPE auto takes on this device)."""
FLAGS = (
    MODEL,
    Flag("iters", "iterations of a window (default 100; on a CPU 10)", "N", ("ITERS",)),
    Flag("windows", "windows of each (default 7)", "N", ("WINDOWS",)),
)
OFF, ON = "AMP off", "AMP on"


def plan(line: ToolLine) -> Plan:
    windows = line.whole("WINDOWS", 7)
    loaded, device, remarks = settings_of(line)
    updates = line.whole("ITERS", 10 if device.type == "cpu" else 100)
    config = loaded.config
    if loaded.sources["DATA.DATASET"] == "default":
        config = synthetic(config, updates)

    from tools.benchmark_amp.training import Job, Seat, device_in_words, gpu_of

    amps = {name: config.AMP.model_copy(update={"ENABLED": name == ON}) for name in (OFF, ON, OFF + AGAIN)}
    contenders: list[Contender] = []
    seats: list[Seat] = []
    for name, amp in amps.items():
        seat = Seat(Job(config.model_copy(update={"AMP": amp}), updates), seats)
        contenders.append(Contender(name, seat.turn, seat.close))
    wishes = {"iterations": updates, **told(changed(config, "AMP", ENABLED=True))}
    words, most = device_in_words(config, device), ceiling(config, device, (amps[OFF], amps[ON]))
    return Plan(contenders, windows, wishes, words, gpu_of(device), remarks=remarks, ceiling=most)


def sections(found: Found) -> list[Section]:
    windows = {name: values(found, name, "seconds") for name in (OFF, ON)}
    # Where the time was up, one may have had a window more: averages are of those that both had.
    both = min(map(len, windows.values()))
    averages = {name: statistics.fmean(seconds[:both]) for name, seconds in windows.items()} if both else {}
    rows = [["", *(_ordinal(n) for n in range(1, found["rounds"] + 1)), "average", "speed-up", "of peak"]]
    for name, seconds in windows.items():
        cells = [shown(second, 4) for second in seconds[:both]] + ["-"] * (found["rounds"] - both)
        speedup = averages[OFF] / averages[ON] if name == ON and both else None
        rows.append([name, *cells, shown(averages.get(name), 4), shown(speedup, 4), of_peak(found, name)])
    iterations = found["settings"]["iterations"]
    title = f"Seconds of {iterations} iterations, {subject(found)}, AMP on: {precision_of(found, ON)}"
    notes = [control_line(found, OFF, "seconds"), ceiling_line(found), *choices_lines(found, (OFF, ON))]
    notes.append(iteration_line(found))
    return [Section(title, rows, notes)]


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def charts(found: Found) -> list[Chart]:
    lines = {name: list(enumerate(values(found, name, "seconds"), 1)) for name in (OFF, ON, OFF + AGAIN)}
    told = Chart(f"{found['settings']['iterations']} iterations", "seconds", lines=lines, below="window")
    speed = times_as_much(found, OFF, ON, "seconds")
    bars = {"AMP on": speed.median} if speed else {}
    control = times_as_much(found, OFF, OFF + AGAIN, "seconds")
    return [told, Chart("speed-up", "times", bars=bars | ({"the control": control.median} if control else {}))]


TABLE = Table("amp", ABOUT, FLAGS, plan, sections, charts)
