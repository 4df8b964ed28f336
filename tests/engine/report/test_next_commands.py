"""The command that resumes a run names the launcher in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.report.next_commands import _start
from utils.distributed.launch import LAUNCHER_PID
from utils.distributed.world import BY_HAND, SLURM, World


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        (BY_HAND, "by hand, with their -host, -port, -rank and -world_size, as before"),
        (SLURM, "by SLURM, as before"),
    ],
)
def test_resuming_several_processes_says_how_they_are_started(
    monkeypatch: pytest.MonkeyPatch, launcher: str, how: str
) -> None:
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    run: Any = SimpleNamespace(world=World(0, 4, 0, 4, launcher))
    assert f"-resume runs/a  # start its 4 processes {how}" in _start(run, "-resume runs/a")
