"""Help to measure: a fresh process for each measurement, and a training that is built but not run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from datasets import Window
from engine.amp.op_lists import OpLists
from engine.machine.device import Run, pick_device, set_up_device
from engine.machine.memory import is_out_of_memory
from engine.measured_rate import settle_rate
from engine.memory.global_batch import with_global_batch
from engine.setup import ReadyToTrain, build_for_training
from utils.config import Config
from utils.config.kinds import AUTO
from utils.distributed.world import ALONE
from utils.errors import first_line
from utils.program import die_with_parent

PRELOADED = ["torch", "torchvision.transforms.v2", "timm", "timm.optim", "timm.scheduler", "pydantic"]
"""Imported once by the fork server, for all measuring processes."""
OUT_OF_MEMORY = "out of memory"


def own_process() -> ProcessPoolExecutor:
    """Create a pool of one fresh process, in which no setting of torch is left from other measurements."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    start_method = multiprocessing.get_start_method()
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin_process, initargs=(start_method,))


def _begin_process(start_method: str) -> None:
    """Prepare the process of a pool: only the parent ends it, also after Ctrl-C, and it never outlives the parent.

    `start_method`: how this process is to start data loading processes, as a run does. The pool itself was started with
    a fork server; with that, each data loading process would import torch.
    """
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence_torchao()
    die_with_parent()


def silence_torchao() -> None:
    """Hide a warning that importing torchao triggers in torch; users cannot do anything about it."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def reason(error: BaseException) -> str:
    """Describe in one line why a measurement failed."""
    return OUT_OF_MEMORY if is_out_of_memory(error) else first_line(error)


@contextlib.contextmanager
def opened(config: Config, compiled: bool = True) -> Iterator[tuple[ReadyToTrain, Iterator[Window]]]:
    """Build everything that a run builds before its first update, so that updates can be measured; close it afterwards.

    Gives the built objects, and an endless iterator over the windows (the batches of one update each), epoch after
    epoch. `compiled`: compile as TRAIN.COMPILE says; False: stay eager. TRAIN.COMPILE=auto compiles nothing either: it
    might compile in one precision and not in another, and their measurements could not be compared.
    """
    train = config.TRAIN
    if train.COMPILE == "auto" or not compiled:
        config = config.changed(TRAIN={"COMPILE": "none"})
    if train.GLOBAL_BATCH is not None:
        config = with_global_batch(config, train.GLOBAL_BATCH, ALONE)
    device = pick_device(config.DEVICE, ALONE)
    threads = set_up_device(config, device, ALONE)
    with OpLists(device.type, config.AMP.CUSTOM_WHITE_LIST, config.AMP.CUSTOM_BLACK_LIST):
        run = Run(config, ALONE, device, threads)
        if AUTO in (config.TRAIN.BASE_LR, config.TRAIN.LAYER_DECAY):
            run = settle_rate(run, None)
        # A dry run, which needs no pass over the data before its updates, such as one for features.
        ready = build_for_training(run, None, dry=True)
        try:
            ready.parts.assemble()  # callbacks attach to the model
            yield ready, _windows(ready)
        finally:
            ready.train_loader.close()


def _windows(ready: ReadyToTrain) -> Iterator[Window]:
    """Yield the windows of all updates without end, and enter each epoch before its first window."""
    updates_per_epoch = ready.train_loader.order.updates
    for number, window in enumerate(ready.train_loader.epochs(itertools.count(1))):
        if number % updates_per_epoch == 0:
            ready.parts.enter(number // updates_per_epoch + 1)
        yield window
