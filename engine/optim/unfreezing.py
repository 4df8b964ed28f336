"""MODEL.UNFREEZE_EPOCH: frozen weights are trained from the start of an epoch on.

The optimiser has them from the first update. Without a gradient it leaves a weight as it is, weight decay included, so
nothing happens to them before, and their moments begin with their first gradient. All that depends on which weights are
trained is attached anew, as a run that is resumed at this epoch attaches it.
"""

from __future__ import annotations

from torch import nn

from engine.callback import Callback, Computing
from models.freeze import unfreeze
from models.parts import count_parameters
from utils.config.model import ModelConfig
from utils.log import log


class Unfreezing(Callback):
    def __init__(self, model: ModelConfig, sharded: bool) -> None:
        self._settings, self._sharded = model, sharded

    def attach(self, to: Computing) -> None:
        self._model, self._optimizer = to.model, to.optimizer

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        names = [] if self._settings.frozen_in(epoch) else unfreeze(self._model)
        if not names:
            return False
        thawed = {id(self._model.get_parameter(name)) for name in names}
        groups = [one for one in self._optimizer.param_groups if thawed & set(map(id, one["params"]))]
        ends = (f"{end(float(group['lr']) for group in groups):.3e}" for end in (min, max))
        log.info(
            "MODEL.UNFREEZE_EPOCH: from epoch %d on, %d frozen tensors (%s parameters) are trained too, at learning "
            "rate %s; %s parameters are trained in all.",
            epoch,
            len(names),
            f"{sum(self._model.get_parameter(name).numel() for name in names):,}",
            " to ".join(dict.fromkeys(ends)),
            f"{count_parameters(self._model)[1]:,}",
        )
        if self._sharded:
            from engine.parallel.fsdp import read_trained_weights

            read_trained_weights(self._model)
        return True
