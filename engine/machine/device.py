"""Chooses, sets up and describes the device of a run, and defines `Run`, the object that each step of a run needs."""

import contextlib
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.cuda import nccl

from utils.config import Config
from utils.distributed.launchers import SHOW_ONE_GPU, TORCHRUN
from utils.distributed.world import ALONE, World
from utils.errors import UserError
from utils.machine.cpus import keep_freed_memory
from utils.record.run_folder import versions
from utils.text import counted

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
PROCESSORS = Path("/proc/cpuinfo")


def pick_device(wanted: str | None, world: World) -> torch.device:
    """Return the device that -device asks for, or the best one available. Each local rank gets its own GPU.

    `wanted`: 'cuda', 'mps', 'cpu', or None to choose. UserError if the device is not available to this rank.
    """
    if wanted:
        kind = wanted
    elif torch.cuda.is_available():
        kind = "cuda"
    else:
        kind = "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("-device mps: this machine has no mps device; leave -device out to use what is available.")
        return torch.device("mps")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = f" (CUDA_VISIBLE_DEVICES is {variable!r})" if variable is not None else ""
        raise UserError(f"-device cuda: torch {torch.__version__} sees no GPU here{reason}; use -device cpu.")
    if visible == 1 and world.launcher in SHOW_ONE_GPU:
        return torch.device("cuda", 0)  # if two ranks were shown the same GPU, `join_run` raises an error
    if world.local_rank >= visible:
        raise UserError(
            f"rank {world.rank} is process number {world.local_rank + 1} on this machine and needs its own GPU, but "
            f"only {visible} GPU(s) are visible; start no more processes than GPUs, or use -device cpu."
        )
    return torch.device("cuda", world.local_rank)


def set_up_device(config: Config, device: torch.device, world: World) -> int:
    """Set torch's current device, its CPU threads and its determinism. Returns the number of threads.

    Rounding depends on the number of threads that compute a sum. So the number is set, never left to torch.
    """
    threads = threads_of(config, world)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "cpu":
        keep_freed_memory()
    if config.DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # NVIDIA's value for reproducible matrix products
    if torch.are_deterministic_algorithms_enabled() != config.DETERMINISTIC:  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(config.DETERMINISTIC)
    torch.backends.cudnn.benchmark = not config.DETERMINISTIC
    return threads


def threads_of(config: Config, world: World) -> int:
    """Return the number of CPU threads: THREADS, else OMP_NUM_THREADS, else this process's share of the cores."""
    if config.THREADS:
        return config.THREADS
    # The variable may be a list, with a number for each level of nested threads: the first counts.
    first_level, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    first_level = first_level.strip()
    # If the user has not set the variable, torchrun sets it to 1 for its ranks, which does not count.
    if world.launcher == TORCHRUN and first_level == "1" and not _parent_has_variable("OMP_NUM_THREADS"):
        return world.own_cores
    threads = int(first_level) if first_level.isdecimal() else 0
    return threads or world.own_cores


def _parent_has_variable(name: str) -> bool:
    """Return whether an environment variable is set in the parent process, which is torchrun for its ranks."""
    with contextlib.suppress(OSError):
        return f"{name}=".encode() in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    return False


def describe_devices(device: torch.device, world: World, threads: int) -> str:
    """Describe the devices of all ranks: 'cuda x 8: NVIDIA H200, 140 GiB, ...'."""
    name = describe_device(device)
    if device.type == "cuda":
        name += f", CUDA {torch.version.cuda}"
    elif device.type == "cpu":
        name += f", {counted(threads, 'thread')}"
    return f"{device.type} x {world.size}: {name}" if world.size > 1 else f"{device.type}: {name}"


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
    return f"Apple GPU ({platform.machine()})" if device.type == "mps" else processor()


def processor() -> str:
    """Return the name of the CPU, or at least its architecture."""
    with contextlib.suppress(OSError), PROCESSORS.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def visible_gpus(config: Config) -> int:
    """Return the number of visible GPUs; 0 if the settings ask for another device."""
    on_gpus = config.DEVICE in (None, "cuda") and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpus else 0


