"""Sharded checkpoints: each rank writes its rows of the weights into a file of its own.

`model.safetensors` becomes `model.shard-1-of-2.safetensors` and `model.shard-2-of-2.safetensors`. Both have the same
tensor names; rows of the first file come before rows of the second. So any number of ranks can read what any other
number wrote, and all files are safetensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine.parallel.shards import is_sharded, local_shard
from utils.record.checkpoints import shard_name

if TYPE_CHECKING:
    from engine.parallel.fsdp import Sharding

OPTIMIZER = "optimizer.safetensors"


class JoinedShards(Mapping[str, Tensor]):
    """Whole tensors of several shards, each read from disk when it is accessed."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: list[Any] = [safe_open(str(path), framework="pt") for path in paths]
        self._where: dict[str, list[Any]] = {}
        for file in self._files:
            for name in file.keys():  # noqa: SIM118  # a file of safetensors is no mapping
                self._where.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        rows = [file.get_tensor(name) for file in self._where[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def shape(self, name: str) -> tuple[int, ...]:
        first, *others = [file.get_slice(name).get_shape() for file in self._where[name]]
        return (first[0] + sum(rows for rows, *_ in others), *first[1:]) if others else tuple(first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def into_shards(
    tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any], sharding: Sharding
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors that this rank saves, by file, and the state without the moments that are among them."""
    moments, optimizer = _split_moments(state["optimizer"])
    shards = {
        shard_name(name, sharding.nth, sharding.count): _rows(named, sharding)
        for name, named in {**tensors, OPTIMIZER: moments}.items()
    }
    return shards, {**state, "optimizer": optimizer}


def _rows(tensors: Mapping[str, Tensor], sharding: Sharding) -> dict[str, Tensor]:
    """This rank's rows of sharded tensors, if it has any. The first rank also saves what is not sharded."""
    rows = {name: local_shard(tensor.detach()) for name, tensor in tensors.items() if is_sharded(tensor)}
    whole = {name: tensor.detach() for name, tensor in tensors.items() if not is_sharded(tensor)}
    return {name: part for name, part in rows.items() if len(part)} | (whole if sharding.nth == 0 else {})


def _split_moments(optimizer: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Sharded tensors of the optimizer's state, by number and key, and the state without them."""
    moments: dict[str, Tensor] = {}
    rest: dict[Any, dict[str, Any]] = {}
    for number, values in optimizer["state"].items():
        moments |= {f"{number}.{key}": value for key, value in values.items() if is_sharded(value)}
        rest[number] = {key: value for key, value in values.items() if not is_sharded(value)}
    return moments, {**optimizer, "state": rest}


def add_moments(optimizer: dict[str, Any], moments: Mapping[str, Tensor]) -> None:
    """Put the moments that `into_shards` took out back into the optimiser's state."""
    for name in moments:
        number, _, key = name.partition(".")
        optimizer["state"].setdefault(int(number), {})[key] = moments[name]


def shard_state(optimizer: dict[str, Any], parameters: list[Tensor], sharding: Sharding) -> None:
    """Keep this rank's rows of the optimiser's state, as its parameters are sharded now."""
    for number, values in optimizer["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                values[key] = sharding.like(value, parameters[number])
