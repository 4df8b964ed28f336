"""The stages of auto.py that compare and train: probes of all candidates, trials of the best, and the final run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.evaluation.linear import FOLDS
from engine.machine.device import threads_of
from models.parts import count_parameters
from tools.auto.candidates import Candidate, accuracy, build, gain_of_sizes, probe, separate
from tools.auto.data import read_table, write_final, write_probed
from tools.auto.record import Record
from tools.common.command_line import ToolLine
from tools.common.run_metrics import is_finished
from tools.compare.plan import file_name
from tools.compare.runs import Run, train_together
from utils.config import config_of_run
from utils.distributed.world import World
from utils.errors import TrainingError, UserError
from utils.record.history import History
from utils.record.predictions import GROUPS, PROBE, read_predictions
from utils.statistics.groups import Groups
from utils.statistics.paired import interval_and_test
from utils.text import clock, counted
from vitamp.checkpoints import CHECKPOINTS, folder_name, read_index

FOR_PROBES = 1 / 4
"""Fraction of the whole time for probes"""
FOR_TRIALS = 1 / 3
"""The same for trials"""
MOST_TRIALS = 3
"""Candidates that are fine-tuned, unless there are more devices"""
FASTER = 1.2
"""Candidates whose speeds differ by a smaller factor than about this are equally fast"""
NEVER = 1_000_000
"""Epochs between validations of the final run, so that only its end validates"""
LEAST_SECONDS = 30
"""Least seconds for everything besides probes and trials"""
LEAST_TRIAL = 60
"""Seconds per trial below which fewer candidates are tried, or none"""
PASSES_OF_TEST = 8
"""The evaluation takes a model about as long as features of so many times the test images"""


class Trial(NamedTuple):
    """The last validation of a run that has fine-tuned a candidate."""

    is_right: np.ndarray
    """Whether each validation image is recognised"""
    groups: Groups
    of_probe: np.ndarray
    """Whether the probe that it began with recognises each of them"""
    epoch: int
    gain: tuple[float, float, float]
    """Number of images that it recognises beyond those of that probe, and the ends of the interval"""

    @classmethod
    def of_run(cls, folder: Path) -> Trial | None:
        """Read it from the folder of a run; None if the run was not validated after an update."""
        validations = History.of_run(folder).of("val")
        last = validations[-1] if validations else {"update": 0}
        table = read_predictions(folder, last["update"])
        if last["update"] == 0 or table is None or PROBE not in table:
            return None
        is_right = table["guess"] == table["labels"]
        groups = table.get(GROUPS, np.empty(0))
        of_probe = table[PROBE] == table["labels"]
        return cls(is_right, groups, of_probe, last["epoch"], interval_and_test(is_right, of_probe, groups))


@dataclass
class Search:
    """The stages from probes to the final run. Each puts its decisions into the record, and returns lines to print."""

    line: ToolLine
    record: Record
    candidates: dict[str, Candidate]
    """By name, the smallest first"""
    missing: list[str]
    """Models whose weights cannot be had"""
    devices: Sequence[str | None] = (None,)
    """For each device that takes part, the value of CUDA_VISIBLE_DEVICES; None on a CPU, and without -ngpus"""

    def __post_init__(self) -> None:
        self.table = self.record.folder / "split.csv"
        """The table that names the split of each image"""
        self.probe_table = self.record.folder / "probe.csv"
        """The table of the probes, which may have fewer training images"""
        self.final_table = self.record.folder / "final.csv"
        """The same, with most validation images among the training images"""

    @property
    def several_processes(self) -> bool:
        """Whether main_multi_gpu.py trains the final run, and a trial that is alone."""
        return len(self.devices) > 1

    def probe_all(self) -> list[str]:
        """Compare the candidates by linear probes, the smallest first, as far as a fourth of the time allows.

        Raises UserError if there is no time for the first one.
        """
        images = write_probed(self.table, self.probe_table)
        all_images = _count(self.table)["train"]
        began = time.monotonic()
        hits = dict[str, np.ndarray]()  # candidate -> whether each training image is recognised in folds
        groups = list[str]()
        about = dict[str, dict[str, Any]]()
        area = dict[str, int]()  # candidate -> pixels of an image
        no_time = list[str]()
        overhead = 0.0  # seconds per image of a probe beyond those of the model: decoding and the fit
        for name, candidate in self.candidates.items():
            try:
                trained, speed = build(candidate.load(self.line, self.probe_table))
            except UserError as error:
                raise UserError(f"-weights {name}: {error}") from None
            started = time.monotonic()
            needed = images * (1 / speed + overhead)
            if not hits:
                self._check_time(name, images / speed, self._seconds_of_evaluation(speed))
            elif needed > FOR_PROBES * self.record.limit - (started - began):
                no_time.append(f"{name} (about {clock(needed)})")
                continue
            found = probe(trained)
            seconds = time.monotonic() - started
            overhead = max(overhead, seconds / images - 1 / speed)
            hits[name] = found.is_right
            groups = found.features.groups
            _, high, wide = trained.config.DATA.shape
            area[name] = high * wide
            about[name] = {
                "in_folds": accuracy(found.is_right, groups),
                "pixels": f"{trained.config.DATA.IMAGE_SIZE}",
                "parameters": count_parameters(trained.model)[0],
                "images_per_second": round(speed, 1),
            }
            self.record.save()  # the time that is used: features are kept, so that a kill would hide it
        equal, differences = separate(hits, groups)
        words = f"{images:,} training images"
        if images < all_images:
            words = f"{images:,} of {all_images:,} training images, drawn at random"
        by_area = {name: hits[name] for name in sorted(hits, key=area.__getitem__)}
        larger_images = gain_of_sizes(by_area, groups, self.candidates)
        self.record.save(candidates=about, equal=equal, overhead=overhead, larger_images=larger_images)

        lines = [f"Probes: best {equal[0]}, {about[equal[0]]['in_folds']} in {FOLDS} folds of {words}"]
        if differences:
            lines.append(f"  beside it, as probes: {'; '.join(differences)}")
        not_tried = [f"no time for {name}" for name in no_time]
        if self.missing:
            not_tried.append(f"no weights of {', '.join(self.missing)}, which -weights MODEL=FILE gives")
        if not_tried:
            lines.append(f"  not tried: {'; '.join(not_tried)}")
        return lines

    def _seconds_of_evaluation(self, speed: float, overhead: float = 0.0) -> float:
        """Return the seconds that the evaluation takes of a model that computes `speed` images per second.

        It compares test images and edited copies with the others. `overhead`: more seconds for each test image.
        """
        return _count(self.table)["test"] * (PASSES_OF_TEST / speed + overhead) + LEAST_SECONDS / 2

    def _check_time(self, name: str, probe: float, evaluation: float) -> None:
        """Raise UserError if even the probe of the first candidate and a final one do not fit.

        `probe`, `evaluation`: their seconds.
        """
        record = self.record
        # What this call has used counts in the next one, in the same folder, or is used again in another.
        least = record.used + max(probe / FOR_PROBES, 2 * probe + evaluation) + LEAST_SECONDS
        if record.limit < least:
            raise UserError(
                f"-max_time {clock(record.limit)} is too short: {clock(record.used)} are used; here, a probe of {name} "
                f"takes about {clock(probe)} and the evaluation {clock(evaluation)}. "
                f"Give at least {clock(1.1 * least)}."
            )

    def try_out(self) -> list[str]:
        """Fine-tune the candidates that probes do not tell apart for equal times, and decide which one wins."""
        content = self.record.content
        if "trials" not in content:  # otherwise, an earlier call was interrupted in its trials
            self._plan_trials()
        seconds = content["seconds_per_trial"]
        lines = list[str]()
        trials = dict[str, Trial]()
        for name, (folder, failure) in self._train_trials(content["trials"], seconds).items():
            trial = Trial.of_run(folder)
            if trial is None:
                reason = failure or "no epoch ended in time"
                lines.append(f"  {name} was not fine-tuned in {clock(seconds)}: {reason}")
                continue
            trials[name] = trial
            value = f"{accuracy(trial.is_right, trial.groups)} after {counted(trial.epoch, 'epoch')}"
            value += f" (its probe {100 * trial.of_probe.mean():.2f} %)"
            content["candidates"][name]["trial"] = value
        skipped = [name for name in content["equal"] if name not in content["trials"]]
        if skipped:
            reason = "the fastest come first" if content["trials"] else "there is too little time"
            needed = LEAST_TRIAL / FOR_TRIALS * self._turns(min(self._most_trials, len(content["equal"])))
            more_time = ""
            if needed > self.record.limit:
                more_time = f"; -max_time {clock(needed)} with another -output has room for more"
            lines.append(f"  not tried, since {reason}: {', '.join(skipped)}{more_time}")
        if not trials:
            winner = self._fastest_first(content["equal"])[0]
            self.record.save(winner=winner, fine_tuned=True, validated=True)
            how = "the fastest of those that probes do not tell apart, is trained once; validation chooses the epoch"
            return [f"Trials: none; {winner}, {how}", *lines]
        trained, *decided = self._decide(trials, clock(seconds))
        return [trained, *lines, *decided]

    @property
    def _most_trials(self) -> int:
        return max(MOST_TRIALS, len(self.devices))

    def _turns(self, trials: int) -> int:
        """Return how many of these trials follow one another, since each device takes one at a time."""
        return math.ceil(trials / len(self.devices))

    def _plan_trials(self) -> None:
        """Decide which candidates are fine-tuned, and for how long."""
        available = max(0.0, min(FOR_TRIALS * self.record.limit, self.record.left / 2))
        most = min(self._most_trials, len(self.devices) * int(available / LEAST_TRIAL))
        chosen = self._fastest_first(self.record.content["equal"])[:most]
        turns = self._turns(len(chosen))
        if len(chosen) < 2:  # a single one is only compared with its own probe
            turns = 2
        self.record.save(trials=chosen, seconds_per_trial=available / turns)

    def _train_trials(self, names: list[str], seconds: float) -> dict[str, tuple[Path, str | None]]:
        """Train the trials of candidates, and return the folder of each, and why it failed, if it did.

        Several devices take one trial each; a trial that is alone has all of them.
        """
        at_once = len(self.devices)
        each_alone = at_once > 1 and len(names) > 1
        folder_of = {name: self.record.folder / "trials" / file_name(name) for name in names}
        failure_of = dict[str, str | None]()
        for start in range(0, len(names), at_once):
            folders = {name: folder_of[name] for name in names[start : start + at_once]}
            if not all(map(is_finished, folders.values())):
                numbers = ", ".join(f"{start + place}" for place in range(1, len(folders) + 1))
                self.record.say(f"  trial {numbers} of {len(names)}: {', '.join(folders)}, {clock(seconds)}")
            failure_of |= self._train(folders, self.table, seconds, each_alone, {"DATA.CHECK": "off"})
        return {name: (folder_of[name], failure_of[name]) for name in names}

    def _decide(self, trials: dict[str, Trial], time_of_each: str) -> list[str]:
        """Decide which of the fine-tuned candidates wins, and whether it is fine-tuned or keeps its probe."""
        candidates = self.record.content["candidates"]
        hits = {name: trial.is_right for name, trial in trials.items()}
        first = next(iter(trials.values()))
        equal, differences = separate(hits, first.groups)
        # Of equally good ones, the fastest. Each had the same time; a slower one, which had fewer epochs, gains more
        # from the longer final run.
        winner = max(self._fastest_first(equal), key=lambda name: hits[name].sum())
        gain, low, high = trials[winner].gain
        # Few images do not decide against fine-tuning, which was better on nearly all sets measured (docs/auto.md).
        is_fine_tuned = high >= 0
        self.record.save(winner=winner, fine_tuned=is_fine_tuned, validated=False)
        each = "; ".join(f"{name} {candidates[name]['trial']}" for name in trials)
        images = f"{len(first.is_right):,} validation images"
        if len(trials) > 1:
            images += ", which choose the winner, so that its value may be too high"
        lines = [f"Trials: at most {time_of_each} each, one seed, {images}: {each}"]
        if differences:
            lines.append(f"  beside {equal[0]}, as trained here: {'; '.join(differences)}")
        speed = {name: about["images_per_second"] for name, about in candidates.items()}
        faster = [
            f"{name} ({speed[name] / speed[winner]:.1f} times as fast)" for name in equal if speed[name] > speed[winner]
        ]
        if faster:
            lines.append(f"  {winner} wins; as good, as far as these images tell: {', '.join(faster)}")
        verdict = "; it is fine-tuned" if is_fine_tuned else "; the probe is kept"
        if low <= 0 <= high:
            verdict = ", which may be chance; it is fine-tuned, as was better on nearly all sets measured"
        change = f"{gain:+.0f} images right ({low:+.0f} to {high:+.0f})"
        lines.append(f"  {winner} against its own probe: {change}{verdict}")
        return lines

    def _fastest_first(self, names: list[str]) -> list[str]:
        """Order candidates by their speed here. Those of about the same speed stay in their order."""
        about = self.record.content["candidates"]
        return sorted(names, key=lambda name: -round(math.log(about[name]["images_per_second"], FASTER)))

    def train_final(self) -> list[str]:
        """Train the winner on training and validation images, in the time that its evaluation leaves.

        If there was no trial, it is trained on the training images alone: validation compares its epochs and the probe.
        If there is no time to train it, its probe is fitted to as many images as time allows.
        """
        content = self.record.content
        name = content["winner"]
        is_validated = content["validated"]
        if not self.final_table.exists():
            write_final(self.table, self.final_table)
        table = self.table if is_validated else self.final_table
        images = _count(table)
        speed = content["candidates"][name]["images_per_second"]
        seconds_per_image = 1 / speed + content["overhead"]
        evaluation = self._seconds_of_evaluation(speed, content["overhead"])
        # For a model that was fine-tuned, the evaluation computes features of all images, too.
        all_features = images.total() * seconds_per_image
        folder = self.record.folder / "final"
        how = "with its probe as classifier"
        reports = list[dict[str, Any]]()
        failed = list[str]()
        if content["fine_tuned"]:
            validate = {} if is_validated else {"VALIDATE_FREQ": NEVER, "VALIDATE_EVERY_UPDATES": None}
            seconds = self.record.left - evaluation - all_features
            failure = self._train({name: folder}, table, seconds, more=validate)[name]
            reports = [] if failure else History.of_run(folder).of("train")
            if not reports:
                reason = failure or "the time was over before its first update"
                failed = [f"  fine-tuning failed: {reason}"]
        if not reports:
            is_validated = False
            folder = folder.with_name("final-probe")
            table = self._fit_final_probe(name, folder, int((self.record.left - evaluation) / seconds_per_image))
        return [self._conclude(folder, table, how, reports, is_validated), *failed]

    def _fit_final_probe(self, name: str, folder: Path, images: int) -> Path:
        """Fit the final probe to so many of the training and validation images, and return their table."""
        table = self.final_table
        if images < _count(table)["train"]:
            table = self.record.folder / "final-probe.csv"
            if not table.exists():
                write_probed(self.final_table, table, max(images, _count(self.probe_table)["train"]))
        no_epochs = {"TRAIN.NUM_EPOCHS": 0, "TRAIN.WARMUP_EPOCHS": 0, "MODEL.FREEZE": "backbone"}
        failure = self._train({name: folder}, table, None, more=no_epochs)[name]
        if failure:
            raise TrainingError(f"The final run failed: {failure}")
        return table

    def _conclude(self, folder: Path, table: Path, how: str, reports: list[dict[str, Any]], is_validated: bool) -> str:
        """Put the final run into the record, and return the line about it.

        `table`: of its images. `how`: what its classifier is, unless it was fine-tuned. `reports`: lines of its
        updates. `is_validated`: whether validation has chosen its best checkpoint.
        """
        rate_at_end = 0.0
        if is_validated and read_index(folder / CHECKPOINTS)["best"] == folder_name(0):
            how += ", since no epoch was better in validation"
        elif reports:
            how = f"fine-tuned for {counted(reports[-1]['epoch'], 'epoch')}"
            if not is_finished(folder):
                how += f" of {config_of_run(folder).TRAIN.NUM_EPOCHS}, when the time was over"
                rate_at_end = reports[-1]["lr"] / max(report["lr"] for report in reports)
        on = "training images alone; validation has chosen the epoch"
        if not is_validated:
            images = _count(table)
            all_images = _count(self.final_table)["train"]
            of_all = f" of {all_images:,}, as many as time allows" if images["train"] < all_images else ""
            kept = f"{images['val']:,} validate, as a run must, but decide nothing"
            on = f"training and validation images ({images['train']:,}{of_all}; {kept})"
        epochs = reports[-1]["epoch"] if reports else 0
        self.record.save(run=f"{folder}", how=how, rate_at_end=rate_at_end, epochs=epochs)
        return f"Final: {self.record.content['winner']}, {how}, on {on}: {folder}"

    def _train(
        self,
        folders: Mapping[str, Path],
        table: Path,
        seconds: float | None,
        each_alone: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, str | None]:
        """Train runs of candidates, or go on with them, for at most so many seconds; None: without a limit.

        `folders`: of each candidate. `each_alone`: whether each has one of the devices; else the only one has all.
        `more`: settings, as for `Candidate.load`. Returns for each in a sentence why it failed; None if it did not, or
        has finished before.
        """
        limit = None
        words = list[str]()
        if seconds is not None:
            limit = clock(max(min(seconds, self.record.left), 1))
            words = ["-max_time", limit]
        runs = list[Run]()
        for name, folder in folders.items():
            if is_finished(folder):
                continue
            config = self.candidates[name].load(self.line, table, {"MAX_TIME": limit, **(more or {})})
            if each_alone:
                processes = len(self.devices)
                threads = threads_of(config, World(size=processes, local_size=processes))
                config = config.changed(NGPUS=1, THREADS=threads)
            runs.append(Run(name, config.SEED, config, folder))
        gpus = self.devices if each_alone else [None]
        several_processes = self.several_processes and not each_alone
        failures = train_together(runs, *words, several_processes=several_processes, gpus=gpus[: len(runs)])
        failure_of = dict[str, str | None].fromkeys(folders)
        for run, failure in zip(runs, failures, strict=True):
            if failure is not None:
                # Of "MAX_TIME 0:01:00 is too short: REASON. ADVICE", the reason; of another error, its first sentence
                sentence, _, _ = failure.partition(". ")
                _, _, failure_of[run.contender] = sentence.rpartition("is too short: ")
        return failure_of


def _count(table: Path) -> Counter[str]:
    """Return the number of images of each split in a table."""
    return Counter(row["split"] for row in read_table(table))
