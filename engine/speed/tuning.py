"""Chooses and applies the speed-ups of a model (see speedup.py), and defines the one of attention.

The choices are shown in the banner, saved in run.json and checkpoints, and used again by a resumed run.

The kernels of attention give the same result, in times that differ several times over. On a CPU `auto` follows a rule
from measurements: timing could choose another kernel in the next run, and the same command must give the same bits. On
a GPU `auto` times the kernels at this model's shape, once, and saves the choice.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from engine.amp.precision import Precision
from engine.inputs.batches import Inputs
from engine.speed.speedup import (
    FUSED,
    FUSED_OPERATOR,
    KINDS,
    KINDS_ELSEWHERE,
    OWN,
    PACKED,
    PLAIN,
    BuiltModel,
    Choice,
    Speedup,
    attention_layers,
    backends_of,
    packed_is_possible,
)
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank
from utils.errors import UserError

INSIDE_FUSED = frozenset({"softmax", "matmul", "matmul_v2", "bmm"})
"""Operators inside a fused kernel, where AMP's lists have no effect."""
_sdpa_kernel = ExitStack()


class AttentionKernel(Speedup):
    """Chooses the kernel that timm's attention layers compute with."""

    key = "attention"

    def choose(self, built: BuiltModel) -> Choice:
        """Choose a kind by rule where one applies, else by trying and timing the kinds on rank 0."""
        wanted = built.config.attention
        by_rule = attention_by_rule(built)
        if by_rule is not None:
            return by_rule
        if wanted == "auto" and built.config.DETERMINISTIC:
            return Choice(FUSED, "torch's choice; not timed, since timing could choose another kind in the next run")
        # Other ranks choose anything: the choice of rank 0 replaces theirs. And without a number as batch size, such as
        # before `auto` has found one, the kinds cannot be timed yet.
        is_timed_here = built.world.first and isinstance(built.config.DATA.BATCH_SIZE, int)
        if not is_timed_here:
            return Choice(FUSED if wanted == "auto" else wanted)
        from engine.speed.attention_race import race_attention

        return race_attention(built)

    def apply(self, built: BuiltModel, value: str) -> None:
        """Use the kind `value` for every pass of this process, recomputation and validation included."""
        # PLAIN: attention is computed as products and a softmax. OWN: the model has no layers to choose for.
        uses_fused_operator = value not in (PLAIN, OWN)
        for layer in attention_layers(built.model):
            layer.fused_attn = uses_fused_operator
            if value == PACKED:
                from engine.speed.packed_attention import use_packed

                use_packed(layer)
            elif getattr(layer, "packed", False):
                layer.packed = False
        # torch's choice of kernel is set for the whole process: end that of a model before, and set this one.
        _sdpa_kernel.close()
        backends = backends_of(value, left_out=built.left_out)
        if backends:
            from torch.nn.attention import sdpa_kernel

            _sdpa_kernel.enter_context(sdpa_kernel(backends, set_priority=True))

    def words(self, choice: Choice) -> str:
        reason = f" ({choice.why})" if choice.why else ""
        return f"attention {choice.value}{reason}"


def attention_by_rule(built: BuiltModel) -> Choice | None:
    """Choose a kind of attention without timing; None if kernels must be timed or tried on this GPU.

    FUSED is torch's own choice of kernel, PLAIN computes products and a softmax, PACKED is a kernel of this program,
    and OWN stands for a model that has no layers to choose for.
    """
    config = built.config
    previous = built.before.get("attention")
    device = built.precision.device.type
    wanted = config.attention  # a kind, or "auto"
    kinds = KINDS.get(device, KINDS_ELSEWHERE)
    if wanted not in ("auto", PLAIN):
        _check_forced(wanted, built, kinds)
    if not attention_layers(built.model):
        return Choice(OWN)
    if INSIDE_FUSED & built.listed:
        return Choice(PLAIN, "so that AMP's lists take effect")

    # A kind that SPEED asks for. A GPU must try it first if it is a certain kernel, which may not support this model.
    if wanted != "auto":
        is_certain_kernel = wanted == PACKED or backends_of(wanted)
        must_try = device == "cuda" and is_certain_kernel
        return None if must_try else Choice(wanted, "as asked for")

    # The kind of the resumed run, unless it is PACKED, which must be tried on this GPU, or SPEED now leaves it out.
    is_left_out = config.wants(str(previous)) is False
    if previous in kinds and previous != PACKED and not is_left_out:
        return Choice(previous, "as before the resume")

    # Under auto, a GPU times the kinds. On a CPU, the fastest in measurements from 17 to 197 tokens is chosen; see
    # docs/dev/kernels.md.
    if device == "cuda":
        return None
    if device != "cpu":
        return Choice(FUSED, "torch's choice")
    if built.precision.level != "O0":
        return Choice(PLAIN, "half precision on a CPU")
    return Choice(FUSED, "fp32 on a CPU")


