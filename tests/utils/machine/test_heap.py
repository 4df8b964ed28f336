"""keep_freed_memory keeps freed blocks in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FETCHED = """
import resource, sys
sys.path.insert(0, {root!r})
from utils.machine.cpus import keep_freed_memory
if {kept}:
    keep_freed_memory()
def fetched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytearray(40 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fetched()
print(fetched())
"""


def pages_fetched(kept: bool) -> int:
    """Page faults for twenty blocks of 40 MB, one after another."""
    code = FETCHED.format(root=str(ROOT), kept=kept)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="acts on glibc only")
def test_freed_blocks_cause_no_new_page_faults() -> None:
    assert pages_fetched(kept=False) > 1000
    assert pages_fetched(kept=True) < 100
