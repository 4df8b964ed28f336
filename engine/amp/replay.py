"""Find the operation that overflowed: run a micro-batch again, forward and backward, and check every output."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.amp.precision import dtype_name
from engine.callback import Computing
from engine.machine.late_compiler import uncompiled

BATCH, INPUTS, LOSS = "batch", "inputs", "loss"
"""Names for places outside the model."""
FORWARD, BACKWARD = "forward", "backward"

MASKING = {
    *("add", "cat", "clone", "copy", "fill", "full", "full_like", "index_fill", "index_put", "lift_fresh_copy"),
    *("masked_fill", "new_full", "repeat", "scalar_tensor", "_to_copy", "where"),
}
"""Kernels with which a model writes minus infinity on purpose, as a mask for softmax."""


class Place(NamedTuple):
    """A module, or one of the three names above, and the function that it called."""

    module: str
    function: str


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """The first operation of a micro-batch whose output is not finite. Plain values only, for other ranks and JSON."""

    operation: str = ""
    """Name of the function: linear, matmul, ...; empty if the replay found nothing."""
    module: str = ""
    """Name of the module in the model, or the model's class, or `loss`, `inputs`, `batch`."""
    direction: str = ""
    dtype: str = ""
    kernel: str = ""
    """Kernel that torch ran, such as aten::addmm."""
    parameter: str = ""
    """The parameter that does not fit `dtype`, if that is the cause."""

    @property
    def is_forward(self) -> bool:
        return self.direction == FORWARD


Found = tuple[Overflow, tuple[int, ...]]
"""An overflow, and the rows of the micro-batch whose output is not finite, if known"""


@dataclass
class _Record:
    kernel: str
    place: Place
    direction: str
    dtype: torch.dtype
    parameter: str
    extremes: Tensor
    """Minimum and maximum of the output."""

    def is_bad(self, least: float, greatest: float) -> bool:
        masks = not self.parameter and self.kernel.rpartition("::")[2].rstrip("_") in MASKING
        if masks and self.direction == FORWARD and least == -inf and greatest < inf:
            return False
        return not (isfinite(least) and isfinite(greatest))


class _CallTracker(TorchFunctionMode):
    """Tracks the module and function that are running; in the backward pass, those that created the current node.

    Autograd numbers its nodes in the order of their creation, so the number at each change of place is enough to find
    the place later. (Hooks on the modules' tensors fail at modules that return their input, of which a ViT has many.)
    """

    def __init__(self, model: nn.Module, teacher: nn.Module | None) -> None:
        super().__init__()
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        if teacher is not None:
            self._names |= {id(module): f"teacher.{name}" for name, module in teacher.named_modules() if name}
        self._stack = [LOSS]
        self._function = ""
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._last_backward = Place(LOSS, "")

    def here(self) -> tuple[Place, str]:
        if torch._C._current_graph_task_id() == -1:
            return Place(self._stack[-1], self._function), FORWARD
        node = torch._C._current_autograd_node()
        if node is not None:  # None while the engine adds gradients of a tensor that was used twice
            at = bisect_right(self._numbers, node._sequence_nr()) - 1
            self._last_backward = self._places[max(at, 0)]
        return self._last_backward, BACKWARD

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.calling_function(getattr(func, "__name__", "").strip("_")):
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def inside_module(self, module: str) -> Iterator[None]:
        self._stack.append(module)
        self._mark()
        yield
        self._stack.pop()
        self._mark()

    @contextlib.contextmanager
    def calling_function(self, function: str) -> Iterator[None]:
        outer, self._function = self._function, function
        self._mark()
        yield
        self._function = outer
        self._mark()

    @contextlib.contextmanager
    def hooked(self, on_output: Callable[[Any], None]) -> Iterator[None]:
        """Track the model's modules by global hooks; `on_output` receives the output of each."""
        inside: list[AbstractContextManager[None]] = []

        def before(module: nn.Module, _: Any) -> None:
            if id(module) in self._names:
                inside.append(self.inside_module(self._names[id(module)]))
                inside[-1].__enter__()

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if id(module) in self._names:
                on_output(output)
                inside.pop().__exit__(None, None, None)

        handles = register_module_forward_pre_hook(before), register_module_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self._places.append(Place(self._stack[-1], self._function))


