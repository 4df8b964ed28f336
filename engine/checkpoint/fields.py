"""Fields of a checkpoint's state.pt that a resumed run or a tool reads. Others are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from utils.record.meta import BestState, Count, Fields, Number


class Group(Fields):
    params: list[Count]


class OptimizerState(Fields):
    state: dict[int, dict[str, Any]]
    param_groups: Annotated[list[Group], Field(min_length=1)]


class ScalerState(Fields):
    scale: Annotated[float, Field(gt=0)]
    growth_tracker: Annotated[Count, Field(alias="_growth_tracker")]
    bad_in_a_row: Count


class Skips(Fields):
    model_config = ConfigDict(extra="forbid")

    replays: Count = 0
    last_replay: Count = 0
    passed_over: Count = 0
    blamed: dict[str, Count] = Field(default_factory=dict)


class PositionState(Fields):
    epoch: Number
    step: Count
    update: Count
    validated: Count


class MeterState(Fields):
    epoch: Annotated[list[float], Field(min_length=4, max_length=4)]
    skipped: Count
    skipped_in_a_row: Count


class MovedModules(Fields):
    """Fields of state.pt that tools read."""

    fp32_modules: list[str]


class State(MovedModules):
    """state.pt"""

    optimizer: OptimizerState
    optimizer_name: str
    trained: list[str]
    moved: Count
    scaler: Annotated[dict[str, Any], Field(max_length=0)] | ScalerState
    """Empty if loss scaling is off."""
    skips: Skips = Skips()
    ema_updates: Count = 0
    position: PositionState
    best: BestState
    meters: MeterState
    global_batch: Number

    @model_validator(mode="after")
    def _names_all_weights(self) -> State:
        groups = sum(len(group.params) for group in self.optimizer.param_groups)
        if len(self.trained) != groups:
            raise ValueError(f"'trained' names {len(self.trained)} weights, but the optimizer has {groups}")
        return self
