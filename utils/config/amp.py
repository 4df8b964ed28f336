"""The settings of the section AMP."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from utils.config.fields import Section
from utils.config.kinds import AboveZero, Names, Positive


class AmpConfig(Section):
    """Mixed precision."""

    ENABLED: bool = Field(default=False, description="Train in mixed precision; what -amp sets.")
    DTYPE: Literal["auto", "fp16", "bf16", "fp8"] = Field(
        default="auto",
        description="auto: fp16 on a GPU, bf16 on a CPU and with O3; fp16 on a CPU without bf16. fp8 needs torchao.",
    )
    LEVEL: Literal["O0", "O1", "O2", "NAIVE", "O3"] = Field(
        default="O1",
        description=(
            "O0: fp32. O1: autocast. O2: half weights over fp32 masters, norms in fp32. NAIVE: the same, norms too. "
            "O3: half weights alone."
        ),
    )
    FP8_RECIPE: Literal["tensorwise", "rowwise"] = Field(
        default="tensorwise", description="fp8: one scale a tensor, or one a row (more exact, slower)."
    )
    TF32: bool = Field(
        default=False, description="Let fp32 matrix products and convolutions run as TF32 on GPUs that have it."
    )
    EVAL: bool = Field(default=True, description="Validate under autocast as well.")
    LOSS_SCALING: bool | None = Field(default=None, description="Scale the loss; null: in fp16 only, which needs it.")
    INIT_LOSS_SCALING: AboveZero = Field(default=65536.0, description="Loss scale at the start.")
    INCR_EVERY_N_STEPS: Positive = Field(default=2000, description="Clean updates before the scale grows.")
    INCR_RATIO: float = Field(default=2.0, gt=1, description="Factor of a growth.")
    DECR_RATIO: float = Field(default=0.5, gt=0, lt=1, description="Factor of a cut after an overflow.")
    DECR_EVERY_N_NAN_OR_INF: Positive = Field(default=1, description="Overflows in a row before the scale is cut.")
    USE_DYNAMIC_LOSS_SCALING: bool = Field(default=True, description="false: the scale stays where it starts.")
    CUSTOM_WHITE_LIST: Names = Field(
        default=(), description="Operators that run in the low precision; see docs/amp.md."
    )
    CUSTOM_BLACK_LIST: Names = Field(default=(), description="Operators that run in fp32; see docs/amp.md.")
    FP32_MODULES: Names = Field(default=(), description="Modules that run in fp32: globs over their names or classes.")
    STOP_AFTER_SKIPS: Positive | None = Field(
        default=100, description="Save and stop after this many skipped updates in a row; null: never."
    )
    AUTO_FP32: bool = Field(default=False, description="Move a module that overflows again and again to fp32.")
