"""DIST.STRATEGY fsdp: torch's FSDP2 shards weights, gradients and optimiser state over the ranks.

Each rank holds rows of every tensor. A block's weights are gathered while the block computes and freed after it.
"""

# torch documents its device meshes; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.amp.low_precision import BATCH_NORM, NORMS, cast_weights, forced_modules
from engine.amp.precision import Precision, dtype_name
from models import is_inside
from models.freeze import blocks_of
from utils.config import Config
from utils.config.schema import DistConfig
from utils.distributed.world import World, raise_on_every_rank
from utils.errors import UserError
from utils.log import log

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

SHARDS, COPIES = "shard", "replicate"
OPTIMIZERS = frozenset({"adam", "adamw", "nadamw", "sgd", "momentum", "nesterov", "lion", "lamb", "lars", "adan"})
"""Tested: sharded tensors give the same updates as whole ones."""


def check_sharding(config: Config) -> None:
    """Reject settings that FSDP does not support with any model or machine."""
    name = config.TRAIN.OPTIMIZER.NAME
    if name.casefold() not in OPTIMIZERS:
        whole = name.casefold().endswith("muon")
        why = "orthogonalises whole matrices, which is not possible" if whole else "was not tested"
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME {name} {why} with DIST.STRATEGY fsdp, where each rank holds only rows of a "
            f"tensor. Use one of {', '.join(sorted(OPTIMIZERS))}, or DIST.STRATEGY ddp."
        )


def build_sharding(config: Config, world: World, device: torch.device) -> Sharding | None:
    """The sharding that DIST asks for; None with one process. A collective call."""
    if world.size == 1:
        log.info("DIST.STRATEGY fsdp has no effect with one process.")
        return None
    uneven = world.size % world.local_size or world.rank % world.local_size != world.local_rank
    problem = (
        "DIST.HSDP shards the weights within each machine and replicates them across machines. It needs two or more "
        "machines, two or more processes on each, equally many on all, and ranks numbered machine by machine. There "
        f"are {world.size} processes, {world.local_size} of them on this machine. Leave DIST.HSDP out."
    )
    possible = not uneven and 1 < world.local_size < world.size
    raise_on_every_rank(problem if config.DIST.HSDP and not possible else None, world)
    return Sharding(world, device, config.DIST)


