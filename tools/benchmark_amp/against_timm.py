"""`timm`: vitamp's update against timm's training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmark_amp.plan import FUSED, MODEL, OURS, TIMM, Plan, Table, Way, prepared, set_up
from tools.benchmark_amp.results import AGAIN, Metrics, Results, shown
from tools.common.command_line import ToolLine, some_of
from tools.common.tables import Columns, Section, non_defaults, with_columns
from utils.errors import TrainingError, UserError
from utils.flags import Flag, whole
from utils.log import log

if TYPE_CHECKING:
    from tools.common.sessions import Worker

COMPILED = (FUSED, OURS)
"""Kinds that -compile adds in a compiled version."""


ABOUT = """Speed of vitamp's update and of timm's loop, with its default flags and with its fastest.

    python scripts/benchmark_amp.py timm -image_size 224 -batch_size 8 -threads 1
    python scripts/benchmark_amp.py timm -image_size 32 -compile
    python scripts/benchmark_amp.py timm -model vit_small_patch16_224 -batch_size 256 -timm_train train.py -compile

All loops have the same model, initial weights, batches, AdamW, cosine schedule, clipping and EMA. First the losses of
5 updates are compared; if they differ by more than rounding, nothing is measured. timm's loop is in train.py, which is
in timm's repository but not in its package: give the file with -timm_train. Otherwise, the loop is assembled from parts
of the package. timm's fastest flags are the fused AdamW and, with -compile, --torchcompile."""
PRECISIONS = ("fp32", "bf16", "fp16")
FLAGS = (
    MODEL,
    Flag("updates", "updates per measurement", "N", kind=whole(1), default_text="50; on a CPU 5"),
    Flag("rounds", "how often each contender is measured", "N", default=7, kind=whole(1)),
    Flag(
        "precisions",
        f"precisions to measure, from {','.join(PRECISIONS)}",
        "A,B",
        kind=some_of(*PRECISIONS),
        default_text="fp32,bf16",
    ),
    Flag("compile", "also measure compiled versions of vitamp's update and of timm's loop with its fastest flags"),
    Flag("timm_train", "train.py of timm's repository, to measure the loop in it", "FILE", kind=Path),
)
FIXED: dict[str, Any] = {
    "TRAIN.NUM_EPOCHS": 10,
    "TRAIN.WARMUP_EPOCHS": 0.1,
    "TRAIN.BASE_LR": 1e-3,
    "TRAIN.WEIGHT_DECAY": 0.3,
    "TRAIN.GRAD_CLIP": 1.0,
    "TRAIN.MODEL_EMA": True,
    "TRAIN.MODEL_EMA_DECAY": 0.9998,
    "TRAIN.MODEL_EMA_WARMUP": False,
}
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-2}
"""Allowed difference of a loss from timm's in fp32, relative to the loss. fp32 rounds to 6e-8, many times."""


def plan(line: ToolLine) -> Plan:
    # fp32 first: the other precisions are compared with it.
    precisions = sorted(line.asked.precisions or ("fp32", "bf16"), key=lambda name: name != "fp32")
    compiled, train_py = bool(line.asked.compile), _train_py(line)
    setup = set_up(line, fixed=FIXED)
    updates = line.asked.updates or (5 if setup.on_cpu else 50)

    from tools.benchmark_amp.loops import LoopSession
    from tools.common.sessions import Worker

    ways: list[Way] = []
    for precision in precisions:
        ways += [Way(kind, precision, train_py=train_py) for kind in (TIMM, FUSED, OURS)]
        ways += [Way(kind, precision, True, train_py) for kind in COMPILED if compiled]
    by_name = {way.name: way for way in ways}
    first = next(iter(by_name))
    by_name[first + AGAIN] = by_name[first]
    # None is ended for another's memory: a loop that was rebuilt would not be past its warm-up.
    workers = {name: Worker(partial(LoopSession, way, setup.config, updates), []) for name, way in by_name.items()}
    device = prepared(setup)
    left_out = _compare_losses(workers, by_name, first)
    contenders = {name: worker for name, worker in workers.items() if name not in left_out}
    settings = {
        "updates": updates,
        "precisions": ",".join(precisions),
        "compiled": compiled,
        "timm_loop": "its own train.py" if train_py else "parts of its package",
        **non_defaults(setup.config),
    }
    images = "random, on the device before the timer starts"
    return Plan(contenders, line.asked.rounds, settings, device, images, left_out, setup.remarks)


def _train_py(line: ToolLine) -> Path | None:
    if line.asked.timm_train is None:
        return None
    path = line.asked.timm_train.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"-timm_train {path}: no such file; give train.py of timm's repository.")
    from tools.benchmark_amp.loops import import_train_py

    import_train_py(path)
    return path


