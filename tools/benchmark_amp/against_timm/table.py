"""`timm`: this program's update against timm's training loop and the loop that one would write with torch alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    middle,
    shown,
    shown_ratio,
    subject,
    times_as_much,
)
from tools.benchmark_amp.settings import MODEL, settings_of
from tools.common.command_line import ToolLine
from tools.common.settings import told
from utils.cli import Flag
from utils.errors import TrainingError, UserError
from utils.log import log

if TYPE_CHECKING:
    from tools.benchmark_amp.against_timm.seat import Seat
    from tools.benchmark_amp.against_timm.start import Way
    from utils.config import Config

ABOUT = """Our update, timm's loop as it comes and with its best flags, and a plain PyTorch loop, in turns.

    python scripts/benchmark_amp.py timm -image_size 224 -batch_size 8 -threads 1
    python scripts/benchmark_amp.py timm -image_size 32 -compile
    python scripts/benchmark_amp.py timm -model vit_small_patch16_224 -batch_size 256 -timm_train train.py -compile

The same model, first weights, batches, AdamW, cosine, clipping and moving average for all. First their losses are
compared over 5 updates; where they do not agree, nothing is measured. The loop of timm is in train.py of its
repository and in no package: -timm_train names that file; without it, the loop is put together here of the package's
parts. Its best flags are the fused AdamW and, with -compile, --torchcompile."""
FLAGS = (
    MODEL,
    Flag("updates", "updates of a turn (default 50; on a CPU 5)", "N", ("UPDATES",)),
    Flag("rounds", "turns of each (default 7)", "N", ("ROUNDS",)),
    Flag("precisions", "of fp32,bf16,fp16 (default fp32,bf16)", "A,B", ("PRECISIONS",)),
    Flag("loops", "beside timm's: of fused,plain,ours (default: all)", "A,B", ("LOOPS",)),
    Flag(
        "variants", "ours with other settings, too: A=1,B=2 each for itself, A=1+B=2 together", "A=1,B=2", ("VARIANTS",)
    ),
    Flag("compile", "our update and timm's compiled, too", "", ("WITH_COMPILE",)),
    Flag("timm_train", "train.py of timm's repository, whose own loop then runs", "FILE", ("TIMM_TRAIN",)),
)
PRECISIONS = ("fp32", "bf16", "fp16")
LOOPS = ("fused", "plain", "ours")
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
AGREE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 1e-2}
"""How far a loss may be from timm's in fp32, against its size: fp32 rounds to 6e-8, and does so many times."""
OURS, TIMM, BEST, COMPILED_TIMM, PLAIN = "ours", "timm", "timm, fused", "timm, fused, compiled", "plain loop"
COMPILED = "ours, compiled"


def plan(line: ToolLine) -> Plan:
    precisions, loops = _some_of(line, "PRECISIONS", PRECISIONS, "fp32,bf16"), _some_of(line, "LOOPS", LOOPS)
    rounds = line.whole("ROUNDS", 7)
    train_py = Path(line.own["TIMM_TRAIN"][0]).expanduser().resolve() if "TIMM_TRAIN" in line.own else None
    if train_py is not None and not train_py.is_file():
        raise UserError(f"-timm_train {train_py}: no such file; give train.py of timm's repository.")
    if train_py is not None:
        from tools.benchmark_amp.against_timm.train_py import import_train_py

        import_train_py(train_py)
    loaded, device, remarks = settings_of(line, fixed=FIXED)
    config, compiled = loaded.config, "WITH_COMPILE" in line.own
    updates = line.whole("UPDATES", 5 if device.type == "cpu" else 50)

    from tools.benchmark_amp.against_timm.seat import Job, Seat
    from tools.benchmark_amp.training import device_in_words, gpu_of

    variants = _variants(line)
    ways = {_name(who, p): way for p in precisions for who, way in _ways(p, loops, compiled, train_py).items()}
    ways |= {_name(who, p): way for p in precisions for who, way in _varied(p, loops, compiled, variants).items()}
    first = _name(TIMM, precisions[0])
    ways[first + AGAIN] = ways[first]
    seats = {name: Seat(Job(way, config, updates)) for name, way in ways.items()}
    amps = [
        config.AMP.model_copy(update={"ENABLED": p != "fp32"} | ({"DTYPE": p} if p != "fp32" else {}))
        for p in precisions
    ]
    words, gpu = device_in_words(config, device), gpu_of(device)  # sets the threads, which the ceiling depends on
    most = ceiling(config, device, amps)
    left_out = _compare(seats, first)
    contenders = [Contender(name, seat.turn, seat.close) for name, seat in seats.items() if name not in left_out]
    wishes = {
        "updates": updates,
        "precisions": ",".join(precisions),
        "loops": ",".join(loops),
        "variants": ",".join(variants),
        "compiled": compiled,
        "timm_loop": "its own train.py" if train_py else "parts of its package",
        **told(config),
    }
    return Plan(contenders, rounds, wishes, words, gpu, left_out, remarks, most)


