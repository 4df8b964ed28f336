"""Tensors that FSDP may have sharded, and this rank's shard of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard as an ordinary tensor that shares its memory; an unsharded tensor as it is."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: object) -> bool:
    return hasattr(tensor, "to_local")


@contextlib.contextmanager
def whole_outside_blocks(model: nn.Module) -> Iterator[None]:
    """Gather the weights of a sharded model that no block has, to call another method than its forward.

    Blocks gather their own. A collective call.
    """
    sharded = cast(Any, model)
    if not any(is_sharded(weight) for weight in model.parameters()):
        yield
        return
    sharded.unshard()
    try:
        yield
    finally:
        sharded.reshard()
