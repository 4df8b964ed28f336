"""MODEL.UNFREEZE_EPOCH: frozen weights are trained from the start of an epoch on.

The optimiser has them from the first update. Without a gradient it leaves a weight as it is, weight decay included, so
nothing happens to them before, and their moments begin with their first gradient. All that depends on which weights are
trained is attached anew, as a run that is resumed at this epoch attaches it.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from engine.ability import Ability, Computing
from engine.parallel.fsdp import read_trained_weights
from models import count_parameters, unfreeze
from utils.config.model import ModelConfig
from utils.log import log


class Unfreezing(Ability):
    def __init__(self, model: ModelConfig, sharded: bool) -> None:
        self._settings, self._sharded = model, sharded

    def attach(self, to: Computing) -> None:
        self._model, self._optimizer = to.model, to.optimizer

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        names = [] if self._settings.frozen_in(epoch) else unfreeze(self._model)
        if not names:
            return False
        log.info(_words(self._model, self._optimizer, names, epoch))
        if self._sharded:
            read_trained_weights(self._model)
        return True


def _words(model: nn.Module, optimizer: Optimizer, names: list[str], epoch: int) -> str:
    thawed = {id(model.get_parameter(name)) for name in names}
    groups = [group for group in optimizer.param_groups if thawed & set(map(id, group["params"]))]
    ends = (f"{end(float(group['lr']) for group in groups):.3e}" for end in (min, max))
    number = sum(model.get_parameter(name).numel() for name in names)
    return (
        f"MODEL.UNFREEZE_EPOCH: from epoch {epoch} on, {len(names)} frozen tensors ({number:,} parameters) are "
        f"trained too, at learning rate {' to '.join(dict.fromkeys(ends))}; {count_parameters(model)[1]:,} "
        "parameters are trained in all."
    )
