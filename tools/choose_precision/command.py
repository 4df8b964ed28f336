"""Which precision should I train in? Measured on your own model and data.

    python scripts/choose_precision.py -cfg configs/vit_digits.yaml
    python scripts/choose_precision.py -cfg configs/vit_base_patch16_224.yaml -data_path /data/imagenet \\
        -batch_size 64 -updates 300 -budget_min 9 -modes fp16,bf16,O2-bf16

It trains a few hundred updates in fp32, with three seeds to measure the noise, and in every other precision that is
useful on this device. Each is a run of main_single_gpu.py in a folder of its own, DIR/bf16-0, with a validation at its
end. The tool compares speed, memory and loss curve, counts skipped updates, and examines the gradients of every layer.
It ends with a recommendation and the flags for it, and writes choose_precision.json and report.html into -output DIR,
or into a new folder in SAVE. An interrupted measurement resumes with the same command and -output.

The flags and settings of main_single_gpu.py are accepted, except -eval and -resume. -amp, AMP.ENABLED, AMP.DTYPE,
AMP.LEVEL, AMP.TF32, AMP.AUTO_FP32 and -ngpus have no effect: the tool compares precisions on one device.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tools.common.command_line import MODES, OVERWRITE, Tool, about_one_device, above_zero, check_one_training, tool
from tools.common.output_file import if_interrupted, writing
from tools.common.tables import in_columns, rounded
from utils.config import Config
from utils.config.kinds import one_line
from utils.errors import EXIT_DONE, TrainingError, UserError
from utils.flags import Flag, whole
from utils.log import log, log_lines, unheard
from utils.record.history import History, plain
from utils.record.run_folder import describe_run, make_folder, write_json
from utils.text import counted, redacted_values

if TYPE_CHECKING:
    from tools.choose_precision.layers import Layer
    from tools.common.precisions import Mode
    from tools.compare.runs import Run

FEWEST_UPDATES = 5
"""Least value of -updates"""
POINTS = 100
"""A run reports about this many losses, and its speed as often."""
SHOWN_LAYERS = 3
"""Number of layers named for each mode, those that lose most"""
MUCH_NOISE = 0.15
"""Variation in the speed of equal runs that hints at other load on the machine."""
MUCH_WAITING = 20
"""Percent of the time spent waiting for samples, above which no precision helps much."""
SMOOTHED_OVER = 20
"""Loss curves are smoothed by a moving mean over a twentieth of their reports: single batches are noisy."""
MAX_SKIPPED = 0.05
"""Largest fraction of skipped updates that counts as sound"""
SKIPS_TO_FIND_THE_SCALE = 10
"""fp16 often skips its first updates until the loss scale is small enough."""
ALIKE = 0.97
"""Fraction of the highest speed from which on a mode counts as equally fast"""
FASTER = 1.05
"""Least speed-up for a precision to be recommended over fp32"""
SMALLER = 0.90
"""Largest fraction of fp32's memory for a precision that is not faster to be recommended"""
COLUMNS = ["mode", "images/s", "speed", "memory", "of fp32's", "loss", "two seeds", "skipped", "underflow", "headroom"]
"""Headings of the table. `loss`: largest difference from fp32's curve; `two seeds`: that of two fp32 curves."""
NAME = "choose_precision"
FP32 = "fp32"
OWN = (
    Flag(
        "updates", "updates per measurement; use at least a few hundred", "N", default=300, kind=whole(FEWEST_UPDATES)
    ),
    Flag("budget_min", "time limit in minutes; measurements are cut short to fit", "M", default=10, kind=above_zero),
    MODES,
    OVERWRITE,
)
TOOL = Tool(f"{NAME}.py", __doc__, OWN)


