"""TRAIN.COMPILE: decide what to compile on this device: nothing, each block, or the whole update."""

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

from engine.measure.mfu import training_flops
from engine.update import Parts
from models import build_without_weights
from models.blocks import blocks_of
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank
from utils.errors import UserError
from utils.log import log
from utils.text import counted

AUTO, NONE, BLOCKS, WHOLE = "auto", "none", "blocks", "whole"
CUDA_GRAPHS = "reduce-overhead"
NESTED = "with DIST.STRATEGY fsdp at AMP.LEVEL O2 or NAIVE, compiling needs torch 2.15 or later"


@dataclass(frozen=True)
class CompileChoice:
    how: str
    mode: str
    reason: str

    @property
    def torch_mode(self) -> str:
        """torch's name of the mode. Only reduce-overhead uses CUDA graphs, which torch's max-autotune would use too."""
        return "max-autotune-no-cudagraphs" if self.mode == "max-autotune" else self.mode

    def as_noted(self) -> dict[str, str]:
        """Entries for run.json and checkpoints."""
        return {"compile": self.how, "compile_why": self.reason}


def choose_compiling(
    config: Config, parts: Parts, world: World, updates: int, previous: Mapping[str, Any]
) -> CompileChoice:
    """What to compile. A collective call.

    `updates`: number of updates left. `previous`: choices of the run that is resumed.
    """
    wanted = config.TRAIN.COMPILE
    if wanted != AUTO:
        how, reason = wanted, "as asked for"
    else:
        choice = _previous_choice(previous, parts.precision.device) or _by_gain(config, parts, updates)
        how, reason = broadcast(choice, world)
    if how == WHOLE and world.size > 1 and not parts.precision.computes_in_copy:
        how, reason = BLOCKS, "one graph would delay the all-reduce of gradients until the backward pass has ended"
        if wanted == AUTO and not has_blocks(parts.model):
            how, reason = NONE, f"auto: {reason}, and {type(parts.model).__name__} has no blocks to compile one by one"
    if wanted == AUTO and how == NONE and parts.precision.fp8 and parts.precision.device.type == "cuda":
        log.warning(
            "fp8 without torch.compile is usually slower than bf16, because casting to 8 bits takes time of its own. "
            "This run is not compiled (%s): set TRAIN.COMPILE=%s, or use -amp bf16.",
            reason,
            WHOLE if world.size == 1 else BLOCKS,
        )
    if how == BLOCKS and wanted == AUTO and _is_nested(parts):
        how, reason = NONE, f"auto: {NESTED}"
    choice = CompileChoice(how, config.TRAIN.COMPILE_MODE, reason)
    on_every_rank(world, lambda: _check(choice, parts, world))
    return choice


def _previous_choice(previous: Mapping[str, Any], device: torch.device) -> tuple[str, str] | None:
    """The choice of the run that is resumed; None if it has none, or one for another kind of machine."""
    how = previous.get("compile")
    if how is None:
        return None
    device_before = str(previous.get("computed_in", device.type)).partition(" ")[0]
    missing = None if how == NONE else _missing_tool(device)
    if device_before == device.type and missing is None:
        return how, "as before the resume"
    log.info(
        "The resumed run used TRAIN.COMPILE %s, but %s, so TRAIN.COMPILE is chosen again.",
        how,
        f"on {device_before} instead of {device.type}" if device_before != device.type else missing,
    )
    return None


def _by_gain(config: Config, parts: Parts, updates: int) -> tuple[str, str]:
    device, data = parts.precision.device, config.DATA
    if device.type != "cuda":
        return NONE, f"auto: on {device.type} compiling takes longer than it saves"
    if missing := _missing_tool(device):
        return NONE, f"auto: {missing}"
    from engine.compile.gain import estimate_gain

    without_weights = build_without_weights(config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    flops = training_flops(without_weights, data.IMAGE_CHANNELS, data.IMAGE_SIZE)
    saved = estimate_gain(flops, data.BATCH_SIZE, config.TRAIN.ACCUM_ITER, updates, parts.precision.level != "O0")
    if not saved.is_worthwhile:
        return NONE, f"auto: {saved.words()}"
    in_blocks = config.TRAIN.GRAD_CHECKPOINT != "none" and has_blocks(parts.model)
    return BLOCKS if in_blocks else WHOLE, f"auto: {saved.words()}"


def _is_nested(parts: Parts) -> bool:
    return parts.sharding is not None and parts.sharding.has_nested_units


def has_blocks(model: nn.Module) -> bool:
    return any(True for _ in blocks_of(model))


def _check(choice: CompileChoice, parts: Parts, world: World) -> None:
    if choice.how == NONE:
        return
    device = parts.precision.device
    if missing := _missing_tool(device):
        raise UserError(f"TRAIN.COMPILE {choice.how}: {missing}. Install what is missing, or set TRAIN.COMPILE=none.")
    if choice.how == BLOCKS and not has_blocks(parts.model):
        raise UserError(
            f"TRAIN.COMPILE: {type(parts.model).__name__} has no sequence of equal blocks to compile; use "
            f"{'none' if world.size > 1 else 'whole or none'}."
        )
    if choice.how == BLOCKS and _is_nested(parts):
        raise UserError(f"TRAIN.COMPILE blocks: {NESTED}; set TRAIN.COMPILE=none, or use AMP.LEVEL O1.")
    if choice.mode != CUDA_GRAPHS:
        return
    if device.type != "cuda":
        raise UserError(
            f"TRAIN.COMPILE_MODE {CUDA_GRAPHS} uses CUDA graphs, which need a GPU; on {device.type} use default."
        )
    if choice.how != WHOLE or world.size > 1:
        raise UserError(
            f"TRAIN.COMPILE_MODE {CUDA_GRAPHS} works only with TRAIN.COMPILE whole in one process, not with "
            f"{choice.how} in {counted(world.size, 'process')}; use default."
        )


def _missing_tool(device: torch.device) -> str | None:
    """What torch.compile needs and this machine lacks; checked here, since its own errors come late and are long."""
    of_cpu = ("clang++" if sys.platform == "darwin" else "g++",)
    variable, usual = ("CXX", of_cpu) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    names = (os.environ[variable],) if variable in os.environ else usual
    if not any(map(shutil.which, names)):
        return f"torch.compile needs a compiler, and there is no {' or '.join(names)}"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))  # Debian's default scheme has another folder
    if sys.platform != "win32" and not (headers / "Python.h").is_file():
        return f"torch.compile needs Python's headers (python3-dev), and there is no {headers / 'Python.h'}"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "torch.compile needs the package triton, and a GPU of compute capability 7.0 or newer"
    return None
