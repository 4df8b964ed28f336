"""Callbacks for what changes with the epoch: dropped tokens, image sizes, and which weights are trained."""

from __future__ import annotations

import math

from timm.layers.patch_dropout import PatchDropout
from torch import nn

from engine.callback import Callback, Computing, Figure
from models.freeze import unfreeze
from models.parts import count_parameters
from utils.config.model import ModelConfig
from utils.config.train import TrainConfig
from utils.log import log


class TokenDrop(Callback):
    """Sets the model's patch dropout. Tokens are drawn anew for each sample, by its micro-batch's random numbers."""

    def __init__(self, train: TrainConfig) -> None:
        self.fraction, self.last = train.TOKEN_DROP, train.NUM_EPOCHS - train.TOKEN_DROP_TAIL
        self.tail = train.TOKEN_DROP_TAIL
        self._now = 0.0

    def phase(self, epoch: int) -> str:
        return self._share() if epoch <= self.last else ""

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        self._now = self.fraction if epoch <= self.last else 0.0
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, PatchDropout):
                module.prob = self._now
        return False

    def figures(self) -> dict[str, Figure]:
        return {"token_drop": Figure(self._now, f"Patches left out: {100 * self._now:g}%")}

    def rows(self) -> dict[str, str]:
        epochs = f"{self.tail} epochs" if self.tail > 1 else "epoch"
        tail = f", none in the last {epochs}" if self.tail else ""
        return {"shortcuts": f"{self._share()}{tail}"}

    def _share(self) -> str:
        return f"{100 * self.fraction:g} % of the patches left out"


class GrowingImages(Callback):
    """TRAIN.SIZE_SCHEDULE: training images grow. The data set makes them (`variants.Sized`); this is for the log."""

    def __init__(self, train: TrainConfig, full: int) -> None:
        """`full`: size of the images in epochs for which the schedule has none."""
        self._train, self._full, self._size = train, full, full

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        self._size = self._train.size_in(epoch, self._full)
        return False

    def figures(self) -> dict[str, Figure]:
        return {"image_size": Figure(self._size, f"Size: {self._size}")}

    def rows(self) -> dict[str, str]:
        starts = [(math.ceil(self._train.epochs_before(start)) + 1, size) for start, size in self._train.SIZE_SCHEDULE]
        steps = (f"{size} from epoch {epoch}" for epoch, size in starts)
        return {"shortcuts": f"images of {', '.join(steps)}"}


class Unfreezing(Callback):
    """MODEL.UNFREEZE_EPOCH: frozen weights are trained from the start of an epoch on.

    The optimiser has them from the first update. Without a gradient it leaves a weight as it is, weight decay included,
    so nothing happens to them before, and their moments begin with their first gradient. All that depends on which
    weights are trained is attached anew, as a run that is resumed at this epoch attaches it.
    """

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
