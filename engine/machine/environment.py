"""Joins the processes of a run, checks that they are consistent, and logs a table of machines and devices."""

import os
import socket
from typing import Any

import torch

from datasets.loading.order import data_identity, identity_of
from engine.machine.device import describe_device, libraries
from engine.setup import Ready, ReadyToTrain
from utils.cli import version_text
from utils.config import Config
from utils.config.keys import settings, value_of
from utils.distributed.group import backend_of, join
from utils.distributed.world import World, all_gather
from utils.errors import AllRanksUserError
from utils.log import DETAIL, IN_FULL, brief_terminal, log
from utils.program import LAUNCHER_PID, started_as
from utils.text import aligned, counted

MAX_ROWS = 16


def join_run(config: Config, world: World, device: torch.device, threads: int) -> None:
    """Join the other processes, check that settings and devices are consistent, and log who takes part."""
    from utils.distributed.watchdog import start_time_of

    member: dict[str, Any] = {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": start_time_of(os.getpid()),
        "device": describe_device(device),
        "threads": threads,
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
        "vitamp": version_text().splitlines()[0].split()[-1],  # the first line is "vitamp 0.3.1"
        "torch": torch.__version__,
    }
    # Settings that must be equal on all ranks. Each machine may start another number of processes.
    common = {key: str(value_of(config, key)) for key in settings() if key != "NGPUS"}
    members = join(world, config.DIST, device, member, common)
    _check_devices(members)
    brief = brief_terminal()
    shows_table = brief is not None and not brief.has_table  # in a pipe; a terminal has no room for it
    log.info(environment_table(config, world, device, members), extra=IN_FULL if shows_table else DETAIL)


def _check_devices(members: list[dict[str, Any]]) -> None:
    """Raise AllRanksUserError if two ranks share a GPU. All ranks have the same `members`, so all raise it."""
    rank_of_gpu: dict[tuple[str, str], int] = {}
    for member in members:
        if member["gpu"] is None:
            continue
        first_rank = rank_of_gpu.setdefault((member["host"], member["gpu"]), member["rank"])
        if first_rank != member["rank"]:
            raise AllRanksUserError(
                f"ranks {first_rank} and {member['rank']} on {member['host']} were given the same GPU; start one "
                "process per GPU. Ranks started by hand or by a script each need LOCAL_RANK, their number on the "
                "machine, and LOCAL_WORLD_SIZE, how many it runs, in the environment."
            )


def check_images(ready: Ready, world: World) -> None:
    """Raise AllRanksUserError if a rank's copy of the data set differs from that of rank 0. A collective call."""
    # Split -> number of images, and a hash of their names and labels; for training images, of their order, too.
    splits: dict[str, tuple[int, Any]] = {"validation": (len(ready.val_set), data_identity(ready.val_set))}
    if isinstance(ready, ReadyToTrain):
        splits["training"] = len(ready.train_set), identity_of(ready.train_set, ready.train_loader.order)
    if ready.neighbours is not None:
        for split, images in (("training", ready.neighbours.bank), ("validation", ready.neighbours.images)):
            splits[f"TRAIN.KNN's {split}"] = len(images), data_identity(images)
    splits_of_ranks = all_gather([splits], world)
    for rank, splits_of_rank in enumerate(splits_of_ranks):
        for split, (count_on_rank_0, hash_on_rank_0) in splits_of_ranks[0].items():
            count, identity = splits_of_rank[split]
            if count != count_on_rank_0 or identity != hash_on_rank_0:
                raise AllRanksUserError(
                    f"rank {rank} has other {split} images than rank 0, by their names and labels ({count} "
                    f"and {count_on_rank_0}). Each machine needs the same copy of the data set, complete."
                )


def environment_table(config: Config, world: World, device: torch.device, members: list[dict[str, Any]]) -> str:
    """Format a table of processes, machines, devices and libraries.

    `members`: description of each rank, as `join_run` makes them.
    """
    rows: list[tuple[str, ...]] = [("rank", "machine", "local rank", "process", "threads", "device")]
    keys = ("rank", "host", "local_rank", "pid", "threads", "device")
    for member in members[:MAX_ROWS]:
        rows.append(tuple(str(member[key]) for key in keys))
    lines = ["Processes"]
    lines += aligned(rows)
    if len(members) > MAX_ROWS:
        lines.append(f"... and {len(members) - MAX_ROWS} more")
    was_started_by_us = LAUNCHER_PID in os.environ  # main_multi_gpu.py sets it for the processes that it starts
    launcher = f"{started_as('main_multi_gpu.py')} itself" if was_started_by_us else world.launcher
    machines = counted(len({member["host"] for member in members}), "machine")
    versions = ", ".join(f"{name} {number}" for name, number in libraries().items())
    lines += [
        f"launcher   {launcher}, {counted(world.size, 'process')} on {machines}",
        f"backend    {backend_of(config.DIST, device)}, rendezvous at {members[0]['rendezvous']}; "
        f"DIST.TIMEOUT {config.DIST.TIMEOUT:g} min",
        f"libraries  {versions}",
    ]
    return "\n  ".join(lines)
