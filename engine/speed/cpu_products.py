"""CPU_FP32 and CPU_BF16: the library that multiplies matrices on a CPU.

On AMD's Zen 5, MKL uses half the width of the vector units, and oneDNN all of it. Where a CPU has AMX, our own kernels
use it, for fp32 too. With small matrices, their call overhead is larger than the gain.
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
"""Libraries; `amx` means our own kernels."""
ZEN_5 = 26
"""First family of AMD CPUs with vector units as wide as AVX-512's registers."""
MIN_VALUES = 2**16
"""Values between two blocks; with fewer, MKL was faster."""
LISTED = frozenset({"linear", "fc", "addmm", "mm", "matmul", "matmul_v2", "fused_gemm_epilogue"})
"""Names of linear layers on AMP's lists, which have no effect on our own kernels."""
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
    if wanted == OWN and device.type != "cpu":
        return Products(MKL, f"{OWN} is for CPUs")
    if wanted != "auto":
        if device.type == "cpu" and (why := _why_not(wanted)):
            raise UserError(f"CPU_FP32 {wanted}: {why}; use mkl.")
        ignored = wanted == ONEDNN and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
        note = ", but this CPU has no AVX-512, so torch uses MKL" if ignored else ""
        return Products(wanted, f"as asked for{note}")
    here = _by_machine(device, fp32, values)
    if previous is None or previous == here.library:
        return here
    if previous != MKL and (device.type != "cpu" or _why_not(previous)):
        return here
    return Products(previous, f"as before the resume; a new run here would use {here.library}: {here.reason}")


def choose_half_products(
    wanted: str, precision: Precision, listed: Iterable[str], values: int, previous: str | None, sharded: bool = False
) -> Products:
    """The library for bf16 products.

    `listed`: operators on AMP's lists. `values`: number of values between two blocks. `previous`: choice of the run
    that is resumed. `sharded`: whether FSDP shards the weights.
    """
    on_cpu = precision.device.type == "cpu" and precision.level != "O0"
    if not on_cpu or precision.choice.dtype is not torch.bfloat16:
        return Products(ONEDNN, "")
    obstacle = _obstacle(listed, sharded)
    if wanted != "auto":
        if wanted == OWN and (why := obstacle or why_not(torch.bfloat16)):
            raise UserError(f"CPU_BF16 {OWN}: {why}; use onednn.")
        return Products(wanted, "as asked for")
    if obstacle or values < MIN_VALUES:
        return Products(ONEDNN, obstacle or "small matrices")
    here = Products(ONEDNN, "AMX is not usable here") if why_not(torch.bfloat16) else Products(OWN, "with fused GELU")
    if previous == ONEDNN and here.library == OWN:
        return Products(ONEDNN, "as before the resume")
    return here


def _obstacle(listed: Iterable[str], sharded: bool) -> str:
    if sharded:
        return f"{OWN} was not tested with DIST.STRATEGY fsdp"
    if named := LISTED.intersection(listed):
        return f"AMP's lists would have no effect on {', '.join(sorted(named))} with {OWN}"
    return ""


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
    if not why_not(torch.float32):
        return Products(OWN, "as exact as fp32")
    vendor, family = processor_kind()
    if vendor != "AuthenticAMD" or family < ZEN_5:
        return Products(MKL, "other libraries are faster only with AMX, or on AMD's Zen 5 and later")
    if why := _why_not_onednn():
        return Products(MKL, why)
    return Products(ONEDNN, "Zen 5 or later")


def processor_kind() -> tuple[str, int]:
    """Vendor and family from /proc/cpuinfo; empty without it."""
    processor = first_processor()
    family = processor.get("cpu family", "")
    return processor.get("vendor_id", ""), int(family) if family.isdecimal() else 0


def _why_not(library: str) -> str:
    """Why this machine cannot use `library` for fp32 products; empty if it can."""
    return {MKL: lambda: "", OWN: lambda: why_not(torch.float32), ONEDNN: _why_not_onednn}[library]()


def _why_not_onednn() -> str:
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
