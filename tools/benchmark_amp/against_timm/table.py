"""`timm`: vitamp's update against timm's training loop and a plain PyTorch loop."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmark_amp.against_timm.ways import LOOPS, TIMM, Way, ways
from tools.benchmark_amp.ceiling import of_peak, peak_line
from tools.benchmark_amp.results import AGAIN, Results, shown
from tools.benchmark_amp.settings import MODEL, set_up
from tools.benchmark_amp.table import Contender, Plan, Table
from tools.common.command_line import ToolLine, some_of
from tools.common.results.section import Chart, Section
from tools.common.settings import non_defaults
from utils.config import Config
from utils.errors import TrainingError, UserError
from utils.flags import Flag, whole
from utils.log import log

if TYPE_CHECKING:
    from tools.benchmark_amp.worker import Worker

ABOUT = """Speed of vitamp's update, of timm's loop (default flags and fastest flags) and of a plain PyTorch loop.

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
    Flag(
        "loops",
        "loops to measure besides timm's, which is always measured: fused (timm's with its fastest flags), "
        "plain (PyTorch), ours (vitamp)",
        "A,B",
        kind=some_of(*LOOPS),
        default_text="all",
    ),
    Flag(
        "variants",
        "also measure vitamp with other settings, compiled if -compile is given; A=1,B=2 measures them separately, "
        "A=1+B=2 together",
        "A=1,B=2",
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
    loops, compiled, train_py = line.asked.loops or tuple(LOOPS), bool(line.asked.compile), _train_py(line)
    setup = set_up(line, fixed=FIXED)
    updates = line.asked.updates or (5 if setup.on_cpu else 50)
    variants = _variants(line, loops)

    from tools.benchmark_amp.against_timm.session import Job, LoopSession
    from tools.benchmark_amp.worker import Worker

    loops_by_name = ways(precisions, loops, compiled, train_py, variants)
    first = next(iter(loops_by_name))
    loops_by_name[first + AGAIN] = loops_by_name[first]
    workers = {
        name: Worker(partial(LoopSession, Job(way, setup.config, updates))) for name, way in loops_by_name.items()
    }
    amp = setup.config.AMP
    amps = [amp.model_copy(update=_amp_update(precision)) for precision in precisions]
    machine = setup.machine(amps)
    left_out = _compare_losses(workers, loops_by_name, first)
    contenders = [
        Contender(name, partial(worker.call, "turn"), worker.close)
        for name, worker in workers.items()
        if name not in left_out
    ]
    settings = {
        "updates": updates,
        "precisions": ",".join(precisions),
        "loops": ",".join(loops),
        "variants": ",".join(variants),
        "compiled": compiled,
        "timm_loop": "its own train.py" if train_py else "parts of its package",
        **non_defaults(setup.config),
    }
    images = "random, on the device before the timer starts"
    return Plan(contenders, line.asked.rounds, settings, machine, images, left_out, setup.remarks)


def _amp_update(precision: str) -> dict[str, Any]:
    return {"ENABLED": False} if precision == "fp32" else {"ENABLED": True, "DTYPE": precision}


def _train_py(line: ToolLine) -> Path | None:
    if line.asked.timm_train is None:
        return None
    path = line.asked.timm_train.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"-timm_train {path}: no such file; give train.py of timm's repository.")
    from tools.benchmark_amp.against_timm.train_py import import_train_py

    import_train_py(path)
    return path


def _variants(line: ToolLine, loops: tuple[str, ...]) -> dict[str, Config]:
    """Settings of each variant, by its text on the command line."""
    text = line.asked.variants or ""
    if text and "ours" not in loops:
        raise UserError(
            f"-variants {text}: variants change settings of the loop `ours`; add ours to -loops {','.join(loops)}."
        )
    variants: dict[str, Config] = {}
    for words in filter(None, text.split(",")):
        pairs = {key: value for key, _, value in (word.partition("=") for word in words.split("+"))}
        if not all(pairs.values()):
            raise UserError(f"-variants {words}: give settings with values, such as MODEL.ATTENTION=plain.")
        varied = replace(line, run=replace(line.run, words={**line.run.words, **pairs}))
        variants[words] = set_up(varied, fixed=FIXED).config
    return variants


