"""timm's training loop, for the table `timm`: that of its train.py, or one assembled from its package."""

# timm exports these for everybody; its type stubs call them private.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm.optim
import timm.scheduler
import timm.utils
import torch
from timm.data.loader import PrefetchLoader
from torch import Tensor

from datasets import Batch
from tools.benchmark_amp.against_timm.start import Start
from tools.benchmark_amp.against_timm.ways import FUSED, Way
from utils.config import Config
from utils.errors import UserError


class Timm:
    """timm's training, assembled from its package as in its train.py.

    FUSED adds what train.py's flags offer for speed: torch's fused AdamW, and torch.compile if the way is compiled.
    """

    def __init__(self, way: Way, config: Config, device: torch.device) -> None:
        start = self.start = Start(config, device, way.precision)
        train = config.TRAIN
        fused: Any = {"fused": True} if way.kind == FUSED else {}
        self.optimizer = timm.optim.create_optimizer_v2(
            start.model,
            opt="adamw",
            lr=train.BASE_LR,
            weight_decay=train.WEIGHT_DECAY,
            **train.OPTIMIZER.arguments(),
            **fused,
        )
        self.schedule = timm.scheduler.CosineLRScheduler(
            self.optimizer,
            start.total - start.warmup,
            lr_min=train.END_LR,
            warmup_t=start.warmup,
            warmup_lr_init=train.WARMUP_START_LR,
            warmup_prefix=True,
            t_in_epochs=False,
        )
        self.ema = timm.utils.ModelEmaV3(start.model, decay=train.MODEL_EMA_DECAY)
        scaled = way.precision == "fp16" and device.type == "cuda"
        self.scaler = timm.utils.NativeScaler(device.type) if scaled else None
        if way.compiled:  # torch 2.11 would reuse the cached graph of fp16 for bf16
            torch.compiler.config.cache_key_tag = f" precision={way.precision}"  # pyright: ignore[reportAttributeAccessIssue]
        self.model: Callable[[Tensor], Tensor] = torch.compile(start.model) if way.compiled else start.model
        self.done = 0
        self.optimizer.zero_grad()

    def train(self, batches: list[Batch]) -> None:
        self._epoch(batches)

    def train_one(self, batch: Batch) -> float:
        return self._epoch([batch])

    def _loader(self, batches: list[Batch]) -> PrefetchLoader:
        mean, std = self.start.mean_and_std()
        pairs: Any = [(batch.images, batch.labels) for batch in batches]
        return PrefetchLoader(pairs, mean, std, self.start.config.DATA.IMAGE_CHANNELS, self.start.device)

    def _epoch(self, batches: list[Batch]) -> float:
        """Train one pass over the batches and return the mean loss; it is read at every update, as in timm's loop."""
        losses, clip = timm.utils.AverageMeter(), self.start.clip
        for images, targets in self._loader(batches):
            with self.start.autocast():
                loss = self.start.criterion(self.model(images), targets)
            weights = self.start.model.parameters()
            if self.scaler is not None:
                self.scaler(loss, self.optimizer, clip_grad=clip, parameters=weights)
            else:
                loss.backward()
                timm.utils.dispatch_clip_grad(weights, clip)
                self.optimizer.step()
            losses.update(loss.item(), len(images))
            self.done += 1
            self.optimizer.zero_grad()
            self.ema.update(self.start.model, step=self.done)
            self.schedule.step_update(self.done, metric=losses.avg)
        return losses.avg


class TimmTrain(Timm):
    """timm's training by the loop of its train.py."""

    def __init__(self, way: Way, config: Config, device: torch.device) -> None:
        super().__init__(way, config, device)
        assert way.train_py is not None
        script = import_train_py(way.train_py)
        self._loop = script.train_one_epoch
        words = ["--clip-grad", str(self.start.clip), "--model-ema"]
        self._args = script.parser.parse_args(words)
        vars(self._args).update(prefetcher=True, distributed=False, rank=0, local_rank=0, world_size=1)
        self._takes = inspect.signature(self._loop).parameters
        if "task" in self._takes:
            from timm.task import ClassificationTask

            self._task = ClassificationTask(self.start.model, self.start.criterion, device=device, verbose=False)
            self._task.trainable_module_ema = self.ema
            if way.compiled:
                self._task.compile()

    def _epoch(self, batches: list[Batch]) -> float:
        given: dict[str, Any] = {
            "epoch": 0,
            "model": self.model,
            "loader": self._loader(batches),
            "optimizer": self.optimizer,
            "loss_fn": self.start.criterion,
            "args": self._args,
            "task": getattr(self, "_task", None),
            "device": self.start.device,
            "lr_scheduler": _ContinuedSchedule(self),
            "amp_autocast": self.start.autocast,
            "loss_scaler": self.scaler,
            "model_ema": self.ema,
        }
        return self._loop(**{name: value for name, value in given.items() if name in self._takes})["loss"]


class _ContinuedSchedule:
    """Schedule that counts on: timm's loop is called for a few updates at a time and counts from 0 in each call."""

    def __init__(self, timm_loop: Timm) -> None:
        self._timm = timm_loop

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self._timm.done += 1
        self._timm.schedule.step_update(self._timm.done, metric=metric)


def import_train_py(path: Path) -> Any:
    """Import timm's train.py as a module, without running it."""
    spec = importlib.util.spec_from_file_location("timm_train_script", path)
    if spec is None or spec.loader is None:
        raise UserError(f"-timm_train {path}: not a Python file; give train.py of timm's repository.")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    try:
        spec.loader.exec_module(script)
    except Exception as error:  # the user's file may raise anything
        raise UserError(f"-timm_train {path}: cannot be imported ({type(error).__name__}: {error}).") from error
    if not hasattr(script, "train_one_epoch") or not hasattr(script, "parser"):
        raise UserError(f"-timm_train {path}: lacks train_one_epoch or parser; give train.py of timm's repository.")
    logging.getLogger("train").setLevel(logging.WARNING)
    return script
