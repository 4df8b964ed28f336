"""The table of processes, what is found when all have told their devices, and the notice of a run without a GPU."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datasets import open_dataset
from engine.machine import device, environment
from engine.machine.device import pick_device, threads_of
from engine.machine.environment import _check_devices, environment_table
from tests.program import Vitamp
from utils.config import Config
from utils.config.data import DataConfig
from utils.distributed.launchers import TORCHRUN
from utils.distributed.world import ALONE, World
from utils.errors import AllRanksUserError, UserError
from utils.text import counted

CPU = torch.device("cpu")


def members(machines: int, each: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "rank": machine * each + local,
            "local_rank": local,
            "host": f"node{machine}",
            "pid": 1000 + local,
            "threads": 8,
            "device": "NVIDIA H200, 140 GiB, compute capability 9.0",
            "gpu": f"GPU-{machine}-{local}",
            "rendezvous": "node0:23456",
            **more,
        }
        for machine in range(machines)
        for local in range(each)
    ]


def table(found: list[dict[str, Any]]) -> str:
    world = World(0, len(found), 0, 8, "SLURM", ("node0", 23456))
    return environment_table(Config(), world, CPU, found)


def test_table_has_a_row_for_each_of_the_first_processes() -> None:
    text = table(members(2, 2))
    assert "launcher   SLURM, 4 processes on 2 machines" in text
    assert "backend    gloo, rendezvous at node0:23456; DIST.TIMEOUT 10 min" in text
    row = "  3     node1    1           1001     8        NVIDIA H200, 140 GiB, compute capability 9.0"
    assert row in text.splitlines()
    assert f"torch {torch.__version__}" in text
    assert "  ... and 16 more" in table(members(4, 8)).splitlines()


def test_ranks_that_share_a_gpu_are_rejected() -> None:
    _check_devices(members(2, 2))
    with pytest.raises(AllRanksUserError, match=r"ranks 0 and 1 on node0 were given the same GPU.* LOCAL_WORLD_SIZE"):
        _check_devices(members(1, 2, gpu="GPU-the-one"))


def test_ranks_with_other_images_of_knn_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = (open_dataset(DataConfig(DATASET="digits"), part, 10, 0, CPU) for part in (True, False))
    told: list[Any] = []
    monkeypatch.setattr(environment, "all_gather", lambda found, _: told.extend(found) or told)
    ready: Any = SimpleNamespace(val_set=val, neighbours=SimpleNamespace(bank=train, images=val))
    environment.check_images(ready, ALONE)
    ready.neighbours.bank = val
    with pytest.raises(AllRanksUserError, match=r"rank 1 has other TRAIN.KNN's training images than"):
        environment.check_images(ready, ALONE)


def test_launcher_may_show_each_process_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device(None, World(3, 4, 3, 4, "SLURM")) == torch.device("cuda", 0)
    with pytest.raises(UserError, match="start no more processes than GPUs"):
        pick_device(None, World(3, 4, 3, 4, "torchrun"))


@pytest.mark.parametrize(
    ("env", "driver_there", "cuda", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, False, None, "No GPU is visible (CUDA_VISIBLE_DEVICES is ''): "),
        ({}, False, None, "No GPU is visible: "),
        ({"CUDA_VISIBLE_DEVICES": "7"}, True, "13.2", "(CUDA_VISIBLE_DEVICES is '7'; an NVIDIA driver is installed, "),
        ({}, True, None, "is built for CPUs only"),
    ],
)
def test_notice_names_why_no_gpu_is_visible(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    driver_there: bool,
    cuda: str | None,
    said: str,
) -> None:
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path if driver_there else tmp_path / "nowhere")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    notice = device.no_gpu_notice(Config(), CPU, False, env) or ""
    assert said in notice
    assert ("built for CPUs only" in notice) == (driver_there and cuda is None)
    digits = Config().changed(DATA=DataConfig(DATASET="digits"))
    assert "training on ImageNet takes weeks" in notice
    assert "ImageNet" not in (device.no_gpu_notice(digits, CPU, True, env) or "ImageNet")
    assert device.no_gpu_notice(Config(DEVICE="cpu"), CPU, False, env) is None


def test_notice_is_logged_once_per_run(vitamp: Vitamp, tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("DEVICE: cpu\n", ""))
    command = ("-cfg", tiny, "-ngpus", 2, "-dry_run")
    done = vitamp(*command, script="main_multi_gpu.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.code, done.text.count("No GPU is visible")) == (0, 1), done.text


def test_processor_is_named_by_cpuinfo_or_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A: B\nflags\t\t: fpu bf16\n")
    monkeypatch.setattr(device, "PROCESSORS", tmp_path / "cpuinfo")
    assert device.processor() == "A: B"
    monkeypatch.setattr(device, "PROCESSORS", tmp_path / "none")
    assert device.processor() not in ("", "A: B")


def test_omp_num_threads_counts_without_threads(vitamp: Vitamp, tiny: Path) -> None:
    for words, threads in (("THREADS=null", 3), ("THREADS=2", 2)):
        done = vitamp("-cfg", tiny, words, "-eval", "-dry_run", env={"OMP_NUM_THREADS": "3,1"}, code=0)
        assert re.search(rf"device .*, {counted(threads, 'thread')}$", done.out, re.MULTILINE), done.out


@pytest.mark.parametrize(
    ("given", "of_torchrun", "threads"), [("1", {}, 4), ("1", {"OMP_NUM_THREADS": "1"}, 1), ("2", {}, 2)]
)
def test_the_omp_num_threads_that_torchrun_sets_does_not_count(
    monkeypatch: pytest.MonkeyPatch, given: str, of_torchrun: dict[str, str], threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    with subprocess.Popen(["sleep", "60"], env=of_torchrun) as parent:
        monkeypatch.setattr("os.getppid", lambda: parent.pid)
        assert threads_of(Config(), World(launcher=TORCHRUN, cores=4)) == threads
        parent.kill()
