"""The tables `amp` and `precisions`, a run's own training in different precisions, and `simplenet`."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

from tools.benchmark_amp.plan import (
    MODEL,
    ON_THE_DEVICE,
    ROUNDS,
    Plan,
    Setup,
    Table,
    changed,
    images_of,
    prepared,
    set_up,
    synthetic,
    users_data,
)
from tools.benchmark_amp.results import AGAIN, Results, percent, shown
from tools.common.command_line import ToolLine
from tools.common.tables import Columns, Section, non_defaults, with_columns
from utils.config import AmpConfig, Config
from utils.errors import UserError
from utils.flags import Flag, whole
from utils.text import counted

if TYPE_CHECKING:
    import torch

    from tools.common.precisions import Mode
    from tools.common.sessions import Worker

OFF, ON = "AMP off", "AMP on"
REFERENCE = "fp32"
SYNTHETIC, FILES = ", synthetic", ", files"
"""Ends of the names in the table `precisions`."""

AMP_ABOUT = """Seconds per 100 iterations in seven windows, AMP off and AMP on; their averages and the speed-up.

    python scripts/benchmark_amp.py amp -cfg configs/vit_base_patch16_224.yaml -batch_size 64
    python scripts/benchmark_amp.py amp -model vit_small_patch16_224 -amp bf16 -iters 20 -windows 3

Images are made on the device, unless -dataset or -data_path names others. -amp chooses the precision of `AMP on`
(default: what AMP.DTYPE auto chooses on this device)."""
AMP_FLAGS = (
    MODEL,
    Flag("iters", "iterations per window", "N", kind=whole(1), default_text="100; on a CPU 10"),
    Flag("windows", "windows for AMP off and for AMP on", "N", default=7, kind=whole(1)),
)


def plan_amp(line: ToolLine) -> Plan:
    setup = set_up(line, reads_data=True)
    updates = line.asked.iters or (10 if setup.on_cpu else 100)
    config, workers = users_data(setup) or synthetic(setup.config, updates), list["Worker"]()
    amps = {name: config.AMP.model_copy(update={"ENABLED": name == ON}) for name in (OFF, ON, OFF + AGAIN)}
    contenders = {name: _training(config, amp, updates, workers) for name, amp in amps.items()}
    settings = {"iterations": updates, **non_defaults(changed(config, "AMP", ENABLED=True))}
    return Plan(contenders, line.asked.windows, settings, prepared(setup), images_of(config), remarks=setup.remarks)


def _training(config: Config, amp: AmpConfig, updates: int, workers: list[Worker], keep: bool = True) -> Worker:
    from tools.common.sessions import Job, TrainingSession, Worker

    job = Job(config.model_copy(update={"AMP": amp}), updates)
    return Worker(partial(TrainingSession, job), workers, keep)


def amp_section(results: Results) -> Section:
    windows = {name: results.per_turn(name, "seconds") for name in (OFF, ON)}
    # If the time ran out, one may have a window more: averages are over the windows of both.
    both = min(map(len, windows.values()))
    averages = {name: statistics.fmean(seconds[:both]) for name, seconds in windows.items()} if both else {}
    rows = [["", *(_ordinal(n) for n in range(1, results["rounds"] + 1)), "average", "speed-up"]]
    for name, seconds in windows.items():
        cells = [shown(second, 4) for second in seconds[:both]] + ["-"] * (results["rounds"] - both)
        speedup = averages[OFF] / averages[ON] if name == ON and both else None
        rows.append([name, *cells, shown(averages.get(name), 4), shown(speedup, 4)])
    iterations = results.settings["iterations"]
    title = f"Seconds per {iterations} iterations, {results.subject()}; {ON} means {results.precision(ON)}"
    choices = results.choices_lines({OFF: OFF, ON: ON})
    return Section(title, rows, [results.control_line(OFF, "seconds"), *choices, results.iteration_line()])


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


PRECISIONS_ABOUT = """Memory, iterations/s, images/s and speed-up of each precision, on synthetic images and on image \
files.

    python scripts/benchmark_amp.py precisions -model vit_base_patch16_224 -batch_size 128
    python scripts/benchmark_amp.py precisions -dataset imagefolder -data_path /data/flowers -modes bf16,O2-bf16

