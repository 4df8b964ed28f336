"""The run that -resume names, and the folder that a run writes to."""

from __future__ import annotations

from pathlib import Path

from utils.config import Config
from utils.config.kinds import AUTO
from utils.run_folder import holds_a_run, run_of


def resumed_run(config: Config) -> Path | None:
    """The folder of the run that is resumed, if one is."""
    wanted = config.MODEL.RESUME
    if wanted is None:
        return None
    if wanted != AUTO:
        return run_of(Path(wanted))
    assert config.OUTPUT is not None  # checked with the config
    return Path(config.OUTPUT) if holds_a_run(Path(config.OUTPUT)) else None


def target_folder(config: Config) -> str | None:
    """-output; else, on resuming, the folder of the resumed run; else None, and a folder is made in SAVE.

    An evaluation never resumes a run: where OUTPUT is the run it evaluates, it gets a folder of its own.
    """
    output, resumed = config.OUTPUT, resumed_run(config)
    if config.EVAL:
        evaluated = output is not None and resumed is not None and Path(output).resolve() == resumed.resolve()
        return None if evaluated else output
    return output if output is not None or resumed is None else str(resumed)
