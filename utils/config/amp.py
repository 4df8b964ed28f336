"""The settings of the section AMP."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from utils.config.fields import Section
from utils.config.kinds import AboveZero, Names, Positive


class AmpConfig(Section):
    """Mixed precision."""

    ENABLED: bool = Field(default=False, description="Train in mixed precision; set by -amp.")
    DTYPE: Literal["auto", "fp16", "bf16", "fp8"] = Field(
        default="auto",
        description="auto: fp16 on GPUs, bf16 on CPUs and with O3, fp16 on CPUs without bf16. fp8 needs torchao.",
    )
    LEVEL: Literal["O0", "O1", "O2", "NAIVE", "O3"] = Field(
        default="O1",
        description=(
            "O0: fp32. O1: autocast. O2: half-precision weights with fp32 master weights, norms in fp32. "
            "NAIVE: as O2, with norms in half precision. O3: half-precision weights only."
        ),
    )
    FP8_RECIPE: Literal["tensorwise", "rowwise"] = Field(
        default="tensorwise", description="fp8: one scale per tensor, or one per row (more precise, slower)."
    )
    TF32: bool = Field(
        default=False, description="Use TF32 for fp32 matrix products and convolutions, on GPUs that have it."
    )
    EVAL: bool = Field(default=True, description="Validate under autocast as well.")
    LOSS_SCALING: bool | None = Field(default=None, description="Scale the loss; null: in fp16 only, which needs it.")
    INIT_LOSS_SCALING: AboveZero = Field(default=65536.0, description="Initial loss scale.")
    INCR_EVERY_N_STEPS: Positive = Field(
        default=2000, description="Updates without overflow before the loss scale grows."
    )
    INCR_RATIO: float = Field(default=2.0, gt=1, description="Factor by which the loss scale grows.")
    DECR_RATIO: float = Field(
        default=0.5, gt=0, lt=1, description="Factor by which the loss scale shrinks after overflows."
    )
    DECR_EVERY_N_NAN_OR_INF: Positive = Field(
        default=1, description="Consecutive overflows before the loss scale shrinks."
    )
    USE_DYNAMIC_LOSS_SCALING: bool = Field(
        default=True, description="false: the loss scale stays at its initial value."
    )
    CUSTOM_WHITE_LIST: Names = Field(default=(), description="Operators that run in low precision; see docs/amp.md.")
    CUSTOM_BLACK_LIST: Names = Field(default=(), description="Operators that run in fp32; see docs/amp.md.")
    FP32_MODULES: Names = Field(default=(), description="Modules that run in fp32: globs over their names or classes.")
    STOP_AFTER_SKIPS: Positive | None = Field(
        default=100, description="Save and stop after so many consecutive skipped updates; null: never."
    )
    AUTO_FP32: bool = Field(default=False, description="Move a module that overflows repeatedly to fp32.")
