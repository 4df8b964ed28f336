"""Who is to blame when nothing moves."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from typing import Any

import pytest
from torch.distributed import DistNetworkError  # pyright: ignore[reportPrivateImportUsage]

from utils.distributed import group
from utils.distributed.processes import Process, birth_of
from utils.distributed.watchdog import BEAT, Watch
from utils.distributed.world import TORCHRUN, World

WAITS = {"beats": 9, "waits": True, "place": "torch/distributed/distributed_c10d.py:1 (all_reduce)"}
READS = {"beats": 9, "waits": False, "place": "engine/measure/meters.py:70 (read)"}
HANGS = {"beats": 9, "waits": False, "place": "datasets/images.py:33 (read)"}


class NoStore:
    """Whatever is asked of it, nothing comes back."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(name)


def blamed(mine: dict[str, Any], *others: dict[str, Any]) -> str:
    watch = Watch.__new__(Watch)
    watch._names = [f"rank {rank} on node{rank}" for rank in range(len(others) + 1)]
    watch._timeout = 600
    watch._main = type("", (), mine)()  # pyright: ignore[reportAttributeAccessIssue]
    return watch._who_keeps_all_waiting(dict(enumerate(others, start=1)))


@pytest.mark.parametrize("others", [[HANGS, WAITS], [WAITS, HANGS, READS, READS]])
def test_the_one_that_stands_elsewhere_is_named(others: list[dict[str, Any]]) -> None:
    rank = others.index(HANGS) + 1
    mine = READS if READS in others else WAITS
    said = blamed(mine, *others)
    assert said == (
        f"rank {rank} on node{rank} keeps the others waiting for 10 minutes (DIST.TIMEOUT): "
        "it stands in datasets/images.py:33 (read)"
    )


def test_where_it_cannot_be_known_all_are_named() -> None:
    said = blamed(READS, HANGS)
    assert "rank 0 on node0 stands in engine/measure/meters.py:70 (read); rank 1 on node1 stands in datasets" in said
    assert blamed(WAITS, WAITS, WAITS, WAITS).endswith("; and 1 more")


def test_one_that_has_parted_is_not_asked() -> None:
    assert "rank 2" in blamed(WAITS, {"parted": True}, HANGS)


def test_a_store_that_is_gone_after_the_end_is_no_failure() -> None:
    watch = Watch(NoStore(), World(1, 2, 1, 2, "SLURM"), ["a", "b"], 600)  # pyright: ignore[reportArgumentType]
    watch.part(1)
    assert "watch" not in [thread.name for thread in threading.enumerate()]


def test_a_store_that_is_gone_is_not_this_ranks_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lay with the launcher or with rank 0, and ended with them."""
    gone = DistNetworkError("Broken pipe")
    assert not group.lost_another(gone), "a process by itself has nobody to lose"
    monkeypatch.setattr(group, "_watch", object())
    assert group.lost_another(gone)
    assert not group.lost_another(RuntimeError("Broken pipe of one's own"))


class Words:
    """A store in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> str:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


def sleeping() -> tuple[subprocess.Popen[bytes], Process]:
    child = subprocess.Popen(["sleep", "60"])
    birth = birth_of(child.pid)
    assert birth is not None
    return child, Process(child.pid, birth)


@pytest.mark.parametrize("parted", [False, True])
def test_a_process_that_ends_without_parting_is_noticed_at_once(parted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    child, process = sleeping()
    decided: list[str] = []
    monkeypatch.setattr(Watch, "_decide", lambda _self, text, *_: decided.append(text))
    store = Words()
    watch = Watch(store, World(0, 2, 0, 2, TORCHRUN), ["a", "b"], 600, {1: process})  # pyright: ignore[reportArgumentType]
    try:
        assert not decided
        if parted:
            store.set("beat/1", '{"parted": true}')
        child.kill()  # and not waited for: a zombie is gone, too
        time.sleep(3 * BEAT)
        assert ("b is gone without a word" in " ".join(decided)) is not parted
    finally:
        watch._stop()
        child.wait()


def test_a_number_given_again_is_another_process() -> None:
    child, process = sleeping()
    child.kill()
    child.wait()
    assert birth_of(process.pid) is None
    assert birth_of(os.getpid()) not in (None, process.birth)


def test_ranks_of_another_container_are_not_looked_for_by_number() -> None:
    me = {"rank": 0, "host": "a", "pid": os.getpid(), "birth": birth_of(os.getpid())}
    same_number = {**me, "rank": 1, "birth": "1"}
    elsewhere = {**me, "rank": 2, "host": "b"}
    unknown = {**me, "rank": 3, "birth": None}
    assert set(group._on_this_machine([me, same_number, elsewhere, unknown], me)) == {0}
