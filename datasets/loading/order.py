"""Order of the samples: which samples each update uses, and on which rank.

An epoch is one permutation of the samples (or a balanced draw), cut into micro-batches of `batch_size`. Consecutive
`accum * world` micro-batches are the global window of an update. Ranks play no part in this, so another number of
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
"""Fraction below which the samples of the last update are few, and above which those left out are many"""


class MicroBatch(NamedTuple):
    """One rank's micro-batch of an update, and its part in the loss."""

    number: int
    """Position in the global window, which seeds its random numbers"""
    indices: np.ndarray
    """Its samples"""
    weight: float
    """Factor of its mean loss. With it, the sum over all ranks is the mean over the window's samples.

    With class weights, the sum is their weighted mean.
    """
    counts: float = 0.0
    """Sum of its samples' weights in the loss; without class weights, the number of its samples"""


class EpochOrder:
    """The order of the training samples, cut into one window of micro-batches per update, for one rank."""

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
        """`accum`: micro-batches of each rank per update. `copies`: how often each sample is in an epoch.

        `shuffled` draws the order of an epoch; by default a plain permutation, with all samples once.
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
        divisor = 1
        if drop_last == "update":
            divisor = self.global_batch
        elif drop_last:
            divisor = batch_size
        self.used = samples // divisor * divisor
        """Samples of an epoch, without those that DATA.DROP_LAST leaves out"""
        if samples == 0:
            raise UserError("The training set is empty: DATA.DATASET and DATA.DATA_PATH must name one with images.")
        if self.used == 0 and divisor > batch_size:
            drop_last_advice = "batch" if samples >= batch_size else "false"
            raise UserError(
                f"An update takes {divisor} images (DATA.BATCH_SIZE x processes x TRAIN.ACCUM_ITER), but the training "
                f"set has only {samples}: not one full update. Use fewer, or DATA.DROP_LAST={drop_last_advice}."
            )
        if self.used == 0:
            raise UserError(
                f"DATA.BATCH_SIZE is {batch_size}, but the training set has only {samples} images: not one full batch. "
                f"Set it to {samples} or less, or keep partial batches with DATA.DROP_LAST=false."
            )
        # Rounded up: the last micro-batch may be smaller, and the last window may have fewer micro-batches.
        self._micro_batches = -(-self.used // batch_size)
        self.updates = -(-self._micro_batches // self._per_window)

    def windows(self, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, ...]]:
        """Yield this rank's micro-batches of each update, from update `start` (counted from 0) to the epoch's end."""
        permutation = self.permutation(epoch)
        for update in range(start, self.updates):
            yield self._window(permutation, update * self._per_window)

    def samples_of(self, update: int) -> int:
        """Return how many samples all ranks have in an update, which is counted from 0 within the epoch."""
        return min(self.global_batch, self.used - update * self.global_batch)

    def words(self) -> str:
        """Describe the updates of an epoch, for the banner of a run."""
        last_samples = self.samples_of(self.updates - 1)
        left_out = self.samples - self.used
        text = f"{counted(self.updates, 'update')} per epoch"
        if last_samples < self.global_batch:
            which = "the last" if self.updates > 1 else "which is"
            text += f", {which} of {counted(last_samples, 'image')}"
        if left_out:
            text += f"; {counted(left_out, 'image')} left out"
        return text

    def warnings(self) -> Iterator[str]:
        """Yield warnings about a last update that is much smaller than the others, and about many images left out."""
        last_samples = self.samples_of(self.updates - 1)
        left_out = self.samples - self.used
        if self.updates > 1 and last_samples < FEW * self.global_batch:
            yield (
                f"The last update of each epoch has {counted(last_samples, 'image')}, the others "
                f"{self.global_batch:,}, at the same learning rate. DATA.DROP_LAST=update leaves it out."
            )
        if left_out > FEW * self.samples:
            yield (
                f"Each epoch leaves out {left_out:,} of the {self.samples:,} training images, in each epoch others: it "
                f"has {counted(self.updates, 'update')} of {self.global_batch:,} images. To use all images, set "
                "DATA.DROP_LAST=false; for more updates, choose a smaller -batch_size."
            )

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the samples in the order of an epoch, with the copies of each."""
        return self._with_copies(self._shuffled(self._generator(epoch)), self.samples)

    def _generator(self, epoch: int) -> np.random.Generator:
        return generator_of(self.seed, "order", epoch)

    def _with_copies(self, permutation: np.ndarray, total: int) -> np.ndarray:
        """Repeat each sample `copies` times in a row, and return the first `total` of the result.

        Copy c of sample i has the index i + c * samples. Samples that are copies already, as in a balanced order, get
        `copies` copies each.
        """
        if self.copies == 1:
            return permutation
        positions = np.arange(total)
        drawn_copy, sample = np.divmod(permutation[positions // self.copies], self.samples)
        copy = drawn_copy * self.copies + positions % self.copies
        return sample + copy * self.samples

    def _window(self, permutation: np.ndarray, first: int) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of an update. `first`: the epoch's number of the window's first one."""

        def indices(number: int) -> np.ndarray:
            """Samples of a micro-batch, which is counted from the first of the window."""
            begin = (first + number) * self.batch_size
            return permutation[begin : begin + self.batch_size]

        in_window = min(self._per_window, self._micro_batches - first)
        own_numbers, blank_number = self._share(in_window)
        # The weight of each micro-batch in the loss. It is equal on all ranks, because all of them know all labels.
        counts = []
        for number in range(in_window):
            samples = indices(number)
            if self._sample_weights is None:
                count = len(samples)
            else:
                count = self._sample_weights[samples % self.samples].sum()
            counts.append(float(count))
        total = sum(counts)
        shares = [
            MicroBatch(number, indices(number), weight=counts[number] / total, counts=counts[number])
            for number in own_numbers
        ]
        if len(own_numbers) * self.world < in_window:
            # All ranks need equally many micro-batches, or an all-reduce waits for ever. So this one gets a further
            # micro-batch of weight 0, with a number that no other has.
            number = in_window + (self.rank - in_window) % self.world
            shares.append(MicroBatch(number, indices(blank_number), weight=0.0))
        return tuple(shares)

    def _share(self, in_window: int) -> tuple[Sequence[int], int]:
        """Return the numbers of this rank's micro-batches in a window of so many.

        With them, return the number of the micro-batch that it computes with weight 0 if other ranks have one more.
        """
        each, remainder = divmod(in_window, self.world)
        begin = self.rank * each + min(self.rank, remainder)
        next_rank = self.rank + 1
        end = next_rank * each + min(next_rank, remainder)
        return range(begin, end), 0


class OrderByMachine(EpochOrder):
    """The order of DATA.SAMPLER by_machine: each machine reads files of its own, the same ones in each epoch.

    The samples of a machine are shuffled anew in each epoch. A file can be cut, so that machines have equally many
    samples, or one micro-batch more. The order depends on the number of machines, and not on that of their ranks.
    """

    def __init__(self, split: Samples, machines: int, *args: Any) -> None:
        """`args`: the arguments of `EpochOrder`."""
        super().__init__(*args)
        self.machines = machines
        self._window_of_files = split.window
        self._full, last_samples = divmod(self.used, self.global_batch)
        self._each = self._full * self.global_batch // machines
        """Samples of each machine in the epoch's full updates, of which there are `_full`"""
        # The last update can be smaller: its micro-batches are shared out, and the last of them may be partial.
        last_micro_batches = self._shared_out(self._micro_batches - self._full * self._per_window)
        last_ends = np.minimum(np.cumsum(last_micro_batches) * self.batch_size, last_samples)
        self._used = self._each + np.diff(last_ends, prepend=0)
        """Samples that each machine uses in an epoch"""
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
            samples = shuffled_by_file(files, self._window_of_files, generator)
            samples = self._with_copies(samples, len(samples))
            full.append(samples[: self._each].reshape(self._full, -1 if self._full else 0))
            last.append(samples[self._each : used])
            left_out.append(samples[used:])
        # In each full update, the first machine's samples come first, then those of the second, and so on.
        return np.concatenate([np.stack(full, axis=1).ravel(), *last, *left_out])

    def _shared_out(self, number: int) -> np.ndarray:
        """Divide a number among the machines, as equally as possible; return the part of each."""
        shares = np.full(self.machines, number // self.machines)
        shares[: number % self.machines] += 1
        return shares

    def _share(self, in_window: int) -> tuple[Sequence[int], int]:
        machine, local_rank = divmod(self.rank, self.world // self.machines)
        shares = self._shared_out(in_window)
        end = int(shares[: machine + 1].sum())
        machine_numbers = range(end - int(shares[machine]), end)
        own_numbers = np.array_split(machine_numbers, self.world // self.machines)[local_rank].tolist()
        blank_number = 0
        if self._full:
            # The machine's first micro-batch of the window before (so the number is negative), because one of another
            # machine would be read from files that this machine does not have.
            blank_number = (machine - self.machines) * self._per_window // self.machines
        return own_numbers, blank_number


def _cut(files: list[tuple[int, int]], sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Divide files among machines so that each gets as many samples as `sizes` says; files may be cut.

    Files are (first sample, end). They are taken from the end of the list.
    """
    files_of_machines = []
    for size in sizes:
        files_of_machine = []
        missing = size
        while missing > 0:
            begin, end = files.pop()
            cut = min(begin + missing, end)
            files_of_machine.append((begin, cut))
            missing -= cut - begin
            if cut < end:
                files.append((cut, end))
        files_of_machines.append(files_of_machine)
    return files_of_machines


class BalancedOrder:
    """The order of DATA.SAMPLER balanced: an epoch has equally many samples of each class that has any.

    In all, it has as many samples as the split. All images of a class are drawn before one is drawn again. Copy c of
    sample i has the index i + c * samples, so that `variants.Repeated` augments each copy differently. Equal numbers
    are drawn, because rare classes would suffer from noise if the class of every sample were left to chance.
    """

    def __init__(self, labels: np.ndarray, repeated: int = 1) -> None:
        """`repeated`: how often `EpochOrder` repeats each sample that is drawn."""
        self._members = members_of_classes(labels)
        self._samples = len(labels)
        self._repeated = repeated
        self.classes = len(self._members)
        drawn_samples = -(-self._samples // repeated)  # rounded up
        self.least, self._more = divmod(drawn_samples, max(self.classes, 1))
        """Samples drawn of each class per epoch; so many classes get one more, in every epoch others"""
        self._most = self.least
        if self._more > 0:
            self._most += 1
        smallest_class = min(map(len, self._members), default=1)
        self.copies = max(1, -(-self._most // smallest_class)) * repeated
        """Most copies of a sample in an epoch"""

    def __call__(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the samples of an epoch, in a random order."""
        counts = np.full(self.classes, self.least)
        with_one_more = generator.permutation(self.classes)[: self._more]
        counts[with_one_more] += 1
        drawn = []
        for members, count in zip(self._members, counts, strict=True):
            rounds = range(-(-count // len(members)))
            copies = [generator.permutation(members) + self._samples * copy for copy in rounds]
            drawn.append(np.concatenate(copies)[:count])
        return generator.permutation(np.concatenate(drawn))

    def words(self, whole: bool = True) -> str:
        """Describe the order for the banner of a run. `whole`: an epoch leaves out none of the samples drawn."""
        if whole:
            numbers = " or ".join(f"{number * self._repeated:,}" for number in range(self.least, self._most + 1))
        else:
            numbers = f"up to {self._most * self._repeated:,}"
        repeated = f", each image at most {self.copies} times" if self.copies > 1 else ""
        return f"sampler balanced: {numbers} images of each of {self.classes} classes per epoch{repeated}"


def validation_batches(samples: int, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """Return a rank's batches of a pass through all samples: samples rank, rank + world, and so on.

    All batches have one shape, and every rank has equally many; -1 is padding. `batch_size` is the maximum: batches are
    smaller if that gives as many batches with less padding.
    """
    # All divisions round up.
    most_per_rank = -(-samples // world)
    batches = -(-most_per_rank // batch_size)
    size = -(-most_per_rank // batches) if batches else 0
    padded = np.full(batches * size, PADDING, dtype=np.int64)
    own_samples = np.arange(rank, samples, world)
    padded[: len(own_samples)] = own_samples
    return list(padded.reshape(batches, size)) if batches else []


def whole_batches(samples: int, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """Return every `world`-th of the batches that a single process would have, so that each is computed as by one.

    Ranks that would have one batch fewer than others get a batch of padding.
    """
    batches = validation_batches(samples, batch_size, 0, 1)
    if batches:
        padding = np.full_like(batches[0], PADDING)
        batches += itertools.repeat(padding, -len(batches) % world)
    return batches[rank::world]


def data_identity(dataset: ImageDataset) -> str:
    """Return a hash of the names and labels of a split in their order. It does not depend on where the data set is.

    Contents are not read. For data sets in memory, only labels are hashed.
    """
    digest = hashlib.sha256()
    samples = dataset.single_images()
    labels = dataset.sample_labels()
    if samples is not None:
        for name_bytes in samples.names():
            digest.update(name_bytes)
    digest.update(f"{labels.shape}".encode())
    digest.update(labels.astype(np.int64 if labels.ndim == 1 else np.uint8).tobytes())
    return digest.hexdigest()


def identity_of(dataset: ImageDataset, order: EpochOrder) -> dict[str, Any]:
    """Return the fingerprint of the training split and its order for meta.json. It is equal on all ranks."""
    # Checkpoints of older versions have only the field `order`, so it stays what it was: without the names.
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
    groups = set(dataset.groups())
    if groups:
        identity["groups"] = len(groups)
    return identity
