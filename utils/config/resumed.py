"""What -resume names, the folder that a run writes to, and what is read of a run's saved settings."""

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
"""Settings that a new run takes from its pretrained weights, and a resumed one from itself, if they are not set."""


def known_settings(saved: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The saved settings of a run that this version has; a run of an earlier version may have others."""
    gone = [key for key in saved if key not in settings()]
    if gone:
        warn_once(without_words(where, gone), logging.INFO)
    start = start_of(run_folder_of(where))
    return {key: absolute(key, value, start) for key, value in saved.items() if key in settings()}


def settings_of(chosen: Chosen) -> dict[str, Any]:
    """The settings, by dotted key, of the run that trained these weights."""
    return known_settings(chosen.meta["settings"], chosen.place)


def without_words(where: object, gone: Iterable[str]) -> str:
    """A line about a run's settings that this version does not have."""
    return f"{where} is of another version of vitamp; its settings that this version does not have: {', '.join(gone)}"


@dataclass(frozen=True)
class Resume:
    """What -resume names: a run, or a checkpoint; with `auto` the run in -output, which may not have begun."""

    place: Path
    auto: bool

    @property
    def folder(self) -> Path:
        return self.place.parent if self.place.is_file() else self.place

    @property
    def run(self) -> Path | None:
        """The run's folder; None for a checkpoint that is in none."""
        return self.place if self.auto else run_folder_of(self.place)

    @property
    def begins_anew(self) -> bool:
        return self.auto and not checkpoints_in(self.place / CHECKPOINTS)

    def saved_settings(self) -> Mapping[str, Any]:
        """Those of the checkpoint that is named, else of the run's config.yaml, else of its newest checkpoint."""
        values = unchecked_meta(self.folder).get("settings")
        if values is None and self.run is not None and (self.run / CONFIG).is_file():
            values = {key: entry.value for key, entry in read_files(str(self.run / CONFIG))[-1].entries.items()}
        elif values is None:
            values = unchecked_meta(checkpoints_at(self.place)[-1]).get("settings")
        start = start_of(self.run)
        return {key: absolute(key, value, start) for key, value in (values or {}).items()}


def resume_of(values: Mapping[str, Any]) -> Resume | None:
    """What settings by dotted key, checked or not, say to resume; None if nothing."""
    auto = values.get("MODEL.RESUME") == AUTO
    place = values.get("OUTPUT" if auto else "MODEL.RESUME")
    return Resume(located(Path(os.path.expanduser(place))), auto) if place and isinstance(place, str) else None


def resumed_run(config: Config) -> Path | None:
    """The folder of the run to resume; None without one."""
    resume = resume_of(values_by_key(config))
    if resume is None or (resume.auto and not is_run_folder(resume.place)):
        return None
    return resume.run


def target_folder(config: Config) -> str | None:
    """-output; else, when resuming, the resumed run's folder; else None: a new folder in SAVE.

    An evaluation never writes to the run that it evaluates: if OUTPUT names that run, it gets a new folder too.
    """
    output = config.OUTPUT
    resumed = resumed_run(config)
    if config.EVAL:
        evaluated = output is not None and resumed is not None and Path(output).resolve() == resumed.resolve()
        return None if evaluated else output
    return output if output is not None or resumed is None else str(resumed)


def written_before_restart(config: Config) -> bool:
    """Whether torchrun has restarted the ranks (--max-restarts), and -output has a run that they wrote before.

    A run of an earlier job is older than torchrun's process.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or config.OUTPUT is None or config.EVAL:
        return False
    from utils.distributed.watchdog import start_time_of

    began = start_time_of(os.getppid())
    file = Path(config.OUTPUT, CONFIG)
    if began is None or not file.exists():
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(began) / os.sysconf("SC_CLK_TCK")
    return time.time() - file.stat().st_mtime < age


def values_of_run(given: Mapping[str, Entry], all_settings: bool, warmup: bool) -> dict[str, Entry]:
    """The resumed run's data set, preprocessing and model, for settings that are open now.

    The data may have grown by a class since, and the weights may be gone. `all_settings`: also all others that are not
    given. `warmup`: also its warm-up. Nothing, if the run's settings cannot be read, which loading reports later.
    """
    resume = resume_of({key: entry.value for key, entry in given.items()})
    if resume is None or resume.begins_anew:  # perhaps from other weights
        return {}
    try:
        known = {key: value for key, value in resume.saved_settings().items() if key in settings()}
        saved = Config.model_validate(nested(known))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, ValidationError):
        return {}
    if not known:
        return {}
    keys = [key for key in (DATASET, *FROM_WEIGHTS) if _is_open(given, key)]
    keys += [key for key in (*AUTO_BY_DATA, EPOCHS) if text_of(given, key) == AUTO]
    if warmup or EPOCHS in keys:
        keys.append(WARMUP)
    if all_settings:
        keys += [key for key in known if key not in given and key != "USE"]  # code needs consent
    else:
        keys = [key for key in keys if value_of(saved, key) != AUTO]
    place = resume.run or resume.folder
    source = Source(f"run in {place}", Kind.RUN)
    return {key: Entry(value_of(saved, key), source) for key in keys}


def _is_open(given: Mapping[str, Entry], key: str) -> bool:
    return key not in given or given[key].source.is_open or is_no_value(text_of(given, key))
