"""fp8 by torchao: linear layers whose sizes fit compute in 8 bits, everything else as under bf16 autocast."""

from __future__ import annotations

import torch
from torch import nn

from utils.errors import UserError
from utils.log import log

MULTIPLE = 16  # what the tensor cores ask of both sides of a matrix
FIRST_CAPABILITY = (8, 9)


def check_fp8() -> None:
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        raise UserError(
            "AMP.DTYPE fp8 needs torchao, which is not installed: pip install -r requirements-extra.txt"
        ) from None


def hardware_has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def convert(
    model: nn.Module, recipe: str, device: torch.device, classifier: nn.Module | None, in_fp32: list[str]
) -> list[str]:
    """Turn the linear layers that fit into fp8 ones, in place; names of those left out.

    `in_fp32`: names of modules that are to stay as they are, with all they hold.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulated = not hardware_has_fp8(device)
    if emulated:
        log.warning(
            "fp8 is EMULATED on this device: the numbers are those of fp8, the speed is not (it is slower than fp32). "
            "Real fp8 needs compute capability 8.9 or newer (Ada, Hopper, Blackwell)."
        )
    left_out: list[str] = []

    def fits(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or any(name == k or name.startswith(f"{k}.") for k in in_fp32):
            return False
        good = module is not classifier and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
        if not good:
            left_out.append(name)
        return good

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", emulated)
    # A weight's gradient is summed over all tokens of a batch, and tensor cores ask the same of their number.
    object.__setattr__(config, "pad_inner_dim", True)
    convert_to_float8_training(model, config=config, module_filter_fn=fits)
    return left_out
