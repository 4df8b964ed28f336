"""Which layer overflowed: when the loss scaler skips an update, that update is replayed and the culprit named.

A normal update costs a reference to its batch and a copy of the loss scale on the device. Where the skip is known on
a GPU alone, nobody waits for it: the answer travels to the host by itself and is looked at in later updates.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from datasets import PADDING, Batch, Share
from engine.amp.overflow_replay import BACKWARD, BATCH, LOSS, Finding, Replay
from engine.inputs.mixup import BatchChange, unchanged
from utils.log import log
from utils.seeding import fork_host_rng, seed_all

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
SHOWN_SAMPLES = 8

FIRST_REPLAYS = 3
UPDATES_BETWEEN_REPLAYS = 50
KEPT_BYTES = 2**30
"""Images that are kept for replays at most, those of the update that is being computed included."""
USUALLY_KEPT = 3
"""Updates: the one that is computed, the one whose answer travels, and one that is looked at. A GPU may be behind."""

MicroBatches = list[tuple[Share, Batch]]
Answer = Callable[[], bool | None]
"""Whether the weights moved; None while that is not known yet."""


@dataclass(frozen=True)
class Blame:
    """What overflowed in one skipped update. Plain values only, so that it travels between ranks and into JSON."""

    update: int
    noticed_at: int
    operation: str
    """As users call it: linear, matmul, ...; empty where the replay found nothing."""
    module: str
    """Its name in the model, or the model's class, or `loss`, `inputs`, `batch`."""
    direction: str
    dtype: str
    sample_indices: tuple[int, ...]
    """The samples of the micro-batch."""
    scale: float
    kernel: str = ""
    """What torch ran: aten::addmm, say."""
    parameter: str = ""
    """The parameter that did not fit `dtype`, if that was it."""
    bad_samples: tuple[int, ...] = ()
    """Those among the samples that came out not finite, where that can be told."""
    passed_over: int = 0
    """Skipped updates since the last replay that were not looked at."""
    reason: str = ""
    """Why nothing is named."""

    def words(self) -> str:
        """One line for the log."""
        parts = [self._what()]
        if self.operation:
            parts.append(self._samples())
        parts.append(f"loss scale {self.scale:g}")
        late = self.noticed_at - self.update
        if late:
            parts.append(f"noticed {late} update{'s' * (late > 1)} later and replayed with the weights of then")
        if self.passed_over:
            parts.append(f"{self.passed_over} skipped before it and not replayed")
        return f"update {self.update} was skipped: " + "; ".join(parts)

    def _what(self) -> str:
        if not self.operation:
            return self.reason
        if self.module == BATCH:
            return "the images were not finite before anything was computed"
        if self.module == LOSS and self.operation == "scaling":
            return "the scaled loss itself overflowed: the scale is too large"
        where = f"{self.operation} in {self.module} ({self.direction}, {self.kernel}, {self.dtype})"
        if self.module == LOSS and self.direction == BACKWARD:
            return f"{where}: the loss's own gradient is not finite, the scale is too large"
        if self.parameter:
            return f"{where} overflowed: {self.parameter} does not fit {self.dtype}"
        return f"{where} gave the first value that is not finite"

    def _samples(self) -> str:
        count = len(self.sample_indices)
        if self.bad_samples and len(self.bad_samples) < count:
            return f"in {len(self.bad_samples)} of {count} samples: {_some(self.bad_samples)}"
        return f"in {'all of ' * bool(self.bad_samples)}a micro-batch of {count} samples: {_some(self.sample_indices)}"


@dataclass
class SkipRecord:
    """What is remembered from one skipped update to the next; saved, so that a resumed run says and does the same."""

    replays: int = 0
    last_replay: int = 0
    """The update of the last one."""
    passed_over: int = 0
    blamed: dict[str, int] = field(default_factory=dict)
    """How often each module was (AMP.AUTO_FP32)."""


@dataclass
class _Kept:
    """One update that may have been skipped."""

    update: int
    micro_batches: MicroBatches
    scale: Tensor
    answer: Answer | None = None

    @property
    def bytes(self) -> int:
        return _size(self.micro_batches)


