"""Speed and memory of a run. They are logged under `perf`, apart from the metrics, which must be reproducible."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from engine.machine.memory import peak_memory_gb
from engine.measure.bottleneck import MIN_UPDATES, Tally
from engine.measure.mfu import Utilisation
from engine.measure.stage_times import Stages, StageTimes


@dataclass(frozen=True)
class Perf:
    images_per_second: float
    data_wait_percent: float
    """See `Tally.waited_percent`."""
    peak_memory_gb: float
    seconds: float
    stages: StageTimes | None = None
    mfu: float | None = None

    def as_dict(self) -> dict[str, float]:
        values = {
            "images_per_second": self.images_per_second,
            "data_wait_percent": self.data_wait_percent,
            "peak_memory_gb": self.peak_memory_gb,
            "seconds": self.seconds,
            **self.extra(),
        }
        return {key: round(value, 4) for key, value in values.items()}

    def extra(self) -> dict[str, float]:
        """Values that are not always known: milliseconds per update by stage, and MFU."""
        stages = {} if self.stages is None else self.stages.milliseconds()
        mfu = {} if self.mfu is None else {"mfu": self.mfu}
        return {f"{stage}_ms": value for stage, value in stages.items()} | mfu

    def words(self) -> str:
        """These values for a log line."""
        text = "" if self.mfu is None else f", MFU: {self.mfu:.3g}%"
        if self.stages is None:
            return text
        stages = " ".join(f"{stage} {percent:.0f}%" for stage, percent in self.stages.percent().items())
        return f"{text}, Stages: {stages} of {1000 * self.stages.total / self.stages.updates:.3g} ms"


class Throughput:
    """Counts images, time and waiting for data between two reports, and over the run in a tally."""

    def __init__(
        self, device: torch.device, stages: Stages | None = None, utilisation: Utilisation | None = None
    ) -> None:
        self._device, self._stages, self._utilisation = device, stages or Stages(), utilisation
        self._began = self._last = time.perf_counter()
        self._images = self._updates = 0
        self._first, self._later, self._started = Tally(), Tally(), False

    def count(self, images: int) -> None:
        """Count one update of `images` images."""
        self._images += images
        self._updates += 1

    def restart(self) -> None:
        """Leave out the time since the last report, which was not training but validation or saving."""
        self._stages.pause()
        self._stages.take()
        self._reset()

    def read(self, waited: float) -> Perf:
        """Speed and memory since the last call. `waited`: seconds that the host waited for data."""
        passed = max(time.perf_counter() - self._last, 1e-9)
        now = Tally(self._updates, self._images, passed, waited, self._stages.take())
        if self._started:
            self._later += now
        else:
            self._first, self._started = now, True
        rate = now.images / passed
        perf = Perf(rate, now.waited_percent, peak_memory_gb(self._device), self.total, now.stages, self._mfu(rate))
        self._reset()
        return perf

    @property
    def tally(self) -> Tally:
        """Totals of the run; if the rest is enough, without the time up to the first report, which includes set-up."""
        return self._later if self._later.updates >= MIN_UPDATES else self._first + self._later

    def _mfu(self, rate: float) -> float | None:
        if self._utilisation is None:
            return None
        if not self._utilisation.counted:
            self._stages.pause()  # counting FLOPs is not training
        return self._utilisation.percent(rate)

    def _reset(self) -> None:
        self._last, self._images, self._updates = time.perf_counter(), 0, 0

    @property
    def total(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began
