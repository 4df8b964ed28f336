"""A disk that is full, read-only or broken for a while: training says so, goes on, and loses no earlier checkpoint."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint import saver as saving
from engine.checkpoint.find import newest_good
from engine.checkpoint.folder import write_files
from engine.checkpoint.saver import HostCopy, Saver, Snapshot
from engine.checkpoint.state import check_room, least_size, snapshot_of
from engine.measure.meters import Best, Position
from engine.report.reporter import Board
from tests.engine.small import build, train
from tests.faults.killing import ENDLESS, Run, reported
from tests.program import Started, Vitamp, metrics
from tests.program import made_meta as meta
from tests.saved import save_checkpoint
from tests.waiting import until
from utils.config.schema import Config
from utils.errors import TrainingError, UserError
from utils.log import log, log_into, start_log
from utils.standard_output import LineFile, OutputError, watch_standard_output
from vitamp.checkpoints import MODEL, inspect, read_index, verify

TENSORS = {MODEL: {"weight": torch.arange(50_000.0)}}  # 200 kB


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leave no byte free."""
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 1024)

    def make_room(self) -> None:
        self._filler.unlink()

    def freeze(self, part: Path) -> None:
        """Make a folder read-only, as a file system does by itself when its disk has errors."""
        _mount("--bind", part, part)
        _mount("-o", "remount,ro,bind", part)

    def thaw(self, part: Path) -> None:
        subprocess.run(["umount", str(part)], check=True)


def _mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A tmpfs of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"needs to mount a small tmpfs{'' if os.getuid() == 0 else ', which only root may'}")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--recursive", "--lazy", str(folder)], check=True)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*"))


def test_full_in_mid_run_and_free_again(start: Callable[..., Run], disk: SmallDisk) -> None:
    """Everything the run writes is on that disk: nothing is lost but the checkpoints of that time."""
    folder = disk.folder / "run"
    run = start(*ENDLESS, "REPORT_FREQ=5", "SAVE_EVERY_UPDATES=40", "KEEP_LAST=2", folder=folder, ngpus=0)
    root = folder / "checkpoints"
    until(lambda: len(list(root.glob("step-*"))) == 2, 90)
    disk.fill()
    assert run.process.stderr is not None
    told = ""
    while "could not be written" not in told:
        line = run.process.stderr.readline()
        assert line, f"it ended: {told}"
        told += line
    kept = sorted(root.glob("step-*"))
    assert len(kept) == 2
    for checkpoint in kept:
        verify(inspect(checkpoint))
    assert not list(root.glob(".tmp-*")), "a half-written one would take the room of the next"
    disk.make_room()
    until(lambda: max(root.glob("step-*")).name > max(kept).name, 60)
    until(lambda: reported(folder) > int(max(kept).name[5:]) + 100, 60)
    run.process.send_signal(signal.SIGTERM)
    told += run.end(60).expect(143).err
    assert "checkpoints: No space left on device, " in told, "the system's own words and the place"
    assert told.count("metrics.jsonl cannot be written") == 1
    assert "Traceback" not in told
    updates = [line["update"] for line in metrics(folder, "train")]
    due = [1] + [44 * epoch + step for epoch in range(len(updates)) for step in (*range(5, 41, 5), 44)]
    assert updates == due[: len(updates)], "lines of that time were written later, none twice"
    newest = newest_good(root)
    assert newest is not None
    assert newest.folder.name == read_index(root)["last"]


@pytest.mark.slow
def test_a_run_that_ends_unsaved_has_failed(
    begin: Callable[..., Started], vitamp: Vitamp, tiny: Path, disk: SmallDisk
) -> None:
    """The place of the checkpoints becomes read-only in mid-run; before a start it is seen at once."""
    folder = disk.folder / "run"
    words = ("-output", folder, "TRAIN.NUM_EPOCHS=40", "SAVE_FREQ=100", "VALIDATE_FREQ=100", "SAVE_EVERY_UPDATES=1000")
    assert vitamp("-cfg", tiny, *words, "TRAIN.MAX_UPDATES=10").code == 0
    before = {path: path.read_bytes() for path in (folder / "checkpoints" / "step-000000010").iterdir()}
    run = begin(*words, "-resume", "auto", "TRAIN.MAX_UPDATES=900", "REPORT_FREQ=5")
    until(lambda: reported(folder) > 20, 60)
    disk.freeze(folder / "checkpoints")
    done = run.end(120).expect(1)
    assert "the state after update 900 could not be saved and is lost" in done.err
    assert "Read-only file system" in done.err
    assert "The last checkpoint is step-000000010" in done.err
    assert {path: path.read_bytes() for path in before} == before
    again = vitamp("-cfg", tiny, *words, "-resume", "auto", "TRAIN.MAX_UPDATES=20", code=2)
    assert "cannot be written (Read-only file system)" in again.err
    disk.thaw(folder / "checkpoints")
    vitamp("-cfg", tiny, *words, "-resume", "auto", "TRAIN.MAX_UPDATES=20", code=0)
    assert names(folder / "checkpoints")[-1] == "step-000000020"


