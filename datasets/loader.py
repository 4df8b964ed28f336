"""From a data set and an order to batches on the device."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from utils.errors import TrainingError

from .base import Batch, ImageDataset, Key
from .order import EpochOrder, Share, validation_batches

MOST_WORKERS = 16
PR_SET_PDEATHSIG = 1


def auto_workers(local_world: int) -> int:
    """Loading processes for each of `local_world` processes on this machine: the cores shared out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores // local_world))


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
        self.order = order
        self._feed = _Feed(dataset, workers, seed, device)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """Windows from update `start` (counted from 0) to the end of the epoch."""
        windows, ahead = itertools.tee(self.order.windows(epoch, start))
        batches = self._feed.batches(epoch, (share.indices for shares in ahead for share in shares))
        for shares in windows:
            window = Window(shares, batches)
            yield window
            window.finish()

    def take_wait(self) -> float:
        """Seconds this process waited for batches since the last call."""
        return self._feed.take_wait()

    def close(self) -> None:
        """End the loading processes."""
        self._feed.close()


class ValLoader:
    """This process's share of the validation part, in batches of one shape on the device."""

    def __init__(
        self, dataset: ImageDataset, batch_size: int, rank: int, world: int, workers: int, device: torch.device
    ) -> None:
        self._batches = validation_batches(len(dataset), batch_size, rank, world)
        self._feed = _Feed(dataset, min(workers, len(self._batches)), 0, device)

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

    def __init__(self, dataset: ImageDataset, workers: int, seed: int, device: torch.device) -> None:
        self._dataset = dataset
        self._device = device
        self._keys = _Keys()
        self._wait = 0.0
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" and not dataset.in_memory else None
        self._workers: _MultiProcessingDataLoaderIter | None = None
        self._loader: DataLoader[Any] | None = None
        if not dataset.in_memory:
            self._loader = DataLoader(
                _Guarded(dataset),
                batch_sampler=self._keys,
                num_workers=workers,
                collate_fn=_as_it_is,
                pin_memory=device.type == "cuda",
                worker_init_fn=_start_worker,
                persistent_workers=workers > 0,
                generator=torch.Generator().manual_seed(seed),  # its own, or every epoch would draw from the global one
            )

    def batches(self, epoch: int, plan: Iterable[np.ndarray]) -> Iterator[Batch]:
        self._keys.plan = epoch, plan
        source = map(self._dataset.__getitems__, self._keys) if self._loader is None else self._start()
        while True:
            begin = time.perf_counter()
            item = next(source, None)
            batch = self._received(item)
            self._wait += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def take_wait(self) -> float:
        wait, self._wait = self._wait, 0.0
        return wait

    def _start(self) -> Iterator[Any]:
        assert self._loader is not None
        first = self._workers is None
        with _ctrl_c_held():
            iterator = iter(self._loader)
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            self._workers = iterator
            if first:
                # Python ends its child processes by SIGTERM, which ours ignore, and would then wait for them for ever.
                # Hooks run last in, first out: this one must come after those of multiprocessing and torch.
                atexit.register(self.close)
        return iterator

    def close(self) -> None:
        """End the workers now; an iterator that somebody still holds would keep them."""
        if self._workers is not None:
            atexit.unregister(self.close)
            self._workers._shutdown_workers()
            for worker in self._workers._workers:
                if worker.is_alive():
                    worker.kill()
            self._workers = None
        self._loader = None

    def _received(self, item: Batch | TrainingError | None) -> Batch | None:
        if isinstance(item, TrainingError):
            raise item
        if item is None or self._copies is None:
            return item and Batch(*(tensor.to(self._device, non_blocking=True) for tensor in item))
        # A stream of its own: the copy runs while the device still computes the batch before.
        with torch.cuda.stream(self._copies):
            batch = Batch(*(tensor.to(self._device, non_blocking=True) for tensor in item))
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        for tensor in batch:
            tensor.record_stream(computing)
        return batch


class _Keys:
    """The batch sampler: tells loading processes the epoch with every index, so that they need no state."""

    plan: tuple[int, Iterable[np.ndarray]] = (0, ())

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, batches = self.plan
        for indices in batches:
            yield [(epoch, index) for index in indices.tolist()]


class _Guarded(Dataset[Any]):
    """Hands an unreadable image's error over as a value: raised in a worker, it would bring a page of traceback."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[Key]) -> Batch | TrainingError:
        try:
            return self.dataset.__getitems__(keys)
        except TrainingError as error:
            return error


def _as_it_is(batch: Any) -> Any:
    return batch


@contextlib.contextmanager
def _ctrl_c_held() -> Iterator[None]:
    """A Ctrl-C waits until loading processes are forked: these are born deaf to it, and have nothing to say."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(_: int) -> None:
    """Leave signals to the process that trains, which lets its workers end, and never outlive it."""
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    # What goes wrong here travels to the process that trains; all else is the noise of parting when that one leaves.
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
