"""What every test of faults needs: runs in the background that leave nothing behind."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.killing import Run
from tests.program import ROOT, Started


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run of the tiny recipe in the background. After the test none of its processes may be there."""
    if not Path("/proc").exists():
        pytest.skip("finds processes by /proc")
    runs: list[Run] = []

    def call(*words: object, folder: Path = tmp_path / "run", **options: object) -> Run:
        runs.append(Run(folder, "-cfg", tiny, *words, **options))  # pyright: ignore[reportArgumentType]
        return runs[-1]

    yield call
    left = [pid for run in runs for pid in run.alive()]
    for run in runs:
        run.kill_all()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def begin(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Started]]:
    """Start a run of one process of the tiny recipe in the background, quickly: Python and torch are there already."""
    started: list[Started] = []

    def call(*words: object) -> Started:
        argv = ["-cfg", str(tiny), *map(str, words)]
        streams = tmp_path_factory.mktemp("streams")
        started.append(Started(str(ROOT / "main_single_gpu.py"), argv, ROOT, {}, streams))
        return started[-1]

    yield call
    for process in started:
        if process.running():
            os.kill(process.pid, signal.SIGKILL)
