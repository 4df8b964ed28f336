"""How fast a run goes and what memory it takes; all of it stands under `perf`, apart from what must be reproducible."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Perf:
    images_per_second: float
    data_wait_percent: float
    peak_memory_gb: float
    seconds: float

    def as_dict(self) -> dict[str, float]:
        return {key: round(value, 4) for key, value in asdict(self).items()}


class Pace:
    """Between two reports: images, seconds, and the share of them spent waiting for data."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._last = time.perf_counter()
        self._images = 0

    def count(self, images: int) -> None:
        self._images += images

    def restart(self) -> None:
        """Leave out what was not training: validation, saving."""
        self._last, self._images = time.perf_counter(), 0

    def read(self, waited: float) -> Perf:
        now = time.perf_counter()
        passed = max(now - self._last, 1e-9)
        perf = Perf(self._images / passed, 100 * min(waited / passed, 1.0), peak_memory_gb(self._device), self.total)
        self._last, self._images = now, 0
        return perf

    @property
    def total(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began


def peak_memory_gb(device: torch.device) -> float:
    """The most the tensors took on a GPU; on a CPU, the most the process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def clock(seconds: float) -> str:
    """3725.4 -> 1:02:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def seconds_of(text: str) -> float:
    """'01:30:00' -> 5400.0; the form was checked with the config."""
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds
