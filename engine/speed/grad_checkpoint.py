"""Applies activation checkpointing (TRAIN.GRAD_CHECKPOINT).

Blocks save only their input, and recompute the rest in the backward pass.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.speed.speedup import BuiltModel, Choice, Speedup, mix_in
from models.parts import BATCH_NORM, blocks_of
from utils.errors import UserError


class Recomputed(nn.Module):
    """Mixin for a block with activation checkpointing. Dropout draws the same numbers in both passes."""

    recomputed: bool
    """Whether this block is checkpointed; blocks that are not have the mixin, too"""
    frozen: bool
    """Whether none of its weights train: it stays in eval mode during training, and may still pass on gradients."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Compute the block, with activation checkpointing if gradients are needed."""
        # A frozen block is in eval mode, and needs gradients if layers before it train.
        needs_gradients = self.training or (self.frozen and inputs[0].requires_grad)
        if not (self.recomputed and needs_gradients and torch.is_grad_enabled()):
            return super().forward(*inputs, **keywords)
        # Batch norms must not update their running statistics once more in the recomputation. In compiled code they
        # do not, and torch.compile cannot trace the contexts that prevent it.
        if not torch.compiler.is_compiling() and any(isinstance(module, BATCH_NORM) for module in self.modules()):
            keywords["context_fn"] = self._contexts_of_passes
        return checkpoint(self._own_forward, *inputs, use_reentrant=False, **keywords)

    def _own_forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Compute the block by its own forward, without this mixin."""
        return super().forward(*inputs, **keywords)

    def _contexts_of_passes(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return a context for the forward pass, and one for its recomputation."""
        return nullcontext(), _running_statistics_kept(self)


class RecomputedBlocks(Speedup):
    """Checkpoints all blocks (`blocks`), or the first of every N blocks (a number)."""

    def choose(self, built: BuiltModel) -> Choice:
        """Choose what the setting says. UserError if the model has no blocks."""
        wanted = built.config.TRAIN.GRAD_CHECKPOINT
        count = len(list(blocks_of(built.model)))
        if not count:
            raise UserError(
                f"TRAIN.GRAD_CHECKPOINT {wanted}: {built.name} has no sequence of equal blocks to recompute; set it to "
                "none."
            )
        first_of_each_interval = range(0, count, _interval(wanted))
        checkpointed = len(first_of_each_interval)
        return Choice(wanted, f"{checkpointed} of {count} blocks")

    def apply(self, built: BuiltModel, value: str | int) -> None:
        blocks = [block for _, block in blocks_of(built.model)]
        for number, block in enumerate(blocks):
            mix_in(block, Recomputed)  # all of them, so that blocks keep a common class
            block.recomputed = number % _interval(value) == 0  # pyright: ignore[reportArgumentType]
            block.frozen = not any(weight.requires_grad for weight in block.parameters())  # pyright: ignore[reportArgumentType]

    def words(self, choice: Choice) -> str:
        return f"{choice.why} recomputed in the backward pass"


def _interval(wanted: str | int) -> int:
    """Return the N of which every Nth block is checkpointed."""
    return 1 if wanted == "blocks" else int(wanted)


@contextmanager
def _running_statistics_kept(block: nn.Module) -> Iterator[None]:
    """Let batch norms update copies of their running statistics inside this context, for the recomputation of a block.

    The forward pass has updated the real statistics already.
    """
    norms = [module for module in block.modules() if isinstance(module, BATCH_NORM)]
    real_buffers = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, real_buffers, strict=True):
        norm._buffers.update({name: value if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, real_buffers, strict=True):
            norm._buffers.update(buffers)
