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
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.common.command_line import OVERWRITE, Tool, about_one_device, above_zero, check_one_training, run_tool
from tools.common.output_file import writing
from tools.common.tables import in_columns
from utils.config import Config, Loaded, config_of_run
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, TrainingError, UserError
from utils.flags import Flag, whole
from utils.log import log
from utils.record.history import History
from utils.record.run_folder import describe_run, make_folder, read_about, write_json
from utils.text import counted, redacted_values

if TYPE_CHECKING:
    import torch

    from tools.choose_precision.layers import Layer
    from tools.common.precisions import Mode
    from tools.compare.plan import Run

SMOOTHED_OVER = 20
"""Loss curves are smoothed by a moving mean over a twentieth of their reports: single batches are noisy."""
MAX_SKIPPED = 0.05
SKIPS_TO_FIND_THE_SCALE = 10
"""fp16 often skips its first updates until the loss scale is small enough."""
ALIKE = 0.97
"""Fraction of the highest speed that counts as equally fast."""
FASTER, SMALLER = 1.05, 0.90
"""Least speed-up, or largest fraction of memory, for a precision to be recommended over fp32."""


@dataclass
class Measured:
    """What a short run showed."""

    losses: list[float] = field(default_factory=list)
    """One per report."""
    images_per_second: float = 0.0
    data_wait_percent: float = 0.0
    peak_memory_gb: float = 0.0
    updates: int = 0
    skipped: int = 0
    scale: float = 1.0
    learning_rate: float = 0.0
    """At the last update."""
    epochs: float = 0.0
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: str = ""
    """Why nothing was measured."""


def measured_of(run: Path) -> Measured:
    """Read a run's metrics."""
    history = History.of_run(run)
    lines = history.of("train")
    if not lines:
        return Measured(failed="not even one update was reported")
    last = lines[-1]
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    waits = [line["perf"]["data_wait_percent"] for line in lines[1:] or lines]
    config, samples = config_of_run(run), read_about(run)["samples"]["train"]
    return Measured(
        losses=losses,
        images_per_second=history.images_per_second or 0.0,
        data_wait_percent=statistics.median(waits),
        peak_memory_gb=history.peak_memory_gb or 0.0,
        updates=last["update"],
        skipped=history.skipped,
        scale=last["scale"],
        learning_rate=last["lr"],
        epochs=last["update"] * config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER / samples,
    )


def smooth(values: list[float], window: int) -> list[float]:
    """Moving mean; the result has `window - 1` fewer values."""
    return [math.fsum(values[at : at + window]) / window for at in range(len(values) - window + 1)]


