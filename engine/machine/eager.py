"""Running code eagerly that was compiled."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def uncompiled() -> AbstractContextManager[Any]:
    """Inside, compiled code runs eagerly."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
