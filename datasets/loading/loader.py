"""Loaders: batches of a data set in a given order, on the device."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datasets.base import PADDING, Batch, Broken, ImageDataset, Key, remarks
from datasets.loading.order import EpochOrder, MicroBatch, validation_batches
from utils.distributed.world import ALONE, World
from utils.errors import TrainingError
from utils.log import warn_once

if TYPE_CHECKING:
    from datasets.damage import BrokenImages, BrokenInValidation
    from datasets.loading.workers import LoadingProcesses


class Keys(list[Key]):
    """The samples of a batch."""

    def __init__(self, epoch: int, batch: np.ndarray, later: Sequence[int] | None = None) -> None:
        """`later`: samples of a later batch, which are announced to their source; None: it wants to know none."""
        super().__init__((epoch, index) for index in batch.tolist())
        self.later = later


class Plan:
    """Batch sampler of the loader. Keys contain the epoch, so loading processes need no state."""

    _rest: Iterator[Keys] = iter(())

    def begin(self, batches: Iterable[tuple[int, np.ndarray]], ahead: int | None = None) -> None:
        """`batches`: epoch and samples of each. Loading processes run on from one epoch into the next.

        `ahead`: each batch also announces the samples of the one that comes so many batches later.
        """
        if ahead is None:
            self._rest = (Keys(epoch, batch) for epoch, batch in batches)
            return
        now, following = itertools.tee(batches)
        later = (batch.tolist() for _, batch in itertools.islice(following, ahead, None))
        self._rest = (Keys(epoch, batch, next(later, ())) for epoch, batch in now)

    def __iter__(self) -> Iterator[Keys]:
        return self._rest


MOST_WORKERS = 16


def auto_workers(world: World = ALONE, given: int | None = None) -> int:
    """Loading processes for this process: `given`, or else from the number of its cores."""
    return min(MOST_WORKERS, world.own_cores) if given is None else given


class Window:
    """The micro-batches of one update. `len` and `shares` are known at once; batches come one after another."""

    begun = False
    """Whether a batch was taken."""

    def __init__(self, shares: tuple[MicroBatch, ...], batches: Iterator[Batch]) -> None:
        self.shares = shares
        self._batches = batches

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[tuple[MicroBatch, Batch]]:
        for share in self.shares:
            batch = next(self._batches)
            self.begun = True
            yield share, batch


class _Loader:
    """Fetches batches, in this process or in persistent loading processes, and copies them to the device."""

    def __init__(
        self,
        dataset: ImageDataset,
        workers: int,
        seed: int,
        device: torch.device,
        broken: BrokenImages | BrokenInValidation | None,
    ) -> None:
        self._broken = broken
        self._fetch = _Fetch(dataset)
        self._device = device
        self.on_arrival: Callable[[], None] | None = None
        """Called when a batch arrives, before it is copied to the device"""
        self._plan = Plan()
        self._wait = 0.0
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" and not dataset.in_memory else None
        self._processes: LoadingProcesses | None = None
        self._loader: DataLoader[Any] | None = None
        if not dataset.in_memory:
            # Its text speaks of freezing; and with slow storage, more processes than cores help.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            self._loader = DataLoader(
                self._fetch,
                batch_sampler=self._plan,
                num_workers=workers,
                collate_fn=Fetched._make,  # unchanged
                pin_memory=device.type == "cuda",
                persistent_workers=workers > 0,
                # Without a generator, every epoch would draw from the global one.
                generator=torch.Generator().manual_seed(seed),
            )

    def _begin(self, plan: Iterable[tuple[int, np.ndarray]], per_epoch: int) -> Iterator[Fetched]:
        """Begin to load these batches. What was loaded ahead of another plan is dropped."""
        begin = time.perf_counter()
        samples = self._fetch.dataset.single_images()
        ahead = None if samples is None else samples.look_ahead()
        if self._processes is None and self._loader is not None and self._loader.num_workers:
            from datasets.loading.workers import LoadingProcesses

            self._processes = LoadingProcesses(self._loader)
        self._plan.begin(plan, None if ahead is None else math.ceil(ahead * per_epoch))
        if self._loader is None:
            source: Iterator[Fetched] = map(self._fetch.__getitems__, self._plan)
        elif self._processes is None:
            source = iter(self._loader)
        else:
            self._processes.begin()
            source = iter(self._processes)
        self._wait += time.perf_counter() - begin
        return source

    def _batches(self, source: Iterator[Fetched]) -> Iterator[Batch]:
        begin = time.perf_counter()
        for fetched in source:
            batch = self._receive(fetched)
            self._wait += time.perf_counter() - begin
            yield batch
            begin = time.perf_counter()

    def take_wait(self) -> float:
        """Seconds this process waited for batches since the last call."""
        wait = self._wait
        self._wait = 0.0
        return wait

    def close(self) -> None:
        """End the processes now: otherwise they would live as long as the iterator."""
        if self._processes is not None:
            self._processes.end()
        self._processes = self._loader = None

    def _receive(self, fetched: Fetched) -> Batch:
        if self.on_arrival is not None:
            self.on_arrival()
        if self._broken is not None:
            self._broken.add(fetched.broken)
        for text in fetched.remarks:
            warn_once(text)
        if isinstance(fetched.batch, TrainingError):
            raise fetched.batch
        if self._copies is None:
            return self._on_device(fetched.batch)
        # On a stream of its own, the copy overlaps with computing on the batch before.
        with torch.cuda.stream(self._copies):
            batch = self._on_device(fetched.batch)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        for tensor in batch:
            tensor.record_stream(computing)
        return batch

    def _on_device(self, batch: Batch) -> Batch:
        return Batch._make(tensor.to(self._device, non_blocking=True) for tensor in batch)


class TrainLoader(_Loader):
    """The windows of an epoch, one per update, with their batches on the device."""

    def __init__(self, dataset: ImageDataset, order: EpochOrder, seed: int, workers: int, device: torch.device) -> None:
        self.order = order
        self.workers = workers
        self.broken: BrokenImages | None = None
        """Images that could not be read; None for images in memory"""
        if not dataset.in_memory:
            from datasets.damage import BrokenImages

            self.broken = BrokenImages(dataset.data, len(dataset))
        super().__init__(dataset, workers, seed, device, self.broken)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """Windows from update `start` (counted from 0) to the end of the epoch."""
        return self.epochs((epoch,), start)

    def epochs(self, epochs: Iterable[int], start: int = 0) -> Iterator[Window]:
        """Windows of these epochs, from update `start` of the first. Take all batches of one before the next.

        While the last batches of an epoch are used, loading processes load the first ones of the next.
        """
        windows, ahead = itertools.tee(self._windows(epochs, start))
        batches = self._batches(self._begin(_indices(ahead), self.order.updates * self.order.accum))
        for _, shares in windows:
            yield Window(shares, batches)

    def _windows(self, epochs: Iterable[int], start: int) -> Iterator[tuple[int, tuple[MicroBatch, ...]]]:
        for epoch in epochs:
            for shares in self.order.windows(epoch, start):
                yield epoch, shares
            start = 0


def _indices(windows: Iterable[tuple[int, tuple[MicroBatch, ...]]]) -> Iterator[tuple[int, np.ndarray]]:
    for epoch, shares in windows:
        for share in shares:
            yield epoch, share.indices


class ValLoader(_Loader):
    """This rank's part of the validation split, in batches of one shape on the device."""

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        rank: int,
        world: int,
        workers: int,
        device: torch.device,
        broken: BrokenInValidation | None = None,
        shard: Callable[[int, int, int, int], list[np.ndarray]] = validation_batches,
    ) -> None:
        """`broken`: collects the images that cannot be read; by default they end the validation with an error.

        `shard`: this rank's batches.
        """
        self._plans = shard(len(dataset), batch_size, rank, world)
        if broken is None and not dataset.in_memory:
            from datasets.damage import BrokenInValidation

            broken = BrokenInValidation()
        self.broken = broken
        self._ahead: Iterator[Batch] = iter(())
        self._passes_ahead = 0
        super().__init__(dataset, min(workers, len(self._plans)), 0, device, self.broken)

    def __len__(self) -> int:
        return len(self._plans)

    def load_ahead(self, passes: int) -> None:
        """Let loading processes begin with the first batches of the next passes, unless they have begun."""
        if self._loader is not None and self._loader.num_workers and not self._passes_ahead:
            self._plan_passes(passes)

    def _plan_passes(self, passes: int) -> None:
        batches = itertools.chain.from_iterable(itertools.repeat(self._plans, passes))
        plan = ((0, batch) for batch in batches)
        self._ahead = self._batches(self._begin(plan, len(self._plans)))
        self._passes_ahead = passes

    def __iter__(self) -> Iterator[Batch]:
        if not self._passes_ahead:
            self._plan_passes(1)
        passes = self._passes_ahead
        self._passes_ahead = 0  # a pass that is broken off leaves nothing to go on with
        yield from itertools.islice(self._ahead, len(self._plans))
        self._passes_ahead = passes - 1


class Fetched(NamedTuple):
    """Message of a loading process: the batch or an error, images that it could not read, and lines for the log."""

    batch: Batch | TrainingError
    broken: list[Broken]
    remarks: list[str]


class _Fetch(Dataset[Any]):
    """Returns errors as values: raised in a loading process, they would come with a page of traceback."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: Keys) -> Fetched:
        samples = self.dataset.single_images()
        if keys.later is not None and samples is not None:
            announced = [index for _, index in keys]
            announced += keys.later
            samples.announce([index % len(samples) for index in announced if index != PADDING])
        try:
            batch = self.dataset.__getitems__(keys)
        except TrainingError as error:
            batch = error
        lines = remarks.copy()
        remarks.clear()
        return Fetched(batch, self.dataset.take_broken(), lines)
