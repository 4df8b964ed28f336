"""Benchmark mixed precision and vitamp's update on this machine. Each table is a command of its own.

    python scripts/benchmark_amp.py amp -model vit_base_patch16_224 -batch_size 64
    python scripts/benchmark_amp.py TABLE -h    # about a table, and its flags
    python scripts/benchmark_amp.py TABLE -budget_min 9 -json table.json

The contenders (the precisions or loops compared) alternate after a warm-up, in reverse order every other round. The
report shows medians, and ratios taken within a round. One contender runs twice as a control: the ratio of its two
results shows the noise. -json is written after every measurement. The settings and flags of main_single_gpu.py are
accepted; -eval, -resume and -use are refused; those without a meaning here, as -output and -ngpus, have no effect.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.benchmark_amp.plan import (
    AGAIN,
    FUSED,
    ON_THE_DEVICE,
    OURS,
    ROUNDS,
    TIMM,
    Plan,
    Results,
    Way,
    set_up,
    synthetic,
    users_data,
    with_columns,
)
from tools.common.command_line import MODES, OVERWRITE, PAGES, Tool, ToolLine, above_zero, first_word, tool
from tools.common.output_file import if_interrupted, writing
from tools.common.tables import non_defaults, rounded
from tools.common.turns import Budget, alternating_order, progress_bar
from utils.cli import command_line, entry_parser
from utils.config import AmpConfig, Config
from utils.config.keys import default_of
from utils.errors import EXIT_DONE, TrainingError, UserError, nearest
from utils.flags import Flag, whole
from utils.log import log, log_lines
from utils.machine.cpus import cores
from utils.program import typed
from utils.record.run_folder import git_state, versions, write_json
from utils.text import counted, redacted

if TYPE_CHECKING:
    from bench.benchmark_amp.sessions import Worker


OFF = "AMP off"
ON = "AMP on"
FP32 = "fp32"
SYNTHETIC = ", synthetic"
FILES = ", files"
"""Ends of the names in the table `precisions`."""

AMP_ABOUT = """Seconds per 100 iterations in seven windows, AMP off and AMP on; their averages and the speed-up.

    python scripts/benchmark_amp.py amp -cfg configs/vit_base_patch16_224.yaml -batch_size 64
    python scripts/benchmark_amp.py amp -model vit_small_patch16_224 -amp bf16 -iters 20 -windows 3

Images are made on the device, unless -dataset or -data_path names others. -amp chooses the precision of `AMP on`
(default: what AMP.DTYPE auto chooses on this device)."""
AMP_FLAGS = (
    Flag("iters", "iterations per window", "N", kind=whole(1), default_text="100; on a CPU 10"),
    Flag("windows", "windows for AMP off and for AMP on", "N", default=7, kind=whole(1)),
)


def plan_amp(line: ToolLine) -> Plan:
    loaded, device, where, remarks = set_up(line, reads_data=True)
    updates = line.asked.iters or (10 if device.type == "cpu" else 100)
    given, images = users_data(loaded)
    config = given or synthetic(loaded.config, updates)
    workers = list["Worker"]()
    amps = {name: config.AMP.changed(ENABLED=name == ON) for name in (OFF, ON, OFF + AGAIN)}
    contenders = {name: _training(config, amp, updates, workers) for name, amp in amps.items()}
    settings = {"iterations": updates, **non_defaults(config.changed(AMP={"ENABLED": True}))}
    return Plan(contenders, line.asked.windows, settings, where, images, remarks=remarks)


def _training(
    config: Config,
    amp: AmpConfig,
    updates: int,
    workers: list[Worker],
    keep: bool = True,
    compiler: dict[str, Any] | None = None,
) -> Worker:
    """A worker that trains. `compiler`: settings of torch's compiler."""
    from bench.benchmark_amp.sessions import TrainingSession, Worker

    return Worker(partial(TrainingSession, config.changed(AMP=amp), updates, compiler), workers, keep)