class OverflowWatch:
    """Call `keep` before the scaler's step, `after` behind it, `take` when reporting. All but a skip is free.

    `model` is the module itself, neither compiled nor wrapped for many devices; `inputs`, `criterion`, `autocast`,
    `seed` and `change` are those of the update.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: nn.Module,
        criterion: Callable[[Tensor, Tensor], Tensor],
        autocast: Callable[[], AbstractContextManager[Any]],
        seed: int,
        device: torch.device,
        record: SkipRecord | None = None,
        send: Callable[[Tensor], Answer] | None = None,
        change: BatchChange = unchanged,
    ) -> None:
        self._replay = Replay(model, inputs, criterion, autocast, change)
        self._seed, self._device = seed, device
        self._send = send or send_to_host
        self._waiting: deque[_Kept] = deque()
        self._found: list[Blame] = []
        self._record = record or SkipRecord()
        self._now = 0
        self._told_cap = False

    def collect(self, kept: MicroBatches | None, share: Share, batch: Batch) -> MicroBatches | None:
        """Add a micro-batch to those of the update that is being computed; None where all of them are too many.

        Room is made by those of earlier updates, which then cannot be replayed.
        """
        if kept is None:
            return None
        kept.append((share, batch))
        size = _size(kept) + sum(old.bytes for old in self._waiting)
        for old in self._waiting:
            if size <= KEPT_BYTES:
                break
            size -= old.bytes
            old.micro_batches = []
        return kept if size <= KEPT_BYTES else None

    def keep(self, update: int, micro_batches: MicroBatches | None, scale: Tensor) -> None:
        """What a replay would need. The scaler changes its scale in place, so this comes before its step."""
        self._waiting.append(_Kept(update, micro_batches or [], scale.detach().clone()))

    def after(self, update: int, moved: bool | Tensor) -> None:
        """Say whether the update that was kept last moved the weights."""
        self._now = update
        kept = self._waiting[-1]
        if isinstance(moved, Tensor):
            kept.answer = self._send(moved)
        else:
            kept.answer = lambda: moved
        self._look()

    def take(self) -> list[Blame]:
        """What was found since the last call."""
        self._look()
        found, self._found = self._found, []
        return found

    def _look(self) -> None:
        """Answers come in the order of the updates; the first that is not there yet ends the look."""
        while self._waiting and self._waiting[0].answer is not None:
            moved = self._waiting[0].answer()
            if moved is None:
                return
            kept = self._waiting.popleft()
            if not moved:
                self._skipped(kept)

    def _skipped(self, kept: _Kept) -> None:
        record = self._record
        early = record.replays < FIRST_REPLAYS
        if not kept.micro_batches and not self._told_cap:
            self._told_cap = True
            log.info(
                "update %d was skipped and cannot be replayed: its images are not kept, since at most %.0f GiB are; a "
                "smaller -batch_size or -accum_iter keeps them. Later ones like it are counted only.",
                kept.update,
                KEPT_BYTES / 2**30,
            )
        if not kept.micro_batches or not (early or kept.update - record.last_replay >= UPDATES_BETWEEN_REPLAYS):
            record.passed_over += 1
            return
        record.replays += 1
        record.last_replay = kept.update
        self._found.append(self._blame(kept))
        record.passed_over = 0

    def _blame(self, kept: _Kept) -> Blame:
        try:
            with fork_host_rng(), self._device_generator_kept():
                finding, batches = self._find(kept)
            reason = "" if finding else self._unseen(kept)
        except RuntimeError as error:  # out of memory, say: no reason to end a run that goes on well
            finding, batches = None, kept.micro_batches
            reason = f"not named, the replay failed ({str(error).strip().partition(chr(10))[0]})"
            log.debug("The replay of update %d failed.", kept.update, exc_info=True)
        samples = [index for _, batch in batches for index in batch.indices.tolist()]
        return Blame(
            update=kept.update,
            noticed_at=self._now,
            operation=finding.operation if finding else "",
            module=finding.module if finding else "",
            direction=finding.direction if finding else "",
            dtype=NAMES.get(finding.dtype, str(finding.dtype).removeprefix("torch.")) if finding else "",
            sample_indices=tuple(index for index in samples if index != PADDING),
            scale=float(kept.scale),
            kernel=finding.kernel if finding else "",
            parameter=finding.parameter if finding else "",
            bad_samples=tuple(samples[row] for row in finding.bad_rows if samples[row] != PADDING) if finding else (),
            passed_over=self._record.passed_over,
            reason=reason,
        )

    def _find(self, kept: _Kept) -> tuple[Finding | None, MicroBatches]:
        """The first finding and the micro-batches it concerns."""
        for share, batch in kept.micro_batches:
            seed_all(self._seed, "micro", kept.update, share.number)  # mixing and dropout as they were
            finding = self._replay.watch(batch.images, batch.labels, share.weight, kept.scale)
            if finding is not None:
                return finding, [(share, batch)]
        return None, kept.micro_batches

    def _unseen(self, kept: _Kept) -> str:
        """Nothing is made up where nothing was found; what a replay cannot show is told instead."""
        reasons = ["the weights have moved since"] if self._now > kept.update else []
        if len(kept.micro_batches) > 1:
            reasons.append("the micro-batches overflowed only in their sum")
        reasons += ["compiled code rounds differently", "it came from another rank"]
        return f"not seen again in the replay: {', '.join(reasons[:-1])}, or {reasons[-1]}"

    def _device_generator_kept(self) -> AbstractContextManager[None]:
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        index = self._device.index or 0
        return torch.random.fork_rng([index], device_type=self._device.type)


def kept_for_replays(window: int) -> int:
    """Bytes of images that are usually kept where one update's take `window` bytes."""
    return min(KEPT_BYTES, USUALLY_KEPT * window)


def _size(micro_batches: MicroBatches) -> int:
    return sum(batch.images.nbytes for _, batch in micro_batches)


def send_to_host(moved: Tensor) -> Answer:
    """Start the copy of a flag from the device, and tell how to see whether it has arrived. Nobody waits."""
    flag = torch.empty((), dtype=torch.bool, pin_memory=moved.device.type == "cuda")
    flag.copy_(moved.detach().reshape(()), non_blocking=True)
    arrived = torch.Event(moved.device)
    arrived.record()
    return lambda: bool(flag.numpy()) if arrived.query() else None


def _some(indices: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, indices[:SHOWN_SAMPLES]))
    return shown + ", ..." * (len(indices) > SHOWN_SAMPLES)
