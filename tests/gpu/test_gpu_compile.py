"""TRAIN.COMPILE on a GPU: the same training but for rounding, and the same names. A minute each: `-m "not slow"`
leaves them out."""

import json
from pathlib import Path

import pytest

from engine.compile import choice
from tests.gpu.runs import PLACE, Train, apart, far, on_a_gpu_alone

pytestmark = [on_a_gpu_alone, pytest.mark.slow]

WORDS = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.1", "SPEED=+fused", "TRAIN.MODEL_EMA=true")
FP16 = ("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1024")
FILES = ("model.safetensors", "ema.safetensors")
PATIENCE = 500
"""Seconds that a test waits for the compiler."""


@pytest.fixture(autouse=True)
def _tools() -> None:
    if missing := choice._missing_tool(PLACE):
        pytest.skip(missing)


@pytest.mark.parametrize(
    ("words", "told", "close"),
    [
        (["whole", "-amp", "bf16", "MODEL.DROPOUT=0.1", "TRAIN.ACCUM_ITER=2"], "all from images to loss", 0.05),
        (["blocks", "-amp", "off", "MODEL.DROPPATH=0.1"], "each block", 1e-3),
        (["whole", *FP16, "MODEL.DROPOUT=0.1", "TRAIN.ACCUM_ITER=2"], "all from", 0.02),
    ],
    ids=["whole", "blocks", "fp16"],
)
def test_compiled_it_is_the_same_training(
    train: Train, tmp_path: Path, words: list[str], told: str, close: float
) -> None:
    """Through the last micro-batch of an epoch, which is smaller, and a validation; then gone on with."""
    how, *rest = words
    every = (*WORDS, *rest, f"DATA.CACHE={tmp_path / 'cache'}", "TRAIN.NUM_EPOCHS=2", "DATA.DROP_LAST=false")
    written = train("written", *every, updates=60, timeout=PATIENCE)
    compiled = train("compiled", *every, f"TRAIN.COMPILE={how}", updates=60, timeout=PATIENCE)
    assert f"compile    {how} (as asked for)" in compiled.text
    assert f"Compiling {told}" in compiled.text
    assert compiled.choices["compile"] == how
    assert 0 < apart(compiled.losses, written.losses) < close
    for file in FILES:
        assert 0 < far(compiled.weights(file), written.weights(file)) < close
        assert not [name for name in compiled.weights(file) if "_orig_mod" in name]
    assert [line["skipped"] for line in compiled.of("train")] == [line["skipped"] for line in written.of("train")]
    meta = json.loads((compiled.checkpoint / "meta.json").read_text(encoding="utf-8"))
    assert meta["choices"]["compile"] == how


def test_auto_tells_what_it_chose_and_why(train: Train) -> None:
    """Without compiling anything: too few updates to repay it here, enough of them there."""
    few = train("few", "-amp")
    assert few.choices["compile"] == "none"
    assert "compile    none (auto: about 0 s saved in 12 updates, no more than 2 times the 60 s" in few.text
    many = train("many", "-amp", "-dry_run", "TRAIN.NUM_EPOCHS=100000", updates=None, timeout=PATIENCE)
    assert "compile    whole (auto: about 8,800 s saved in 4,400,000 updates, more than 2 times the 60 s" in many.text
