"""Which operation overflowed: one pass forward and backward again, every operation's output measured on the way."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.inputs.mixup import BatchChange, unchanged
from engine.machine.late_compiler import uncompiled

BATCH, INPUTS, LOSS = "batch", "inputs", "loss"
"""Where things happen outside the model."""
FORWARD, BACKWARD = "forward", "backward"

MASKING = {
    "add",
    "cat",
    "clone",
    "copy",
    "lift_fresh_copy",
    "masked_fill",
    "repeat",
    "scalar_tensor",
    "_to_copy",
    "where",
}
MASKING |= {"fill", "full", "full_like", "index_fill", "index_put", "new_full"}
"""Kernels by which a model puts in minus infinity on purpose, so that a softmax makes 0 of it."""


class Place(NamedTuple):
    """A module, or one of the three names above, and the function called in it."""

    module: str
    function: str


@dataclass(frozen=True)
class Finding:
    """The first operation of a micro-batch whose output is not finite."""

    operation: str
    """In the user's words: linear, matmul, softmax, ..."""
    kernel: str
    """What torch ran for it: aten::addmm, say."""
    module: str
    direction: str
    dtype: torch.dtype
    parameter: str = ""
    """The parameter that was not finite once cast to `dtype`, if that was it."""
    bad_rows: tuple[int, ...] = ()
    """Rows of the micro-batch that came out not finite, where that can be told."""


@dataclass
class _Record:
    kernel: str
    place: Place
    direction: str
    dtype: torch.dtype
    parameter: str
    extremes: Tensor
    """Least and greatest value."""

    @property
    def may_mask(self) -> bool:
        return not self.parameter and self.kernel.rpartition("::")[2].rstrip("_") in MASKING


class _Whereabouts:
    """What is running; in a backward pass, what ran forward when the present node of the graph was made.

    Nodes are numbered as they are made, so the number at each change of place is enough to find it again. (Hooks on
    the modules' tensors would lose their way at modules that hand their input on, and a ViT has many.)
    """

    def __init__(self, model: nn.Module, teacher: nn.Module | None) -> None:
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        if teacher is not None:
            self._names |= {id(module): f"teacher.{name}" for name, module in teacher.named_modules() if name}
        self._stack = [LOSS]
        self._function = ""
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._last_backward = Place(LOSS, "")

    def here(self) -> tuple[Place, str]:
        if not _in_backward():
            return Place(self._stack[-1], self._function), FORWARD
        node = torch._C._current_autograd_node()
        if node is not None:  # none while the engine adds up gradients that meet
            at = bisect_right(self._numbers, node._sequence_nr()) - 1
            self._last_backward = self._places[max(at, 0)]
        return self._last_backward, BACKWARD

    @contextlib.contextmanager
    def inside(self, module: str) -> Iterator[None]:
        self._enter(module)
        yield
        self._leave()

    @contextlib.contextmanager
    def calling(self, function: str) -> Iterator[None]:
        outer, self._function = self._function, function
        self._mark()
        yield
        self._function = outer
        self._mark()

    @contextlib.contextmanager
    def following(self, left: Callable[[Any], None]) -> Iterator[None]:
        """Follow the model's modules; `left` is given the output of each."""

        def before(module: nn.Module, _: Any) -> None:
            if id(module) in self._names:
                self._enter(self._names[id(module)])

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if id(module) in self._names:
                left(output)
                self._leave()

        handles = register_module_forward_pre_hook(before), register_module_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: str) -> None:
        self._stack.append(module)
        self._mark()

    def _leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self._places.append(Place(self._stack[-1], self._function))


class _Functions(TorchFunctionMode):
    """Tells which function the model calls, by the name its author wrote."""

    def __init__(self, where: _Whereabouts) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._where.calling(getattr(func, "__name__", "").strip("_")):
            return func(*args, **(kwargs or {}))


