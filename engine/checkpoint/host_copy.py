"""Copies of tensors in host memory that is allocated once and reused."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from utils.log import log

T = TypeVar("T")
Layout = list[tuple[torch.Size, torch.dtype]]
CHUNK = 2**28
"""Page-locked memory is allocated in powers of two, so chunks of one waste nothing."""
ALIGNED, PAGE = 64, 4096


class HostCopy:
    """Host memory for one snapshot at a time: `take` overwrites the previous one."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._device = torch.cuda.current_device() if pinned else None
        self._layout: Layout = []
        self._places: list[Tensor] = []
        self._reserving: threading.Thread | None = None
        self.problem = ""
        """Why memory could not be allocated"""

    def reserve(self, tree: Any) -> int:
        """Start to allocate memory for the tensors in `tree` in a thread. Returns its size in bytes."""
        self._layout = _layout(_tensors(tree))
        sizes = _chunks(self._layout)
        self._reserving = threading.Thread(target=self._allocate, args=(self._layout, sizes), daemon=True)
        self._reserving.start()
        return sum(sizes)

    def take(self, tree: T) -> T | None:
        """Copy `tree` with its tensors to host memory, which stays unchanged until the next call.

        None if there is not enough memory.
        """
        tensors = _tensors(tree)
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        if self._layout != _layout(tensors) or not self._places:
            self._layout = _layout(tensors)
            self._allocate(self._layout, _chunks(self._layout))
        if len(self._places) < len(tensors):
            return None
        for place, tensor in zip(self._places, tensors, strict=True):
            if tensor.is_cpu and tensor.is_contiguous():
                # In one thread: memory is the limit, and on a busy machine torch's threads wait long for each other.
                np.copyto(_bytes(place), _bytes(tensor))
            else:
                place.copy_(tensor, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        places = iter(self._places)
        return tree_map_only(Tensor, lambda _: next(places), tree)

    def _allocate(self, layout: Layout, sizes: list[int]) -> None:
        """Allocate a place for each tensor, in pageable memory if there is no page-locked memory; no places if none."""
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread starts on device 0, which may be another rank's
        self._places = []  # free the old memory first: there may be no room for both
        while not self._places:
            try:
                self._places = self._allocated(layout, sizes)
                return
            except (RuntimeError, MemoryError) as error:
                self.problem = f"{size_words(sum(sizes))}: {error}".partition("\n")[0]
            if not self._pinned:
                return
            self._pinned = False
            log.warning(
                "There is no page-locked host memory for copies of checkpoints (%s). They are made in pageable memory, "
                "so each save pauses training for longer.",
                self.problem,
            )

    def _allocated(self, layout: Layout, sizes: list[int]) -> list[Tensor]:
        places: list[Tensor] = []
        remaining = iter(sizes)
        chunk, used = np.empty(0, np.uint8), 0
        for shape, dtype in layout:
            size = shape.numel() * dtype.itemsize
            if used + size > len(chunk):
                chunk, used = torch.empty(next(remaining), dtype=torch.uint8, pin_memory=self._pinned).numpy(), 0
                chunk[::PAGE] = 0  # touch each page now, so that the first copy does not wait for the system
            # From numpy, each tensor gets a storage of its own: torch.save writes whole storages.
            places.append(torch.from_numpy(chunk[used : used + size]).view(dtype).view(shape))
            used += _aligned(size)
        return places


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _chunks(layout: Layout) -> list[int]:
    """Sizes of the chunks of memory, such that no tensor crosses from one into the next."""
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


def on_host(tree: T) -> T:
    """`tree` with its tensors on the host; tensors that are there already are not copied."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size_words(size: int) -> str:
    """1385082496 -> '1.39 GB'."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 1e3:.0f} kB"
