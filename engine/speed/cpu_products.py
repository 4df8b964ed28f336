"""CPU_FP32 and CPU_BF16: what multiplies matrices on a CPU.

On AMD's CPUs, MKL leaves half of the vector units idle that come with Zen 5; oneDNN uses them. Where a CPU has
units for matrices of bf16, kernels of our own use them, for fp32, too. Smaller matrices lose more by the call than they
gain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from engine.amp.precision import Precision
from engine.speed.amx import why_not
from utils.cpus import first_processor
from utils.errors import UserError

MKL, ONEDNN, OWN = "mkl", "onednn", "amx"
"""What multiplies; the last: kernels of our own."""
ZEN_5 = 26
"""The first family of AMD's CPUs whose vector units are as wide as AVX-512's registers."""
SMALLEST = 2**16
"""Values that a layer hands on: with fewer, MKL was the faster one."""
LISTED = frozenset({"linear", "fc", "addmm", "mm", "matmul", "matmul_v2", "fused_gemm_epilogue"})
"""Names on AMP's lists that mean a linear layer, which could not be told by them any more."""
LARGEST_ERROR = 1e-5
"""Of a product, against its largest value; fp32 stays under 2e-6, bf16 comes to 3e-3."""


@dataclass(frozen=True)
class Products:
    library: str
    reason: str


def choose_products(wanted: str, device: torch.device, fp32: bool, values: int, kept: str | None) -> Products:
    """`fp32`: whether the run computes in it. `values`: what a layer hands on. `kept`: what a resumed run had."""
    if wanted == OWN and device.type != "cpu":
        return Products(MKL, f"{OWN} is for CPUs")
    if wanted != "auto":
        if device.type == "cpu" and (why := _what_is_wrong_with(wanted)):
            raise UserError(f"CPU_FP32 {wanted}: {why}; use mkl.")
        ignored = wanted == ONEDNN and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
        without = "; but this CPU has no AVX-512, and without it torch leaves them to MKL" if ignored else ""
        return Products(wanted, f"as asked for{without}")
    here = _by_machine(device, fp32, values)
    if kept is None or kept == here.library:
        return here
    if kept != MKL and (device.type != "cpu" or _what_is_wrong_with(kept)):
        return here
    return Products(kept, f"as this run began; by itself it would be {here.library} here: {here.reason}")


def choose_half_products(
    wanted: str, precision: Precision, listed: Iterable[str], values: int, kept: str | None, dealt_out: bool = False
) -> Products:
    """`listed`: AMP's lists. `values`: what a layer hands on. `kept`: what a resumed run had. `dealt_out`: weights."""
    on_cpu = precision.device.type == "cpu" and precision.level != "O0"
    if not on_cpu or precision.choice.dtype is not torch.bfloat16:
        return Products(ONEDNN, "")
    obstacle = _obstacle(listed, dealt_out)
    if wanted != "auto":
        if wanted == OWN and (why := obstacle or why_not(torch.bfloat16)):
            raise UserError(f"CPU_BF16 {OWN}: {why}; use onednn.")
        return Products(wanted, "as asked for")
    if obstacle or values < SMALLEST:
        return Products(ONEDNN, obstacle or "small matrices")
    here = Products(ONEDNN, "no AMX here") if why_not(torch.bfloat16) else Products(OWN, "with GELU at once")
    if kept == ONEDNN and here.library == OWN:
        return Products(ONEDNN, "as this run began")
    return here


def _obstacle(listed: Iterable[str], dealt_out: bool) -> str:
    if dealt_out:
        return "it was not tried with DIST.STRATEGY fsdp"
    if reached := LISTED.intersection(listed):
        return f"AMP's lists name {', '.join(sorted(reached))}, which they could not reach"
    return ""


def put_products_in_force(library: str) -> None:
    """Set either way: a former run's must not leak into this one."""
    # To oneDNN `bf16` is leave to use it, not an order. Where a CPU would, `choose_products` does not come here.
    precision = "bf16" if library == ONEDNN else "ieee"
    torch.backends.mkldnn.matmul.fp32_precision = precision  # pyright: ignore[reportAttributeAccessIssue]


def _by_machine(device: torch.device, fp32: bool, values: int) -> Products:
    """By what the machine is, never by a clock: the same command is to give the same bits."""
    if device.type != "cpu":
        return Products(MKL, "on a CPU only")
    if not fp32:
        return Products(MKL, "products are in half precision")
    if values < SMALLEST:
        return Products(MKL, "small matrices")
    if not why_not(torch.float32):
        return Products(OWN, "as exact as fp32")
    vendor, family = processor_kind()
    if vendor != "AuthenticAMD" or family < ZEN_5:
        return Products(MKL, "others gain with AMX, or on AMD's Zen 5 and later")
    if why := _what_is_wrong_with_onednn():
        return Products(MKL, why)
    return Products(ONEDNN, "Zen 5 or later")


def processor_kind() -> tuple[str, int]:
    """Vendor and family as Linux tells them; nothing where it does not."""
    processor = first_processor()
    family = processor.get("cpu family", "")
    return processor.get("vendor_id", ""), int(family) if family.isdecimal() else 0


def _what_is_wrong_with(library: str) -> str:
    return {MKL: lambda: "", OWN: lambda: why_not(torch.float32), ONEDNN: _what_is_wrong_with_onednn}[library]()


def _what_is_wrong_with_onednn() -> str:
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    error = _error_of_onednn()
    return f"on this CPU oneDNN is less exact than fp32 (relative error {error:.0e})" if error > LARGEST_ERROR else ""


@cache
def _error_of_onednn() -> float:
    """Of one product against fp64: with leave to use bf16, a CPU with units for it may do so."""
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=random) for _ in range(2))
    before = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    put_products_in_force(ONEDNN)
    try:
        found = left @ right
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before  # pyright: ignore[reportAttributeAccessIssue]
    exact = left.double() @ right.double()
    return float((found.double() - exact).abs().max() / exact.abs().max())