class _Measure(TorchDispatchMode):
    """Keeps the extremes of every floating output on the device. NaN is both where there is one."""

    def __init__(self, where: _Whereabouts, parameters: dict[int, str], rows: int) -> None:
        super().__init__()
        self._where, self._parameters, self._rows = where, parameters, rows
        self.records: list[_Record] = []
        # For each module left: how many records there were, and the norm of each row of its output.
        self._outputs: list[tuple[int, Tensor]] = []
        self._own = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._own or func.is_view:
            return out
        kernel = func.name().partition(".")[0]
        if "empty" in kernel:  # memory nobody has written to may hold anything
            return out
        place, direction = self._where.here()
        results = out if isinstance(out, tuple | list) else (out,)
        # Attention's forward pass also gives sums of exponentials, whose padding may hold anything.
        for result in results[:1] if "attention" in kernel and direction == FORWARD else results:
            if _measurable(result):
                cast = self._parameters.get(id(args[0]), "") if kernel == "aten::_to_copy" else ""
                self.records.append(_Record(kernel, place, direction, result.dtype, cast, _extremes(result)))
        return out

    def left(self, output: Any) -> None:
        if _measurable(output) and output.dim() > 1 and len(output) == self._rows:
            self._own = True
            self._outputs.append((len(self.records), _row_norms(output)))
            self._own = False

    def given(self, images: Tensor) -> None:
        """What comes in has no operation that made it."""
        if _measurable(images):
            self._own = True
            self.records.append(
                _Record(BATCH, Place(BATCH, "images"), FORWARD, images.dtype, "", _extremes(images)),
            )
            self._outputs.append((1, _row_norms(images)))
            self._own = False

    def first_bad(self, loss: Tensor, loss_at: int) -> Finding | None:
        """The one wait for the device. `loss_at`: how many records there were when the loss was known."""
        if not self.records:
            return None
        extremes = torch.stack([record.extremes for record in self.records] + [loss.detach().float().expand(2)])
        *values, (loss_value, _) = extremes.tolist()
        # An infinity that the loss outlived did no harm.
        begin = loss_at if isfinite(loss_value) else 0
        at = next((n for n in range(begin, len(values)) if _is_bad(self.records[n], *values[n])), None)
        if at is None:
            return None
        bad = self.records[at]
        operation = bad.place.function or bad.kernel.rpartition("::")[2].strip("_")
        rows = self._bad_rows(at) if bad.direction == FORWARD else ()
        return Finding(operation, bad.kernel, bad.place.module, bad.direction, bad.dtype, bad.parameter, rows)

    def _bad_rows(self, at: int) -> tuple[int, ...]:
        """By the output of the module that was left first after that record."""
        norms = next((norms for count, norms in self._outputs if count > at), None)
        return () if norms is None else tuple(torch.isfinite(norms).logical_not().nonzero().flatten().tolist())


class Replay:
    """Passes that leave no trace: gradients, buffers and hooks stay as they are; generators are the caller's care."""

    def __init__(
        self,
        model: nn.Module,
        inputs: nn.Module,
        criterion: Callable[[Tensor, Tensor], Tensor],
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        change: BatchChange = unchanged,
    ) -> None:
        self._model, self._inputs, self._criterion, self._autocast = model, inputs, criterion, autocast
        self._change = change

    def watch(self, images: Tensor, labels: Tensor, weight: float, scale: Tensor) -> Finding | None:
        """One micro-batch, forward and backward."""
        teacher = getattr(self._change, "teacher", None)  # of a distillation
        where = _Whereabouts(self._model, teacher and teacher.model)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        measure = _Measure(where, names, len(images))
        # Compiled parts run as they are written: inside a compiled graph there is nothing to name.
        with torch.enable_grad(), uncompiled(), measure:
            with where.following(measure.left), _Functions(where):
                measure.given(images)
                with self._autocast():
                    with where.inside(INPUTS):
                        images, targets, _ = self._change(_untouched(self._inputs, images), labels)
                    with where.inside(type(self._model).__name__):
                        logits = _untouched(self._model, images)
                    loss = self._criterion(logits.float(), targets)
                loss_at = len(measure.records)
            with where.calling("scaling"):
                scaled = loss * weight * scale
            # No longer following: checkpointing calls modules again in here, for nodes that are not the graph's.
            # Not backward(): that would add to .grad, and call those who wait for it to exchange gradients.
            torch.autograd.grad(scaled, [p for p in self._model.parameters() if p.requires_grad], allow_unused=True)
        return measure.first_bad(loss, loss_at)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _untouched(module: nn.Module, images: Tensor) -> Tensor:
    """Call a module whose running statistics must not notice."""
    return functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (images,))


def _measurable(value: Any) -> bool:
    # An 8-bit float has no infinity to speak of, and no norm in torch.
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1 and value.numel() > 0


def _is_bad(record: _Record, least: float, greatest: float) -> bool:
    if record.may_mask and record.direction == FORWARD and least == -inf and greatest < inf:
        return False
    return not (isfinite(least) and isfinite(greatest))


def _extremes(value: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(value.detach())).float()


def _row_norms(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value.detach().flatten(1), float("inf"), dim=1)
