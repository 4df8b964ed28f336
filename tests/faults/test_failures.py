"""What goes wrong while training: all processes end, soon, with one reason told, and none is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from datasets import EpochOrder
from tests.faults.killing import Run
from tests.waiting import until

SMALL = [
    *("MODEL.DEPTH=1", "MODEL.EMBED_DIM=32", "MODEL.NUM_HEADS=2", "MODEL.PATCH_SIZE=16", "DATA.IMAGE_SIZE=32"),
    *("DATA.IMAGE_CHANNELS=3", "DATA.DATASET=imagenet2012", "DATA.NUM_WORKERS=1", "DATA.BATCH_SIZE=4"),
]
ENDLESS = ["TRAIN.NUM_EPOCHS=100000", "SAVE_FREQ=100000", "REPORT_FREQ=1"]
ALL_THERE = "a launcher, two ranks, a loading process each; or one process and its own"
# Loaded by every Python that has its folder in PYTHONPATH: rank 1's fifth update finds a bug.
BROKEN_RANK = """
import os
if os.environ.get("RANK") == "1":
    import torch
    step, calls = torch.optim.AdamW.step, []
    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("rank one has had enough")
        return step(*args, **kwargs)
    torch.optim.AdamW.step = failing
"""


@pytest.mark.slow
def test_a_failing_rank_ends_all_and_tells_why_once(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(BROKEN_RANK)
    run = start(*ENDLESS, PYTHONPATH=str(tmp_path / "hook"))
    done = run.end(60)
    assert done.code == 1, done.text
    assert done.text.count("RuntimeError: rank one has had enough") == 1
    assert done.text.count("Traceback") == 1
    assert "engine/update.py" in done.err or "engine/amp/precision.py" in done.err, "where in our code it happened"
    assert "rank one has had enough" in (tmp_path / "run" / "ranks" / "1.log").read_text()
    until(lambda: not run.alive(), 5)


FAILS_ON_RANK_1 = """
import os
from vitamp import loss
if os.environ.get("RANK") == "1":
    raise ValueError("only rank one")
@loss
def mine(logits, targets):
    return logits.sum()
"""


@pytest.mark.slow
def test_an_error_before_joining_is_printed_once(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAILS_ON_RANK_1)
    done = start(*ENDLESS, "-use", tmp_path / "own.py").end(60)
    assert done.code == 2, done.text
    assert len(re.findall(r"error: rank 1 on \S+ \(process \d+\): .*only rank one", done.err)) == 1, done.text
    assert "Traceback" not in done.text


@pytest.mark.slow
def test_a_stopped_rank_ends_with_the_run(start: Callable[..., Run]) -> None:
    run = start(*ENDLESS, "DIST.TIMEOUT=0.1")
    run.wait_for_updates()
    os.kill(run.ranks()[1], signal.SIGSTOP)
    done = run.end(20)
    assert done.code == 1, done.text
    assert "has sent no heartbeat for 6 s" in done.err
    until(lambda: not run.alive(), 5)


@pytest.mark.slow  # test_data_faults.py tests MAX_BAD with processes that start faster
@pytest.mark.parametrize("processes", [0, 2], ids=["alone", "two processes"])
def test_an_unreadable_image_is_named(
    start: Callable[..., Run], imagenet: Path, tmp_path: Path, processes: int
) -> None:
    """By the one process that meets it, which is not the one that usually speaks."""
    data = tmp_path / "data"
    shutil.copytree(imagenet, data)
    names = (data / "train_list.txt").read_text().splitlines()
    last_rank = EpochOrder(
        len(names), 4, 1, rank=max(processes, 1) - 1, world=max(processes, 1), seed=0, drop_last=True
    )
    ((share,), *_) = last_rank.windows(epoch=2)
    broken = names[share.indices[0]].split()[0]
    (data / broken).write_bytes(b"no picture")
    run = start(*SMALL, *ENDLESS, f"DATA.DATA_PATH={data}", "DATA.MAX_BAD=0", ngpus=processes)
    done = run.end(90)
    assert done.code == 1, done.text
    assert done.err.count(f"The last: {data / broken} (") == 1, done.text
    assert "Traceback" not in done.text
    until(lambda: not run.alive(), 5)


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