def _some_of(line: ToolLine, key: str, known: tuple[str, ...], usual: str | None = None) -> list[str]:
    text, flag = line.own.get(key, (usual or ",".join(known), ""))
    asked = str(text).split(",")
    if unknown := [name for name in asked if name not in known]:
        raise UserError(f"{flag} {','.join(unknown)}: takes some of {','.join(known)}.")
    return sorted(dict.fromkeys(asked), key=lambda name: name != "fp32")  # which the others are compared to


def _ways(precision: str, loops: list[str], compiled: bool, train_py: Path | None) -> dict[str, Way]:
    from tools.benchmark_amp.against_timm.start import BEST as best
    from tools.benchmark_amp.against_timm.start import OURS as ours
    from tools.benchmark_amp.against_timm.start import PLAIN as plain
    from tools.benchmark_amp.against_timm.start import STOCK as stock
    from tools.benchmark_amp.against_timm.start import Way

    ways = {TIMM: Way(stock, precision, train_py=train_py)}
    if "fused" in loops:
        ways[BEST] = Way(best, precision, train_py=train_py)
    if "plain" in loops:
        ways[PLAIN] = Way(plain, precision)
    if "ours" in loops:
        ways[OURS] = Way(ours, precision)
    if compiled and "fused" in loops:
        ways[COMPILED_TIMM] = Way(best, precision, compiled=True, train_py=train_py)
    if compiled and "ours" in loops:
        ways[COMPILED] = Way(ours, precision, compiled=True)
    return ways


def _variants(line: ToolLine) -> dict[str, Config]:
    """By how they differ, as the user wrote it."""
    text, flag = line.own.get("VARIANTS", ("", "-variants"))
    found: dict[str, Config] = {}
    for words in filter(None, str(text).split(",")):
        pairs = {key: value for key, _, value in (word.partition("=") for word in words.split("+"))}
        if not all(pairs.values()):
            raise UserError(f"{flag} {words}: takes settings with their values, such as TRAIN.RESIDUAL_DTYPE=autocast.")
        varied = replace(line, run=replace(line.run, words={**line.run.words, **pairs}))
        found[words] = settings_of(varied, fixed=FIXED)[0].config
    return found


def _varied(precision: str, loops: list[str], compiled: bool, variants: dict[str, Config]) -> dict[str, Way]:
    from tools.benchmark_amp.against_timm.start import OURS as ours
    from tools.benchmark_amp.against_timm.start import Way

    if variants and "ours" not in loops:
        raise UserError(
            f"-variants {','.join(variants)}: they are of our loop, which -loops {','.join(loops)} leaves out."
        )
    who = COMPILED if compiled else OURS
    return {f"{who}, {words}": Way(ours, precision, compiled, settings=config) for words, config in variants.items()}


def _name(who: str, precision: str) -> str:
    return f"{who}, {precision}"


def _compare(seats: dict[str, Seat], first: str) -> dict[str, str]:
    """Whoever cannot train, and why. An error where losses are not alike: such loops are not to be compared."""
    from tools.benchmark_amp.against_timm.seat import first_losses

    losses: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    log.info("building, and the first losses: %s", "; ".join(seats))
    try:
        for name, answer in first_losses(seats).items():
            if isinstance(answer, str):
                left_out[name] = answer
                seats[name].close()
            else:
                losses[name] = answer
        if first in left_out:
            raise TrainingError(f"{first}, which the others are compared to: {left_out[first]}")
        if problems := disagreements(losses, first):
            raise TrainingError("the losses do not agree, so nothing is measured:\n" + "\n".join(problems))
    except BaseException:
        for seat in seats.values():
            seat.close()
        raise
    for name, why in left_out.items():
        log.warning("%s: %s", name, why)
    return left_out


