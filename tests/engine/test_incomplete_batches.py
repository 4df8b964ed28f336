"""An incomplete last micro-batch counts by its images: an update's gradient is the mean over its images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import Batch, Window
from engine.measure.meters import TrainMeters
from engine.setup import ReadyToTrain
from engine.task.several import SeveralLabels
from tests.engine.amp.modes import MODES, PLAIN_STEPS, WITH_MASTERS, change
from tests.engine.small import CPU, build, windows
from tests.program import Vitamp, metrics
from utils.distributed.world import ALONE
from utils.seeding import seed_all
from vitamp.checkpoints import inspect
from vitamp.tensors import open_tensors

SIZES = [24, 24, 24, 24, 4]
DATA = {"DATA__DATASET": "synthetic", "DATA__SYNTHETIC_TRAIN": 100, "DATA__SYNTHETIC_VAL": 20, "DATA__BATCH_SIZE": 24}
ONE_UPDATE = {**DATA, **PLAIN_STEPS, "DATA__DROP_LAST": "false", "TRAIN__ACCUM_ITER": 5}
MIXED = {"TRAIN__MIXUP_ALPHA": 0.8, "TRAIN__CUTMIX_ALPHA": 1.0, "TRAIN__MIXUP_MODE": "elem", "TRAIN__SMOOTHING": 0.1}
Loss = Callable[[Tensor, Tensor], Tensor]


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum")


def summed_smooth(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)


def summed_bce(logits: Tensor, targets: Tensor) -> Tensor:
    targets = F.one_hot(targets, logits.shape[1]).float() if targets.ndim == 1 else targets
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1).sum()


def summed_distilled(logits: Tensor, targets: Tensor) -> Tensor:
    labels, teacher = targets.unbind(1)
    own, theirs = F.log_softmax(logits / 3, 1), F.log_softmax(teacher / 3, 1)
    return 0.5 * summed(logits, labels) + 0.5 * 9 * F.kl_div(own, theirs, reduction="sum", log_target=True)


PATHS: dict[str, tuple[dict[str, Any], Loss]] = {
    "labels": ({}, summed),
    "dropout": ({"MODEL__DROPOUT": 0.1, "MODEL__DROPPATH": 0.1}, summed),
    "mixed": (MIXED, summed_smooth),
    "bce": ({"TRAIN__LOSS": "bce"}, summed_bce),
    "several labels": ({"TRAIN__LOSS": "bce"}, summed_bce),
    "distilled": ({"TRAIN__DISTILLATION_TYPE": "soft", "TRAIN__DISTILLATION_TAU": 3}, summed_distilled),
    **{mode: (MODES[mode], summed) for mode in WITH_MASTERS},
}


def only_window(ready: ReadyToTrain, several: bool = False) -> Window:
    """The one window of an epoch of 100 images, whose last micro-batch has 4."""
    window = next(windows(ready))
    pairs = list(window)
    assert [len(batch.images) for _, batch in pairs] == SIZES
    if several:
        pairs = [(share, batch._replace(labels=torch.rand(len(batch.labels), 10).round())) for share, batch in pairs]
    return Window(window.shares, iter([batch for _, batch in pairs]))


def plain_gradient(ready: ReadyToTrain, batches: list[Batch], loss: Loss) -> Tensor:
    """Gradient of the sum of all images' losses, divided by their number."""
    model, parts = ready.model.train(), ready.parts
    for number, batch in enumerate(batches):
        seed_all(0, "micro", 1, number)
        seen = parts.batch_transform((batch.images.float() / 255 - 0.5) / 0.5, batch.labels)
        (loss(model(seen.images), seen.targets) / sum(SIZES)).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.mark.parametrize("path", PATHS)
def test_gradient_is_the_mean_over_the_images(tiny: Path, teacher_run: Path, path: str) -> None:
    words, loss = PATHS[path]
    fp32 = {**ONE_UPDATE, **(words if path not in MODES else {})}
    if path == "distilled":
        fp32["TRAIN__TEACHER_MODEL"] = teacher_run
    ours, plain = build(tiny, **{**fp32, **words}), build(tiny, **fp32)
    several = path == "several labels"
    if several:
        ours.parts.meters = TrainMeters(CPU, ALONE, SeveralLabels(10))
    window = only_window(ours, several)
    batches = list(window)
    expected = plain_gradient(plain, [batch for _, batch in batches], loss)
    stepped = -change(ours, Window(window.shares, iter([batch for _, batch in batches])))
    rounding = 1e-5 if path not in MODES else 0.03
    assert (stepped - expected).norm() < rounding * expected.norm()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_move_by_the_mean_over_the_images(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, strategy: str
) -> None:
    """Of the five micro-batches, one process gets three and the other two; the last of these has four images."""
    run, settings = tmp_path / "run", {**ONE_UPDATE, "TRAIN__ACCUM_ITER": 3}
    words = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    where = ("-cfg", tiny, "-output", run, "-ngpus", 2, f"DIST.STRATEGY={strategy}")
    vitamp(*where, *words, "TRAIN.MAX_UPDATES=1", "REPORT_FREQ=1", script="main_multi_gpu.py", code=0)
    plain = build(tiny, **ONE_UPDATE)
    start = {name: weight.detach().clone() for name, weight in plain.model.named_parameters()}
    batches = [batch for _, batch in only_window(plain)]
    expected = plain_gradient(plain, batches, summed)
    saved = dict(open_tensors(inspect(run / "checkpoints" / "step-000000001")))
    stepped = torch.cat([(weight - saved[name]).flatten() for name, weight in start.items()])
    assert (stepped - expected).norm() < 1e-5 * expected.norm()
    (line,) = metrics(run, "train")
    with torch.no_grad():
        plain.model.load_state_dict(start, strict=False)
        losses = [summed(plain.model((b.images.float() / 255 - 0.5) / 0.5), b.labels) for b in batches]
    assert line["loss"] == pytest.approx(float(sum(losses)) / 100, rel=1e-5), "the meter weighs by images too"
