"""Saves a checkpoint in the test's own process, and lists those of a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoint.folder import new_checkpoint, write_files
from vitamp.checkpoints import folder_name


def save_checkpoint(
    root: Path, update: int, tensors: Mapping[str, dict[str, Tensor]], state: dict[str, Any], meta: dict[str, Any]
) -> Path:
    """Write a checkpoint from one process that holds all weights."""
    with new_checkpoint(root, update, meta) as folder:
        write_files(folder, tensors, state)
    return root / folder_name(update)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))