Every measurement runs in a process of its own, so that its peak memory is known. Synthetic images are generated on the
device. The image files are JPEGs of about 500 x 375 that the tool generates once, unless -dataset or -data_path names
others."""
PRECISIONS_FLAGS = (
    MODEL,
    Flag("iters", "iterations per measurement", "N", kind=whole(1), default_text="50; on a CPU 5"),
    ROUNDS,
    Flag(
        "modes",
        "precisions to compare with fp32: values of -amp such as tf32,bf16,O2-fp16",
        "A,B",
        default_text="all that are useful on this device",
    ),
    Flag("no_files", "measure synthetic images only"),
    Flag("made", "number of JPEGs to generate", "N", kind=whole(1), default_text="8000; on a CPU 200"),
)


def plan_precisions(line: ToolLine) -> Plan:
    setup = set_up(line, reads_data=True)
    updates, made = line.asked.iters or (5 if setup.on_cpu else 50), line.asked.made or (200 if setup.on_cpu else 8000)
    with_files = not line.asked.no_files
    given = users_data(setup) if with_files else None
    config = changed(given or setup.config, "AMP", ENABLED=False)
    modes, left_out = _modes(line.asked.modes, config, setup)
    images = ON_THE_DEVICE
    if with_files:
        images += f"; with files, {images_of(config) if given else 'JPEGs made by this tool'}"
    if with_files and given is None:
        from tools.common.made_images import on_made_images

        config = on_made_images(config, made, "small")
    drawn, workers = synthetic(config, updates), list["Worker"]()
    configs = {mode.name + SYNTHETIC: (drawn, mode) for mode in modes}
    configs[modes[0].name + SYNTHETIC + AGAIN] = drawn, modes[0]
    configs |= {mode.name + FILES: (config, mode) for mode in modes if with_files}
    # A new process for each turn, so that the peak memory is known.
    contenders = {
        name: _training(one, mode.amp(one.AMP), updates, workers, keep=False) for name, (one, mode) in configs.items()
    }
    settings = {"iterations": updates, "made": made if with_files else 0, **non_defaults(config)}
    return Plan(contenders, line.asked.rounds, settings, prepared(setup), images, left_out, setup.remarks)


def _modes(words: str | None, config: Config, setup: Setup) -> tuple[list[Mode], dict[str, str]]:
    """Precisions to measure, fp32 first, and why the others of -modes' default are left out."""
    from tools.common.precisions import MODES, cannot, read_modes
    from tools.common.sessions import silence_torchao

    silence_torchao()
    if words is None:
        left_out = {mode.name: why for mode in MODES[1:] if (why := _why_not(mode, config, setup.device))}
        return [mode for mode in MODES if mode.name not in left_out], left_out
    modes = read_modes(words, config.AMP, setup.device)
    for mode in modes:
        if why := cannot(mode, config, setup.device):
            raise UserError(f"-modes {mode.name}: {why}")
    return [MODES[0], *modes], {}


def _why_not(mode: Mode, config: Config, device: torch.device) -> str | None:
    """Why a precision is not measured by default; None if it is."""
    from tools.common.precisions import cannot, is_emulated, lacks_arithmetic

    anyway = "(list it in -modes to measure it anyway)"
    if why := cannot(mode, config, device):
        return why
    if lacks_arithmetic(mode, device):
        return f"this CPU has no fp16 arithmetic and emulates every product {anyway}"
    if is_emulated(mode, device):
        return f"emulated on this device, so its speed is meaningless {anyway}"
    return f"keeps no fp32 master weights {anyway}" if mode.level == "O3" else None


def precisions_section(results: Results) -> Section:
    modes = [name.removesuffix(SYNTHETIC) for name in results.turns if name.endswith(SYNTHETIC)]
    with_files = any(name.endswith(FILES) for name in results.turns)
    base = REFERENCE + SYNTHETIC

    def column(key: str, source: str = SYNTHETIC):
        return lambda mode: results.cell(key)(mode + source)

    def memory_to_fp32(mode: str) -> str:
        memory, of_base = (results.median(name, "peak_memory_gb") for name in (mode + SYNTHETIC, base))
        return percent(memory / of_base if memory is not None and of_base else None)

    def speedup(source: str):
        return lambda mode: shown(results.ratio(mode + source, REFERENCE + source, "images_per_second"))

    def waited(mode: str) -> str:
        median = results.median(mode + FILES, "data_wait_percent")
        return percent(None if median is None else median / 100)

    columns: Columns = [
        ("memory (GB)", column("peak_memory_gb")),
        ("to fp32", memory_to_fp32),
        ("iterations/s", column("iterations_per_second")),
        ("images/s", column("images_per_second")),
        ("speed-up", speedup(SYNTHETIC)),
    ]
    notes = [
        *results.choices_lines({mode + SYNTHETIC: mode for mode in modes}),
        results.control_line(base, "images_per_second", REFERENCE),
        results.iteration_line(),
    ]
    if with_files:
        columns += [
            ("from files", column("images_per_second", FILES)),
            ("speed-up", speedup(FILES)),
            ("waited", waited),
        ]
        notes += [
            "from files: images/s with image files that are read, decoded and augmented, followed by the speed-up with "
            "them; waited: fraction of the time that training from these files spent waiting for data",
            "everything else: with synthetic images, made on the device",
        ]
    else:
        notes.append("images: synthetic, made on the device")
    if results["device"].startswith("cpu"):
        notes.append("memory: peak of the whole process, Python and libraries included")
    title = f"Precisions, {results.subject()}, {results.settings['iterations']} iterations per measurement"
    return Section(title, with_columns(modes, columns, "mode"), notes)


