"""TRAIN.SIZE_SCHEDULE: training images grow. The data set makes them (`datasets.Sized`); this is what the log says."""

from __future__ import annotations

from engine.ability import Ability
from utils.config.train import TrainConfig


class GrowingImages(Ability):
    def __init__(self, train: TrainConfig) -> None:
        self._train = train

    def rows(self) -> dict[str, str]:
        steps = (f"{size} from epoch {self._first_epoch(start)}" for start, size in self._train.SIZE_SCHEDULE)
        return {"shortcuts": f"images of {', '.join(steps)}"}

    def _first_epoch(self, start: float) -> int:
        """First epoch after `start`, a fraction of the run."""
        return int(-(-self._train.epochs_before(start) // 1)) + 1
