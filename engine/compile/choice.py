"""Decides what to compile on this device (TRAIN.COMPILE): nothing, each block, or whole micro-batches."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.compile.compiled import BLOCKS, NONE, WHOLE, Compiling
from engine.measure.meters import work_until
from engine.update import TrainState
from models.build import build_without_weights
from models.parts import blocks_of
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank
from utils.errors import UserError
from utils.log import log
from utils.text import counted
from vitamp.sizes import ImageSize

AUTO = "auto"

# Whether compiling on a GPU is worthwhile is estimated from measurements on an H200 (docs/benchmarks.md), so the gain
# must exceed the cost by far.
SECONDS_TO_COMPILE = 60.0
"""Measured: 20 to 35, with 16 CPU cores."""
FRACTION_SAVED = 0.2
"""Measured: 0.24 of an update's time for ViT-S/16, 0.18 for B, 0.14 for L."""
SAVED_PER_MICRO_BATCH = 0.002
"""Least number of seconds saved, even with small models: kernels are no longer launched one by one."""
FLOPS_PER_SECOND_IN_FP32 = 4e13
"""Speed of training on a large GPU"""
FLOPS_PER_SECOND_WITH_AMP = 2e14
REQUIRED_RATIO = 2.0
"""Time saved divided by compile time, above which `auto` compiles."""


def choose_compiling(
    config: Config,
    parts: TrainState,
    world: World,
    updates: int,
    previous: Mapping[str, Any],
    of_trial: tuple[str, str] | None = None,
) -> tuple[str, str]:
    """Choose what to compile, and set it in the run's `Compiling`. Returns NONE, BLOCKS or WHOLE, and the reason.

    `updates`: number of updates left. `previous`: choices of the run that is resumed; empty for a new run.
    `of_trial`: choice and reason of the trial that found TRAIN.NUM_EPOCHS (`Run.compiling`); None without one.
    A collective call.
    """
    wanted = config.TRAIN.COMPILE
    device = parts.precision.device
    if wanted != AUTO:
        how = wanted
        reason = "as asked for"
    else:
        # A resumed run compiles as before, and epochs that a trial has planned are trained as in the trial.
        choice = _previous_choice(previous, device) or of_trial or _choose_by_gain(config, parts, updates)
        how, reason = broadcast(choice, world)

    # With a half-precision copy, gradients are all-reduced once per update in any case.
    all_reduces_in_backward = world.size > 1 and (parts.sharding is not None or not parts.precision.computes_in_copy)
    if how == WHOLE and all_reduces_in_backward:
        how = BLOCKS
        reason = "one graph would delay the all-reduce of gradients until the backward pass has ended"
        if wanted == AUTO and not has_blocks(parts.model):
            how = NONE
            reason = f"auto: {reason}, and {type(parts.model).__name__} has no blocks to compile one by one"

    if wanted == AUTO and how == NONE and parts.precision.fp8 and device.type == "cuda":
        log.warning(
            "fp8 without torch.compile is usually slower than bf16, because casting to 8 bits takes time of its own. "
            "This run is not compiled (%s): set TRAIN.COMPILE=%s, or use -amp bf16.",
            reason,
            WHOLE if world.size == 1 else BLOCKS,
        )
    on_every_rank(world, lambda: _check_possible(how, parts, world))
    compiling = parts.callback(Compiling)
    if compiling is not None:
        compiling.how = how
        compiling.auto = wanted == AUTO
    return how, reason


def _check_possible(how: str, parts: TrainState, world: World) -> None:
    """Raise UserError if this machine or model cannot compile in this way."""
    if how == NONE:
        return
    missing = _missing_tool(parts.precision.device)
    if missing:
        raise UserError(f"TRAIN.COMPILE {how}: {missing}. Install what is missing, or set TRAIN.COMPILE=none.")
    if how == BLOCKS and not has_blocks(parts.model):
        possible = "none" if world.size > 1 else "whole or none"  # several ranks would turn whole into blocks
        raise UserError(
            f"TRAIN.COMPILE: {type(parts.model).__name__} has no sequence of equal blocks to compile; use {possible}."
        )


