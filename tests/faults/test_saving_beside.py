"""Saving beside training, and killed in the middle of it: what is saved is the run as it was, whole or not at all."""

import multiprocessing
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint import folder as disk
from engine.checkpoint import saver as saving
from engine.checkpoint.find import newest_good
from engine.checkpoint.folder import bring_back
from engine.checkpoint.saver import HostCopy, Saver, Snapshot
from tests.program import made_meta as meta
from tests.saved import names, save_checkpoint
from utils.config.schema import Config
from vitamp.checkpoints import MODEL, STATE, folder_name, inspect, verify
from vitamp.tensors import open_tensors, read_state


@dataclass(frozen=True)
class Gate:
    """Holds the writing thread back until it is opened."""

    open: threading.Event
    writing: threading.Event


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(threading.Event(), threading.Event())

    def wait(*args: Any) -> None:
        made.writing.set()
        assert made.open.wait(60)
        disk.write_files(*args)

    monkeypatch.setattr(saving, "write_files", wait)
    yield made
    made.open.set()


def test_what_is_written_is_what_was_when_it_was_saved(tmp_path: Path, gate: Gate) -> None:
    weight, moment = torch.arange(6.0).reshape(2, 3).t(), torch.ones(2, dtype=torch.bfloat16)
    state = {"moments": [moment, {"step": torch.tensor(3)}], "empty": torch.empty(0, 4), "plain": (1, "x", None)}
    saver = Saver(tmp_path, Config(), pinned=False)
    saver.save(Snapshot({MODEL: {"weight": weight}}, state, meta(1), None))
    assert gate.writing.wait(10)
    weight.zero_()  # training goes on
    moment.zero_()
    gate.open.set()
    saver.finish()
    found = verify(inspect(tmp_path / folder_name(1)))
    assert torch.equal(dict(open_tensors(found))["weight"], torch.arange(6.0).reshape(2, 3).t())
    read = read_state(found)
    assert torch.equal(read["moments"][0], torch.ones(2, dtype=torch.bfloat16))
    assert read["moments"][1]["step"].item() == 3
    assert read["empty"].shape == (0, 4)
    assert read["plain"] == (1, "x", None)
    assert (found.folder / STATE).stat().st_size < 10_000, "each tensor alone, not all the memory it stands in"


