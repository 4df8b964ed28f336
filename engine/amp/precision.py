"""Chooses the dtype that `-amp` means on this device, and applies autocast and loss scaling for it.

`Precision` is one object for every precision. With AMP off, its autocast and its scaler do nothing, so the update
needs no branch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from models.parts import convolves_by_channel
from utils.config.schema import AmpConfig
from utils.config.train import TrainConfig
from utils.errors import UserError

if TYPE_CHECKING:
    from engine.amp.loss_scaler import LossScaler

# fp8 is bf16 outside its 8-bit matrix products.
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

# In fp16, a smaller epsilon rounds to zero, or is all that is left when squared gradients round to zero.
SMALLEST_EPS_IN_FP16 = 1e-4
# Default epsilon of Adam and most of its variants.
DEFAULT_EPS = 1e-8

BF16_FEATURES = ("avx512_bf16", "amx_bf16", "avx_ne_convert")
"""What torch calls bf16 arithmetic of an x86 CPU"""
WITHOUT_BF16 = ("AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from it"""
EMULATED_BF16 = "this CPU has no bf16 arithmetic: expect bf16 to be several times slower than fp32"
OFF = "AMP is off"
IN_FP32 = "this CPU has neither fp16 nor bf16 arithmetic, and emulating it would be several times slower"
DEPTHWISE = "depthwise convolutions with batch norms are faster in fp32 on CPUs; -amp bf16 saves memory"

PRECISION = "precision"
"""Key under which a run's choices keep the name of its precision"""

# Each GPU generation, newest first: first compute capability, name, gain from half precision, and a warning or None.
GENERATIONS = (
    ((10, 0), "Blackwell", "tensor cores for fp16 and bf16", None),
    ((9, 0), "Hopper", "tensor cores for fp16 and bf16", None),
    ((8, 9), "Ada", "tensor cores for fp16 and bf16", None),
    ((8, 0), "Ampere", "tensor cores for fp16 and bf16", None),
    ((7, 5), "Turing", "tensor cores for fp16", None),
    ((7, 0), "Volta", "tensor cores for fp16", None),
    ((6, 0), "Pascal", "fp16 saves memory, not time", "on Pascal, fp16 saves memory, with no gain in speed"),
)


@dataclass(frozen=True)
class DtypeChoice:
    """The chosen dtype, and the reason for the banner and run.json."""

    dtype: torch.dtype
    reason: str
    warning: str | None = None


def choose(amp: AmpConfig, device: torch.device, model: nn.Module | None = None) -> DtypeChoice:
    """Choose the dtype that -amp means on `device`, with the reason.

    `model`: None if it is not built yet; then its kind of convolutions does not count.
    """
    if not amp.ENABLED or amp.LEVEL == "O0":
        return DtypeChoice(torch.float32, OFF)
    if amp.DTYPE != "auto":
        return DtypeChoice(DTYPES[amp.DTYPE], "as asked for", _why_slow(DTYPES[amp.DTYPE], device))
    emulates_bf16 = device.type == "cpu" and not cpu_computes_in_bf16()
    if amp.LEVEL == "O3":
        warning = EMULATED_BF16 if emulates_bf16 else None
        return DtypeChoice(torch.bfloat16, "without fp32 master weights, only bf16 has enough range", warning)
    if device.type == "cuda":
        return _choose_for_gpu(torch.cuda.get_device_capability(device))
    if device.type != "cpu":
        return DtypeChoice(torch.float16, f"fp16 is the fast dtype on {device.type}")

    # A CPU: fp16 if it has only that, else bf16 if it has that, else fp32 at O1 and emulated bf16 at O2 and NAIVE.
    if torch.ops.mkldnn._is_mkldnn_fp16_supported() and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return DtypeChoice(torch.float16, "this CPU computes in fp16 but not in bf16")
    if emulates_bf16:
        if amp.LEVEL == "O1":
            return DtypeChoice(torch.float32, IN_FP32, f"-amp computes in fp32 here: {IN_FP32}. -amp bf16 emulates it")
        return DtypeChoice(torch.bfloat16, "bf16 needs no loss scaling", EMULATED_BF16)
    if amp.LEVEL == "O1" and model is not None and convolves_by_channel(model):
        return DtypeChoice(torch.float32, DEPTHWISE)
    return DtypeChoice(torch.bfloat16, "this CPU computes in bf16")


