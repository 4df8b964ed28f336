"""Ranks find the store of their own job, whatever else listens at the candidate ports."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from utils.distributed import port_discovery, rendezvous
from utils.distributed.port_discovery import CANDIDATES, PortAnnouncer, candidate_ports, find_store
from utils.distributed.world import World
from utils.errors import UserError

JOB = "OpenMPI prterun-node07-4711@1"
HERE = "127.0.0.1"


def three_free_ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    free = []
    with contextlib.ExitStack() as held:
        for _ in range(3):
            listener = held.enter_context(socket.create_server(("", 0)))
            free.append(listener.getsockname()[1])
    monkeypatch.setattr(port_discovery, "candidate_ports", lambda _job: free)
    return free


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three free ports, which are the candidates of every job."""
    return three_free_ports(monkeypatch)


@contextlib.contextmanager
def announced(job: str, store: int) -> Iterator[PortAnnouncer]:
    with contextlib.closing(PortAnnouncer(job, store)) as announcer:
        yield announcer


def test_candidate_ports_depend_on_the_job_alone() -> None:
    first, second = candidate_ports(JOB), candidate_ports(JOB.replace("4711", "4712"))
    assert first == candidate_ports(JOB)
    assert len(set(first)) == CANDIDATES
    assert all(20000 <= port < 32000 for port in first)
    assert first[0] != second[0]


def test_two_jobs_with_the_same_candidate_ports_find_their_own_store(ports: list[int]) -> None:
    with announced("job a", 1111) as a, announced("job b", 2222) as b:
        assert [a.port, b.port] == ports[:2]
        assert find_store(HERE, "job a", 5) == 1111
        assert find_store(HERE, "job b", 5) == 2222
        assert find_store(HERE, "job c", 0.2) is None


def test_find_store_skips_ports_of_other_programs(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, and one that says something else."""
    monkeypatch.setattr(port_discovery, "SECONDS_TO_ANSWER", 0.3)
    with (
        socket.create_server(("", ports[0])),
        socket.create_server(("", ports[1])) as talking,
        ThreadPoolExecutor() as pool,
    ):

        def talk() -> None:
            with contextlib.suppress(OSError):
                connection, _ = talking.accept()
                connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                connection.close()

        pool.submit(talk)
        with announced(JOB, 1111) as announcer:
            assert announcer.port == ports[2]
            assert find_store(HERE, JOB, 5) == 1111


@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"job": 1}', b"x" * 10_000, b"\xff"])
def test_find_store_skips_malformed_answers(answer: bytes) -> None:
    with announced(JOB, 1111) as announcer, ThreadPoolExecutor() as pool:
        announcer._answer = answer
        assert pool.submit(find_store, HERE, JOB, 0.3).result(10) is None


@pytest.mark.usefixtures("ports")
def test_find_store_waits_for_rank_0() -> None:
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(find_store, HERE, JOB, 10)
        time.sleep(0.5)
        with announced(JOB, 1111):
            assert asking.result(10) == 1111


def test_announcer_without_a_free_port_names_the_candidates(ports: list[int]) -> None:
    with contextlib.ExitStack() as taken:
        for port in ports:
            taken.enter_context(socket.create_server(("", port)))
        with pytest.raises(UserError, match=rf"{ports[0]}, {ports[1]}, {ports[2]}.*-port"):
            PortAnnouncer(JOB, 1)


def test_closed_announcer_frees_its_port(ports: list[int]) -> None:
    for number in (1, 2):
        with announced(JOB, number) as announcer:
            assert announcer.port == ports[0]
            assert find_store(HERE, JOB, 5) == number


@pytest.mark.usefixtures("ports")
def test_announcer_sends_job_and_port_only() -> None:
    with announced(JOB, 1111) as announcer, socket.create_connection((HERE, announcer.port)) as connection:
        assert json.loads(connection.recv(1000)) == {"job": JOB, "store": 1111}


def test_silent_program_at_a_given_port_does_not_hang_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own store would wait for its answer for ever."""
    monkeypatch.setattr(rendezvous, "SECONDS_FOR_TORCH", 0.5)
    with socket.create_server(("", 0)) as silent, contextlib.ExitStack() as announcer:
        port = silent.getsockname()[1]
        with pytest.raises(UserError, match=rf"rank 1 of 2: rank 0 does not answer at {HERE}:{port}"):
            rendezvous.open_store(World(1, 2, rendezvous=(HERE, port)), datetime.timedelta(seconds=1), announcer)
