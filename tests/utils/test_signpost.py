"""Finding rank 0 of one's own job, whatever else listens at the ports that it might have."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from utils.distributed import meeting, signpost
from utils.distributed.signpost import TRIED, Signpost, find_store, ports_of
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
    monkeypatch.setattr(signpost, "ports_of", lambda _job: free)
    return free


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three that are free, for whatever job: as if all names led to them."""
    return three_free_ports(monkeypatch)


@contextlib.contextmanager
def sign(job: str, store: int) -> Iterator[Signpost]:
    with contextlib.closing(Signpost(job, store)) as post:
        yield post


def test_ports_follow_from_the_job_alone() -> None:
    first, second = ports_of(JOB), ports_of(JOB.replace("4711", "4712"))
    assert first == ports_of(JOB)
    assert len(set(first)) == TRIED
    assert all(20000 <= port < 32000 for port in first)
    assert first[0] != second[0]


def test_two_jobs_that_meet_at_the_same_ports_find_their_own(ports: list[int]) -> None:
    with sign("job a", 1111) as a, sign("job b", 2222) as b:
        assert [a.port, b.port] == ports[:2]
        assert find_store(HERE, "job a", 5) == 1111
        assert find_store(HERE, "job b", 5) == 2222
        assert find_store(HERE, "job c", 0.2) is None


def test_another_program_at_the_port_is_passed_over(ports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, and one that says something else."""
    monkeypatch.setattr(signpost, "SECONDS_TO_ANSWER", 0.3)
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
        with sign(JOB, 1111) as post:
            assert post.port == ports[2]
            assert find_store(HERE, JOB, 5) == 1111


@pytest.mark.usefixtures("ports")
@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"job": 1}', b"x" * 10_000, b"\xff"])
def test_an_answer_that_is_none_is_passed_over(answer: bytes) -> None:
    with sign(JOB, 1111) as post, ThreadPoolExecutor() as pool:
        post._text = answer
        assert pool.submit(find_store, HERE, JOB, 0.3).result(10) is None


@pytest.mark.usefixtures("ports")
def test_rank_0_may_come_later() -> None:
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(find_store, HERE, JOB, 10)
        time.sleep(0.5)
        with sign(JOB, 1111):
            assert asking.result(10) == 1111


def test_without_a_free_port_it_says_which_were_tried(ports: list[int]) -> None:
    with contextlib.ExitStack() as taken:
        for port in ports:
            taken.enter_context(socket.create_server(("", port)))
        with pytest.raises(UserError, match=rf"{ports[0]}, {ports[1]}, {ports[2]}.*-port"):
            Signpost(JOB, 1)


def test_a_closed_signpost_leaves_the_port_to_others(ports: list[int]) -> None:
    for number in (1, 2):
        with sign(JOB, number) as post:
            assert post.port == ports[0]
            assert find_store(HERE, JOB, 5) == number


@pytest.mark.usefixtures("ports")
def test_it_tells_no_more_than_the_job_and_the_port() -> None:
    with sign(JOB, 1111) as post, socket.create_connection((HERE, post.port)) as connection:
        assert json.loads(connection.recv(1000)) == {"job": JOB, "store": 1111}


def test_a_silent_program_at_a_given_port_does_not_hang_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own store would wait for its answer for ever."""
    monkeypatch.setattr(meeting, "SECONDS_FOR_TORCH", 0.5)
    with socket.create_server(("", 0)) as silent, contextlib.ExitStack() as post:
        port = silent.getsockname()[1]
        with pytest.raises(UserError, match=rf"rank 1 of 2: rank 0 does not answer at {HERE}:{port}"):
            meeting.meet(World(1, 2, meeting=(HERE, port)), datetime.timedelta(seconds=1), post)
