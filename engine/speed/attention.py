"""MODEL.ATTENTION: how attention is computed; the same mathematics, and several times the time.

On a CPU `auto` is a rule, found by measurement, since a clock could choose otherwise in the next run, and the same
command is to give the same bits. On a GPU it is a race at this model's own shape, run once and remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from engine.amp.precision import Precision
from utils.errors import UserError

FUSED, PLAIN, FLASH, EFFICIENT, CUDNN, PACKED = "fused", "plain", "flash", "efficient", "cudnn", "packed"
OWN = "the model's own"
KINDS = {"cuda": (FUSED, PLAIN, FLASH, EFFICIENT, CUDNN, PACKED)}
KINDS_ELSEWHERE = (FUSED, PLAIN)
INSIDE = frozenset({"softmax", "matmul", "matmul_v2", "bmm"})
"""Operators that a fused one holds, where no list of AMP's reaches them."""
WHOLE = frozenset({"scaled_dot_product_attention", "fused_attention", "flash_attn"})
"""The fused one of torch, by which lists do not reach our own."""
_in_force = ExitStack()


@dataclass(frozen=True)
class Attention:
    kind: str
    reason: str

    def words(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


def attention_layers(model: nn.Module) -> list[Any]:
    """Those that can be told how to compute."""
    return [module for module in model.modules() if hasattr(module, "fused_attn")]


def settled_attention(
    wanted: str, model: nn.Module, precision: Precision, library: str, listed: Iterable[str], kept: str | None
) -> Attention | None:
    """What is known without a race; None where one is to decide, or where kernels of our own are to be tried.

    `library`: what multiplies fp32 on a CPU. `listed`: AMP's lists. `kept`: what the run that is gone on with had.
    """
    device = precision.device.type
    kinds = KINDS.get(device, KINDS_ELSEWHERE)
    if not attention_layers(model):
        if wanted != "auto":
            raise UserError(f"MODEL.ATTENTION {wanted}: {type(model).__name__} computes it its own way; leave it auto.")
        return Attention(OWN, "")
    on_cpu = device == "cpu" and _packed_on_cpu(wanted, kept, model, precision, listed)
    if wanted not in (*kinds, "auto", *[PACKED] * bool(on_cpu)):
        raise UserError(f"MODEL.ATTENTION {wanted}: {device} has only {' and '.join(kinds)}; or leave it auto.")
    reached = INSIDE.intersection(listed)
    if reached and wanted not in ("auto", PLAIN):
        raise UserError(
            f"MODEL.ATTENTION {wanted}: AMP's lists name {', '.join(sorted(reached))}, which cannot be reached inside "
            "a fused operator; use plain, or leave it auto."
        )
    if wanted == PACKED and device == "cuda" and not packed_is_possible(listed):
        raise UserError(
            f"MODEL.ATTENTION {wanted} needs Triton, and AMP's lists not to name {', '.join(sorted(WHOLE))}, which "
            "reach torch's operators only; use fused, or leave it auto."
        )
    if reached:
        return Attention(PLAIN, "AMP's lists reach into it")
    if wanted != "auto":  # a GPU has some kinds for some models only
        tried = device == "cuda" and (wanted == PACKED or backends_of(wanted))
        return None if tried else Attention(wanted, "as asked for")
    if kept is not None and (on_cpu if kept == PACKED else kept in kinds):
        return Attention(kept, "as this run began")
    if device == "cuda":
        return None
    return Attention(PACKED, "by AMX") if on_cpu else _by_rule(precision, library)


def _by_rule(precision: Precision, library: str) -> Attention:
    """Measured from 17 to 197 tokens; see docs/dev/kernels.md."""
    if precision.device.type != "cpu":
        return Attention(FUSED, "torch's choice")
    if precision.level != "O0":
        return Attention(PLAIN, "half precision on a CPU")
    if library == "onednn":
        return Attention(PLAIN, "fp32 by oneDNN on a CPU")
    return Attention(FUSED, "fp32 on a CPU")


def _packed_on_cpu(
    wanted: str, kept: str | None, model: nn.Module, precision: Precision, listed: Iterable[str]
) -> bool:
    """Whether it can be had, and unless it is asked for by name, or a run began with it, also whether it pays."""
    if wanted not in ("auto", PACKED):
        return False
    from engine.speed.packed_attention import pays_on_cpu, why_not_on_cpu

    if wanted == "auto" and kept != PACKED and not pays_on_cpu(model):
        return False
    why = why_not_on_cpu(model, precision)
    if not why and WHOLE.intersection(listed):
        why = f"AMP's lists name {', '.join(sorted(WHOLE.intersection(listed)))}, which reach torch's operators only"
    if why and wanted == PACKED:
        raise UserError(f"MODEL.ATTENTION {PACKED}: {why}; cpu has {' and '.join(KINDS_ELSEWHERE)}; or leave it auto.")
    return not why


def packed_is_possible(listed: Iterable[str]) -> bool:
    return not WHOLE.intersection(listed) and find_spec("triton") is not None


def put_attention_in_force(kind: str, model: nn.Module) -> None:
    """For all passes, those that recompute or validate too: the switches are the process's own."""
    for layer in attention_layers(model):
        layer.fused_attn = kind not in (PLAIN, OWN)
        if kind == PACKED:
            from engine.speed.packed_attention import pack

            pack(layer)
        elif getattr(layer, "packed", False):
            layer.packed = False
    _in_force.close()
    backends = backends_of(kind)
    if backends:
        from torch.nn.attention import sdpa_kernel

        _in_force.enter_context(sdpa_kernel(backends, set_priority=True))


def backends_of(kind: str, strictly: bool = False) -> list[Any]:
    """torch's names for a kind, the best first, and empty for its own choice.

    The others serve where that kind cannot: flash and cuDNN know no fp32, in which a run may validate.
    """
    if kind not in (FLASH, EFFICIENT, CUDNN):
        return []
    from torch.nn.attention import SDPBackend

    named = {FLASH: SDPBackend.FLASH_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
    named[CUDNN] = SDPBackend.CUDNN_ATTENTION
    rest = [] if strictly else [named[EFFICIENT], SDPBackend.MATH]
    return list(dict.fromkeys([named[kind], *rest]))