def test_one_at_a_time_and_the_wait_is_counted(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    """By a clock that stands still but for the wait."""
    now = [0.0]
    monkeypatch.setattr(saving.time, "perf_counter", lambda: now[0])

    def let_it_write() -> None:
        assert waiting.wait(60)
        now[0] += 7
        gate.open.set()

    saver, waiting = Saver(tmp_path, Config(), pinned=False), threading.Event()
    wait_for_writer = saver.wait_for_writer
    monkeypatch.setattr(saver, "wait_for_writer", lambda: waiting.set() or wait_for_writer())
    opener = threading.Thread(target=let_it_write)
    weight = torch.ones(4)
    saver.save(Snapshot({MODEL: {"weight": weight}}, {}, meta(1), None, 0.0))
    assert gate.writing.wait(10)
    waiting.clear()
    opener.start()
    weight.fill_(2)
    saver.save(Snapshot({MODEL: {"weight": weight}}, {}, meta(2), None, 0.0))
    opener.join()
    saver.finish()
    for update, pause in ((1, 0), (2, 7)):  # the second waited for the first
        assert re.search(rf"{folder_name(update)}: .*; training paused for {pause}\.000 s\.", said.text)
        found = verify(inspect(tmp_path / folder_name(update)))
        assert dict(open_tensors(found))["weight"].tolist() == [update] * 4


def test_a_failed_run_lets_its_last_checkpoint_be_written(tmp_path: Path, gate: Gate) -> None:
    saver = Saver(tmp_path, Config(), pinned=False)
    saver.save(Snapshot({MODEL: {"weight": torch.ones(4)}}, {}, meta(1), None))
    threading.Timer(0.2, gate.open.set).start()
    saver.finish_after_failure()
    verify(inspect(tmp_path / folder_name(1)))


def test_saving_without_memory_for_a_copy_takes_place_in_the_foreground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object, **_named: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(torch, "empty", failing)
    saver, weight = Saver(tmp_path, Config(), pinned=False), torch.ones(4)
    for update in (1, 2):
        saver.save(Snapshot({MODEL: {"weight": weight}}, {"moment": weight}, meta(update), None))
        written = dict(open_tensors(verify(inspect(tmp_path / folder_name(update)))))
        assert written["weight"].tolist() == [update] * 4, "at once"
        weight += 1
    saver.finish()
    words = "no host memory for copies of checkpoints (0 kB: none left). From now on, training pauses until the files"
    assert said.text.count(words) == 1


@pytest.mark.parametrize("fails", ["pinned", "all", "none"])
def test_memory_that_cannot_be_reserved(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, fails: str
) -> None:
    """The second of three tensors fails: page-locked memory is replaced by pageable memory, and that by none."""
    allocated, empty = [], torch.empty

    def failing(size: torch.Size, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        allocated.append(pin_memory)
        if len(allocated) % 3 == 2 and (fails == "all" or (fails == "pinned" and pin_memory)):
            raise RuntimeError("out of memory\nmore lines")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "current_stream", threading.Event)
    monkeypatch.setattr(threading.Event, "synchronize", lambda _: None, raising=False)
    tensors = [torch.full((1000,), float(number)) for number in range(3)]
    copy = HostCopy(pinned=True)
    monkeypatch.setattr(torch, "empty", failing)
    copied = copy.take(tensors)
    if fails == "all":
        assert copied is None
        assert copy.problem == "12 kB: out of memory"
    else:
        assert copied is not None
        assert all(map(torch.equal, copied, tensors))
    pageable = "There is no page-locked host memory for copies of checkpoints (12 kB: out of memory)."
    assert (pageable in said.text) is (fails != "none")


def test_killed_between_two_renames_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update saved again replaces what stands there; for a moment neither has the name."""
    root = tmp_path / "checkpoints"
    save_checkpoint(root, 5, {MODEL: {"weight": torch.ones(1)}}, {}, meta(5))
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if target.name == folder_name(5):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(root, 5, {MODEL: {"weight": torch.zeros(1)}}, {}, meta(5))
    assert names(root) == []
    bring_back(root)
    assert dict(open_tensors(verify(inspect(root / folder_name(5)))))["weight"].item() == 1


@pytest.mark.parametrize(("kills", "seed"), [(10, 11), pytest.param(200, 12, marks=pytest.mark.slow)])
def test_killed_while_saving(tmp_path: Path, kills: int, seed: int) -> None:
    """Kill a process that saves for ever at random moments; each time, all that is there must be good."""
    print(f"the moments follow from seed {seed}")
    chance, halves, newest = random.Random(seed), 0, 0
    root, processes = tmp_path / "checkpoints", multiprocessing.get_context("forkserver")
    for _ in range(kills):
        ready = processes.Event()
        process = processes.Process(target=save_for_ever, args=(root, newest + 1, ready))
        process.start()
        assert ready.wait(120)
        time.sleep(chance.uniform(0.0, 0.12))
        process.kill()
        process.join()
        halves += any(root.glob(".tmp-*"))
        bring_back(root)
        for name in names(root):
            verify(inspect(root / name))
        found = newest_good(root)
        assert found is not None
        assert found.folder.name == names(root)[-1]
        now = found.meta["update"]
        assert now >= newest, "an earlier one was lost"
        assert all(bool((tensor == now % 1000).all()) for tensor in dict(open_tensors(found)).values()), "of one moment"
        assert read_state(found) == {"update": now}
        newest = now
    assert halves > kills // 10, f"only {halves} of {kills} kills hit the writing"


def save_for_ever(root: Path, first: int, ready: Any) -> None:
    torch.set_num_threads(1)
    saver = Saver(root, Config(KEEP_LAST=2), pinned=False)
    tensors = {MODEL: {f"weight{n}": torch.zeros(60_000) for n in range(10)}}
    for update in range(first, first + 10**6):
        for tensor in tensors[MODEL].values():
            tensor.fill_(update % 1000)
        saver.save(Snapshot(tensors, {"update": update}, meta(update), None))
        if update == first + 1:  # the first one is there
            ready.set()
