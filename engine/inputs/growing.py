"""TRAIN.SIZE_SCHEDULE: training images grow. The data set makes them (`datasets.Sized`); this is what the log says."""

from __future__ import annotations

from torch import nn

from engine.ability import Ability, Figure
from utils.config.train import TrainConfig


class GrowingImages(Ability):
    def __init__(self, train: TrainConfig, full: int) -> None:
        """`full`: size of the images in epochs for which the schedule has none."""
        self._train, self._full, self._size = train, full, full

    def enter(self, epoch: int, *models: nn.Module) -> bool:
        self._size = self._train.size_in(epoch, self._full)
        return False

    def figures(self) -> dict[str, Figure]:
        return {"image_size": Figure(self._size, f"Size: {self._size}")}

    def rows(self) -> dict[str, str]:
        steps = (f"{size} from epoch {self._first_epoch(start)}" for start, size in self._train.SIZE_SCHEDULE)
        return {"shortcuts": f"images of {', '.join(steps)}"}

    def _first_epoch(self, start: float) -> int:
        """First epoch after `start`, a fraction of the run."""
        return int(-(-self._train.epochs_before(start) // 1)) + 1
