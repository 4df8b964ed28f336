"""TRAIN.TOKEN_DROP: a fraction of the patches is left out in all but the last epochs."""

from __future__ import annotations

from timm.layers.patch_dropout import PatchDropout
from torch import nn

from engine.ability import Ability, Figure
from models import Shortcuts
from utils.config.schema import Config
from utils.config.train import TrainConfig


def shortcuts_of(config: Config) -> Shortcuts:
    train, full = config.TRAIN, config.DATA.IMAGE_SIZE
    return Shortcuts(train.TOKEN_DROP, tuple(sorted({size for _, size in train.SIZE_SCHEDULE} - {full})))


class TokenDrop(Ability):
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