def amp_report(results: Results) -> list[str]:
    windows = {name: results.per_turn(name, "seconds") for name in (OFF, ON)}
    # If the time ran out, one may have a window more: averages are over the windows of both.
    both = min(map(len, windows.values()))
    averages = {name: statistics.fmean(seconds[:both]) for name, seconds in windows.items()} if both else {}
    rows = [["", *map(str, range(1, results["rounds"] + 1)), "average", "speed-up"]]
    for name, seconds in windows.items():
        cells = [rounded(second, 4) for second in seconds[:both]] + ["-"] * (results["rounds"] - both)
        speedup = averages[OFF] / averages[ON] if name == ON and both else None
        rows.append([name, *cells, rounded(averages.get(name), 4), rounded(speedup, 4)])
    iterations = results["settings"]["iterations"]
    means = results.first(ON, "precision", "-")
    title = f"Seconds per {iterations} iterations, {results.subject()}; {ON} means {means}"
    choices = results.choices_lines({OFF: OFF, ON: ON})
    return results.report(title, rows, [results.control_line(OFF, "seconds"), *choices, results.iteration_line()])


PRECISIONS_ABOUT = """Memory, iterations/s, images/s and speed-up of each precision.

    python scripts/benchmark_amp.py precisions -model vit_base_patch16_224 -batch_size 128
    python scripts/benchmark_amp.py precisions -dataset imagefolder -data_path /data/flowers -modes bf16,O2-bf16

Every measurement runs in a process of its own, so that its peak memory is known. Synthetic images are generated on the
device. If -dataset or -data_path names images, these are measured as well."""
PRECISIONS_FLAGS = (
    Flag("iters", "iterations per measurement", "N", kind=whole(1), default_text="50; on a CPU 5"),
    ROUNDS,
    MODES,
)


def plan_precisions(line: ToolLine) -> Plan:
    loaded, device, where, remarks = set_up(line, reads_data=True)
    from tools.common.precisions import REFERENCE, modes_to_measure

    updates, (given, images) = line.asked.iters or (5 if device.type == "cpu" else 50), users_data(loaded)
    config = (given or loaded.config).changed(AMP={"ENABLED": False})
    others, left_out = modes_to_measure(line.asked.modes, config, device)
    modes = (REFERENCE, *others)
    drawn = synthetic(config, updates)
    workers = list["Worker"]()
    configs = {mode.name + SYNTHETIC: (drawn, mode) for mode in modes}
    configs[REFERENCE.name + SYNTHETIC + AGAIN] = drawn, REFERENCE
    configs |= {mode.name + FILES: (config, mode) for mode in modes if given}
    # A new process for each turn, so that the peak memory is known.
    contenders = {
        name: _training(one, mode.amp(one.AMP), updates, workers, keep=False) for name, (one, mode) in configs.items()
    }
    settings = {"iterations": updates, **non_defaults(config)}
    images = f"{ON_THE_DEVICE}; with files, {images}" if given else ON_THE_DEVICE
    return Plan(contenders, line.asked.rounds, settings, where, images, left_out, remarks)


def precisions_report(results: Results) -> list[str]:
    modes = [name.removesuffix(SYNTHETIC) for name in results.turns if name.endswith(SYNTHETIC)]
    base = FP32 + SYNTHETIC

    def column(key: str, source: str = SYNTHETIC):
        return lambda mode: results.cell(mode + source, key)

    def memory_to_fp32(mode: str) -> str:
        memory, of_base = (results.median(name, "peak_memory_gb") for name in (mode + SYNTHETIC, base))
        return f"{100 * memory / of_base:.0f} %" if memory is not None and of_base else "-"

    def speedup(source: str):
        return lambda mode: results.ratio(mode + source, FP32 + source, "images_per_second")

    columns = [
        ("memory (GB)", column("peak_memory_gb")),
        ("to fp32", memory_to_fp32),
        ("iterations/s", column("iterations_per_second")),
        ("images/s", column("images_per_second")),
        ("speed-up", speedup(SYNTHETIC)),
    ]
    notes = [
        *results.choices_lines({mode + SYNTHETIC: mode for mode in modes}),
        results.control_line(base, "images_per_second", FP32),
        results.iteration_line(),
    ]
    if any(name.endswith(FILES) for name in results.turns):
        columns += [
            ("from files", column("images_per_second", FILES)),
            ("speed-up", speedup(FILES)),
            ("waited (%)", column("data_wait_percent", FILES)),
        ]
        notes += [
            "from files: images/s with image files that are read, decoded and augmented, followed by the speed-up with "
            "them; waited: fraction of the time that training from these files spent waiting for data",
            "everything else: with synthetic images, made on the device",
        ]
    if results["device"].startswith("cpu"):
        notes.append("memory: peak of the whole process, Python and libraries included")
    title = f"Precisions, {results.subject()}, {results['settings']['iterations']} iterations per measurement"
    return results.report(title, with_columns(modes, columns, "mode"), notes)


