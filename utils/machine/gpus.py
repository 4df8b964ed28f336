"""-gpus 0,1: use only these GPUs, as CUDA_VISIBLE_DEVICES would."""

from __future__ import annotations

import os

from utils.cli import CommandLine
from utils.errors import UserError
from utils.program import started_as

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASKED = "VITAMP_GPUS"
"""Environment variable that carries the flag to the processes that this one starts."""


def limit_visible_gpus(command: CommandLine, one_process: bool) -> None:
    """Make the GPUs of -gpus the only visible ones, for this process and those that it starts.

    Call it before CUDA is initialised. `one_process`: the program uses one GPU.
    """
    text = command.gpus
    if text is None:
        return
    given = {**{key: value for key, (value, _) in command.flags.items()}, **command.words}
    device, processes = given.get("DEVICE"), given.get("NGPUS")
    names = [name.strip() for name in text.split(",")]
    if not all(name.isdecimal() for name in names) or len(set(names)) < len(names):
        raise UserError(f"-gpus {text}: takes the indices of GPUs, each once, such as 0 or 0,1.")
    chosen, before = ",".join(names), os.environ.get(VISIBLE)
    if before is not None and before != chosen:
        raise UserError(f"-gpus {text}: {VISIBLE} is {before!r} in the environment; use only one of the two.")
    if device not in (None, "cuda"):
        raise UserError(f"-gpus {text} with -device {device}, which uses no CUDA GPU; use only one of the two.")
    if processes not in (None, "-1", str(len(names))):
        raise UserError(f"-gpus {text} -ngpus {processes}: -gpus starts one process per GPU; leave -ngpus out.")
    if one_process and len(names) > 1:
        raise UserError(
            f"-gpus {text}: this program uses one GPU; give one index, or train with {started_as('main_multi_gpu.py')}."
        )
    os.environ[VISIBLE] = os.environ[ASKED] = chosen


def check_asked_gpus(visible: int, any_here: bool) -> None:
    """Raise UserError if `visible` is less than the number of GPUs in -gpus. `any_here`: the machine has a GPU."""
    asked = os.environ.get(ASKED)
    if asked is not None and not visible and not any_here:
        raise UserError(f"-gpus {asked}: this machine has no GPU; leave -gpus out to use the CPU.")
    if asked is not None and visible < asked.count(",") + 1:
        seen = f"only {visible} of them" if visible else "no GPU"
        raise UserError(f"-gpus {asked}: torch sees {seen} on this machine; give other indices, or leave -gpus out.")
