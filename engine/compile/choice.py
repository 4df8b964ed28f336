"""TRAIN.COMPILE: decide what to compile on this device: nothing, each block, or the whole update."""

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

AUTO = "auto"

# Whether compiling on a GPU is worthwhile is estimated from measurements on an H200 (docs/benchmarks.md), so the gain
# must exceed the cost by far.
SECONDS_TO_COMPILE = 60.0
"""Measured: 20 to 35, with 16 CPU cores."""
FRACTION_SAVED = 0.2
"""Measured: 0.24 of an update's time for ViT-S/16, 0.18 for B, 0.14 for L."""
SAVED_PER_MICRO_BATCH = 0.002
"""Least number of seconds saved, even with small models: kernels are no longer launched one by one."""
FLOPS_PER_SECOND = {False: 4e13, True: 2e14}
"""Speed of training on a large GPU, in fp32 and in half precision."""
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
    """Choose what the callback compiles; the reason comes with it. A collective call.

    `updates`: number of updates left. `previous`: choices of the run that is resumed. `of_trial`: `Run.compiling`.
    """
    wanted = config.TRAIN.COMPILE
    device = parts.precision.device
    if wanted != AUTO:
        how = wanted
        reason = "as asked for"
    else:
        choice = _previous_choice(previous, device) or of_trial or _by_gain(config, parts, updates)
        how, reason = broadcast(choice, world)
    if how == WHOLE and world.size > 1 and (parts.sharding is not None or not parts.precision.computes_in_copy):
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
    if how == NONE:
        return
    missing = _missing_tool(parts.precision.device)
    if missing:
        raise UserError(f"TRAIN.COMPILE {how}: {missing}. Install what is missing, or set TRAIN.COMPILE=none.")
    if how == BLOCKS and not has_blocks(parts.model):
        others = "none" if world.size > 1 else "whole or none"
        raise UserError(
            f"TRAIN.COMPILE: {type(parts.model).__name__} has no sequence of equal blocks to compile; use {others}."
        )


def _previous_choice(previous: Mapping[str, Any], device: torch.device) -> tuple[str, str] | None:
    """The choice of the run that is resumed; None if it has none, or one for another kind of machine."""
    how = previous.get("compile")
    if how is None:
        return None
    device_before = str(previous.get("computed_in", device.type)).partition(" ")[0]
    works_here = device_before == device.type and (how == NONE or _missing_tool(device) is None)
    return (how, "as before the resume") if works_here else None


def _by_gain(config: Config, parts: TrainState, updates: int) -> tuple[str, str]:
    device = parts.precision.device
    data = config.DATA
    train = config.TRAIN
    if device.type != "cuda":
        return NONE, f"auto: on {device.type} compiling takes longer than it saves"
    missing = _missing_tool(device)
    if missing:
        return NONE, f"auto: {missing}"
    without_weights = build_without_weights(config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    flops = training_flops(without_weights, data.shape) or 0.0
    # Each size of images, with all tokens or fewer, is compiled by itself.
    epochs = range(1, train.NUM_EPOCHS + 1)
    graphs = {(train.size_in(epoch, data.IMAGE_SIZE), train.drops_tokens_in(epoch)) for epoch in epochs}
    cost = SECONDS_TO_COMPILE * len(graphs)
    share = work_until(config, [len(epochs)])[0] / max(1, len(epochs))
    micro_batch = share * flops * data.BATCH_SIZE / FLOPS_PER_SECOND[parts.precision.level != "O0"]
    seconds = max(FRACTION_SAVED * micro_batch, SAVED_PER_MICRO_BATCH) * train.ACCUM_ITER * updates
    is_worthwhile = seconds > REQUIRED_RATIO * cost
    more = "more" if is_worthwhile else "no more"
    words = (
        f"auto: about {seconds:,.0f} s saved in {counted(updates, 'update')}, {more} than {REQUIRED_RATIO:g} times the "
        f"{cost:.0f} s of compiling"
    )
    if not is_worthwhile:
        return NONE, words
    if train.GRAD_CHECKPOINT != "none" and has_blocks(parts.model):
        return BLOCKS, words
    return WHOLE, words


def training_flops(model: nn.Module, shape: tuple[int, int, int]) -> float | None:
    """FLOPs in training of one image of this shape; None if unknown. `model` is on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    images = torch.empty(2, *shape, device="meta")  # batch norm cannot train on one
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
    """What torch.compile needs and this machine lacks; checked here, since its own errors come late and are long."""
    of_cpu = ("clang++" if sys.platform == "darwin" else "g++",)
    variable, usual = ("CXX", of_cpu) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    names = (os.environ[variable],) if variable in os.environ else usual
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
