"""Order of the samples: which ones each update uses, and on which rank.

An epoch is one permutation of the samples (or a balanced draw), cut into micro-batches of `batch_size`;
`accum * world` consecutive ones are the global window of an update. Ranks play no part in this, so another number of
processes with the same global batch gets the same micro-batches with the same numbers.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from datasets.base import PADDING, ImageDataset, Samples, shuffled_by_file
from datasets.labels import members_of_classes
from utils.config.data import DropLast
from utils.errors import UserError
from utils.seeding import generator_of
from utils.text import counted

FEW = 0.1
"""Warn if the last update has less than this fraction of the others' samples, or if an epoch leaves out more."""


class MicroBatch(NamedTuple):
    """A micro-batch of one rank."""

    number: int
    """Position in the global window, which seeds its random numbers."""
    indices: np.ndarray
    weight: float
    """Factor of the mean loss; it makes the sum over ranks the mean over the window's samples.

    With class weights, it makes the sum their weighted mean.
    """
    counts: float = 0.0
    """The sum of its samples' weights in the loss: without class weights, their number"""


class EpochOrder:
    """The windows of an epoch for one rank."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        accum: int,
        rank: int,
        world: int,
        seed: int,
        drop_last: DropLast,
        copies: int = 1,
        shuffled: Callable[[np.random.Generator], np.ndarray] | None = None,
        sample_weights: np.ndarray | None = None,
    ) -> None:
        """`shuffled` gives the order of an epoch; by default a plain permutation, with all samples once.

        `sample_weights`: the weight of each sample in the loss; None: all are equal.
        """
        self.samples = samples
        self.batch_size = batch_size
        self.accum = accum
        self.copies = copies
        self.rank = rank
        self.world = world
        self.seed = seed
        self._shuffled = shuffled or (lambda generator: generator.permutation(samples))
        self._sample_weights = sample_weights
        self._per_window = accum * world
        self.global_batch = batch_size * self._per_window
        unit = 1
        if drop_last == "update":
            unit = self.global_batch
        elif drop_last:
            unit = batch_size
        self.used = samples // unit * unit
        """Samples of an epoch, without those that DATA.DROP_LAST leaves out."""
        if not samples:
            raise UserError("The training set is empty: DATA.DATASET and DATA.DATA_PATH must name one with images.")
        if not self.used and unit > batch_size:
            other = "batch" if samples >= batch_size else "false"
            raise UserError(
                f"An update takes {unit} images (DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER), but the training set "
                f"has only {samples}: not one full update. Use fewer, or DATA.DROP_LAST={other}."
            )
        if not self.used:
            raise UserError(
                f"DATA.BATCH_SIZE is {batch_size}, but the training set has only {samples} images: not one full batch. "
                f"Set it to {samples} or less, or keep partial batches with DATA.DROP_LAST=false."
            )
        self._micro_batches = -(-self.used // batch_size)
        self.updates = -(-self._micro_batches // self._per_window)

    def windows(self, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, ...]]:
        """One item per update, from update `start` (counted from 0) to the end of the epoch."""
        permutation = self.permutation(epoch)
        for update in range(start, self.updates):
            yield self._window(permutation, update * self._per_window)

    def samples_of(self, update: int) -> int:
        """Samples of all ranks in an update, counted from 0 within the epoch."""
        return min(self.global_batch, self.used - update * self.global_batch)

    def words(self) -> str:
        """For the banner of a run."""
        last = self.samples_of(self.updates - 1)
        left_out = self.samples - self.used
        text = f"{counted(self.updates, 'update')} per epoch"
        if last < self.global_batch:
            which = "the last" if self.updates > 1 else "which is"
            text += f", {which} of {counted(last, 'image')}"
        if left_out:
            text += f"; {counted(left_out, 'image')} left out"
        return text

    def warnings(self) -> Iterator[str]:
        """Lines about updates that are much smaller than the others, and about images that are left out."""
        last = self.samples_of(self.updates - 1)
        left_out = self.samples - self.used
        if self.updates > 1 and last < FEW * self.global_batch:
            yield (
                f"The last update of each epoch has {counted(last, 'image')}, the others {self.global_batch:,}, at the "
                "same learning rate. DATA.DROP_LAST=update leaves it out."
            )
        if left_out > FEW * self.samples:
            yield (
                f"Each epoch leaves out {left_out:,} of the {self.samples:,} training images, in each epoch others: it "
                f"has {counted(self.updates, 'update')} of {self.global_batch:,} images. To use all images, set "
                "DATA.DROP_LAST=false; for more updates, choose a smaller -batch_size."
            )

    def permutation(self, epoch: int) -> np.ndarray:
        """Samples in the order of an epoch."""
        return self._with_copies(self._shuffled(self._generator(epoch)), self.samples)

    def _generator(self, epoch: int) -> np.random.Generator:
        return generator_of(self.seed, "order", epoch)

    def _with_copies(self, permutation: np.ndarray, total: int) -> np.ndarray:
        """The first samples, each `copies` times in a row, so many in all; copy c of sample i is i + c * samples.

        Samples that are copies already, as in a balanced order, get `copies` copies each.
        """
        if self.copies == 1:
            return permutation
        places = np.arange(total)
        copy, sample = np.divmod(permutation[places // self.copies], self.samples)
        return sample + (copy * self.copies + places % self.copies) * self.samples

    def _window(self, permutation: np.ndarray, first: int) -> tuple[MicroBatch, ...]:
        def indices(number: int) -> np.ndarray:
            begin = (first + number) * self.batch_size
            return permutation[begin : begin + self.batch_size]

        real = min(self._per_window, self._micro_batches - first)
        own, blank = self._share(real)
        # What each micro-batch counts for in the loss: equal on all ranks, as all know all labels.
        whole = map(indices, range(real))
        weights = self._sample_weights
        counts = [float(len(of) if weights is None else weights[of % self.samples].sum()) for of in whole]
        shares = [MicroBatch(v, indices(v), counts[v] / sum(counts), counts[v]) for v in own]
        if len(own) * self.world < real:
            # All ranks need equally many micro-batches, or the all-reduce waits for ever: one of weight 0.
            shares.append(MicroBatch(real + (self.rank - real) % self.world, indices(blank), 0.0))
        return tuple(shares)

    def _share(self, real: int) -> tuple[Sequence[int], int]:
        """This rank's of so many micro-batches, and the one that it computes with weight 0 if it has fewer."""
        each, more = divmod(real, self.world)
        begin = self.rank * each + min(self.rank, more)
        after = self.rank + 1
        return range(begin, after * each + min(after, more)), 0


