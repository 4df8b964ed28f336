"""Which code of a run's folder the command line allows to execute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Allowed:
    files: tuple[Path, ...] = ()
    """The user's own files (-use)"""
    trust: bool = False
    """-trust: the copies in the run's folder too"""


allowed = Allowed()


def allow(use: str | None, trust: bool) -> None:
    """Take over the flags -use and -trust."""
    allowed.files = tuple(Path(name.strip()).expanduser() for name in (use or "").split(",") if name.strip())
    allowed.trust = trust
