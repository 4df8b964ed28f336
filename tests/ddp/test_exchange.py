"""What DIST.BF16_GRADIENTS and DIST.STATIC_GRAPH do to the exchange of gradients, and what they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ddp.test_amp_ddp import NEVER, PLAIN_STEPS, UPDATES, alike, build_start, on_two, train
from utils.distributed.world import ALONE

ROUNDED = 2.0**-8
"""What bf16 leaves of a number's digits."""


def test_gradients_sent_in_bf16_are_summed_up_and_rounded(tiny: Path) -> None:
    first, second = on_two(tiny, {"DIST.BF16_GRADIENTS": "true", "TRAIN.ACCUM_ITER": "2"})
    alike(first, second)
    assert first["exchanges"] == UPDATES, "once an update"
    words = {**PLAIN_STEPS, "TRAIN.ACCUM_ITER": "4"}
    alone = train(tiny, words, ALONE, NEVER)
    moved = (alone["weights"] - build_start(tiny, words)).norm()
    off = (first["weights"] - alone["weights"]).norm() / moved
    assert 1e-5 < off < ROUNDED, "neither fp32, nor the mean, nor one rank's alone"


@pytest.mark.slow
def test_a_static_graph_changes_nothing_but_what_ddp_may_assume(tiny: Path) -> None:
    promised, _ = on_two(tiny, {"DIST.STATIC_GRAPH": "true"})
    without, _ = on_two(tiny, {})
    assert torch.equal(promised["weights"], without["weights"])
