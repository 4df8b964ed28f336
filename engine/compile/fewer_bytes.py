"""Rewrites a model and its graphs for the compiler, so that compiled code moves fewer bytes and computes less.

Results change by rounding only. Eager code stays as it is. `bench/compiled_kernels.py` lists the kernels and their
bytes; docs/dev/kernels.md has the result.
"""

from typing import Any

import torch
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from engine.speed.speedup import mix_in


class CompiledBlock(nn.Module):
    """Mixin for timm's transformer block, for compiled code only.

    It adds and normalises tokens as a matrix with a row per token, as the matrix products see them. With one more
    dimension, the compiler does not recognise that the backward pass of a norm and the cast of its result to half
    precision go through memory in the same order, and generates two kernels.
    """

    norm1: nn.Module
    attn: nn.Module
    ls1: nn.Module
    drop_path1: nn.Module
    norm2: nn.Module
    mlp: nn.Module
    ls2: nn.Module
    drop_path2: nn.Module
    class_token_only: bool
    """Compute the MLP for the class token only, because the model reads no other token of this block."""

    def forward(self, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        """Compute the block for the tokens `x` (batch x tokens x width).

        Returns as many tokens, or in training the class token alone if that is all that the model reads.
        """
        if others or keywords or not torch.compiler.is_compiling():
            return super().forward(x, *others, **keywords)
        shape = x.shape
        rows = x.flatten(0, 1)
        attended = self.attn(self.norm1(rows).view(shape))
        rows = rows + self.drop_path1(self.ls1(attended)).flatten(0, 1)
        if self.class_token_only and self.training:
            rows = rows.view(shape)[:, 0]
            shape = torch.Size((shape[0], 1, shape[2]))
        update = self.mlp(self.norm2(rows).view(shape))
        rows = rows + self.drop_path2(self.ls2(update)).flatten(0, 1)
        return rows.view(shape)


def rewrite_blocks(model: nn.Module, fp8: bool) -> None:
    """Let the blocks of timm's vision transformer compute as `CompiledBlock` wherever they are compiled.

    Blocks whose forward or norm is another one, such as that of activation checkpointing, stay as they are. `fp8`: the
    linear layers compute in 8 bits, for which the number of rows may not fit a class token alone.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential) or not all(_is_plain(block) for block in blocks):
        return
    for block in blocks:
        mix_in(block, CompiledBlock)  # all of them, so that blocks keep a common class
        block.class_token_only = False  # pyright: ignore[reportArgumentType]
    last: Any = blocks[-1]
    last.class_token_only = _reads_class_token(model) and _computes_each_token(last) and not fp8


def _is_plain(block: nn.Module) -> bool:
    """Return whether this is timm's own block with layer norms, or one with this file's mixin."""
    if type(block).forward not in (Block.forward, CompiledBlock.forward):
        return False
    has_own_forward = "forward" in vars(block)  # such as a block that is forced to fp32
    has_layer_norms = all(isinstance(norm, nn.LayerNorm) for norm in (block.norm1, block.norm2))
    return has_layer_norms and not has_own_forward


def _reads_class_token(model: nn.Module) -> bool:
    """Return whether this is timm's own vision transformer, whose classifier reads the class token and no other."""
    return (
        type(model) is VisionTransformer
        and model.global_pool == "token"
        and model.attn_pool is None
        and isinstance(model.norm, nn.LayerNorm | nn.Identity)
    )


def _computes_each_token(block: Any) -> bool:
    """Return whether a block's MLP computes each token by itself, and whether nobody looks at the tokens.

    Dropout would draw other random numbers for one token than for all of them, and a hook may expect all.
    """
    modules = [block, block.norm2, *block.mlp.modules()]
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules)
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return isinstance(block.mlp, Mlp) and not drops and not has_hooks


class SaveResiduals(CustomGraphPass):
    """Makes the compiler save a layer norm's input for its backward pass, and not the normalised input.

    They are of the same size. But the input, a residual, is written in any case, as the next block adds to it; the
    compiler would write both. The normalised input is computed again, with the same result.
    """

    def __call__(self, graph: fx.Graph) -> None:
        aten = torch.ops.aten
        if any(node.meta.get("recompute") is not None for node in graph.nodes):
            return  # activation checkpointing has decided what to save
        for statistics in graph.find_nodes(op="call_function", target=aten.var_mean.correction):
            tokens, dimensions = statistics.args[:2]
            value = tokens.meta["val"]
            is_layer_norm = list(dimensions) == [value.ndim - 1]
            is_cast = tokens.target is torch.ops.prims.convert_element_type.default
            if not is_layer_norm or is_cast or value.dtype is not torch.float32:
                continue
            tokens.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for centred in _users(tokens, aten.sub.Tensor):
                centred.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                for normalised in _users(centred, aten.mul.Tensor):
                    normalised.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> bytes:
        """Return a hash of this pass, which is part of the key under which compiled code is cached."""
        return get_hash_for_files((__file__,))


def _users(node: fx.Node, operator: Any) -> list[fx.Node]:
    """List the uses of a node by an operator in the forward pass."""
    users = [user for user in node.users if user.target is operator]
    return [user for user in users if user.meta.get("partitioner_tag") != "is_backward"]