SETTINGS_ABOUT = """Speed and memory of an update with other flags and settings beside those given.

    python scripts/benchmark_amp.py settings -model vit_base_patch16_224 -batch_size 128 -amp \\
        -try TRAIN.COMPILE=whole -try="-amp bf16" -try "TRAIN.COMPILE=whole SPEED=-packed"

Each -try is a row: the command line with these words added. Words that begin with `inductor.` are settings of torch's
compiler (torch._inductor.config), as in -try "TRAIN.COMPILE=whole inductor.max_autotune_gemm=true". The first row,
`given`, has none, and runs twice as a control. Images are made on the device. TRAIN.COMPILE auto compiles nothing
here."""
SETTINGS_FLAGS = (
    Flag("try", "flags and settings of a further row", "KEY=VALUE", default=(), append=True),
    Flag("iters", "updates per measurement", "N", kind=whole(1), default_text="50; on a CPU 5"),
    ROUNDS,
)
GIVEN = "given"
COMPILER = "inductor."


def plan_settings(line: ToolLine) -> Plan:
    loaded, device, where, remarks = set_up(line)
    updates = line.asked.iters or (5 if device.type == "cpu" else 50)
    workers = list["Worker"]()
    configs = {GIVEN: loaded.config, GIVEN + AGAIN: loaded.config}
    compilers: dict[str, dict[str, Any]] = {}
    for words in vars(line.asked)["try"]:
        split = shlex.split(words)
        compilers[words] = compiler_settings([word for word in split if word.startswith(COMPILER)])
        added = command_line(*entry_parser(NAME).read([word for word in split if not word.startswith(COMPILER)]))
        run = replace(line.run, flags=line.run.flags | added.flags, words=line.run.words | added.words)
        configs[words] = set_up(replace(line, run=run))[0].config
    contenders = {
        name: _training(synthetic(config, updates), config.AMP, updates, workers, compiler=compilers.get(name))
        for name, config in configs.items()
    }
    settings = {"iterations": updates, **non_defaults(loaded.config)}
    return Plan(contenders, line.asked.rounds, settings, where, ON_THE_DEVICE, remarks=remarks)


def compiler_settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of torch's compiler that words such as inductor.max_autotune_gemm=true name.

    UserError for a setting that the compiler does not have, or a value that is not JSON.
    """
    found: dict[str, Any] = {}
    if not words:
        return found
    import torch._inductor.config as inductor

    known = inductor.get_config_copy()
    for word in words:
        key, _, value = word.removeprefix(COMPILER).partition("=")
        if key not in known:
            raise UserError(f"-try {word}: torch's compiler has no setting {key!r}.{nearest(key, list(known))}")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            raise UserError(f'-try {word}: expected a value such as true, 4 or "ATEN,TRITON".') from None
    return found


def settings_report(results: Results) -> list[str]:
    names = [name for name in results.turns if not name.endswith(AGAIN)]
    columns = [
        ("precision", lambda name: results.first(name, "precision", "-")),
        ("memory (GB)", lambda name: results.cell(name, "peak_memory_gb")),
        ("images/s", lambda name: results.cell(name, "images_per_second")),
        ("speed-up", lambda name: results.ratio(name, GIVEN, "images_per_second")),
    ]
    notes = [*results.choices_lines({name: name for name in names}), results.control_line(GIVEN, "images_per_second")]
    title = f"Settings, {results.subject()}, {results['settings']['iterations']} updates per measurement"
    return results.report(title, with_columns(names, columns, "words"), [*notes, results.iteration_line()])


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
    loaded, device, where, remarks = set_up(line, {"DATA.BATCH_SIZE": 64}, {"DATA.BATCH_SIZE": 512}, SIMPLENET)
    from bench.benchmark_amp.loops import SimpleNet
    from bench.benchmark_amp.sessions import Worker

    asked = line.asked
    on_cpu = device.type == "cpu"
    workers = list["Worker"]()
    width = asked.width or (512 if on_cpu else 4096)
    batches = asked.batches or (20 if on_cpu else 50)
    epochs = asked.epochs or (2 if on_cpu else 5)
    config = loaded.config.changed(TRAIN={"NUM_EPOCHS": epochs})
    if loaded.is_default("AMP.INIT_LOSS_SCALING"):
        config = config.changed(AMP={"INIT_LOSS_SCALING": 1024.0})
    rows = _simplenet_rows(asked.accumulated)
    contenders = {
        name: Worker(partial(SimpleNet, config, device, width, batches, *how), workers)
        for name, how in {**rows, OFF + AGAIN: rows[OFF]}.items()
    }
    settings = {"width": width, "batch": config.DATA.BATCH_SIZE, "batches": batches, "epochs": epochs}
    settings |= {"accumulated": asked.accumulated, "amp": f"{config.AMP.LEVEL} {config.AMP.DTYPE}", "seed": config.SEED}
    return Plan(contenders, asked.rounds, settings, where, "none, but random numbers on the device", remarks=remarks)


def simplenet_report(results: Results) -> list[str]:
    settings = results["settings"]
    columns = [
        ("precision", lambda name: results.first(name, "precision", "-")),
        ("seconds", lambda name: results.cell(name, "seconds", 4)),
        ("speed-up", lambda name: results.ratio(OFF, name, "seconds")),
        ("loss", lambda name: results.cell(name, "loss", 4)),
    ]
    title = (
        f"Three linear layers of {settings['width']}, {counted(settings['batches'], 'batch')} of {settings['batch']}, "
        f"{counted(settings['epochs'], 'epoch')}"
    )
    rows = with_columns(_simplenet_rows(settings["accumulated"]), columns)
    return results.report(title, rows, [results.control_line(OFF, "seconds")])


TIMM_ABOUT = """Speed of vitamp's update and of timm's loop, with its default flags and with faster ones.

    python scripts/benchmark_amp.py timm -image_size 224 -batch_size 8 -threads 1
    python scripts/benchmark_amp.py timm -image_size 32 -compile
    python scripts/benchmark_amp.py timm -model vit_small_patch16_224 -batch_size 256 -timm_train train.py -compile

