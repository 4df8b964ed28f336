"""Watch for updates that the loss scaler skipped, and replay them to name the operation that overflowed.

A normal update costs a reference to its batch and a copy of the loss scale on the device. If only the GPU knows whether
an update was skipped, the host does not wait: an asynchronous copy brings the flag, and later updates look at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datasets import PADDING, Batch, MicroBatch
from engine.amp.precision import Precision
from engine.amp.replay import BACKWARD, BATCH, LOSS, Overflow, Replay
from engine.callback import Callback, Computing
from engine.measure.meters import SkipRecord
from utils.log import log
from utils.seeding import fork_host_rng, seed_all
from utils.text import counted

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
        """One line for the log."""
        parts = [self._what()]
        if self.operation:
            parts.append(self._samples())
        parts.append(f"loss scale {self.scale:g}")
        late = self.noticed_at - self.update
        if late:
            parts.append(f"noticed {counted(late, 'update')} later, and replayed with the weights of that later update")
        if self.passed_over:
            parts.append(f"{self.passed_over} skipped updates before it were not replayed")
        return f"update {self.update} was skipped: " + "; ".join(parts)

    def _what(self) -> str:
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

    def _samples(self) -> str:
        count = len(self.sample_indices)
        if self.bad_samples and len(self.bad_samples) < count:
            return f"in {len(self.bad_samples)} of {count} samples: {_some(self.bad_samples)}"
        every = f"all {count} samples of a micro-batch" if self.bad_samples else f"a micro-batch of {count} samples"
        return f"in {every}: {_some(self.sample_indices)}"


@dataclass
class _Pending:
    """One update that may have been skipped."""

    update: int
    micro_batches: MicroBatches
    scale: Tensor
    answer: Answer | None = None


class OverflowWatch(Callback):
    """Holds the micro-batches of recent updates and replays those that were skipped. Other updates cost nothing.

    Call `take` for each report. `seed` is that of the updates.
    """

    def __init__(self, seed: int, precision: Precision) -> None:
        self._seed, self._precision = seed, precision
        self._replay: Replay | None = None
        self.skips = SkipRecord()
        self._now: MicroBatches | None = []
        self._pending: deque[_Pending] = deque()
        self._blames: list[Blame] = []
        self._update = 0
        self._limit_was_logged = False

    def attach(self, to: Computing) -> None:
        """What computes now is replayed. It must be neither compiled nor wrapped by DDP."""
        self._replay = Replay(to, self._precision.autocast)

    def after_backward(self, share: MicroBatch, batch: Batch) -> None:
        """Hold a micro-batch; none of the current update once these alone exceed MAX_BYTES.

        Earlier updates give up their images first; they can no longer be replayed.
        """
        if self._replay is None or self._now is None:
            return
        self._now.append((share, batch))
        size = _size(self._now) + sum(_size(earlier.micro_batches) for earlier in self._pending)
        for earlier in self._pending:
            if size <= MAX_BYTES:
                break
            size -= _size(earlier.micro_batches)
            earlier.micro_batches = []
        if size > MAX_BYTES:
            self._now = None

    def before_step(self, update: int) -> None:
        """Hold what a replay needs, before the scaler's step changes the scale in place."""
        if self._replay is not None:
            self._pending.append(_Pending(update, self._now or [], self._precision.scale_tensor().detach().clone()))
        self._now = []

    def after_update(self, update: int, stepped: bool | Tensor) -> None:
        """Record whether the update moved the weights."""
        if self._replay is None:
            return
        self._update = update
        self._pending[-1].answer = send_to_host(stepped) if isinstance(stepped, Tensor) else lambda: stepped
        self._check_pending()

    def state(self) -> dict[str, Any]:
        return {"skips": self.skips.model_dump()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.skips = SkipRecord(**state.get("skips", {}))

    def begin_anew(self) -> None:
        """Replay the next overflows like the first ones: what computes has changed."""
        self.skips = SkipRecord(blamed=self.skips.blamed)
        self._pending.clear()
        self._blames.clear()

    def take(self) -> list[Blame]:
        """Causes found since the last call."""
        self._check_pending()
        blames, self._blames = self._blames, []
        return blames

    def _check_pending(self) -> None:
        """Go through the updates in order, up to the first whose answer has not arrived."""
        while self._pending and self._pending[0].answer is not None:
            stepped = self._pending[0].answer()
            if stepped is None:
                return
            skipped, skips = self._pending.popleft(), self.skips
            if stepped:
                continue
            if not skipped.micro_batches and not self._limit_was_logged:
                self._limit_was_logged = True
                log.info(
                    "update %d was skipped and cannot be replayed: the images of recent updates exceed the limit of "
                    "%.0f GiB. A smaller -batch_size or -accum_iter makes replays possible. Later updates like it are "
                    "only counted.",
                    skipped.update,
                    MAX_BYTES / 2**30,
                )
            due = skips.replays < FIRST_REPLAYS or skipped.update - skips.last_replay >= UPDATES_BETWEEN_REPLAYS
            if not skipped.micro_batches or not due:
                skips.passed_over += 1
                continue
            skips.replays += 1
            skips.last_replay = skipped.update
            self._blames.append(self._find_cause(skipped))
            skips.passed_over = 0

    def _find_cause(self, skipped: _Pending) -> Blame:
        batches, overflow, rows, reason = skipped.micro_batches, Overflow(), (), ""
        device = self._precision.device
        generators = [] if device.type == "cpu" else [device.index or 0]  # the CPU's is kept in any case
        try:
            with fork_host_rng(), torch.random.fork_rng(generators, device_type=device.type):
                for share, batch in skipped.micro_batches:
                    seed_all(self._seed, "micro", skipped.update, share.number)  # the same mixing and dropout
                    assert self._replay is not None
                    if found := self._replay.run(batch.images, batch.labels, share.weight, skipped.scale):
                        batches, (overflow, rows) = [(share, batch)], found
                        break
                else:
                    reasons = ["the weights have changed since"] if self._update > skipped.update else []
                    reasons += ["only the sum of the micro-batches overflowed"] * (len(skipped.micro_batches) > 1)
                    reasons.append("compiled code (TRAIN.COMPILE) rounds differently from the eager replay")
                    listed = f"{', '.join(reasons)}, or the overflow was on another rank (with several processes)"
                    reason = f"the replay did not overflow; possible reasons: {listed}"
        except RuntimeError as error:  # such as out of memory: the training itself can continue
            reason = f"cause unknown, the replay failed ({str(error).strip().partition(chr(10))[0]})"
            log.debug("The replay of update %d failed.", skipped.update, exc_info=True)
        samples = [index for _, batch in batches for index in batch.indices.tolist()]
        return Blame(
            **vars(overflow),
            update=skipped.update,
            noticed_at=self._update,
            sample_indices=tuple(index for index in samples if index != PADDING),
            scale=float(skipped.scale),
            bad_samples=tuple(samples[row] for row in rows if samples[row] != PADDING),
            passed_over=self.skips.passed_over,
            reason=reason,
        )


def _size(micro_batches: MicroBatches) -> int:
    return sum(batch.images.nbytes for _, batch in micro_batches)


def send_to_host(stepped: Tensor) -> Answer:
    """Start an asynchronous copy of a flag to the host; the result tells its value once it has arrived."""
    flag = torch.empty((), dtype=torch.bool, pin_memory=stepped.device.type == "cuda")
    flag.copy_(stepped.detach().reshape(()), non_blocking=True)
    arrived = torch.Event(stepped.device)
    arrived.record()
    return lambda: bool(flag.numpy()) if arrived.query() else None


def _some(indices: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, indices[:SHOWN_SAMPLES]))
    return shown + ", ..." * (len(indices) > SHOWN_SAMPLES)
