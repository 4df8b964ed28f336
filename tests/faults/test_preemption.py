"""Told to stop, a run saves and leaves, in whatever phase it is; resumed, it is the run that was not stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.machine import stopping
from engine.machine.stopping import Deadline, Stopped, Stopping
from engine.measure.meters import Position
from engine.trainer import Trainer
from tests.faults.killing import ENDLESS, Run, drawn_curves, reported
from tests.program import ROOT, Started, Vitamp, last_weights, metrics, train_tiny
from tests.waiting import until
from utils.distributed.world import ALONE

# 12 updates an epoch; every fifth is followed by a validation in batches of two, which takes a while.
WORDS = (
    *("DATA.BATCH_SIZE=60", "-accum_iter", 2, "-batch_size_eval", 2, "TRAIN.MODEL_EMA=true", "MODEL.DROPOUT=0.1"),
    *("REPORT_FREQ=1", "VALIDATE_EVERY_UPDATES=5", "SAVE_EVERY_UPDATES=4", "KEEP_LAST=0"),
)
GO_ON = ("-resume", "auto")
SLOW_UPDATES = (
    *("DATA.DATASET=synthetic", "DATA.IMAGE_SIZE=64", "DATA.SYNTHETIC_TRAIN=256", "DATA.BATCH_SIZE=32"),
    *("MODEL.EMBED_DIM=128", "MODEL.DEPTH=4", "REPORT_FREQ=1", "TRAIN.NUM_EPOCHS=1000", "SAVE_FREQ=1000"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("undisturbed"), *WORDS)


def told(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if line["event"] != "run"]


def lines(run: Path, event: str) -> list[int]:
    """The updates of all whole lines of a kind, while the run goes on."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    return [line["update"] for line in found if line["event"] == event]


PHASES: dict[str, Callable[[Path], bool]] = {
    "in an epoch": lambda run: reported(run) >= 7,
    "in a validation in an epoch": lambda run: reported(run) >= 10,
    "in a validation at the end of an epoch": lambda run: 12 in lines(run, "epoch"),
    "in the last validation": lambda run: 24 in lines(run, "epoch"),
    "while saving": lambda run: any((run / "checkpoints").glob(".tmp-*")),
}


