"""The ability of TRAIN.COMPILE. What compiles, `compiled`, is imported only where something is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.ability import Ability, Computing
from engine.amp.precision import Precision
from engine.compile.choice import NONE, CompileChoice
from utils.config.data import DataConfig
from utils.distributed.world import World

if TYPE_CHECKING:
    from engine.compile.compiled import Compiled


class Compiling(Ability):
    """Compiles the forward and backward pass, once `choice` says so."""

    def __init__(self, data: DataConfig, precision: Precision, world: World, sharded: bool) -> None:
        self.choice = CompileChoice(NONE, "default", "a trial")
        self._data, self._precision, self._world, self._sharded = data, precision, world, sharded
        self._compiled: Compiled | None = None

    def noted(self) -> dict[str, str]:
        return self.choice.as_noted()

    def rows(self) -> dict[str, str]:
        return {"compile": f"{self.choice.how} ({self.choice.reason})"}

    def attach(self, to: Computing) -> None:
        """Compile the modules that compute now."""
        if self.choice.how == NONE:
            return
        from engine.compile.compiled import Compiled

        if self._compiled is None:
            self._compiled = Compiled(self.choice, self._data, self._precision, self._world, self._sharded)
        self._compiled.attach(to)