@pytest.mark.parametrize("harm", ["read-only", "full", "a file", "a link to a folder that is gone"])
def test_unwritable_checkpoints_in_a_writable_run_are_seen_before_training(
    vitamp: Vitamp, tiny: Path, disk: SmallDisk, tmp_path: Path, harm: str
) -> None:
    folder, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    folder.mkdir()
    said = {"read-only": "Read-only file system", "full": "No space left on device", "a file": "Not a directory"}
    if harm in ("read-only", "full"):
        other = disk.folder / "other"
        other.mkdir()
        root.symlink_to(other)
        disk.fill() if harm == "full" else disk.freeze(other)
    elif harm == "a file":
        root.touch()
    else:
        root.symlink_to(tmp_path / "gone")
    words = ("-cfg", tiny, "-output", folder, "-resume", "auto", "TRAIN.NUM_EPOCHS=1")
    done = vitamp(*words, code=2)
    assert f"{root}" in done.err
    assert said.get(harm, "No such file or directory") in done.err
    assert "Epoch[" not in done.out
    root.unlink()
    assert vitamp(*words).code == 0


def test_disk_with_too_little_room_for_a_checkpoint_is_seen_before_training(
    vitamp: Vitamp, tiny: Path, disk: SmallDisk
) -> None:
    run = disk.folder / "run"
    words = ("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=5", "TRAIN.MODEL_EMA=true", "MODEL.DEPTH=4")
    done = vitamp(*words, "MODEL.EMBED_DIM=64", code=2)
    assert f"{run}/checkpoints: its disk has 1.0" in done.err
    assert "MB free, and one checkpoint needs 3.2" in done.err
    assert "Epoch[" not in done.out
    assert not (run / "config.yaml").exists(), "the same command may be given again"
    vitamp(*words, "MODEL.EMBED_DIM=16", code=0)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lamb", "adafactor", "adafactorbv", "muon", "adan"])
def test_room_asked_for_is_never_more_than_a_checkpoint_takes(tiny: Path, tmp_path: Path, name: str) -> None:
    """The moments are made by the first update."""
    ready = build(tiny, TRAIN__OPTIMIZER__NAME=name, TRAIN__MODEL_EMA=True, MODEL__EMBED_DIM=64, MODEL__DEPTH=4)
    least = least_size(ready.parts)
    train(ready, 1)
    position, best = Position(), Best()
    snapshot = snapshot_of(ready.parts, position, best, 32, {}, meta(1))
    (root := tmp_path / "checkpoint").mkdir()
    write_files(root, snapshot.tensors, snapshot.state)
    taken = sum(file.stat().st_size for file in root.iterdir())
    assert least <= taken
    if name == "adamw":
        assert least > 0.95 * taken


def test_half_written_checkpoint_counts_as_room(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(tiny).parts
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=20, f_bfree=10, f_frsize=full.f_frsize))
    with pytest.raises(UserError, match="its disk has 41 kB free, and one checkpoint needs 46 kB"):
        check_room(tmp_path, parts)
    (hidden := tmp_path / ".tmp-7-4711").mkdir()
    (hidden / "state.pt").write_bytes(bytes(40_000))
    check_room(tmp_path, parts)


def test_a_disk_without_inodes_is_not_called_full(
    vitamp: Vitamp, tiny: Path, disk: SmallDisk, said: pytest.LogCaptureFixture
) -> None:
    _mount("-o", "remount,size=100m,nr_inodes=20", disk.folder)
    run, words = disk.folder / "run", "No space left on device: it has no inode for another file"
    saver = Saver(disk.folder, Config(), pinned=False)
    for number in range(20):
        with contextlib.suppress(OSError):
            (disk.folder / f"{number}").touch()
    assert words in vitamp("-cfg", tiny, "-output", run, code=2).err
    saver.save(Snapshot(TENSORS, {}, meta(1), None))
    until(lambda: bool(saver.report()) or "could not be written" in said.text, 30)
    assert words in said.text


@pytest.mark.parametrize("what", [MODEL, "state.pt", "meta.json"])
def test_the_systems_error_is_kept_whichever_file_it_hits(disk: SmallDisk, what: str) -> None:
    """torch and safetensors hide it in errors of their own kinds."""
    root = disk.folder
    save_checkpoint(root, 1, {MODEL: {"weight": torch.zeros(10)}}, {}, meta(1))
    big = torch.zeros(500_000)
    tensors = {MODEL: {"weight": big if what == MODEL else torch.zeros(10)}}
    state = {"moments": big} if what == "state.pt" else {}
    long = {"classes": ["x" * 1000] * 2000} if what == "meta.json" else {}
    with pytest.raises(OSError, match="No space left") as caught:
        save_checkpoint(root, 2, tensors, state, {**meta(2), **long})
    assert caught.value.errno == errno.ENOSPC
    assert names(root) == ["step-000000001"]
    verify(inspect(root / "step-000000001"))


