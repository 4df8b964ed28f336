"""CPU_FP32: the library that multiplies fp32 matrices on a CPU.

On AMD's Zen 5, MKL uses half the width of the vector units, and oneDNN all of it. With small matrices, oneDNN's call
overhead is larger than the gain.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from engine.speed.shape import BuiltModel, Choice, Shape
from utils.errors import UserError
from utils.machine.cpus import first_processor

MKL, ONEDNN = "mkl", "onednn"
ZEN_5 = 26
"""First family of AMD CPUs with vector units as wide as AVX-512's registers."""
MIN_VALUES = 2**16
"""Values between two blocks; with fewer, MKL was faster."""
LARGEST_ERROR = 1e-5
"""Error of a product relative to its largest value; fp32 stays below 2e-6, bf16 reaches 3e-3."""


class CpuProducts(Shape):
    key = "cpu_fp32"

    def choose(self, built: BuiltModel) -> Choice:
        wanted, before = built.config.CPU_FP32, built.before.get(self.key)
        if built.precision.device.type != "cpu":
            return Choice(MKL if wanted == "auto" else wanted)
        if wanted != "auto":
            if wanted == ONEDNN and (why := _why_not_onednn()):
                raise UserError(f"CPU_FP32 {wanted}: {why}; use mkl.")
            ignored = wanted == ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX2"
            note = ", but this CPU has no AVX-512, so torch uses MKL" if ignored else ""
            return Choice(wanted, f"as asked for{note}")
        here = _by_machine(built)
        if before not in (MKL, ONEDNN) or before == here.value or (before == ONEDNN and _why_not_onednn()):
            return here
        return Choice(before, f"as before the resume; a new run here would use {here.value}: {here.why}")

    def apply(self, built: BuiltModel, value: str) -> None:
        apply_products(value)

    def words(self, choice: Choice) -> str:
        return f"fp32 products by {choice.value} ({choice.why})" if choice.why else ""


def apply_products(library: str) -> None:
    """Set torch's library for fp32 products, always: an earlier run in this process may have set another."""
    # `bf16` allows oneDNN to use bf16. `CpuProducts.choose` has excluded CPUs on which oneDNN would do so.
    precision = "bf16" if library == ONEDNN else "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = precision  # pyright: ignore[reportAttributeAccessIssue]


def _by_machine(built: BuiltModel) -> Choice:
    """The library by facts about the machine. Timing could vary, and the same command must give the same bits."""
    if built.precision.level != "O0":
        return Choice(MKL, "most products are in half precision")
    if _values_between_blocks(built.model, built.config.DATA.BATCH_SIZE) < MIN_VALUES:
        return Choice(MKL, "small matrices")
    vendor, family = processor_kind()
    if vendor != "AuthenticAMD" or family < ZEN_5:
        return Choice(MKL, "oneDNN is faster only on AMD's Zen 5 and later")
    if why := _why_not_onednn():
        return Choice(MKL, why)
    return Choice(ONEDNN, "Zen 5 or later")


def _values_between_blocks(model: nn.Module, batch: int) -> int:
    """Number of values between two transformer blocks; 0 for other models, and while the batch size is unknown."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", 0)
    width = getattr(model, "embed_dim", 0)
    known = all(isinstance(number, int) for number in (patches, width, batch))
    return patches * width * batch if known else 0


def processor_kind() -> tuple[str, int]:
    """Vendor and family from /proc/cpuinfo; empty without it."""
    processor = first_processor()
    family = processor.get("cpu family", "")
    return processor.get("vendor_id", ""), int(family) if family.isdecimal() else 0


def _why_not_onednn() -> str:
    """Why this machine cannot use oneDNN for fp32 products; empty if it can."""
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    error = _onednn_error()
    return f"on this CPU oneDNN is less exact than fp32 (relative error {error:.0e})" if error > LARGEST_ERROR else ""


@cache
def _onednn_error() -> float:
    """Error of one product against fp64: where bf16 is allowed, a CPU with bf16 units may use them."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=random) for _ in range(2))
    before = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    apply_products(ONEDNN)
    try:
        product = left @ right
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before  # pyright: ignore[reportAttributeAccessIssue]
    exact = left.double() @ right.double()
    return float((product.double() - exact).abs().max() / exact.abs().max())