All loops have the same model, initial weights, batches, AdamW, cosine schedule, clipping and EMA. First the losses of
5 updates are compared; if they differ by more than rounding, nothing is measured. timm's loop is in train.py, which is
in timm's repository but not in its package: give the file with -timm_train. Otherwise, the loop is assembled from parts
of the package. timm's faster flags are the fused AdamW and, with -compile, --torchcompile."""
PRECISIONS = ("fp32", "bf16", "fp16")


def _precisions(text: str) -> list[str]:
    """For `Flag.kind`: fp32 first, with which the others are compared."""
    names = dict.fromkeys(text.split(","))
    for name in names:
        if name not in PRECISIONS:
            raise ValueError(f"unknown {name!r}.{nearest(name, PRECISIONS)} Known: {','.join(PRECISIONS)}")
    return sorted(names, key=lambda name: name != FP32)


TIMM_FLAGS = (
    Flag("updates", "updates per measurement", "N", kind=whole(1), default_text="50; on a CPU 5"),
    Flag("rounds", "how often each contender is measured", "N", default=7, kind=whole(1)),
    Flag(
        "precisions",
        f"precisions to measure, from {','.join(PRECISIONS)}",
        "A,B",
        default=("fp32", "bf16"),
        kind=_precisions,
        default_text="fp32,bf16",
    ),
    Flag("compile", "also measure compiled versions of vitamp's update and of timm's loop with its faster flags"),
    Flag("timm_train", "train.py of timm's repository, to measure the loop in it", "FILE", kind=Path),
)
OF_TIMMS_LOOP = ("AMP.LEVEL", "MODEL.PRETRAINED", "MODEL.NEW_CLASSIFIER", "MODEL.LORA.RANK", "TRAIN.LAYER_DECAY")
OF_TIMMS_LOOP += ("TRAIN.OPTIMIZER.NAME", "TRAIN.GRAD_CHECKPOINT", "TRAIN.SIZE_SCHEDULE", "TRAIN.TOKEN_DROP")
OF_TIMMS_LOOP += ("DATA.BITS", "DATA.RANGE")
"""Settings that have their default, whatever a recipe says: timm's loop, as it is measured, has no other."""
TIMM_FIXED: dict[str, Any] = {
    "TRAIN.NUM_EPOCHS": 10,
    "TRAIN.WARMUP_EPOCHS": 0.1,
    "TRAIN.BASE_LR": 1e-3,
    "TRAIN.LINEAR_SCALED_LR": None,
    "TRAIN.WEIGHT_DECAY": 0.3,
    "TRAIN.GRAD_CLIP": 1.0,
    "TRAIN.MODEL_EMA": True,
    "TRAIN.MODEL_EMA_DECAY": 0.9998,
    "TRAIN.MODEL_EMA_WARMUP": False,
    **dict.fromkeys(("MODEL.DROPOUT", "MODEL.ATTENTION_DROPOUT", "MODEL.DROPPATH", "TRAIN.SMOOTHING"), 0.0),
    **dict.fromkeys(("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.RANDOM_ERASE_PROB"), 0.0),
    "AMP.CUSTOM_WHITE_LIST": [],
    "AMP.CUSTOM_BLACK_LIST": [],
    **{key: default_of(key) for key in OF_TIMMS_LOOP},
}
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-2}
"""Allowed difference of a loss from timm's in fp32, relative to the loss. fp32 rounds to 6e-8, many times."""


