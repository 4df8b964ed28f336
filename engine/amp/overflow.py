"""Watches for updates that the loss scaler skipped, and replays them to name the operation that overflowed.

A normal update costs a reference to its batch and a copy of the loss scale on the device. If only the GPU knows whether
an update was skipped, the host does not wait: an asynchronous copy brings the flag, and later updates look at it. A
replay runs a micro-batch again, forward and backward, and checks every output.
"""

import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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

from datasets import PADDING, Batch, MicroBatch
from engine.amp.precision import Precision, dtype_name
from engine.callback import Callback, Computing
from engine.machine.late_compiler import uncompiled
from engine.measure.meters import SkipRecord
from models.parts import BATCH_NORM
from utils.log import log
from utils.seeding import fork_host_rng, seed_all
from utils.text import counted

# Names for places outside the model
BATCH = "batch"
INPUTS = "inputs"
LOSS = "loss"

FORWARD = "forward"
BACKWARD = "backward"

MASKING = {
    "add",
    "cat",
    "clone",
    "copy",
    "fill",
    "full",
    "full_like",
    "index_fill",
    "index_put",
    "lift_fresh_copy",
    "masked_fill",
    "new_full",
    "repeat",
    "scalar_tensor",
    "_to_copy",
    "where",
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
    """FORWARD or BACKWARD"""
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
    """Output of one kernel during a replay."""

    kernel: str
    place: Place
    direction: str
    dtype: torch.dtype
    parameter: str
    """Name of the parameter that the kernel cast, if it did"""
    extremes: Tensor
    """Minimum and maximum of the output."""

    def is_bad(self, least: float, greatest: float) -> bool:
        """Return whether the output is not finite, unless it is a mask of minus infinities.

        `least`, `greatest`: the extremes, read from the device.
        """
        # A cast is in MASKING because it may cast a mask; the cast of a parameter cannot be one.
        writes_masks = not self.parameter and self.kernel.rpartition("::")[2].rstrip("_") in MASKING
        if writes_masks and self.direction == FORWARD and least == -inf and greatest < inf:  # no NaN either
            return False
        return not (isfinite(least) and isfinite(greatest))


class _CallTracker(TorchFunctionMode):
    """Tracks the module and function that are running; in the backward pass, those that created the current node.

    Autograd numbers its nodes in the order of their creation, so the number at each change of place is enough to find
    the place later. (Hooks on the modules' tensors fail at modules that return their input, of which a ViT has many.)
    """

    def __init__(self, model: nn.Module, teacher: nn.Module | None) -> None:
        """`teacher`: the model of a distillation's teacher, whose modules are tracked too; None without one."""
        super().__init__()
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        if teacher is not None:
            self._names |= {id(module): f"teacher.{name}" for name, module in teacher.named_modules() if name}
        # Code that is in no module computes the loss.
        self._forward_place = self._backward_place = Place(LOSS, "")
        # For each change of place in the forward pass: the number of the next autograd node, and the new place.
        self._first_nodes: list[int] = []
        self._places: list[Place] = []

    def here(self) -> tuple[Place, str]:
        """Return the module and function whose code runs now or is differentiated now, and FORWARD or BACKWARD."""
        is_forward = torch._C._current_graph_task_id() == -1  # no backward pass is running
        if is_forward:
            return self._forward_place, FORWARD
        node = torch._C._current_autograd_node()
        # No node is current while the engine adds gradients of a tensor that was used twice: the place stays.
        if node is not None:
            # The node was created at the place of the last change with a first node up to its number. A node before
            # all changes counts to the first place.
            change = bisect_right(self._first_nodes, node._sequence_nr()) - 1
            self._backward_place = self._places[max(change, 0)]
        return self._backward_place, BACKWARD

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.at(function=getattr(func, "__name__", "").strip("_")):
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def at(self, **place: str) -> Iterator[None]:
        """Run the body of this context at another place: in another `module`, or calling another `function`."""
        outer = self._forward_place
        self._change_place(outer._replace(**place))
        yield
        self._change_place(outer)

    @contextlib.contextmanager
    def hooked(self, on_output: Callable[[Any], None]) -> Iterator[None]:
        """Track the model's modules by global hooks; `on_output` receives the output of each."""
        # Calls of modules nest, and a call begins in one hook and ends in another. So this stack holds a context for
        # each running call, outermost first, entered and left by hand.
        running_calls: list[AbstractContextManager[None]] = []

        def before(module: nn.Module, _: Any) -> None:
            if id(module) in self._names:
                running_calls.append(self.at(module=self._names[id(module)]))
                running_calls[-1].__enter__()

        def after(module: nn.Module, _: Any, output: Any) -> None:
            if id(module) in self._names:
                on_output(output)
                running_calls.pop().__exit__(None, None, None)

        with register_module_forward_pre_hook(before), register_module_forward_hook(after):
            yield

    def _change_place(self, place: Place) -> None:
        """Set the place of the forward pass, and record it with the number of the next autograd node."""
        self._forward_place = place
        self._first_nodes.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self._places.append(place)


class _ExtremesRecorder(TorchDispatchMode):
    """Records minimum and maximum of every floating output, on the device. Both are NaN if a value is."""

    def __init__(self, tracker: _CallTracker, parameters: dict[int, str], rows: int) -> None:
        """`parameters`: id of each parameter -> its name. `rows`: number of images in the micro-batch."""
        super().__init__()
        self._tracker = tracker
        self._parameters = parameters
        self._rows = rows
        self.records: list[_Record] = []
        # For each module output: the number of records before it, and the norm of each of its rows, which shows the
        # images that overflowed.
        self._outputs: list[tuple[int, Tensor]] = []
        self._paused = False
        """True while this recorder computes itself"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel, and record the extremes of its floating outputs with the place that called it."""
        out = func(*args, **(kwargs or {}))
        if self._paused or func.is_view:
            return out
        kernel = func.name().partition(".")[0]
        if "empty" in kernel:  # uninitialised memory may hold anything
            return out
        place, direction = self._tracker.here()
        results = out if isinstance(out, tuple | list) else (out,)
        # Attention's forward pass also returns the logsumexp, whose padding may hold anything.
        if "attention" in kernel and direction == FORWARD:
            results = results[:1]
        # Only a cast can overflow because of a parameter alone: one that does not fit the dtype.
        cast_parameter = self._parameters.get(id(args[0]), "") if kernel == "aten::_to_copy" else ""
        for result in results:
            if _is_checkable(result):
                self.records.append(_Record(kernel, place, direction, result.dtype, cast_parameter, _extremes(result)))
        return out

    def module_output(self, output: Any) -> None:
        """Keep the norm of each row of a module's output, if it has a row per image."""
        if _is_checkable(output) and output.dim() > 1 and len(output) == self._rows:
            self._paused = True
            norms = torch.linalg.vector_norm(output.detach().flatten(1), float("inf"), dim=1)
            self._outputs.append((len(self.records), norms))
            self._paused = False

    def batch_images(self, images: Tensor) -> None:
        """Record the images themselves, which no operation produced."""
        if _is_checkable(images):
            self._paused = True
            self.records.append(_Record(BATCH, Place(BATCH, "images"), FORWARD, images.dtype, "", _extremes(images)))
            self.module_output(images)

    def first_overflow(self, loss: Tensor, records_before_loss: int) -> Found | None:
        """Return the first overflow, and the rows of the micro-batch that it is in; None if there was none.

        The rows are those of the first module output after the operation; () if they are unknown. Only this method
        waits for the device. `records_before_loss`: number of records of the forward pass.
        """
        if not self.records:
            return None
        # One transfer to the host: minimum and maximum of each record, then the loss as both.
        on_device = torch.stack([record.extremes for record in self.records] + [loss.detach().float().expand(2)])
        *extremes, (loss_value, _) = on_device.tolist()

        # If the loss is finite, infinities in the forward pass did no harm.
        begin = records_before_loss if isfinite(loss_value) else 0
        first_bad = None
        for number in range(begin, len(extremes)):
            least, greatest = extremes[number]
            if self.records[number].is_bad(least, greatest):
                first_bad = number
                break
        if first_bad is None:
            return None

        record = self.records[first_bad]
        rows = ()
        row_norms_after = [row_norms for records_before, row_norms in self._outputs if records_before > first_bad]
        if row_norms_after and record.direction == FORWARD:
            is_bad_row = row_norms_after[0].isfinite().logical_not()
            rows = tuple(is_bad_row.nonzero().flatten().tolist())
        kernel_name = record.kernel.rpartition("::")[2].strip("_")
        overflow = Overflow(
            operation=record.place.function or kernel_name,
            module=record.place.module,
            direction=record.direction,
            dtype=dtype_name(record.dtype),
            kernel=record.kernel,
            parameter=record.parameter,
        )
        return overflow, rows


def _call_with_copied_buffers(module: nn.Module, images: Tensor) -> Tensor:
    """Call a module without changing its running statistics."""
    return functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (images,))


