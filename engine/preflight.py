"""What can be found wrong before any process is started, data is opened or memory taken."""

from __future__ import annotations

from pathlib import Path

from datasets import check_dataset
from engine.amp.precision import check_amp
from engine.checkpoint.find import check_resumable
from engine.distill.teacher import check_teacher
from engine.inputs.token_drop import shortcuts_of
from engine.optim.build import optimizer_name
from engine.parallel.fsdp import check_sharding
from engine.report.wandb import check_wandb
from models import check_model, check_pretrained
from utils.config import Config
from utils.run_folder import check_output, holds_a_run, run_of

AUTO = "auto"


def resumed_run(config: Config) -> Path | None:
    """The folder of the run that is gone on with, if one is."""
    wanted = config.MODEL.RESUME
    if wanted is None:
        return None
    if wanted != AUTO:
        return run_of(Path(wanted))
    assert config.OUTPUT is not None  # checked with the config
    return Path(config.OUTPUT) if holds_a_run(Path(config.OUTPUT)) else None


def _starts_by_auto(config: Config) -> bool:
    return config.MODEL.RESUME == AUTO and resumed_run(config) is None


def target_folder(config: Config) -> str | None:
    """-output; else, when going on with a run, that run's folder; else None, and one is made in SAVE.

    An evaluation never goes on with a run: where OUTPUT is the one it looks at, it gets a folder of its own.
    """
    output, resumed = config.OUTPUT, resumed_run(config)
    if config.EVAL:
        looked_at = output is not None and resumed is not None and Path(output).resolve() == resumed.resolve()
        return None if looked_at else output
    return output if output is not None or resumed is None else str(resumed)


def check(config: Config) -> None:
    """Raise UserError for the first part that could not work."""
    if config.MODEL.RESUME not in (None, AUTO):
        check_resumable(Path(str(config.MODEL.RESUME)), config.TRAIN.LAST_EPOCH)
    check_output(target_folder(config), config.SAVE, resumed_run(config))
    check_dataset(config.DATA, config.MODEL.NUM_CLASSES, train=not config.EVAL)
    optimizer_name(config.TRAIN.OPTIMIZER.NAME)
    check_sharding(config)
    if not config.EVAL:
        check_wandb(config.WANDB)
    check_amp(config.AMP, config.TRAIN)
    check_teacher(config)
    if config.MODEL.PRETRAINED and (config.MODEL.RESUME is None or _starts_by_auto(config)):
        check_pretrained(config.MODEL.PRETRAINED, config.MODEL.RESUME_EMA)
    check_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS, shortcuts_of(config))
