"""TRAIN.CHANNELS_LAST: channels of a pixel side by side, for models that convolve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import create_model
from torch import Tensor, nn

from engine.amp.precision import Precision
from engine.inputs.normalize import Inputs
from engine.speed.channels_last import channels_go_last, put_channels_last
from tests.engine.small import CPU, OFF, build, train
from tests.program import metrics
from utils.config.data import DataConfig
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
    ("name", "level", "dealt_out", "last"),
    [
        ("test_resnet", "O1", False, True),
        ("test_convnext", "O2", False, True),
        ("test_resnet", "O0", False, False),
        ("test_resnet", "O1", True, False),
        ("test_vit", "O1", False, False),
        ("swin_tiny_patch4_window7_224", "O1", False, False),
    ],
)
def test_auto_is_on_a_gpu_in_half_precision_where_it_convolves(
    name: str, level: str, dealt_out: bool, last: bool
) -> None:
    with torch.device("meta"):
        model = create_model(name)
    precision: Any = OnGpu(level)
    assert channels_go_last("auto", model, precision, dealt_out) is last
    assert channels_go_last("auto", model, Precision(OFF, CPU), dealt_out) is False


@pytest.mark.parametrize(
    ("name", "dealt_out", "words"), [("test_vit", False, "no convolutions"), ("test_resnet", True, "fsdp")]
)
def test_what_cannot_gain_or_work_is_refused(name: str, dealt_out: bool, words: str) -> None:
    with pytest.raises(UserError, match=f"TRAIN.CHANNELS_LAST true: .*{words}"):
        channels_go_last(True, create_model(name), Precision(OFF, CPU), dealt_out)


def test_weights_and_images_lie_so_and_training_is_the_same_to_rounding(convolving: Path) -> None:
    weights = []
    for last in ("true", "false"):
        ready = build(convolving, TRAIN__CHANNELS_LAST=last, TRAIN__MODEL_EMA="true")
        seen: set[bool] = set()

        def note(convolution: nn.Module, images: tuple[Tensor], seen: set[bool] = seen) -> None:
            both = (images[0], convolution.get_parameter("weight"))
            seen |= {tensor.is_contiguous(memory_format=LAST) for tensor in both}

        ready.model.get_submodule("conv1.3").register_forward_pre_hook(note)
        train(ready, 2)
        assert seen == {last == "true"}
        assert ready.choices["channels_last"] == (last == "true")
        weights.append(ready.model.state_dict())
    assert all(
        torch.allclose(a.float(), b.float(), atol=1e-4) for a, b in zip(*(w.values() for w in weights), strict=True)
    )


@pytest.mark.parametrize("by_pixel", [False, True])
def test_images_come_as_the_model_wants_them_however_their_bytes_lie(by_pixel: bool) -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    inputs = Inputs(DataConfig())
    wanted = inputs(images)
    put_channels_last(nn.Conv2d(3, 4, 3), inputs)
    found = inputs(images.contiguous(memory_format=LAST) if by_pixel else images)
    assert wanted.is_contiguous()
    assert found.is_contiguous(memory_format=LAST)
    assert torch.equal(found, wanted)


@pytest.mark.slow  # three runs
def test_a_run_in_that_layout_is_saved_and_gone_on_with_bit_for_bit(vitamp, convolving: Path, tmp_path: Path) -> None:
    flags = ("-cfg", convolving, "REPORT_FREQ=1", "SAVE_EVERY_UPDATES=2", "TRAIN.CHANNELS_LAST=true")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    for folder, more in ((whole, ("TRAIN.MAX_UPDATES=4",)), (parted, ("TRAIN.MAX_UPDATES=2",))):
        done = vitamp(*flags, "-output", folder, *more)
        assert done.code == 0, done.text
    done = vitamp(*flags, "-output", parted, "-resume", "auto", "TRAIN.MAX_UPDATES=4")
    assert "channels last" in done.text, done.text
    assert [line["loss"] for line in metrics(parted, "train")] == [line["loss"] for line in metrics(whole, "train")]
