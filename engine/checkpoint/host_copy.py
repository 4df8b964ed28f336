"""Copies of tensors in host memory that is allocated once and used again."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from utils.log import log

T = TypeVar("T")


class HostCopy:
    """Host memory for one snapshot at a time: `take` overwrites the previous one."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._places: list[Tensor] = []
        self.problem = ""
        """Why memory could not be allocated"""

    def take(self, tree: T) -> T | None:
        """Copy `tree` with its tensors to host memory, which stays unchanged until the next call.

        None if there is not enough memory.
        """
        tensors = [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._layout != layout:
            self._layout, self._places = layout, []  # the old memory first: there may be no room for both
            self._allocate()
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

    def _allocate(self) -> None:
        """A place for each tensor, in pageable memory if there is no page-locked memory; no places if none."""
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in self._layout)
        for pinned in (True, False)[not self._pinned :]:
            self._pinned = pinned
            try:
                self._places = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for shape, dtype in self._layout]
                return
            except (RuntimeError, MemoryError) as error:
                self.problem = f"{size_words(size)}: {error}".partition("\n")[0]
            if pinned:
                log.warning(
                    "There is no page-locked host memory for copies of checkpoints (%s). They are made in pageable "
                    "memory, so each save pauses training for longer.",
                    self.problem,
                )


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def on_host(tree: T) -> T:
    """`tree` with its tensors on the host; tensors that are there already are not copied."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


def size_words(size: int) -> str:
    """1385082496 -> '1.39 GB'."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 1e3:.0f} kB"
