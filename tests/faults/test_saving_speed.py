"""What saving a ViT-B costs the training loop: a copy in memory, and not the writing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch.utils._pytree import tree_leaves

from engine.checkpoint.saver import Saver, Snapshot
from tests.program import made_meta
from utils.config.schema import Config
from utils.record.checkpoints import MODEL
from utils.record.weight_sets import AVERAGE

EMA = AVERAGE.file

SAVES = 5
MOST_COPIES = 2
"""A pause may take as long as this many plain copies. Measured: 0.5 to 0.7, and 9 to 13 in the foreground."""


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@pytest.mark.slow
def test_a_save_pauses_training_for_a_copy_in_memory(tmp_path: Path) -> None:
    """The first save, whose memory is allocated in the background, included; plain copies and saves alternate."""
    torch.set_num_threads(2)
    model, average = (timm.create_model("vit_base_patch16_224") for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tensors = {MODEL: model.state_dict(), EMA: average.state_dict()}
    state = {"optimizer": optimizer.state_dict()}
    arrays = [leaf.detach().numpy() for leaf in tree_leaves((tensors, state)) if isinstance(leaf, torch.Tensor)]
    copies = [array.copy() for array in arrays]
    saver = Saver(tmp_path, Config(KEEP_LAST=1), pinned=False)
    saver.reserve(Snapshot(tensors, state, {}, None))
    time.sleep(10)  # as from a run's first report to its first checkpoint

    def copy() -> None:
        for to, array in zip(copies, arrays, strict=True):
            np.copyto(to, array)

    def save(update: int) -> float:
        before = saver.seconds_paused
        saver.save(Snapshot(tensors, state, made_meta(update), None, time.perf_counter()))
        return saver.seconds_paused - before

    ratios = []
    for update in range(1, SAVES + 1):
        ratios.append(save(update) / seconds(copy))
        saver.finish()
    print(f"pauses in copies: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    assert statistics.median(ratios) < MOST_COPIES, ratios