def _compare_losses(workers: dict[str, Worker], loops: dict[str, Way], first: str) -> dict[str, str]:
    """Loops that cannot train, and why. Different losses are an error, because such loops do different work."""
    from tools.benchmark_amp.against_timm.session import first_losses

    log.info("building the loops and comparing their first losses: %s", "; ".join(workers))
    try:
        answers = first_losses(workers, loops)
        left_out = {name: answer["failed"] for name, answer in answers.items() if "failed" in answer}
        if first in left_out:
            raise TrainingError(f"the baseline {first} failed: {left_out[first]}")
        losses = {name: answer["losses"] for name, answer in answers.items() if name not in left_out}
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


def sections(results: Results) -> list[Section]:
    settings, names = results.settings, _names(results)
    precisions = settings["precisions"].split(",")
    first = f"{TIMM}, {precisions[0]}"
    has_peak = bool(results.get("ceiling"))  # files of former versions have none
    peak = ["of peak"] if has_peak else []
    rows = [["", "ms/update", "images/s", *peak, f"to {first}", "to timm", "CPU ms", f"to {first}", "to timm", "GB"]]
    for name in names:
        same = f"{TIMM}, {_precision_of(name)}"
        rows.append(
            [
                name,
                shown(_milliseconds(results, name, "seconds"), 4),
                shown(results.median(name, "images_per_second")),
                *([of_peak(results, name)] if has_peak else []),
                shown(results.ratio(first, name, "seconds")),
                shown(results.ratio(same, name, "seconds")),
                shown(_milliseconds(results, name, "cpu_seconds"), 4),
                shown(results.ratio(first, name, "cpu_seconds")),
                shown(results.ratio(same, name, "cpu_seconds")),
                shown(results.median(name, "peak_memory_gb")),
            ]
        )
    notes = [
        results.control_line(first, "seconds"),
        f"by CPU time, {results.control_line(first, 'cpu_seconds')}",
        "`to timm`: speed-up over timm's loop in the same precision, first by wall-clock time, then by CPU time",
        f"timm's loop: {settings['timm_loop']}",
        _agreement(results, precisions, first),
        *([peak_line(results)] if has_peak else []),
        *results.choices_lines({name: name for name in names}),
    ]
    return [Section(f"An update, {results.subject()}, with EMA and clipping", rows, notes)]


def _names(results: Results) -> list[str]:
    return [name for name in results.turns if not name.endswith(AGAIN) and results.median(name, "seconds") is not None]


def _milliseconds(results: Results, name: str, key: str) -> float | None:
    """Per update."""
    seconds = results.median(name, key)
    return None if seconds is None else 1000 * seconds / results.settings["updates"]


def _agreement(results: Results, precisions: list[str], first: str) -> str:
    """Note on the greatest difference of the first losses in each precision."""
    curves = {name: results.turns[name][0]["losses"] for name in _names(results)}
    most = []
    for precision in precisions:
        own = [apart(c, curves[first]) for n, c in curves.items() if _precision_of(n) == precision and first in curves]
        most.append(f"{max(own, default=0.0):.1e} in {precision}")
    return f"largest relative difference of a loop's first losses from those of `{first}`: {', '.join(most)}"


def charts(results: Results) -> list[Chart]:
    names = _names(results)
    speeds = {name: results.median(name, "images_per_second") or 0.0 for name in names}
    cpu = {name: _milliseconds(results, name, "cpu_seconds") or 0.0 for name in names}
    return [Chart(results.subject(), "images/s", bars=speeds), Chart("CPU time", "ms/update", bars=cpu)]


TABLE = Table("timm", ABOUT, FLAGS, plan, sections, charts)
