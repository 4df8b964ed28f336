"""cores() follows the limits of containers and batch systems; keep_freed_memory keeps freed blocks in the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from datasets import auto_workers
from engine.machine.device import set_up_device
from tests.program import ROOT
from utils.config import load_config
from utils.distributed.world import ALONE, World
from utils.machine import cpus
from utils.machine.cpus import cores, cpu_quota


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quotas: dict[str, float | None], own: str = "/pod/me"
) -> None:
    """Write control groups with these quotas, in cores, as the kernel shows them; this process is in `own`."""
    for path, quota in quotas.items():
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        text = "max 100000\n" if quota is None else f"{int(100_000 * quota)} 100000\n"
        (tmp_path / path / "cpu.max").write_text(text)
    (tmp_path / "own").write_text(f"1:name=systemd:/x\n0::{own}\n")
    monkeypatch.setattr(cpus, "MOUNTED", tmp_path)
    monkeypatch.setattr(cpus, "OWN", tmp_path / "own")


@pytest.mark.parametrize(
    ("quotas", "own", "counted"),
    [
        ({"pod/me": 4}, "/pod/me", 4),
        ({"pod/me": None, "pod": 4}, "/pod/me", 4),
        ({"pod/me": 6, "pod": 3}, "/pod/me", 3),
        ({"pod/me": 2.5}, "/pod/me", 3),
        ({"pod/me": 0.25}, "/pod/me", 1),
        ({"pod/me": 64}, "/pod/me", 16),
        ({"pod/me": None}, "/pod/me", 16),
        ({".": 4}, "/as/it/is/outside", 4),
        ({}, "/pod/me", 16),
    ],
)
def test_cores_is_the_smallest_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quotas: dict[str, float | None], own: str, counted: int
) -> None:
    groups(tmp_path, monkeypatch, quotas, own)
    assert cores() == counted


def test_affinity_below_the_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups(tmp_path, monkeypatch, {"pod/me": 4})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert cores() == 2


def test_malformed_quota_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups(tmp_path, monkeypatch, {"pod/me": 4})
    for text in ("", "nonsense", "100000", "0 100000", "100000 0"):
        (tmp_path / "pod" / "me" / "cpu.max").write_text(text)
        assert cpu_quota() is None
    monkeypatch.setattr(cpus, "OWN", tmp_path / "none")
    assert cores() == 16


def test_threads_and_workers_follow_the_quota_which_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    groups(tmp_path, monkeypatch, {"pod/me": 4})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        assert set_up_device(load_config(None, {}, {}).config, torch.device("cpu"), ALONE) == 4
        assert torch.get_num_threads() == 4
        assert auto_workers() == 4
        assert auto_workers(World(local_size=2)) == 2
    finally:
        torch.set_num_threads(before)
    assert said.text.count("CPU quota: this process may use 4 of the 16 visible cores (") == 1
    assert str(tmp_path) in said.text


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
