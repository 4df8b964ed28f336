"""The run folder that -resume names, and the folder that a run writes to."""

from __future__ import annotations

from pathlib import Path

from utils.config import Config
from utils.config.kinds import AUTO
from utils.record.run_folder import is_run_folder, run_folder_of


def resumed_run(config: Config) -> Path | None:
    """The folder of the run to resume; None without one."""
    resume = config.MODEL.RESUME
    if resume is None:
        return None
    if resume != AUTO:
        return run_folder_of(Path(resume))
    assert config.OUTPUT is not None  # checked with the config
    return Path(config.OUTPUT) if is_run_folder(Path(config.OUTPUT)) else None


def target_folder(config: Config) -> str | None:
    """-output; else, when resuming, the resumed run's folder; else None: a new folder in SAVE.

    An evaluation never writes to the run that it evaluates: if OUTPUT names that run, it gets a new folder too.
    """
    output, resumed = config.OUTPUT, resumed_run(config)
    if config.EVAL:
        evaluated = output is not None and resumed is not None and Path(output).resolve() == resumed.resolve()
        return None if evaluated else output
    return output if output is not None or resumed is None else str(resumed)
