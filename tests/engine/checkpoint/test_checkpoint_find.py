"""Finding the checkpoint at a path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.find import find
from tests.program import made_meta
from tests.saved import save_checkpoint
from utils.errors import UserError
from vitamp.checkpoints import MODEL, STATE, folder_name, write_index


def save(root: Path, update: int, epoch: int = 1) -> Path:
    tensors = {MODEL: {"weight": torch.ones(2)}}
    return save_checkpoint(root, update, tensors, {"update": update}, made_meta(update, epoch, epoch_finished=True))


def test_find_accepts_run_checkpoints_folder_checkpoint_or_file(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    first, second = save(root, 1), save(root, 2)
    (tmp_path / "config.yaml").touch()
    for path in (tmp_path, root, tmp_path / "config.yaml", root / "index.json", second, second / MODEL):
        write_index(root, second.name, None)
        assert find(path).folder == second
    assert find(first).folder == find(first / STATE).folder == first


def test_find_by_epoch(tmp_path: Path) -> None:
    for update, epoch in ((10, 1), (20, 2), (30, 3)):
        save(tmp_path / "checkpoints", update, epoch)
    assert find(tmp_path, epoch=2).meta["update"] == 20
    with pytest.raises(UserError, match="epoch 4"):
        find(tmp_path, epoch=4)
    with pytest.raises(UserError, match="not at the end of epoch 1 "):
        find(tmp_path / "checkpoints" / folder_name(20), epoch=1)


def test_find_error_names_searched_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        find(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no usable checkpoint"):
        find(tmp_path)
