"""The stages of auto.py that compare and train: probes of all candidates, trials of the best, and the final run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.evaluation.linear import FOLDS
from models.parts import count_parameters
from tools.auto.candidates import Candidate, accuracy, build, probe, separate
from tools.auto.data import read_table, write_final
from tools.auto.record import Record
from tools.common.command_line import ToolLine
from tools.common.run_metrics import is_finished
from tools.compare.runs import Contender, Run, Value, train_run
from utils.errors import TrainingError, UserError
from utils.log import LOG, log
from utils.record.history import History
from utils.record.predictions import GROUPS, PROBE, read_predictions
from utils.statistics.groups import Groups
from utils.statistics.paired import interval_and_test
from utils.text import clock, counted
from vitamp.checkpoints import CHECKPOINTS, read_index, write_index

FOR_PROBES = 1 / 4
FOR_TRIALS = 1 / 3
"""Fractions of the whole time"""
MOST_TRIALS = 3
NEVER = 10_000
"""Epochs between validations of the final run, so that only its end validates"""
PASSES = 5
"""An epoch of training with a validation takes about as long as so many passes that compute features"""
PASSES_OF_TEST = 8
STARTS = 3
"""A run takes about as long as so many starts of this process before its first update and after its last one"""


class Trial(NamedTuple):
    """The last validation of a run that has fine-tuned a candidate."""

    is_right: np.ndarray
    """Whether each validation image is recognised"""
    groups: Groups
    epoch: int
    gain: tuple[float, float, float]
    """Number of images that it recognises beyond those of the probe that it began with, and the ends of the interval"""

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
        gain = interval_and_test(is_right, table[PROBE] == table["labels"], groups)
        return cls(is_right, groups, last["epoch"], gain)


@dataclass
class Search:
    """The stages from probes to the final run. Each puts its decisions into the record, and returns lines to print."""

    line: ToolLine
    record: Record
    candidates: list[Candidate]
    """The smallest first"""
    missing: list[str]
    """Models whose weights cannot be had"""

    @property
    def table(self) -> Path:
        """The table that names the split of each image."""
        return self.record.folder / "split.csv"

    @property
    def final_table(self) -> Path:
        """The same, with most validation images among the training images."""
        return self.record.folder / "final.csv"

    @property
    def winner(self) -> Candidate:
        return self._named(self.record.content["winner"])

    def _named(self, name: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def probe_all(self) -> list[str]:
        """Compare the candidates by linear probes, the smallest first, as far as a fourth of the time allows.

        Raises UserError if there is no time for the first one.
        """
        images = sum(row["split"] == "train" for row in read_table(self.table))
        began = time.monotonic()
        hits = dict[str, np.ndarray]()  # candidate -> whether each training image is recognised in folds
        groups = list[str]()
        about = dict[str, dict[str, Any]]()
        no_time = list[str]()
        overhead = 0.0  # seconds of a probe beyond those of the model: decoding and the fit
        for candidate in self.candidates:
            trained, speed = build(candidate.load(self.line, self.table))
            started = time.monotonic()
            needed = images / speed + overhead
            if not hits:
                self._check_time(candidate, needed)
            elif needed > FOR_PROBES * self.record.limit - (started - began):
                no_time.append(f"{candidate.name} (about {clock(needed)})")
                continue
            found = probe(trained)
            seconds = time.monotonic() - started
            overhead = max(overhead, seconds - images / speed)
            hits[candidate.name] = found.is_right
            groups = found.features.groups
            about[candidate.name] = {
                "in_folds": accuracy(found.is_right, groups),
                "parameters": count_parameters(trained.model)[0],
                "images_per_second": round(speed, 1),
            }
        equal, differences = separate(hits, groups)
        best = equal[0]
        equal.sort(key=lambda name: -about[name]["images_per_second"])
        self.record.save(candidates=about, equal=equal, overhead=overhead)

        lines = [f"Probes: best {best}, {about[best]['in_folds']} in {FOLDS} folds of {images:,} training images"]
        if differences:
            lines.append(f"  against it {'; '.join(differences)}")
        not_tried = [f"no time for {name}" for name in no_time]
        if self.missing:
            not_tried.append(f"no weights of {', '.join(self.missing)}, which -weights MODEL=FILE gives")
        if not_tried:
            lines.append(f"  not tried: {'; '.join(not_tried)}")
        return lines

    def _check_time(self, candidate: Candidate, needed: float) -> None:
        """Raise UserError if the probe of the first candidate, of `needed` seconds, takes most of the time."""
        record = self.record
        if needed > min(record.limit / 2, record.left):
            least = clock(record.used + 4 * needed + 60)
            raise UserError(
                f"-max_time {clock(record.limit)} is too short: {clock(record.used)} are used, and the features of the "
                f"training images by {candidate.name} take about {clock(needed)} here. Give at least {least}."
            )

    def try_out(self) -> list[str]:
        """Fine-tune the candidates that probes do not tell apart for equal times, and decide which one wins."""
        content = self.record.content
        if "trials" not in content:  # otherwise, an earlier call was interrupted in its trials
            self._plan_trials()
        seconds = content["seconds_per_trial"]
        lines = list[str]()
        trials = dict[str, Trial]()
        for name in content["trials"]:
            folder = self.record.folder / "trials" / Contender((Value(name),)).file_name
            failure = self._train(self._named(name), folder, self.table, seconds, {"DATA.CHECK": "off"})
            trial = Trial.of_run(folder)
            if trial is None:
                reason, _, _ = (failure or "no epoch ended in time").partition(". ")
                lines.append(f"  {name} was not fine-tuned in {clock(seconds)}: {reason}")
                continue
            trials[name] = trial
            value = f"{accuracy(trial.is_right, trial.groups)}, epoch {trial.epoch}"
            content["candidates"][name]["trial"] = value
        skipped = [name for name in content["equal"] if name not in content["trials"]]
        if skipped:
            least = clock(content["least_per_trial"])
            lines.append(f"  not fine-tuned: {', '.join(skipped)}; a trial needs about {least}, of a third of the time")
        if not trials:
            winner = content["equal"][0]
            self.record.save(winner=winner, fine_tuned=False)
            return [
                f"Trials: none; {winner}, the fastest that probes do not tell from the best, keeps its probe",
                *lines,
            ]

        hits = {name: trial.is_right for name, trial in trials.items()}
        first = next(iter(trials.values()))
        equal, differences = separate(hits, first.groups)
        winner = max(equal, key=lambda name: content["candidates"][name]["images_per_second"])
        gain, low, high = trials[winner].gain
        is_fine_tuned = gain >= 0
        self.record.save(winner=winner, fine_tuned=is_fine_tuned)
        each = "; ".join(f"{name} {content['candidates'][name]['trial']}" for name in trials)
        head = f"Trials: {clock(seconds)} each, one seed, {len(first.is_right):,} validation images: {each}"
        reason = "the most accurate" if winner == equal[0] else "the fastest that is not told from the most accurate"
        choice = f"  {winner} wins, {reason}"
        if differences:
            choice += f" (against {equal[0]}: {'; '.join(differences)})"
        verdict = "it is fine-tuned" if is_fine_tuned else "the probe is kept"
        if low <= 0 <= high:
            verdict += ", though the difference may be chance"
        with_probe = f"  against its own probe {gain:+.0f} images ({low:+.0f} to {high:+.0f}): {verdict}"
        return [head, choice, with_probe, *lines]

    def _plan_trials(self) -> None:
        """Decide which candidates are fine-tuned, the fastest first, and for how many seconds each."""
        content = self.record.content
        available = min(FOR_TRIALS * self.record.limit, self.record.left / 2)
        images = sum(row["split"] != "test" for row in read_table(self.table))
        chosen = list[str]()
        longest = 0.0
        for name in content["equal"][:MOST_TRIALS]:
            passes = images / content["candidates"][name]["images_per_second"] + content["overhead"]
            longest = max(longest, PASSES * passes + STARTS * content["start"])
            if (len(chosen) + 1) * longest <= available:
                chosen.append(name)
        seconds = available / max(len(chosen), 1)
        self.record.save(trials=chosen, seconds_per_trial=seconds, least_per_trial=longest)

    def train_final(self) -> list[str]:
        """Train the winner on training and validation images, in the time that its evaluation leaves."""
        content = self.record.content
        winner = self.winner
        if not self.final_table.exists():
            write_final(self.table, self.final_table)
        rows = read_table(self.final_table)
        images = sum(row["split"] == "train" for row in rows)
        test_images = sum(row["split"] == "test" for row in rows)
        # The evaluation computes features of all images, and compares test images and edited copies with the others.
        passes = len(rows) + PASSES_OF_TEST * test_images
        speed = content["candidates"][winner.name]["images_per_second"]
        reserve = passes / speed + 2 * content["overhead"] + content["start"]
        folder = self.record.folder / "final"
        how = "with its probe as classifier"
        failure = None
        if content["fine_tuned"]:
            failure = self._train(
                winner, folder, self.final_table, self.record.left - reserve, {"VALIDATE_FREQ": NEVER}
            )
            reports = History.of_run(folder).of("train")
            if failure is None and reports:
                how = f"fine-tuned for {counted(reports[-1]['epoch'], 'epoch')}"
                if not is_finished(folder):
                    how += ", in the last of which the time was over"
            else:
                folder = folder.with_name("final-probe")
                how += f", since fine-tuning failed ({failure or 'the time was over before the first update'})"
        if "probe" in how:
            no_epochs = {"TRAIN.NUM_EPOCHS": 0, "TRAIN.WARMUP_EPOCHS": 0, "MODEL.FREEZE": "backbone", "MAX_TIME": None}
            failure = self._train(winner, folder, self.final_table, None, no_epochs)
            if failure:
                raise TrainingError(f"The final run failed: {failure}")
        # The few validation images choose no checkpoint: the last one is what other tools take, too.
        root = folder / CHECKPOINTS
        last = read_index(root)["last"]
        assert last is not None, "a run that ends has saved"
        write_index(root, last, last)
        self.record.save(run=f"{folder}", how=how)
        return [f"Final: {winner.name}, {how}, on {images:,} training and validation images: {folder}"]

    def _train(
        self, candidate: Candidate, folder: Path, table: Path, seconds: float | None, more: dict[str, Any]
    ) -> str | None:
        """Train a run, or go on with it, for at most so many seconds; None: without a limit.

        `more`: settings of this run. Returns why it failed; None if it did not, or has finished before.
        """
        if is_finished(folder):
            return None
        words = list[str]()
        if seconds is not None:
            limit = clock(max(min(seconds, self.record.left), 1))
            more = {"MAX_TIME": limit, **more}
            words = ["-max_time", limit]
            log.info("  %s: a training of at most %s; %s shows how far it is", candidate.name, limit, folder / LOG)
        config = candidate.load(self.line, table, more)
        return train_run(Run(candidate.name, config.SEED, config, folder), *words)
