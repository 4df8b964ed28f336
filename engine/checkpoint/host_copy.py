"""A copy of tensors in host memory that is allocated once and used again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
Layout = list[tuple[torch.Size, torch.dtype]]
CHUNK = 2**28
"""Page-locked memory comes in powers of two; pieces of one waste none of it."""
ALIGNED, PAGE = 64, 4096


class StandingCopy:
    """Holds one snapshot at a time: `take` writes over what the last one held."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._device = torch.cuda.current_device() if pinned else None
        self._layout: Layout = []
        self._places: list[Tensor] = []
        self._reserving: threading.Thread | None = None

    def reserve(self, tree: Any) -> int:
        """Begin to get memory for the tensors in `tree`, in the background; returns how many bytes it will be."""
        self._layout = _layout(_tensors(tree))
        sizes = _chunks(self._layout)
        self._reserving = threading.Thread(target=self._allocate, args=(self._layout, sizes), daemon=True)
        self._reserving.start()
        return sum(sizes)

    def take(self, tree: T) -> T:
        """`tree` with its tensors as they are now, in host memory that nothing else writes to until the next call."""
        tensors = _tensors(tree)
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        if self._layout != _layout(tensors) or not self._places:
            self._layout = _layout(tensors)
            self._allocate(self._layout, _chunks(self._layout))
        for place, tensor in zip(self._places, tensors, strict=True):
            if tensor.is_cpu and tensor.is_contiguous():
                # By one thread: memory is the limit, and on a busy machine torch's threads wait long for each other.
                np.copyto(_bytes(place), _bytes(tensor))
            else:
                place.copy_(tensor, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        places = iter(self._places)
        return _with_tensors(tree, lambda _: next(places))

    def _allocate(self, layout: Layout, sizes: list[int]) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread's is the first one, which may be another rank's
        self._places = []  # first: there is not memory for two
        remaining = iter(sizes)
        left, used = np.empty(0, np.uint8), 0
        for shape, dtype in layout:
            size = shape.numel() * dtype.itemsize
            if used + size > len(left):
                left, used = torch.empty(next(remaining), dtype=torch.uint8, pin_memory=self._pinned).numpy(), 0
                left[::PAGE] = 0  # now, not during the first copy, the system finds the memory
            # By way of numpy each tensor has a storage of its own: torch.save writes whole storages.
            self._places.append(torch.from_numpy(left[used : used + size]).view(dtype).view(shape))
            used += _aligned(size)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _chunks(layout: Layout) -> list[int]:
    """Sizes of the pieces of memory, so that no tensor lies across two."""
    sizes = [0]
    for shape, dtype in layout:
        size = shape.numel() * dtype.itemsize
        if sizes[-1] and sizes[-1] + size > CHUNK:
            sizes.append(0)
        sizes[-1] += _aligned(size)
    return sizes


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _layout(tensors: list[Tensor]) -> Layout:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def copied(tree: T) -> T:
    """`tree` with its tensors on the host: those that are there already are themselves, not copies."""
    return _with_tensors(tree, lambda tensor: tensor.detach().cpu())


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return tensor

    _with_tensors(tree, collect)
    return found


def _with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _with_tensors(item, change) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_with_tensors(item, change) for item in tree)
    return tree


def size_words(size: int) -> str:
    """1385082496 -> '1.39 GB'."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 1e3:.0f} kB"
