"""A normal update never makes the host wait for the GPU, whatever is switched on."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from datasets import Window
from engine.amp.op_lists import OpLists
from engine.amp.overflow import OverflowWatch
from engine.setup import ReadyToTrain
from tests.engine.small import build, train, windows
from tests.gpu.runs import PLACE, on_a_gpu_alone

pytestmark = on_a_gpu_alone

Words = dict[str, object]
FP32: Words = {"AMP__ENABLED": "false"}
BF16: Words = {"AMP__ENABLED": "true", "AMP__DTYPE": "bf16"}
FP16: Words = {"AMP__ENABLED": "true", "AMP__DTYPE": "fp16", "AMP__INIT_LOSS_SCALING": 1024}
EVERYTHING: Words = {
    "TRAIN__ACCUM_ITER": 2,
    "TRAIN__MODEL_EMA": "true",
    "TRAIN__MODEL_EMA_WARMUP": "true",
    "TRAIN__SMOOTHING": 0.1,
    "TRAIN__MIXUP_ALPHA": 0.8,
    "TRAIN__CUTMIX_ALPHA": 1.0,
    "MODEL__DROPOUT": 0.1,
    "MODEL__DROPPATH": 0.1,
    "REPORT_STAGES": "true",
    "TRAIN__GRAD_CHECKPOINT": "blocks",
}


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def updates(ready: ReadyToTrain) -> None:
    """Three that must not wait, after three that set things up. Loading is not what is tested here."""
    source = windows(ready)
    train(ready, 3, source)
    coming = itertools.islice(source, 3)
    loaded = [Window(window.shares, iter([batch for _, batch in window])) for window in coming]
    with waiting_is_an_error():
        train(ready, 3, iter(loaded), done=3)


@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("clip", ["null", "1.0"])
@pytest.mark.parametrize("precision", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_an_update(small: Path, precision: Words, clip: str, more: Words) -> None:
    ready = build(small, PLACE, TRAIN__GRAD_CLIP=clip, **precision, **more)
    updates(ready)
    reading = ready.parts.meters.read(ready.parts.precision.scale_tensor(), 0.0)
    assert (reading.skipped, reading.first_bad) == (0, -1), "normal updates were meant"


@pytest.mark.parametrize(
    "more",
    [
        {"AMP__LEVEL": "O2"},
        {"AMP__LEVEL": "NAIVE"},
        {"AMP__DECR_EVERY_N_NAN_OR_INF": 2},
        {"AMP__FP32_MODULES": "blocks.0.mlp"},
        {"TRAIN__RANDOM_ERASE_PROB": 0.5},
        {"TRAIN__OPTIMIZER__NAME": "SGD"},
        {"TRAIN__OPTIMIZER__NAME": "Adam"},
        {"TRAIN__MODEL_EMA": "true"},
    ],
    ids=lambda words: "-".join(map(str, next(iter(words.items())))),
)
def test_an_update_in_fp16_with(small: Path, more: Words) -> None:
    updates(build(small, PLACE, **{**FP16, **more}))


def test_an_update_with_lists(small: Path) -> None:
    lists: Words = {"AMP__CUSTOM_WHITE_LIST": "layer_norm", "AMP__CUSTOM_BLACK_LIST": "softmax"}
    with OpLists("cuda", ["layer_norm"], ["softmax"]):
        updates(build(small, PLACE, **FP16, **lists))


def test_an_overflow_is_skipped_without_waiting_either(small: Path) -> None:
    ready = build(small, PLACE, **{**FP16, "AMP__INIT_LOSS_SCALING": 1e30, "TRAIN__MODEL_EMA": "true"})
    ready.parts.leave_out(OverflowWatch)  # replaying a skipped update does wait, and is meant to
    updates(ready)
    assert ready.parts.meters.read(ready.parts.precision.scale_tensor(), 0.0).skipped == 6


@pytest.mark.parametrize("moves", [{}, {"DATA__SHIFT": 0.1, "DATA__ROTATE": 10, "DATA__CROP": "pad"}], ids=str)
def test_images_that_lie_on_the_gpu_come_without_waiting(small: Path, moves: Words) -> None:
    """Within an epoch; its first batch draws the epoch's random numbers."""
    ready = build(small, PLACE, **BF16, **moves)
    assert ready.train_set.in_memory
    source = windows(ready)
    train(ready, 3, source)
    with waiting_is_an_error():
        train(ready, 6, source, done=3)


def test_waiting_would_be_noticed(small: Path) -> None:
    ready = build(small, PLACE)
    before = ready.parts.criterion

    def curious(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = before(logits, labels)
        assert loss.item() > 0
        return loss

    ready.parts.criterion = curious
    with pytest.raises(RuntimeError, match="synchroniz"):
        updates(ready)
