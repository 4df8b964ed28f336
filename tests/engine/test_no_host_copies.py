"""A normal update never makes the host wait for a value of the device's."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.amp.overflow import OverflowWatch
from tests.engine.amp.modes import MODES
from tests.engine.small import build, train, windows

# What a read-back looks like to the dispatcher: `.item()`, `bool(t)`, `.tolist()` of one value, masks as indices.
READ_BACKS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::masked_select"}
PRECISIONS = [{}, MODES["O1 bf16"], MODES["O1 fp16"]]
OTHERS = [
    *(MODES[name] for name in MODES if name not in ("O1 bf16", "O1 fp16")),
    {**MODES["O1 fp16"], "AMP__DECR_EVERY_N_NAN_OR_INF": 2},
    {**MODES["O2 fp16"], "AMP__USE_DYNAMIC_LOSS_SCALING": "false"},
]
USUAL = {"TRAIN__ACCUM_ITER": 2, "TRAIN__MODEL_EMA": "true"}


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def read_backs(ready) -> set[str]:
    """Those of two updates, seen by the profiler and by the dispatcher; the first updates may set things up."""
    source = windows(ready)
    train(ready, 2, source)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, Listener() as listener:
        train(ready, 2, source, done=2)
    events = profiler.events() or []
    seen = {event.name for event in events if not _counts_its_steps(event)} | listener.names
    assert "aten::linear" in seen, "nothing was recorded"
    return seen & READ_BACKS


def _counts_its_steps(event: Any) -> bool:
    """On a CPU the fused kernel itself looks up how many steps it has made; a GPU's does that on the GPU."""
    while event is not None:
        if event.name == "aten::_fused_adamw_":
            return True
        event = event.cpu_parent
    return False


@pytest.mark.parametrize(
    ("optimizer", "clip", "precision"),
    [*product(("AdamW", "SGD"), ("null", "1.0"), PRECISIONS), *product(("AdamW",), ("1.0",), OTHERS)],
)
def test_update_copies_nothing_to_the_host(tiny: Path, optimizer: str, clip: str, precision: dict[str, Any]) -> None:
    ready = build(tiny, **precision, **USUAL, TRAIN__GRAD_CLIP=clip, TRAIN__OPTIMIZER__NAME=optimizer)
    scaled = ready.parts.precision.scaler.is_enabled()
    assert (ready.parts.callback(OverflowWatch) is not None) is scaled, "on wherever something is scaled"
    assert read_backs(ready) == set()
    reading = ready.parts.meters.read(ready.parts.precision.scale_tensor(), 0.0)
    assert reading.skipped == 0, "a normal update was meant"


def test_overflowed_update_copies_nothing_to_the_host(tiny: Path) -> None:
    ready = build(tiny, AMP__ENABLED="true", AMP__DTYPE="fp16", AMP__INIT_LOSS_SCALING=1e30)
    ready.parts.leave_out(OverflowWatch)  # replaying a skipped update does read it, and is meant to
    assert read_backs(ready) == set()
    assert ready.parts.meters.read(ready.parts.precision.scale_tensor(), 0.0).skipped == 4
