"""Trial updates that find how large a batch fits into memory.

They use a model, an optimiser and an EMA of their own, on made-up images, so the run is not affected.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from datasets import Batch, ImageDataset, Share, Window, open_dataset
from engine.amp.skip_watch import OverflowWatch, replay_bytes
from engine.machine.device import synchronize
from engine.machine.memory import is_out_of_memory
from engine.setup import model_in_precision, update_parts
from engine.task import task_of
from engine.update import Parts, train_update
from models import unfreeze
from utils.config import Config
from utils.distributed.world import ALONE, World
from utils.text import counted

STEP = 8
"""Batch sizes are multiples of this, for tensor cores, unless fewer images fit."""
MOST, MOST_ON_CPU = 8192, 1024
LEAST_UPDATES = 8
"""Minimum number of updates in an epoch, even if a larger batch fits."""
SECONDS_PER_TRIAL_ON_CPU = 15.0
UPDATES_PER_TRIAL = 2  # the optimiser has its state only after the first


@dataclass(frozen=True)
class Limit:
    """Largest batch to try, and the reason."""

    batch: int
    why: str


def largest_that_fits(fits: Callable[[int], bool], most: int, enough: Callable[[], bool] = lambda: False) -> int:
    """Largest size that fits: by doubling, then by bisection in steps of 8, or of 1 if 8 do not fit. 0 if none fits.

    `enough`: called after each success; True if no larger size should be tried.
    """
    good, bad, size = 0, most + 1, min(STEP, most)
    while size > good:
        if fits(size):
            good = size
            if enough():
                break
        else:
            bad = size
        if bad > most:
            size = min(2 * good, most)
        else:
            step = STEP if good >= STEP else 1
            size = (good // step + -(-bad // step)) // 2 * step
    return good


class Trial:
    """Trial updates, or trial batches of a validation."""

    def __init__(
        self,
        config: Config,
        accumulates: bool,
        device: torch.device,
        take_peak: Callable[[], int],
        each: int | None = None,
    ) -> None:
        """`accumulates`: gradients exist during the forward pass even if ACCUM_ITER is 1.

        `each`: images per update and process, if the global batch is given.
        """
        self._each = each
        # Pretrained weights take as much memory as random ones.
        self._config = config.model_copy(update={"MODEL": config.MODEL.model_copy(update={"PRETRAINED": None})})
        self._device, self._take_peak = device, take_peak
        self._micro_batches = 2 if accumulates or config.TRAIN.ACCUM_ITER > 1 else 1
        self._datasets = [self._open(train) for train in ((False,) if config.EVAL else (True, False))]
        self._model = model_in_precision(self._config, device)
        self._parts = None if config.EVAL else self._build_parts()
        self._seconds = 0.0
        self.peaks: dict[int, int] = {}

    def _open(self, train: bool) -> ImageDataset:
        """Open the data set: in the run, it takes its part of the memory, too."""
        config = self._config
        return open_dataset(config.DATA, train, config.MODEL.NUM_CLASSES, config.SEED, self._device)

    def _build_parts(self) -> Parts:
        data = self._config.DATA.model_copy(update={"BATCH_SIZE": STEP})
        train = self._config.TRAIN.model_copy(update={"ACCUM_ITER": self._micro_batches})
        numbered = self._config.model_copy(update={"DATA": data, "TRAIN": train})
        unfreeze(self._model[0])  # MODEL.UNFREEZE_EPOCH: the batch must fit in every epoch
        parts = update_parts(numbered, ALONE, self._device, self._model, per_epoch=1000)
        self._keeps_images = parts.ability(OverflowWatch) is not None
        # It would replay overflows; `_replay_memory` takes the memory that it would.
        parts.leave_out(OverflowWatch)
        parts.assemble()
        return parts

    def most(self, each: int | None, world: World) -> Limit:
        """Limit of the search. `each`: images per update and process, if the global batch is given."""
        config, samples, host = self._config, len(self._datasets[0]), self._device.type == "cpu"
        limits = [
            Limit(MOST_ON_CPU if host else MOST, f"no larger one is tried on a {'CPU' if host else 'GPU'}"),
            Limit(max(1, samples // world.size), f"there are only {counted(samples, 'image')}"),
        ]
        if each is not None:
            limits.append(Limit(each, "no more are needed for the global batch"))
        elif not config.EVAL:
            at_most = samples // (LEAST_UPDATES * world.size * config.TRAIN.ACCUM_ITER)
            words = f"with more, an epoch of {samples:,} images would have fewer than {LEAST_UPDATES} updates"
            limits.append(Limit(max(1, at_most // STEP * STEP or at_most), words))
        return min(limits, key=lambda limit: limit.batch)

    def fits(self, batch: int) -> bool:
        done = self._try(batch)
        if not done:
            gc.collect()  # free what the error held
        self.peaks[batch] = self._take_peak()
        return done

    def slow(self) -> bool:
        """Whether twice the batch would take too long to try: a CPU has memory for more than it computes in minutes."""
        return self._device.type == "cpu" and 2 * self._seconds > SECONDS_PER_TRIAL_ON_CPU

    def words_if_slow(self) -> str:
        return "; a larger one would take too long to try on this CPU" if self.slow() else ""

    def _try(self, batch: int) -> bool:
        try:
            for number in range(1, UPDATES_PER_TRIAL + 1):
                began = time.perf_counter()
                if self._parts is None:
                    self._validate(batch)
                else:
                    self._train(self._parts, batch, number)
                synchronize(self._device)
                # Overwritten by the last update: the first one may import much.
                self._seconds = UPDATES_PER_TRIAL * (time.perf_counter() - began)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            if self._parts is not None:
                self._parts.optimizer.zero_grad(set_to_none=True)
                self._parts.forward.zero_grad(set_to_none=True)
        return True

    def _train(self, parts: Parts, batch: int, update: int) -> None:
        weight = 1 / self._micro_batches
        shares = tuple(Share(number, np.arange(batch), weight) for number in range(self._micro_batches))
        held = self._replay_memory(batch)
        train_update(parts, Window(shares, (self._batch(batch) for _ in shares)), update)
        del held

    def _replay_memory(self, batch: int) -> torch.Tensor | None:
        """As much memory as a run needs for the images that it keeps for replays of overflows."""
        if not self._keeps_images:
            return None
        data, window = self._config.DATA, self._each or batch * self._config.TRAIN.ACCUM_ITER
        image = data.IMAGE_CHANNELS * data.IMAGE_SIZE**2
        return torch.ones(replay_bytes(window * image), dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def _validate(self, batch: int) -> None:
        model, inputs, precision = self._model
        model.eval()
        with precision.autocast(training=False):
            model(inputs(self._batch(batch).images))

    def _batch(self, size: int) -> Batch:
        data, device = self._config.DATA, self._device
        shape = (size, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        return Batch(images, task_of(self._config).example(size, device), torch.arange(size))
