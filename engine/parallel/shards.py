"""Returns this rank's shard of a tensor that FSDP may have sharded."""

from typing import Any, cast

from torch import Tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard as an ordinary tensor that shares its memory; an unsharded tensor as it is."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: object) -> bool:
    """Return whether this is a DTensor, which a method tells without importing the class."""
    return hasattr(tensor, "to_local")
