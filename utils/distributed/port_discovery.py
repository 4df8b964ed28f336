"""How the ranks of a job find rank 0's store when no port is given.

Rank 0 opens the store at any free port, and announces that port at one of a few candidate ports, which follow from the
job's name. Another job or program may occupy some of them: rank 0 takes the first free one, and the other ranks query
all of them until one answers with their job's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time

from utils.errors import UserError

PORTS = range(20000, 32000)
"""Below the range from which Linux takes ephemeral ports."""
CANDIDATES = 16
STEP = 379
SECONDS_TO_ANSWER = 2.0
SECONDS_BETWEEN_ROUNDS = 0.1
LONGEST_ANSWER = 4096


def candidate_ports(job: str) -> list[int]:
    """The candidate ports of a job, equal on all ranks, in the order in which they are tried."""
    start = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big")
    return [PORTS[(start + nth * STEP) % len(PORTS)] for nth in range(CANDIDATES)]


class PortAnnouncer:
    """Rank 0's listener: tells every client the job's name and the port of the job's store."""

    def __init__(self, job: str, store_port: int) -> None:
        self._answer = json.dumps({"job": job, "store": store_port}).encode()
        self._socket = _listen_at_first_free(candidate_ports(job))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True, name="port announcer").start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), client:
                client.settimeout(SECONDS_TO_ANSWER)
                client.sendall(self._answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._socket.close()


def _listen_at_first_free(ports: list[int]) -> socket.socket:
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack, backlog=1024)
    raise UserError(
        f"rank 0 cannot listen on any of the ports {', '.join(map(str, ports))}, which follow from the job's name: "
        "all are in use. Name a free port with -port."
    )


def find_store(host: str, job: str, seconds: float) -> int | None:
    """The port of the store of this job's rank 0; None if it does not answer in time."""
    end = time.monotonic() + seconds
    while True:
        for port in candidate_ports(job):
            if (store := _query(host, port, job)) is not None:
                return store
            if time.monotonic() > end:
                return None
        time.sleep(SECONDS_BETWEEN_ROUNDS)


def _query(host: str, port: int, job: str) -> int | None:
    """The store's port as announced at `port`; None where another job or program listens, which may never answer."""
    answer, end = b"", time.monotonic() + SECONDS_TO_ANSWER
    try:
        with socket.create_connection((host, port), timeout=SECONDS_TO_ANSWER) as connection:
            while len(answer) < LONGEST_ANSWER and (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (more := connection.recv(LONGEST_ANSWER)):
                    break
                answer += more
        announced = json.loads(answer)
    except (OSError, ValueError):
        return None
    return announced.get("store") if isinstance(announced, dict) and announced.get("job") == job else None
