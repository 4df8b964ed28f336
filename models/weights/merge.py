"""Weights of a model with adapters (MODEL.LORA) as those of the plain model: each product is added to its matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from models.lora import factors
from models.lora_layers import is_adapter, parts_of


class Merged(Mapping[str, Tensor]):
    """Plain weights, each computed when it is accessed. `tensors`: frozen weights, classifier and adapters."""

    def __init__(self, tensors: Any, factor: float) -> None:
        self._tensors, self._factor = tensors, factor
        self._adapted = {name.rpartition(".")[0] for name in tensors if is_adapter(name)}
        self._names = [name for name in tensors if not is_adapter(name)]

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self._tensors[name]
        layer, _, own = name.rpartition(".")
        if own != "weight" or layer not in self._adapted:
            return weight
        inside = {key: self._tensors[key] for key in self._tensors if is_adapter(key) and key.startswith(f"{layer}.")}
        up, down = (matrix.double() for matrix in factors(inside, f"{layer}.", parts_of(layer), weight))
        return torch.addmm(weight.double(), up, down, alpha=self._factor).to(weight.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """As `JoinedShards.shape`."""
        return self._tensors.shape(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