def smooth_together(curves: list[list[float]]) -> list[list[float]]:
    """Loss curves, smoothed over the reports that all of them have."""
    length = min(map(len, curves))
    window = max(1, length // SMOOTHED_OVER)
    return [smooth(curve[:length], window) for curve in curves]


def largest_difference(first: list[float], second: list[float]) -> float:
    """Largest difference of two smoothed loss curves; infinite if one has a NaN."""
    return _greatest(abs(a - b) for a, b in zip(*smooth_together([first, second]), strict=True))


def _greatest(values: Iterable[float]) -> float:
    return max((value if math.isfinite(value) else math.inf for value in values), default=math.inf)


@dataclass(frozen=True)
class Baseline:
    """fp32 with three seeds: its speed and loss curves, and the noise of both."""

    runs: tuple[Measured, Measured, Measured]

    @property
    def losses(self) -> list[float]:
        """With the user's seed, which the other precisions use as well."""
        return self.runs[0].losses

    @property
    def images_per_second(self) -> float:
        return statistics.median(self._speeds())

    @property
    def speed_noise(self) -> float:
        """Variation of the speed between the three runs: 0.1 is 10 %."""
        return max(self._speeds()) / min(self._speeds()) - 1

    @property
    def peak_memory_gb(self) -> float:
        return self.runs[0].peak_memory_gb

    def seed_noise(self, reports: int) -> float:
        """Largest difference between loss curves of two seeds, over this many reports."""
        curves = [run.losses[:reports] for run in self.runs]
        return max(largest_difference(*pair) for pair in itertools.combinations(curves, 2))

    def excess(self, losses: list[float]) -> float:
        """How far a loss curve rises above those of all three seeds; negative if it never does.

        One seed is not enough to compare with: small differences grow until two curves differ as much as those of two
        seeds do, in either direction.
        """
        curve, *seeds = smooth_together([losses, *(run.losses for run in self.runs)])
        return _greatest(value - max(others) for value, *others in zip(curve, *seeds, strict=True))

    def _speeds(self) -> list[float]:
        return [run.images_per_second for run in self.runs]


@dataclass(frozen=True)
class Finding:
    """One mode compared with fp32."""

    name: str
    flags: str
    measured: Measured
    speed: float | None
    """Relative to fp32; None if it is meaningless, or fp32 was not measured."""
    memory: float | None
    """Peak memory relative to fp32."""
    difference: float | None
    """Largest difference from fp32's loss curve."""
    noise: float | None
    """Largest difference between two fp32 seeds over the same updates."""
    excess: float | None
    """How far its loss rises above all fp32 seeds."""
    against: list[str] = field(default_factory=list)
    """Reasons not to recommend it, whatever its speed."""


def judge(name: str, flags: str, measured: Measured, base: Baseline | None, updates: int, slow: str = "") -> Finding:
    """`slow`: why its speed must not count."""
    against = [slow] if slow else []
    if measured.failed:
        return Finding(name, flags, measured, None, None, None, None, None, [measured.failed])
    done = measured.updates
    if measured.skipped > max(SKIPS_TO_FIND_THE_SCALE, MAX_SKIPPED * done):
        against.append(f"{measured.skipped} of {done} updates were skipped")
    if 2 * done < (updates if base is None else min(updates, base.runs[0].updates)):
        against.append(f"only {done} updates were trained")
    if base is None:
        return Finding(name, flags, measured, None, None, None, None, None, against)
    difference, noise = largest_difference(base.losses, measured.losses), base.seed_noise(len(measured.losses))
    excess = base.excess(measured.losses)
    if excess > noise:
        against.append(
            f"its loss is up to {excess:.2g} above all fp32 seeds, which differ by {noise:.2g} among themselves"
        )
    speed = None if slow else measured.images_per_second / base.images_per_second
    memory = measured.peak_memory_gb / base.peak_memory_gb
    return Finding(name, flags, measured, speed, memory, difference, noise, excess, against)


@dataclass(frozen=True)
class Recommendation:
    mode: str
    flags: str
    sentence: str


def recommend(findings: list[Finding], base: Baseline | None, fp32_flags: str) -> Recommendation:
    """`findings`: in order of preference between equally fast modes."""
    sound = [f for f in findings if not f.against]
    if base is None:
        return _without_fp32(sound, fp32_flags)
    noisy = 1 + base.speed_noise
    fast = [f for f in sound if f.speed and f.speed > max(FASTER, noisy)]
    if fast:
        enough = ALIKE * max(f.speed or 0 for f in fast)
        chosen = next(f for f in fast if (f.speed or 0) >= enough)
        return Recommendation(chosen.name, chosen.flags, f"{chosen.flags}: {_gains(chosen)}; {_harmless(chosen)}.")
    small = [f for f in sound if f.memory and f.memory <= SMALLER and f.speed and f.speed * noisy >= 1]
    if small:
        chosen = min(small, key=lambda f: f.memory or 1)
        return Recommendation(
            chosen.name, chosen.flags, f"{chosen.flags}: no faster, but {_memory(chosen)}; {_harmless(chosen)}."
        )
    why = f"the speed of equal runs varied by {100 * base.speed_noise:.0f} %" if base.speed_noise > 0.02 else ""
    nothing = (
        f"of the precisions that trained as well as fp32, none was faster by more than both {100 * (FASTER - 1):.0f} % "
        f"and the noise, and none saved {100 * (1 - SMALLER):.0f} % of memory without being slower"
    )
    return Recommendation("fp32", fp32_flags, f"{fp32_flags}: {nothing}{f' ({why})' * bool(why)}.")


def _without_fp32(sound: list[Finding], fp32_flags: str) -> Recommendation:
    if not sound:
        return Recommendation(
            "fp32",
            fp32_flags,
            "fp32 could not be measured, and every other precision had problems; try a smaller -batch_size, so that "
            "fp32 runs.",
        )
    chosen = max(sound, key=lambda f: f.measured.images_per_second)
    return Recommendation(
        chosen.name,
        chosen.flags,
        f"{chosen.flags}: it ran, but fp32 did not; try a smaller -batch_size to compare its loss with fp32's.",
    )


def _gains(finding: Finding) -> str:
    return f"{finding.speed:.2g}x faster, {_memory(finding)}"


def _memory(finding: Finding) -> str:
    percent = round(100 * ((finding.memory or 1) - 1))
    if abs(percent) < 2:
        return "the same memory"
    return f"{abs(percent)} % {'less' if percent < 0 else 'more'} memory"


def _harmless(finding: Finding) -> str:
    difference, noise = f"{finding.difference:.2g}", f"{finding.noise:.2g}"
    text = f"its loss differs from fp32's by at most {difference}; two fp32 seeds differ by {noise}"
    if (finding.difference or 0) <= (finding.noise or 0):
        return text
    worse = f"rises at most {finding.excess:.2g} above" if (finding.excess or 0) > 0 else "never rises above"
    return f"{text}; its loss {worse} the highest of the fp32 seeds"


FEWEST_UPDATES = 5
POINTS = 100
"""A run reports about so many losses, and its speed as often."""
SHOWN_LAYERS = 3
MUCH_NOISE = 0.15
"""Variation in the speed of equal runs that hints at other load on the machine."""
MUCH_WAITING = 20
"""Percent of the time spent waiting for samples, above which no precision helps much."""
NAME = "choose_precision"
OWN = (
    Flag(
        "updates", "updates per measurement; use at least a few hundred", "N", default=300, kind=whole(FEWEST_UPDATES)
    ),
    Flag("budget_min", "time limit in minutes; measurements are cut short to fit", "M", default=10, kind=above_zero),
    Flag(
        "modes",
        "precisions to compare with fp32: tf32,fp16,bf16,O2-fp16,...",
        "A,B",
        default_text="all that are useful on this device",
    ),
    OVERWRITE,
)
TOOL = Tool(f"{NAME}.py", __doc__, OWN)


def main(argv: list[str]) -> int:
    return run_tool(_choose, argv)


def _choose(argv: list[str]) -> int:
    line = TOOL.read(argv)
    asked, loaded = line.asked, line.load()
    config = loaded.config
    check_one_training(loaded, f"{NAME}.py")
    if not asked.overwrite and config.OUTPUT is not None and (Path(config.OUTPUT) / f"{NAME}.json").exists():
        raise UserError(f"-output {config.OUTPUT}: {NAME}.json exists; name another folder, or give -overwrite.")

    # Imported after all checks: importing torch takes seconds.
    from engine.machine.device import describe_devices, pick_device, set_up_device
    from engine.preflight import check
    from tools.common.precisions import UPDATES_WITHOUT_ARITHMETIC, lacks_arithmetic, plan, read_modes
    from tools.common.sessions import silence_torchao
    from tools.compare.train import Terminated
    from utils.distributed.world import ALONE

    silence_torchao()
    check(config, loaded.sources)
    device = pick_device(config.DEVICE, ALONE)
    modes = read_modes(asked.modes, config.AMP, device) if asked.modes is not None else None
    for note in [*loaded.notes, *_without_effect(loaded)]:
        log.info(note)
    planned = plan(config, device, modes)
    threads = set_up_device(config, device, ALONE)
    where = describe_devices(device, ALONE, threads)
    log.info("%s on %s, batch %d, %s", config.MODEL.NAME, config.DATA.DATASET, config.DATA.BATCH_SIZE, where)
    names = ["fp32 (three seeds)", *(mode.name for mode in planned.modes)]
    log.info("measuring %s of each: %s", counted(asked.updates, "update"), ", ".join(names))
    for name, reason in planned.left_out.items():
        log.info("left out: %s: %s", name, reason)

    updates = {
        mode.name: min(UPDATES_WITHOUT_ARITHMETIC, asked.updates) if lacks_arithmetic(mode, device) else asked.updates
        for mode in planned.modes
    }
    began = time.monotonic()
    folder = make_folder(config.OUTPUT, config.SAVE, NAME)
    runs = _runs(config, folder, planned.modes, asked.updates, updates)
    try:
        measured = _train(runs, 60 * asked.budget_min, bool(asked.overwrite))
        for run in runs:
            mode = next((mode for mode in planned.modes if mode.name == run.contender), None)
            if mode is not None and mode.dtype and not measured[run.folder.name].failed:
                measured[run.folder.name].layers = _layers(run, measured[run.folder.name])
    except (KeyboardInterrupt, Terminated) as error:
        log.warning("interrupted; finished runs are in %s, and the same command with -output resumes", folder)
        return EXIT_STOPPED if isinstance(error, Terminated) else EXIT_INTERRUPTED

    base, findings = _judge(config, device, planned.modes, runs, measured, updates)
    advice = recommend(findings, base, "-amp off" + " AMP.TF32=false" * config.AMP.TF32)
    log.info("\n%s\n", "\n".join(in_columns(_rows(findings, base))))
    for text in [*_details(findings), *_remarks(config, device, base)]:
        log.info("%s", text)
    about = {
        **describe_run(where, {"updates": asked.updates, "threads": threads}, config.TAG),
        "seconds": round(time.monotonic() - began, 1),
        "recommendation": vars(advice),
        "left_out": planned.left_out,
        "fp32": None
        if base is None
        else {
            "images_per_second": base.images_per_second,
            "speed_noise": base.speed_noise,
            "seed_noise": base.seed_noise(len(base.losses)),
            "runs": [asdict(run) for run in base.runs],
        },
        "modes": [_as_noted(finding) for finding in findings],
        "runs": [run.folder.name for run in runs],
    }
    report = folder / f"{NAME}.json"
    with writing(report, "-output"):
        write_json(report, redacted_values(_plain(about)))
    _write_page(runs, measured, folder, advice.sentence)
    log.info("\n%s\nFlags: %s\nReport: %s", advice.sentence, advice.flags, folder)
    return EXIT_DONE


def _without_effect(loaded: Loaded) -> list[str]:
    """Notes on the user's settings that this tool ignores."""
    compared = [k for k in ("ENABLED", "DTYPE", "LEVEL", "TF32") if loaded.sources[f"AMP.{k}"] != "default"]
    notes = [
        f"AMP.{key} ({loaded.sources[f'AMP.{key}']}) has no effect: this tool compares its values" for key in compared
    ]
    if loaded.config.AMP.AUTO_FP32:
        notes.append(
            "AMP.AUTO_FP32 has no effect: no module is moved to fp32, so that each precision is measured unchanged"
        )
    return notes + about_one_device(loaded)


def _runs(config: Config, folder: Path, modes: tuple[Mode, ...], most: int, updates: dict[str, int]) -> list[Run]:
    """fp32 comes first, in the middle and last, each with a seed of its own, so that a drift of the machine shows."""
    from tools.common.precisions import REFERENCE
    from tools.compare.plan import Run

    def run(mode: Mode, seed: int, number: int) -> Run:
        amp = mode.amp(config.AMP).model_copy(update={"AUTO_FP32": False})
        changed = {"AMP": amp, "SEED": seed, "REPORT_FREQ": max(1, number // POINTS), "OUTPUT": None}
        changed["TRAIN"] = config.TRAIN.model_copy(update={"MAX_UPDATES": number})
        return Run(mode.name, seed, config.model_copy(update=changed), folder / f"{mode.name}-{seed}")

    half, seed = len(modes) // 2, config.SEED
    others = [run(mode, seed, updates[mode.name]) for mode in modes]
    fp32 = [run(REFERENCE, seed + number, most) for number in range(3)]
    return [fp32[0], *others[:half], fp32[1], *others[half:], fp32[2]]


def _train(runs: list[Run], seconds: float, again: bool) -> dict[str, Measured]:
    """Train what is not trained yet; each run gets an equal part of the time left, and is paused when that is over."""
    from tools.common.comparison.runs import is_finished
    from tools.common.turns import progress_bar
    from tools.compare.plan import check_runs, command_of
    from tools.compare.train import terminating, train_run

    check_runs(runs, again)
    measured: dict[str, Measured] = {}
    end = time.monotonic() + seconds
    with progress_bar(len(runs), "runs") as bar, terminating():
        for nth, run in enumerate(runs):
            failed = None
            if not is_finished(run.folder):
                own = max(1.0, (end - time.monotonic()) / (len(runs) - nth))
                limit = f"MAX_TIME={int(own // 3600):02d}:{int(own // 60 % 60):02d}:{math.ceil(own % 60) % 60:02d}"
                failed = train_run(run, [*command_of(run, many=False), limit], lambda *_: None)
            found = measured[run.folder.name] = Measured(failed=failed) if failed else measured_of(run.folder)
            late = ", cut short (-budget_min)" if not failed and not is_finished(run.folder) else ""
            speed = f"{counted(found.updates, 'update')}, {rounded(found.images_per_second)} images/s{late}"
            log.info("  %s, seed %d: %s", run.contender, run.seed, failed or speed)
            bar.update()
    return measured


def _layers(run: Run, measured: Measured) -> list[Layer]:
    """The table of layers, from the run's last checkpoint."""
    from tools.choose_precision.layers import layers_of
    from tools.common.sessions import reason

    level = log.level
    log.setLevel(logging.WARNING)  # the model's lines are in the run's own log
    try:
        return layers_of(run, measured.scale)
    except (MemoryError, RuntimeError, UserError) as error:
        measured.notes.append(f"its layers could not be examined: {reason(error)}")
        return []
    finally:
        log.setLevel(level)


def _judge(
    config: Config,
    device: torch.device,
    modes: tuple[Mode, ...],
    runs: list[Run],
    measured: dict[str, Measured],
    updates: dict[str, int],
) -> tuple[Baseline | None, list[Finding]]:
    from engine.amp.precision import choose
    from tools.common.precisions import is_emulated, lacks_arithmetic

    of = {run.contender: measured[run.folder.name] for run in runs}
    first, second, third = (measured[run.folder.name] for run in runs if run.contender == "fp32")
    failed = next((run.failed for run in (first, second, third) if run.failed), "")
    if failed and all(of[mode.name].failed for mode in modes):
        raise TrainingError(f"nothing could be measured; fp32: {failed}")
    if failed:
        log.warning("fp32 could not be measured (%s), so the other precisions are not compared with it", failed)
    base, findings = None if failed else Baseline((first, second, third)), []
    for mode in modes:
        warning = choose(mode.amp(config.AMP), device).warning
        of[mode.name].notes = [*([warning] if warning else []), *of[mode.name].notes]
        slow = "emulated on this device, so its speed is meaningless" if is_emulated(mode, device) else ""
        if lacks_arithmetic(mode, device):
            slow = (
                f"this CPU has no fp16 arithmetic and emulates it, so only {updates[mode.name]} updates were run: "
                "they show whether the model trains, not how fast"
            )
        flags = mode.flags(config.AMP)
        findings.append(judge(mode.name, flags, of[mode.name], base, updates[mode.name], slow))
    return base, findings


def _rows(findings: list[Finding], base: Baseline | None) -> list[list[str]]:
    """One row per mode. `loss`: largest difference from fp32's curve; `two seeds`: that of two fp32 curves."""
    rows = [["mode", "images/s", "speed", "memory", "of fp32's", "loss", "two seeds", "skipped"]]
    rows[0] += ["underflow", "headroom"]
    if base is not None:
        noise, memory = _small(base.seed_noise(len(base.losses))), f"{base.peak_memory_gb:.2f} GB"
        rows.append(["fp32", rounded(base.images_per_second), "1.00x", memory, "100 %", "-", noise, *["-"] * 3])
    for finding in findings:
        one = finding.measured
        if one.failed:
            rows.append([finding.name, *["-"] * 9])
            continue
        rows.append(
            [
                finding.name,
                rounded(one.images_per_second),
                "-" if finding.speed is None else f"{finding.speed:.2f}x",
                f"{one.peak_memory_gb:.2f} GB",
                "-" if finding.memory is None else f"{100 * finding.memory:.0f} %",
                _small(finding.difference),
                _small(finding.noise),
                f"{one.skipped}/{one.updates}",
                _percent(max((layer.underflow_share for layer in one.layers), default=None)),
                _power(min((layer.headroom for layer in one.layers), default=None)),
            ]
        )
    return rows


def _details(findings: list[Finding]) -> list[str]:
    """Lines below the table: the layers that lose most, notes, and why a mode is not recommended."""
    lines: list[str] = []
    for finding in findings:
        one, texts = finding.measured, []
        worst = sorted(one.layers, key=lambda layer: layer.underflow_share, reverse=True)[:SHOWN_LAYERS]
        if worst := [layer for layer in worst if layer.underflows]:
            fractions = ", ".join(f"{layer.name} {_percent(layer.underflow_share)} ({layer.dtype})" for layer in worst)
            texts.append(f"layers whose gradients underflow most, at scale {one.scale:g}: {fractions}")
        tightest = min(one.layers, key=lambda layer: layer.headroom, default=None)
        if tightest is not None and tightest.headroom < 2**15:
            texts.append(
                f"at scale {one.scale:g}, {tightest.name} is closest to overflow: its gradients could be "
                f"{_power(tightest.headroom)} times as large without overflow"
            )
        texts += [*one.notes, *(f"not recommended: {reason}" for reason in finding.against)]
        lines += [f"{finding.name}: {text}" for text in texts]
    return lines


def _remarks(config: Config, device: torch.device, base: Baseline | None) -> list[str]:
    texts = []
    if device.type != "cuda":
        texts.append("memory: peak of the whole process, Python and libraries (about 0.5 GB) included")
    if base is None:
        return texts
    noise = f"speed: three runs of fp32 varied by {100 * base.speed_noise:.0f} %; smaller differences are noise"
    busy = "; repeat the measurement when the machine is idle"
    texts.append(noise + busy * (base.speed_noise > MUCH_NOISE))
    warmup = min(config.TRAIN.WARMUP_EPOCHS, config.TRAIN.NUM_EPOCHS)
    if base.runs[0].epochs < warmup / 2:
        texts.append(
            f"learning rate: reached only {base.runs[0].learning_rate:.2g}, after {base.runs[0].epochs:.2g} of "
            f"{warmup:g} TRAIN.WARMUP_EPOCHS; for the full learning rate, give more -updates or a shorter warm-up"
        )
    waited = base.runs[0].data_wait_percent
    if waited > MUCH_WAITING:
        texts.append(
            f"data: fp32 waited for samples {waited:.0f} % of the time; while loading is the bottleneck, no "
            "precision makes training faster (see DATA.NUM_WORKERS)"
        )
    return texts


def _as_noted(finding: Finding) -> dict[str, Any]:
    noted = asdict(finding)
    measured = noted.pop("measured")
    layers = [{**asdict(each), "underflow_share": each.underflow_share} for each in finding.measured.layers]
    return {**noted, **measured, "layers": layers}


def _write_page(runs: list[Run], measured: dict[str, Measured], folder: Path, sentence: str) -> None:
    """Write report.html with the runs side by side. An error there is a warning: everything else is in the log."""
    from tools.common.report_page.page import write_report

    folders = [run.folder for run in runs if not measured[run.folder.name].failed]
    try:
        write_report(folders, folder / "report.html", verdict=sentence, predictions=False)
    except UserError as error:
        log.warning("%s", error)


def rounded(images: float) -> str:
    return f"{images:,.0f}" if images >= 100 else f"{images:.3g}"


def _small(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return "not a number" if math.isinf(value) else f"{value:.2g}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.2g} %"


def _power(headroom: float | None) -> str:
    if headroom is None:
        return "-"
    return "any" if math.isinf(headroom) else f"2^{math.floor(math.log2(headroom))}"


def _plain(value: Any) -> Any:
    """Replace infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