class OrderByMachine(EpochOrder):
    """DATA.SAMPLER by_machine: each machine reads files of its own, the same ones in each epoch, in another order.

    A file can be cut, so that machines have equally many samples, or one micro-batch more. The order depends on the
    number of machines, and not on that of their ranks.
    """

    def __init__(self, split: Samples, machines: int, *args: Any) -> None:
        """`args`: those of `EpochOrder`."""
        super().__init__(*args)
        self.machines = machines
        self._window_of_files = split.window
        self._full, left = divmod(self.used, self.global_batch)
        self._each = self._full * self.global_batch // machines
        last = np.cumsum(self._shared_out(self._micro_batches - self._full * self._per_window)) * self.batch_size
        self._used = self._each + np.diff(np.minimum(last, left), prepend=0)
        sizes = self._used + self._shared_out(self.samples - self.used)
        files = list(itertools.pairwise(split.file_begins.tolist()))
        order = generator_of(self.seed, "machines").permutation(len(files))
        self._files = _cut([files[number] for number in order], sizes.tolist())
        """First sample and end of each file of each machine"""

    def words(self) -> str:
        return f"{super().words()}; each of {self.machines} machines reads tar files of its own"

    def permutation(self, epoch: int) -> np.ndarray:
        generator = self._generator(epoch)
        full = list[np.ndarray]()
        last = list[np.ndarray]()
        left_out = list[np.ndarray]()
        for files, used in zip(self._files, self._used, strict=True):
            own = shuffled_by_file(files, self._window_of_files, generator)
            own = self._with_copies(own, len(own))
            full.append(own[: self._each].reshape(self._full, -1 if self._full else 0))
            last.append(own[self._each : used])
            left_out.append(own[used:])
        return np.concatenate([np.stack(full, axis=1).ravel(), *last, *left_out])

    def _shared_out(self, number: int) -> np.ndarray:
        """What each machine gets of so many."""
        shares = np.full(self.machines, number // self.machines)
        shares[: number % self.machines] += 1
        return shares

    def _share(self, real: int) -> tuple[Sequence[int], int]:
        machine, local = divmod(self.rank, self.world // self.machines)
        shares = self._shared_out(real)
        end = int(shares[: machine + 1].sum())
        of_machine = range(end - int(shares[machine]), end)
        own = np.array_split(of_machine, self.world // self.machines)[local].tolist()
        blank = 0
        if self._full:
            # With weight 0, the machine's first one in the window before, so that it reads no other machine's files.
            blank = (machine - self.machines) * self._per_window // self.machines
        return own, blank


def _cut(files: list[tuple[int, int]], sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Files from the end of the list, for each machine as many as have so many samples; the last one may be cut."""
    of_machines = []
    for size in sizes:
        own = []
        missing = size
        while missing:
            begin, end = files.pop()
            cut = min(begin + missing, end)
            own.append((begin, cut))
            missing -= cut - begin
            if cut < end:
                files.append((cut, end))
        of_machines.append(own)
    return of_machines


class BalancedOrder:
    """DATA.SAMPLER balanced: an epoch of as many samples as there are, equally many of each class that has any.

    All images of a class are drawn before one is drawn again. Copy c of sample i is i + c * samples, so that
    `variants.Repeated` augments each copy differently. Drawing equally many, instead of leaving the class of every
    sample to chance, spares rare classes the noise of chance.
    """

    def __init__(self, labels: np.ndarray, repeated: int = 1) -> None:
        """`repeated`: times that `EpochOrder` repeats each sample that is drawn."""
        self._members = members_of_classes(labels)
        self._samples = len(labels)
        self._repeated = repeated
        self.classes = len(self._members)
        self.least, self._more = divmod(-(-self._samples // repeated), max(self.classes, 1))
        """Samples drawn of each class per epoch; some classes get one more, in every epoch others."""
        self._most = self.least
        if self._more:
            self._most += 1
        smallest = min(map(len, self._members), default=1)
        self.copies = max(1, -(-self._most // smallest)) * repeated
        """Most copies of a sample in an epoch."""

    def __call__(self, generator: np.random.Generator) -> np.ndarray:
        counts = np.full(self.classes, self.least)
        counts[generator.permutation(self.classes)[: self._more]] += 1
        drawn = []
        for members, count in zip(self._members, counts, strict=True):
            rounds = range(-(-count // len(members)))
            copies = [generator.permutation(members) + self._samples * copy for copy in rounds]
            drawn.append(np.concatenate(copies)[:count])
        return generator.permutation(np.concatenate(drawn))

    def words(self, whole: bool = True) -> str:
        """For the banner of a run. `whole`: an epoch leaves out none of those drawn."""
        each = " or ".join(f"{number * self._repeated:,}" for number in range(self.least, self._most + 1))
        each = each if whole else f"up to {self._most * self._repeated:,}"
        repeated = f", each image at most {self.copies} times" if self.copies > 1 else ""
        return f"sampler balanced: {each} images of each of {self.classes} classes per epoch{repeated}"


def validation_batches(samples: int, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """Samples rank, rank + world, ... in batches of one shape, equally many on every rank; -1 is padding.

    `batch_size` is the maximum; batches are smaller if that gives as many batches with less padding.
    """
    most_per_rank = -(-samples // world)
    batches = -(-most_per_rank // batch_size)
    size = -(-most_per_rank // batches) if batches else 0
    padded = np.full(batches * size, PADDING, dtype=np.int64)
    own = np.arange(rank, samples, world)
    padded[: len(own)] = own
    return list(padded.reshape(batches, size)) if batches else []


def whole_batches(samples: int, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """The batches of one process, dealt to the ranks, so that each batch is computed as by one process.

    Ranks without one in the last round get one of padding.
    """
    batches = validation_batches(samples, batch_size, 0, 1)
    if batches:
        padding = np.full_like(batches[0], PADDING)
        batches += itertools.repeat(padding, -len(batches) % world)
    return batches[rank::world]


def data_identity(dataset: ImageDataset) -> str:
    """Hash of the names and labels of a split in their order, wherever the data set is.

    Contents are not read. Data sets in memory have labels only.
    """
    digest = hashlib.sha256()
    samples = dataset.single_images()
    labels = dataset.sample_labels()
    for part in samples.names() if samples is not None else ():
        digest.update(part)
    digest.update(f"{labels.shape}".encode())
    digest.update(labels.astype(np.int64 if labels.ndim == 1 else np.uint8).tobytes())
    return digest.hexdigest()


def identity_of(dataset: ImageDataset, order: EpochOrder) -> dict[str, Any]:
    """Fingerprint of the training split and its order, equal on all ranks, for meta.json."""
    # Checkpoints of older versions have this field alone, so it stays what it was: without the names.
    digest = hashlib.sha256(order.permutation(1).data)
    samples = dataset.single_images()
    if samples:
        digest.update(samples.labels.tobytes())
    identity: dict[str, Any] = {
        "number": order.samples,
        "updates": order.updates,
        "order": digest.hexdigest(),
        "data": data_identity(dataset),
    }
    if samples and samples.relabel:
        identity["relabel"] = samples.relabel
    groups = len(set(dataset.groups()))
    if groups:
        identity["groups"] = groups
    return identity
