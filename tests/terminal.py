"""A terminal for tests: a pseudo-terminal that a program runs on, and what its screen shows in the end."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass

from tests.program import ROOT


@dataclass(frozen=True)
class Shown:
    raw: str
    """All that was written, with what was drawn over later"""

    @property
    def lines(self) -> list[str]:
        return screen(self.raw)


def screen(raw: str) -> list[str]:
    """Lines as a wide terminal shows them: after a carriage return, characters are overwritten. Colours are dropped."""
    lines = []
    for written in re.sub(r"\x1b\[[\d;]*m", "", raw).replace("\r\n", "\n").split("\n"):
        line = ""
        for piece in written.split("\r"):
            line = piece + line[len(piece) :]
        lines.append(line.rstrip())
    return lines


def on_terminal(
    *args: object, columns: int = 100, interrupt_at: str | None = None, env: dict[str, str] | None = None, code: int = 0
) -> Shown:
    """Run main_single_gpu.py, which must end with `code`. `interrupt_at`: then comes SIGINT, or with 143 a hang-up."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
    command = [sys.executable, str(ROOT / "main_single_gpu.py"), *map(str, args)]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment |= {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", **(env or {})}
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # if the tests were started by nohup
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        signal.signal(signal.SIGHUP, ignored)
        os.close(theirs)
        raw = b""
        while True:
            try:
                raw += os.read(ours, 65536)
            except OSError:  # the other end has gone
                break
            if interrupt_at is not None and interrupt_at.encode() in raw:
                process.send_signal(signal.SIGHUP if code == 143 else signal.SIGINT)
                interrupt_at = None
                if code == 143:
                    break
        os.close(ours)
    assert process.returncode == code, raw.decode()
    return Shown(raw.decode())
