"""TRAIN.COMPILE: what of an update is compiled on this device, in this run, and why."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.compile.gain import gain
from engine.measure.mfu import training_flops
from engine.update import Parts
from models import build_without_weights
from models.blocks import blocks_of
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank
from utils.errors import UserError
from utils.log import log

AUTO, NONE, BLOCKS, WHOLE = "auto", "none", "blocks", "whole"
CUDA_GRAPHS = "reduce-overhead"


@dataclass(frozen=True)
class CompileChoice:
    how: str
    mode: str
    reason: str

    @property
    def torch_mode(self) -> str:
        """CUDA graphs come with no mode but that one: torch's max-autotune would bring them along."""
        return "max-autotune-no-cudagraphs" if self.mode == "max-autotune" else self.mode

    def as_noted(self) -> dict[str, str]:
        """For run.json and checkpoints."""
        return {"compile": self.how, "compile_why": self.reason}


def choose_compiling(
    config: Config, parts: Parts, world: World, updates: int, kept: Mapping[str, Any]
) -> CompileChoice:
    """`updates`: those that are left. `kept`: all choices of the run that resumes. A collective call."""
    wanted = config.TRAIN.COMPILE
    if wanted != AUTO:
        how, reason = wanted, "as asked for"
    else:
        how, reason = broadcast(_kept(kept, parts.precision.device) or _by_gain(config, parts, updates), world)
    if how == WHOLE and world.size > 1 and parts.half_copy is None:
        how, reason = BLOCKS, "ranks exchange gradients during the backward pass, which one graph would hold back"
        if wanted == AUTO and not has_blocks(parts.model):
            how = NONE
    choice = CompileChoice(how, config.TRAIN.COMPILE_MODE, reason)
    on_every_rank(world, lambda: _check(choice, parts, world))
    return choice


def _kept(kept: Mapping[str, Any], device: torch.device) -> tuple[str, str] | None:
    """The choice of the run that resumes; None where there is none, or where it was made for another machine."""
    how = kept.get("compile")
    if how is None:
        return None
    before = str(kept.get("computed_in", device.type)).partition(" ")[0]
    lacking = None if how == NONE else _missing_tool(device)
    if before == device.type and lacking is None:
        return how, "as this run had it"
    log.info(
        "Whether to compile is chosen anew: this run had TRAIN.COMPILE %s %s.",
        how,
        f"on {before}, and now is on {device.type}" if before != device.type else f"before, and now {lacking}",
    )
    return None


def _by_gain(config: Config, parts: Parts, updates: int) -> tuple[str, str]:
    device, data = parts.precision.device, config.DATA
    if device.type != "cuda":
        return NONE, f"auto: on {device.type} compiling takes longer than it saves"
    if missing := _missing_tool(device):
        return NONE, f"auto: {missing}"
    bare = build_without_weights(config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    flops = training_flops(bare, data.IMAGE_CHANNELS, data.IMAGE_SIZE)
    found = gain(flops, data.BATCH_SIZE, config.TRAIN.ACCUM_ITER, updates, parts.precision.level != "O0")
    if not found.pays:
        return NONE, f"auto: {found.words()}"
    in_blocks = config.TRAIN.GRAD_CHECKPOINT != "none" and has_blocks(parts.model)
    return BLOCKS if in_blocks else WHOLE, f"auto: {found.words()}"


def has_blocks(model: nn.Module) -> bool:
    return any(True for _ in blocks_of(model))


def _check(choice: CompileChoice, parts: Parts, world: World) -> None:
    if choice.how == NONE:
        return
    device = parts.precision.device
    if missing := _missing_tool(device):
        raise UserError(f"TRAIN.COMPILE {choice.how}: {missing}. Install it, or set TRAIN.COMPILE=none.")
    if choice.how == BLOCKS and not has_blocks(parts.model):
        raise UserError(
            f"TRAIN.COMPILE blocks: {type(parts.model).__name__} has no row of like blocks; use "
            f"{'none' if world.size > 1 else 'whole or none'}."
        )
    if choice.mode != CUDA_GRAPHS:
        return
    if device.type != "cuda":
        raise UserError(
            f"TRAIN.COMPILE_MODE {CUDA_GRAPHS}: its CUDA graphs are for GPUs; on {device.type} use default."
        )
    if choice.how != WHOLE or world.size > 1:
        raise UserError(
            f"TRAIN.COMPILE_MODE {CUDA_GRAPHS}: its CUDA graphs hold the whole of one process's work, so it goes with "
            f"TRAIN.COMPILE whole in one process, and here is {choice.how} in {world.size}. Use default."
        )


def _missing_tool(device: torch.device) -> str | None:
    """What the compiler would stop for, after a while and in many more words."""
    of_cpu = ("clang++" if sys.platform == "darwin" else "g++",)
    variable, usual = ("CXX", of_cpu) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    names = (os.environ[variable],) if variable in os.environ else usual
    if not any(map(shutil.which, names)):
        return f"torch.compile needs a compiler, and here is no {' or '.join(names)}"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))  # not Debian's own scheme, which leads elsewhere
    if sys.platform != "win32" and not (headers / "Python.h").is_file():
        return f"torch.compile needs Python's headers (python3-dev), and here is no {headers / 'Python.h'}"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "torch.compile needs the package triton, and a GPU of compute capability 7.0 or newer"
    return None
