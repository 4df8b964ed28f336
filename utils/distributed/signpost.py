"""Where the ranks of a job find each other if nobody named a port.

Rank 0 opens a store at any free port, and tells which at one of a few ports that follow from the job's name. Another
job, or another program, may have one of these: rank 0 takes the first that is free, and the others ask at all of them
until one answers with their job's name.
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
"""Below those that Linux takes for connections by itself."""
TRIED = 16
STEP = 379
SECONDS_TO_ANSWER = 2.0
SECONDS_BETWEEN_ROUNDS = 0.1
LONGEST_ANSWER = 4096


def ports_of(job: str) -> list[int]:
    """The same on all ranks, in the order in which they are tried."""
    start = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big")
    return [PORTS[(start + nth * STEP) % len(PORTS)] for nth in range(TRIED)]


class Signpost:
    """Tells whoever asks which job rank 0 belongs to, and at which port its store is."""

    def __init__(self, job: str, store: int) -> None:
        self._text = json.dumps({"job": job, "store": store}).encode()
        self._socket = _first_free(ports_of(job))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True, name="signpost").start()

    def _answer(self) -> None:
        while True:
            try:
                asking, _ = self._socket.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), asking:
                asking.settimeout(SECONDS_TO_ANSWER)
                asking.sendall(self._text)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._socket.close()


def _first_free(ports: list[int]) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    raise UserError(
        f"rank 0 cannot listen at any of the ports {', '.join(map(str, ports))}, which follow from the job's name: "
        "others have them. Name a free one by -port."
    )


def find_store(host: str, job: str, seconds: float) -> int | None:
    """The port of the store of rank 0 of this job; None if it does not answer in time."""
    end = time.monotonic() + seconds
    while True:
        for port in ports_of(job):
            if (store := _asked(host, port, job)) is not None:
                return store
            if time.monotonic() > end:
                return None
        time.sleep(SECONDS_BETWEEN_ROUNDS)


def _asked(host: str, port: int, job: str) -> int | None:
    """What listens there may be another job, or a program that knows nothing of us and may not answer at all."""
    answer, end = b"", time.monotonic() + SECONDS_TO_ANSWER
    try:
        with socket.create_connection((host, port), timeout=SECONDS_TO_ANSWER) as connection:
            while len(answer) < LONGEST_ANSWER and (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (more := connection.recv(LONGEST_ANSWER)):
                    break
                answer += more
        told = json.loads(answer)
    except (OSError, ValueError):
        return None
    return told.get("store") if isinstance(told, dict) and told.get("job") == job else None
