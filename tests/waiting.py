"""Waiting for what another process does, and a port for it to listen on."""

import socket
import time
from collections.abc import Callable


def until(happens: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `happens()` is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"it did not happen within {seconds} s"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]
