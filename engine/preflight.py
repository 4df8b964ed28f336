"""Checks that need no process group, no open data and no memory: they run before any process starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from datasets import check_dataset
from engine.amp.precision import check_amp
from engine.inputs.token_drop import shortcuts_of
from engine.machine.memory import total_memory
from engine.optim.build import optimizer_name
from engine.report.tracking import check_trackers
from models import check_model
from models.build import NO_SUCH_SIZE
from utils.config import Config
from utils.config.kinds import AUTO
from utils.errors import UserError
from utils.record.resumed_run import resumed_run, target_folder
from utils.record.run_folder import check_output


def check(config: Config, sources: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise UserError for the first problem. `sources`: where each setting comes from."""
    if config.MODEL.RESUME not in (None, AUTO):
        from engine.checkpoint.find import check_resumable

        check_resumable(Path(str(config.MODEL.RESUME)), config.TRAIN.LAST_EPOCH)
    check_output(target_folder(config), config.SAVE, resumed_run(config))
    check_dataset(config.DATA, config.MODEL.NUM_CLASSES, train=not config.EVAL)
    optimizer_name(config.TRAIN.OPTIMIZER.NAME)
    if config.DIST.STRATEGY == "fsdp":
        from engine.parallel.fsdp import check_sharding

        check_sharding(config)
    if not config.EVAL:
        if config.TRAIN.CLASS_WEIGHTS is not None:
            from engine.optim.class_weights import check_class_weights

            check_class_weights(config.TRAIN)
        check_trackers(config)
    check_amp(config.AMP, config.TRAIN)
    if config.TRAIN.DISTILLATION_TYPE is not None or config.TRAIN.TEACHER_MODEL is not None:
        from engine.distill.teacher import check_teacher

        check_teacher(config)
    starts_new_run = config.MODEL.RESUME is None or (config.MODEL.RESUME == AUTO and resumed_run(config) is None)
    if config.MODEL.PRETRAINED and starts_new_run:
        from models.weights.find import check_pretrained

        check_pretrained(config.MODEL.PRETRAINED, config.MODEL.pretrained_weights)
    if config.USE:
        from engine.own_code.trial import try_own_code

        try_own_code(config)
    memory = total_memory(torch.device("cpu"))  # in which weights are initialised
    try:
        check_model(config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS, shortcuts_of(config), memory)
    except UserError as error:
        if hint := _file_of_sizes(str(error), sources):
            raise UserError(f"{error}\n{hint}") from None
        raise


def _file_of_sizes(error: str, sources: Mapping[str, str]) -> str:
    """Which file sets the sizes that the model lacks: it may be a recipe for another model, chosen by -model."""
    files: dict[str, list[str]] = {}
    for key in re.findall(rf"(MODEL\.\w+).*{NO_SUCH_SIZE}", error):
        file, _, line = sources.get(key, "").rpartition(":")
        if line.isdigit():
            files.setdefault(file, []).append(key)
    if not files:
        return ""
    named = "; ".join(f"{', '.join(keys)} in {file}" for file, keys in files.items())
    return (
        f"Set by a file of -cfg: {named}. These sizes are for another model. Use a copy of the file without these "
        "keys, or leave -cfg out and set the data on the command line (-dataset, -image_size, -num_classes)."
    )
