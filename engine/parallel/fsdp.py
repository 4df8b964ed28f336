"""DIST.STRATEGY fsdp: weights, gradients and the optimiser's state are dealt out over the ranks, by torch's FSDP2.

Each rank keeps rows of every tensor. A block's weights are gathered when the block computes and let go after it.
"""

# torch exports its meshes and stores for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.amp.fp32_modules import forced
from engine.amp.half_copy import BATCH_NORM, NORMS
from engine.amp.precision import Precision
from models.blocks import blocks_of
from utils.config import Config
from utils.distributed.world import World, raise_on_every_rank, sum_over_ranks
from utils.errors import UserError
from utils.log import log

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

SHARDS, COPIES = "shard", "replicate"
OPTIMIZERS = frozenset({"adam", "adamw", "nadamw", "sgd", "momentum", "nesterov", "lion", "lamb", "lars", "adan"})
"""Tried: they give with rows what they give with whole tensors."""


def check_sharding(config: Config) -> None:
    """What FSDP cannot do, whatever the model and the machine."""
    name = config.TRAIN.OPTIMIZER.NAME
    if config.DIST.STRATEGY == "fsdp" and name.casefold() not in OPTIMIZERS:
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME {name}: not with DIST.STRATEGY fsdp, where a rank has rows of each tensor: this "
            f"one was not tried so. Use one of {', '.join(sorted(OPTIMIZERS))}, or DIST.STRATEGY ddp."
        )


def sharding_of(config: Config, world: World, device: torch.device) -> Sharding | None:
    """How weights are dealt out, if they are. A collective call."""
    if config.DIST.STRATEGY != "fsdp":
        return None
    if world.size == 1:
        log.info("DIST.STRATEGY fsdp: one process has nobody to share the weights with, and keeps them all.")
        return None
    raise_on_every_rank(_unlike_machines(world) if config.DIST.HSDP else None, world)
    return Sharding(world, device, config.DIST.HSDP)


class Sharding:
    """Which rows are this rank's: part `nth` of `count`. Of equal holders only one `writes` checkpoints."""

    def __init__(self, world: World, device: torch.device, by_machine: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._world = world
        if by_machine:
            sizes, names = (world.size // world.local_size, world.local_size), (COPIES, SHARDS)
        else:
            sizes, names = (world.size,), (SHARDS,)
        self._mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        self.count = sizes[-1]
        self.nth = self._mesh.get_local_rank(SHARDS)
        self.writes = not by_machine or self._mesh.get_local_rank(COPIES) == 0

    def words(self) -> str:
        machines = self._world.size // self.count
        return f"fsdp: weights dealt out over {self.count} processes" + (
            f" on each of {machines} machines" if machines > 1 else ""
        )

    def deal(self, model: nn.Module, precision: Precision, computing: bool = True) -> None:
        """Keep only this rank's rows of the weights; before an optimiser is made for them.

        `computing`: the weights that are trained, which compute as AMP.LEVEL says. Their average stays in fp32.
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        own = MixedPrecisionPolicy(cast_forward_inputs=False)
        half = own
        if computing and precision.computes_in_copy:
            half = MixedPrecisionPolicy(
                param_dtype=precision.choice.dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=precision.level == "NAIVE",
            )
        left_alone = _in_fp32(model, precision.level) if half is not own else {}
        wide_names = [name for name in left_alone if name]
        try:
            for name, unit in (*blocks_of(model), ("", model)):
                kept = [module for inner, module in left_alone.items() if _lies_in(inner, name)]
                for inner in [inner for inner in left_alone if _lies_in(inner, name)]:
                    del left_alone[inner]
                if kept == [unit]:
                    self._deal(fully_shard, unit, own)
                    continue
                if kept:
                    self._deal(fully_shard, kept, own)
                inside = any(_lies_in(name, wide) for wide in wide_names)
                self._deal(fully_shard, unit, own if inside else half)
        except ValueError as error:
            raise UserError(f"MODEL.NAME: this model cannot be dealt out by DIST.STRATEGY fsdp ({error}).") from None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The sum, where FSDP would take the mean: losses are weighted by their share in the update already.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _deal(self, fully_shard: Any, modules: nn.Module | list[nn.Module], policy: MixedPrecisionPolicy) -> None:
        # Let go after the forward pass in any case: between updates each rank is to hold rows and nothing else.
        fully_shard(modules, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor, as FSDP cuts it."""
        parts = whole.chunk(self.count, dim=0)
        return parts[self.nth] if self.nth < len(parts) else whole.new_empty((0, *whole.shape[1:]))

    def like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """A whole tensor, dealt out as `parameter` is."""
        from torch.distributed.tensor import DTensor

        if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
            return whole
        rows = self.rows(whole).to(parameter.device, copy=True)
        shape, stride = parameter.shape, parameter.stride()
        placed = parameter.placements
        return DTensor.from_local(rows, parameter.device_mesh, placed, run_check=False, shape=shape, stride=stride)

    def agree(self, good: bool) -> bool:
        """Whether it is so on all ranks. A collective call."""
        device = torch.device(self._mesh.device_type)
        return not bool(sum_over_ranks(torch.tensor(int(not good), device=device), self._world))


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it: a tensor that others cannot see into, sharing its memory."""
    return cast(Any, tensor).to_local() if is_dealt(tensor) else tensor


def is_dealt(tensor: object) -> bool:
    return hasattr(tensor, "to_local")


def own_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: own_part(tensor.detach()) for name, tensor in tensors.items()}


def meet_now(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass exchanges gradients, where weights are dealt out."""
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP's own; to import it for its name takes half a second
        cast(Any, model).set_requires_gradient_sync(now)


def _unlike_machines(world: World) -> str | None:
    """What keeps weights from being dealt out machine by machine."""
    uneven = world.size % world.local_size or world.rank % world.local_size != world.local_rank
    if not uneven and 1 < world.local_size < world.size:
        return None
    return (
        "DIST.HSDP deals the weights out within a machine and copies them from machine to machine; here are "
        f"{world.size} processes, {world.local_size} on this machine. It takes two or more machines with equally many "
        "processes, two or more, ranks counted machine by machine. Leave it out."
    )


def _in_fp32(model: nn.Module, level: str) -> dict[str, nn.Module]:
    """The outermost modules that are no part of what computes in half precision, as in `HalfCopy`."""
    kinds = NORMS if level == "O2" else BATCH_NORM
    named = forced(model)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if (name in named or isinstance(module, kinds)) and not any(_lies_in(name, other) for other in found):
            found[name] = module
    return {name: module for name, module in found.items() if any(True for _ in module.parameters())}


def _lies_in(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")
