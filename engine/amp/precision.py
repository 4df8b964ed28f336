"""Mixed precision: what `-amp` becomes on this device, and why.

One object for every precision. With AMP off its autocast and its scaler do nothing, so that the update is
written once, without a branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.amp.fp8 import check_fp8
from engine.amp.op_lists import check_names
from engine.amp.scaler import LossScaler
from utils.config.amp import AmpConfig
from utils.config.train import TrainConfig
from utils.cpus import first_processor
from utils.errors import UserError

# Around its 8-bit matrix products, fp8 is bf16.
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
# Smaller than this, an optimiser's epsilon is (nearly) zero in fp16 itself, or next to squares that are zero there.
SMALLEST_EPS_IN_FP16 = 1e-4
# What Adam and most of its relatives have for one where the settings leave it to them.
USUAL_EPS = 1e-8
WITHOUT_EPS = {"sgd", "momentum", "nesterov", "lion"}

# First capability of each generation, newest first, and what half precision brings there.
GENERATIONS = (
    ((10, 0), "Blackwell", "tensor cores for fp16 and bf16"),
    ((9, 0), "Hopper", "tensor cores for fp16 and bf16"),
    ((8, 9), "Ada", "tensor cores for fp16 and bf16"),
    ((8, 0), "Ampere", "tensor cores for fp16 and bf16"),
    ((7, 5), "Turing", "tensor cores for fp16"),
    ((7, 0), "Volta", "tensor cores for fp16"),
    ((6, 0), "Pascal", "fp16 saves memory, not time"),
)


@dataclass(frozen=True)
class Choice:
    """What was chosen and why, in words for the banner and run.json."""

    dtype: torch.dtype
    reason: str
    warning: str | None = None


def choose(amp: AmpConfig, device: torch.device) -> Choice:
    """The dtype that -amp means here."""
    if not amp.ENABLED or amp.LEVEL == "O0":
        return Choice(torch.float32, "AMP is off")
    if amp.DTYPE != "auto":
        return _asked_for(DTYPES[amp.DTYPE], device)
    if amp.LEVEL == "O3":
        return Choice(torch.bfloat16, "without fp32 masters only bf16's range will do")
    if device.type == "cuda":
        return _for_gpu(torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        return _for_cpu()
    return Choice(torch.float16, f"fp16 is what {device.type} gains from")


def _for_gpu(capability: tuple[int, int]) -> Choice:
    number = f"compute capability {capability[0]}.{capability[1]}"
    for first, name, gain in GENERATIONS:
        if capability >= first:
            warning = f"{name} gains no speed from fp16, only memory" if name == "Pascal" else None
            return Choice(torch.float16, f"{name} ({number}): {gain}", warning)
    return Choice(torch.float16, number, "this GPU is older than fp16 arithmetic; expect no gain in speed")


def _for_cpu() -> Choice:
    if torch.ops.mkldnn._is_mkldnn_fp16_supported() and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Choice(torch.float16, "this CPU computes in fp16 and not in bf16")
    if _cpu_has("avx512_bf16", "amx_bf16", "bf16"):  # the last is ARM's
        return Choice(torch.bfloat16, "this CPU computes in bf16")
    return Choice(
        torch.bfloat16,
        "bf16 needs no loss scaling",
        "this CPU computes neither in fp16 nor in bf16: mixed precision will be slower than fp32 here",
    )


def _cpu_has(*flags: str) -> bool:
    processor = first_processor()
    if not processor:  # not Linux: believe oneDNN
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    listed = processor.get("flags", processor.get("Features", "")).split()  # the second is ARM's
    return any(flag in listed for flag in flags)


def _asked_for(dtype: torch.dtype, device: torch.device) -> Choice:
    warning = None
    if device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        warning = "this GPU emulates bf16, slowly; fp16 is what it gains from"
    if device.type == "cpu" and dtype is torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        warning = "this CPU has no fp16 arithmetic: expect it to be many times slower than fp32; bf16 is meant for CPUs"
    return Choice(dtype, "as asked for", warning)


class Precision:
    """Autocast and loss scaling of one run; the same calls whether or not either is on."""

    def __init__(self, amp: AmpConfig, device: torch.device) -> None:
        self.choice = choose(amp, device)
        self.device = device
        low = self.choice.dtype is not torch.float32
        self.level = amp.LEVEL if low else "O0"
        self.fp8 = low and amp.DTYPE == "fp8"
        self.validates_in_amp = low and amp.EVAL
        self.tf32 = amp.TF32
        self._in_fp32 = amp.CUSTOM_BLACK_LIST
        # bf16 has fp32's range: nothing underflows, so nothing needs scaling unless asked for.
        scaled = self.choice.dtype is torch.float16 if amp.LOSS_SCALING is None else amp.LOSS_SCALING
        self.scaler = LossScaler(device.type, amp, enabled=low and scaled, half_gradients=self.level == "O3")
        switch_tf32(amp.TF32)

    @property
    def name(self) -> str:
        """fp32, tf32, fp16, bf16 or fp8, and the level where it is not autocast's: 'O2-bf16'. A value of -amp."""
        if self.level == "O0":
            return "tf32" if self.tf32 and self.device.type == "cuda" else "fp32"
        kind = "fp8" if self.fp8 else {torch.float16: "fp16", torch.bfloat16: "bf16"}[self.choice.dtype]
        return kind if self.level == "O1" else f"{self.level}-{kind}"

    @property
    def computes_in_copy(self) -> bool:
        """Whether a half-precision copy of the model computes, and the model keeps the fp32 masters."""
        return self.level in ("O2", "NAIVE")

    def autocast(self, training: bool = True) -> torch.autocast:
        """In validation the masters of O2 and NAIVE run under it too; what is half for good (O3) needs none."""
        enabled = self.level in ("O1", "O2") if training else self.validates_in_amp and self.level != "O3"
        return torch.autocast(self.device.type, self.choice.dtype if enabled else None, enabled=enabled)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Gradients as they would be without scaling; once an update, and before any use of them."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool | Tensor:
        """Move the weights unless a gradient overflowed. Tells whether they moved, without waiting for a GPU.

        The answer is a bool where the host knows it for free, else a tensor of 0 or 1 on the device.
        """
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        overflow = self.scaler.overflow(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        if overflow.device.type == "cpu":
            return not overflow.numpy().any()  # host memory: read in place
        if self.hides_skips(optimizer):
            return overflow == 0
        return not overflow.item()  # for such an optimiser GradScaler has already waited for this value

    def hides_skips(self, optimizer: Optimizer) -> bool:
        """Whether only the device knows of a skipped update: a fused optimiser skips it there, and nobody waits."""
        on_host = self.device.type == "cpu" or not self.scaler.is_enabled()
        return not on_host and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def scale_tensor(self) -> Tensor:
        """The loss scale, left on the device; 1 where nothing is scaled."""
        scale = self.scaler._scale if self.scaler.is_enabled() else None
        return torch.tensor(self.scaler.get_scale()) if scale is None else scale.detach()

    def line(self) -> str:
        """What the banner says of it."""
        if self.level == "O0":
            if self.device.type == "cuda":
                return f"{self.name}, TF32 {'on' if self.tf32 else 'off'}"
            return self.name + " (TF32 was asked for and has no effect here: only CUDA GPUs have it)" * self.tf32
        how = {
            "O1": "by autocast",
            "O2": "weights over fp32 masters, norms in fp32",
            "NAIVE": "weights over fp32 masters, norms too",
            "O3": "weights alone, without fp32 masters",
        }[self.level]
        scaling = "with loss scaling" if self.scaler.is_enabled() else "no loss scaling needed"
        listed = f" with {', '.join(self._in_fp32)} in fp32" * bool(self._in_fp32)
        return f"{self.name} {how}{listed}, {scaling} ({self.choice.reason})"


def switch_tf32(on: bool) -> None:
    """Set either way, in all places: a former setting must not leak into this run."""
    # By the older names as well, and first: torch's compiler and exporter still ask for them, and raise where they
    # contradict the newer ones. They also reach what those leave alone: convolutions, whose own value is TF32 at first,
    # and products, which compiling gives a value of their own. To cuDNN as a whole exporting gives one.
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    for place in (torch.backends, torch.backends.cudnn):
        place.fp32_precision = "tf32" if on else "ieee"  # pyright: ignore[reportAttributeAccessIssue]


def check_amp(amp: AmpConfig, train: TrainConfig) -> None:
    """What cannot work on any device; found before processes start."""
    check_names(amp.CUSTOM_WHITE_LIST, amp.CUSTOM_BLACK_LIST)
    if not amp.ENABLED:
        return
    if amp.DTYPE == "fp8":
        if amp.LEVEL != "O1":
            raise UserError(f"AMP.DTYPE fp8 goes with AMP.LEVEL O1 only, not {amp.LEVEL}.")
        check_fp8()
    if amp.LEVEL in ("NAIVE", "O3"):
        needing = ("CUSTOM_WHITE_LIST", "CUSTOM_BLACK_LIST", "FP32_MODULES", "AUTO_FP32")
        given = [f"AMP.{key}" for key in needing if getattr(amp, key)]
        if given:
            raise UserError(
                f"{', '.join(given)}: AMP.LEVEL {amp.LEVEL} computes everything in half precision, without autocast, "
                "so nothing can be left out of it; use O1 or O2."
            )
    if not amp.EVAL and (amp.DTYPE == "fp8" or amp.LEVEL == "O3"):
        raise UserError(
            f"AMP.EVAL false asks for validation in fp32, but with {'fp8' if amp.DTYPE == 'fp8' else 'AMP.LEVEL O3'} "
            "the model's own layers compute in low precision; leave AMP.EVAL true, or train at another level."
        )
    divides, eps = train.OPTIMIZER.NAME.casefold() not in WITHOUT_EPS, train.OPTIMIZER.EPS or USUAL_EPS
    if divides and amp.LEVEL == "O3" and amp.DTYPE == "fp16" and eps < SMALLEST_EPS_IN_FP16:
        raise UserError(
            "AMP.LEVEL O3 in fp16: squared gradients round to zero in the optimiser's fp16 state, and "
            f"TRAIN.OPTIMIZER.EPS {eps:g}, all that is left to divide by, makes the first updates "
            f"explode or NaN. Set it to {SMALLEST_EPS_IN_FP16:g} or more, or use bf16, or O2, which keeps fp32 masters."
        )


def check_precision(amp: AmpConfig, device: torch.device) -> None:
    """Mixed precision that this device cannot do at all."""
    if amp.ENABLED and amp.DTYPE in ("bf16", "fp8") and device.type == "mps":
        raise UserError(f"AMP.DTYPE {amp.DTYPE} on mps is not supported by torch; use fp16.")
