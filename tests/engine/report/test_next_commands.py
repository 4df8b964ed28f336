"""The command that resumes a run names the launcher in words."""

from __future__ import annotations

import pytest

from utils.distributed.world import BY_HAND, SLURM, World
from utils.program import LAUNCHER_PID, start_again


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        (BY_HAND, "by hand, each with its rank, as before"),
        (SLURM, "by SLURM, as before"),
    ],
)
def test_resuming_several_processes_says_how_they_are_started(
    monkeypatch: pytest.MonkeyPatch, launcher: str, how: str
) -> None:
    monkeypatch.delenv(LAUNCHER_PID, raising=False)
    command = start_again(World(0, 4, 0, 4, launcher), "-resume runs/a")
    assert f"-resume runs/a  # start its 4 processes {how}" in command
