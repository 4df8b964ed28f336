"""Calls of the attention kernels in attention_amx.c."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.speed.amx.build import address, load, workspace

SOURCE = "attention_amx"
DTYPES = (torch.float32, torch.bfloat16)
MAX_TOKENS = 1024
"""With more, a head's data does not fit into the L2 cache."""
MAX_WIDTH = 128
_pointer, _long = ctypes.c_void_p, ctypes.c_long


def supports(tokens: int, width: int, dtype: torch.dtype) -> bool:
    return tokens <= MAX_TOKENS and width <= MAX_WIDTH and dtype in DTYPES


def forward(qkv: Tensor, out: Tensor, logsumexp: Tensor, heads: int) -> None:
    _call("forward", (qkv, out, logsumexp), qkv, heads)


def backward(grad: Tensor, qkv: Tensor, out: Tensor, logsumexp: Tensor, dqkv: Tensor, heads: int) -> None:
    _call("backward", (grad, qkv, out, logsumexp, dqkv), qkv, heads)


def _call(which: str, tensors: tuple[Tensor, ...], qkv: Tensor, heads: int) -> None:
    batch, tokens, packed = qkv.shape
    width, threads = packed // heads // 3, torch.get_num_threads()
    half = qkv.dtype is torch.bfloat16
    bytes_ = _workspace_bytes()(tokens, width, half, which == "backward")
    shared = workspace(bytes_ * threads)
    sizes = (batch, tokens, heads, width, half)
    _function(which, len(tensors))(*map(address, tensors), *sizes, address(shared), bytes_, threads)


@cache
def _function(name: str, tensors: int) -> Any:
    function = getattr(load(SOURCE), name)
    function.argtypes = [*[_pointer] * tensors, *[_long] * 4, ctypes.c_int, _pointer, _long, ctypes.c_int]
    function.restype = None
    return function


@cache
def _workspace_bytes() -> Any:
    """C function that returns the workspace of one thread, in bytes."""
    function = load(SOURCE).workspace_bytes
    function.argtypes, function.restype = [_long, _long, ctypes.c_int, ctypes.c_int], _long
    return function