@pytest.mark.parametrize(
    ("phase", "number", "code"),
    [
        ("in an epoch", signal.SIGTERM, 143),
        pytest.param("in a validation in an epoch", signal.SIGUSR1, 143, marks=pytest.mark.slow),
        pytest.param("in a validation at the end of an epoch", signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param("in the last validation", signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param("while saving", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_stopped_in_any_phase_it_saves_and_goes_on(
    begin: Callable[..., Started], undisturbed: Path, tmp_path: Path, phase: str, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    process = begin("-output", run, *GO_ON, *WORDS)
    until(lambda: PHASES[phase](run) or not process.running(), 60)
    os.kill(process.pid, number)
    done = process.end(30).expect(code)
    assert "saving after update" in done.out
    stopped = metrics(run)[-1]
    assert (stopped["event"], stopped["what"]) == ("run", "paused")
    saved = run / "checkpoints" / f"step-{stopped['update']:09d}"
    position = torch.load(saved / "state.pt", weights_only=True)["position"]
    assert position["update"] == stopped["update"]
    if "validation" in phase:
        assert position["validated"] < position["update"], "the validation was left, not waited for"
    begin("-output", run, *GO_ON, *WORDS).end(60).expect(0)
    assert told(run) == told(undisturbed)
    assert last_weights(run) == last_weights(undisturbed)
    assert drawn_curves(run) == drawn_curves(undisturbed)


def test_before_the_first_update_there_is_nothing_to_save(begin: Callable[..., Started], tmp_path: Path) -> None:
    process = begin("-output", tmp_path / "run", *SLOW_UPDATES)
    until(lambda: lines(tmp_path / "run", "run") != [], 60)
    os.kill(process.pid, signal.SIGTERM)
    began = time.monotonic()
    done = process.end(30).expect(143)
    assert "ended by SIGTERM; nothing was saved yet" in done.err
    assert time.monotonic() - began < 5
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow  # a run of long updates; one Ctrl-C is tested beside
def test_a_second_ctrl_c_leaves_at_once(begin: Callable[..., Started], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin("-output", run, *SLOW_UPDATES, "DATA.SYNTHETIC_TRAIN=25600", "TRAIN.ACCUM_ITER=8")
    until(lambda: reported(run) >= 1, 90)
    # Python hears of one signal where two come within one long call of torch's; an update is many such calls.
    end = time.monotonic() + 20
    while process.running() and time.monotonic() < end:
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.05)
    done = process.end(30)
    assert done.code == 130, done.text
    assert lines(run, "run") == [0], "not told that it paused"
    assert not list((run / "checkpoints").glob("step-*"))


def test_what_a_killed_run_wrote_last_is_written_anew(
    vitamp: Vitamp, undisturbed: Path, tiny: Path, tmp_path: Path
) -> None:
    """Lines of updates that are made again, a line cut in two, and what a dying disk leaves."""
    run = tmp_path / "run"
    vitamp("-cfg", tiny, "-output", run, *WORDS, "TRAIN.MAX_UPDATES=8", code=0)
    kept = metrics(run, "train")
    with (run / "metrics.jsonl").open("ab") as file:
        for update in (b"9", b"10"):
            file.write(b'{"event": "train", "epoch": 1, "update": %s, "loss": 9, "perf": {}}\n' % update)
        file.write(b'{"event": "train", "upd\xff\x00')
    vitamp("-resume", run, "TRAIN.MAX_UPDATES=9", code=0)
    ninth = [line for line in metrics(undisturbed, "train") if line["update"] == 9]
    assert metrics(run, "train") == [*kept, *ninth]


@pytest.mark.parametrize("how", ["a rank", "hang-up", pytest.param("hang-up, nohup", marks=pytest.mark.slow)])
def test_one_was_told_and_all_stop(start: Callable[..., Run], how: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in how else signal.SIG_DFL)
    run = start(*ENDLESS, "REPORT_FREQ=1")
    signal.signal(signal.SIGHUP, before)
    run.wait_for_updates()
    assert len(run.ranks()) == 2
    for pid in (run.process.pid, *(run.ranks() if "nohup" in how else ())):
        os.kill(pid, signal.SIGHUP if "hang-up" in how else 0)
    if how != "hang-up":
        run.wait_for_updates(reported(run.folder) + 30)
        os.kill(run.ranks()[1], signal.SIGUSR1)
    done = run.end(60)
    assert done.code == 143, done.text
    stopped = metrics(run.folder)[-1]
    assert (stopped["event"], stopped["what"]) == ("run", "paused")
    assert (run.folder / "checkpoints" / f"step-{stopped['update']:09d}" / "meta.json").exists()
    assert done.text.count("Asked to stop") == 1
    run.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "whom"), [(signal.SIGTERM, "torchrun"), (signal.SIGUSR1, "a rank")])
def test_under_torchrun(start: Callable[..., Run], number: signal.Signals, whom: str) -> None:
    """Its own exit code is not ours to choose; what is saved is."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    run = start(*ENDLESS, "REPORT_FREQ=1", launcher=launcher)
    run.wait_for_updates()
    os.kill(run.process.pid if whom == "torchrun" else run.ranks()[0], number)
    done = run.end(60)
    assert done.code != 0, done.text
    stopped = metrics(run.folder)[-1]
    assert (stopped["event"], stopped["what"]) == ("run", "paused"), done.text
    run.nothing_is_left()


def test_a_launcher_kills_ranks_that_do_not_end(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open(os.path.join({str(tmp_path)!r}, 'rank' + os.environ['RANK']), 'w').close()\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "launcher.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from utils.distributed import launch\n"
        "launch.SECONDS_TO_SAVE = 1\n"
        f"sys.exit(launch.self_launch({str(tmp_path / 'deaf.py')!r}, [], 2))\n"
    )
    words = [sys.executable, str(tmp_path / "launcher.py")]
    launcher = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(lambda: (tmp_path / "rank0").exists() and (tmp_path / "rank1").exists(), 60)
        launcher.terminate()
        _, said = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert launcher.returncode == 143, said
    assert "did not exit within 1 s of SIGTERM" in said


def test_the_time_given_leaves_room_for_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    now, to_save = [100.0], [0.0]
    monkeypatch.setattr(stopping, "BEGAN", 100.0)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    deadline = Deadline(60.0, lambda: to_save[0])

    def after(seconds: float) -> bool:
        now[0] += seconds
        return deadline.passed()

    assert not any(after(1.0) for _ in range(40))
    to_save[0] = 8.0
    assert not after(1.0), "41 s, two updates and two checkpoints make 59"
    assert after(1.0)
    to_save[0] = 0.0
    assert not after(1.0)
    assert after(6.0), "updates have become slow: another two might be too many"
    assert not Deadline(None, lambda: 1e9).passed()
    now[0], deadline = 100.0, Deadline(60.0, lambda: 0.0)
    now[0] = 120.0
    deadline.restart()
    assert not after(1.0), "compiling is no update"
    waiting: Any = SimpleNamespace(world=ALONE, _window=None, _stopping=Stopping(ALONE, lambda: True, timedelta()))
    waiting.position = Position(update=0)
    Trainer._stop_waiting(waiting)
    waiting.position.update = 1
    with pytest.raises(Stopped):
        Trainer._stop_waiting(waiting)


PHOTOS = (
    *("MODEL.PATCH_SIZE=16", "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3", "DATA.DATASET=imagenet2012"),
    *("DATA.NUM_WORKERS=1", "DATA.BATCH_SIZE=4", *ENDLESS, "REPORT_FREQ=1"),
)
ALL_THERE = "a launcher, two ranks, a loading process each; or one process and its own"


@pytest.mark.parametrize(
    ("processes", "to_all"),
    [(0, True), *(pytest.param(2, to_all, marks=pytest.mark.slow) for to_all in (False, True))],
    ids=["a single process", "to the launcher", "to the whole group"],
)
def test_ctrl_c_ends_all(start: Callable[..., Run], imagenet: Path, processes: int, to_all: bool) -> None:
    run = start(*PHOTOS, f"DATA.DATA_PATH={imagenet}", ngpus=processes)
    run.wait_for_updates()
    assert len(run.alive()) >= (5 if processes else 2), ALL_THERE
    if to_all:
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        run.process.send_signal(signal.SIGINT)
    assert "Interrupted" in run.end(15).expect(130).out
    until(lambda: not run.alive(), 5)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphans(start: Callable[..., Run], imagenet: Path) -> None:
    run = start(*PHOTOS, f"DATA.DATA_PATH={imagenet}")
    run.wait_for_updates()
    assert len(run.alive()) >= 5, ALL_THERE
    run.process.kill()
    until(lambda: not run.alive(), 10)
    text = run.end(10).text
    assert "frame #" not in text, text