@dataclass
class Measured:
    """What a short run of a mode measured, and how it compares with fp32, which `judge` fills."""

    name: str
    flags: str = ""
    losses: list[float] = field(default_factory=list)
    """One loss per report"""
    images_per_second: float = 0.0
    data_wait_percent: float = 0.0
    peak_memory_gb: float = 0.0
    updates: int = 0
    skipped: int = 0
    scale: float = 1.0
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: str = ""
    """Why nothing was measured."""
    speed: float | None = None
    """Relative to fp32; None if it is meaningless."""
    memory: float | None = None
    """Peak memory relative to fp32."""
    difference: float | None = None
    """Largest difference from fp32's loss curve."""
    noise: float | None = None
    """Largest difference between two fp32 seeds over the same updates."""
    excess: float | None = None
    """How far its loss rises above all fp32 seeds."""
    against: list[str] = field(default_factory=list)
    """Reasons not to recommend it, whatever its speed."""

    def read(self, folder: Path) -> None:
        """Take over what the run in `folder` measured. If it reported nothing, set `failed`, the reason for that."""
        history = History.of_run(folder)
        lines = history.of("train")  # one per report
        if not lines and not self.failed:
            self.failed = "it reported no update in its part of -budget_min"
        if self.failed:
            return
        self.losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
        self.images_per_second = history.images_per_second or 0.0
        self.skipped = history.skipped
        after_first = lines[1:] or lines  # the first report includes the start-up
        self.data_wait_percent = statistics.median(line["perf"]["data_wait_percent"] for line in after_first)
        self.peak_memory_gb = history.peak_memory_gb or 0.0
        self.scale = lines[-1]["scale"]
        # Other lines, such as those of checkpoints, name the last update, too, for which there may be no report.
        self.updates = max(line.get("update", 0) for line in history.lines)


class Runs(NamedTuple):
    """The runs of a measurement."""

    fp32: list[Run]
    """Three seeds; the first is the user's."""
    others: list[Run]
    """One run of each mode, with the user's seed"""

    @property
    def in_order(self) -> list[Run]:
        """All runs in the order of training: fp32 first, in the middle and last, so that drift of the machine shows."""
        first, second, third = self.fp32
        half = len(self.others) // 2
        return [first] + self.others[:half] + [second] + self.others[half:] + [third]


class Baseline:
    """fp32 with three seeds: its speed and loss curves, and the noise of both."""

    def __init__(self, runs: list[Measured]) -> None:
        self.runs = runs
        """The first has the user's seed, which the other precisions use as well."""
        speeds = [run.images_per_second for run in runs]
        self.images_per_second = statistics.median(speeds)
        self.speed_noise = max(speeds) / min(speeds) - 1
        """Variation of the speed between the three runs: 0.1 is 10 %."""

    def seed_noise(self, reports: int) -> float:
        """Return the largest difference between loss curves of two seeds, over the first `reports` reports."""
        curves = [run.losses[:reports] for run in self.runs]
        return max(largest_difference(first, second) for first, second in itertools.combinations(curves, 2))

    def as_json(self) -> dict[str, Any]:
        """Return what choose_precision.json stores of the fp32 runs."""
        return {
            "images_per_second": self.images_per_second,
            "speed_noise": self.speed_noise,
            "seed_noise": self.seed_noise(reports=len(self.runs[0].losses)),  # over whole curves
            "runs": [asdict(run) for run in self.runs],
        }


