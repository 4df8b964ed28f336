"""The base class of callbacks. Each is an ability that a run may or may not have, such as an EMA.

`callbacks` in engine/setup.py builds those of a run, and decides their order.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from datasets import Batch, MicroBatch
from engine.measure.throughput import Stages
from vitamp.metrics import WeightSet


class Computing(Protocol):
    """The part of `TrainState` that callbacks see: what computes a micro-batch, and what trains the model."""

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
    """The same forward pass without compiled code around it."""
    after_pause: Callable[[], None]
    """To be called after what is no training, such as compiling, so that it does not count in speeds."""


class Figure(NamedTuple):
    """A value that a callback reports with the metrics of an update."""

    value: float
    words: str
    """For the log line, such as 'Size: 96'"""


class Callback:
    """An ability of a run. The loop calls its methods, which do nothing unless a subclass overrides them.

    The methods of an update (`after_backward`, `before_step`, `after_update`) must not wait for the device. No method
    sees the loss: what depends on it belongs in engine/measure/meters.py.
    """

    def attach(self, to: Computing) -> None:
        """Hold on to what computes, or replace some of it, such as `to.forward`. A collective call.

        Called before the first update, and again when modules move to fp32.
        """

    def enter(self, epoch: int, *models: nn.Module) -> None:
        """Called before an epoch: prepare these models for it."""

    def after_backward(self, share: MicroBatch, batch: Batch) -> None:
        """Called after the backward pass of a micro-batch, whose gradients are added to those before."""

    def before_step(self, update: int) -> None:
        """Called when the gradients of all micro-batches of an update are summed up, still scaled."""

    def after_update(self, update: int, stepped: bool | Tensor) -> None:
        """Called after the optimiser's step.

        `stepped`: whether the optimiser changed the weights, or skipped the update; a tensor if only the device knows.
        """

    def figures(self) -> dict[str, Figure]:
        """Return values of the last update for the log line, metrics.jsonl and charts, by their names there.

        A collective call, which may wait for the device. The values must not depend on time or machine.
        """
        return {}

    def weights(self) -> dict[WeightSet, nn.Module]:
        """Return further sets of weights: validated, saved, sharded and moved to fp32 with the trained ones."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return entries for a checkpoint's state.pt. No collective call: some ranks ask more often than others."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from the training state of a checkpoint the entries that `state` returned."""

    def rows(self) -> dict[str, str]:
        """Return rows for the banner: name of the row -> text."""
        return {}

    def noted(self) -> dict[str, Any]:
        """Return choices for run.json and checkpoints, which a resumed run repeats or checks."""
        return {}


A = TypeVar("A", bound=Callback)
