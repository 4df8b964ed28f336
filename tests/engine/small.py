"""A training small enough to be looked into, made of the engine's own parts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from datasets import Batch, MicroBatch, Window
from engine.amp.precision import Precision
from engine.inputs.batches import Inputs
from engine.machine.device import Run
from engine.measure.meters import TrainMeters
from engine.optim.schedule import Schedule, build_scheduler
from engine.setup import ReadyToTrain, TunedModel, build_for_training, callbacks
from engine.speed.speedup import BuiltModel, Choice, Speedup
from engine.speed.tuning import speedups
from engine.task.one import OneLabel
from engine.update import TrainState, train_update
from utils.config import AmpConfig, Config, TrainConfig, load_config
from utils.distributed.world import ALONE, World

CPU = torch.device("cpu")
FP16 = AmpConfig(ENABLED=True, DTYPE="fp16")
BF16 = AmpConfig(ENABLED=True, DTYPE="bf16")
OFF = AmpConfig()


def build(tiny: Path, device: torch.device = CPU, world: World = ALONE, /, **words: object) -> ReadyToTrain:
    """The tiny recipe, ready for its first update. AMP__DTYPE is AMP.DTYPE."""
    torch.set_num_threads(1)
    settings = {key.replace("__", "."): str(value) for key, value in words.items()}
    if device.type != "cpu":
        settings["DEVICE"] = device.type
    config = load_config(str(tiny), words=settings).config
    ready = build_for_training(Run(config, world, device, threads=1), None)
    ready.parts.assemble()
    return ready


def built_of(
    model: nn.Module, precision: Any = None, before: Mapping[str, Any] | None = None, **settings: Any
) -> BuiltModel:
    """A model of one's own for the choice of its shapes, in fp32 on a CPU unless told otherwise."""
    config = Config.model_validate(settings)
    return BuiltModel(config, model, Inputs(config.DATA), precision or Precision(OFF, CPU), ALONE, before or {})


def chosen(kind: type[Speedup], built: BuiltModel) -> Choice:
    """The choice of a speed-up; that not to have it where its settings and the device exclude it."""
    return next(
        (one.choose(built) for one in speedups(built.config, built.precision) if type(one) is kind), Choice(False)
    )


def windows(ready: ReadyToTrain) -> Iterator[Window]:
    """Windows without end, epoch after epoch."""
    epoch = 1
    while True:
        yield from ready.train_loader.epoch(epoch)
        epoch += 1


def train(ready: ReadyToTrain, updates: int, source: Iterator[Window] | None = None, done: int = 0) -> None:
    source = source or windows(ready)
    for update in range(done + 1, done + updates + 1):
        train_update(ready.parts, next(source), update)


def saved_bytes(compute: Callable[..., Any], *given: Any, known: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors that a forward pass saves for the backward pass, `known` ones not counted."""
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        compute(*given)
    return sum(saved.values())


class Scale(nn.Module):
    """One weight, multiplied with the mean pixel: the gradient is what the images say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).mean(1, keepdim=True) * self.weight


def mean_output(logits: Tensor, _labels: Tensor) -> Tensor:
    return logits.mean()


def parts_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    amp: AmpConfig = OFF,
    criterion: Callable[[Tensor, Tensor], Tensor] = mean_output,
    grad_clip: float | None = None,
    updates: int = 100,
    train_config: TrainConfig | None = None,
) -> TrainState:
    """The parts of an update around a model of one's own; constant learning rate 1 unless told otherwise."""
    settings = train_config or TrainConfig(NUM_EPOCHS=1, WARMUP_EPOCHS=0, BASE_LR=1.0, END_LR=1.0)
    rates = (settings.BASE_LR, settings.WARMUP_START_LR, settings.END_LR)
    schedule = Schedule(build_scheduler(optimizer, settings, rates, updates), optimizer, updates)
    precision = Precision(amp, CPU)
    config, tuned = Config(AMP=amp, TRAIN=settings), TunedModel(model, nn.Identity(), precision)
    return TrainState(
        model=model,
        forward=model,
        inputs=nn.Identity(),
        criterion=criterion,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        meters=TrainMeters(CPU, ALONE, OneLabel(10)),
        grad_clip=grad_clip,
        seed=0,
        world=ALONE,
        callbacks=tuple(callbacks(config, tuned, ALONE, False, {}, None)),
    )


def window_of(*images: Tensor, weights: tuple[float, ...] | None = None) -> Window:
    """One update's micro-batches from tensors of images; all labels are 0."""
    shares, batches = [], []
    for number, micro in enumerate(images):
        weight = weights[number] if weights else 1 / len(images)
        indices = torch.arange(len(micro))
        shares.append(MicroBatch(number, indices.numpy(), weight))
        batches.append(Batch(micro, torch.zeros(len(micro), dtype=torch.int64), indices))
    return Window(tuple(shares), iter(batches))


def flat(value: float, samples: int = 4) -> Tensor:
    return torch.full((samples, 1, 2, 2), value)
