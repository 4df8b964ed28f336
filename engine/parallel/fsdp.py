"""Shards weights, gradients and optimiser state over the ranks by torch's FSDP2 (DIST.STRATEGY fsdp).

Each rank holds rows of every tensor. A block's weights are gathered while the block computes and freed after it.
"""

# torch documents its device meshes; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from engine.amp.low_precision import NORMS, cast_weights, forced_modules
from engine.amp.precision import Precision, dtype_name
from models.parts import BATCH_NORM, blocks_of
from utils.config import Config
from utils.config.schema import DistConfig
from utils.config.train import OPTIMIZERS
from utils.distributed.world import World, check_machines
from utils.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

SHARDS = "shard"
COPIES = "replicate"


def check_sharding(config: Config) -> None:
    """Raise UserError for an optimiser that FSDP does not support, whatever the model and machine."""
    optimizer = config.TRAIN.OPTIMIZER
    if not optimizer.facts.shards:
        needs_whole_matrices = optimizer.facts.by_matrix
        reason = "was not tested"
        if needs_whole_matrices:
            reason = "orthogonalises whole matrices, which is not possible"
        tested = sorted(name for name, facts in OPTIMIZERS.items() if facts.shards)
        raise UserError(
            f"TRAIN.OPTIMIZER.NAME {optimizer.NAME} {reason} with DIST.STRATEGY fsdp, where each rank holds only rows "
            f"of a tensor. Use one of {', '.join(tested)}, or DIST.STRATEGY ddp."
        )


def build_sharding(config: Config, world: World, device: torch.device) -> Sharding | None:
    """Build the sharding that DIST asks for; None with one process. A collective call."""
    if world.size == 1:
        return None
    if config.DIST.HSDP:
        begin_of_error = (
            "DIST.HSDP shards the weights within each machine and replicates them across machines. It needs two or "
            "more machines, two or more processes on each,"
        )
        check_machines(world, begin_of_error, least=2)
    return Sharding(world, device, config.DIST)


class Sharding:
    """Shards models over the ranks. This rank holds shard number `nth` of `count`.

    With DIST.HSDP several ranks hold the same shard: `writes` is true for the one that saves it.
    """

    def __init__(self, world: World, device: torch.device, dist: DistConfig) -> None:
        """Build the mesh of ranks: one row of shards, or with DIST.HSDP one row per machine. A collective call."""
        from torch.distributed.device_mesh import init_device_mesh

        self._world = world
        if dist.HSDP:  # each machine holds all shards
            sizes = (world.size // world.local_size, world.local_size)
            names = (COPIES, SHARDS)
        else:
            sizes = (world.size,)
            names = (SHARDS,)
        self._mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        for name in names:
            self._mesh.get_group(name)._get_backend(device)._set_default_timeout(dist.group_timeout)
        self.count = sizes[-1]
        """Number of shards of a tensor"""
        self.nth = self._mesh.get_local_rank(SHARDS)
        """Number of this rank's shard, from 0 on"""
        self.writes = not dist.HSDP or self._mesh.get_local_rank(COPIES) == 0
        """Whether this rank saves its shard; with DIST.HSDP, those of the first machine do"""
        self._gathering_words = ""
        """Words on the precision that weights are gathered in; '' without AMP"""

    def words(self) -> str:
        """Describe the sharding for the banner."""
        machines = self._world.size // self.count
        copies = f" on each of {machines} machines" if machines > 1 else ""
        return f"fsdp: weights sharded over {self.count} processes{copies}{self._gathering_words}"

    def shard(self, model: nn.Module, precision: Precision, computing: bool = True) -> None:
        """Shard the weights of `model`. Called before an optimiser is built for them.

        `computing`: true for the model that is trained, whose weights are gathered in the precision of AMP.LEVEL; false
        for the EMA, whose weights are gathered in fp32. UserError if FSDP cannot shard the model.
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if computing and precision.level != "O0":
            policy = self._half_policy(model, precision)
        else:
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        try:
            units = [block for _, block in blocks_of(model)]
            units.append(model)
            for unit in units:
                # Free gathered weights after the forward pass: between updates each rank holds its shard only.
                fully_shard(unit, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
        except ValueError as error:
            raise UserError(f"MODEL.NAME: DIST.STRATEGY fsdp cannot shard this model ({error}).") from None
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # FSDP would average gradients over the ranks. They are summed, since the loss of each micro-batch is
                # already multiplied by its fraction of the update: divided by 1, by communication that only sums.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _half_policy(self, model: nn.Module, precision: Precision) -> MixedPrecisionPolicy:
        """Return the policy that gathers weights in half precision and reduces gradients in fp32.

        At O1, the weights that autocast would cast are gathered in half precision. That saves memory: autocast keeps
        the half-precision copy of an fp32 weight until the backward pass, but FSDP frees what it has gathered. At O2
        and NAIVE, all weights are, except those of norms and of modules that stay in fp32.

        An older torch cannot choose single weights: then O1 gathers all in fp32, and other levels raise UserError.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        level = precision.level
        half = dtype_name(precision.choice.dtype)
        if not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"):
            if level != "O1":
                raise UserError(f"AMP.LEVEL {level} with DIST.STRATEGY fsdp needs torch 2.15 or later; use O1, or ddp.")
            self._gathering_words = f", gathered in fp32 (in {half}, at O1, by torch 2.15 or later)"
            return MixedPrecisionPolicy(cast_forward_inputs=False)

        # The weights that are gathered in fp32, by their ids
        self._gathering_words = f", gathered in {half}"
        if level == "O1":
            cast_ids = {id(weight) for weight in cast_weights(model, precision.black_list)}
            fp32_ids = {id(weight) for weight in model.parameters()} - cast_ids
            self._gathering_words += " where autocast casts them"
        else:
            fp32_ids: set[int] = set()
            fp32_norms = NORMS if level == "O2" else BATCH_NORM  # as in `HalfCopy`
            forced_names = forced_modules(model)
            for name, module in model.named_modules():
                if name in forced_names or isinstance(module, fp32_norms):
                    fp32_ids.update(id(weight) for weight in module.parameters())

        def other_dtype(weight: Tensor) -> torch.dtype | None:
            """Return the dtype to gather this weight in, if it is not `param_dtype`."""
            return weight.dtype if id(weight) in fp32_ids else None

        # To a type checker with an older torch, the last argument is unknown.
        return cast(Any, MixedPrecisionPolicy)(
            param_dtype=precision.choice.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=level == "NAIVE",
            param_dtype_override_fn=other_dtype,
        )

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        """Set whether the next backward pass all-reduces gradients across machines (DIST.HSDP).

        `last`: it is the last backward pass of an update, the only one that does. Every backward pass reduce-scatters
        gradients within the machine, so that each rank only holds gradients of its shard.
        """
        # An FSDPModule; importing the class takes half a second.
        cast(Any, model).set_requires_all_reduce(last)

    def rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor, split as FSDP splits it; no rows if there are fewer than ranks."""
        chunks = whole.chunk(self.count, dim=0)
        if self.nth < len(chunks):
            return chunks[self.nth]
        return whole.new_empty((0, *whole.shape[1:]))

    def like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Shard a whole tensor as `parameter` is; return it whole if that is not sharded, or has another shape."""
        from torch.distributed.tensor import DTensor

        if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
            return whole
        rows = self.rows(whole).to(parameter.device, copy=True)  # a view would keep the whole tensor in memory
        shape = parameter.shape
        stride = parameter.stride()
        placed = parameter.placements
        return DTensor.from_local(rows, parameter.device_mesh, placed, run_check=False, shape=shape, stride=stride)
