"""Trying how large a batch fits into memory, by making updates with it.

With a model, an optimiser and an average of its own, and on made-up images: nobody else sees any of it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from datasets import Batch, ImageDataset, Share, Window, open_dataset
from engine.amp.skip_watch import kept_for_replays
from engine.machine.device import wait_for
from engine.machine.memory import is_out_of_memory
from engine.setup import model_in_precision, update_parts
from engine.update import Parts, train_update
from utils.config import Config
from utils.distributed.world import ALONE, World

STEP = 8
"""Found are multiples of this, which tensor cores like, unless fewer fit."""
MOST, MOST_ON_CPU = 8192, 1024
LEAST_UPDATES = 8
"""An epoch keeps so many, however much fits."""
SECONDS_A_TRY_ON_CPU = 15.0
UPDATES_A_TRY = 2  # the optimiser has its state only after the first


@dataclass(frozen=True)
class Most:
    """A limit of what is tried, and what sets it."""

    batch: int
    why: str


def largest_that_fits(fits: Callable[[int], bool], most: int, enough: Callable[[], bool] = lambda: False) -> int:
    """By doubling, then by halving what is between, in steps of 8, or of 1 where 8 do not fit. 0: not even one does.

    `enough`: asked after each success; no larger one is to be tried.
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
    """Updates, or the batches of a validation, on made-up images."""

    def __init__(
        self,
        config: Config,
        accumulates: bool,
        device: torch.device,
        take_peak: Callable[[], int],
        each: int | None = None,
    ) -> None:
        """`accumulates`: gradients will be there in the forward pass, though ACCUM_ITER does not say so.

        `each`: images of an update and process, where the global batch is given.
        """
        self._each = each
        # Weights take as much room whatever they are.
        self._config = config.model_copy(update={"MODEL": config.MODEL.model_copy(update={"PRETRAINED": None})})
        self._device, self._take_peak = device, take_peak
        self._micro_batches = 2 if accumulates or config.TRAIN.ACCUM_ITER > 1 else 1
        self._sets = [self._open(train) for train in ((False,) if config.EVAL else (True, False))]
        self._computing = model_in_precision(self._config, device)
        self._parts = None if config.EVAL else self._built_parts()
        self._seconds = 0.0
        self.peaks: dict[int, int] = {}

    def _open(self, train: bool) -> ImageDataset:
        """What lies in memory during the run does so now, too."""
        config = self._config
        return open_dataset(config.DATA, train, config.MODEL.NUM_CLASSES, config.SEED, self._device)

    def _built_parts(self) -> Parts:
        numbered = self._config.model_copy(update={"DATA": self._config.DATA.model_copy(update={"BATCH_SIZE": STEP})})
        parts = update_parts(numbered, ALONE, self._device, self._computing, per_epoch=1000)
        parts.start_computing()
        self._keeps_images = parts.watch is not None
        parts.watch = None  # would replay updates that overflow; what it keeps is taken in its place
        return parts

    def most(self, each: int | None, world: World) -> Most:
        """`each`: images of an update and process, where the global batch is given."""
        config, samples, host = self._config, len(self._sets[0]), self._device.type == "cpu"
        limits = [
            Most(MOST_ON_CPU if host else MOST, f"no larger one is tried on a {'CPU' if host else 'GPU'}"),
            Most(max(1, samples // world.size), f"there are only {samples:,} images"),
        ]
        if each is not None:
            limits.append(Most(each, "no more are asked for"))
        elif not config.EVAL:
            at_most = samples // (LEAST_UPDATES * world.size * config.TRAIN.ACCUM_ITER)
            words = f"with more, an epoch of {samples:,} images would have less than {LEAST_UPDATES} updates"
            limits.append(Most(max(1, at_most // STEP * STEP or at_most), words))
        return min(limits, key=lambda limit: limit.batch)

    def fits(self, batch: int) -> bool:
        done = self._try(batch)
        if not done:
            gc.collect()  # what an error left behind
        self.peaks[batch] = self._take_peak()
        return done

    def slow(self) -> bool:
        """Whether trying twice the batch would take too long: a CPU's memory holds more than it computes in minutes."""
        return self._device.type == "cpu" and 2 * self._seconds > SECONDS_A_TRY_ON_CPU

    def words_if_slow(self) -> str:
        return "; a larger one would take too long to try on this CPU" if self.slow() else ""

    def _try(self, batch: int) -> bool:
        try:
            for number in range(1, UPDATES_A_TRY + 1):
                began = time.perf_counter()
                if self._parts is None:
                    self._validate(batch)
                else:
                    self._train(self._parts, batch, number)
                wait_for(self._device)
                self._seconds = UPDATES_A_TRY * (time.perf_counter() - began)  # of the last: the first may import much
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
        kept = self._kept(batch)
        train_update(parts, Window(shares, (self._batch(batch) for _ in shares)), update)
        del kept

    def _kept(self, batch: int) -> torch.Tensor | None:
        """As much memory as the images take that a run keeps for replays of updates that overflow."""
        if not self._keeps_images:
            return None
        data, window = self._config.DATA, self._each or batch * self._config.TRAIN.ACCUM_ITER
        image = data.IMAGE_CHANNELS * data.IMAGE_SIZE**2
        return torch.ones(kept_for_replays(window * image), dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def _validate(self, batch: int) -> None:
        model, inputs, precision = self._computing
        model.eval()
        with precision.autocast(training=False):
            model(inputs(self._batch(batch).images))

    def _batch(self, size: int) -> Batch:
        data, device = self._config.DATA, self._device
        shape = (size, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        labels = torch.randint(0, self._config.MODEL.NUM_CLASSES, (size,), device=device)
        return Batch(images, labels, torch.arange(size))