def _check_forced(wanted: str, built: BuiltModel, kinds: Sequence[str]) -> None:
    """Raise UserError if SPEED asks for a kind of attention that this model or device does not support.

    `wanted`: the kind. `kinds`: those of this device.
    """
    setting = f"SPEED +{wanted}"
    listed = built.listed  # operators on AMP's lists
    device = built.precision.device.type
    if not attention_layers(built.model):
        raise UserError(f"{setting}: {built.name} has no attention layer whose kernel can be chosen; leave it out.")
    if wanted not in kinds:
        raise UserError(f"{setting}: {device} supports only {' and '.join(kinds)}; leave it out.")
    # A fused kernel contains products and a softmax, which are no operators of their own then.
    without_effect = ", ".join(sorted(INSIDE_FUSED & listed))
    if without_effect:
        raise UserError(
            f"{setting}: AMP's lists would have no effect on {without_effect} inside a fused operator; use -fused, or "
            "leave it out."
        )
    # The packed kernel is no operator of torch, so AMP's lists have no effect even on its whole.
    if wanted == PACKED and not packed_is_possible(listed):
        operators = ", ".join(sorted(FUSED_OPERATOR & listed))
        reason = "it needs the package triton, which is not installed"
        if operators:
            reason = f"AMP's lists, which affect torch's operators only, name {operators}"
        raise UserError(f"{setting}: {reason}; use +fused, or leave it out.")


RECORDED = ("attention", "linear_patches", "fused_mlp", "channels_last")
"""Keys in run.json and checkpoints; the value is False where a speed-up cannot be chosen."""


def speedups(config: Config, precision: Precision) -> Iterator[Speedup]:
    """Yield the speed-ups that may be chosen in this run, in the order in which they are applied.

    A speed-up may be chosen if SPEED asks for it, or under `auto` if it suits this device. The files of others are not
    imported.
    """
    on_cpu = precision.device.type == "cpu"
    half_on_gpu = precision.device.type == "cuda" and precision.level != "O0"

    def may_be_chosen(name: str, suits_device: bool) -> bool:
        wanted = config.wants(name)  # None: SPEED neither asks for it nor leaves it out
        is_auto = wanted is None
        return suits_device if is_auto else wanted

    yield AttentionKernel()  # every model with attention has some kernel
    if may_be_chosen("linear_patches", on_cpu or half_on_gpu):
        from engine.speed.convolutions import LinearPatches

        yield LinearPatches()
    if may_be_chosen("fused_mlp", half_on_gpu):
        from engine.speed.fused_mlp import FusedMlps

        yield FusedMlps()
    if may_be_chosen("channels_last", on_cpu or half_on_gpu):
        from engine.speed.convolutions import ChannelsLast

        yield ChannelsLast()
    if config.TRAIN.GRAD_CHECKPOINT != "none":
        from engine.speed.grad_checkpoint import RecomputedBlocks

        yield RecomputedBlocks()


def speed_up(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, previous: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Choose the speed-ups of a model and apply them to it. A collective call.

    Returns the choices by name, for run.json and for checkpoints, from which a resumed run reads them, and a line for
    the banner. `previous`: choices of the run that is resumed. They are ignored if it computed on another kind of
    device or in another precision.
    """
    computed_in = f"{precision.device.type} {precision.name.replace('-', ' ')}"  # a blank, as in the oldest checkpoints
    if previous.get("computed_in") != computed_in:
        previous = {}
    built = BuiltModel(config, model, inputs, precision, world, previous)
    possible = list(speedups(config, precision))
    # Every rank chooses, so that errors are raised together, and the choices of rank 0 count.
    chosen = broadcast(on_every_rank(world, lambda: [speedup.choose(built) for speedup in possible]), world)
    values: dict[str, Any] = dict.fromkeys(RECORDED, False)  # those that are not chosen stay False
    words: list[str] = []
    for speedup, choice in zip(possible, chosen, strict=True):
        if choice.value is False:
            continue
        speedup.apply(built, choice.value)
        words.append(speedup.words(choice))
        if speedup.key:
            values[speedup.key] = choice.value
    values["computed_in"] = computed_in
    return values, "; ".join(filter(None, words))
