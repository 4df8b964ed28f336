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
        """Count the samples and the updates of an epoch; UserError if DATA.DROP_LAST would leave out all samples.

        `samples`: number of samples in the training split. `accum`: micro-batches of each rank per update. `copies`:
        how often each sample is in an epoch. `shuffled` draws the order of an epoch; by default a plain permutation,
        with all samples once. `sample_weights`: the weight of each sample in the loss; None: all are equal.
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
        self._micro_batches_per_update = accum * world
        self.global_batch = batch_size * self._micro_batches_per_update
        # An epoch uses a multiple of this number of samples: whole updates, whole batches, or all samples.
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
        self.updates = -(-self._micro_batches // self._micro_batches_per_update)

    def windows(self, epoch: int, start: int = 0) -> Iterator[tuple[MicroBatch, ...]]:
        """Yield this rank's micro-batches of each update, from update `start` (counted from 0) to the epoch's end."""
        permutation = self.permutation(epoch)
        for update in range(start, self.updates):
            yield self._window(permutation, update * self._micro_batches_per_update)

    def samples_of(self, update: int) -> int:
        """Return how many samples all ranks have in an update, which is counted from 0 within the epoch."""
        return min(self.global_batch, self.used - update * self.global_batch)

    def words(self) -> str:
        """Describe the updates of an epoch for the banner, such as "5 updates per epoch, the last of 3 images"."""
        last_samples = self.samples_of(self.updates - 1)
        left_out = self.samples - self.used
        text = f"{counted(self.updates, 'update')} per epoch"
        if last_samples < self.global_batch:
            small_update = "the last" if self.updates > 1 else "which is"
            text += f", {small_update} of {counted(last_samples, 'image')}"
        if left_out:
            text += f"; {counted(left_out, 'image')} left out"
        return text

    def warnings(self) -> Iterator[str]:
        """Yield warnings about a last update that is much smaller than the others, and about many images left out."""
        last_samples = self.samples_of(self.updates - 1)
        left_out = self.samples - self.used  # images per epoch, other ones in each epoch
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
        """Return the samples in the order of an epoch, each repeated `copies` times."""
        return self._repeated(self._shuffled(self._generator(epoch)), self.samples)

    def _generator(self, epoch: int) -> np.random.Generator:
        return generator_of(self.seed, "order", epoch)

    def _repeated(self, permutation: np.ndarray, total: int) -> np.ndarray:
        """Repeat each index of a permutation `copies` times in a row, and return the first `total` indices.

        An index stands for a copy of a sample: copy c of sample i has the index i + c * number of samples. A balanced
        order draws a sample several times, as copies 0, 1, 2 and so on; each of them is repeated here.
        """
        if self.copies == 1:
            return permutation
        positions = np.arange(total)
        drawn_indices = permutation[positions // self.copies]
        drawn_copy, sample = np.divmod(drawn_indices, self.samples)
        # Drawn copy 0 becomes the copies 0 to copies - 1, drawn copy 1 the next ones.
        copy = drawn_copy * self.copies + positions % self.copies
        return sample + copy * self.samples

    def _window(self, permutation: np.ndarray, first: int) -> tuple[MicroBatch, ...]:
        """Return this rank's micro-batches of one update. Those of all ranks together are the window of the update.

        `permutation`: the samples in the order of the epoch. `first`: number of the window's first micro-batch,
        counted from the beginning of the epoch.
        """

        def indices(number: int) -> np.ndarray:
            """Return the samples of a micro-batch. `number` counts from the beginning of the window."""
            begin = (first + number) * self.batch_size
            return permutation[begin : begin + self.batch_size]

        in_window = min(self._micro_batches_per_update, self._micro_batches - first)
        rank_numbers, repeated_number = self._numbers_of_rank(in_window)
        # The weight in the loss of each micro-batch in the window, also of those of other ranks: their sum is needed.
        # All ranks compute the same numbers, because all of them know all labels.
        counts = []
        for number in range(in_window):
            samples = indices(number)
            if self._sample_weights is None:
                count = len(samples)
            else:
                # Copies of a sample have higher indices; the remainder is the sample itself.
                count = self._sample_weights[samples % self.samples].sum()
            counts.append(float(count))
        total = sum(counts)
        shares = [
            MicroBatch(number, indices(number), weight=counts[number] / total, counts=counts[number])
            for number in rank_numbers
        ]
        if len(rank_numbers) * self.world < in_window:
            # All ranks need equally many micro-batches, or an all-reduce waits for ever. So this rank gets a further
            # micro-batch of weight 0. Its number seeds random numbers, so no other rank may have it: of the `world`
            # numbers from `in_window` on, each rank takes the one whose remainder is its rank.
            number = in_window + (self.rank - in_window) % self.world
            shares.append(MicroBatch(number, indices(repeated_number), weight=0.0))
        return tuple(shares)

    def _numbers_of_rank(self, in_window: int) -> tuple[Sequence[int], int]:
        """Divide the micro-batches of an update among the ranks: return this rank's numbers, and a number to repeat.

        `in_window`: number of micro-batches of all ranks in the update. If other ranks have one micro-batch more, this
        rank computes the micro-batch to repeat with weight 0; here it is always the first one of the update.
        """
        per_rank, remainder = divmod(in_window, self.world)
        # The first `remainder` ranks have one micro-batch more than the others.
        begin = self.rank * per_rank + min(self.rank, remainder)
        next_rank = self.rank + 1
        end = next_rank * per_rank + min(next_rank, remainder)
        repeated_number = 0
        return range(begin, end), repeated_number


class OrderByMachine(EpochOrder):
    """The order of DATA.SAMPLER by_machine: each machine reads files of its own, the same ones in each epoch.

    The samples of a machine are shuffled anew in each epoch. A file can be cut, so that machines have equally many
    samples, or one micro-batch more. The order depends on the number of machines, and not on that of their ranks.
    """

    def __init__(self, split: Samples, machines: int, **of_epoch: Any) -> None:
        """Divide the files of the training split among the machines, once for all epochs.

        `machines`: number of machines. `of_epoch`: the arguments of `EpochOrder`.
        """
        super().__init__(**of_epoch)
        self.machines = machines
        self._files_shuffled_together = split.window
        self._full_updates, last_samples = divmod(self.used, self.global_batch)
        # The samples of one machine in all full updates of an epoch: equally many on each machine.
        self._samples_in_full_updates = self._full_updates * self.global_batch // machines
        # The last update can be smaller. Its micro-batches are divided among the machines, and its last micro-batch
        # may be partial.
        full_micro_batches = self._full_updates * self._micro_batches_per_update
        last_micro_batches = self._divided_among_machines(self._micro_batches - full_micro_batches)
        # Where each machine's samples in the last update end.
        last_ends = np.minimum(np.cumsum(last_micro_batches) * self.batch_size, last_samples)
        samples_in_last_update = np.diff(last_ends, prepend=0)
        self._used_per_machine = self._samples_in_full_updates + samples_in_last_update
        # A machine's files also have the samples that an epoch leaves out: in each epoch, these are others.
        sizes = self._used_per_machine + self._divided_among_machines(self.samples - self.used)
        files = list(itertools.pairwise(split.file_begins.tolist()))
        order = generator_of(self.seed, "machines").permutation(len(files))
        # For each machine, a list of its files: (first sample, end).
        self._files_of_machines = _cut([files[number] for number in order], sizes.tolist())

    def words(self) -> str:
        return f"{super().words()}; each of {self.machines} machines reads tar files of its own"

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the samples in the order of an epoch: of each update, the first machine's samples, then the second's.

        The samples that the epoch leaves out are at the end.
        """
        generator = self._generator(epoch)
        end_of_full = self._samples_in_full_updates
        rows_of_updates = list[np.ndarray]()
        in_last_update = list[np.ndarray]()
        left_out = list[np.ndarray]()
        for files, used in zip(self._files_of_machines, self._used_per_machine, strict=True):
            samples = shuffled_by_file(files, self._files_shuffled_together, generator)
            samples = self._repeated(samples, len(samples))
            # One row per full update. Without rows, numpy cannot infer the width.
            width = -1 if self._full_updates > 0 else 0
            rows_of_updates.append(samples[:end_of_full].reshape(self._full_updates, width))
            in_last_update.append(samples[end_of_full:used])
            left_out.append(samples[used:])
        in_full_updates = np.stack(rows_of_updates, axis=1).ravel()  # by update, then by machine
        return np.concatenate([in_full_updates, *in_last_update, *left_out])

    def _divided_among_machines(self, number: int) -> np.ndarray:
        """Divide a number of things among the machines, as equally as possible; return how many each machine gets."""
        counts = np.full(self.machines, number // self.machines)
        counts[: number % self.machines] += 1
        return counts

    def _numbers_of_rank(self, in_window: int) -> tuple[Sequence[int], int]:
        """Divide an update's micro-batches among machines, then ranks: return this rank's numbers and one to repeat.

        `in_window`: number of micro-batches of all ranks in the update. If other ranks have one micro-batch more, this
        rank computes the micro-batch to repeat with weight 0.
        """
        ranks_per_machine = self.world // self.machines
        machine, local_rank = divmod(self.rank, ranks_per_machine)
        machine_counts = self._divided_among_machines(in_window)
        end = int(machine_counts[: machine + 1].sum())
        machine_numbers = range(end - int(machine_counts[machine]), end)
        rank_numbers = np.array_split(machine_numbers, ranks_per_machine)[local_rank].tolist()
        blank_number = 0
        if self._full_updates > 0:
            # Repeat a micro-batch from this machine's own files: its first one of the previous update, which is full.
            # There, machine m begins with number m * (micro-batches per update) / machines. Counted from the beginning
            # of this update, that is one update less, so negative.
            blank_number = (machine - self.machines) * self._micro_batches_per_update // self.machines
        return rank_numbers, blank_number


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
        """Compute how many samples of each class an epoch draws.

        `labels`: those of all samples. `repeated`: how often `EpochOrder` repeats each sample that is drawn.
        """
        self._members = members_of_classes(labels)  # the samples of each class that has any
        self._samples = len(labels)
        self._repeats_in_order = repeated
        self.classes = len(self._members)
        drawn_samples = -(-self._samples // repeated)  # rounded up
        # An epoch draws `least` samples of each class, and one more of some classes, which are others in each epoch.
        self.least, self._classes_with_one_more = divmod(drawn_samples, max(self.classes, 1))
        self._most_per_class = self.least
        if self._classes_with_one_more > 0:
            self._most_per_class += 1
        smallest_class = min(map(len, self._members), default=1)
        # Most copies of a sample in an epoch: a sample of the smallest class is drawn most often (rounded up), and each
        # sample drawn is then repeated.
        self.copies = max(1, -(-self._most_per_class // smallest_class)) * repeated

    def __call__(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the samples of an epoch, in a random order."""
        counts = np.full(self.classes, self.least)
        with_one_more = generator.permutation(self.classes)[: self._classes_with_one_more]
        counts[with_one_more] += 1
        drawn = []
        for members, count in zip(self._members, counts, strict=True):
            # Each round draws all images of the class once. Copy c of sample i has the index i + c * samples.
            rounds = range(-(-count // len(members)))  # rounded up
            copies = [generator.permutation(members) + self._samples * copy for copy in rounds]
            drawn.append(np.concatenate(copies)[:count])
        return generator.permutation(np.concatenate(drawn))

    def words(self, whole: bool = True) -> str:
        """Describe the order for the banner of a run. `whole`: an epoch leaves out none of the samples drawn."""
        # A class has `least` images per epoch, or one more; `EpochOrder` repeats each of them.
        if whole:
            numbers = " or ".join(
                f"{number * self._repeats_in_order:,}" for number in range(self.least, self._most_per_class + 1)
            )
        else:
            numbers = f"up to {self._most_per_class * self._repeats_in_order:,}"
        repeated = f", each image at most {self.copies} times" if self.copies > 1 else ""
        return f"sampler balanced: {numbers} images of each of {self.classes} classes per epoch{repeated}"


def validation_batches(samples: int, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """Return a rank's batches of one pass through all samples: samples rank, rank + world, and so on.

    All batches have one shape, and every rank has equally many; -1 is padding. `batch_size` is the maximum: batches are
    smaller if that gives as many batches with less padding. `samples`: their number. `world`: number of ranks.
    """
    # All divisions round up: -(-a // b).
    most_per_rank = -(-samples // world)
    batches = -(-most_per_rank // batch_size)
    if batches == 0:
        return []
    size = -(-most_per_rank // batches)
    padded = np.full(batches * size, PADDING, dtype=np.int64)
    rank_samples = np.arange(rank, samples, world)
    padded[: len(rank_samples)] = rank_samples
    return list(padded.reshape(batches, size))


def whole_batches(samples: int, batch_size: int, rank: int, world: int) -> list[np.ndarray]:
    """Return the validation batches of a rank: every `world`-th of the batches that a single process would have.

    So each batch has the samples that it would have in a single process, and gives the same results. Ranks that would
    have one batch fewer than others get a batch of padding.
    """
    batches = validation_batches(samples, batch_size, rank=0, world=1)
    if batches:
        padding = np.full_like(batches[0], PADDING)
        missing = -len(batches) % world  # until all ranks have equally many
        batches += itertools.repeat(padding, missing)
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
    # The order of epoch 1 and the labels. Checkpoints of older versions have only this hash, without the images' names;
    # it must stay comparable with theirs, so the names are hashed on their own, in `data`.
    order_hash = hashlib.sha256(order.permutation(1).data)
    samples = dataset.single_images()
    if samples:
        order_hash.update(samples.labels.tobytes())
    identity: dict[str, Any] = {
        "number": order.samples,
        "updates": order.updates,
        "order": order_hash.hexdigest(),
        "data": data_identity(dataset),
    }
    if samples and samples.relabel:
        identity["relabel"] = samples.relabel
    groups = set(dataset.groups())
    if groups:
        identity["groups"] = len(groups)
    return identity
