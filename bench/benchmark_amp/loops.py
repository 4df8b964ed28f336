"""What the tables `timm` and `simplenet` train: loops of vitamp and timm, and a net of linear layers.

A loop reads values back from the device where it does so in real training. `train_one` is for comparing losses; its
time is not measured.
"""

# timm exports these for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm.optim
import timm.scheduler
import timm.utils
import torch
from timm.data.loader import PrefetchLoader
from torch import Tensor, nn

from bench.benchmark_amp.plan import FUSED, OURS, Way
from bench.benchmark_amp.sessions import Metrics, Session, reset_peak_memory, warmup_updates
from datasets import Batch, MicroBatch, Window
from engine.amp.low_precision import prepare_model
from engine.amp.precision import Precision, check_amp, switch_tf32
from engine.compile.choice import choose_compiling
from engine.compile.compiled import NONE, WHOLE
from engine.inputs.batches import TransformedBatch, input_of
from engine.machine.device import pick_device, set_up_device, synchronize, threads_of
from engine.machine.memory import peak_memory_gb
from engine.setup import TunedModel, build_train_state, tuned_model
from engine.update import train_update
from models.build import build_model
from utils.config import Config
from utils.distributed.world import ALONE
from utils.errors import UserError
from utils.seeding import seed_all

COMPARED = 5
"""Number of updates whose losses are compared."""
BATCHES = 16
"""Number of different batches; then the first one is used again."""
UPDATES_PER_EPOCH = 100
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIMPLENET_WARMUP = 2


class LoopSession(Session):
    """One loop in a measuring process: its first losses, and its turns of `updates`."""

    def __init__(self, way: Way, config: Config, updates: int) -> None:
        self._device = pick_device(config.DEVICE, ALONE)
        self._loop = loop_of(way, config, self._device)
        self._batches = itertools.cycle(random_batches(config, self._device))
        self._way = way
        self._size = config.DATA.BATCH_SIZE
        self._updates = updates
        self.started = {"losses": [self._loop.train_one(batch) for batch in itertools.islice(self._batches, COMPARED)]}
        self._loop.train(list(itertools.islice(self._batches, max(0, warmup_updates(updates) - COMPARED))))
        synchronize(self._device)
        torch.cuda.empty_cache()  # leaves memory to the other loops, which are on the same device

    def turn(self) -> Metrics:
        batches = list(itertools.islice(self._batches, self._updates))
        reset_peak_memory(self._device)
        synchronize(self._device)
        began = time.perf_counter()
        on_cpu = time.process_time()
        self._loop.train(batches)
        synchronize(self._device)
        seconds = time.perf_counter() - began
        on_cpu = time.process_time() - on_cpu
        torch.cuda.empty_cache()
        return {
            "seconds": seconds,
            "images_per_second": len(batches) * self._size / seconds,
            "cpu_seconds": on_cpu,
            "peak_memory_gb": peak_memory_gb(self._device),
            "precision": self._way.precision,
            "choices": self._loop.choices,
            **self.started,
        }


def random_batches(config: Config, device: torch.device) -> list[Batch]:
    """Random images and labels on the device, equal in every process."""
    data = config.DATA
    generator = torch.Generator(device).manual_seed(config.SEED)
    size = (data.BATCH_SIZE, *data.shape)
    batches = []
    for _ in range(BATCHES):
        images = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
        labels = torch.randint(0, config.MODEL.NUM_CLASSES, size[:1], device=device, generator=generator)
        batches.append(Batch(images, labels, torch.arange(data.BATCH_SIZE)))
    return batches


def loop_of(way: Way, config: Config, device: torch.device) -> Ours | Timm:
    return (Ours if way.kind == OURS else Timm)(way, config, device)


class Ours:
    """The training of main_single_gpu.py."""

    def __init__(self, way: Way, config: Config, device: torch.device) -> None:
        amp = {"ENABLED": way.precision != "fp32"} | ({"DTYPE": way.precision} if way.precision != "fp32" else {})
        config = config.changed(AMP=amp, TRAIN={"COMPILE": WHOLE if way.compiled else NONE})
        set_up_device(config, device, ALONE)
        tuned = tuned_model(config, device)
        tuned.model.train()
        self.parts = build_train_state(config, ALONE, tuned, UPDATES_PER_EPOCH)
        how, why = choose_compiling(config, self.parts, ALONE, 0, {})
        self.choices = tuned.choices | {"compile": how, "compile_why": why}
        self.parts.assemble()
        self._done = 0

    def train(self, batches: list[Batch]) -> None:
        """Train one update per batch."""
        for batch in batches:
            self._done += 1
            share = MicroBatch(0, batch.indices.numpy(), 1.0)
            train_update(self.parts, Window((share,), iter((batch,))), self._done)

    def train_one(self, batch: Batch) -> float:
        """Train one update and return its loss."""
        self.train([batch])
        return self.parts.meters.read(self.parts.precision.scale_tensor(), 0.0).update.loss


