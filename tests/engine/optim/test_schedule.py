"""The learning rate of every update."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from engine.optim.build import build_optimizer, scaled_learning_rates
from engine.optim.schedule import DeviceSchedule, Schedule, build_scheduler
from engine.update import train_update
from tests.engine.small import CPU, FP16, Scale, flat, parts_of, window_of
from utils.config import OptimizerConfig, SchedulerConfig, TrainConfig

PER_EPOCH = 5


def schedule_of(scheduler: Any, optimizer: torch.optim.Optimizer, total: int, on_device: bool) -> Schedule:
    device = DeviceSchedule(scheduler, optimizer, total, CPU) if on_device else None
    return device or Schedule(scheduler, optimizer, total)


def schedule(on_device: bool = False, **settings: Any) -> tuple[Schedule, torch.optim.Optimizer]:
    """A schedule over epochs of five updates, with weights that decay and weights that do not."""
    train = TrainConfig(**settings)
    optimizer = build_optimizer(nn.Linear(2, 2), train, train.BASE_LR, CPU)
    rates = (train.BASE_LR, train.WARMUP_START_LR, train.END_LR)
    made = build_scheduler(optimizer, train, rates, PER_EPOCH)
    return schedule_of(made, optimizer, train.NUM_EPOCHS * PER_EPOCH, on_device), optimizer


def rates_of(made: Schedule, optimizer: torch.optim.Optimizer, updates: int, on_device: bool = False) -> list[float]:
    """The rate each of the coming updates is made with, the same in every group."""
    seen = []
    for _ in range(updates):
        first, *others = (float(group["lr"]) for group in optimizer.param_groups)
        assert others == [first]
        seen.append(first)
        made.advance(torch.tensor(True) if on_device else True)
        assert float(made.last_rate()) == first, "what is reported is the rate of the update just made"
    return seen


COSINE = {"NUM_EPOCHS": 6, "WARMUP_EPOCHS": 2, "BASE_LR": 1.0, "WARMUP_START_LR": 0.1, "END_LR": 0.01}


@pytest.mark.parametrize("on_device", [False, True])
def test_cosine_after_warmup(on_device: bool) -> None:
    made, optimizer = schedule(on_device, **COSINE)
    seen = rates_of(made, optimizer, 31, on_device)
    assert made.rate_at(7) == pytest.approx(seen[7])
    assert seen[:11] == pytest.approx([0.1 + 0.09 * n for n in range(11)]), "from WARMUP_START_LR to BASE_LR in a line"
    cosine = [0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * n / 20)) for n in range(21)]
    assert seen[10:] == pytest.approx(cosine)
    assert seen[30] == pytest.approx(0.01), "END_LR when all updates are made"


@pytest.mark.parametrize("name", ["cosine", "wsd"])
@pytest.mark.parametrize("on_device", [False, True])
def test_cooldown_stays_at_the_last_rate(name: str, on_device: bool) -> None:
    both = {"LR_SCHEDULER": SchedulerConfig.model_validate({"NAME": name})}
    made, optimizer = schedule(on_device, **both, **{**COSINE, "NUM_EPOCHS": 9}, COOLDOWN_EPOCHS=3)
    seen = rates_of(made, optimizer, 45, on_device)
    assert seen[:30] == rates_of(*schedule(on_device, **both, **COSINE), updates=30, on_device=on_device)
    assert seen[30:] == pytest.approx([0.01] * 15)


def test_shortest_warmup_is_one_update() -> None:
    assert rates_of(*schedule(**{**COSINE, "WARMUP_EPOCHS": 0.01}), updates=2) == pytest.approx([0.1, 1.0])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["step", "multi-step"])
def test_warmup_does_not_move_the_milestones(name: str, on_device: bool) -> None:
    shape = SchedulerConfig.model_validate({"NAME": name, "DECAY_EPOCHS": 3, "MILESTONES": (3, 6), "DECAY_RATE": 0.5})
    settings = {"NUM_EPOCHS": 9, "WARMUP_EPOCHS": 1, "WARMUP_START_LR": 0.5, "BASE_LR": 1.0, "LR_SCHEDULER": shape}
    seen = rates_of(*schedule(on_device, **settings), updates=45, on_device=on_device)
    assert seen == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9] + [1.0] * 10 + [0.5] * 15 + [0.25] * 15)


@pytest.mark.parametrize("on_device", [False, True])
def test_skipped_updates_do_not_advance_the_schedule(on_device: bool) -> None:
    made, optimizer = schedule(on_device, **COSINE)
    skipped = torch.tensor(False) if on_device else False
    rates = []
    for stepped in (skipped, skipped, True, skipped, True):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        made.advance(torch.tensor(True) if on_device and stepped is True else stepped)
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.19, 0.19])
    assert made.stepped == 2


@pytest.mark.parametrize("on_device", [False, True])
def test_schedule_is_restored_from_a_checkpoint(on_device: bool) -> None:
    whole = rates_of(*schedule(on_device, **COSINE), updates=30, on_device=on_device)
    made, optimizer = schedule(on_device, **COSINE)
    optimizer.load_state_dict(optimizer.state_dict())  # gives it new groups, as resuming does
    made.restore(12)
    assert made.stepped == 12
    assert rates_of(made, optimizer, 18, on_device) == whole[12:]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_optimizer_steps_with_rates_on_the_device(name: str) -> None:
    """Both ways of keeping the rate make the same steps, overflows included."""
    ended = []
    for on_device in (False, True):
        model = Scale()
        settings = TrainConfig(**COSINE, OPTIMIZER=OptimizerConfig(NAME=name))
        optimizer = build_optimizer(model, settings, 1.0, CPU)
        parts = parts_of(model, optimizer, FP16)
        parts.assemble()
        made = build_scheduler(optimizer, settings, (1.0, 0.1, 0.01), PER_EPOCH)
        parts.schedule = schedule_of(made, optimizer, 30, on_device)
        for update, value in enumerate((0.5, 3e38, 0.25, 3e38, 0.125, 0.5), start=1):
            train_update(parts, window_of(flat(value)), update)
        assert parts.schedule.stepped == 4
        ended.append(model.weight.item())
    assert ended[0] != 1.0
    assert ended[1] == pytest.approx(ended[0], rel=1e-6)


@pytest.mark.parametrize(("reference", "factor"), [(None, 1), (False, 1), (True, 2), (512, 2), (256.0, 4), (2048, 0.5)])
def test_linear_scaled_lr_scales_with_the_global_batch(reference: Any, factor: float) -> None:
    train = TrainConfig(BASE_LR=0.1, WARMUP_START_LR=0.01, END_LR=0.001, LINEAR_SCALED_LR=reference)
    assert scaled_learning_rates(train, 1024) == pytest.approx((0.1 * factor, 0.01 * factor, 0.001 * factor))


def test_table_of_rates_is_refilled_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With skips in between: then the count on the device lags behind the updates the host has seen."""
    monkeypatch.setattr("engine.optim.schedule.TABLE_UPDATES", 4)
    rates = []
    for on_device in (False, True):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = build_scheduler(optimizer, TrainConfig(NUM_EPOCHS=3, WARMUP_EPOCHS=1), (0.1, 0.0, 0.0), 10)
        schedule = schedule_of(scheduler, optimizer, 30, on_device)
        seen = []
        for update in range(30):
            stepped = update % 3 != 0
            schedule.advance(torch.tensor(stepped) if on_device else stepped)
            seen.append((float(schedule.last_rate()), float(optimizer.param_groups[0]["lr"])))
        rates.append(seen)
    assert rates[0] == [pytest.approx(pair, rel=1e-6, abs=1e-9) for pair in rates[1]]
    assert schedule.stepped == 20


WSD = {**COSINE, "NUM_EPOCHS": 10, "LR_SCHEDULER": SchedulerConfig(NAME="wsd")}


@pytest.mark.parametrize("on_device", [False, True])
def test_wsd_is_constant_and_decays_at_the_end(on_device: bool) -> None:
    seen = rates_of(*schedule(on_device, **WSD), updates=51, on_device=on_device)
    assert seen[:10] == pytest.approx([0.1 + 0.09 * n for n in range(10)])
    assert seen[10:41] == [1.0] * 31
    assert seen[40:] == pytest.approx([0.01 + 0.99 * (1 - math.sqrt(n / 10)) for n in range(11)])
