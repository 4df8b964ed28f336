"""-gpus 0,1: use these GPUs of the machine only, as CUDA_VISIBLE_DEVICES would."""

from __future__ import annotations

import os

from utils.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASKED = "VITAMP_GPUS"
"""Remembers the flag, for this process and those that it starts."""


def show_only(text: str, devices: str | None, processes: str | None, one_process: bool) -> None:
    """Before CUDA is asked for anything. `devices`, `processes`: what -device and -ngpus say."""
    names = [name.strip() for name in text.split(",")]
    if not all(name.isdecimal() for name in names) or len(set(names)) < len(names):
        raise UserError(f"-gpus {text}: takes the numbers of GPUs, each once, such as 0 or 0,1.")
    chosen, before = ",".join(names), os.environ.get(VISIBLE)
    if before is not None and before != chosen:
        raise UserError(f"-gpus {text}: {VISIBLE} is {before!r} in the environment; give one of the two.")
    if devices not in (None, "cuda"):
        raise UserError(f"-gpus {text} with -device {devices}, which uses no GPU of CUDA's; give one of the two.")
    if processes not in (None, "-1", str(len(names))):
        raise UserError(f"-gpus {text} -ngpus {processes}: one process per GPU; leave -ngpus out.")
    if one_process and len(names) > 1:
        raise UserError(f"-gpus {text}: this program uses one GPU; name one, or train with main_multi_gpu.py.")
    os.environ[VISIBLE] = os.environ[ASKED] = chosen


def check_there(visible: int, any_here: bool) -> None:
    """Raise UserError where `visible` GPUs are fewer than -gpus asked for. `any_here`: the machine has a GPU."""
    asked = os.environ.get(ASKED)
    if asked is not None and not visible and not any_here:
        raise UserError(f"-gpus {asked}: this machine has no GPU; leave -gpus out to use the CPU.")
    if asked is not None and visible < asked.count(",") + 1:
        found = f"only {visible} of them" if visible else "no GPU"
        raise UserError(f"-gpus {asked}: torch sees {found} on this machine; name others, or leave -gpus out.")