def _compare_losses(workers: dict[str, Worker], ways: dict[str, Way], first: str) -> dict[str, str]:
    """Loops that cannot train, and why. Different losses are an error, because such loops do different work.

    Work on the CPU runs concurrently: building, and compiling. Our loops are built one after another, because they
    time alternatives on the device.
    """
    log.info("building the loops and comparing their first losses: %s", "; ".join(workers))
    try:
        answers = concurrently("start", {name: each for name, each in workers.items() if ways[name].kind != OURS})
        answers |= {name: each.start() for name, each in workers.items() if ways[name].kind == OURS}
        ready = {name: each for name, each in workers.items() if "failed" not in answers[name]}
        answers |= {name: each.call("first_losses") for name, each in ready.items() if not ways[name].compiled}
        answers |= concurrently(
            "call", {name: each for name, each in ready.items() if ways[name].compiled}, "first_losses"
        )
        left_out = {name: answers[name]["failed"] for name in workers if "failed" in answers[name]}
        if first in left_out:
            raise TrainingError(f"the baseline {first} failed: {left_out[first]}")
        losses = {name: answers[name]["losses"] for name in workers if name not in left_out}
        if problems := disagreements(losses, first):
            raise TrainingError("the losses do not agree, so nothing is measured:\n" + "\n".join(problems))
    except BaseException:
        for worker in workers.values():
            worker.close()
        raise
    for name, why in left_out.items():
        workers[name].close()
        log.warning("%s: %s", name, why)
    return left_out


def concurrently(method: str, workers: dict[str, Worker], *given: str) -> dict[str, Metrics]:
    with ThreadPoolExecutor(max(1, len(workers))) as threads:
        answers = threads.map(lambda worker: getattr(worker, method)(*given), workers.values())
        return dict(zip(workers, answers, strict=True))


def disagreements(losses: dict[str, list[float]], first: str) -> list[str]:
    """One line per loop whose losses differ from those of `first` by more than its precision rounds."""
    problems: list[str] = []
    for name, own in losses.items():
        difference, limit = apart(own, losses[first]), TOLERANCE[_precision_of(name)]
        if difference > limit:
            problems.append(
                f"  {name}: {_joined(own)}; differs from {first} by {difference:.1e}, more than {limit:.0e}"
            )
    return [*problems, f"  {first}: {_joined(losses[first])}"] if problems else []


def _joined(losses: list[float]) -> str:
    return ", ".join(f"{loss:.7f}" for loss in losses)


def apart(one: list[float], other: list[float]) -> float:
    """Greatest difference of two loss curves, relative to the loss."""
    differences = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(one, other, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _precision_of(name: str) -> str:
    return name.removesuffix(AGAIN).rpartition(", ")[2]


def section(results: Results) -> Section:
    settings, names = results.settings, _names(results)
    precisions = settings["precisions"].split(",")
    first = f"{TIMM}, {precisions[0]}"

    def speedup(key: str, over: str | None = None) -> Callable[[str], str]:
        return lambda name: shown(results.ratio(over or f"{TIMM}, {_precision_of(name)}", name, key))

    columns: Columns = [
        ("ms/update", results.cell("seconds", 4, 1000 / settings["updates"])),
        ("images/s", results.cell("images_per_second")),
        (f"to {first}", speedup("seconds", first)),
        ("to timm", speedup("seconds")),
        ("CPU ms", results.cell("cpu_seconds", 4, 1000 / settings["updates"])),
        (f"to {first}", speedup("cpu_seconds", first)),
        ("to timm", speedup("cpu_seconds")),
        ("GB", results.cell("peak_memory_gb")),
    ]
    notes = [
        results.control_line(first, "seconds"),
        f"by CPU time, {results.control_line(first, 'cpu_seconds')}",
        "`to timm`: speed-up over timm's loop in the same precision, first by wall-clock time, then by CPU time",
        f"timm's loop: {settings['timm_loop']}",
        _agreement(results, precisions, first),
        *results.choices_lines({name: name for name in names}),
    ]
    title = f"An update, {results.subject()}, with EMA and clipping"
    return Section(title, with_columns(names, columns), notes)


def _names(results: Results) -> list[str]:
    return [name for name in results.turns if not name.endswith(AGAIN) and results.median(name, "seconds") is not None]


def _agreement(results: Results, precisions: list[str], first: str) -> str:
    """Note on the greatest difference of the first losses in each precision."""
    curves = {name: results.turns[name][0]["losses"] for name in _names(results)}
    most = []
    for precision in precisions:
        own = [apart(c, curves[first]) for n, c in curves.items() if _precision_of(n) == precision and first in curves]
        most.append(f"{max(own, default=0.0):.1e} in {precision}")
    return f"largest relative difference of a loop's first losses from those of `{first}`: {', '.join(most)}"


TABLE = Table("timm", ABOUT, FLAGS, plan, section)
