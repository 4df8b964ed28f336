"""The settings of the section AMP."""

from __future__ import annotations

from typing import Literal

from utils.config.fields import Section, setting
from utils.config.kinds import AboveZero, Names, Positive
from utils.config.rules import excludes, only_with

_ON = only_with("AMP.ENABLED", why="-amp turns AMP on")


class AmpConfig(Section):
    """Mixed precision."""

    ENABLED: bool = setting(False, "Train in mixed precision; set by -amp.")
    DTYPE: Literal["auto", "fp16", "bf16", "fp8"] = setting(
        "auto",
        "auto: bf16 with O3, else fp16 on GPUs and bf16 on CPUs (fp16 if a CPU has fp16 but no bf16). fp8 needs "
        "torchao.",
        _ON,
        excludes(
            "DIST.STRATEGY=fsdp",
            at="fp8",
            why="FSDP with fp8 is not supported",
            do="use bf16 or fp16, or DIST.STRATEGY=ddp",
        ),
    )
    LEVEL: Literal["O0", "O1", "O2", "NAIVE", "O3"] = setting(
        "O1",
        "O0: fp32. O1: autocast. O2: half-precision weights with fp32 master weights, norms in fp32. NAIVE: as O2, "
        "but only batch norms in fp32. O3: half-precision weights only.",
        _ON,
        excludes("DIST.STRATEGY=fsdp", at="O3", why="FSDP with O3 is not supported", do="use O1, O2 or NAIVE"),
    )
    TF32: bool = setting(False, "Use TF32 for fp32 matrix products and convolutions, on GPUs that have it.")
    EVAL: bool = setting(
        True,
        "Validate under autocast as well.",
        _ON,
        excludes(
            "DIST.STRATEGY=fsdp",
            when="AMP.LEVEL=O2|NAIVE",
            why="it asks for validation in fp32, but FSDP gathers weights only in half precision",
            do="leave AMP.EVAL true, or use AMP.LEVEL=O1",
        ),
    )
    LOSS_SCALING: bool | None = setting(None, "Scale the loss; null: only in fp16, which needs it.", _ON)
    INIT_LOSS_SCALING: AboveZero = setting(65536.0, "Initial loss scale.", _ON, le=3e38)
    INCR_EVERY_N_STEPS: Positive = setting(
        2000, "Consecutive updates without overflow before the loss scale grows.", _ON
    )
    INCR_RATIO: float = setting(2.0, "Factor by which the loss scale grows.", _ON, gt=1)
    DECR_RATIO: float = setting(0.5, "Factor by which the loss scale shrinks after overflows.", _ON, gt=0, lt=1)
    DECR_EVERY_N_NAN_OR_INF: Positive = setting(1, "Consecutive overflows before the loss scale shrinks.", _ON)
    USE_DYNAMIC_LOSS_SCALING: bool = setting(True, "false: the loss scale stays at its initial value.", _ON)
    CUSTOM_WHITE_LIST: Names = setting((), "Operators that run in low precision; see docs/amp.md.", _ON)
    CUSTOM_BLACK_LIST: Names = setting((), "Operators that run in fp32; see docs/amp.md.", _ON)
    FP32_MODULES: Names = setting((), "Modules that run in fp32: globs over their names or classes.", _ON)
    STOP_AFTER_SKIPS: Positive | None = setting(
        100, "Save and stop after this many consecutive skipped updates; null: never.", _ON
    )
    AUTO_FP32: bool = setting(
        False,
        "Switch a module to fp32 at its second overflow; overflows in the backward pass count only at loss scale 1.",
        _ON,
        excludes(
            "DIST.STRATEGY=fsdp",
            why="vitamp does not replay skipped updates of FSDP to find the module that overflowed",
            do="name the modules in AMP.FP32_MODULES",
        ),
    )
