"""Run all measurements one after another, judge them, and report."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures.process import BrokenProcessPool

import torch

from engine.amp.precision import choose
from engine.compile.choice import NONE
from engine.machine.device import describe_devices, set_up_device
from tools.choose_precision.measure import Job, Measured, measure
from tools.choose_precision.picture import draw
from tools.choose_precision.report import as_json, details, rounded, table
from tools.choose_precision.verdict import Baseline, Finding, judge, recommend
from tools.common.output_file import writing
from tools.common.precisions import REFERENCE, UPDATES_WITHOUT_ARITHMETIC, Mode, Plan, is_emulated, lacks_arithmetic
from tools.common.processes import KILLED, own_processes
from tools.common.progress import progress_bar
from utils.config import Config, to_yaml
from utils.distributed.world import ALONE
from utils.errors import TrainingError
from utils.log import log
from utils.record.run_folder import describe_run, make_folder, write_json
from utils.text import counted

MUCH_NOISE = 0.15
"""Variation in the speed of equal runs that hints at other load on the machine."""
MUCH_WAITING = 20
"""Percent of the time spent waiting for samples, above which no precision helps much."""


class Examination:
    """`run` measures, logs the results and writes the report."""

    def __init__(
        self, config: Config, device: torch.device, plan: Plan, updates: int, seconds: float, name: str
    ) -> None:
        self._config, self._device, self._plan, self._name = config, device, plan, name
        self._wanted = updates
        self._began = time.monotonic()
        self._started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._end = self._began + seconds
        self._left = len(plan.modes) + 3
        self._bar = progress_bar(self._left, "measurements")

    def run(self) -> None:
        config = self._config
        threads = set_up_device(config, self._device, ALONE)
        where = describe_devices(self._device, ALONE, threads)
        names = ["fp32 (three seeds)", *(mode.name for mode in self._plan.modes)]
        log.info("%s on %s, batch %d, %s", config.MODEL.NAME, config.DATA.DATASET, config.DATA.BATCH_SIZE, where)
        log.info("measuring %s of each: %s", counted(self._wanted, "update"), ", ".join(names))
        for name, reason in self._plan.left_out.items():
            log.info("left out: %s: %s", name, reason)
        with self._bar:
            base, findings = self._measure_all()
        self._report(where, threads, base, findings)

    def _measure_all(self) -> tuple[Baseline | None, list[Finding]]:
        """fp32 comes first, in the middle and last, so that a drift of the machine shows."""
        modes, seed = self._plan.modes, self._config.SEED
        half = len(modes) // 2
        first = self._fp32(seed)
        results = [self._mode(mode) for mode in modes[:half]]
        second = self._fp32(seed + 1)
        results += [self._mode(mode) for mode in modes[half:]]
        runs = first, second, self._fp32(seed + 2)

        failed = next((run.failed for run in runs if run.failed), "")
        if failed and all(run.failed for run in results):
            raise TrainingError(f"nothing could be measured; fp32: {failed}")
        if failed:
            log.warning("fp32 could not be measured (%s), so the other precisions are not compared with it", failed)
        bad = next((run.bad_update for run in runs if run.bad_update is not None), None)
        if bad is not None:
            raise TrainingError(
                f"fp32 itself does not train: its gradients were NaN or infinite at update {bad}. Try a "
                "lower TRAIN.BASE_LR, a longer TRAIN.WARMUP_EPOCHS, or TRAIN.GRAD_CLIP=1.0."
            )
        base = None if failed else Baseline(runs)
        return base, [self._judge(mode, run, base) for mode, run in zip(modes, results, strict=True)]

    def _judge(self, mode: Mode, measured: Measured, base: Baseline | None) -> Finding:
        warning = choose(mode.amp(self._config.AMP), self._device).warning
        measured.notes = list(dict.fromkeys([*([warning] if warning else []), *measured.notes]))
        slow = "emulated on this device, so its speed is meaningless" if is_emulated(mode, self._device) else ""
        if lacks_arithmetic(mode, self._device):
            slow = (
                f"this CPU has no fp16 arithmetic and emulates it, so only {self._updates(mode)} updates were run: "
                "they show whether the model trains, not how fast"
            )
        return judge(mode.name, mode.flags(self._config.AMP), measured, base, self._updates(mode), slow)

    def _updates(self, mode: Mode) -> int:
        return min(UPDATES_WITHOUT_ARITHMETIC, self._wanted) if lacks_arithmetic(mode, self._device) else self._wanted

    def _fp32(self, seed: int) -> Measured:
        """Measure fp32 with another seed for first weights and dropout, on the same samples in the same order.

        That is the stricter test: differences between batches cancel out, as they do between precisions. With
        pretrained weights, the samples change as well, because nothing else would differ.
        """
        config = self._config.model_copy(update={"AMP": REFERENCE.amp(self._config.AMP), "SEED": seed})
        same_samples = seed != self._config.SEED and not config.MODEL.PRETRAINED
        samples = self._config.SEED if same_samples else None
        return self._measure(Job(f"fp32, seed {seed}", config, self._wanted, self._deadline(), samples))

    def _mode(self, mode: Mode) -> Measured:
        config = self._config.model_copy(update={"AMP": mode.amp(self._config.AMP)})
        return self._measure(Job(mode.name, config, self._updates(mode), self._deadline(), layers=bool(mode.dtype)))

    def _deadline(self) -> float:
        """Deadline of the next measurement: it gets an equal part of the time left."""
        now = time.monotonic()
        self._left -= 1
        return now + max(self._end - now, 0.0) / (self._left + 1)

    def _measure(self, job: Job) -> Measured:
        """Run a measurement in a process of its own."""
        with own_processes() as pool:
            try:
                measured = pool.submit(measure, job).result()
            except BrokenProcessPool:
                measured = Measured(failed=KILLED)
            except KeyboardInterrupt:
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
        done, speed = len(measured.losses), rounded(measured.images_per_second)
        late = ", cut short (-budget_min)" if measured.out_of_time else ""
        summary = f"{counted(done, 'update')} in {measured.seconds:.1f} s, {speed} images/s{late}"
        log.info("  %s: %s", job.name, measured.failed or summary)
        self._bar.update()
        return measured

    def _report(self, where: str, threads: int, base: Baseline | None, findings: list[Finding]) -> None:
        config = self._config
        advice = recommend(findings, base, REFERENCE.flags(config.AMP))
        log.info("\n%s\n", table(findings, base))
        for line in [*details(findings), *self._remarks(base), *_compiling_note(base, findings)]:
            log.info("%s", line)
        about = {
            **describe_run(where, {"updates": self._wanted, "threads": threads}, config.TAG),
            "started": self._started,
            "seconds": round(time.monotonic() - self._began, 1),
            "recommendation": vars(advice),
            "left_out": self._plan.left_out,
            **as_json(findings, base),
            "config": to_yaml(config),
        }
        folder = make_folder(config.OUTPUT, config.SAVE, self._name)
        report = folder / f"{self._name}.json"
        with writing(report, "-output"):
            write_json(report, about)
        title = " ".join(filter(None, (config.TAG, config.MODEL.NAME, config.DATA.DATASET, where)))
        draw(report.with_suffix(".png"), f"{title}\n{advice.sentence}", findings, base)
        log.info("\n%s\nFlags: %s\nReport: %s", advice.sentence, advice.flags, folder)

    def _remarks(self, base: Baseline | None) -> list[str]:
        texts = []
        if self._device.type != "cuda":
            texts.append("memory: peak of the whole process, Python and libraries (about 0.5 GB) included")
        if base is None:
            return texts
        noise = f"speed: three runs of fp32 varied by {100 * base.speed_noise:.0f} %; smaller differences are noise"
        texts.append(
            noise + ("; repeat the measurement when the machine is idle" if base.speed_noise > MUCH_NOISE else "")
        )
        warmup = min(self._config.TRAIN.WARMUP_EPOCHS, self._config.TRAIN.NUM_EPOCHS)
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


def _compiling_note(base: Baseline | None, findings: list[Finding]) -> list[str]:
    """Note on the precisions that a run would compile. Here all are eager, so that every layer can be examined."""
    measured = {finding.name: finding.measured for finding in findings}
    if base is not None:
        measured = {"fp32": base.runs[0], **measured}
    how = {name: run.compile for name, run in measured.items() if run.compile != NONE}
    if not how:
        return []
    return [
        f"compiling: all updates here were eager, but a run would compile {', '.join(how)} (TRAIN.COMPILE "
        f"{' or '.join(dict.fromkeys(how.values()))}), which changes speed and memory; "
        "scripts/benchmark_amp.py precisions measures compiled updates"
    ]
