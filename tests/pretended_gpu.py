"""Run the program on a GPU that is not there: `python tests/pretended_gpu.py main_single_gpu.py -cfg ...`.

Its tensors say that they are on the GPU, and are computed on the CPU. Unlike those of torch's FakeTensorMode they have
values, so a whole run goes through the branches that only a GPU takes: loss scaling, reports, checkpoints. As on a
GPU, it is an error to compute with a tensor of the host, to use more than PRETENDED_MIB of memory, and to compute with
what a stream copies before that has arrived; what is copied to the host without waiting arrives when it is waited for.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
TOTAL = int(os.environ.get("PRETENDED_MIB", "8192")) * 2**20
ACROSS_DEVICES = {"aten::copy_", "aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::_to_copy"}
"""Operators that take tensors of several devices."""


class Piece:
    """Is freed with its tensor, to which Module.to allows no weak reference."""


class Memory:
    """What the tensors of the GPU hold: each piece once, however many tensors are views of it."""

    def __init__(self) -> None:
        self.users: Counter[int] = Counter()
        self.held = self.peak = 0
        self.fraction = 1.0

    def add(self, tensor: OnGpu) -> None:
        storage = tensor.host.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if not self.users[place]:
            if self.held + size > self.fraction * TOTAL:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
            self.held += size
            self.peak = max(self.peak, self.held)
        self.users[place] += 1
        tensor.piece = Piece()
        weakref.finalize(tensor.piece, self._free, place, size)
        if Stream.copying:
            Stream.coming.add(tensor.piece)

    def _free(self, place: int, size: int) -> None:
        self.users[place] -= 1
        if not self.users[place]:
            self.held -= size


memory = Memory()


class Stream:
    """A stream or an event: its work is done when it is waited for."""

    copying = False
    """Whether tensors are made on a stream beside the one that computes."""
    coming: ClassVar[weakref.WeakSet[Piece]] = weakref.WeakSet()
    """Pieces of memory that such a stream has still to write."""
    leaving: ClassVar[list[Callable[[], Any]]] = []
    """Copies to the host that were not waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def wait_stream(self, _other: Stream) -> None:
        Stream.coming.clear()

    def synchronize(self) -> None:
        while Stream.leaving:
            Stream.leaving.pop()()

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, _end: Stream) -> float:
        return 1.0


@contextlib.contextmanager
def on_stream(_stream: Stream) -> Iterator[None]:
    Stream.copying = True
    yield
    Stream.copying = False


class OnGpu(Tensor):
    """A tensor of the pretended GPU: on the CPU for torch's C++ code, on the GPU for Python code."""

    host: Tensor
    piece: Piece
    device = GPU  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_cuda, is_cpu = True, False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, host: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device=CPU
        )
        made.host = host
        memory.add(made)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # with it, Module.to swaps the tensors
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> OnGpu:
        return OnGpu(parts["host"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name
        if name not in ACROSS_DEVICES and any(type(one) is not OnGpu and one.ndim for one in given):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu")
        if not Stream.copying and any(isinstance(one, OnGpu) and one.piece in Stream.coming for one in given):
            raise RuntimeError(f"{name}: its input is still being copied by another stream")
        args, kwargs = tree_map_only(OnGpu, lambda one: one.host, (args, kwargs or {}))
        if name == "aten::copy_" and type(given[0]) is not OnGpu and args[2:] == (True,):  # non_blocking
            Stream.leaving.append(partial(func, args[0], args[1].clone()))
            return given[0].zero_()
        result = func(*args, **kwargs)
        known = {id(one.host if isinstance(one, OnGpu) else one): one for one in given}
        return tree_map_only(Tensor, lambda one: known[id(one)] if id(one) in known else OnGpu(one), result)


def on_gpu(place: object) -> bool:
    return isinstance(place, str | torch.device) and str(place).startswith("cuda")


class Pretence(TorchFunctionMode):
    """Makes on the CPU what is asked for on the GPU, and moves tensors between them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        kwargs.pop("pin_memory", None)
        first = args[0] if args else None
        if name == "tolist" and isinstance(first, OnGpu):
            return first.host.tolist()
        if name == "record_stream":
            return first
        if name == "cpu":
            name, func, kwargs = "to", Tensor.to, {"device": CPU}
        places = [place for place in (*args[1:], kwargs.get("device")) if isinstance(place, str | torch.device)]
        if not places:
            return func(*args, **kwargs)
        if name == "to" and isinstance(first, OnGpu) and not on_gpu(places[0]):
            return first.host.clone().to(*args[1:], **kwargs)
        args = [CPU if on_gpu(one) else one for one in args]
        kwargs |= {"device": CPU} if on_gpu(kwargs.get("device")) else {}
        result = func(*args, **kwargs)
        if not on_gpu(places[0]) or not isinstance(result, Tensor) or isinstance(result, OnGpu):
            return result
        return OnGpu(result.detach().clone()).requires_grad_(result.requires_grad)


class HostGenerator(torch.Generator):
    def __new__(cls, *_: Any, **__: Any) -> HostGenerator:
        return super().__new__(cls, CPU)  # pyright: ignore[reportCallIssue]


def answer(owner: ModuleType, **answers: Any) -> None:
    """Let functions of a module answer the same to whatever they are asked."""
    for name, value in answers.items():
        setattr(owner, name, lambda *_, value=value, **__: value)


def as_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **more: function(*("cpu" if one == "cuda" else one for one in args), **more)


def install() -> None:
    """Put the pretended GPU in place of torch's, for the rest of this process."""
    gpu = {"name": "Pretended GPU", "total_memory": TOTAL, "major": 9, "minor": 0, "uuid": "GPU-pretended"}
    answer(torch.cuda, is_available=True, is_initialized=True, device_count=1, current_device=0)
    answer(torch.cuda, get_device_capability=(9, 0), get_device_properties=SimpleNamespace(**gpu))
    answer(torch.cuda, set_device=None, empty_cache=None, manual_seed=None, device_of=contextlib.nullcontext())
    answer(torch.cuda, current_stream=Stream(), get_rng_state=torch.empty(0), set_rng_state=None)
    answer(torch.accelerator, current_stream=Stream(), synchronize=None, current_device_index=0, set_device_index=0)
    answer(nccl, version=(2, 27, 3))
    torch.cuda.memory_reserved = lambda *_: memory.held
    torch.cuda.max_memory_reserved = torch.cuda.max_memory_allocated = lambda *_: memory.peak
    torch.cuda.mem_get_info = lambda *_: (TOTAL - memory.held, TOTAL)
    torch.cuda.reset_peak_memory_stats = lambda *_: setattr(memory, "peak", memory.held)
    torch.cuda.set_per_process_memory_fraction = lambda fraction, *_: setattr(memory, "fraction", fraction)
    torch.cuda.Stream = torch.cuda.Event = torch.Event = Stream
    torch.cuda.stream, torch.Generator = on_stream, HostGenerator
    Tensor.pin_memory = lambda self, device=None: self  # noqa: ARG005 - also in the loader's thread, without the mode
    for owner, name in ((torch.autocast, "__init__"), (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype")):
        setattr(owner, name, as_on_cpu(getattr(owner, name)))


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.argv = [str(root / sys.argv[1]), *sys.argv[2:]]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    install()
    with Pretence():
        runpy.run_path(sys.argv[0], run_name="__main__")