def _why_slow(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a warning if the device emulates this dtype; None if it computes in it."""
    if device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU emulates bf16, which is slow; fp16 is faster"
    if device.type != "cpu":
        return None
    if dtype is torch.bfloat16:
        return None if cpu_computes_in_bf16() else EMULATED_BF16
    warning = "this CPU has no fp16 arithmetic: expect fp16 to be many times slower than fp32; use bf16 on CPUs"
    return None if torch.ops.mkldnn._is_mkldnn_fp16_supported() else warning


def _choose_for_gpu(capability: tuple[int, int]) -> DtypeChoice:
    """Choose fp16 for a GPU of this compute capability, with its generation as the reason."""
    number = f"compute capability {capability[0]}.{capability[1]}"
    for first, name, gain, warning in GENERATIONS:
        if capability >= first:
            return DtypeChoice(torch.float16, f"{name} ({number}): {gain}", warning)
    return DtypeChoice(torch.float16, number, "this GPU has no fp16 arithmetic: expect no gain in speed")


def cpu_computes_in_bf16() -> bool:
    """Return whether torch computes in bf16 on this CPU, and does not emulate it.

    torch's libraries are asked, because they may be limited to older instructions than the CPU has.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    features = torch.cpu.get_capabilities()
    if features["architecture"] != "x86_64":
        return True
    # On x86, "supported" includes emulation, which oneDNN has for any CPU with AVX-512. So the CPU must have bf16
    # instructions, and the user must not have limited oneDNN to an older instruction set. No limit is ''.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    return limit not in WITHOUT_BF16 and any(features[name] for name in BF16_FEATURES)


def amp_may_gain(device: torch.device, model: nn.Module | None = None) -> bool:
    """Return whether -amp is worth a try on `device`. It is not on a CPU where it computes in fp32."""
    return device.type != "cpu" or choose(AmpConfig(ENABLED=True), device, model).dtype is not torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: fp16, bf16, int64."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


class Precision:
    """Autocast and loss scaling of one run, with the same calls whether or not either is on."""

    def __init__(self, amp: AmpConfig, device: torch.device, choice: DtypeChoice | None = None) -> None:
        """`choice`: the dtype that rank 0 has chosen; None to choose it here."""
        self.choice = choice or choose(amp, device)
        self.device = device
        uses_half = self.choice.dtype is not torch.float32
        self.level = amp.LEVEL if uses_half else "O0"
        self.fp8 = uses_half and amp.DTYPE == "fp8"
        self.tf32 = amp.TF32
        self.black_list = amp.CUSTOM_BLACK_LIST
        # bf16 has fp32's range: gradients do not underflow, so the loss is not scaled.
        self._loss_scaler: LossScaler | None = None
        if self.choice.dtype is torch.float16:
            from engine.amp.loss_scaler import LossScaler

            weights_are_half = self.level == "O3"
            self._loss_scaler = LossScaler(device.type, amp, half_gradients=weights_are_half)
        # Without loss scaling, torch's own scaler, which does nothing when it is disabled.
        self.scaler = self._loss_scaler or torch.amp.GradScaler(device.type, enabled=False)
        switch_tf32(amp.TF32)

    @property
    def name(self) -> str:
        """Value of -amp for this precision: fp32, tf32, fp16, bf16 or fp8, after the level unless it is O1: O2-bf16."""
        if self.level == "O0":
            return "tf32" if self.tf32 and self.device.type == "cuda" else "fp32"
        name = "fp8" if self.fp8 else dtype_name(self.choice.dtype)
        return name if self.level == "O1" else f"{self.level}-{name}"

    @property
    def computes_in_copy(self) -> bool:
        """Whether a half-precision copy of the model computes, and the model itself holds the fp32 master weights."""
        return self.level in ("O2", "NAIVE")

    def autocast(self, training: bool = True) -> torch.autocast:
        """Autocast for training or validation.

        O2 and NAIVE validate their fp32 masters under autocast. O3 needs none: its weights are in half precision.
        """
        enabled = self.level in ("O1", "O2") if training else self.level in ("O1", "O2", "NAIVE")
        return torch.autocast(self.device.type, self.choice.dtype if enabled else None, enabled=enabled)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer) -> bool | Tensor:
        """Step the optimiser unless a gradient overflowed. Returns whether the weights moved.

        The result is a bool where the host knows it, else a tensor of 0 or 1 on the device: a fused optimiser on a GPU
        skips the step without the host's knowledge, and asking would wait for the device.
        """
        if self._loss_scaler is None or not self.scaler.is_enabled():
            optimizer.step()
            return True
        overflow = self._loss_scaler.overflow(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        # `overflow` is above 0 if the step was skipped.
        if overflow.device.type == "cpu":
            return not overflow.numpy().any()  # in host memory: no copy
        if self.hides_skips(optimizer):
            return overflow == 0  # a tensor: nothing waits for the device
        return not overflow.item()  # an optimiser that is not fused: GradScaler has already waited for this value

    def hides_skips(self, optimizer: Optimizer) -> bool:
        """Return whether only the device knows of a skipped update, because a fused optimiser skips it there."""
        host_knows = self.device.type == "cpu" or not self.scaler.is_enabled()
        return not host_knows and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def scale_tensor(self) -> Tensor:
        """Return the loss scale, on the device; 1 without loss scaling."""
        scale = self.scaler._scale if self.scaler.is_enabled() else None
        return torch.tensor(self.scaler.get_scale()) if scale is None else scale.detach()

    def line(self) -> str:
        """Describe the precision in one line for the banner."""
        if self.level == "O0":
            return self._line_of_fp32()
        method = {  # follows the name of the precision: "fp16 by autocast", "O2-bf16 copy of fp32 master weights"
            "O1": "by autocast",
            "O2": "copy of fp32 master weights, norms in fp32",
            "NAIVE": "copy of fp32 master weights, only batch norms in fp32",
            "O3": "weights, without fp32 masters",
        }[self.level]
        scaling = "with loss scaling" if self.scaler.is_enabled() else "no loss scaling needed"
        listed = f" with {', '.join(self.black_list)} in fp32" if self.black_list else ""
        return f"{self.name} {method}{listed}, {scaling} ({self.choice.reason})"

    def _line_of_fp32(self) -> str:
        """Describe fp32 in one line for the banner.

        It names whether TF32 is on, or has no effect, and on a CPU the reason if -amp computes in fp32 here.
        """
        if self.device.type == "cuda":
            switch = "on" if self.tf32 else "off"
            return f"{self.name}, TF32 {switch}"
        line = self.name
        if self.choice.reason != OFF:
            line += f" ({self.choice.reason})"
        if self.tf32:
            line += " (AMP.TF32 has no effect: only CUDA GPUs have TF32)"
        return line


def switch_tf32(on: bool) -> None:
    """Switch TF32 on or off everywhere: an earlier setting in this process must not leak into this run."""
    # torch's older settings come first. Its compiler and exporter still read them, and raise an error where they
    # contradict the newer ones. Also, only the older ones apply to convolutions, which default to TF32, and to matrix
    # products after compiling, which sets their precision apart.
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    # The newer settings: for everything, and for cuDNN, whose precision the exporter sets apart.
    for backend in (torch.backends, torch.backends.cudnn):
        backend.fp32_precision = "tf32" if on else "ieee"  # pyright: ignore[reportAttributeAccessIssue]


def check_amp(amp: AmpConfig, train: TrainConfig | None) -> None:
    """Raise UserError for AMP settings that work on no device. Called before processes start.

    `train`: None for an evaluation.
    """
    if amp.CUSTOM_WHITE_LIST or amp.CUSTOM_BLACK_LIST:
        from engine.amp.op_lists import check_names

        check_names(amp.CUSTOM_WHITE_LIST, amp.CUSTOM_BLACK_LIST)
    if not amp.ENABLED:
        return

    if amp.DTYPE == "fp8":
        if amp.LEVEL != "O1":
            raise UserError(f"AMP.DTYPE fp8 works with AMP.LEVEL O1 only, not {amp.LEVEL}.")
        try:
            import torchao.float8  # noqa: F401
        except ImportError:
            raise UserError("AMP.DTYPE fp8 needs torchao, which is not installed: pip install torchao") from None

    if amp.LEVEL in ("NAIVE", "O3"):  # the two levels without autocast
        autocast_only = ("CUSTOM_WHITE_LIST", "CUSTOM_BLACK_LIST", "FP32_MODULES", "AUTO_FP32")
        given = [f"AMP.{key}" for key in autocast_only if getattr(amp, key)]
        if given:
            raise UserError(
                f"{', '.join(given)} cannot be used with AMP.LEVEL {amp.LEVEL}, which works without autocast "
                "and cannot choose the precision of single operators or modules; use O1 or O2."
            )

    if train is not None and amp.LEVEL == "O3" and amp.DTYPE == "fp16":
        eps = train.OPTIMIZER.EPS or DEFAULT_EPS
        divides_by_eps = train.OPTIMIZER.facts.has_eps  # the optimiser adds EPS to what it divides by
        if divides_by_eps and eps < SMALLEST_EPS_IN_FP16:
            raise UserError(
                "AMP.LEVEL O3 in fp16: squared gradients round to zero in the optimiser's fp16 state, so updates are "
                f"divided by TRAIN.OPTIMIZER.EPS {eps:g} alone, and the first updates explode or become NaN. "
                f"Set EPS to {SMALLEST_EPS_IN_FP16:g} or more, or use bf16, or O2, which keeps fp32 master weights."
            )