class Timm:
    """timm's training from the same first weights as ours, by the loop of its train.py, or one assembled likewise.

    FUSED adds what train.py's flags offer for speed: torch's fused AdamW, and torch.compile if the way is compiled.
    """

    def __init__(self, way: Way, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.choices = dict[str, Any]()
        data = config.DATA
        train = config.TRAIN
        # The same number of threads for all; our own loop alone makes other process-wide settings.
        torch.set_num_threads(threads_of(config, ALONE))
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # as in timm's train.py
            switch_tf32(config.AMP.TF32)  # as in ours: torch's default for convolutions is TF32
        seed_all(config.SEED, "init")
        self.plain = build_model(config.MODEL, data.IMAGE_SIZE, data.IMAGE_CHANNELS).to(device).train()
        self.criterion = nn.CrossEntropyLoss()
        self.clip = train.GRAD_CLIP or math.inf
        fused: Any = {"fused": True} if way.kind == FUSED else {}
        self.optimizer = timm.optim.create_optimizer_v2(
            self.plain,
            opt="adamw",
            lr=train.BASE_LR,
            weight_decay=train.WEIGHT_DECAY,
            **train.OPTIMIZER.arguments(),
            **fused,
        )
        total = train.NUM_EPOCHS * UPDATES_PER_EPOCH
        warmup = min(round(train.WARMUP_EPOCHS * UPDATES_PER_EPOCH), total)
        self.schedule = timm.scheduler.CosineLRScheduler(
            self.optimizer,
            total - warmup,
            lr_min=train.END_LR,
            warmup_t=warmup,
            warmup_lr_init=train.WARMUP_START_LR,
            warmup_prefix=True,
            t_in_epochs=False,
        )
        self.ema = timm.utils.ModelEmaV3(self.plain, decay=train.MODEL_EMA_DECAY)
        scaled = way.precision == "fp16" and device.type == "cuda"
        self.scaler = timm.utils.NativeScaler(device.type) if scaled else None
        self.half = HALF.get(way.precision)
        if way.compiled:  # torch 2.11 would reuse the cached graph of fp16 for bf16
            torch.compiler.config.cache_key_tag = f" precision={way.precision}"  # pyright: ignore[reportAttributeAccessIssue]
        self.model: Callable[[Tensor], Tensor] = torch.compile(self.plain) if way.compiled else self.plain
        self.done = 0
        self.optimizer.zero_grad()
        self._loop = self._train_one_epoch
        self._args = None
        self._task = None
        if way.train_py is not None:
            script = read_train_py(way.train_py)
            self._loop = script["train_one_epoch"]
            self._args = script["parser"].parse_args(["--clip-grad", str(self.clip), "--model-ema"])
            vars(self._args).update(prefetcher=True, distributed=False, rank=0, local_rank=0, world_size=1)
        self._takes = inspect.signature(self._loop).parameters
        if "task" in self._takes:
            from timm.task import ClassificationTask

            self._task = ClassificationTask(self.plain, self.criterion, device=device, verbose=False)
            self._task.trainable_module_ema = self.ema
            if way.compiled:
                self._task.compile()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.half is None else torch.autocast(self.device.type, self.half)

    def train_one(self, batch: Batch) -> float:
        return self.train([batch])

    def train(self, batches: list[Batch]) -> float:
        """Train one pass over the batches and return the mean loss."""
        data = self.config.DATA
        mean, std = (tuple(input_of(data)[key]) for key in ("mean", "std"))
        pairs: Any = [(batch.images, batch.labels) for batch in batches]
        given: dict[str, Any] = {
            "epoch": 0,
            "model": self.model,
            "loader": PrefetchLoader(pairs, mean, std, data.IMAGE_CHANNELS, self.device),
            "optimizer": self.optimizer,
            "loss_fn": self.criterion,
            "args": self._args,
            "task": self._task,
            "device": self.device,
            "lr_scheduler": self,
            "amp_autocast": self.autocast,
            "loss_scaler": self.scaler,
            "model_ema": self.ema,
        }
        return self._loop(**{name: value for name, value in given.items() if name in self._takes})["loss"]

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        """The schedule for a loop that is called for a few updates at a time and counts from 0 in each call."""
        self.done += 1
        self.schedule.step_update(self.done, metric=metric)

    def _train_one_epoch(self, loader: PrefetchLoader) -> dict[str, float]:
        """As the loop of train.py, the loss is read at every update."""
        losses = timm.utils.AverageMeter()
        weights = self.plain.parameters
        for images, targets in loader:
            with self.autocast():
                loss = self.criterion(self.model(images), targets)
            if self.scaler is not None:
                self.scaler(loss, self.optimizer, clip_grad=self.clip, parameters=weights())
            else:
                loss.backward()
                timm.utils.dispatch_clip_grad(weights(), self.clip)
                self.optimizer.step()
            losses.update(loss.item(), len(images))
            self.optimizer.zero_grad()
            self.ema.update(self.plain, step=self.done + 1)
            self.step_update(self.done, losses.avg)
        return {"loss": losses.avg}


def read_train_py(path: Path) -> dict[str, Any]:
    """The names in timm's train.py, which is not run."""
    try:
        script = runpy.run_path(str(path), run_name="timm_train_script")
    except Exception as error:  # the user's file may raise anything
        raise UserError(
            f"-timm_train {path}: cannot be imported ({type(error).__name__}: {error}); give train.py of timm's "
            "repository."
        ) from error
    if not {"train_one_epoch", "parser"} <= script.keys():
        raise UserError(f"-timm_train {path}: lacks train_one_epoch or parser; give train.py of timm's repository.")
    logging.getLogger("train").setLevel(logging.WARNING)
    return script


class SimpleNet(Session):
    """The net on fixed numbers; every turn starts from the same weights and trains by the engine's own update."""

    def __init__(
        self, config: Config, device: torch.device, width: int, batches: int, enabled: bool, accumulated: int
    ) -> None:
        set_up_device(config, device, ALONE)
        self._config = config.changed(AMP={"ENABLED": enabled})
        self._device = device
        check_amp(self._config.AMP, config.TRAIN)
        self._width = width
        self._accumulated = accumulated
        generator = torch.Generator(device).manual_seed(config.SEED)
        size = config.DATA.BATCH_SIZE
        self._batches: list[Batch] = []
        for _ in range(batches):
            # Inputs followed by targets: a batch has one field for both.
            numbers = torch.randn(2, size, width, device=device, generator=generator)
            places = torch.arange(size, device=device)
            self._batches.append(Batch(numbers, torch.zeros_like(places), places))

    def turn(self) -> Metrics:
        config = self._config
        width = self._width
        for measured in (False, True):
            seed_all(config.SEED, "init")
            layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)]
            model = nn.Sequential(*layers).to(self._device)
            precision = Precision(config.AMP, self._device)
            if precision.level != "O0":
                prepare_model(model, config.AMP, precision)
            parts = build_train_state(config, ALONE, TunedModel(model, nn.Identity(), precision), len(self._batches))
            parts.criterion = nn.MSELoss()
            parts.batch_transform = lambda numbers, labels: TransformedBatch(numbers[0], numbers[1], labels)
            parts.assemble()
            windows = [window for _ in range(config.TRAIN.NUM_EPOCHS) for window in self._epoch()]
            synchronize(self._device)
            began = time.perf_counter()
            for number, window in enumerate(windows if measured else windows[:SIMPLENET_WARMUP], 1):
                train_update(parts, window, number)
            synchronize(self._device)
            seconds = time.perf_counter() - began
        reading = parts.meters.read(parts.precision.scale_tensor(), parts.schedule.last_rate())
        return {"seconds": seconds, "loss": reading.update.loss, "precision": parts.precision.name}

    def _epoch(self) -> Iterator[Window]:
        places = np.arange(self._config.DATA.BATCH_SIZE)
        for first in range(0, len(self._batches), self._accumulated):
            batches = self._batches[first : first + self._accumulated]
            shares = tuple(MicroBatch(number, places, 1 / len(batches)) for number in range(len(batches)))
            yield Window(shares, iter(batches))