@pytest.mark.parametrize("background", [True, False])
def test_tried_again_with_the_next_save(
    disk: SmallDisk, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Pruned only once the new one is safe: KEEP_LAST 1 keeps the old one while there is no room for another."""
    root = disk.folder / "checkpoints"
    if not background:
        monkeypatch.setattr(HostCopy, "take", lambda *_: None)  # no memory
    saver = Saver(root, Config(KEEP_LAST=1), pinned=False)
    for update in (1, 2, 3):
        if update == 2:
            until(lambda: bool(saver.report()) or "Checkpoint step-000000001" in said.text, 30)
            disk.fill()
        if update == 3:
            disk.make_room()
        saver.save(Snapshot(TENSORS, {}, meta(update), None))
        if update == 2:
            until(lambda: bool(saver.report()) or "could not be written" in said.text, 30)
            assert names(root) == ["index.json", "step-000000001"]
            assert read_index(root)["last"] == "step-000000001"
    saver.finish()
    assert names(root) == ["index.json", "step-000000003"]
    assert said.text.count("The checkpoint of update 2 could not be written") == 1


def test_an_end_without_room_tells_what_is_left_and_uses_room_that_comes(
    disk: SmallDisk, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(saving, "PAUSES_AT_THE_END", (0.01, 0.01))
    (root := tmp_path / "checkpoints").symlink_to(disk.folder)  # on another disk than the run
    saver = Saver(root, Config(), pinned=False)
    saver.save(Snapshot(TENSORS, {}, meta(1), None))
    saver.finish()
    disk.fill()
    saver.save(Snapshot(TENSORS, {}, meta(2), None))
    with pytest.raises(TrainingError, match=r"update 2 .* No space left .* 0 kB free.* last checkpoint is step-0+1;"):
        saver.finish()
    assert "Earlier checkpoints are untouched." in said.text, "no later save is promised"
    monkeypatch.setattr(time, "sleep", lambda _: disk.make_room())
    saver.finish()
    verify(inspect(root / "step-000000002"))


def test_a_program_error_is_not_taken_for_the_disk(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Config(), pinned=False)
    saver.save(Snapshot(TENSORS, {}, {**meta(1), "classes": object()}, None))
    with pytest.raises(TypeError, match="not JSON"):
        saver.finish()
    assert names(tmp_path) == []


def test_a_run_whose_standard_streams_are_full_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    watch_standard_output()
    start_log(to_terminal=True, survives_closed_pipe=True)
    log.warning("early")
    with pytest.raises(OutputError):
        log.info("a dry run, which has no other output")
    log_into(tmp_path, rank=0)
    log.info("late")
    for text in ("early", "standard error cannot be written (No space", "late", "standard output cannot be written"):
        assert (tmp_path / "log.txt").read_text().count(text) == 1
    start_log(to_terminal=False)


def test_lines_wait_for_room(disk: SmallDisk, said: pytest.LogCaptureFixture) -> None:
    path = disk.folder / "metrics.jsonl"
    lines = LineFile(path)
    lines.add(json.dumps({"n": 0}))
    disk.fill()
    for number in range(1, 101):
        lines.add(json.dumps({"n": number, "text": "x" * 100}))
    assert said.text.count("cannot be written (No space left on device)") == 1
    disk.make_room()
    lines.add(json.dumps({"n": 101}))
    lines.close()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == list(range(102))
    assert "can be written again" in said.text


def test_lines_that_are_lost_are_counted(disk: SmallDisk, said: pytest.LogCaptureFixture) -> None:
    disk.fill()
    lines = LineFile(disk.folder / "metrics.jsonl")
    for _ in range(3):
        lines.add("x" * 5000)
    lines.close()
    assert "its last 3 lines could not be written (No space left on device)" in said.text


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_ends_on_a_full_disk_with_one_warning(
    disk: SmallDisk, said: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(disk.folder / "tensorboard", 0)
    for update in range(1, 301):
        if update == 100:
            board.flush()
            disk.fill()
        board.add("train/loss", 1.0 / update, update)
        if update % 40 == 0:
            board.flush()
    board.close()
    assert said.text.count("cannot be written (No space left on device): TensorBoard shows no later points") == 1
    assert "Traceback" not in capfd.readouterr().err
    found = EventAccumulator(str(disk.folder / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")][:99] == list(range(1, 100))
