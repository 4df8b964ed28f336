"""Weights & Biases, imported where figures are sent to it, and not before.

timm imports it wherever it is installed, for a function that nobody calls here; that takes as long as torch does.
"""

from __future__ import annotations

import sys

WANDB = "wandb"


def import_wandb_late() -> None:
    """From here on others find it missing. Without effect where it is imported already."""
    sys.modules.setdefault(WANDB, None)  # pyright: ignore[reportArgumentType] - as Python marks what is not to be found


def let_wandb_in() -> None:
    """From here on it can be imported."""
    if sys.modules.get(WANDB, sys) is None:
        del sys.modules[WANDB]