class Sharding:
    """This rank's shard: number `nth` of `count`. Where several ranks hold the same shard, one of them `writes` it."""

    def __init__(self, world: World, device: torch.device, dist: DistConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._world, by_machine = world, dist.HSDP
        if by_machine:
            sizes, names = (world.size // world.local_size, world.local_size), (COPIES, SHARDS)
        else:
            sizes, names = (world.size,), (SHARDS,)
        self._mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        for name in names:
            self._mesh.get_group(name)._get_backend(device)._set_default_timeout(dist.group_timeout)
        self.count = sizes[-1]
        self.nth = self._mesh.get_local_rank(SHARDS)
        self.writes = not by_machine or self._mesh.get_local_rank(COPIES) == 0
        self.has_nested_units = False
        """Whether FSDP's hooks are inside blocks, which cannot be compiled then."""
        self._gathered = ""

    def words(self) -> str:
        machines = self._world.size // self.count
        each = f" on each of {machines} machines" if machines > 1 else ""
        return f"fsdp: weights sharded over {self.count} processes{each}{self._gathered}"

    def shard(self, model: nn.Module, precision: Precision, computing: bool = True) -> None:
        """Shard the weights of `model`, before an optimiser is made for them.

        `computing`: true for the model that is trained, which computes as AMP.LEVEL says; false for the EMA, in fp32.
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        half = full = MixedPrecisionPolicy(cast_forward_inputs=False)
        in_fp32: dict[str, nn.Module] = {}
        if computing and precision.level == "O1":
            half = self._policy_of_o1(model, precision) or full
        elif computing and precision.computes_in_copy:
            half, in_fp32 = self._policy_of_o2(model, precision)
            self.has_nested_units = bool(in_fp32)
        fp32_names = [name for name in in_fp32 if name]
        # Free gathered weights after the forward pass in any case: between updates each rank holds its shard only.
        shard_unit = partial(fully_shard, mesh=self._mesh, reshard_after_forward=True)
        try:
            for name, unit in (*blocks_of(model), ("", model)):
                inner = {path: module for path, module in in_fp32.items() if not name or is_inside(path, [name])}
                for path in inner:
                    del in_fp32[path]
                fp32 = list(inner.values())
                if fp32 == [unit]:
                    shard_unit(unit, mp_policy=full)
                    continue
                if fp32:
                    shard_unit(fp32, mp_policy=full)
                shard_unit(unit, mp_policy=full if is_inside(name, fp32_names) else half)
        except ValueError as error:
            raise UserError(f"MODEL.NAME: DIST.STRATEGY fsdp cannot shard this model ({error}).") from None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Sum gradients, where FSDP would average: losses are already weighted by their fraction of the update.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _policy_of_o1(self, model: nn.Module, precision: Precision) -> MixedPrecisionPolicy | None:
        """Gather in half precision only what autocast would cast; None if that is not possible.

        Each use under autocast of a weight in fp32 keeps its half-precision copy for the backward pass, whereas FSDP
        frees the weights that it gathers.
        """
        half = dtype_name(precision.choice.dtype)
        if not _can_choose_by_weight():
            self._gathered = f", gathered in fp32 (in {half}, at O1, by torch 2.15 or later)"
            return None
        self._gathered = f", gathered in {half} where autocast casts them"
        cast = {id(weight) for weight in cast_weights(model, precision.black_list)}
        return _half_policy(precision, [weight for weight in model.parameters() if id(weight) not in cast])

    def _policy_of_o2(
        self, model: nn.Module, precision: Precision
    ) -> tuple[MixedPrecisionPolicy, dict[str, nn.Module]]:
        """Gather in half precision all but norms, and the modules that need a unit of their own to stay in fp32."""
        self._gathered = f", gathered in {dtype_name(precision.choice.dtype)}"
        in_fp32 = _fp32_modules(model, precision.level)
        if not _can_choose_by_weight():
            return _half_policy(precision), in_fp32
        return _half_policy(precision, [weight for module in in_fp32.values() for weight in module.parameters()]), {}

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        """Set whether the next backward pass reduces gradients across machines (DIST.HSDP): the `last` of an update.

        Within the machine each one does, so that each rank only holds gradients of its shard.
        """
        # An FSDPModule; importing the class takes half a second.
        cast(Any, model).set_requires_all_reduce(last)

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor, split as FSDP does."""
        chunks = whole.chunk(self.count, dim=0)
        return chunks[self.nth] if self.nth < len(chunks) else whole.new_empty((0, *whole.shape[1:]))

    def like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Shard a whole tensor as `parameter` is sharded."""
        from torch.distributed.tensor import DTensor

        if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
            return whole
        rows = self.rows(whole).to(parameter.device, copy=True)
        shape, stride = parameter.shape, parameter.stride()
        placed = parameter.placements
        return DTensor.from_local(rows, parameter.device_mesh, placed, run_check=False, shape=shape, stride=stride)


def _can_choose_by_weight() -> bool:
    """Whether torch can gather the weights of one unit in several dtypes; from 2.15 on."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")


def _half_policy(precision: Precision, in_fp32: list[nn.Parameter] | None = None) -> MixedPrecisionPolicy:
    """Gather in half precision, except for the weights `in_fp32`, and reduce gradients in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    options: dict[str, Any] = {}
    if in_fp32 is not None:
        kept = {id(weight) for weight in in_fp32}
        options["param_dtype_override_fn"] = lambda weight: weight.dtype if id(weight) in kept else None
    return MixedPrecisionPolicy(
        param_dtype=precision.choice.dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=precision.level == "NAIVE",
        **options,
    )


def read_trained_weights(model: nn.Module) -> None:
    """Let FSDP notice which weights have gradients now: it reads their dtypes once. A collective call."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def _fp32_modules(model: nn.Module, level: str) -> dict[str, nn.Module]:
    """Outermost modules with weights that stay in fp32, the same ones as in `HalfCopy`."""
    classes = NORMS if level == "O2" else BATCH_NORM
    forced = forced_modules(model)
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if (name in forced or isinstance(module, classes)) and not is_inside(name, outermost):
            outermost[name] = module
    return {name: module for name, module in outermost.items() if any(True for _ in module.parameters())}
