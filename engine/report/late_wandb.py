"""Late import of wandb: only where metrics are sent to it.

timm imports wandb if it is installed, for a function that is never called here; that takes as long as importing torch.
"""

from __future__ import annotations

import sys

WANDB = "wandb"


def import_wandb_late() -> None:
    """Make wandb look missing to others from now on, unless it is imported already."""
    sys.modules.setdefault(WANDB, None)  # pyright: ignore[reportArgumentType] - None marks a missing module


def let_wandb_in() -> None:
    """Allow importing wandb from now on."""
    if sys.modules.get(WANDB, sys) is None:
        del sys.modules[WANDB]