def disagreements(losses: dict[str, list[float]], first: str) -> list[str]:
    """A line for each whose losses are not those of `first`, up to what its precision rounds."""
    found: list[str] = []
    for name, own in losses.items():
        difference, limit = apart(own, losses[first]), AGREE[_precision_of(name)]
        if difference > limit:
            figures = ", ".join(f"{loss:.7f}" for loss in own)
            found.append(f"  {name}: {figures}; apart from {first} by {difference:.1e}, more than {limit:.0e}")
    if found:
        found.append(f"  {first}: " + ", ".join(f"{loss:.7f}" for loss in losses[first]))
    return found


def apart(one: list[float], other: list[float]) -> float:
    """The greatest difference of two curves, against the size of the loss."""
    differences = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(one, other, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _precision_of(name: str) -> str:
    return name.removesuffix(AGAIN).rpartition(", ")[2]


def sections(found: Found) -> list[Section]:
    precisions = found["settings"]["precisions"].split(",")
    first = _name(TIMM, precisions[0])
    updates = found["settings"]["updates"]
    most = found.get("ceiling")  # files of former versions have none
    peak = ["of peak"] if most else []
    rows = [["", "ms an update", "images/s", *peak, f"to {first}", "to timm", "CPU ms", f"to {first}", "to timm", "GB"]]
    for name in _names(found):
        same = _name(TIMM, _precision_of(name))
        rows.append(
            [
                name,
                shown(_milliseconds(found, name, "seconds", updates), 4),
                shown(middle(found, name, "images_per_second")),
                *([of_peak(found, name)] if most else []),
                shown_ratio(times_as_much(found, first, name, "seconds")),
                shown_ratio(times_as_much(found, same, name, "seconds")),
                shown(_milliseconds(found, name, "cpu_seconds", updates), 4),
                shown_ratio(times_as_much(found, first, name, "cpu_seconds")),
                shown_ratio(times_as_much(found, same, name, "cpu_seconds")),
                shown(middle(found, name, "peak_memory_gb")),
            ]
        )
    notes = [
        control_line(found, first, "seconds"),
        f"by the time on CPUs, {control_line(found, first, 'cpu_seconds')}",
        f"`to timm`: to timm's loop in the same precision; first by the clock, then by the time on CPUs; "
        f"the loop of timm: {found['settings']['timm_loop']}",
        _agreement(found, precisions, first),
        *([ceiling_line(found)] if most else []),
        *choices_lines(found, _names(found)),
    ]
    return [Section(f"An update, {subject(found)}, moving average and clipping on", rows, notes)]


def _names(found: Found) -> list[str]:
    return [name for name in found["turns"] if not name.endswith(AGAIN) and middle(found, name, "seconds") is not None]


def _milliseconds(found: Found, name: str, key: str, updates: int) -> float | None:
    seconds = middle(found, name, key)
    return None if seconds is None else 1000 * seconds / updates


def _agreement(found: Found, precisions: list[str], first: str) -> str:
    """How far the losses were apart at most, a precision each."""
    curves = {name: found["turns"][name][0]["losses"] for name in _names(found)}
    told_of = []
    for precision in precisions:
        own = [apart(c, curves[first]) for n, c in curves.items() if _precision_of(n) == precision and first in curves]
        told_of.append(f"{precision} {max(own, default=0.0):.1e}")
    return f"losses of the first updates, apart from {first} by at most (of the loss): {', '.join(told_of)}"


def charts(found: Found) -> list[Chart]:
    names, updates = _names(found), found["settings"]["updates"]
    speeds = {name: middle(found, name, "images_per_second") or 0.0 for name in names}
    busy = {name: _milliseconds(found, name, "cpu_seconds", updates) or 0.0 for name in names}
    return [Chart(subject(found), "images/s", bars=speeds), Chart("time on CPUs", "ms an update", bars=busy)]


TABLE = Table("timm", ABOUT, FLAGS, plan, sections, charts)