class _ExtremesRecorder(TorchDispatchMode):
    """Records minimum and maximum of every floating output, on the device. Both are NaN if a value is."""

    def __init__(self, tracker: _CallTracker, parameters: dict[int, str], rows: int) -> None:
        super().__init__()
        self._tracker, self._parameters, self._rows = tracker, parameters, rows
        self.records: list[_Record] = []
        # For each module output: the number of records before it, and the norm of each of its rows.
        self._outputs: list[tuple[int, Tensor]] = []
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._paused or func.is_view:
            return out
        kernel = func.name().partition(".")[0]
        if "empty" in kernel:  # uninitialised memory may hold anything
            return out
        place, direction = self._tracker.here()
        results = out if isinstance(out, tuple | list) else (out,)
        # Attention's forward pass also returns the logsumexp, whose padding may hold anything.
        for result in results[:1] if "attention" in kernel and direction == FORWARD else results:
            if _is_checkable(result):
                cast = self._parameters.get(id(args[0]), "") if kernel == "aten::_to_copy" else ""
                self.records.append(_Record(kernel, place, direction, result.dtype, cast, _extremes(result)))
        return out

    def module_output(self, output: Any) -> None:
        if _is_checkable(output) and output.dim() > 1 and len(output) == self._rows:
            self._paused = True
            self._outputs.append((len(self.records), _row_norms(output)))
            self._paused = False

    def batch_images(self, images: Tensor) -> None:
        """Record the images themselves, which no operation produced."""
        if _is_checkable(images):
            self._paused = True
            self.records.append(_Record(BATCH, Place(BATCH, "images"), FORWARD, images.dtype, "", _extremes(images)))
            self._outputs.append((1, _row_norms(images)))
            self._paused = False

    def first_overflow(self, loss: Tensor, records_before_loss: int) -> Found | None:
        """Only this method waits for the device. Rows are those of the first module output after the operation."""
        if not self.records:
            return None
        extremes = torch.stack([record.extremes for record in self.records] + [loss.detach().float().expand(2)])
        *values, (loss_value, _) = extremes.tolist()
        # If the loss is finite, infinities in the forward pass did no harm.
        begin = records_before_loss if isfinite(loss_value) else 0
        at = next((n for n in range(begin, len(values)) if self.records[n].is_bad(*values[n])), None)
        if at is None:
            return None
        bad, rows = self.records[at], ()
        norms = next((norms for count, norms in self._outputs if count > at), None)
        if norms is not None and bad.direction == FORWARD:
            rows = tuple(norms.isfinite().logical_not().nonzero().flatten().tolist())
        found = Overflow(
            operation=bad.place.function or bad.kernel.rpartition("::")[2].strip("_"),
            module=bad.place.module,
            direction=bad.direction,
            dtype=dtype_name(bad.dtype),
            kernel=bad.kernel,
            parameter=bad.parameter,
        )
        return found, rows


class Replay:
    """Replays micro-batches without side effects on gradients, buffers and hooks. Callers protect random generators."""

    def __init__(self, to: Computing, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._inputs, self._criterion = to.forward, to.inputs, to.criterion
        self._batch_transform, self._autocast = to.batch_transform, autocast

    def run(self, images: Tensor, labels: Tensor, weight: float, scale: Tensor) -> Found | None:
        """Run one micro-batch, forward and backward, and find its overflow."""
        teacher = getattr(self._batch_transform, "teacher", None)  # set in distillation
        tracker = _CallTracker(self._model, teacher and teacher.model)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        recorder = _ExtremesRecorder(tracker, names, len(images))
        # Compiled parts run in eager mode: operations inside a compiled graph cannot be named.
        with torch.enable_grad(), uncompiled(), recorder:
            with tracker.hooked(recorder.module_output), tracker:
                recorder.batch_images(images)
                with self._autocast():
                    with tracker.inside_module(INPUTS):
                        images = _call_with_copied_buffers(self._inputs, images)
                        images, targets, _ = self._batch_transform(images, labels)
                    with tracker.inside_module(type(self._model).__name__):
                        logits = _call_with_copied_buffers(self._model, images)
                    loss = self._criterion(logits.float(), targets)
                records_before_loss = len(recorder.records)
            with tracker.calling_function("scaling"):
                scaled = loss * weight * scale
            # Hooks are off here: activation checkpointing calls modules again, whose nodes are not in this graph.
            # Not backward(), which would add to .grad and start DDP's all-reduce.
            torch.autograd.grad(scaled, [p for p in self._model.parameters() if p.requires_grad], allow_unused=True)
        return recorder.first_overflow(loss, records_before_loss)


def _call_with_copied_buffers(module: nn.Module, images: Tensor) -> Tensor:
    """Call a module without changing its running statistics."""
    return functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (images,))


def _is_checkable(value: Any) -> bool:
    # 8-bit floats are left out: they have no infinity, and torch computes no norm of them.
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1 and value.numel() > 0


def _extremes(value: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(value.detach())).float()


def _row_norms(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value.detach().flatten(1), float("inf"), dim=1)
