"""Saves the frozen weights of a run with adapters (MODEL.LORA) once, beside its checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from engine.checkpoint.folder import raising_os_errors
from engine.checkpoint.host_copy import size_words
from models import base_weights
from utils.config.model import ModelConfig
from utils.files import replacing
from utils.log import log
from utils.passwords import redacted
from utils.record.base import BASE, LORA, sha256_of
from utils.record.checkpoints import Checkpoint
from utils.record.run_folder import CHECKPOINTS, os_errors_as_user_errors


def keep_base(folder: Path, model: nn.Module, settings: ModelConfig, resumed: Checkpoint | None) -> dict[str, Any]:
    """Write the frozen weights into the run's folder, unless they are there. Returns the entry for meta.json."""
    file, before = folder / CHECKPOINTS / BASE, resumed.meta.get(LORA) if resumed else None
    if before is not None and file.is_file() and sha256_of(file) == before["base"]["sha256"]:
        return before
    tensors = {name: weight.cpu().contiguous() for name, weight in base_weights(model).items()}
    with os_errors_as_user_errors(folder):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished, raising_os_errors(file):
            safetensors.torch.save_file(tensors, unfinished, metadata={"format": "pt"})
        seal = {"size": file.stat().st_size, "sha256": sha256_of(file)}
    log.info("The frozen weights are in %s, %s; checkpoints hold the trained ones.", file, size_words(seal["size"]))
    source = before["source"] if before else settings.PRETRAINED and redacted(settings.PRETRAINED)
    return {"base": seal, "factor": settings.LORA.factor, "source": source}


def link_base(root: Path, place: Path) -> None:
    """Give checkpoints that move from `root` to `place` their frozen weights, as a link or, failing that, a copy."""
    if (root / BASE).is_file():
        try:
            os.link(root / BASE, place / BASE)
        except OSError:
            shutil.copy2(root / BASE, place / BASE)
