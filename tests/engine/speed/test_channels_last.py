"""channels_last: channels of a pixel side by side, for models that convolve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import create_model
from torch import Tensor, nn

from engine.speed.convolutions import ChannelsLast
from tests.engine.small import build, built_of, chosen, train
from utils.errors import UserError

LAST = torch.channels_last


class OnGpu:
    def __init__(self, level: str) -> None:
        self.device, self.level = torch.device("cuda", 0), level


@pytest.fixture
def convolving(tiny: Path) -> Path:
    text = tiny.read_text().replace(
        "NAME: tiny, NUM_CLASSES: 10, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2",
        "TYPE: timm, NAME: test_resnet, NUM_CLASSES: 10",
    )
    tiny.write_text(text.replace("IMAGE_SIZE: 8", "IMAGE_SIZE: 32"))
    return tiny


@pytest.mark.parametrize(
    ("name", "level", "sharded", "last"),
    [
        ("test_resnet", "O1", False, True),
        ("test_convnext", "O2", False, True),
        ("test_resnet", "O0", False, False),
        ("test_resnet", "O1", True, False),
        ("test_vit", "O1", False, False),
        ("swin_tiny_patch4_window7_224", "O1", False, False),
    ],
)
def test_auto_is_for_convolutions_on_a_gpu_in_half_precision(name: str, level: str, sharded: bool, last: bool) -> None:
    with torch.device("meta"):
        model = create_model(name)
    precision: Any = OnGpu(level)
    strategy = {"STRATEGY": "fsdp" if sharded else "ddp"}
    assert chosen(ChannelsLast, built_of(model, precision, DIST=strategy)).value is last
    assert chosen(ChannelsLast, built_of(model, DIST=strategy)).value is False


@pytest.mark.parametrize(
    ("name", "strategy", "words"), [("test_vit", "ddp", "no convolutions"), ("test_resnet", "fsdp", "fsdp does not")]
)
def test_channels_last_is_rejected_without_convolutions_or_with_fsdp(name: str, strategy: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"SPEED \+channels_last: .*{words}"):
        chosen(ChannelsLast, built_of(create_model(name), SPEED=["+channels_last"], DIST={"STRATEGY": strategy}))


def test_training_in_channels_last_is_the_same_to_rounding(convolving: Path) -> None:
    weights = []
    for last in ("+channels_last", "-channels_last"):
        ready = build(convolving, SPEED=last, TRAIN__MODEL_EMA="true")
        seen: set[bool] = set()

        def note(convolution: nn.Module, images: tuple[Tensor], seen: set[bool] = seen) -> None:
            both = (images[0], convolution.get_parameter("weight"))
            seen |= {tensor.is_contiguous(memory_format=LAST) for tensor in both}

        ready.model.get_submodule("conv1.3").register_forward_pre_hook(note)
        train(ready, 2)
        assert seen == {last == "+channels_last"}
        assert ready.choices["channels_last"] == (last == "+channels_last")
        weights.append(ready.model.state_dict())
    assert all(
        torch.allclose(a.float(), b.float(), atol=1e-4) for a, b in zip(*(w.values() for w in weights), strict=True)
    )


@pytest.mark.parametrize("by_pixel", [False, True])
def test_images_are_converted_to_the_models_memory_format(by_pixel: bool) -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    built = built_of(nn.Conv2d(3, 4, 3))
    wanted = built.inputs(images)
    ChannelsLast().apply(built, True)
    found = built.inputs(images.contiguous(memory_format=LAST) if by_pixel else images)
    assert wanted.is_contiguous()
    assert found.is_contiguous(memory_format=LAST)
    assert torch.equal(found, wanted)
