"""FSDP's memory and traffic, counted in bytes on two processes."""

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from engine.machine.device import Run
from engine.parallel.shards import local_shard
from engine.setup import ReadyToTrain, build_for_training
from engine.update import accumulate
from tests.ddp.test_amp_ddp import FSDP_LEVELS, GATHERS_IN_HALF, in_two_processes
from tests.engine.small import CPU
from utils.config import load_config
from utils.distributed.world import World

RANKS = 2
WORDS = {"DATA.BATCH_SIZE": "3", "MODEL.EMBED_DIM": "32", "MODEL.DEPTH": "2", "DIST.STRATEGY": "fsdp"}
BF16 = {"AMP.ENABLED": "true", "AMP.DTYPE": "bf16"}
WAYS: dict[str, dict[str, str]] = {
    "O0": {},
    "O1": BF16,
    **({"O2": BF16 | {"AMP.LEVEL": "O2"}} if GATHERS_IN_HALF else {}),
    "linear in fp32": BF16 | {"AMP.CUSTOM_BLACK_LIST": "[fc]"},
    "accumulated O0": {"TRAIN.ACCUM_ITER": "2"},
    "accumulated O1": BF16 | {"TRAIN.ACCUM_ITER": "2"},
    "mlp in fp32": BF16 | {"AMP.FP32_MODULES": "[blocks.*.mlp]"},
}
LINEAR = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "head.weight", "head.bias")
MLP = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
CONVOLUTION = ("patch_embed.proj.weight", "patch_embed.proj.bias")
IN_HALF: dict[str, tuple[str, ...]] = {
    "O0": (),
    "O1": (*LINEAR, *MLP, *CONVOLUTION),
    "O2": (*LINEAR, *MLP, *CONVOLUTION, "cls_token", "pos_embed"),
    "linear in fp32": CONVOLUTION,
    "mlp in fp32": (*LINEAR, *CONVOLUTION),
}
"""Ends of the names of the weights that are gathered in half precision."""


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank gathers, and those that it reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            self.gathered += args[0].nbytes
        elif "reduce_scatter" in str(func):
            self.reduced += args[1].nbytes
        return func(*args, **(kwargs or {}))


@dataclass
class Counts:
    saved: int
    """Bytes of weights, or of casts of them, that are in memory between the forward and the backward pass."""
    gathered: int
    reduced: int
    gradients: int
    """Bytes of the gradients of matrices that are in memory between two micro-batches."""


def shapes_of(weight: Tensor) -> list[torch.Size]:
    """Shapes in which the backward pass may need a matrix, or a convolution's weights."""
    flat = weight.flatten(1)
    return [weight.shape, flat.shape, flat.T.shape]


def counts_of(ready: ReadyToTrain) -> Counts:
    """Compute the gradients of one update."""
    matrices = {shape for p in ready.model.parameters() if p.ndim > 1 for shape in shapes_of(p)}
    saved: list[Tensor] = []
    in_memory = gradients = 0
    compute, before = ready.parts.compute, tensors_like_weights(ready.model)

    def counted(batch: Any) -> Any:
        nonlocal in_memory, gradients
        gradients = tensors_like_weights(ready.model) - before  # before the last micro-batch, in the end
        result = compute(batch)
        storages = [tensor.untyped_storage() for tensor in saved if tensor.shape in matrices]
        in_memory += sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # 0 if FSDP has freed it
        saved.clear()
        return result

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    ready.parts.compute = counted  # pyright: ignore[reportAttributeAccessIssue]
    with Traffic() as traffic, saved_tensors_hooks(save, lambda tensor: tensor):
        accumulate(ready.parts, next(iter(ready.train_loader.epoch(1))), 1)
    return Counts(in_memory, traffic.gathered, traffic.reduced, gradients)


def tensors_like_weights(model: nn.Module) -> int:
    """Bytes of all tensors with the shape of a matrix of the model, or of this rank's rows of one."""
    gc.collect()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    shapes = {part.shape for weight in matrices for part in (weight, local_shard(weight))}
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter) and item.shape in shapes]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def count(world: World, folder: Path) -> None:
    counts = {}
    for name, words in WAYS.items():
        config = load_config(str(folder / "tiny.yaml"), words=WORDS | words).config
        ready = build_for_training(Run(config, world, CPU, 1), None)
        counts[name] = vars(counts_of(ready))
        shapes = {name: list(weight.shape) for name, weight in ready.model.named_parameters()}
        if world.rank == 0:
            (folder / "counts.json").write_text(json.dumps([counts, shapes]))


@pytest.fixture(scope="module")
def counted(place: Path) -> tuple[dict[str, Counts], dict[str, list[int]]]:
    """Counts by way, and shapes of the weights."""
    in_two_processes(place, count, place)
    counts, shapes = json.loads((place / "counts.json").read_text())
    return {name: Counts(**numbers) for name, numbers in counts.items()}, shapes


def bytes_of(shapes: dict[str, list[int]], in_half: tuple[str, ...]) -> int:
    """Bytes of all weights, with their rows padded to the same number on each rank."""
    sizes = {name: torch.Size((-(-rows // RANKS) * RANKS, *rest)).numel() for name, (rows, *rest) in shapes.items()}
    return sum(size * (2 if name.endswith(in_half) else 4) for name, size in sizes.items())


@pytest.mark.parametrize("way", [way for way in IN_HALF if way in WAYS])
def test_weights_are_gathered_in_half_as_far_as_the_level_allows(
    counted: tuple[dict[str, Counts], dict[str, list[int]]], way: str
) -> None:
    """Twice per micro-batch; norms, tokens and position embeddings in fp32. Gradients are reduced in fp32."""
    counts, shapes = counted
    in_half = IN_HALF[way] if GATHERS_IN_HALF else ()
    assert counts[way].gathered == 2 * bytes_of(shapes, in_half)
    assert counts[way].reduced == bytes_of(shapes, ())


@pytest.mark.parametrize("way", ["O0", *FSDP_LEVELS])
def test_no_gathered_weight_is_kept_for_the_backward_pass(
    counted: tuple[dict[str, Counts], dict[str, list[int]]], way: str
) -> None:
    counts, _ = counted
    if way == "O0" or GATHERS_IN_HALF:
        assert counts[way].saved == 0
    else:
        assert counts[way].saved > 0, "casts by autocast"


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_each_rank_holds_its_shard_of_the_gradients_between_micro_batches(
    counted: tuple[dict[str, Counts], dict[str, list[int]]], level: str
) -> None:
    counts, shapes = counted
    synced = counts[f"accumulated {level}"]
    whole = bytes_of(shapes, ())
    assert 0 < synced.gradients <= whole // RANKS
    assert synced.reduced == 2 * whole
    assert synced.gathered == 2 * counts[level].gathered