SIMPLENET_ABOUT = """Time and loss of three linear layers on random numbers: no AMP, AMP, AMP with accumulation.

    python scripts/benchmark_amp.py simplenet
    python scripts/benchmark_amp.py simplenet -width 4096 -batch_size 512 -batches 50 -epochs 5

ReLU after the first two layers, mean squared error, SGD at 1e-4, loss scale 1024 if the loss is scaled. The numbers are
on the device before the timer starts. The reported loss is that of the last update. The net does little but matrix
products, so its speed-up is about the most that AMP can reach on a device."""
SIMPLENET_FLAGS = (
    Flag("width", "inputs and outputs of each layer", "N", kind=whole(1), default_text="4096; on a CPU 512"),
    Flag("batches", "batches per epoch", "N", kind=whole(1), default_text="50; on a CPU 20"),
    Flag("epochs", "epochs per measurement", "N", kind=whole(1), default_text="5; on a CPU 2"),
    Flag("accumulated", "batches per update where AMP is on with accumulation", "N", default=10, kind=whole(1)),
    ROUNDS,
)
SIMPLENET = {
    "TRAIN.OPTIMIZER.NAME": "SGD",
    "TRAIN.OPTIMIZER.MOMENTUM": 0.0,
    "TRAIN.BASE_LR": 1e-4,
    "TRAIN.END_LR": 1e-4,
    "TRAIN.WARMUP_EPOCHS": 0,
    "TRAIN.WEIGHT_DECAY": 0.0,
}


def _simplenet_rows(accumulated: int) -> dict[str, tuple[bool, int]]:
    """Name of a contender, a key in -json files -> whether AMP is on, and batches per update."""
    return {OFF: (False, 1), ON: (True, 1), f"{ON}, {accumulated} batches an update": (True, accumulated)}


def plan_simplenet(line: ToolLine) -> Plan:
    setup = set_up(line, on_cpu={"DATA.BATCH_SIZE": 64}, on_gpu={"DATA.BATCH_SIZE": 512}, fixed=SIMPLENET)
    from tools.benchmark_amp.loops import SimpleNet
    from tools.common.sessions import Worker

    asked, workers = line.asked, list["Worker"]()
    width, batches = asked.width or (512 if setup.on_cpu else 4096), asked.batches or (20 if setup.on_cpu else 50)
    epochs = asked.epochs or (2 if setup.on_cpu else 5)
    config = changed(setup.config, "TRAIN", NUM_EPOCHS=epochs)
    if setup.is_default("AMP.INIT_LOSS_SCALING"):
        config = changed(config, "AMP", INIT_LOSS_SCALING=1024.0)
    rows = _simplenet_rows(asked.accumulated)
    contenders = {
        name: Worker(partial(SimpleNet, config, setup.device, width, batches, *how), workers)
        for name, how in {**rows, OFF + AGAIN: rows[OFF]}.items()
    }
    settings = {"width": width, "batch": config.DATA.BATCH_SIZE, "batches": batches, "epochs": epochs}
    settings |= {"accumulated": asked.accumulated, "amp": f"{config.AMP.LEVEL} {config.AMP.DTYPE}", "seed": config.SEED}
    images = "none, but random numbers on the device"
    return Plan(contenders, asked.rounds, settings, prepared(setup), images, remarks=setup.remarks)


def simplenet_section(results: Results) -> Section:
    settings = results.settings
    columns: Columns = [
        ("precision", results.precision),
        ("seconds", results.cell("seconds", 4)),
        ("speed-up", lambda name: shown(results.ratio(OFF, name, "seconds"))),
        ("loss", results.cell("loss", 4)),
    ]
    title = (
        f"Three linear layers of {settings['width']}, {counted(settings['batches'], 'batch')} of {settings['batch']}, "
        f"{counted(settings['epochs'], 'epoch')}"
    )
    rows = with_columns(_simplenet_rows(settings["accumulated"]), columns)
    return Section(title, rows, [results.control_line(OFF, "seconds")])


TABLES = (
    Table("amp", AMP_ABOUT, AMP_FLAGS, plan_amp, amp_section),
    Table("precisions", PRECISIONS_ABOUT, PRECISIONS_FLAGS, plan_precisions, precisions_section),
    Table("simplenet", SIMPLENET_ABOUT, SIMPLENET_FLAGS, plan_simplenet, simplenet_section),
)
