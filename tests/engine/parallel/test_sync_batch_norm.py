"""DIST.SYNC_BATCHNORM: batch norms over the images of all processes."""

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from engine.parallel.ddp import synchronise_batch_norms
from tests.program import Vitamp
from utils.config import Config


@pytest.mark.parametrize(
    ("device", "on", "kinds", "words"),
    [
        ("cuda", True, ["SyncBatchNorm", "SyncBatchNormAct"], "all processes together normalise their images (256 per"),
        ("cuda", False, ["BatchNorm2d", "BatchNormAct2d"], "each process normalises its own images (256 per"),
        ("cpu", True, ["BatchNorm2d", "BatchNormAct2d"], "DIST.SYNC_BATCHNORM has no effect on cpu"),
    ],
)
def test_batch_norms_are_shared_on_gpus_if_asked_for(
    device: str, on: bool, kinds: list[str], words: str, said: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), BatchNormAct2d(4), nn.Flatten(), nn.Linear(4, 2))
    weights = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    synchronise_batch_norms(model, Config.model_validate({"DIST": {"SYNC_BATCHNORM": on}}), torch.device(device))
    assert [type(module).__name__ for module in model[1:3]] == kinds
    assert isinstance(model[2].act, nn.ReLU)  # pyright: ignore[reportIndexIssue]
    assert {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())} == weights
    assert words in said.text


def test_sync_batch_norm_is_refused_where_it_is_not_supported(vitamp: Vitamp) -> None:
    for words in (("DIST.STRATEGY=fsdp",), ("-amp", "O2"), ("AMP.AUTO_FP32=true", "-amp", "fp16")):
        refused = vitamp("-cfg", "vit_digits", "DIST.SYNC_BATCHNORM=true", *words, code=2)
        assert "DIST.SYNC_BATCHNORM: true is not possible with" in refused.err
