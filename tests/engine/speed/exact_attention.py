"""Attention over a packed product in fp64, for comparison."""

import torch
from torch import Tensor


def exact_attention(qkv: Tensor, heads: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What comes out, the logarithm of each query's sum of weights, and the gradient of `qkv`."""
    leaf = qkv.detach().double().requires_grad_()
    q, k, v = leaf.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return out.detach(), scores.detach().logsumexp(-1), torch.autograd.grad(out, leaf, grad.double())[0]


def apart(found: Tensor, expected: Tensor) -> float:
    """The size of the difference against that of what is right; against 1 where that is nothing."""
    size = expected.detach().norm()
    return float((found.detach().double() - expected.detach()).norm() / (size if size > 1e-6 else 1.0))
