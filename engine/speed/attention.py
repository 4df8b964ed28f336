"""MODEL.ATTENTION: the kernel that computes attention. The result is the same, the time differs several times over.

On a CPU `auto` follows a rule from measurements: timing could choose another kernel in the next run, and the same
command must give the same bits. On a GPU `auto` times the kernels at this model's shape, once, and saves the choice.
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
INSIDE_FUSED = frozenset({"softmax", "matmul", "matmul_v2", "bmm"})
"""Operators inside a fused kernel, where AMP's lists have no effect."""
FUSED_OPERATOR = frozenset({"scaled_dot_product_attention", "fused_attention", "flash_attn"})
"""Names of torch's fused operator on AMP's lists, which have no effect on `packed`."""
_sdpa_kernel = ExitStack()


@dataclass(frozen=True)
class Attention:
    kind: str
    reason: str

    def words(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


def attention_layers(model: nn.Module) -> list[Any]:
    """timm's attention layers, whose kernel can be chosen."""
    return [module for module in model.modules() if hasattr(module, "fused_attn")]


def attention_by_rule(
    wanted: str, model: nn.Module, precision: Precision, library: str, listed: Iterable[str], previous: str | None
) -> Attention | None:
    """The choice that needs no timing; None if kernels must be timed or tried on this GPU.

    `library`: multiplies fp32 matrices on a CPU. `listed`: operators on AMP's lists. `previous`: choice of the run that
    is resumed.
    """
    device = precision.device.type
    kinds = KINDS.get(device, KINDS_ELSEWHERE)
    if not attention_layers(model):
        if wanted != "auto":
            raise UserError(
                f"MODEL.ATTENTION {wanted}: {type(model).__name__} has no attention layer whose kernel can be chosen; "
                "leave it auto."
            )
        return Attention(OWN, "")
    if wanted not in (*kinds, "auto"):
        raise UserError(
            f"MODEL.ATTENTION {wanted}: {device} supports only {' and '.join(kinds)}; use one of these, or leave it "
            "auto."
        )
    inside = INSIDE_FUSED.intersection(listed)
    if inside and wanted not in ("auto", PLAIN):
        raise UserError(
            f"MODEL.ATTENTION {wanted}: AMP's lists would have no effect on {', '.join(sorted(inside))} inside a "
            "fused operator; use plain, or leave it auto."
        )
    if wanted == PACKED and device == "cuda" and not packed_is_possible(listed):
        named = ", ".join(sorted(FUSED_OPERATOR.intersection(listed)))
        lists = f"AMP's lists, which affect torch's operators only, name {named}"
        why = lists if named else "it needs the package triton, which is not installed"
        raise UserError(f"MODEL.ATTENTION {wanted}: {why}; use fused, or leave it auto.")
    if inside:
        return Attention(PLAIN, "so that AMP's lists take effect")
    if wanted != "auto":  # a GPU has some kinds for some models only
        must_try = device == "cuda" and (wanted == PACKED or backends_of(wanted))
        return None if must_try else Attention(wanted, "as asked for")
    if previous is not None and previous in kinds and previous != PACKED:  # packed must be tried on this GPU
        return Attention(previous, "as before the resume")
    if device == "cuda":
        return None
    return _fastest_as_measured(precision, library)


def _fastest_as_measured(precision: Precision, library: str) -> Attention:
    """The fastest kind in measurements from 17 to 197 tokens; see docs/dev/kernels.md."""
    if precision.device.type != "cpu":
        return Attention(FUSED, "torch's choice")
    if precision.level != "O0":
        return Attention(PLAIN, "half precision on a CPU")
    if library == "onednn":
        return Attention(PLAIN, "fp32 by oneDNN on a CPU")
    return Attention(FUSED, "fp32 on a CPU")


def packed_is_possible(listed: Iterable[str]) -> bool:
    return not FUSED_OPERATOR.intersection(listed) and find_spec("triton") is not None


def apply_attention(kind: str, model: nn.Module) -> None:
    """Use `kind` for every pass of this process, recomputation and validation included."""
    for layer in attention_layers(model):
        layer.fused_attn = kind not in (PLAIN, OWN)
        if kind == PACKED:
            from engine.speed.packed_attention import use_packed

            use_packed(layer)
        elif getattr(layer, "packed", False):
            layer.packed = False
    _sdpa_kernel.close()
    backends = backends_of(kind)
    if backends:
        from torch.nn.attention import sdpa_kernel

        _sdpa_kernel.enter_context(sdpa_kernel(backends, set_priority=True))


def backends_of(kind: str, strictly: bool = False) -> list[Any]:
    """torch's backends for a kind, by preference; empty for torch's own choice.

    The others are fallbacks: flash and cuDNN do not support fp32, in which a run may validate.
    """
    if kind not in (FLASH, EFFICIENT, CUDNN):
        return []
    from torch.nn.attention import SDPBackend

    named = {FLASH: SDPBackend.FLASH_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
    named[CUDNN] = SDPBackend.CUDNN_ATTENTION
    fallbacks = [] if strictly else [named[EFFICIENT], SDPBackend.MATH]
    return list(dict.fromkeys([named[kind], *fallbacks]))
