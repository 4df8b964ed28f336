"""Settings that are gone: a file or a run may still have them, with the value that the program now always uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from utils.errors import UserError


class Retired(NamedTuple):
    """A setting that is gone."""

    values: tuple[str, ...]
    """Values that change nothing, as text in small letters."""
    now: str
    """What the program does instead."""
    last: str = "0.1.0"
    """The last version that has the setting."""
    in_runs: tuple[str, ...] = ()
    """Values that a saved run may have besides, since it goes on without them."""


RETIRED: dict[str, Retired] = {
    "AMP.FP8_RECIPE": Retired(("tensorwise",), "fp8 has one scale per tensor"),
    "CPU_BF16": Retired(("auto", "onednn"), "oneDNN multiplies bf16 matrices on a CPU", in_runs=("amx",)),
    "TRAIN.RESIDUAL_DTYPE": Retired(
        ("fp32",), "the residual stream between blocks is fp32; in 16 bits, one of eight seeds collapsed"
    ),
    "DIST.STATIC_GRAPH": Retired(("false",), "DDP finds out in each update which weights have gradients"),
    "DIST.BF16_GRADIENTS": Retired(("false",), "gradients are all-reduced in their own precision"),
    "SAVE_IN_BACKGROUND": Retired(
        ("true",),
        "checkpoints are written while training continues, unless there is no memory for a copy",
        in_runs=("false",),
    ),
    "DATA.DCT_SCALE": Retired(("false",), "JPEG files are decoded in full size"),
    "TRAIN.OPTIMIZER.LIST": Retired(
        ("false",), "the log names the optimiser and the size of Muon's groups", in_runs=("true",)
    ),
    "TRAIN.OPTIMIZER.MUON.NS_STEPS": Retired(("5",), "Muon orthogonalises by 5 Newton-Schulz steps"),
    "TRAIN.OPTIMIZER.MUON.NS_DTYPE": Retired(("auto",), "Newton-Schulz steps compute in bf16 with AMP, else in fp32"),
    "TRAIN.OOM": Retired(
        ("stop", "split"), "no update is split; DATA.BATCH_SIZE=auto finds a batch that fits into memory"
    ),
}


def refusal_of(key: str, value: Any, in_run: bool = False) -> str | None:
    """Why a retired setting cannot have this value; None if it can. `in_run`: a saved run has it."""
    retired = RETIRED[key]
    text = str(value).strip().casefold()
    if text in retired.values or (in_run and text in retired.in_runs):
        return None
    return f"{key} {value} is retired: {retired.now}. Version {retired.last} of vitamp is the last that has it."


def without_retired(values: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The saved settings of a run without retired ones; UserError for one that the program cannot follow any more."""
    refused = [text for key, value in values.items() if key in RETIRED and (text := refusal_of(key, value, True))]
    if refused:
        raise UserError(f"{where}: {' '.join(refused)}")
    return {key: value for key, value in values.items() if key not in RETIRED}
