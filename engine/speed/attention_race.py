"""Times the kinds of attention on this GPU, forward and backward at this model's shape, and chooses the fastest."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.speed.speedup import (
    FUSED,
    KINDS,
    PACKED,
    PLAIN,
    BuiltModel,
    Choice,
    attention_layers,
    backends_of,
    packed_is_possible,
)
from models.parts import in_eval_mode
from utils.errors import UserError

ROUNDS = 5
WARM_UPS = 2
CALLS = 4
"""Number of calls that are timed together"""
MIN_SPEEDUP = 1.02
"""Speed-up that another kind needs to replace torch's own choice"""
MAX_TOKENS_OF_PLAIN = 64
"""With more, plain attention saves large matrices. A batch size that `auto` found without them may then not fit."""

Timer = Callable[[Callable[[], None]], float]
"""Calls a function several times, and returns the seconds of one call."""


class _LayerReached(Exception):
    """Ends the forward pass at the first attention layer."""


@dataclass
class Call:
    """A call of an attention layer with the inputs that it gets in the model, to be repeated with each kind."""

    layer: Any
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    precision: Precision
    left_out: Sequence[str]
    """See `backends_of`"""

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[-2]

    def run(self, kind: str) -> None:
        """Run the layer forward and backward by one kind of attention. RuntimeError if it cannot compute this call."""
        previous = self.layer.fused_attn
        self.layer.fused_attn = kind != PLAIN
        try:
            with self._only_kind(kind):
                with self.precision.autocast(training=False):
                    output: Tensor = self.layer(*self.inputs, **self.keywords)
                leaves = list(self.layer.parameters())
                leaves += [value for value in self.inputs if isinstance(value, Tensor)]
                trained_leaves = [leaf for leaf in leaves if leaf.requires_grad]
                torch.autograd.grad(output, trained_leaves, torch.ones_like(output), allow_unused=True)
        finally:
            self.layer.fused_attn = previous

    def _only_kind(self, kind: str) -> AbstractContextManager[Any]:
        """Return a context in which attention is computed by this kind, or raises RuntimeError if that cannot."""
        if kind == PACKED:
            from engine.speed.packed_attention import packed_only

            features: Tensor = self.inputs[0]
            # With O1 and O2, autocast casts the features. With O0 it is off, and with O3 they are in half precision.
            is_cast = self.precision.level not in ("O0", "O3")
            dtype = self.precision.choice.dtype if is_cast else features.dtype
            return packed_only(self.layer, self.tokens, dtype=dtype, device=features.device)
        from torch.nn.attention import sdpa_kernel

        # Without fallbacks (`strictly`); [] lets torch choose.
        backends = backends_of(kind, strictly=True, left_out=self.left_out)
        return sdpa_kernel(backends) if backends else nullcontext()


def race_attention(built: BuiltModel) -> Choice:
    """Choose a kind of attention by trying the kinds on this GPU.

    If SPEED asks for a kind, that one is chosen; UserError if it does not work here. Under `auto`, the kind of the
    resumed run is chosen if it works here, else the fastest one.
    """
    wanted = built.config.attention  # a kind, or "auto"
    is_auto = wanted == "auto"
    previous = built.before.get("attention")
    precision = built.precision
    data = built.config.DATA
    device = precision.device
    random = torch.Generator(device).manual_seed(built.config.SEED)
    size = (data.BATCH_SIZE,) + data.shape
    images = built.inputs(torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=random))
    # A first backward pass with a small kernel, to avoid a warning: Autograd has its own thread per GPU, and CUDA
    # initialises a thread with its first kernel. If an attention layer came first, its backward pass would begin with
    # cuBLAS, which warns in a thread that is not initialised.
    torch.ones((), device=device, requires_grad=True).square().backward()
    with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
        call = first_call(built.model, images, precision, built.left_out)
        candidates = [kind for kind in KINDS["cuda"] if built.config.wants(kind) is not False]  # not left out by SPEED
        if PACKED in candidates and not packed_is_possible(built.listed):
            candidates.remove(PACKED)
        if is_auto and previous in candidates and _works(call, previous):
            return Choice(previous, "as before the resume")
        working = [kind for kind in candidates if _works(call, kind)]
        if not working:
            call.run(FUSED)  # raises the error that stopped all kinds: out of memory
        if is_auto:
            if call.tokens > MAX_TOKENS_OF_PLAIN and PLAIN in working:  # for its memory
                working.remove(PLAIN)
            return winner(race(call.run, working, _time_by_events))
    if wanted not in working:
        raise UserError(
            f"SPEED +{wanted} does not support this GPU, model and precision "
            f"({precision.name}); use {', '.join(working)}, or leave it out."
        )
    return Choice(wanted, "as asked for")


def first_call(model: nn.Module, images: Tensor, precision: Precision, left_out: Sequence[str] = ()) -> Call:
    """Record the call of the model's first attention layer, by a forward pass that ends there.

    It is the largest: later layers have as many tokens or fewer. `left_out`: torch's own kernels of attention that
    SPEED leaves out.
    """
    calls: list[Call] = []

    def as_leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().clone().requires_grad_()
        return value

    def record(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> NoReturn:
        leaves = tuple(as_leaf(value) for value in inputs)
        calls.append(Call(layer, inputs=leaves, keywords=keywords, precision=precision, left_out=left_out))
        raise _LayerReached  # to end the forward pass

    # In eval mode: layers before attention must not update running statistics.
    with ExitStack() as hooks, torch.no_grad(), precision.autocast(), in_eval_mode(model), suppress(_LayerReached):
        for layer in attention_layers(model):
            hooks.enter_context(layer.register_forward_pre_hook(record, with_kwargs=True))
        model(images)
    return calls[0]


def race(run: Callable[[str], None], kinds: list[str], seconds_of: Timer) -> dict[str, float]:
    """Return the median seconds of each kind. The kinds are timed in alternation; the first rounds warm up."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_number in range(WARM_UPS + ROUNDS):
        for kind in kinds:
            seconds = seconds_of(partial(run, kind))
            if round_number >= WARM_UPS:
                times[kind].append(seconds)
    return {kind: median(seconds) for kind, seconds in times.items()}


def winner(seconds: dict[str, float]) -> Choice:
    """Choose the fastest kind, or torch's own choice (FUSED) unless another is clearly faster."""
    fastest = min(seconds, key=lambda kind: seconds[kind])
    if FUSED not in seconds:
        return Choice(fastest, "the fastest that works here")
    speedup = seconds[FUSED] / seconds[fastest]
    if speedup < MIN_SPEEDUP:
        others = ", ".join(kind for kind in seconds if kind != FUSED)
        return Choice(FUSED, f"torch's choice; timed against {others}")
    return Choice(fastest, f"{speedup:.2f}x as fast as fused; timed: {', '.join(seconds)}")


def _works(call: Call, kind: str) -> bool:
    """Return whether a kind can compute this call, in the memory that there is."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns why a kernel does not support a call
            call.run(kind)
    except RuntimeError:  # no kernel, or out of memory
        return False
    return True


def _time_by_events(work: Callable[[], None]) -> float:
    """Call `work` CALLS times, and return the seconds per call by the GPU's clock."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / CALLS
