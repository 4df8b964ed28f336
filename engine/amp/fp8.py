"""fp8 by torchao: linear layers of suitable size compute in 8 bits, everything else under bf16 autocast."""

from __future__ import annotations

import torch
from torch import nn

from models import has_adapters, is_inside
from utils.errors import UserError
from utils.log import log
from utils.text import counted

MULTIPLE = 16  # tensor cores need both sizes of an fp8 matrix to be multiples of it
FIRST_CAPABILITY = (8, 9)


def check_fp8() -> None:
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        raise UserError("AMP.DTYPE fp8 needs torchao, which is not installed: pip install torchao") from None


def hardware_has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def convert(model: nn.Module, device: torch.device, classifier: nn.Module | None, in_fp32: list[str]) -> list[str]:
    """Convert linear layers of suitable size to fp8, one scale per tensor, in place. Returns the names of the others.

    `in_fp32`: names of modules to leave alone, with everything inside them.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulated = not hardware_has_fp8(device)
    if emulated:
        log.warning(
            "fp8 is EMULATED on this device: the results are those of fp8, but training is slower than in fp32. "
            "Real fp8 needs compute capability 8.9 or newer (Ada, Hopper, Blackwell)."
        )
    left_out: list[str] = []
    adapted: list[str] = []

    def is_convertible(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or is_inside(name, in_fp32):
            return False
        if has_adapters(module):  # conversion would remove them
            adapted.append(name)
            return False
        suits = module is not classifier and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
        if not suits:
            left_out.append(name)
        return suits

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    object.__setattr__(config, "emulate", emulated)
    # A weight's gradient is summed over the tokens of a batch, whose number must be a multiple of 16 as well.
    object.__setattr__(config, "pad_inner_dim", True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_convertible)
    if adapted:
        log.info("fp8: %s with adapters (MODEL.LORA) compute in bf16.", counted(len(adapted), "layer"))
    return left_out
