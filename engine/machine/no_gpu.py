"""The notice of a run that uses the CPU without being asked to: why there is no GPU, and what to expect."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from utils.config import Config

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def no_gpu_notice(config: Config, device: torch.device, env: Mapping[str, str] = os.environ) -> str | None:
    """One line for the log; None if a GPU is used, or if -device cpu was given."""
    if device.type != "cpu" or config.DEVICE is not None:
        return None
    return (
        f"{_why(env)}: this run uses the CPU, which is enough to try things out (training with "
        "-cfg configs/vit_digits.yaml takes a minute or two), but training on ImageNet would take weeks. -dry_run "
        "estimates the time of training; pass -device cpu to silence this."
    )


def has_driver() -> bool:
    """Whether the machine seems to have a GPU, even if CUDA_VISIBLE_DEVICES hides it."""
    return NVIDIA_DRIVER.exists() or torch.version.hip is not None


def _why(env: Mapping[str, str]) -> str:
    hidden, driver = env.get("CUDA_VISIBLE_DEVICES"), NVIDIA_DRIVER.exists()
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"No GPU is visible, because CUDA_VISIBLE_DEVICES is {hidden!r}"
    if driver and torch.version.cuda is None and torch.version.hip is None:
        return (
            f"No GPU is visible, though an NVIDIA driver is installed: torch {torch.__version__} is built for CPUs "
            "only (pip install torch torchvision in a new environment installs them with CUDA)"
        )
    if driver and hidden is not None:
        return f"No GPU is visible, because CUDA_VISIBLE_DEVICES is {hidden!r} (nvidia-smi -L lists the GPUs)"
    if driver:
        return "No GPU is visible, though an NVIDIA driver is installed (nvidia-smi shows whether it works)"
    return "No GPU is visible"
