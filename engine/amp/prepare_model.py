"""Changes that AMP makes to the model before training: fp8 layers, fp32 modules, half-precision weights."""

from __future__ import annotations

from torch import nn

from engine.amp.fp32_modules import force_fp32, forced_modules
from engine.amp.precision import Precision
from utils.config.amp import AmpConfig
from utils.log import log

TENSOR_CORE_TILE = 8


def prepare_model(model: nn.Module, amp: AmpConfig, precision: Precision) -> None:
    """Apply AMP.FP32_MODULES, fp8 and O3 to `model`, in place."""
    if precision.level == "O0":
        return
    if amp.FP32_MODULES:
        forced = force_fp32(model, amp.FP32_MODULES, precision.device.type)
        log.info("AMP.FP32_MODULES: modules in fp32: %s", _names(forced))
    if precision.fp8:
        from engine.amp.fp8 import convert

        left_out = convert(model, precision.device, classifier(model), forced_modules(model))
        log.info("fp8: linear layers left in bf16 (the classifier, or sizes not multiples of 16): %s", _names(left_out))
    if precision.level == "O3":
        from engine.amp.half_copy import convert_to_half

        convert_to_half(model, precision.choice.dtype)
        log.warning(
            "AMP.LEVEL O3 keeps no fp32 master weights: updates smaller than a weight's last bit are lost, and weights "
            "near 1, such as those of norms, may never change. O2 avoids this but takes more memory."
        )


def tile_size_hint(model: nn.Module, batch: int, device: str) -> str | None:
    """Advice where sizes are not multiples of a tensor core's tile, which leaves part of each tile unused.

    The number of classes is left out: users cannot choose it, and the classifier takes hardly any time.
    """
    if device != "cuda":
        return None
    sizes = {"DATA.BATCH_SIZE": batch, "MODEL.EMBED_DIM": getattr(model, "embed_dim", None)}
    odd = ", ".join(f"{key} {size}" for key, size in sizes.items() if isinstance(size, int) and size % TENSOR_CORE_TILE)
    return (
        f"Mixed precision is fastest with sizes that are multiples of {TENSOR_CORE_TILE}, unlike {odd}" if odd else None
    )


def classifier(model: nn.Module) -> nn.Module | None:
    """The model's classifier, as timm's models report it."""
    get = getattr(model, "get_classifier", None)
    module = get() if get else None
    return module if isinstance(module, nn.Module) else None


def _names(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
