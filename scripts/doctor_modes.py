"""The precisions that the doctor compares: what each is called, set by, and where it makes sense."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.fp8 import hardware_has_fp8
from engine.precision import check_amp, check_precision
from utils.config import AmpConfig, Config
from utils.errors import UserError, nearest

FIRST_WITH_TF32 = (8, 0)
UPDATES_WITHOUT_ARITHMETIC = 20
"""Of fp16 on a CPU that has to emulate it: enough to see its health, where its speed is known to be bad."""


@dataclass(frozen=True)
class Mode:
    name: str
    level: str
    dtype: str = ""
    tf32: bool = False
    usual: bool = True
    """Whether it is compared without being asked for."""

    def amp(self, user: AmpConfig) -> AmpConfig:
        """The user's settings with this precision; what they say of scaling, lists and modules stays."""
        if not self.dtype:
            return user.model_copy(update={"ENABLED": False, "TF32": self.tf32})
        return user.model_copy(update={"ENABLED": True, "DTYPE": self.dtype, "LEVEL": self.level})

    def flags(self, user: AmpConfig) -> str:
        """What leads to it on a command line whose settings are `user`, in place of the -amp that it may have."""
        if not self.dtype:
            words = ["-amp off"] + [f"AMP.TF32={str(self.tf32).lower()}"] * (self.tf32 or user.TF32)
        elif self.level == "O1":
            words = [f"-amp {self.dtype}"] + ["AMP.LEVEL=O1"] * (user.LEVEL != "O1")
        else:
            words = [f"-amp {self.level}", f"AMP.DTYPE={self.dtype}"]
        return " ".join(words)


REFERENCE = Mode("fp32", "O0")
# In the order of preference between equally fast ones: what changes least comes first.
MODES = (
    REFERENCE,
    Mode("tf32", "O0", tf32=True),
    Mode("bf16", "O1", "bf16"),
    Mode("fp16", "O1", "fp16"),
    Mode("O2-bf16", "O2", "bf16"),
    Mode("O2-fp16", "O2", "fp16"),
    Mode("fp8", "O1", "fp8"),
    Mode("NAIVE-bf16", "NAIVE", "bf16"),
    Mode("NAIVE-fp16", "NAIVE", "fp16"),
    Mode("O3-bf16", "O3", "bf16", usual=False),
)
BY_NAME = {mode.name.casefold(): mode for mode in MODES}


@dataclass(frozen=True)
class Plan:
    modes: tuple[Mode, ...]
    """Those to compare with fp32."""
    left_out: dict[str, str]
    """Name -> why."""


def read_modes(text: str) -> tuple[Mode, ...]:
    """`bf16,O2-fp16` -> what to compare; fp32 takes part in any case."""
    found: dict[str, Mode] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name.casefold() not in BY_NAME:
            names = [mode.name for mode in MODES]
            raise UserError(f"-modes: there is no {name!r}.{nearest(name, names)} Known are {', '.join(names)}.")
        mode = BY_NAME[name.casefold()]
        found[mode.name] = mode
    return tuple(mode for mode in MODES[1:] if mode.name in found)


def plan(config: Config, device: torch.device, asked_for: Iterable[Mode] | None) -> Plan:
    """What can be compared on this device. A mode that was asked for and cannot run is an error."""
    if asked_for is not None:
        modes = tuple(asked_for)
        for mode in modes:
            reason = cannot(mode, config, device)
            if reason:
                raise UserError(f"-modes {mode.name}: {reason}")
        return Plan(modes, {})
    left_out: dict[str, str] = {}
    for mode in MODES[1:]:
        reason = cannot(mode, config, device) or _not_worth_it(mode, device)
        if mode.usual and reason:
            left_out[mode.name] = reason
    return Plan(tuple(m for m in MODES[1:] if m.usual and m.name not in left_out), left_out)


def cannot(mode: Mode, config: Config, device: torch.device) -> str | None:
    """Why this mode cannot run here at all."""
    if mode.tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_WITH_TF32):
        return "TF32 is a feature of NVIDIA GPUs from Ampere (compute capability 8.0) on; this device has none."
    amp = mode.amp(config.AMP)
    try:
        check_amp(amp, config.TRAIN)
        check_precision(amp, device)
    except UserError as error:
        return str(error)
    return None


def lacks_arithmetic(mode: Mode, device: torch.device) -> bool:
    """fp16 on a CPU that has to take a detour for every product."""
    return mode.dtype == "fp16" and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def is_emulated(mode: Mode, device: torch.device) -> bool:
    """Whether its numbers are right and its speed says nothing about real hardware."""
    return mode.dtype == "fp8" and not hardware_has_fp8(device)


def _not_worth_it(mode: Mode, device: torch.device) -> str | None:
    if mode.level in ("O2", "NAIVE") and lacks_arithmetic(mode, device):
        return "this CPU has no fp16 arithmetic; a few updates of plain fp16 show what there is to see."
    return None
