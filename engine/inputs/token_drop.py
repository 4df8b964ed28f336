"""TRAIN.TOKEN_DROP: a fraction of the patches is left out in all but the last epochs."""

from __future__ import annotations

from timm.layers.patch_dropout import PatchDropout
from torch import nn

from models import Shortcuts
from utils.config.schema import Config
from utils.config.train import TrainConfig


def shortcuts_of(config: Config) -> Shortcuts:
    train, full = config.TRAIN, config.DATA.IMAGE_SIZE
    return Shortcuts(train.TOKEN_DROP, tuple(sorted({size for _, size in train.SIZE_SCHEDULE} - {full})))


class TokenDrop:
    """Sets the model's patch dropout. Tokens are drawn anew for each sample, by its micro-batch's random numbers."""

    def __init__(self, train: TrainConfig) -> None:
        self.fraction, self.last = train.TOKEN_DROP, train.NUM_EPOCHS - train.TOKEN_DROP_TAIL
        self.tail = train.TOKEN_DROP_TAIL
        self.now = 0.0
        """The fraction left out in this epoch."""

    def set(self, epoch: int, *models: nn.Module) -> None:
        """`models`: the one that is saved, and the one that computes if it is another."""
        self.now = self.fraction if epoch <= self.last else 0.0
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, PatchDropout):
                module.prob = self.now

    def words(self) -> str:
        epochs = f"{self.tail} epochs" if self.tail > 1 else "epoch"
        tail = f", none in the last {epochs}" if self.tail else ""
        return f"{100 * self.fraction:g} % of the patches left out{tail}"


def token_drop_of(train: TrainConfig) -> TokenDrop | None:
    return TokenDrop(train) if train.TOKEN_DROP else None


def describe_shortcuts(train: TrainConfig) -> str:
    """Token drop and image sizes in one line for the banner; empty if neither is used."""
    drop = token_drop_of(train)
    steps = [f"{size} from epoch {_first_epoch(train, start)}" for start, size in train.SIZE_SCHEDULE]
    sizes = f"images of {', '.join(steps)}" if steps else ""
    return "; ".join(filter(None, (drop.words() if drop else "", sizes)))


def _first_epoch(train: TrainConfig, start: float) -> int:
    """First epoch after `start`, a fraction of the run."""
    return int(-(-train.epochs_before(start) // 1)) + 1
