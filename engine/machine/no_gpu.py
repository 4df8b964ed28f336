"""What a run on a CPU says where nobody asked for a CPU: why there is no GPU, and what to expect."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from utils.config import Config

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def hint(config: Config, device: torch.device, env: Mapping[str, str] = os.environ) -> str | None:
    """One line; None where a GPU is used, or the CPU was asked for (-device cpu)."""
    if device.type != "cpu" or config.DEVICE is not None:
        return None
    return (
        f"{_why(env)}: this runs on the CPU. That is enough to try things out (configs/vit_digits.yaml takes a minute "
        "or two) and takes weeks for ImageNet; -dry_run estimates it, -device cpu says that it is meant."
    )


def has_driver() -> bool:
    """Whether the machine seems to have a GPU, also one that CUDA_VISIBLE_DEVICES hides."""
    return NVIDIA_DRIVER.exists() or torch.version.hip is not None


def _why(env: Mapping[str, str]) -> str:
    hidden, driver = env.get("CUDA_VISIBLE_DEVICES"), NVIDIA_DRIVER.exists()
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"No GPU is seen, for CUDA_VISIBLE_DEVICES is {hidden!r} and hides them all"
    if driver and torch.version.cuda is None and torch.version.hip is None:
        return (
            f"No GPU is seen, though an NVIDIA driver is here: torch {torch.__version__} is a build for CPUs alone "
            "(pip install -r requirements.txt in a new environment brings the other)"
        )
    if driver and hidden is not None:
        return f"No GPU is seen, for CUDA_VISIBLE_DEVICES is {hidden!r} (nvidia-smi -L lists those that are here)"
    if driver:
        return "No GPU is seen, though an NVIDIA driver is here (nvidia-smi tells whether it works)"
    return "No GPU is seen"
