"""What goes wrong while training: all processes end, soon, with one reason told, and none is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.killing import Run
from tests.waiting import until

SMALL = [
    *("MODEL.DEPTH=1", "MODEL.EMBED_DIM=32", "MODEL.NUM_HEADS=2", "MODEL.PATCH_SIZE=16", "DATA.IMAGE_SIZE=32"),
    *("DATA.IMAGE_CHANNELS=3", "DATA.DATASET=imagenet2012", "DATA.NUM_WORKERS=1", "DATA.BATCH_SIZE=4"),
]
ENDLESS = ["TRAIN.NUM_EPOCHS=100000", "SAVE_FREQ=100000", "REPORT_FREQ=1"]
ALL_THERE = "a launcher, two ranks, a loading process each; or one process and its own"


@pytest.mark.parametrize(
    ("processes", "to_all"),
    [(0, True), *(pytest.param(2, to_all, marks=pytest.mark.slow) for to_all in (False, True))],
    ids=["a single process", "to the launcher", "to the whole group"],
)
def test_ctrl_c_ends_all(start: Callable[..., Run], imagenet: Path, processes: int, to_all: bool) -> None:
    run = start(*SMALL, *ENDLESS, f"DATA.DATA_PATH={imagenet}", ngpus=processes)
    run.wait_for_updates()
    assert len(run.alive()) >= (5 if processes else 2), ALL_THERE
    if to_all:
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        run.process.send_signal(signal.SIGINT)
    done = run.end(15)
    assert done.code == 130, done.text
    assert "Interrupted" in done.out
    assert "Traceback" not in done.text
    until(lambda: not run.alive(), 5)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphans(start: Callable[..., Run], imagenet: Path) -> None:
    run = start(*SMALL, *ENDLESS, f"DATA.DATA_PATH={imagenet}")
    run.wait_for_updates()
    assert len(run.alive()) >= 5, ALL_THERE
    run.process.kill()
    until(lambda: not run.alive(), 10)
    text = run.end(10).text
    assert "frame #" not in text, text
