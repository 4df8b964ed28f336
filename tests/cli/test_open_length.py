"""Schedule wsd: a run that is made longer before its decay equals one that was as long from the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.program import Vitamp, metrics

WSD = ("TRAIN.LR_SCHEDULER.NAME=wsd", "TRAIN.MODEL_EMA=true")
PER_EPOCH = 44


@pytest.mark.slow
def test_run_made_longer_before_its_decay_equals_a_long_one(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    short, long, longer = tmp_path / "short", tmp_path / "long", tmp_path / "longer"
    done = vitamp("-cfg", tiny, "-output", short, *WSD, "TRAIN.NUM_EPOCHS=4", "KEEP_EVERY=2", "KEEP_LAST=1", code=0)
    assert "warm-up, then wsd: constant through epoch 3.2, then decaying (1 - sqrt) to 0; weight decay" in done.out
    assert "-resume" in done.out
    vitamp("-cfg", tiny, "-output", long, *WSD, "TRAIN.NUM_EPOCHS=6", code=0)
    checkpoint = short / "checkpoints" / f"step-{2 * PER_EPOCH:09d}"
    done = vitamp("-resume", checkpoint, "-output", longer, "TRAIN.NUM_EPOCHS=6", code=0)
    assert "epoch 3, 88 updates done; the next update's learning rate is 2.000e-03" in done.out
    assert "the schedule now spans 6 epochs instead of 4" in done.out
    model = Path("checkpoints") / f"step-{6 * PER_EPOCH:09d}" / "model.safetensors"
    assert (longer / model).read_bytes() == (long / model).read_bytes()
    rates = [line["lr"] for line in metrics(long, "train")]
    assert rates.count(max(rates)) == 18, "3.8 epochs of five reports, between warm-up and decay"
    assert rates[-1] < max(rates) / 20
