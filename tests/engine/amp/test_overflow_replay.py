"""The replay of a skipped update leaves no trace, is rare, and finds the batch it is about."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.amp import overflow
from tests.engine.amp.overflowing import Forward, blame_of, hold, micro_batch, vit, watch_of, with_huge_bias
from utils.seeding import seed_all

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- no trace


def test_replay_has_no_side_effects() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 10))
    model[4].eval()
    nn.init.constant_(model.get_parameter("4.bias"), 7e4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda _: pytest.fail("others wait for this gradient"))
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    tensors = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.modules()]
    hooks = len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)

    assert blame_of(model).module == "4"

    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    for name, (gradient, before) in gradients.items():
        assert model.get_parameter(name).grad is gradient
        assert torch.equal(gradient, before)
    now = model.state_dict(keep_vars=True)
    for name, (value, before) in tensors.items():
        assert now[name] is value
        assert torch.equal(value, before)
    assert [module.training for module in model.modules()] == modes
    assert (len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)) == hooks
    assert not torch.is_autocast_enabled("cpu")


def test_replay_draws_the_random_numbers_of_the_update() -> None:
    drawn: list[Tensor] = []
    model = nn.Sequential(Forward(lambda x: (drawn.append(torch.rand(3)), x)[1]), nn.Flatten(), nn.Linear(192, 10))
    watch = watch_of(model)
    hold(watch, 5, micro_batch(0), micro_batch(1))
    watch.after_update(5, False)
    for number in (0, 1):
        seed_all(7, "micro", 5, number)
        assert torch.equal(drawn[number], torch.rand(3))


def test_failing_replay_does_not_end_the_run() -> None:
    def fail(_: Tensor) -> Tensor:
        raise RuntimeError("out of memory\nwith much more to say")

    model = vit()
    model.blocks[1].mlp.drop1 = Forward(fail)
    blame = blame_of(model)
    assert blame.operation == ""
    assert "the replay failed (out of memory)" in blame.words()
    assert not nn.modules.module._global_forward_hooks


class Counted(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_normal_update_costs_one_copy_of_the_scale() -> None:
    watch, scale = watch_of(Forward(lambda _: pytest.fail("a forward pass"))), torch.tensor(2.0)
    watch._precision.scale_tensor = lambda: scale
    share, batch = micro_batch()
    held = weakref.ref(batch.images)
    with Counted() as counted:
        watch.after_backward(share, batch)
        watch.before_step(1)
        watch.after_update(1, True)
        assert watch.take() == []
    assert sorted(set(counted.names)) == ["aten::clone", "aten::detach"]
    del batch
    assert held() is None


# ---- how often


def test_replays_are_limited() -> None:
    watch = watch_of(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    for update in range(1, 121):
        hold(watch, update, micro_batch())
        watch.after_update(update, update == 2)
    found = [(blame.update, blame.passed_over) for blame in watch.take()]
    assert found == [(1, 0), (3, 0), (4, 0), (54, 49), (104, 49)]


# ---- known late


class Late:
    """Answers that arrive when the test says so."""

    def __init__(self) -> None:
        self.flags: list[Tensor] = []
        self.arrived = 0

    def __call__(self, stepped: Tensor) -> Callable[[], bool | None]:
        number = len(self.flags)
        self.flags.append(stepped.clone())
        return lambda: bool(self.flags[number]) if number < self.arrived else None


def test_late_skip_is_replayed_with_its_own_batch_and_scale() -> None:
    late = Late()
    watch, scale = watch_of(with_huge_bias(), send=late), torch.tensor(64.0)
    watch._precision.scale_tensor = lambda: scale
    for update, stepped in ((1, True), (2, False), (3, True)):
        watch.after_backward(*micro_batch(update))
        watch.before_step(update)
        scale *= 0.5  # as the scaler does, in place
        watch.after_update(update, torch.tensor([stepped]))
        assert watch.take() == []
    late.arrived = 2
    (blame,) = watch.take()
    assert (blame.update, blame.noticed_at, blame.scale) == (2, 3, 32.0)
    assert blame.sample_indices == (300, 301, 302, 303)
    assert "noticed 1 update later" in blame.words()
    assert watch.take() == []


def test_memory_of_pending_updates_is_limited(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    """Two updates of two micro-batches fit; the newest two keep their images."""
    size = micro_batch(0)[1].images.nbytes
    monkeypatch.setattr(overflow, "MAX_BYTES", 4 * size)
    late = Late()
    watch = watch_of(with_huge_bias(), send=late)
    images = []
    for update in range(1, 5):
        batches = [micro_batch(2 * update + nth) for nth in (0, 1)]
        images.append(weakref.ref(batches[0][1].images))
        hold(watch, update, *batches)
        del batches
        watch.after_update(update, torch.tensor([False]))
    assert [image() is None for image in images] == [True, True, False, False]
    late.arrived = 4
    assert [(blame.update, blame.passed_over) for blame in watch.take()] == [(3, 2), (4, 0)]
    assert [line for line in said.messages if "cannot be replayed" in line] == [said.messages[0]]
    assert said.messages[0].startswith("update 1 was skipped and cannot be replayed: the images of recent updates ")


def test_update_larger_than_the_limit_is_dropped_while_it_is_computed(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(overflow, "MAX_BYTES", 2 * micro_batch(0)[1].images.nbytes)
    watch = watch_of(with_huge_bias())
    for update in (1, 2):
        images = []
        for nth in range(5):
            share, batch = micro_batch(nth)
            images.append(weakref.ref(batch.images))
            watch.after_backward(share, batch)
            del batch
        assert all(image() is None for image in images[:-1])
        watch.before_step(update)
        watch.after_update(update, False)
    assert watch.take() == []
    assert sum("cannot be replayed" in line for line in said.messages) == 1
