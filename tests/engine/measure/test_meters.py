"""The figures of training: what is counted, and what is read back."""

import math

import pytest
import torch

from engine.measure.meters import MOST_SKIPS, NEVER, Reading, TrainMeters
from engine.task.one import OneLabel, correct
from tests.engine.small import CPU
from utils.distributed.world import ALONE, World

ONE = torch.tensor(1.0)


@pytest.fixture
def meters() -> TrainMeters:
    return TrainMeters(CPU, ALONE, OneLabel(10))


def logits(*guesses: int, classes: int = 10) -> torch.Tensor:
    """One row a sample; its guess first, the other classes after it in their order."""
    rows = torch.arange(classes, 0, -1.0).repeat(len(guesses), 1)
    rows[range(len(guesses)), list(guesses)] = 100.0
    return rows


def closed(
    meters: TrainMeters, update: int = 1, norm: float = 1.0, stepped: bool | torch.Tensor = True, scaled: bool = False
) -> Reading:
    meters.close_update(update, torch.tensor(norm), stepped, scaled)
    return meters.read(ONE, 0.125)


def test_loss_is_a_mean_over_micro_batches_and_accuracy_over_samples(meters: TrainMeters) -> None:
    """The loss is the mean of the micro-batches' means, as the gradient is; accuracies count samples."""
    meters.add(torch.tensor(2.0), logits(0, 1, 2, 3), torch.tensor([0, 1, 2, 9]), 0.5)
    meters.add(torch.tensor(4.0), logits(0, 0), torch.tensor([1, 9]), 0.5)
    reading = closed(meters)
    assert reading.update.loss == 3.0
    assert reading.update.fields()["acc1"] == pytest.approx(100 * 3 / 6)
    assert reading.update.fields()["acc5"] == pytest.approx(100 * 4 / 6)
    assert reading.epoch.loss == pytest.approx((2.0 * 4 + 4.0 * 2) / 6), "every sample alike over the epoch"
    assert (reading.lr, reading.scale, reading.grad_norm) == (0.125, 1.0, 1.0)


def test_reading_has_means_of_the_update_and_of_the_epoch(meters: TrainMeters) -> None:
    for update, (loss, label) in enumerate(((1.0, 0), (3.0, 9)), start=1):
        meters.add(torch.tensor(loss), logits(0), torch.tensor([label]), 1.0)
        reading = closed(meters, update)
        assert (reading.update.loss, reading.update.fields()["acc1"]) == (loss, 100.0 * (label == 0))
    epoch = meters.read(ONE, 0.0).epoch
    assert (epoch.loss, epoch.fields()["acc1"]) == (2.0, 50.0)
    meters.start_epoch()
    meters.add(torch.tensor(7.0), logits(0), torch.tensor([0]), 1.0)
    assert closed(meters, 3).epoch.loss == 7.0


@pytest.mark.parametrize(("classes", "label", "five"), [(3, 2, True), (5, 4, True), (6, 5, False), (6, 4, True)])
def test_top_5_with_fewer_than_5_classes(classes: int, label: int, five: bool) -> None:
    first, among_five = correct(logits(0, classes=classes), torch.tensor([label]))
    assert (first.tolist(), among_five.tolist()) == ([False], [five])


def test_micro_batch_of_weight_0_is_not_counted(meters: TrainMeters) -> None:
    meters.add(torch.tensor(2.0), logits(0), torch.tensor([0]), 1.0)
    meters.add(torch.tensor(float("nan")), logits(0), torch.tensor([9]), 0.0)
    reading = closed(meters)
    assert (reading.update.loss, reading.update.fields()["acc1"], reading.epoch.loss) == (2.0, 100.0, 2.0)


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_infinite_loss_is_left_out_of_the_epochs_mean(meters: TrainMeters, loss: float) -> None:
    meters.add(torch.tensor(2.0), logits(0), torch.tensor([0]), 1.0)
    closed(meters)
    meters.add(torch.tensor(loss), logits(0), torch.tensor([9]), 1.0)
    reading = closed(meters, 2, norm=float("inf"), stepped=False, scaled=True)
    assert not math.isfinite(reading.update.loss)
    assert (reading.epoch.loss, reading.epoch.fields()["acc1"]) == (2.0, 100.0)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_skipped_updates_are_counted_and_are_not_faults(meters: TrainMeters, as_tensor: bool) -> None:
    for update, stepped in enumerate((True, False, True, False, False), start=1):
        flag = torch.tensor(stepped) if as_tensor else stepped
        closed(meters, update, norm=1.0 if stepped else float("nan"), stepped=flag, scaled=True)
    reading = meters.read(ONE, 0.0)
    assert (reading.skipped, reading.first_bad) == (3, NEVER)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_first_bad_update_without_loss_scaling_is_recorded(meters: TrainMeters, bad: float) -> None:
    for update, norm in enumerate((1.0, 1.0, bad, 1.0, bad), start=11):
        closed(meters, update, norm)
    reading = meters.read(ONE, 0.0)
    assert (reading.first_bad, reading.skipped) == (13, 0)


def test_sums_are_restored_from_a_checkpoint(meters: TrainMeters) -> None:
    meters.add(torch.tensor(2.0), logits(0, 1), torch.tensor([0, 9]), 1.0)
    closed(meters, 1, stepped=False, scaled=True)
    state = meters.state()
    fresh = TrainMeters(CPU, ALONE, OneLabel(10))
    fresh.restore(**state)  # pyright: ignore[reportArgumentType]
    for one in (meters, fresh):
        one.add(torch.tensor(5.0), logits(0), torch.tensor([0]), 1.0)
    assert closed(fresh, 2, scaled=True) == closed(meters, 2, scaled=True)
    assert closed(fresh, 3).skipped == 1


def test_a_run_that_skips_ended_begins_their_count_anew(meters: TrainMeters) -> None:
    """Else a resume with bf16, which is what the error advises, would end at its first report."""
    meters.restore([0.0] * 4, 120, MOST_SKIPS)
    reading = closed(meters, 121)
    assert (reading.skipped, reading.skipped_in_a_row) == (120, 0)
    meters.restore([0.0] * 4, 20, 99)
    assert meters.read(ONE, 0.0).skipped_in_a_row == 99


def test_only_rank_0_restores_the_sums() -> None:
    """Each rank's share would else be added once a rank."""
    second = TrainMeters(CPU, World(rank=1, size=2), OneLabel(10))
    second.restore([8.0, 4.0, 4.0, 4.0], 3, 0)
    assert second._epoch_sums.tolist() == [0.0] * 4
    assert int(second._skipped) == 3
