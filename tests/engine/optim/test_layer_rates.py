"""TRAIN.LAYER_DECAY: which weight learns how fast."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.optim._param_groups import param_groups_layer_decay
from torch import nn

from engine.optim.build import build_optimizer
from engine.optim.schedule import DeviceSchedule, Schedule, build_scheduler
from engine.report.banner import describe_fine_tuning
from tests.engine.small import CPU, build, train
from tests.program import Vitamp, metrics
from utils.config import Config, TrainConfig

SWIN: dict[str, Any] = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}
MODELS = {"test_vit": {}, "deit_tiny_distilled_patch16_224": {"depth": 2}, "swin_tiny_patch4_window7_224": SWIN}
MODELS |= {"test_resnet": {}, "test_convnext": {}, "eva02_tiny_patch14_224": {"depth": 2}}


def grouped(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Factor of the learning rate and weight decay of each weight."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {names[id(w)]: (group["lr_scale"], group["weight_decay"]) for group in groups for w in group["params"]}


@pytest.mark.parametrize("name", MODELS)
def test_layer_decay_uses_timms_layers(name: str) -> None:
    model = timm.create_model(name, num_classes=3, **MODELS[name])
    ours = build_optimizer(model, TrainConfig(LAYER_DECAY=0.65, WEIGHT_DECAY=0.05), 1e-3, CPU).param_groups
    excluded: Any = getattr(model, "no_weight_decay", set)()
    theirs = param_groups_layer_decay(model, 0.05, excluded, layer_decay=0.65)
    assert grouped(model, ours) == grouped(model, theirs)
    assert len({scale for scale, _ in grouped(model, ours).values()}) > 2


def test_frozen_weights_do_not_change_the_layers(tiny: Path) -> None:
    words = {"MODEL__DEPTH": 3, "TRAIN__LAYER_DECAY": 0.5}
    whole, some = build(tiny, **words), build(tiny, **words, MODEL__FREEZE="patch_embed,pos_embed,cls_token,blocks.0")
    rates, left = (grouped(ready.model, ready.parts.optimizer.param_groups) for ready in (whole, some))
    assert left == {
        name: value for name, value in rates.items() if name.startswith(("blocks.1", "blocks.2", "norm", "h"))
    }
    assert rates["patch_embed.proj.weight"][0] == 0.5**4
    assert rates["blocks.2.attn.qkv.weight"] == (0.5, 0.05)
    assert rates["head.weight"][0] == 1.0


def test_schedule_sets_all_rates_and_reports_the_unscaled_one(tiny: Path) -> None:
    """To the bit: a rate that is multiplied by a factor and divided by it again would differ."""
    words = {"TRAIN__WARMUP_EPOCHS": 0, "TRAIN__NUM_EPOCHS": 1, "MODEL__DEPTH": 2}
    plain, decayed = build(tiny, **words), build(tiny, **words, TRAIN__LAYER_DECAY=0.5)
    base = 2e-3
    for _ in range(3):
        base = float(plain.parts.optimizer.param_groups[0]["lr"])
        found = {group["lr_scale"]: float(group["lr"]) for group in decayed.parts.optimizer.param_groups}
        assert found == pytest.approx({scale: scale * base for scale in (0.125, 0.25, 0.5, 1.0)}, rel=1e-12)
        train(plain, 1)
        train(decayed, 1)
        assert decayed.parts.schedule.last_rate() == plain.parts.schedule.last_rate() == base
    assert base < 2e-3, "the cosine has begun to fall"
    uneven = build(tiny, **words, TRAIN__LAYER_DECAY=0.7).parts.schedule
    assert [uneven.rate_at(update) for update in range(44)] == [plain.parts.schedule.rate_at(n) for n in range(44)]


def test_run_resumed_without_them_has_one_rate(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run", "-resume", "auto", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=1")
    vitamp(*words, "TRAIN.LAYER_DECAY=0.5", "TRAIN.MAX_UPDATES=3", code=0)
    vitamp(*words, "TRAIN.LAYER_DECAY=null", "TRAIN.MAX_UPDATES=6", code=0)
    rates = [line["lr"] for line in metrics(tmp_path / "run", "train")]
    assert len(rates) == 6
    assert rates[-1] > 0.9 * rates[0]


def test_layer_rates_on_the_device() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    train_config = TrainConfig(NUM_EPOCHS=1, WARMUP_EPOCHS=0, BASE_LR=1e-2, LAYER_DECAY=0.5)
    told = []
    for device in (None, CPU):
        optimizer = build_optimizer(model, train_config, 1e-2, CPU)
        scheduler = build_scheduler(optimizer, train_config, (1e-2, 0, 0), 10)
        on_device = DeviceSchedule(scheduler, optimizer, 10, CPU) if device else None
        schedule = on_device or Schedule(scheduler, optimizer, 10)
        for stepped in (True, False, True, True):
            schedule.advance(stepped if device is None else torch.tensor(stepped))
        told.append([float(schedule.last_rate()), *(float(group["lr"]) for group in optimizer.param_groups)])
    assert told[1] == pytest.approx(told[0], rel=1e-6)
    assert min(told[0]) < 0.1 * max(told[0])


def test_banner_shows_smallest_and_largest_rate(tiny: Path) -> None:
    ready = build(tiny, MODEL__FREEZE="pos_embed,*.norm1.*", TRAIN__LAYER_DECAY=0.5)
    settings = {"MODEL": {"FREEZE": "pos_embed,*.norm1.*"}, "TRAIN": {"LAYER_DECAY": 0.5}}
    config = Config.model_validate(settings)
    assert describe_fine_tuning(config, ready.model, ready.parts.optimizer, 2e-3) == (
        "3 of 20 tensors frozen (pos_embed, *.norm1.*); learning rates from 0.0005 to 0.002 (layer decay 0.5)"
    )
    plain = build(tiny)
    assert not describe_fine_tuning(Config(), plain.model, plain.parts.optimizer, 2e-3)
