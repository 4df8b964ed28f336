"""Join the processes of a run, check them against each other, and log a table of machines and devices."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from engine.machine.device import describe_device
from utils.cli import version_text
from utils.config import Config
from utils.config.keys import settings, value_of
from utils.distributed.again import LAUNCHER_PID
from utils.distributed.group import backend_of, join
from utils.distributed.processes import start_time_of
from utils.distributed.world import World
from utils.errors import AllRanksUserError
from utils.log import log
from utils.terminal import DETAIL
from utils.text import aligned, counted

MAX_ROWS = 16
# Settings that may differ between ranks.
RANK_SETTINGS = ("DIST.RANK", "DIST.HOST", "DIST.PORT", "LOCAL_RANK", "NGPUS")


def join_run(config: Config, world: World, device: torch.device, threads: int) -> None:
    """Join the other processes, check that settings and devices are consistent, and log who takes part."""
    common = {key: str(value_of(config, key)) for key in settings() if key not in RANK_SETTINGS}
    members = join(world, config.DIST, device, _about_this_process(world, device, threads))
    if world.size == 1:
        return
    _check_devices(members)  # first: NCCL cannot communicate between ranks on one GPU
    from utils.distributed.joining import check_agreement

    check_agreement(world, members, common)
    log.info(environment_table(config, world, device, members), extra=DETAIL)


def arguments() -> str:
    return shlex.join(sys.argv[1:]) or "none"


def _about_this_process(world: World, device: torch.device, threads: int) -> dict[str, Any]:
    """Facts about this process for the other ranks."""
    about: dict[str, Any] = {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": start_time_of(os.getpid()),
        "device": describe_device(device),
        "threads": threads,
        "gpu": None,
        "visible": 0,
        "peers": None,
        "vitamp": version_text().splitlines()[0].split()[-1],
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        about["gpu"] = str(torch.cuda.get_device_properties(device).uuid)
        about["visible"] = torch.cuda.device_count()
        about["peers"] = _peers(torch.cuda.device_count())
    return about


def _peers(devices: int) -> tuple[int, int]:
    """Number of GPU pairs of this machine with peer access, and of all pairs."""
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    return sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs), len(pairs)


def _check_devices(members: list[dict[str, Any]]) -> None:
    """Reject ranks that share a GPU, and warn of idle GPUs. All ranks get the same result."""
    taken: dict[tuple[str, str], int] = {}
    for member in members:
        if member["gpu"] is None:
            continue
        before = taken.setdefault((member["host"], member["gpu"]), member["rank"])
        if before != member["rank"]:
            raise AllRanksUserError(
                f"ranks {before} and {member['rank']} on {member['host']} were given the same GPU; start one process "
                "per GPU. Ranks started by hand or by a script each need their own LOCAL_RANK in the environment."
            )
    used = Counter(member["host"] for member in members)
    idle = {m["host"]: m["visible"] for m in members if m["visible"] > used[m["host"]]}
    for host, visible in list(idle.items())[:1]:
        log.warning(
            "%d GPUs are visible on %s for %s: start one process per GPU to use all.",
            visible,
            host,
            counted(used[host], "process"),
        )


def environment_table(config: Config, world: World, device: torch.device, members: list[dict[str, Any]]) -> str:
    """Table of processes, machines, devices and libraries, and how GPUs are connected."""
    hosts = list(dict.fromkeys(member["host"] for member in members))
    table = aligned(_by_rank(members) if len(members) <= MAX_ROWS else _by_host(members, hosts))
    facts = [
        (
            "launcher",
            f"{_launcher(world)}, {counted(world.size, 'process')} on {counted(len(hosts), 'machine')}",
        ),
        (
            "backend",
            f"{backend_of(config.DIST, device)}, rendezvous at {members[0]['rendezvous']}; "
            f"DIST.TIMEOUT {config.DIST.TIMEOUT:g} min",
        ),
        ("libraries", ", ".join(f"{name} {number}" for name, number in libraries().items())),
    ]
    links = _links(members)
    if links:
        facts.append(("GPU links", links))
    return "\n".join(["Processes", *(f"  {line}" for line in table), *(f"  {name:<10} {text}" for name, text in facts)])


def _by_rank(members: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rank", "machine", "local rank", "process", "threads", "device")]
    for member in members:
        row = (member[key] for key in ("rank", "host", "local_rank", "pid", "threads", "device"))
        rows.append(tuple(map(str, row)))
    return rows


def _by_host(members: list[dict[str, Any]], hosts: list[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("machine", "ranks", "threads", "devices")]
    for host in hosts:
        here = [member for member in members if member["host"] == host]
        ranks = f"{here[0]['rank']}-{here[-1]['rank']}"
        kinds = Counter(member["device"] for member in here)
        devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        rows.append((host, ranks, str(here[0]["threads"]), devices))
    return rows


def _launcher(world: World) -> str:
    return "main_multi_gpu.py itself" if LAUNCHER_PID in os.environ else world.launcher


def _links(members: list[dict[str, Any]]) -> str | None:
    by_machine = [member["peers"] for member in members if member["peers"] and member["peers"][1]]
    if not by_machine:
        return None
    direct, pairs = min(by_machine, key=lambda peers: peers[0] / peers[1])
    text = f"{direct} of {pairs} ordered pairs of GPUs in a machine have peer access"
    if direct < pairs:
        return f"{text}; the others go through host memory (nvidia-smi topo -m shows why)"
    return f"{text}, by NVLink or PCIe (nvidia-smi topo -m shows which)"


def libraries() -> dict[str, str]:
    """Versions of Python, torch and the libraries that compute and communicate."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "timm"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        versions["cuDNN"] = _dotted(torch.backends.cudnn.version())
        versions["NCCL"] = ".".join(map(str, nccl.version()))
        driver = _driver()
        if driver:
            versions["driver"] = driver
    return versions


def _dotted(number: int | None) -> str:
    """cuDNN's version number in dots: 90100 -> 9.1.0, or older, 8902 -> 8.9.2."""
    if number is None:
        return "none"
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    number = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return number[0] if number else None
