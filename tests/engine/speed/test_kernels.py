"""The kernels by Triton's interpreter, which Triton takes up when it is imported: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.program import ROOT


@pytest.mark.parametrize(
    ("file", "which"),
    [
        ("interpreted_gelu.py", "not slow"),
        pytest.param("interpreted_gelu.py", "slow", marks=pytest.mark.slow),
        pytest.param("interpreted_attention.py", "not slow", marks=[pytest.mark.slow, pytest.mark.every_slice]),
    ],
)
def test_kernels_in_tritons_interpreter(file: str, which: str) -> None:
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    tests = ROOT / "tests" / "engine" / "speed" / file
    command = [sys.executable, "-m", "pytest", tests, "-q", "-m", which, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
