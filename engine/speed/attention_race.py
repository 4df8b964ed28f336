"""Which kind of attention is the fastest on this GPU, at this model's own shape, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.speed.attention import (
    FUSED,
    KINDS,
    PACKED,
    PLAIN,
    Attention,
    attention_layers,
    backends_of,
    packed_is_possible,
)
from utils.errors import UserError

ROUNDS, WARM_UPS = 5, 2
CALLS = 4
"""In a row between two looks at the clock."""
LEAD = 1.02
"""By so much torch's own choice has to be beaten."""
MOST_TOKENS_OF_PLAIN = 64
"""With more, plain attention keeps matrices that a batch, found to fit without them, may leave no room for."""

Timer = Callable[[Callable[[], None]], float]


class _Seen(Exception):
    """The layer was reached; the rest of the model need not run."""


@dataclass
class Call:
    """One call of an attention layer, as the model makes it."""

    layer: Any
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    precision: Precision

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[-2]

    def run(self, kind: str) -> None:
        """Forward and backward by this kind alone. A RuntimeError where there is none of it for such a call."""
        low = self.precision.level not in ("O0", "O3")
        dtype = self.precision.choice.dtype
        before, self.layer.fused_attn = self.layer.fused_attn, kind != PLAIN
        try:
            with self._strictly(kind):
                with torch.autocast(self.precision.device.type, dtype if low else None, enabled=low):
                    found: Tensor = self.layer(*self.inputs, **self.named)
                leaves = [*self.layer.parameters(), *(t for t in self.inputs if isinstance(t, Tensor))]
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                torch.autograd.grad(found, wanted, torch.ones_like(found), allow_unused=True)
        finally:
            self.layer.fused_attn = before

    def _strictly(self, kind: str) -> AbstractContextManager[Any]:
        if kind == PACKED:
            from engine.speed.packed_attention import packed_alone

            x: Tensor = self.inputs[0]
            low = self.precision.level not in ("O0", "O3")
            return packed_alone(self.layer, self.tokens, self.precision.choice.dtype if low else x.dtype, x.device)
        from torch.nn.attention import sdpa_kernel

        backends = backends_of(kind, strictly=True)
        return sdpa_kernel(backends) if backends else nullcontext()


def raced_attention(
    wanted: str,
    model: nn.Module,
    images: Tensor,
    precision: Precision,
    listed: Iterable[str] = (),
    kept: str | None = None,
) -> Attention:
    """The fastest kind; or the one asked for, or `kept` from before, if there is such a thing here.

    `listed`: AMP's lists.
    """
    _wake_autograd(images.device)
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
        call = first_call(model, images, precision)
        known = [kind for kind in KINDS["cuda"] if kind != PACKED or packed_is_possible(listed)]
        if wanted == "auto" and kept in known and _exists(call, kept):
            return Attention(kept, "as this run began")
        kinds = [kind for kind in known if _exists(call, kind)]
        if not kinds:
            call.run(FUSED)  # raises what stands in the way of all: too little memory
        if wanted != "auto":
            if wanted not in kinds:
                raise UserError(
                    f"MODEL.ATTENTION {wanted}: torch has none for this GPU, model and precision "
                    f"({precision.name}), only {', '.join(kinds)}; or leave it auto."
                )
            return Attention(wanted, "as asked for")
        if call.tokens > MOST_TOKENS_OF_PLAIN and PLAIN in kinds:
            kinds.remove(PLAIN)
        return winner(race(call.run, kinds, _by_events))


def first_call(model: nn.Module, images: Tensor, precision: Precision) -> Call:
    """What the first attention layer is called with. The largest there is: where sizes differ, they shrink."""
    calls: list[Call] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> NoReturn:
        calls.append(Call(layer, tuple(_as_leaf(value) for value in inputs), named, precision))
        raise _Seen

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in attention_layers(model)]
    training = model.training
    model.eval()  # what stands before attention is not to learn from these images
    try:
        with torch.no_grad(), precision.autocast():
            model(images)
    except _Seen:
        pass
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return calls[0]


def race(run: Callable[[str], None], kinds: list[str], seconds_of: Timer) -> dict[str, float]:
    """Seconds of each kind: medians of runs that take turns."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for nth in range(WARM_UPS + ROUNDS):
        for kind in kinds:
            seconds = seconds_of(lambda kind=kind: run(kind))
            if nth >= WARM_UPS:
                found[kind].append(seconds)
    return {kind: median(times) for kind, times in found.items()}


def winner(seconds: dict[str, float]) -> Attention:
    fastest = min(seconds, key=lambda kind: seconds[kind])
    if FUSED not in seconds:
        return Attention(fastest, "the only one here")
    gain = seconds[FUSED] / seconds[fastest]
    if gain < LEAD:
        return Attention(FUSED, f"torch's choice; raced against {', '.join(kind for kind in seconds if kind != FUSED)}")
    return Attention(fastest, f"{gain:.2f}x fused in a race of {', '.join(seconds)}")


def _wake_autograd(device: torch.device) -> None:
    """Let something else than a product be the first in a backward pass; an attention layer's begins with one.

    Autograd has a thread of its own for a GPU. CUDA sets it up with the first kernel there, and cuBLAS, which starts
    none before it has looked, would warn of a thread that is not.
    """
    torch.ones((), device=device, requires_grad=True).square().backward()


def _exists(call: Call, kind: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # by which torch explains why there is none
            call.run(kind)
    except RuntimeError:  # torch has no such kernel, or no memory for it
        return False
    return True


def _as_leaf(value: Any) -> Any:
    grows = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().requires_grad_() if grows else value


def _by_events(work: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / CALLS
