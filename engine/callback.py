"""A callback: what a run may or may not have, such as an EMA. `callbacks` in engine/setup.py has their order."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from datasets import Batch, MicroBatch
from engine.measure.throughput import Stages
from vitamp.metrics import WeightSet


class Computing(Protocol):
    """What computes a micro-batch, and what trains it."""

    model: nn.Module
    """The module that is trained and saved."""
    forward: nn.Module
    """The module that is called: the model, DDP around it, or a copy."""
    inputs: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    batch_transform: Callable[[Tensor, Tensor], Any]
    optimizer: Optimizer
    stages: Stages
    compute: Callable[[Batch], Any]
    """Forward pass of a micro-batch, compiled or eager."""
    eager: Callable[[Batch], Any]
    """The same without compiled code around it."""
    after_pause: Callable[[], None]
    """To be called after what is no training, such as compiling."""


class Figure(NamedTuple):
    """A value that a callback reports with the metrics of an update."""

    value: float
    words: str
    """For the log line, such as 'Size: 96'"""


class Callback:
    """A method does nothing unless a callback needs it. The updates' methods must not wait for the device.

    None sees the loss: what follows it belongs in engine/measure/meters.py.
    """

    def attach(self, to: Computing) -> None:
        """Hold on to what computes, or replace some of it, such as `to.forward`. A collective call.

        Called anew when modules move to fp32.
        """

    def enter(self, epoch: int, *models: nn.Module) -> None:
        """Prepare these models for an epoch."""

    def after_backward(self, share: MicroBatch, batch: Batch) -> None:
        """The gradients of a micro-batch are there."""

    def before_step(self, update: int) -> None:
        """The gradients of all micro-batches of an update are there, still scaled."""

    def after_update(self, update: int, stepped: bool | Tensor) -> None:
        """`stepped`: whether the optimiser changed the weights; a tensor where only the device knows."""

    def figures(self) -> dict[str, Figure]:
        """What the log line, metrics.jsonl and charts show of the last update, by its name there.

        A collective call, which may wait for the device. The values must not depend on time or machine.
        """
        return {}

    def weights(self) -> dict[WeightSet, nn.Module]:
        """Weights beside the trained ones: validated, saved, sharded and moved to fp32 with them."""
        return {}

    def state(self) -> dict[str, Any]:
        """Entries of a checkpoint's state.pt. No collective call: some ranks ask more often than others."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned."""

    def rows(self) -> dict[str, str]:
        """Row of the banner -> words."""
        return {}

    def noted(self) -> dict[str, Any]:
        """Choices for run.json and checkpoints, which a resumed run repeats or checks."""
        return {}


A = TypeVar("A", bound=Callback)
