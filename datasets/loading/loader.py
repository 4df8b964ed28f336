"""Load batches of a data set in a given order, and copy them to the device."""

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
    """The keys (epoch, sample index) of a batch, and the samples that are announced with it."""

    def __init__(self, epoch: int, batch: np.ndarray, later: Sequence[int] | None = None) -> None:
        """`later`: samples of a later batch, which are announced to their source; None: nothing is announced."""
        super().__init__((epoch, index) for index in batch.tolist())
        self.later = later


class Plan:
    """The batch sampler of torch's DataLoader: it yields the keys of one batch after another.

    Keys contain the epoch, so loading processes need no state.
    """

    _rest: Iterator[Keys] = iter(())

    def begin(self, batches: Iterable[tuple[int, np.ndarray]], ahead: int | None = None) -> None:
        """Replace the batches to come by these, each as (epoch, samples). They may be of several epochs.

        `ahead`: with each batch, the samples of the batch that comes `ahead` batches later are announced to their
        source; None: nothing is announced. Batches are taken from the iterable only as they are loaded.
        """
        if ahead is None:
            self._rest = (Keys(epoch, batch) for epoch, batch in batches)
            return
        # Two iterators over the batches: `later` is `ahead` batches further. At its end, nothing more is announced.
        current, following = itertools.tee(batches)
        later = (batch.tolist() for _, batch in itertools.islice(following, ahead, None))
        self._rest = (Keys(epoch, batch, later=next(later, ())) for epoch, batch in current)

    def __iter__(self) -> Iterator[Keys]:
        return self._rest


MOST_WORKERS = 16
"""Most loading processes of a rank, unless more are set"""


def auto_workers(world: World = ALONE, given: int | None = None) -> int:
    """Return the number of this rank's loading processes: `given`, or if that is None, one per core of the rank."""
    return min(MOST_WORKERS, world.own_cores) if given is None else given


class Window:
    """The micro-batches of one update, with their batches.

    `len` and `shares` are known at once; batches are loaded while the window is iterated.
    """

    begun = False
    """Whether a batch was taken"""

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
    """Loads batches, in this process or in persistent loading processes, and copies them to the device."""

    def __init__(
        self,
        dataset: ImageDataset,
        workers: int,
        seed: int,
        device: torch.device,
        broken: BrokenImages | BrokenInValidation | None,
    ) -> None:
        """Set up torch's DataLoader, without starting processes; data in memory is loaded without it.

        `broken` collects the images that could not be read; None: there are none, for data in memory.
        """
        self._broken = broken
        self._fetch = _Fetch(dataset)
        self._device = device
        self.on_arrival: Callable[[], None] | None = None
        """Called when a batch arrives, before it is copied to the device"""
        self._plan = Plan()  # without batches until `_begin`
        self._wait = 0.0
        """Seconds that this process waited for batches since the last `take_wait`"""
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" and not dataset.in_memory else None
        """The stream that copies batches to the GPU; None without one"""
        self._processes: LoadingProcesses | None = None
        self._loader: DataLoader[Any] | None = None
        if not dataset.in_memory:
            # torch warns that more processes than cores may freeze, but with slow storage they help.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            self._loader = DataLoader(
                self._fetch,
                batch_sampler=self._plan,
                num_workers=workers,
                collate_fn=Fetched._make,  # leaves the batch as `_Fetch` returns it
                pin_memory=device.type == "cuda",
                persistent_workers=workers > 0,
                # Without a generator, every epoch would draw from the global one.
                generator=torch.Generator().manual_seed(seed),
            )

    def _begin(self, batches: Iterable[tuple[int, np.ndarray]], per_epoch: int) -> Iterator[Fetched]:
        """Begin to load batches, each (epoch, samples); those that were begun before are dropped.

        `per_epoch`: number of batches in an epoch. Returns an iterator over the batches as they are loaded.
        """
        began = time.perf_counter()
        samples = self._fetch.dataset.single_images()
        fraction_ahead = None if samples is None else samples.look_ahead()  # of an epoch
        if self._processes is None and self._loader is not None and self._loader.num_workers > 0:
            from datasets.loading.workers import LoadingProcesses

            # Before the batches are planned: batches would be lost if processes have to be started again.
            self._processes = LoadingProcesses(self._loader)
        batches_ahead = None if fraction_ahead is None else math.ceil(fraction_ahead * per_epoch)
        self._plan.begin(batches, batches_ahead)
        if self._loader is None:  # data in memory
            fetched_batches: Iterator[Fetched] = map(self._fetch.__getitems__, self._plan)
        elif self._processes is None:  # images are read in this process
            fetched_batches = iter(self._loader)
        else:
            self._processes.begin()
            fetched_batches = iter(self._processes)
        self._wait += time.perf_counter() - began
        return fetched_batches

    def _batches(self, fetched_batches: Iterator[Fetched]) -> Iterator[Batch]:
        """Yield the batches on the device, and add up the time that they take to arrive."""
        begin = time.perf_counter()
        for fetched in fetched_batches:
            batch = self._receive(fetched)
            self._wait += time.perf_counter() - begin
            yield batch
            begin = time.perf_counter()

    def take_wait(self) -> float:
        """Return the seconds that this process waited for batches since the last call."""
        wait = self._wait
        self._wait = 0.0
        return wait

    def close(self) -> None:
        """End the loading processes now: otherwise they would live as long as the iterator."""
        if self._processes is not None:
            self._processes.end()
        self._processes = self._loader = None

    def _receive(self, fetched: Fetched) -> Batch:
        """Copy a batch to the device, and log what its loading process reports.

        A TrainingError that the process sent in place of a batch is raised.
        """
        if self.on_arrival is not None:
            self.on_arrival()
        if self._broken is not None:
            self._broken.add(fetched.broken)
        for text in fetched.remarks:
            warn_once(text)
        if isinstance(fetched.batch, TrainingError):
            raise fetched.batch
        if self._copy_stream is None:
            return self._on_device(fetched.batch)
        # On a stream of its own, the copy runs while the GPU computes the previous batch.
        with torch.cuda.stream(self._copy_stream):
            batch = self._on_device(fetched.batch)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copy_stream)
        # The memory of a batch must not be reused by the copying stream before it has been computed.
        for tensor in batch:
            tensor.record_stream(computing)
        return batch

    def _on_device(self, batch: Batch) -> Batch:
        return Batch._make(tensor.to(self._device, non_blocking=True) for tensor in batch)