def _smooth(curves: list[list[float]]) -> np.ndarray:
    """Compute moving means of loss curves, over the reports that all of them have. Returns curves x reports."""
    reports = min(map(len, curves))
    common = np.array([curve[:reports] for curve in curves])
    window = max(1, reports // SMOOTHED_OVER)
    return np.lib.stride_tricks.sliding_window_view(common, window, axis=1).mean(2)


def largest_difference(first: list[float], second: list[float]) -> float:
    """Return the largest difference of two smoothed loss curves; infinite if one has a NaN."""
    return float(np.nan_to_num(np.ptp(_smooth([first, second]), axis=0), nan=math.inf).max())


def judge(mode: Measured, base: Baseline, updates: int, slow: str = "") -> None:
    """Compare a mode (a precision) with fp32: fill its speed, memory, loss differences, and `against`.

    `against`: reasons not to recommend the mode. `updates`: the number of updates asked for. `slow`: why the mode's
    speed must not count, such as that this device only emulates it; '' if it counts.
    """
    if mode.failed:
        mode.against = [mode.failed]
        return
    fp32_of_same_seed = base.runs[0]
    mode.against = [slow] if slow else []
    if mode.skipped > max(SKIPS_TO_FIND_THE_SCALE, MAX_SKIPPED * mode.updates):
        mode.against.append(f"{mode.skipped} of {mode.updates} updates were skipped")
    if mode.updates < min(updates, fp32_of_same_seed.updates) / 2:
        mode.against.append(f"only {mode.updates} updates were trained")

    # A mode does harm if its loss rises above those of all three fp32 runs, by more than these differ. Comparing with
    # one of them would not do: in the end its curve and the mode's differ, up or down, as much as those of two seeds.
    mode.difference = largest_difference(fp32_of_same_seed.losses, mode.losses)
    mode.noise = base.seed_noise(reports=len(mode.losses))
    curve, *fp32_curves = _smooth([mode.losses] + [run.losses for run in base.runs])
    rise = curve - np.fmax.reduce(fp32_curves)
    mode.excess = float(np.nan_to_num(rise, nan=math.inf).max())
    if mode.excess > mode.noise:
        seeds = f"all fp32 seeds, which differ by {mode.noise:.2g} among themselves"
        mode.against.append(f"its loss is up to {mode.excess:.2g} above {seeds}")

    mode.speed = None if slow else mode.images_per_second / base.images_per_second
    mode.memory = mode.peak_memory_gb / fp32_of_same_seed.peak_memory_gb


def recommend(modes: list[Measured], base: Baseline, fp32_flags: str) -> dict[str, str]:
    """Choose the precision to recommend, and return its name, its flags and a sentence.

    A mode is sound if there are no reasons against it. If sound modes are faster than fp32, it is the fastest of them,
    or one that is about as fast and comes before it in `modes`, which are in order of preference. If none is faster, it
    is the one with the least memory that is not slower. If none saves memory either, it is fp32.
    """
    sound = [mode for mode in modes if not mode.against]
    noise_factor = 1 + base.speed_noise
    fast = [mode for mode in sound if (mode.speed or 0) > max(FASTER, noise_factor)]
    # A mode with less memory is not slower if noise can explain that its speed is below fp32's.
    small = [mode for mode in sound if (mode.memory or 1) <= SMALLER and (mode.speed or 0) * noise_factor >= 1]
    if fast:
        enough = ALIKE * max(mode.speed or 0 for mode in fast)
        chosen = next(mode for mode in fast if (mode.speed or 0) >= enough)
        return _advice(chosen, f"{chosen.speed:.2g}x faster,")
    if small:
        return _advice(min(small, key=lambda mode: mode.memory or 1), "no faster, but")
    why = f" (the speed of equal runs varied by {100 * base.speed_noise:.0f} %)" if base.speed_noise > 0.02 else ""
    sentence = (
        f"{fp32_flags}: of the precisions that trained as well as fp32, none was faster by more than both "
        f"{100 * (FASTER - 1):.0f} % and the noise, and none saved {100 * (1 - SMALLER):.0f} % of memory without "
        f"being slower{why}."
    )
    return {"mode": FP32, "flags": fp32_flags, "sentence": sentence}


def _advice(chosen: Measured, speed_words: str) -> dict[str, str]:
    """Return name, flags and sentence of the recommended mode.

    The sentence is '-amp bf16: 2x faster, 30 % less memory; its loss ...', where `speed_words` are '2x faster,'.
    """
    memory_relative_to_fp32 = chosen.memory or 1
    percent = round(100 * (memory_relative_to_fp32 - 1))
    memory = "the same memory"
    if abs(percent) >= 2:
        direction = "less" if percent < 0 else "more"
        memory = f"{abs(percent)} % {direction} memory"
    loss = (
        f"its loss differs from fp32's by at most {chosen.difference:.2g}; two fp32 seeds differ by {chosen.noise:.2g}"
    )
    sentence = f"{chosen.flags}: {speed_words} {memory}; {loss}."
    return {"mode": chosen.name, "flags": chosen.flags, "sentence": sentence}


@tool
def main(argv: list[str]) -> int:
    """Measure the precisions, log what was measured and the recommendation, and write them to a folder."""
    line = TOOL.read(argv)
    asked = line.asked
    loaded = line.load()
    config = loaded.config
    check_one_training(loaded, f"{NAME}.py")
    if not asked.overwrite and config.OUTPUT is not None and (Path(config.OUTPUT) / f"{NAME}.json").exists():
        raise UserError(f"-output {config.OUTPUT}: {NAME}.json exists; name another folder, or give -overwrite.")

    # Imported after all checks: importing torch takes seconds.
    from engine.machine.device import describe_devices, pick_device, set_up_device
    from engine.preflight import check
    from tools.common.precisions import emulated, modes_to_measure
    from tools.common.sessions import silence_torchao
    from utils.distributed.world import ALONE

    silence_torchao()
    check(config)
    device = pick_device(config.DEVICE, ALONE)
    modes, left_out = modes_to_measure(asked.modes, config, device)
    if not modes:
        raise UserError(f"-modes {asked.modes}: name a precision other than fp32, with which all are compared.")
    log_lines(loaded.notes)
    log_lines(about_one_device(loaded))
    threads = set_up_device(config, device, ALONE)
    devices = describe_devices(device, ALONE, threads)
    log.info("%s on %s, batch %d, %s", config.MODEL.NAME, config.DATA.DATASET, config.DATA.BATCH_SIZE, devices)
    names = ", ".join(["fp32 (three seeds)"] + [mode.name for mode in modes])
    updates = counted(asked.updates, "update")
    log.info("measuring %s of each, about %g minutes at most (-budget_min): %s", updates, asked.budget_min, names)
    _log_remarks(config, left_out, on_gpu=device.type == "cuda")

    # Train all runs, each in a folder of its own.
    began = time.monotonic()
    folder = make_folder(config.OUTPUT, config.SAVE, NAME)
    runs = _plan(config, modes, asked.updates, folder)
    if_interrupted.append(f"with -output {folder}, without -overwrite, the same command resumes")
    measured_by_folder = _train(runs.in_order, seconds=60 * asked.budget_min, again=bool(asked.overwrite))

    # Compare each mode with fp32, and examine its gradients if it has a dtype below fp32.
    base = Baseline([measured_by_folder[run.folder] for run in runs.fp32])
    measured_modes = [measured_by_folder[run.folder] for run in runs.others]
    for mode, run, measured in zip(modes, runs.others, measured_modes, strict=True):
        measured.flags = mode.flags(config.AMP)
        if mode.dtype and not measured.failed:
            _examine(run, measured)
        judge(measured, base, asked.updates, slow=emulated(mode, device))

    # Log and write the results.
    advice = recommend(measured_modes, base, "-amp off AMP.TF32=false" if config.AMP.TF32 else "-amp off")
    log.info("\n%s\n", "\n".join(in_columns(_rows(measured_modes, base))))
    log_lines(details(measured_modes, base, on_gpu=device.type == "cuda"))
    about = {
        **describe_run(devices, {"updates": asked.updates, "threads": threads}, config.TAG),
        "seconds": round(time.monotonic() - began, 1),
        "recommendation": advice,
        "left_out": left_out,
        "fp32": base.as_json(),
        "modes": [asdict(measured) for measured in measured_modes],
        "runs": [path.name for path in measured_by_folder],
    }
    if_interrupted.clear()  # there is nothing to resume
    _write(folder, about, [path for path, measured in measured_by_folder.items() if not measured.failed])
    log.info("\n%s\nFlags: %s\nReport: %s", advice["sentence"], advice["flags"], folder)
    return EXIT_DONE


def _log_remarks(config: Config, left_out: dict[str, str], on_gpu: bool) -> None:
    """Log in which way the measurement differs from a whole run, and what is not measured.

    `left_out`: precision -> why it is not measured.
    """
    size = config.TRAIN.size_in(1, config.DATA.IMAGE_SIZE)
    if size != config.DATA.IMAGE_SIZE:
        words = "images have %s pixels, as in the first epochs; TRAIN.SIZE_SCHEDULE=[] measures the final size"
        log.info(words, one_line(size))
    if config.TRAIN.COMPILE == "auto" and on_gpu:
        log.info("TRAIN.COMPILE auto compiles nothing here; set TRAIN.COMPILE=whole if your run will be compiled")
    for name, why in left_out.items():
        log.info("left out: %s: %s", name, why)


def _plan(config: Config, modes: Sequence[Mode], updates: int, folder: Path) -> Runs:
    """Plan a short run of `updates` updates for each mode, and three for fp32, in subfolders of `folder`."""
    from tools.common.precisions import REFERENCE
    from tools.compare.runs import Run

    # `auto` could compile some modes and not others, which would then differ in more than precision.
    compiled = "none" if config.TRAIN.COMPILE == "auto" else config.TRAIN.COMPILE
    train = {"MAX_UPDATES": updates, "COMPILE": compiled}
    short = config.changed(TRAIN=train, REPORT_FREQ=max(1, updates // POINTS), OUTPUT=None)

    def run_of(mode: Mode, seed: int) -> Run:
        amp = mode.amp(config.AMP).changed(AUTO_FP32=False)  # the AMP settings, in this precision
        return Run(mode.name, seed, short.changed(AMP=amp, SEED=seed), folder / f"{mode.name}-{seed}")

    fp32_runs = [run_of(REFERENCE, config.SEED + number) for number in range(3)]
    return Runs(fp32_runs, others=[run_of(mode, config.SEED) for mode in modes])


def _examine(run: Run, measured: Measured) -> None:
    """Examine the gradients of each layer with the weights that `run` trained, and add the result to `measured`."""
    from tools.choose_precision.layers import layers_of
    from tools.common.sessions import reason

    try:
        with unheard(logging.WARNING):  # the model's lines are in the run's own log
            measured.layers = layers_of(run, measured.scale)
    except Exception as error:  # any error: what was measured must not be lost
        measured.notes.append(f"its layers could not be examined: {reason(error)}")


def _write(folder: Path, about: dict[str, Any], runs: list[Path]) -> None:
    """Write the results `about` as JSON, and the report of the runs, into `folder`."""
    from tools.common.report_page.page import write_report

    report = folder / f"{NAME}.json"
    with writing(report, "-output"):
        write_json(report, redacted_values(plain(about)))
    try:
        write_report(runs, folder / "report.html", verdict=about["recommendation"]["sentence"], predictions=False)
    except UserError as error:  # not fatal: everything else is in the log
        log.warning("%s", error)


def _train(runs: list[Run], seconds: float, again: bool) -> dict[Path, Measured]:
    """Train the runs that are not finished, and return what each run measured, by its folder.

    Each run gets an equal part of the time that is left of `seconds`, and is paused at its end.
    `again`: delete earlier runs and train all of them (-overwrite).
    """
    from tools.common.run_metrics import is_finished
    from tools.common.turns import progress_bar
    from tools.compare.runs import check_runs, terminating, train_run

    check_runs(runs, again)  # deletes the runs if `again`
    # There is a report only with -overwrite, else the command has refused the folder. Its runs are deleted now.
    (runs[0].folder.parent / f"{NAME}.json").unlink(missing_ok=True)
    measured_by_folder: dict[Path, Measured] = {}
    end = time.monotonic() + seconds
    with terminating():
        for run in progress_bar(runs, "runs"):
            measured = Measured(run.contender)
            if not is_finished(run.folder):
                runs_left = len(runs) - len(measured_by_folder)
                run_seconds = math.ceil(max(1.0, (end - time.monotonic()) / runs_left))
                limit = f"MAX_TIME={run_seconds // 3600:02d}:{run_seconds // 60 % 60:02d}:{run_seconds % 60:02d}"
                measured.failed = train_run(run, limit) or ""
            measured.read(run.folder)
            measured_by_folder[run.folder] = measured
            if measured.failed and run.contender == FP32:
                raise TrainingError(
                    f"fp32 failed, so nothing can be compared with it: {measured.failed}. Try a smaller -batch_size, "
                    "or a longer -budget_min."
                )
            late = "" if is_finished(run.folder) else ", cut short (-budget_min)"
            speed = f"{counted(measured.updates, 'update')}, {rounded(measured.images_per_second)} images/s{late}"
            log.info("  %s, seed %d: %s", run.contender, run.seed, measured.failed or speed)
    return measured_by_folder


def _rows(modes: list[Measured], base: Baseline) -> list[list[str]]:
    """Return the rows of the table: the headings, fp32, and each mode. Values that a row lacks are '-'."""
    fp32 = {
        "mode": FP32,
        "images/s": rounded(base.images_per_second),
        "speed": "1.00x",
        "memory": f"{base.runs[0].peak_memory_gb:.2f} GB",
        "of fp32's": "100 %",
        "two seeds": _in_words(base.seed_noise(reports=len(base.runs[0].losses))),  # over whole curves
    }
    rows = [COLUMNS]
    for cells in [fp32] + [_cells(mode) for mode in modes]:
        rows.append([cells.get(column, "-") for column in COLUMNS])
    return rows


def _cells(mode: Measured) -> dict[str, str]:
    """Return the cells of a mode in the table, by heading; headings of unknown values are missing.

    `loss`: largest difference from fp32's loss curve. `two seeds`: largest difference between two fp32 seeds. `of
    fp32's`: memory. `headroom`: factor by which gradients could grow before one overflows; any if none can.
    """
    if mode.failed:
        return {"mode": mode.name}
    cells = {
        "mode": mode.name,
        "images/s": rounded(mode.images_per_second),
        "memory": f"{mode.peak_memory_gb:.2f} GB",
        "of fp32's": f"{100 * (mode.memory or 0):.0f} %",
        "loss": _in_words(mode.difference),
        "two seeds": _in_words(mode.noise),
        "skipped": f"{mode.skipped}/{mode.updates}",
    }
    if mode.speed is not None:
        cells["speed"] = f"{mode.speed:.2f}x"
    if mode.layers:
        worst = max(layer.underflow_share for layer in mode.layers)
        headroom = min(layer.headroom for layer in mode.layers)
        cells["underflow"] = f"{100 * worst:.2g} %"
        cells["headroom"] = "any" if math.isinf(headroom) else f"2^{math.floor(math.log2(headroom))}"
    return cells


def details(modes: list[Measured], base: Baseline, on_gpu: bool) -> list[str]:
    """Return lines to log below the table.

    They name the layers that lose most and the reasons against each mode, and explain memory, noise and waiting.
    """
    lines: list[str] = []
    for mode in modes:
        layer_words = []
        worst_first = sorted(mode.layers, key=lambda layer: layer.underflow_share, reverse=True)
        for layer in worst_first[:SHOWN_LAYERS]:
            if layer.underflows:
                layer_words.append(f"{layer.name} {100 * layer.underflow_share:.2g} % ({layer.dtype})")
        if layer_words:
            words = f"layers whose gradients underflow most, at scale {mode.scale:g}"
            lines.append(f"{mode.name}: {words}: {', '.join(layer_words)}")
        lines += [f"{mode.name}: {note}" for note in mode.notes]
        lines += [f"{mode.name}: not recommended: {reason}" for reason in mode.against]
    if not on_gpu:
        lines.append("memory: peak of the whole process, Python and libraries (about 0.5 GB) included")
    noise = f"speed: three runs of fp32 varied by {100 * base.speed_noise:.0f} %; smaller differences are noise"
    if base.speed_noise > MUCH_NOISE:
        noise += "; repeat the measurement when the machine is idle"
    lines.append(noise)
    waiting = base.runs[0].data_wait_percent
    if waiting > MUCH_WAITING:
        lines.append(
            f"data: fp32 waited for samples {waiting:.0f} % of the time; while loading is the bottleneck, no precision "
            "makes training faster (see DATA.NUM_WORKERS)"
        )
    return lines


def _in_words(value: float | None) -> str:
    """Format a difference of losses with two digits; '-' for None, and words for infinity, which stands for NaN."""
    if value is None:
        return "-"
    return "not a number" if math.isinf(value) else f"{value:.2g}"
