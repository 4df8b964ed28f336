"""The watchdog names the rank that hangs or died."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from typing import Any
from unittest import mock

import pytest
from torch.distributed import DistNetworkError, HashStore  # pyright: ignore[reportPrivateImportUsage]

from tests.waiting import until
from utils.distributed import group
from utils.distributed.launchers import TORCHRUN
from utils.distributed.watchdog import Watchdog, start_time_of
from utils.distributed.world import World

WAITS = {"number": 9, "in_collective": True, "place": "torch/distributed/distributed_c10d.py:1 (all_reduce)"}
READS = {"number": 9, "in_collective": False, "place": "engine/measure/meters.py:70 (read)"}
HANGS = {"number": 9, "in_collective": False, "place": "datasets/images.py:33 (read)"}


def members(*pids: int) -> list[dict[str, Any]]:
    found = enumerate(pids)
    return [{"rank": rank, "host": "node", "pid": pid, "started": start_time_of(pid)} for rank, pid in found]


def blamed(mine: dict[str, Any], *others: dict[str, Any]) -> str:
    watchdog = Watchdog.__new__(Watchdog)
    watchdog._names = [f"rank {rank} on node{rank}" for rank in range(len(others) + 1)]
    watchdog._timeout = 600
    watchdog._own_heartbeat = mine
    return watchdog._blame_for_hang(dict(enumerate(others, start=1)))


@pytest.mark.parametrize("others", [[HANGS, WAITS], [WAITS, HANGS, READS, READS]])
def test_watchdog_blames_the_rank_that_is_elsewhere(others: list[dict[str, Any]]) -> None:
    rank = others.index(HANGS) + 1
    mine = READS if READS in others else WAITS
    said = blamed(mine, *others)
    assert said == (
        f"rank {rank} on node{rank} has kept the others waiting for 10 minutes (DIST.TIMEOUT); "
        "it is in datasets/images.py:33 (read)"
    )


def test_watchdog_names_all_suspects_that_have_not_left() -> None:
    said = blamed(READS, HANGS)
    assert "rank 0 on node0 is in engine/measure/meters.py:70 (read); rank 1 on node1 is in datasets" in said
    assert blamed(WAITS, WAITS, WAITS, WAITS).endswith("; and 1 more")
    assert "rank 2" in blamed(WAITS, {"left": True}, HANGS)


@pytest.mark.parametrize("served", [False, True])
def test_ranks_may_save_after_a_launcher_that_served_the_store(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.distributed.watchdog.SECONDS_OF_GRACE", 0)
    monkeypatch.setattr(Watchdog, "_end", end := mock.Mock())
    fails = mock.Mock(side_effect=ConnectionError)
    store = mock.Mock(set=fails, add=fails, get=fails, check=fails)
    watchdogs = [Watchdog(store, World(1, 2, served=served), members(1, 2), 600) for _ in range(2)]
    watchdogs[0]._thread.join(1)
    watchdogs[0].leave(1)
    assert end.called is not served, "rank 0 served it, and cannot save"
    watchdogs[1].expect_lost_rank()
    watchdogs[1]._thread.join(5)
    assert end.called, "a rank was lost, too"
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_lost_store_is_not_this_ranks_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher or rank 0 served it, and has ended."""
    gone = DistNetworkError("Broken pipe")
    assert not group.caused_by_lost_rank(gone), "a process by itself has nobody to lose"
    monkeypatch.setattr(group, "watchdog", object())
    assert group.caused_by_lost_rank(gone)
    assert not group.caused_by_lost_rank(RuntimeError("Broken pipe of one's own"))


def test_time_in_which_all_ranks_were_suspended_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, decided = [0.0], list[str]()
    monkeypatch.setattr("utils.distributed.watchdog.time", mock.Mock(monotonic=lambda: now[0]))
    monkeypatch.setattr(Watchdog, "_decide", lambda _self, text, *_: decided.append(text))
    watchdog = Watchdog(HashStore(), World(0, 2), members(os.getpid(), os.getpid()), 600)
    watchdog._stop()
    for seconds in (1000, 1000, *[1] * 61):  # the main thread's place, too, is only new at the first check
        assert not decided, now
        now[0] += seconds
        watchdog._check()
    assert "has sent no heartbeat for 60 s" in decided[0]


def test_ended_rank_leaves_no_process_that_stalls_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    watchdog = Watchdog(HashStore(), World(1, 2), members(os.getpid(), os.getpid()), 600)
    watchdog._stop()
    monkeypatch.setattr(os, "_exit", mock.Mock())
    watchdog._end("rank 0 has left", found_by=0)
    child.join(20)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("left", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_watchdog_notices_a_killed_process_at_once(left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    decided: list[str] = []
    monkeypatch.setattr(Watchdog, "_decide", lambda _self, text, *_: decided.append(text))
    store = HashStore()
    watchdog = Watchdog(store, World(0, 2, 0, 2, TORCHRUN), members(os.getpid(), child.pid), 600)
    try:
        until(lambda: watchdog._own_heartbeat["number"] > 1)
        assert not decided, "while it lives"
        if left:
            store.set("heartbeat/1", '{"left": true}')
        child.kill()  # and not waited for: a zombie has died, too
        checked = watchdog._own_heartbeat["number"] + 2  # one check may have begun before
        until(lambda: watchdog._own_heartbeat["number"] > checked)
        assert ("died without an error message" in " ".join(decided)) is not left
    finally:
        watchdog._stop()
        child.wait()


def test_reused_pid_and_processes_of_other_containers_are_not_watched_by_pid() -> None:
    child = subprocess.Popen(["sleep", "60"])
    found = members(os.getpid(), child.pid, child.pid, child.pid)
    found[2]["started"], found[3]["started"] = "1", None
    child.kill()
    child.wait()
    assert start_time_of(child.pid) is None
    found[1] |= {"pid": os.getpid()}
    watchdog = Watchdog(HashStore(), World(0, 4, 0, 4, TORCHRUN), found, 600)
    watchdog._stop()
    assert watchdog._local == {}
