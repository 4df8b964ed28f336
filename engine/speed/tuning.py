"""Choose and apply the speed-ups of a model; see speedup.py.

The choices are shown in the banner, saved in run.json and checkpoints, and used again by a resumed run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from engine.amp.precision import Precision
from engine.inputs.batches import Inputs
from engine.speed.attention import AttentionKernel
from engine.speed.speedup import BuiltModel, Speedup
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank

RECORDED = ("attention", "linear_patches", "fused_mlp", "channels_last")
"""Keys in run.json and checkpoints; the value is False where a speed-up cannot be chosen."""


def speedups(config: Config, precision: Precision) -> Iterator[Speedup]:
    """Those that the settings, or for `auto` this device, can choose; in the order in which they are applied.

    Other files are not imported.
    """
    on_cpu = precision.device.type == "cpu"
    half_on_gpu = precision.device.type == "cuda" and precision.level != "O0"

    def may_be(name: str, auto: bool) -> bool:
        wanted = config.wants(name)
        return auto if wanted is None else wanted

    yield AttentionKernel()
    if may_be("linear_patches", on_cpu or half_on_gpu):
        from engine.speed.convolutions import LinearPatches

        yield LinearPatches()
    if may_be("fused_mlp", half_on_gpu):
        from engine.speed.fused_mlp import FusedMlps

        yield FusedMlps()
    if may_be("channels_last", half_on_gpu):
        from engine.speed.convolutions import ChannelsLast

        yield ChannelsLast()
    if config.TRAIN.GRAD_CHECKPOINT != "none":
        from engine.speed.grad_checkpoint import RecomputedBlocks

        yield RecomputedBlocks()


def speed_up(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, previous: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Choose and apply. `previous`: choices of the run that is resumed. A collective call.

    Returns entries for run.json and for checkpoints, from which a resumed run reads them, and a line for the banner.
    """
    computed_in = f"{precision.device.type} {precision.name.replace('-', ' ')}"  # a blank, as in the oldest checkpoints
    if previous.get("computed_in") != computed_in:
        previous = {}
    built, possible = BuiltModel(config, model, inputs, precision, world, previous), [*speedups(config, precision)]
    found = broadcast(on_every_rank(world, lambda: [speedup.choose(built) for speedup in possible]), world)
    chosen = [(speedup, choice) for speedup, choice in zip(possible, found, strict=True) if choice.value is not False]
    for speedup, choice in chosen:
        speedup.apply(built, choice.value)
    values = {speedup.key: choice.value for speedup, choice in chosen if speedup.key}
    words = "; ".join(filter(None, (speedup.words(choice) for speedup, choice in chosen)))
    return dict.fromkeys(RECORDED, False) | values | {"computed_in": computed_in}, words