def visible_devices(config: Config) -> int:
    """Return the number of processes that main_multi_gpu.py starts: -ngpus, or one per visible GPU.

    UserError if fewer GPUs are visible than asked for.
    """
    visible = visible_gpus(config)
    if config.DEVICE == "cuda" and not visible:
        pick_device("cuda", ALONE)  # raises an error that says why there is none
    if config.NGPUS == 0:
        raise UserError("-ngpus 0: at least one process is needed; leave -ngpus out for one per visible GPU.")
    if config.NGPUS == -1:
        return max(1, visible)
    if visible and visible < config.NGPUS:
        raise UserError(f"-ngpus {config.NGPUS}: only {visible} GPU(s) are visible; use -ngpus {visible} or fewer.")
    return config.NGPUS


def each_device(config: Config) -> list[str | None]:
    """Return for each process of `visible_devices` the CUDA_VISIBLE_DEVICES that shows it one GPU; None on a CPU."""
    processes = visible_devices(config)
    if not visible_gpus(config):
        return [None] * processes
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = variable.split(",") if variable else [f"{number}" for number in range(processes)]
    return list(names[:processes])


def why_one_process(config: Config) -> str:
    """Say for the log why main_multi_gpu.py starts only one process."""
    if config.NGPUS == 1:
        return "-ngpus 1"
    return "one GPU is visible" if visible_gpus(config) else "no CUDA GPU is used; -ngpus N starts N processes"


def no_gpu_notice(config: Config, device: torch.device, dry: bool, env: Mapping[str, str] = os.environ) -> str | None:
    """Return a line for the log that says why the run uses the CPU, and what may be wrong.

    None if a GPU is used, or if -device cpu was given. `dry`: this is a dry run, so the line does not suggest one.
    """
    if device.type != "cpu" or config.DEVICE is not None:
        return None
    variable = env.get("CUDA_VISIBLE_DEVICES")
    facts = []
    if variable is not None:
        facts.append(f"CUDA_VISIBLE_DEVICES is {variable!r}")
    if NVIDIA_DRIVER.exists():
        facts.append("an NVIDIA driver is installed, and nvidia-smi shows whether it works")
        if torch.version.cuda is None and torch.version.hip is None:
            facts.append(
                f"torch {torch.__version__} is built for CPUs only, and pip install torch torchvision in a new "
                "environment installs them with CUDA"
            )
    reasons = f" ({'; '.join(facts)})" if facts else ""
    slow = ", on which training on ImageNet takes weeks" if config.DATA.DATASET == "imagenet2012" else ""
    estimate = "" if dry else "-dry_run estimates the time of training; "
    return f"No GPU is visible{reasons}: this run uses the CPU{slow}. {estimate}-device cpu silences this."


def libraries() -> dict[str, str]:
    """Return the versions of Python, torch and the libraries that compute and communicate."""
    library_versions = {"python": platform.python_version(), "torch": torch.__version__}
    library_versions.update(versions("torchvision", "timm"))
    if torch.cuda.is_available():
        library_versions["CUDA"] = str(torch.version.cuda)
        number = torch.backends.cudnn.version() or 0  # such as 90100 for 9.1.0
        library_versions["cuDNN"] = f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
        library_versions["NCCL"] = ".".join(map(str, nccl.version()))
        with contextlib.suppress(OSError):
            text = NVIDIA_DRIVER.read_text(encoding="ascii", errors="replace")
            driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)  # such as 550.54.15
            if driver:
                library_versions["driver"] = driver[0]
    return library_versions


@dataclass(frozen=True)
class Run:
    """Settings of a run, and the rank, device and threads of this process."""

    config: Config
    world: World
    device: torch.device
    threads: int
    """CPU threads of this process."""
    auto_batch_size: bool = False
    """Whether DATA.BATCH_SIZE was found by `auto`."""
    asked: Mapping[str, object] = field(default_factory=dict)
    """Settings by dotted key, as given, where this number of processes needs others: config.yaml keeps these."""
    compiling: tuple[str, str] | None = None
    """What the trial of TRAIN.NUM_EPOCHS auto chose to compile, and why: the epochs are planned at that speed."""


def global_batch(config: Config, world: World) -> int:
    """Images per update."""
    return config.DATA.BATCH_SIZE * world.size * config.TRAIN.ACCUM_ITER


def with_batch(config: Config, batch: int, accumulated: int) -> Config:
    """The settings with these numbers for DATA.BATCH_SIZE and TRAIN.ACCUM_ITER."""
    return config.changed(DATA={"BATCH_SIZE": batch}, TRAIN={"ACCUM_ITER": accumulated})
