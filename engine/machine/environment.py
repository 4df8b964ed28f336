"""The processes of a run, their machines and devices: what each tells the others, and the table made of it."""

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

from engine.machine.device import describe_one
from utils.cli import version_text
from utils.config import Config
from utils.config.keys import settings, value_of
from utils.distributed.group import backend_of, join
from utils.distributed.launch import LAUNCHER_PID
from utils.distributed.processes import start_time_of
from utils.distributed.world import World
from utils.errors import AllRanksUserError
from utils.log import log

MOST_ROWS = 16
# They tell ranks apart, or only how they were started.
OF_ONE_RANK = ("DIST.RANK", "DIST.HOST", "DIST.PORT", "LOCAL_RANK", "NGPUS")


def enter(config: Config, world: World, device: torch.device, threads: int) -> None:
    """Join the other processes, see that all fit together, and tell who they are."""
    alike = {key: str(value_of(config, key)) for key in settings() if key not in OF_ONE_RANK}
    members = join(world, config.DIST, device, _about_this_process(world, device, threads), alike)
    if world.size == 1:
        return
    _check_devices(members)
    log.info(environment_table(config, world, device, members))


def arguments() -> str:
    return shlex.join(sys.argv[1:]) or "none"


def _about_this_process(world: World, device: torch.device, threads: int) -> dict[str, Any]:
    """For the others to see."""
    about: dict[str, Any] = {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": start_time_of(os.getpid()),
        "device": describe_one(device),
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
    """Pairs of GPUs of this machine that reach into each other's memory, of how many."""
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a != b]
    return sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs), len(pairs)


def _check_devices(members: list[dict[str, Any]]) -> None:
    """No GPU is shared, and none is forgotten. All ranks see the same and decide alike."""
    taken: dict[tuple[str, str], int] = {}
    for member in members:
        if member["gpu"] is None:
            continue
        before = taken.setdefault((member["host"], member["gpu"]), member["rank"])
        if before != member["rank"]:
            raise AllRanksUserError(
                f"ranks {before} and {member['rank']} on {member['host']} were given the same GPU; start one process a "
                "GPU there. Ranks started by hand or by a script need a LOCAL_RANK of their own in the environment."
            )
    used = Counter(member["host"] for member in members)
    idle = {m["host"]: m["visible"] for m in members if m["visible"] > used[m["host"]]}
    for host, visible in list(idle.items())[:1]:
        log.warning(
            "%d GPUs are visible on %s and %d process(es) use one each: start one process a GPU to use all.",
            visible,
            host,
            used[host],
        )


def environment_table(config: Config, world: World, device: torch.device, members: list[dict[str, Any]]) -> str:
    """Who takes part: processes, machines, devices, libraries, and how they reach each other."""
    hosts = list(dict.fromkeys(member["host"] for member in members))
    rows = _by_rank(members) if len(members) <= MOST_ROWS else _by_host(members, hosts)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    facts = [
        (
            "launcher",
            f"{_launcher(world)}, {world.size} processes on {len(hosts)} machine{'s' if len(hosts) > 1 else ''}",
        ),
        (
            "backend",
            f"{backend_of(config.DIST, device)}, rendezvous at {members[0]['rendezvous']}; "
            f"DIST.TIMEOUT {config.DIST.TIMEOUT:g} min",
        ),
        ("libraries", ", ".join(f"{name} {what}" for name, what in libraries().items())),
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
    told = [member["peers"] for member in members if member["peers"] and member["peers"][1]]
    if not told:
        return None
    least, pairs = min(told, key=lambda peers: peers[0] / peers[1])
    text = f"{least} of {pairs} pairs of GPUs of a machine reach each other directly"
    if least < pairs:
        return f"{text}; the others go through host memory (nvidia-smi topo -m shows why)"
    return f"{text}, by NVLink or PCIe (nvidia-smi topo -m tells which)"


def libraries() -> dict[str, str]:
    """Versions of what computes and of what carries the exchange."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "timm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["cuDNN"] = _dotted(torch.backends.cudnn.version())
        found["NCCL"] = ".".join(map(str, nccl.version()))
        driver = _driver()
        if driver:
            found["driver"] = driver
    return found


def _dotted(number: int | None) -> str:
    """9.1.0 of cuDNN's 90100; 8.9.2 of its older 8902."""
    if number is None:
        return "none"
    big = 10000 if number >= 90000 else 1000
    return f"{number // big}.{number % big // 100}.{number % 100}"


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None