class TrainLoader(_Loader):
    """Loads the windows of training epochs, one per update, with their batches on the device."""

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
        """Yield the windows from update `start` (counted from 0) to the end of the epoch."""
        return self.epochs((epoch,), start)

    def epochs(self, epochs: Iterable[int], start: int = 0) -> Iterator[Window]:
        """Yield the window of each update in these epochs, from update `start` of the first epoch.

        All windows take their batches from one iterator, so the caller must take all batches of a window before those
        of the next. While the last batches of an epoch are used, loading processes load the first ones of the next.
        """
        windows, windows_to_load = itertools.tee(self._windows(epochs, start))
        batches_per_epoch = self.order.updates * self.order.accum
        to_load = ((epoch, share.indices) for epoch, shares in windows_to_load for share in shares)
        fetched_batches = self._begin(to_load, per_epoch=batches_per_epoch)
        batches = self._batches(fetched_batches)
        for _epoch, micro_batches in windows:
            yield Window(micro_batches, batches)

    def _windows(self, epochs: Iterable[int], start: int) -> Iterator[tuple[int, tuple[MicroBatch, ...]]]:
        """Yield the epoch and this rank's micro-batches of each update."""
        for epoch in epochs:
            for shares in self.order.windows(epoch, start):
                yield epoch, shares
            start = 0


class ValLoader(_Loader):
    """Loads this rank's part of the validation split, in batches of one shape on the device.

    Each iteration is one pass through it.
    """

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
        """Make this rank's batches of one pass through the split.

        `broken` collects the images that cannot be read; by default they end the validation with an error. `shard`
        makes this rank's batches from (number of samples, batch size, rank, number of ranks).
        """
        self._pass_batches = shard(len(dataset), batch_size, rank, world)
        if broken is None and not dataset.in_memory:
            from datasets.damage import BrokenInValidation

            broken = BrokenInValidation()
        self.broken = broken
        self._ahead: Iterator[Batch] = iter(())
        """The batches that are being loaded"""
        self._passes_ahead = 0
        """Number of passes through the split whose batches `_ahead` has"""
        super().__init__(dataset, min(workers, len(self._pass_batches)), seed=0, device=device, broken=self.broken)

    def __len__(self) -> int:
        return len(self._pass_batches)

    def load_ahead(self, passes: int) -> None:
        """Let loading processes begin with the first of `passes` passes, unless they have begun already."""
        if self._loader is not None and self._loader.num_workers and not self._passes_ahead:
            self._plan_passes(passes)

    def _plan_passes(self, passes: int) -> None:
        """Begin to load the batches of this number of passes, one pass after the other."""
        batches = itertools.chain.from_iterable(itertools.repeat(self._pass_batches, passes))
        plan = ((0, batch) for batch in batches)
        self._ahead = self._batches(self._begin(plan, per_epoch=len(self._pass_batches)))
        self._passes_ahead = passes

    def __iter__(self) -> Iterator[Batch]:
        if not self._passes_ahead:
            self._plan_passes(1)
        passes = self._passes_ahead
        self._passes_ahead = 0  # stays 0 if this pass is broken off: the next one then begins anew
        yield from itertools.islice(self._ahead, len(self._pass_batches))
        self._passes_ahead = passes - 1


class Fetched(NamedTuple):
    """The message that a loading process sends for each batch."""

    batch: Batch | TrainingError
    broken: list[Broken]
    """Images that it could not read"""
    remarks: list[str]
    """Warnings for the log"""


class _Fetch(Dataset[Any]):
    """The data set as torch's DataLoader sees it, in a loading process. It fetches whole batches.

    Errors are returned as values: raised in a loading process, they would come with a page of traceback.
    """

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: Keys) -> Fetched:
        """Fetch the batch of these keys, with what this process has to report: broken images, and warnings.

        Before, announce the samples of this batch and of a later one to their source, so that it can download them.
        """
        samples = self.dataset.single_images()
        if keys.later is not None and samples is not None:
            announced = [index for _, index in keys]
            announced += keys.later
            # The copies of a sample have higher indices: copy c of sample i is i + c * number of samples.
            samples.announce([index % len(samples) for index in announced if index != PADDING])
        try:
            batch = self.dataset.__getitems__(keys)
        except TrainingError as error:
            batch = error
        # `datasets.base.remark` collects the warnings of a loading process in this list.
        warnings_to_send = remarks.copy()
        remarks.clear()
        return Fetched(batch, self.dataset.take_broken(), warnings_to_send)
