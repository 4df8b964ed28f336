"""Choose and apply the shapes of a model; see shape.py.

The choices are shown in the banner, saved in run.json and checkpoints, and used again by a resumed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.amp.precision import Precision
from engine.inputs.normalize import Inputs
from engine.speed.attention import AttentionKernel
from engine.speed.attention_kinds import PACKED
from engine.speed.cpu_products import CpuProducts
from engine.speed.shape import BuiltModel, Shape
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank
from utils.log import log

RECORDED = ("attention", "cpu_fp32", "linear_patches", "fused_mlp", "channels_last")
"""Keys of shapes in run.json and checkpoints; the value is False where a shape cannot be chosen."""


class Tuning(NamedTuple):
    choices: dict[str, Any]
    """Entries for run.json and for checkpoints, from which a resumed run reads them."""
    words: str
    """One line for the banner."""


def shapes(config: Config, precision: Precision) -> Iterator[Shape]:
    """Shapes that the settings, or for `auto` this device, can choose; in the order in which they are applied.

    Other shapes' files are not imported.
    """
    on_cpu = precision.device.type == "cpu"
    half_on_gpu = precision.device.type == "cuda" and precision.level != "O0"
    yield AttentionKernel()
    yield CpuProducts()
    if _may_be(config.MODEL.LINEAR_PATCHES, auto=on_cpu or half_on_gpu):
        from engine.speed.linear_patches import PatchesByProduct

        yield PatchesByProduct()
    if _may_be(config.MODEL.FUSED_MLP, auto=half_on_gpu):
        from engine.speed.fused_mlp import FusedMlps

        yield FusedMlps()
    if _may_be(config.TRAIN.CHANNELS_LAST, auto=half_on_gpu):
        from engine.speed.channels_last import ChannelsLast

        yield ChannelsLast()
    if config.TRAIN.GRAD_CHECKPOINT != "none":
        from engine.speed.grad_checkpoint import RecomputedBlocks

        yield RecomputedBlocks()


def _may_be(setting: Any, auto: bool) -> bool:
    return auto if setting == "auto" else setting


def tune(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, previous: dict[str, Any]
) -> Tuning:
    """Choose and apply. `previous`: choices of the run that is resumed. A collective call."""
    computed_in = f"{precision.device.type} {precision.name.replace('-', ' ')}"  # a blank, as in the oldest checkpoints
    if previous.get("computed_in") != computed_in:
        previous = {}
    _note_former_kernels(precision.device, previous)
    built, possible = BuiltModel(config, model, inputs, precision, world, previous), list(shapes(config, precision))
    found = broadcast(on_every_rank(world, lambda: [shape.choose(built) for shape in possible]), world)
    chosen = [(shape, choice) for shape, choice in zip(possible, found, strict=True) if choice.value is not False]
    for shape, choice in chosen:
        shape.apply(built, choice.value)
    values = {shape.key: choice.value for shape, choice in chosen if shape.key}
    words = "; ".join(filter(None, (shape.words(choice) for shape, choice in chosen)))
    return Tuning(dict.fromkeys(RECORDED, False) | values | {"computed_in": computed_in}, words)


def _note_former_kernels(device: torch.device, previous: dict[str, Any]) -> None:
    """Log that a run of 0.1.0 does not go on bit-equal: that version had kernels of its own for CPUs with AMX."""
    by_amx = "amx" in (previous.get("cpu_fp32"), previous.get("cpu_bf16"))
    if device.type == "cpu" and (by_amx or previous.get("attention") == PACKED):
        log.info(
            "This run used kernels for AMX, which version 0.1.0 of vitamp is the last to have. torch's kernels replace "
            "them: results are no longer equal bit for bit."
        )