def _is_checkable(value: Any) -> bool:
    """Return whether this is a floating tensor that can overflow, and not empty."""
    # 8-bit floats are left out: they have no infinity, and torch computes no norm of them.
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1 and value.numel() > 0


def _extremes(value: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(value.detach())).float()


SHOWN_SAMPLES = 8

FIRST_REPLAYS = 3
UPDATES_BETWEEN_REPLAYS = 50
MAX_BYTES = 2**30
"""Most image bytes held for replays, the current update's included."""

MicroBatches = list[tuple[MicroBatch, Batch]]
Answer = Callable[[], bool | None]
"""Whether the weights moved; None while that is unknown."""


@dataclass(frozen=True, kw_only=True)
class Blame(Overflow):
    """Cause of one skipped update."""

    update: int
    noticed_at: int
    sample_indices: tuple[int, ...]
    """Indices of the micro-batch's samples."""
    scale: float
    bad_samples: tuple[int, ...] = ()
    """Indices of the samples whose output is not finite, if known."""
    passed_over: int = 0
    """Skipped updates since the last replay that were not replayed."""
    reason: str = ""
    """Why the replay found nothing."""

    def words(self) -> str:
        """Describe the cause in one line for the log."""
        parts = [self._describe_cause()]
        if self.operation:  # the replay overflowed, so the samples matter
            parts.append(self._describe_samples())
        parts.append(f"loss scale {self.scale:g}")
        delay = self.noticed_at - self.update
        if delay:
            later = counted(delay, "update")
            parts.append(f"noticed {later} later, and replayed with the weights of that later update")
        if self.passed_over:
            parts.append(f"{self.passed_over} skipped updates before it were not replayed")
        return f"update {self.update} was skipped: " + "; ".join(parts)

    def _describe_cause(self) -> str:
        """Describe the operation that overflowed, or say why it is unknown.

        `module` may also be BATCH, the images themselves, or LOSS, the code after the model. `parameter` is set if the
        operation cast a weight to a dtype that cannot hold it.
        """
        if not self.operation:
            return self.reason
        if self.module == BATCH:
            return "the images were not finite, before the model computed anything"
        if self.module == LOSS and self.operation == "scaling":
            return "the scaled loss itself overflowed: the loss scale is too large"
        where = f"{self.operation} in {self.module} ({self.direction}, {self.kernel}, {self.dtype})"
        if self.module == LOSS and self.direction == BACKWARD:
            return f"{where}: the gradient of the loss is not finite, so the loss scale is too large"
        if self.parameter:
            return f"{where} overflowed: {self.parameter} does not fit {self.dtype}"
        return f"{where} produced the first value that is not finite"

    def _describe_samples(self) -> str:
        """Describe which samples overflowed, or only which micro-batch if they are unknown."""
        count = len(self.sample_indices)
        if self.bad_samples and len(self.bad_samples) < count:
            return f"in {len(self.bad_samples)} of {count} samples: {_list_first(self.bad_samples)}"
        samples = f"all {count} samples of a micro-batch" if self.bad_samples else f"a micro-batch of {count} samples"
        return f"in {samples}: {_list_first(self.sample_indices)}"


