"""Settings of a command and of trained weights; the run folder that -resume names, and the one that a run writes to."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.cli import CommandLine
from utils.config import Config, Loaded, load_config
from utils.config.checks import is_typed
from utils.config.keys import OF_ONE_START, default_of, values_by_key
from utils.config.kinds import AUTO
from utils.config.resumed import known_settings, resume_of
from utils.log import log
from utils.record.run_folder import CONFIG, is_of_user, is_run_folder

if TYPE_CHECKING:
    from vitamp.weights import Chosen


def resumed_run(config: Config) -> Path | None:
    """The folder of the run to resume; None without one."""
    resume = resume_of(values_by_key(config))
    if resume is None or (resume.auto and not is_run_folder(resume.place)):
        return None
    return resume.run


def load_command(command: CommandLine) -> tuple[Loaded, bool]:
    """The settings that a command line asks for, and whether the code that they name in USE is the user's own.

    A resumed run has its own config.yaml, so that resuming needs no -cfg.
    """
    cfg, flags, run = command.cfg, command.flags, None
    if cfg is None and (resume := resume_of({key: value for key, (value, _) in flags.items()} | command.words)):
        run = resume.run
    if run is not None and (run / CONFIG).exists():  # with auto, it may have been killed before it wrote one
        cfg, flags = str(run / CONFIG), {**{key: (default_of(key), "-resume") for key in OF_ONE_START}, **flags}
    loaded = load_config(cfg, flags, command.words)
    if written_before_restart(loaded.config):
        loaded = load_config(cfg, flags, {**command.words, "MODEL.RESUME": AUTO})
        log.info("torchrun has restarted this job, which resumes its run.")
    source = loaded.sources["USE"]
    return loaded, is_typed(source) or (run is None and is_of_user(source))  # a resumed folder may be someone else's


def written_before_restart(config: Config) -> bool:
    """Whether torchrun has restarted the ranks (--max-restarts), and -output has a run that they wrote before.

    A run of an earlier job is older than torchrun's process.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or config.OUTPUT is None or config.EVAL:
        return False
    from utils.distributed.watchdog import start_time_of

    began, file = start_time_of(os.getppid()), Path(config.OUTPUT, CONFIG)
    if began is None or not file.exists():
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(began) / os.sysconf("SC_CLK_TCK")
    return time.time() - file.stat().st_mtime < age


def target_folder(config: Config) -> str | None:
    """-output; else, when resuming, the resumed run's folder; else None: a new folder in SAVE.

    An evaluation never writes to the run that it evaluates: if OUTPUT names that run, it gets a new folder too.
    """
    output, resumed = config.OUTPUT, resumed_run(config)
    if config.EVAL:
        evaluated = output is not None and resumed is not None and Path(output).resolve() == resumed.resolve()
        return None if evaluated else output
    return output if output is not None or resumed is None else str(resumed)


def settings_of(chosen: Chosen) -> dict[str, Any]:
    """The settings, by dotted key, of the run that trained these weights."""
    return known_settings(chosen.meta["settings"], chosen.place)


def config_of(
    chosen: Chosen, flags: dict[str, tuple[Any, str]] | None = None, given: CommandLine | None = None
) -> Config:
    """The same, checked and overridden by `flags` and `given`: of a whole model, without adapters or shards."""
    base = {key: (value, f"{chosen.place}") for key, value in settings_of(chosen).items()}
    unset: dict[str, Any] = dict.fromkeys(("MODEL.RESUME", "MODEL.PRETRAINED", "MODEL.LORA.RANK"), (None, ""))
    unset |= {"MODEL.NEW_CLASSIFIER": (False, ""), "DIST.STRATEGY": ("ddp", ""), "DIST.HSDP": (False, "")}
    return load_config(None, {**base, **unset, **(flags or {})}, given.words if given else {}).config
