"""CPU_FP32: the library that multiplies fp32 matrices on a CPU.

On AMD's Zen 5, MKL uses half the width of the vector units, and oneDNN all of it. With small matrices, oneDNN's call
overhead is larger than the gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from utils.cpus import first_processor
from utils.errors import UserError

MKL, ONEDNN = "mkl", "onednn"
ZEN_5 = 26
"""First family of AMD CPUs with vector units as wide as AVX-512's registers."""
MIN_VALUES = 2**16
"""Values between two blocks; with fewer, MKL was faster."""
LARGEST_ERROR = 1e-5
"""Error of a product relative to its largest value; fp32 stays below 2e-6, bf16 reaches 3e-3."""


@dataclass(frozen=True)
class Products:
    library: str
    reason: str


def choose_products(wanted: str, device: torch.device, fp32: bool, values: int, previous: str | None) -> Products:
    """The library for fp32 products.

    `fp32`: whether the run computes in it. `values`: number of values between two blocks. `previous`: choice of the run
    that is resumed.
    """
    if wanted != "auto":
        if wanted == ONEDNN and device.type == "cpu" and (why := _why_not_onednn()):
            raise UserError(f"CPU_FP32 {wanted}: {why}; use mkl.")
        ignored = wanted == ONEDNN and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
        note = ", but this CPU has no AVX-512, so torch uses MKL" if ignored else ""
        return Products(wanted, f"as asked for{note}")
    here = _by_machine(device, fp32, values)
    if previous not in (MKL, ONEDNN) or previous == here.library:
        return here
    if previous == ONEDNN and (device.type != "cpu" or _why_not_onednn()):
        return here
    return Products(previous, f"as before the resume; a new run here would use {here.library}: {here.reason}")


def apply_products(library: str) -> None:
    """Set torch's library for fp32 products, always: an earlier run in this process may have set another."""
    # `bf16` allows oneDNN to use bf16. `choose_products` has excluded CPUs on which oneDNN would do so.
    precision = "bf16" if library == ONEDNN else "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = precision  # pyright: ignore[reportAttributeAccessIssue]


def _by_machine(device: torch.device, fp32: bool, values: int) -> Products:
    """The library by facts about the machine. Timing could vary, and the same command must give the same bits."""
    if device.type != "cpu":
        return Products(MKL, "on a CPU only")
    if not fp32:
        return Products(MKL, "most products are in half precision")
    if values < MIN_VALUES:
        return Products(MKL, "small matrices")
    vendor, family = processor_kind()
    if vendor != "AuthenticAMD" or family < ZEN_5:
        return Products(MKL, "oneDNN is faster only on AMD's Zen 5 and later")
    if why := _why_not_onednn():
        return Products(MKL, why)
    return Products(ONEDNN, "Zen 5 or later")


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
