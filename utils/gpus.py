"""-gpus 0,1: use these GPUs of the machine only, as CUDA_VISIBLE_DEVICES would."""

from __future__ import annotations

import os

from utils.cli import CommandLine
from utils.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASKED = "VITAMP_GPUS"
"""Remembers the flag, for this process and those that it starts."""


def show_only(command: CommandLine, one_process: bool) -> None:
    """Make the GPUs of -gpus the only visible ones, for this process and those that it starts.

    Before CUDA is asked for anything. `one_process`: the program uses one GPU.
    """
    text = command.gpus
    if text is None:
        return
    given = {**{key: value for key, (value, _) in command.flags.items()}, **command.words}
    devices, processes = given.get("DEVICE"), given.get("NGPUS")
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