def _previous_choice(previous: Mapping[str, Any], device: torch.device) -> tuple[str, str] | None:
    """Return the choice of the run that is resumed, with the reason; None if it has none, or none that fits here."""
    how = previous.get("compile")
    if how is None:
        return None
    # "computed_in" begins with the type of the device. Runs that have no such entry are taken to have used this one.
    previous_device, _, _ = str(previous.get("computed_in", device.type)).partition(" ")
    works_here = previous_device == device.type and (how == NONE or _missing_tool(device) is None)
    return (how, "as before the resume") if works_here else None


def _choose_by_gain(config: Config, parts: TrainState, updates: int) -> tuple[str, str]:
    """Choose to compile if the remaining `updates` save much more time than compiling takes.

    Only on a GPU: on a CPU, compiling takes longer than it saves. Returns NONE, BLOCKS or WHOLE, and the reason.
    """
    device = parts.precision.device
    data = config.DATA
    train = config.TRAIN
    if device.type != "cuda":
        return NONE, f"auto: on {device.type} compiling takes longer than it saves"
    missing = _missing_tool(device)
    if missing:
        return NONE, f"auto: {missing}"

    # Cost: each size of images, with all tokens or fewer, is compiled by itself.
    graphs = set[tuple[ImageSize, bool]]()
    for epoch in range(1, train.NUM_EPOCHS + 1):
        graphs.add((train.size_in(epoch, data.IMAGE_SIZE), train.drops_tokens_in(epoch)))
    seconds_to_compile = SECONDS_TO_COMPILE * len(graphs)

    # Gain: a fraction of the time of a micro-batch, or of a small model at least what launching its kernels takes.
    # Smaller images and dropped tokens make an epoch less work. The remaining updates are taken to be average ones.
    without_weights = build_without_weights(config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    flops_per_image = training_flops(without_weights, data.shape) or 0.0
    (work_of_all_epochs,) = work_until(config, [train.NUM_EPOCHS])
    mean_work = work_of_all_epochs / max(1, train.NUM_EPOCHS)
    speed = FLOPS_PER_SECOND_IN_FP32 if parts.precision.level == "O0" else FLOPS_PER_SECOND_WITH_AMP
    seconds_per_micro_batch = mean_work * flops_per_image * data.BATCH_SIZE / speed
    saved_per_micro_batch = max(FRACTION_SAVED * seconds_per_micro_batch, SAVED_PER_MICRO_BATCH)
    seconds_saved = saved_per_micro_batch * train.ACCUM_ITER * updates

    is_worthwhile = seconds_saved > REQUIRED_RATIO * seconds_to_compile
    comparison = "more" if is_worthwhile else "no more"
    reason = (
        f"auto: about {seconds_saved:,.0f} s saved in {counted(updates, 'update')}, {comparison} than "
        f"{REQUIRED_RATIO:g} times the {seconds_to_compile:.0f} s of compiling"
    )
    if not is_worthwhile:
        return NONE, reason
    if train.GRAD_CHECKPOINT != "none" and has_blocks(parts.model):
        return BLOCKS, reason
    return WHOLE, reason


def training_flops(model: nn.Module, shape: tuple[int, int, int]) -> float | None:
    """Count the FLOPs of training on one image of this shape; None if unknown. `model` is on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    images = torch.empty(2, *shape, device="meta")  # batch norm cannot train on one image
    try:
        with FlopCounterMode(display=False) as counter:
            model.train()(images).sum().backward()
    except Exception as error:  # a model that reads values fails on the meta device, in any way
        log.debug("The model's operations cannot be counted: %s", error)
        return None
    return counter.get_total_flops() / 2 or None


def has_blocks(model: nn.Module) -> bool:
    return any(True for _ in blocks_of(model))


def _missing_tool(device: torch.device) -> str | None:
    """Return a message about what torch.compile needs and this machine lacks; None if nothing is missing.

    torch's own errors come late and are long.
    """
    if device.type == "cpu":
        variable = "CXX"
        compilers = ("clang++" if sys.platform == "darwin" else "g++",)
    else:
        variable = "CC"
        compilers = ("gcc", "clang")
    names = (os.environ[variable],) if variable in os.environ else compilers
    if not any(map(shutil.which, names)):
        return f"torch.compile needs a compiler, and there is no {' or '.join(names)}"
    headers = Path(sysconfig.get_path("include", "posix_prefix"))  # Debian's default scheme has another folder
    if not (headers / "Python.h").is_file():
        return f"torch.compile needs Python's headers (python3-dev), and there is no {headers / 'Python.h'}"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "torch.compile needs the package triton, and a GPU of compute capability 7.0 or newer"
    return None