@dataclass
class _Pending:
    """One update that may have been skipped."""

    update: int
    micro_batches: MicroBatches
    """Empty if their images were too large to hold"""
    scale: Tensor
    """Loss scale of this update"""
    answer: Answer | None = None
    """None until the optimiser has stepped"""


class KeptStatistics(Callback):
    """Restores the running statistics of batch norms after a skipped update, since an infinity would stay in them."""

    def attach(self, to: Computing) -> None:
        self._statistics: list[Tensor] = []
        for module in to.model.modules():
            if isinstance(module, BATCH_NORM):
                self._statistics += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        self._sizes = list(map(len, self._statistics))
        self._kept = torch.cat(self._statistics) if self._statistics else None

    def after_update(self, update: int, stepped: bool | Tensor) -> None:
        """Keep the statistics if the weights moved, else restore those kept. Nothing waits for the device."""
        if self._kept is None:
            return
        if isinstance(stepped, Tensor):  # only the device knows whether the weights moved
            self._kept = torch.where(stepped.bool(), torch.cat(self._statistics), self._kept)
        elif stepped:
            self._kept = torch.cat(self._statistics)
        # Changes nothing if the statistics of this update were kept just now.
        torch._foreach_copy_(self._statistics, self._kept.split(self._sizes))  # pyright: ignore[reportPrivateImportUsage]


