"""The names of precisions: the values of -amp and -modes, and the settings of AMP that each stands for."""

from typing import Any

DTYPES = ("fp16", "bf16", "fp8")
LEVELS = ("O1", "O2", "O3", "NAIVE")
APEX_FP32 = ("gelu", "layer_norm", "softmax")
"""Operators that apex's O1 runs in fp32 and autocast does not."""

ON = {"ENABLED": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"ENABLED": False, "TF32": False},
    "tf32": {"ENABLED": False, "TF32": True},
    **{dtype: {**ON, "DTYPE": dtype, "LEVEL": "O1"} for dtype in DTYPES},
    **{
        f"{level}-{dtype}": {**ON, "DTYPE": dtype, "LEVEL": level}
        for level in ("O2", "NAIVE", "O3")
        for dtype in ("fp16", "bf16")
    },
    "apex": {**ON, "DTYPE": "auto", "LEVEL": "O1", "CUSTOM_WHITE_LIST": (), "CUSTOM_BLACK_LIST": APEX_FP32},
}
"""Complete precisions: each with all settings of AMP that define it."""

AMP_SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {**ON, "DTYPE": "auto"},
    "off": {"ENABLED": False},
    # A dtype leaves LEVEL to other settings, and a level leaves DTYPE to them.
    **{dtype: {**ON, "DTYPE": dtype} for dtype in DTYPES},
    **{level: {**ON, "LEVEL": level} for level in LEVELS},
    **dict.fromkeys(("on", "yes", "true"), ON),
    **{word: {"ENABLED": False} for word in ("no", "false", "O0")},
    "torch": {**ON, "DTYPE": "auto", "LEVEL": "O1"},
}
AMP_SETTINGS |= {name: settings for name, settings in PRECISIONS.items() if name not in AMP_SETTINGS}
"""Each value of -amp -> the settings of AMP that it sets."""
AMP_WORDS = " ".join(AMP_SETTINGS)
_BY_WORD = {word.casefold(): settings for word, settings in AMP_SETTINGS.items()}


def amp_settings_of(word: str) -> dict[str, Any] | None:
    """The settings of AMP that a value of -amp sets; None for an unknown value. Case does not matter."""
    return _BY_WORD.get(word.casefold())