def plan_timm(line: ToolLine) -> Plan:
    precisions = line.asked.precisions
    compiled = bool(line.asked.compile)
    train_py = line.asked.timm_train
    loaded, device, where, remarks = set_up(line, fixed=TIMM_FIXED)
    updates = line.asked.updates or (5 if device.type == "cpu" else 50)

    from bench.benchmark_amp.loops import LoopSession, read_train_py
    from bench.benchmark_amp.sessions import OUT_OF_MEMORY, Worker

    if train_py is not None:
        train_py = train_py.expanduser().resolve()
        read_train_py(train_py)
    ways: list[Way] = []
    for precision in precisions:
        ways += [Way(kind, precision, train_py=train_py) for kind in (TIMM, FUSED, OURS)]
        ways += [Way(kind, precision, True, train_py) for kind in (FUSED, OURS) if compiled]
    by_name = {way.name: way for way in ways}
    first = next(iter(by_name))
    by_name[first + AGAIN] = by_name[first]
    # None is ended for another's memory: a loop that was rebuilt would not be past its warm-up.
    workers = {name: Worker(partial(LoopSession, way, loaded.config, updates), []) for name, way in by_name.items()}
    log.info("building the loops and comparing their first losses: %s", "; ".join(workers))
    with ExitStack() as unless_measured:
        for worker in workers.values():
            unless_measured.callback(worker.close)
        # Compiling keeps one core busy and leaves a GPU idle, so there a few of timm's loops are built side by side.
        # Ours are built one by one: they choose their attention by the clock.
        side_by_side = [name for name in workers if device.type == "cuda" and not name.startswith(OURS)]
        with ThreadPoolExecutor(max(1, cores() // 3)) as pool:
            begun = {name: pool.submit(workers[name].start) for name in side_by_side}
        answers = {name: begun[name].result() if name in begun else one.start() for name, one in workers.items()}
        for name in [name for name, answer in answers.items() if answer.get("failed") == OUT_OF_MEMORY]:
            workers[name].close()  # perhaps only beside the others
            answers[name] = workers[name].start()
        left_out = {name: answer["failed"] for name, answer in answers.items() if "failed" in answer}
        if first in left_out:
            raise TrainingError(f"the baseline {first} failed: {left_out[first]}")
        check_losses({name: answer["losses"] for name, answer in answers.items() if name not in left_out}, first)
        unless_measured.pop_all()
    for name, why in left_out.items():
        workers.pop(name).close()
        log.warning("%s: %s", name, why)
    settings = {
        "updates": updates,
        "precisions": ",".join(precisions),
        "compiled": compiled,
        "timm_loop": "its own train.py" if train_py else "parts of its package",
        **non_defaults(loaded.config),
    }
    images = "random, on the device before the timer starts"
    return Plan(workers, line.asked.rounds, settings, where, images, left_out, remarks)


def check_losses(losses: dict[str, list[float]], first: str) -> None:
    """Raise TrainingError unless all losses are those of `first`: loops with different losses do different work."""
    texts = {name: ", ".join(f"{loss:.7f}" for loss in own) for name, own in losses.items()}
    problems: list[str] = []
    for name, own in losses.items():
        difference = apart(own, losses[first])
        limit = TOLERANCE[_precision_of(name)]
        if difference > limit:
            differs = f"differs from {first} by {difference:.1e}, more than {limit:.0e}"
            problems.append(f"  {name}: {texts[name]}; {differs}\n")
    if problems:
        said = "the losses do not agree, so nothing is measured:\n"
        raise TrainingError(f"{said}{''.join(problems)}  {first}: {texts[first]}")


def apart(one: list[float], other: list[float]) -> float:
    """Greatest difference of two loss curves, relative to the loss."""
    differences = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(one, other, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _precision_of(name: str) -> str:
    return name.removesuffix(AGAIN).rpartition(", ")[2]


def timm_report(results: Results) -> list[str]:
    settings = results["settings"]
    names = [name for name in results.turns if not name.endswith(AGAIN) and results.per_turn(name, "seconds")]
    first = f"{TIMM}, {settings['precisions'].partition(',')[0]}"
    to_ms = 1000 / settings["updates"]

    def speedup(key: str, over: str | None = None) -> Callable[[str], str]:
        return lambda name: results.ratio(over or f"{TIMM}, {_precision_of(name)}", name, key)

    columns = [
        ("ms/update", lambda name: results.cell(name, "seconds", 4, to_ms)),
        ("images/s", lambda name: results.cell(name, "images_per_second")),
        (f"to {first}", speedup("seconds", first)),
        ("to timm", speedup("seconds")),
        ("CPU ms", lambda name: results.cell(name, "cpu_seconds", 4, to_ms)),
        (f"to {first}", speedup("cpu_seconds", first)),
        ("to timm", speedup("cpu_seconds")),
        ("GB", lambda name: results.cell(name, "peak_memory_gb")),
    ]
    notes = [
        results.control_line(first, "seconds"),
        f"by CPU time, {results.control_line(first, 'cpu_seconds')}",
        "`to timm`: speed-up over timm's loop in the same precision, first by wall-clock time, then by CPU time",
        f"timm's loop: {settings['timm_loop']}",
        *results.choices_lines({name: name for name in names}),
    ]
    return results.report(f"An update, {results.subject()}, with EMA and clipping", with_columns(names, columns), notes)


TABLES = {
    "amp": (AMP_ABOUT, AMP_FLAGS, plan_amp, amp_report),
    "precisions": (PRECISIONS_ABOUT, PRECISIONS_FLAGS, plan_precisions, precisions_report),
    "settings": (SETTINGS_ABOUT, SETTINGS_FLAGS, plan_settings, settings_report),
    "simplenet": (SIMPLENET_ABOUT, SIMPLENET_FLAGS, plan_simplenet, simplenet_report),
    "timm": (TIMM_ABOUT, TIMM_FLAGS, plan_timm, timm_report),
}
"""Subcommand -> text for -h, whose first line is the summary; flags; contenders; lines for the terminal"""
OWN = (
    Flag("budget_min", "time limit in minutes; fewer rounds are measured", "M", default=10, kind=above_zero),
    Flag("json", "write every measurement to this file, with device, versions and command", "FILE"),
    OVERWRITE,
)
NAME = "benchmark_amp.py"
PAGES[NAME] = "benchmarks"
ONE_LABEL = "benchmark_amp.py measures models with one label per image; leave it out"


@tool
def main(argv: list[str]) -> int:
    abouts = {name: about.splitlines()[0] for name, (about, *_) in TABLES.items()}
    name = first_word(argv or ["-h"], NAME, __doc__, abouts, "table")
    about, flags, plan, report = TABLES[name]
    line = Tool(NAME, about, (*flags, *OWN), command=name, one_label=ONE_LABEL).read(argv[1:])
    json_file = line.file("json", ".json")
    budget = Budget(60 * line.asked.budget_min)
    results = measure(name, plan(line), budget, json_file, argv)
    print("\n".join(report(results)))
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
        versions=versions(),
        git=git_state(),
        **json.loads(json.dumps({key: value for key, value in vars(plan).items() if key != "contenders"})),
        cut=False,
        turns={name: [] for name in plan.contenders},
    )

    def write() -> None:
        if path is not None:
            with writing(path, "-json"):
                write_json(path, results)
            if_interrupted[:] = [f"every finished measurement is in {path}"]

    longest: dict[str, float] = {}
    try:
        log.info("%s: %s on %s", table, ", ".join(results.turns), plan.device)
        log_lines([*plan.remarks, *results.failures()])
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
