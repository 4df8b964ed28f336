"""Finds the run or checkpoint that -resume names and the folder to write to, and reads a run's saved settings."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from utils.config.keys import (
    AUTO_BY_DATA,
    DATASET,
    EPOCHS,
    WARMUP,
    absolute,
    deciding,
    nested,
    settings,
    value_of,
    values_by_key,
)
from utils.config.kinds import AUTO, is_no_value
from utils.config.read import Entry, Kind, Source, read_files, text_of
from utils.config.schema import Config
from utils.errors import UserError
from utils.log import warn_once
from utils.record.run_folder import CONFIG, is_run_folder, start_of
from vitamp.checkpoints import CHECKPOINTS, checkpoints_at, checkpoints_in, located, run_folder_of
from vitamp.meta import unchecked_meta

if TYPE_CHECKING:
    from vitamp.weights import Chosen

FROM_WEIGHTS = deciding("input", "weights")
"""Settings that a new run takes from its pretrained weights, and a resumed run from its past, if they are not set."""
OF_EVALUATION = deciding("evaluation", "patches")
"""Settings that an evaluation takes from the run, too, if they are not set"""


def known_settings(saved: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the saved settings of a run that this version still has, with absolute paths; log the others.

    saved: dotted key -> value
    where: the checkpoint
    """
    gone_keys = [key for key in saved if key not in settings()]
    if gone_keys:
        warn_once(line_about_gone_settings(where, gone_keys), logging.INFO)
    start_folder = start_of(run_folder_of(where))
    return {key: absolute(key, value, start_folder) for key, value in saved.items() if key in settings()}


def settings_of(chosen: Chosen) -> dict[str, Any]:
    """The settings, by dotted key, of the run that trained these weights."""
    return known_settings(chosen.meta["settings"], chosen.place)


def line_about_gone_settings(where: object, gone: Iterable[str]) -> str:
    """Compose the line for the log about a run's settings that this version does not have.

    where: the run or checkpoint
    gone: the keys of these settings
    """
    return f"{where} is of another version of vitamp; its settings that this version does not have: {', '.join(gone)}"


@dataclass(frozen=True)
class Resume:
    """The run or checkpoint that -resume names; with `-resume auto`, the run in -output, which may not have begun."""

    place: Path
    """The path that -resume names: a run, a checkpoint, or a file in one; with `-resume auto`, that of -output."""
    auto: bool
    """Whether this is `-resume auto`."""

    @property
    def folder(self) -> Path:
        """The folder at `place`, or around the file there: that of a run or of a checkpoint."""
        return self.place.parent if self.place.is_file() else self.place

    @property
    def run(self) -> Path | None:
        """The run's folder; None for a checkpoint that is in none."""
        return self.place if self.auto else run_folder_of(self.place)

    @property
    def begins_anew(self) -> bool:
        """Whether there is nothing to resume: `-resume auto` with a folder without checkpoints."""
        return self.auto and not checkpoints_in(self.place / CHECKPOINTS)

    def saved_settings(self) -> Mapping[str, Any]:
        """Read the settings of the named checkpoint, else of the run's config.yaml, else of its newest checkpoint.

        They are by dotted key, with absolute paths; empty if the checkpoint has none.
        """
        values = unchecked_meta(self.folder).get("settings")  # None unless `place` is a checkpoint
        if values is None:
            if self.run is not None and (self.run / CONFIG).is_file():
                config_layer = read_files(str(self.run / CONFIG))[-1]
                values = {key: entry.value for key, entry in config_layer.entries.items()}
            else:
                newest_checkpoint = checkpoints_at(self.place)[-1]
                values = unchecked_meta(newest_checkpoint).get("settings")
        start_folder = start_of(self.run)
        return {key: absolute(key, value, start_folder) for key, value in (values or {}).items()}


def resume_of(values: Mapping[str, Any]) -> Resume | None:
    """Find out what to resume from settings by dotted key, checked or not; None if there is nothing to resume."""
    auto = values.get("MODEL.RESUME") == AUTO
    place = values.get("OUTPUT" if auto else "MODEL.RESUME")
    if not place or not isinstance(place, str):
        return None
    return Resume(located(Path(os.path.expanduser(place))), auto)


def resumed_run(config: Config) -> Path | None:
    """The folder of the run to resume; None without one."""
    resume = resume_of(values_by_key(config))
    if resume is None or (resume.auto and not is_run_folder(resume.place)):
        return None
    return resume.run


def target_folder(config: Config) -> str | None:
    """Return the folder that the run writes to; None for a new folder in SAVE.

    Training writes to -output, else to the folder of the resumed run. An evaluation writes to -output, but never to the
    run that it evaluates.
    """
    output = config.OUTPUT
    resumed = resumed_run(config)
    if config.EVAL:
        is_evaluated_run = output is not None and resumed is not None and Path(output).resolve() == resumed.resolve()
        return None if is_evaluated_run else output
    if output is None and resumed is not None:
        return str(resumed)
    return output


def written_before_restart(config: Config) -> bool:
    """Whether torchrun has restarted the ranks (--max-restarts), and -output has a run of this job.

    A config.yaml that was written after torchrun's process began belongs to this job, not to an earlier one.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or config.OUTPUT is None or config.EVAL:
        return False
    from utils.distributed.watchdog import start_time_of

    torchrun_start = start_time_of(os.getppid())  # in clock ticks since the machine booted
    config_file = Path(config.OUTPUT, CONFIG)
    if torchrun_start is None or not config_file.exists():
        return False
    # The two times are of different clocks, so that ages in seconds are compared.
    seconds_since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    torchrun_age = seconds_since_boot - int(torchrun_start) / os.sysconf("SC_CLK_TCK")
    config_age = time.time() - config_file.stat().st_mtime
    return config_age < torchrun_age


def values_of_run(given: Mapping[str, Entry], all_settings: bool, warmup: bool) -> dict[str, Entry]:
    """The resumed run's data set, preprocessing and model, for those of these settings that are not given now.

    They are taken from the run, because the data may have grown by a class since, and the weights that the run began
    with may be gone. The result is empty if the run's settings cannot be read: loading the checkpoint reports that.

    all_settings: also take all other settings that are not given
    warmup: also take the warm-up, even if it is given
    """
    resume = resume_of({key: entry.value for key, entry in given.items()})
    if resume is None or resume.begins_anew:  # A run that begins anew may have other weights.
        return {}
    try:
        saved_values = {key: value for key, value in resume.saved_settings().items() if key in settings()}
        saved = Config.model_validate(nested(saved_values))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, ValidationError):
        return {}
    if not saved_values:
        return {}

    keys = [key for key in (DATASET, *FROM_WEIGHTS) if _is_open(given, key)]
    keys += [key for key in (*AUTO_BY_DATA, EPOCHS) if text_of(given, key) == AUTO]
    if text_of(given, "EVAL") == "true":
        keys += [key for key in OF_EVALUATION if key not in given]
    if warmup or EPOCHS in keys:
        keys.append(WARMUP)
    if all_settings:
        # USE is left out: code of a run is executed only if the user agrees.
        keys += [key for key in saved_values if key not in given and key != "USE"]
    else:
        keys = [key for key in keys if value_of(saved, key) != AUTO]
    source = Source(f"run in {resume.run or resume.folder}", Kind.RUN)
    return {key: Entry(value_of(saved, key), source) for key in keys}


def _is_open(given: Mapping[str, Entry], key: str) -> bool:
    """Whether the setting is not given, is given by a recipe for another model, or is given as none."""
    return key not in given or given[key].source.is_open or is_no_value(text_of(given, key))
