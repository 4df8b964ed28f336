"""Define the precisions that the tools compare: names, settings, and the devices they are useful on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.amp.low_precision import hardware_has_fp8
from engine.amp.precision import check_amp, choose, dtype_name
from models.build import build_without_weights
from utils.config import AmpConfig, Config
from utils.errors import UserError, nearest
from utils.precisions import AMP_WORDS, PRECISIONS, amp_settings_of


@dataclass(frozen=True)
class Mode:
    """A precision that the tools compare, such as bf16 or O2-fp16."""

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the AMP section that select this precision."""
        return PRECISIONS[self.name]

    @property
    def level(self) -> str:
        """The value of AMP.LEVEL; 'O0' for fp32 and tf32."""
        return self.settings.get("LEVEL", "O0")

    @property
    def dtype(self) -> str:
        """fp16, bf16, fp8 or auto; empty for fp32 and tf32."""
        return self.settings.get("DTYPE", "")

    @property
    def tf32(self) -> bool:
        return self.settings.get("TF32", False)

    def amp(self, user: AmpConfig) -> AmpConfig:
        """Return the AMP settings `user` with this precision in place of theirs.

        Loss scaling and lists of modules stay. So does the dtype if this precision is one whose dtype is `auto`.
        """
        changes = self.settings
        if self.dtype == "auto":
            changes = changes | {"DTYPE": user.DTYPE}
        return user.changed(**changes)

    def flags(self, user: AmpConfig) -> str:
        """Return the flags that select this precision in a command that has the AMP settings `user`.

        They replace -amp in that command. A setting is among them only if -amp alone would not give it.
        """
        words = []
        if not self.dtype:  # fp32 or tf32
            words.append("-amp off")
            if self.tf32 or user.TF32:  # TF32 is to be turned on, or was turned on and is to be turned off
                words.append(f"AMP.TF32={str(self.tf32).lower()}")
            return " ".join(words)
        words.append(f"-amp {self.name}")
        if self.level == "O1" and user.LEVEL != "O1":  # -amp bf16 would leave the level as it is
            words.append("AMP.LEVEL=O1")
        if self.dtype == "auto" and user.DTYPE != "auto":  # the method `amp` keeps the dtype that the user chose
            words.append(f"AMP.DTYPE={user.DTYPE}")
        return " ".join(words)


# In order of preference between equally fast ones: the smallest change comes first.
NAMES = "fp32 tf32 bf16 fp16 O2-bf16 O2-fp16 fp8 NAIVE-bf16 NAIVE-fp16 apex O3-bf16 O3-fp16"
MODES = tuple(map(Mode, NAMES.split()))
REFERENCE = MODES[0]
BY_NAME = {mode.name.casefold(): mode for mode in MODES}


def mode_of(word: str, amp: AmpConfig, device: torch.device, model: nn.Module | None = None) -> Mode | None:
    """Return the precision that `-amp WORD` selects for `model` on this device; None for an unknown word.

    `word` is the name of a precision, such as O2-bf16, which may be written with a colon (O2:bf16) or with the default
    level (O1-bf16 for bf16); or another value of -amp, such as off or auto. `amp`: the other AMP settings.
    """
    name = word.replace(":", "-").casefold().removeprefix("o1-")
    if name in BY_NAME:
        return BY_NAME[name]

    # The other values of -amp are settings, from which the program chooses the precision.
    settings = amp_settings_of(name)
    if settings is None:
        return None
    if not settings["ENABLED"]:
        return REFERENCE
    amp = amp.changed(**settings)  # the word may leave the level or the dtype as it is
    check_amp(amp, None)  # refuses fp8 at levels other than O1
    chosen_dtype = choose(amp, device, model).dtype
    if chosen_dtype is torch.float32:  # a CPU without 16-bit arithmetic, or a model that it slows down
        return REFERENCE
    dtype = "fp8" if amp.DTYPE == "fp8" else dtype_name(chosen_dtype)  # with fp8, the other operators have a 16-bit one
    full_name = dtype if amp.LEVEL == "O1" else f"{amp.LEVEL}-{dtype}"
    return BY_NAME[full_name.casefold()]


def modes_named(text: str, config: Config, device: torch.device) -> list[tuple[str, Mode]]:
    """Parse the value of -modes, such as `bf16,O2-fp16`, into each word and its precision."""
    modes = []
    data = config.DATA
    model = build_without_weights(config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
    for word in filter(None, map(str.strip, text.split(","))):
        mode = mode_of(word, config.AMP, device, model)
        if mode is None:
            names = list(dict.fromkeys([mode.name for mode in MODES] + AMP_WORDS.split()))
            raise UserError(f"-modes: unknown {word!r}.{nearest(word, names)} It takes {', '.join(names)}.")
        reason = cannot(mode, config, device)
        if reason:
            raise UserError(f"-modes {mode.name}: {reason}")
        modes.append((word, mode))
    return modes


def modes_to_measure(text: str | None, config: Config, device: torch.device) -> tuple[tuple[Mode, ...], dict[str, str]]:
    """Return the precisions to compare with fp32, in order of preference; and name -> reason of each that is left out.

    `text`: the value of -modes, which lists precisions; then no reasons are given. With None, all precisions that are
    useful on this device are compared.
    """
    if text is not None:
        listed = {mode for _, mode in modes_named(text, config, device)}
        return tuple(mode for mode in MODES[1:] if mode in listed), {}
    left_out: dict[str, str] = {}
    for mode in MODES[1:]:
        why_useless = emulated(mode, device)
        if not why_useless and mode.name == "apex":
            why_useless = "autocast with other operator lists"
        elif not why_useless and mode.level == "O3":
            why_useless = "keeps no fp32 master weights"
        # That it cannot run is the stronger reason; a useless one can be measured if the user lists it.
        reason = cannot(mode, config, device)
        if not reason and why_useless:
            reason = f"{why_useless} (list it in -modes to measure it anyway)"
        if reason:
            left_out[mode.name] = reason
    return tuple(mode for mode in MODES[1:] if mode.name not in left_out), left_out


def cannot(mode: Mode, config: Config, device: torch.device) -> str | None:
    """Explain why this precision cannot run on this device; None if it can."""
    if mode.tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        return "this device has no TF32, which needs an NVIDIA GPU of compute capability 8.0 (Ampere) or higher."
    amp = mode.amp(config.AMP)
    try:
        check_amp(amp, config.TRAIN)
    except UserError as error:
        return str(error)
    return None


def emulated(mode: Mode, device: torch.device) -> str:
    """Explain that this device only emulates the precision, so its speed says nothing; '' if it does not."""
    is_fp16_on_cpu = mode.dtype == "fp16" and device.type == "cpu"
    fp16_is_emulated = is_fp16_on_cpu and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    is_emulated = fp16_is_emulated or (mode.dtype == "fp8" and not hardware_has_fp8(device))
    return "emulated on this device, so it is slow, and its speed is meaningless" if is_emulated else ""