class OverflowWatch(Callback):
    """Holds the micro-batches of recent updates, and replays some of the updates that were skipped.

    Call `take` for each report. `seed` is that of the updates.
    """

    def __init__(self, seed: int, precision: Precision) -> None:
        self._seed = seed
        self._precision = precision
        self.skips = SkipRecord()
        self._micro_batches: MicroBatches | None = []
        """Those of the current update; None if they are too large to hold"""
        self._pending: deque[_Pending] = deque()
        """Updates whose outcome is not known yet, oldest first"""
        self._blames: list[Blame] = []
        """Causes found since the last `take`"""
        self._update = 0
        """Number of the last update"""
        self._limit_was_logged = False

    def attach(self, to: Computing) -> None:
        """Take the modules that a replay runs. They must be neither compiled nor wrapped by DDP."""
        self._computing = to
        self._model = to.forward

    def after_backward(self, share: MicroBatch, batch: Batch) -> None:
        """Hold a micro-batch for a replay, within MAX_BYTES of images.

        Above this limit, the images of earlier updates are dropped, oldest first; these updates can no longer be
        replayed. If the images of the current update alone exceed the limit, none of them is held.
        """
        if self._micro_batches is None:  # the current update is already too large
            return
        self._micro_batches.append((share, batch))
        size = _size(self._micro_batches) + sum(_size(earlier.micro_batches) for earlier in self._pending)
        for earlier in self._pending:
            if size <= MAX_BYTES:
                break
            size -= _size(earlier.micro_batches)
            earlier.micro_batches = []
        if size > MAX_BYTES:
            self._micro_batches = None

    def before_step(self, update: int) -> None:
        """Hold the micro-batches with the loss scale, before the scaler's step changes the scale in place."""
        scale = self._precision.scale_tensor().detach().clone()
        self._pending.append(_Pending(update, self._micro_batches or [], scale))
        self._micro_batches = []

    def after_update(self, update: int, stepped: bool | Tensor) -> None:
        """Record whether the update moved the weights, and replay updates that are known to have been skipped."""
        self._update = update
        self._pending[-1].answer = send_to_host(stepped) if isinstance(stepped, Tensor) else lambda: stepped
        self._check_pending()

    def state(self) -> dict[str, Any]:
        return {"skips": self.skips.model_dump()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.skips = SkipRecord(**state.get("skips", {}))

    def begin_anew(self) -> None:
        """Replay the next overflows like the first ones, because the precision of a module has changed."""
        self.skips = SkipRecord(blamed=self.skips.blamed)
        self._pending.clear()
        self._blames.clear()

    def take(self) -> list[Blame]:
        """Return the causes found since the last call."""
        self._check_pending()
        blames = self._blames
        self._blames = []
        return blames

    def _check_pending(self) -> None:
        """Go through the pending updates, oldest first, up to the first whose outcome is not known yet.

        Updates that moved the weights are dropped. Of skipped updates, the first few are replayed and later one in a
        while; the others are only counted.
        """
        while self._pending:
            oldest = self._pending[0]
            if oldest.answer is None:  # the optimiser has not stepped yet
                return
            moved_weights = oldest.answer()
            if moved_weights is None:  # the device has not answered yet
                return
            self._pending.popleft()
            if not moved_weights:
                self._replay_or_count(oldest)

    def _replay_or_count(self, skipped: _Pending) -> None:
        """Replay a skipped update to find its cause, if a replay is due and its images are held; else count it."""
        can_replay = len(skipped.micro_batches) > 0
        if not can_replay and not self._limit_was_logged:
            self._limit_was_logged = True
            log.info(
                "update %d was skipped and cannot be replayed: the images of recent updates exceed the limit of "
                "%.0f GiB. A smaller -batch_size or -accum_iter makes replays possible. Later updates like it are "
                "only counted.",
                skipped.update,
                MAX_BYTES / 2**30,
            )
        skips = self.skips
        is_due = skips.replays < FIRST_REPLAYS or skipped.update - skips.last_replay >= UPDATES_BETWEEN_REPLAYS
        if not can_replay or not is_due:
            skips.passed_over += 1
            return
        skips.replays += 1
        skips.last_replay = skipped.update
        self._blames.append(self._find_cause(skipped))  # which reports how many were passed over before it
        skips.passed_over = 0

    def _find_cause(self, skipped: _Pending) -> Blame:
        """Replay the micro-batches of a skipped update until one overflows.

        The blame names the samples of that micro-batch; if none overflows, those of all, with possible reasons.
        """
        blamed_batches = [batch for _, batch in skipped.micro_batches]
        overflow = Overflow()
        rows = ()
        reason = ""
        device = self._precision.device
        # The random state of these GPUs is restored after the replays; that of the CPU always is.
        gpu_indices = [] if device.type == "cpu" else [device.index or 0]
        try:
            with fork_host_rng(), torch.random.fork_rng(gpu_indices, device_type=device.type):
                for share, batch in skipped.micro_batches:
                    seed_all(self._seed, "micro", skipped.update, share.number)  # the same mixing and dropout
                    found = self._replay(batch, share.weight, skipped.scale)
                    if found:
                        overflow, rows = found
                        blamed_batches = [batch]
                        break
                else:  # no micro-batch overflowed
                    reason = self._describe_replay_without_overflow(skipped)
        except RuntimeError as error:  # such as out of memory: the training itself can continue
            first_line_of_error, _, _ = str(error).strip().partition("\n")
            reason = f"cause unknown, the replay failed ({first_line_of_error})"
            log.debug("The replay of update %d failed.", skipped.update, exc_info=True)

        sample_indices: list[int] = []
        for batch in blamed_batches:
            sample_indices += batch.indices.tolist()
        return Blame(
            **vars(overflow),
            update=skipped.update,
            noticed_at=self._update,
            sample_indices=tuple(index for index in sample_indices if index != PADDING),
            scale=float(skipped.scale),
            bad_samples=tuple(sample_indices[row] for row in rows if sample_indices[row] != PADDING),
            passed_over=self.skips.passed_over,
            reason=reason,
        )

    def _describe_replay_without_overflow(self, skipped: _Pending) -> str:
        """Describe for the log why the replay of a skipped update may not have overflowed."""
        reasons = ["the weights have changed since"] if self._update > skipped.update else []
        if len(skipped.micro_batches) > 1:
            reasons.append("only the sum of the micro-batches overflowed")
        reasons.append("compiled code (TRAIN.COMPILE) rounds differently from the eager replay")
        all_reasons = f"{', '.join(reasons)}, or the overflow was on another rank (with several processes)"
        return f"the replay did not overflow; possible reasons: {all_reasons}"

    def _replay(self, batch: Batch, weight: float, scale: Tensor) -> Found | None:
        """Replay a micro-batch, forward and backward, and find its overflow; None if there is none.

        It has no side effects on gradients, buffers and hooks. Callers protect random generators.
        `weight`: weight of the micro-batch in the update. `scale`: the loss scale of the update.
        The outer contexts record every kernel. The inner ones note which module and function has called it.
        """
        model = self._model
        teacher = getattr(self._computing.batch_transform, "teacher", None)  # set in distillation
        teacher_model = None if teacher is None else teacher.model
        tracker = _CallTracker(model, teacher_model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        recorder = _ExtremesRecorder(tracker, names, len(batch.images))
        # Compiled parts run in eager mode: operations inside a compiled graph cannot be named.
        with torch.enable_grad(), uncompiled(), recorder:
            with tracker.hooked(recorder.module_output), tracker:
                recorder.batch_images(batch.images)
                with self._precision.autocast():
                    with tracker.at(module=INPUTS):
                        images = _call_with_copied_buffers(self._computing.inputs, batch.images)
                        images, targets, _ = self._computing.batch_transform(images, batch.labels)
                    with tracker.at(module=type(model).__name__):
                        logits = _call_with_copied_buffers(model, images)
                    loss = self._computing.criterion(logits.float(), targets)
                records_before_loss = len(recorder.records)  # infinities in them are harmless if the loss is finite
            with tracker.at(function="scaling"):
                scaled = loss * weight * scale
            # The tracker's hooks are off here. Activation checkpointing calls modules again in the backward pass; the
            # autograd nodes of these calls are not part of this graph.
            # Not backward(), which would add to .grad and start DDP's all-reduce.
            torch.autograd.grad(scaled, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        return recorder.first_overflow(loss, records_before_loss)


def _size(micro_batches: MicroBatches) -> int:
    """Return the bytes of the images."""
    return sum(batch.images.nbytes for _, batch in micro_batches)


def send_to_host(stepped: Tensor) -> Answer:
    """Start an asynchronous copy of a flag to the host. Returns a function that reads it, None until it has arrived."""
    flag = torch.empty((), dtype=torch.bool, pin_memory=stepped.device.type == "cuda")
    flag.copy_(stepped.detach().reshape(()), non_blocking=True)
    arrived = torch.Event(stepped.device)
    arrived.record()
    return lambda: bool(flag.numpy()) if arrived.query() else None


def _list_first(indices: tuple[int, ...]) -> str:
    """List the first SHOWN_SAMPLES indices: '3, 1, 2, ...'."""
    shown = ", ".join(map(str, indices[:SHOWN_SAMPLES]))
    return shown + (", ..." if len(indices) > SHOWN_SAMPLES else "")
