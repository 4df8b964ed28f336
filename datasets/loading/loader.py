"""From a data set and an order to batches on the device."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from datasets.base import Batch, Broken, ImageDataset, Key
from datasets.damage.broken import BrokenImages, BrokenInValidation
from datasets.loading.order import EpochOrder, Share, validation_batches
from datasets.loading.plan import Plan
from datasets.loading.workers import WatchedIterator, WatchedLoader, WorkerDied
from utils.cpus import cores
from utils.errors import TrainingError
from utils.heap import keep_freed_memory
from utils.log import log

MOST_WORKERS = 16
MOST_DEATHS = 3
"""So often in a row, without a batch in between, loading processes are started anew."""
PR_SET_PDEATHSIG = 1


def auto_workers(local_world: int) -> int:
    """Loading processes for each of `local_world` processes on this machine: the cores shared out."""
    return max(1, min(MOST_WORKERS, cores() // local_world))


class Window:
    """The micro-batches of one update. `len` and `shares` are known at once; batches come one after another."""

    def __init__(self, shares: tuple[Share, ...], batches: Iterator[Batch]) -> None:
        self.shares = shares
        self._rest = ((share, next(batches)) for share in shares)

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[tuple[Share, Batch]]:
        return self._rest

    def finish(self) -> None:
        """Pass over what was not asked for, so that the next window begins with its own batch."""
        for _ in self._rest:
            pass


class TrainLoader:
    """The windows of an epoch, one an update, with their batches on the device."""

    def __init__(self, dataset: ImageDataset, order: EpochOrder, seed: int, workers: int, device: torch.device) -> None:
        self.order, self.workers = order, workers
        self.broken = BrokenImages(dataset.max_bad)
        self._feed = _Feed(dataset, workers, seed, device, self.broken)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """Windows from update `start` (counted from 0) to the end of the epoch."""
        windows, ahead = itertools.tee(self.order.windows(epoch, start))
        batches = self._feed.batches(epoch, (share.indices for shares in ahead for share in shares))
        for shares in windows:
            window = Window(shares, batches)
            yield window
            window.finish()

    def on_arrival(self, call: Callable[[], None]) -> None:
        """Call this whenever a batch has come that was waited for, before it is copied to the device."""
        self._feed.on_arrival = call

    def take_wait(self) -> float:
        """Seconds this process waited for batches since the last call."""
        return self._feed.take_wait()

    def close(self) -> None:
        """End the loading processes."""
        self._feed.close()


class ValLoader:
    """This process's share of the validation part, in batches of one shape on the device."""

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        rank: int,
        world: int,
        workers: int,
        device: torch.device,
        broken: BrokenInValidation | None = None,
    ) -> None:
        """`broken`: what keeps the images that cannot be read, where that is not the validation's own."""
        self._batches = validation_batches(len(dataset), batch_size, rank, world)
        self.broken = BrokenInValidation() if broken is None else broken
        self._feed = _Feed(dataset, min(workers, len(self._batches)), 0, device, self.broken)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return self._feed.batches(0, self._batches)

    def take_wait(self) -> float:
        """Seconds this process waited for batches since the last call."""
        return self._feed.take_wait()

    def close(self) -> None:
        """End the loading processes."""
        self._feed.close()


class _Feed:
    """Fetches the samples of a plan, in this process or in loading processes that stay, and moves them over."""

    def __init__(
        self,
        dataset: ImageDataset,
        workers: int,
        seed: int,
        device: torch.device,
        broken: BrokenImages | BrokenInValidation,
    ) -> None:
        self._broken = broken
        self._fetch = _Fetch(dataset)
        self._device = device
        self.on_arrival: Callable[[], None] | None = None
        self._plan = Plan()
        self._wait = 0.0
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" and not dataset.in_memory else None
        self._workers: WatchedIterator | None = None
        self._loader: WatchedLoader | None = None
        if not dataset.in_memory:
            self._loader = WatchedLoader(
                self._fetch,
                batch_sampler=self._plan,
                num_workers=workers,
                collate_fn=_as_it_is,
                pin_memory=device.type == "cuda",
                worker_init_fn=start_worker,
                persistent_workers=workers > 0,
                generator=torch.Generator().manual_seed(seed),  # its own, or every epoch would draw from the global one
            )

    def batches(self, epoch: int, plan: Iterable[np.ndarray]) -> Iterator[Batch]:
        self._plan.begin(epoch, plan)
        source: Iterator[Fetched] | None = None
        deaths, begin = 0, time.perf_counter()
        while True:
            try:
                source = self._start() if source is None else source
                fetched = next(source, None)
            except WorkerDied as death:
                deaths += 1
                self._bury(death, deaths)
                source = None
                continue
            deaths = 0
            batch = None if fetched is None else self._received(fetched)
            self._wait += time.perf_counter() - begin
            if batch is None:
                return
            yield batch
            begin = time.perf_counter()

    def take_wait(self) -> float:
        wait, self._wait = self._wait, 0.0
        return wait

    def _start(self) -> Iterator[Fetched]:
        if self._loader is None:
            return map(self._fetch.__getitems__, self._plan)
        iterator = iter(self._loader)
        if isinstance(iterator, WatchedIterator):
            self._workers = iterator
        return iterator

    def _bury(self, death: WorkerDied, deaths: int) -> None:
        """Let all loading processes go: the dead one may have held what the others wait for."""
        if deaths == MOST_DEATHS:
            raise TrainingError(
                f"Loading processes died {deaths} times without one batch in between; at last {death}. Give them more "
                "memory, or take fewer of them: DATA.NUM_WORKERS (-num_workers), 0 to load in the training process. "
                "Then go on from the last checkpoint by -resume."
            )
        log.warning("%s. New ones are started, and go on where it stopped: no sample is lost.", _capital(str(death)))
        self._end_workers(kill=True)
        self._plan.again()

    def close(self) -> None:
        """End the workers now; an iterator that somebody still holds would keep them."""
        self._end_workers(kill=False)
        self._loader = None

    def _end_workers(self, kill: bool) -> None:
        if self._workers is not None:
            self._workers.end(kill)
            self._workers = None
        if self._loader is not None:
            self._loader._iterator = None

    def _received(self, fetched: Fetched) -> Batch:
        self._plan.received()
        if self.on_arrival is not None:
            self.on_arrival()
        self._broken.met(fetched.broken)
        item = fetched.batch
        if isinstance(item, TrainingError):
            raise item
        if self._copies is None:
            return Batch(*(tensor.to(self._device, non_blocking=True) for tensor in item))
        # A stream of its own: the copy runs while the device still computes the batch before.
        with torch.cuda.stream(self._copies):
            batch = Batch(*(tensor.to(self._device, non_blocking=True) for tensor in item))
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        for tensor in batch:
            tensor.record_stream(computing)
        return batch


class Fetched(NamedTuple):
    """What a loading process sends: the batch, or why there is none, and the images it could not read."""

    batch: Batch | TrainingError
    broken: list[Broken]


class _Fetch(Dataset[Any]):
    """Hands an error over as a value: raised in a loading process, it would bring a page of traceback."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[Key]) -> Fetched:
        try:
            batch = self.dataset.__getitems__(keys)
        except TrainingError as error:
            batch = error
        return Fetched(batch, self.dataset.take_broken())


def _as_it_is(batch: Any) -> Any:
    return batch


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def start_worker(_: int) -> None:
    """Leave signals to the process that trains, which lets its workers end, and never outlive it."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    # What goes wrong here travels to the process that trains; all else is the noise of parting when that one leaves.
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    keep_freed_memory()
