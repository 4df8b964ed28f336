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

import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.choose_precision.verdict import Baseline, Finding, Measured, judge, measured_of, recommend
from tools.common.command_line import OVERWRITE, Tool, about_one_device, above_zero, check_one_training, run_tool
from tools.common.output_file import writing
from tools.common.tables import in_columns
from utils.config import Config, Loaded
from utils.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, TrainingError, UserError
from utils.flags import Flag, whole
from utils.log import log
from utils.passwords import redacted_values
from utils.record.run_folder import describe_run, make_folder, write_json
from utils.text import counted

if TYPE_CHECKING:
    import torch

    from tools.choose_precision.layers import Layer
    from tools.common.precisions import Mode
    from tools.compare.plan import Run

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
