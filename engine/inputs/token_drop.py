"""TRAIN.TOKEN_DROP over the epochs, and what training asks of the model besides."""

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
    """Which tokens go is drawn anew for each sample, from the random numbers of its micro-batch."""

    def __init__(self, train: TrainConfig) -> None:
        self.share, self.last = train.TOKEN_DROP, train.NUM_EPOCHS - train.TOKEN_DROP_TAIL
        self.tail = train.TOKEN_DROP_TAIL

    def set(self, epoch: int, *models: nn.Module) -> None:
        """`models`: the one that is saved and the one that computes, if they are two."""
        share = self.share if epoch <= self.last else 0.0
        for part in (part for model in models for part in model.modules()):
            if isinstance(part, PatchDropout):
                part.prob = share

    def words(self) -> str:
        epochs = f"{self.tail} epochs" if self.tail > 1 else "epoch"
        tail = f", all shown in the last {epochs}" if self.tail else ""
        return f"{100 * self.share:g} % of the patches left out{tail}"


def token_drop_of(train: TrainConfig) -> TokenDrop | None:
    return TokenDrop(train) if train.TOKEN_DROP else None


def shortcut_words(train: TrainConfig) -> str:
    """What the banner says; empty where every image is shown as it is."""
    drop = token_drop_of(train)
    steps = [f"{size} from epoch {_first_epoch(train, start)}" for start, size in train.SIZE_SCHEDULE]
    sizes = f"images of {', '.join(steps)}" if steps else ""
    return "; ".join(filter(None, (drop.words() if drop else "", sizes)))


def _first_epoch(train: TrainConfig, start: float) -> int:
    """The first epoch that has `start` behind it."""
    return int(-(-train.epochs_before(start) // 1)) + 1
