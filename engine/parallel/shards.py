"""Tensors that FSDP may have sharded, and this rank's shard of them."""

from typing import Any, cast

from torch import Tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard as an ordinary tensor that shares its memory; an unsharded tensor as it is."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: object) -> bool:
    return hasattr(tensor, "to_local")
