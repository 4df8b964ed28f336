"""A run's folder or a file of it that is removed or moved while the run trains."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.killing import Run, reported
from tests.program import Started, Vitamp, metrics
from tests.waiting import until

UPDATES = 700
WORDS = ("TRAIN.NUM_EPOCHS=30", f"TRAIN.MAX_UPDATES={UPDATES}", "REPORT_FREQ=1", "VALIDATE_FREQ=5", "SAVE_FREQ=5")

STANDING = ("TRAIN.BASE_LR=0", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.END_LR=0")
"""The first validation stays the best."""


def remove(run: Path) -> None:
    while run.exists():  # the run may write a file while its folder is removed
        shutil.rmtree(run, ignore_errors=True)
        if not (run / "config.yaml").exists():
            return


LOSSES: dict[str, Callable[[Path], object]] = {
    "folder removed": remove,
    "folder moved": lambda run: run.rename(run.with_name("moved")),
    "metrics removed": lambda run: (run / "metrics.jsonl").unlink(),
    "settings removed": lambda run: [(run / name).unlink() for name in ("config.yaml", "run.json")],
}


def check_complete(run: Path, text: str) -> None:
    assert {"config.yaml", "run.json", "log.txt", "metrics.jsonl", "checkpoints"} <= {one.name for one in run.iterdir()}
    assert [line["update"] for line in metrics(run, "train")] == [*range(1, UPDATES + 1)]
    assert "vitamp 0." in (run / "log.txt").read_text().partition("Epoch[")[0], "the first lines are there again"
    for name in ("metrics.jsonl", "log.txt"):
        assert text.count(f"{run / name} was removed or moved while the run was writing it; all its lines") <= 1


@pytest.mark.parametrize("loss", LOSSES)
def test_files_that_go_are_written_again(begin: Callable[..., Started], tmp_path: Path, loss: str) -> None:
    run = tmp_path / "run"
    started = begin("-output", run, *WORDS)
    until(lambda: reported(run) > 20 or not started.running(), 60)
    LOSSES[loss](run)
    done = started.end(120).expect(0)
    check_complete(run, done.text)
    assert ("metrics.jsonl was removed or moved" in done.text) == (loss != "settings removed")
    lacks = "; everything is in" if (run / "tensorboard").exists() else f"; {run} lacks later points in tensorboard,"
    assert lacks in done.out.splitlines()[-1]


def test_two_ranks_write_again_what_goes(start: Callable[..., Run]) -> None:
    run = start(*WORDS, "-device", "cpu", "-batch_size", 16)
    run.wait_for_updates(20)
    remove(run.folder)
    done = run.end(180).expect(0)
    check_complete(run.folder, done.text)
    assert (run.folder / "ranks" / "1.log").exists()


def test_checkpoint_that_is_lost_is_named(begin: Callable[..., Started], vitamp: Vitamp, tmp_path: Path) -> None:
    run, best = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000000220"
    started = begin("-output", run, *WORDS, *STANDING)
    until(lambda: reported(run) > 250 or not started.running(), 60)
    shutil.rmtree(best)
    done = started.end(120).expect(0)
    assert f"; {run} lacks checkpoints/{best.name}, removed or not written while" in done.out.splitlines()[-1]
    assert "everything is in" not in done.out
    (run / "log.txt").unlink()
    (run / "run.json").unlink()
    again = vitamp("-resume", run, f"TRAIN.MAX_UPDATES={UPDATES + 1}", code=0)
    assert f"Missing in {run}, although the run had written it: run.json, log.txt" in again.err
