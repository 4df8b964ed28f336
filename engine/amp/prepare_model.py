"""What precision asks of the model itself, before its weights are trained."""

from __future__ import annotations

from torch import nn

from engine.amp.fp8 import convert
from engine.amp.fp32_modules import force_fp32, forced
from engine.amp.half_copy import hold_in_half
from engine.amp.precision import Precision
from utils.config.amp import AmpConfig
from utils.log import log

TILE = 8


def prepare_model(model: nn.Module, amp: AmpConfig, precision: Precision) -> None:
    """fp8 layers, modules kept in fp32, weights in half precision: in place."""
    if precision.level == "O0":
        return
    if amp.FP32_MODULES:
        taken = force_fp32(model, amp.FP32_MODULES, precision.device.type)
        log.info("AMP.FP32_MODULES: in fp32 are %s", _names(taken))
    if precision.fp8:
        left_out = convert(model, amp.FP8_RECIPE, precision.device, classifier(model), forced(model))
        log.info("fp8: linear layers left in bf16 (sizes no multiple of 16, or the classifier): %s", _names(left_out))
    if precision.level == "O3":
        hold_in_half(model, precision.choice.dtype)
        log.warning(
            "AMP.LEVEL O3 keeps no fp32 masters: updates smaller than a weight's last bit are lost, and weights near "
            "1, such as norms', may never move. O2 takes more memory and does not have this."
        )


def hint(model: nn.Module, batch: int, device: str) -> str | None:
    """A GPU's tensor cores work on tiles: sizes that do not fill them waste part of them.

    The number of classes is not up to the user, and the classifier takes next to no time.
    """
    if device != "cuda":
        return None
    sizes = {"DATA.BATCH_SIZE": batch, "MODEL.EMBED_DIM": getattr(model, "embed_dim", None)}
    odd = [f"{key} {size}" for key, size in sizes.items() if isinstance(size, int) and size % TILE]
    return f"Mixed precision is fastest with sizes that are multiples of {TILE}: {', '.join(odd)}" if odd else None


def classifier(model: nn.Module) -> nn.Module | None:
    """timm's models tell which module it is."""
    get = getattr(model, "get_classifier", None)
    found = get() if get else None
    return found if isinstance(found, nn.Module) else None


def _names(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
