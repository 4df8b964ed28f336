"""The precisions that the tools compare: names, settings, and the devices they are useful on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from engine.amp.low_precision import hardware_has_fp8
from engine.amp.precision import check_amp, check_precision, choose
from utils.config import AmpConfig, Config
from utils.errors import UserError, nearest
from utils.precisions import AMP_WORDS, PRECISIONS, amp_settings_of

FIRST_WITH_TF32 = (8, 0)
UPDATES_WITHOUT_ARITHMETIC = 20
"""For fp16 on a CPU that emulates it: enough to see whether it trains; its speed is known to be bad."""


@dataclass(frozen=True)
class Mode:
    name: str
    usual: bool = True
    """Whether choose_precision.py compares it by default."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of the AMP section -> values."""
        return PRECISIONS[self.name]

    @property
    def level(self) -> str:
        return self.settings.get("LEVEL", "O0")

    @property
    def dtype(self) -> str:
        """fp16, bf16, fp8 or auto; empty for fp32 and tf32."""
        return self.settings.get("DTYPE", "")

    @property
    def tf32(self) -> bool:
        return self.settings.get("TF32", False)

    def amp(self, user: AmpConfig) -> AmpConfig:
        """The user's AMP section with this precision; loss scaling and lists of modules stay, with auto the dtype."""
        return user.model_copy(update=self.settings | ({"DTYPE": user.DTYPE} if self.dtype == "auto" else {}))

    def flags(self, user: AmpConfig) -> str:
        """Flags that select this precision, given the user's other settings; they replace -amp."""
        if not self.dtype:
            words = ["-amp off"] + [f"AMP.TF32={str(self.tf32).lower()}"] * (self.tf32 or user.TF32)
        else:  # -amp bf16 leaves the level to the other settings
            words = [f"-amp {self.name}"] + ["AMP.LEVEL=O1"] * (self.level == "O1" != user.LEVEL)
            words += [f"AMP.DTYPE={user.DTYPE}"] * (self.dtype == "auto" != user.DTYPE)  # as `amp` keeps it
        return " ".join(words)


REFERENCE = Mode("fp32")
APEX = Mode("apex", usual=False)
# In order of preference between equally fast ones: the smallest change comes first.
MODES = (
    REFERENCE,
    *map(Mode, ("tf32", "bf16", "fp16", "O2-bf16", "O2-fp16", "fp8", "NAIVE-bf16", "NAIVE-fp16")),
    APEX,
    *(Mode(name, usual=False) for name in ("O3-bf16", "O3-fp16")),
)
BY_NAME = {mode.name.casefold(): mode for mode in MODES}


@dataclass(frozen=True)
class Plan:
    modes: tuple[Mode, ...]
    """Precisions to compare with fp32."""
    left_out: dict[str, str]
    """Name -> reason."""


def mode_of(word: str, amp: AmpConfig, device: torch.device) -> Mode | None:
    """Precision that `-amp WORD` selects on this device; None for an unknown word. O2:bf16 is O2-bf16."""
    name = word.replace(":", "-").casefold().removeprefix("o1-")
    if name in BY_NAME:
        return BY_NAME[name]
    if name == "o0":
        return REFERENCE
    settings = amp_settings_of(name)
    if settings is None:
        return None
    if not settings["ENABLED"]:
        return REFERENCE
    level = settings.get("LEVEL", "O1")
    chosen = choose(amp.model_copy(update={"ENABLED": True, "DTYPE": "auto", "LEVEL": level}), device).dtype
    if chosen is torch.float32:  # a CPU without 16-bit arithmetic
        return REFERENCE
    dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}[chosen]
    return BY_NAME[(dtype if level == "O1" else f"{level}-{dtype}").casefold()]


def unknown_mode(word: str) -> UserError:
    names = list(dict.fromkeys([*(mode.name for mode in MODES), *AMP_WORDS.split()]))
    return UserError(f"-modes: unknown {word!r}.{nearest(word, names)} It takes {', '.join(names)}.")


def read_modes(text: str, amp: AmpConfig, device: torch.device) -> tuple[Mode, ...]:
    """Parse -modes, such as `bf16,O2-fp16`; fp32 is compared in any case."""
    names: set[str] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        mode = mode_of(word, amp, device)
        if mode is None:
            raise unknown_mode(word)
        names.add(mode.name)
    return tuple(mode for mode in MODES[1:] if mode.name in names)


def plan(config: Config, device: torch.device, asked_for: Iterable[Mode] | None) -> Plan:
    """Plan what to compare. A precision in -modes that cannot run on this device is an error."""
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
    """Why this precision cannot run on this device; None if it can."""
    if mode.tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_WITH_TF32):
        return "this device has no TF32, which needs an NVIDIA GPU of compute capability 8.0 (Ampere) or higher."
    amp = mode.amp(config.AMP)
    try:
        check_amp(amp, config.TRAIN)
        check_precision(amp, device)
    except UserError as error:
        return str(error)
    return None


def lacks_arithmetic(mode: Mode, device: torch.device) -> bool:
    """Whether it is fp16 on a CPU without fp16 arithmetic, which emulates every product."""
    return mode.dtype == "fp16" and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def is_emulated(mode: Mode, device: torch.device) -> bool:
    """Whether it is emulated: its results are right, and its speed is meaningless."""
    return mode.dtype == "fp8" and not hardware_has_fp8(device)


def _not_worth_it(mode: Mode, device: torch.device) -> str | None:
    if mode.level in ("O2", "NAIVE") and lacks_arithmetic(mode, device):
        return "this CPU has no fp16 arithmetic; a few updates of mode fp16 show whether the model trains in fp16."
    return None
