"""TRAIN.GRAD_CHECKPOINT: less is kept for the backward pass, and the same comes of it, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import create_model
from torch import Tensor, nn

from engine.amp.overflow import OverflowWatch
from engine.setup import ReadyToTrain
from engine.speed.grad_checkpoint import RecomputedBlocks
from models.parts import blocks_of
from tests.engine.small import build, built_of, chosen, saved_bytes, train, windows
from tests.engine.test_freeze import AMP, HOW, RANDOM
from utils.errors import UserError


def trained(ready: ReadyToTrain) -> list[Tensor]:
    train(ready, 3)
    return list(ready.model.state_dict().values())


@pytest.mark.parametrize(
    "how",
    [
        *(HOW[name] for name in ("fp32", "bf16", "fp16, accumulated", "O2", "NAIVE")),
        {**AMP, "AMP__DTYPE": "bf16", "AMP__FP32_MODULES": "blocks.1.mlp.*,blocks.2"},
    ],
    ids=["fp32", "bf16", "fp16", "O2", "NAIVE", "some modules in fp32"],
)
def test_checkpointing_gives_the_same_weights_bit_for_bit(tiny: Path, how: dict[str, object]) -> None:
    """With dropout and stochastic depth, which draw anew what they drew."""
    plain = trained(build(tiny, **how, **RANDOM))
    for wanted in ("blocks", 2):
        ready = build(tiny, **how, **RANDOM, TRAIN__GRAD_CHECKPOINT=wanted)
        assert all(map(torch.equal, trained(ready), plain))
        assert f"{3 if wanted == 'blocks' else 2} of 3 blocks recomputed" in ready.computing


def test_more_recomputed_blocks_save_more_memory() -> None:
    kept = {}
    for wanted in ("none", 3, 2, "blocks"):
        model = create_model("test_vit", num_classes=3, depth=6, proj_drop_rate=0.1)
        if wanted != "none":
            RecomputedBlocks().apply(built_of(model), wanted)
        kept[wanted] = saved_bytes(model, torch.randn(8, 3, 160, 160))
        model.eval()
        assert saved_bytes(model, torch.randn(8, 3, 160, 160)) > 0.5 * kept["none"], "only training recomputes"
    assert kept["blocks"] < kept[2] < kept[3] < kept["none"]
    assert kept["blocks"] < 0.35 * kept["none"]


SMALL_SWIN: dict[str, Any] = {"img_size": 56, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "test_resnet", "test_convnext"])
def test_recomputing_updates_running_statistics_once(name: str) -> None:
    found = []
    for wanted in ("none", "blocks"):
        torch.manual_seed(0)
        model = create_model(name, num_classes=3, **(SMALL_SWIN if "swin" in name else {}))
        if wanted != "none":
            RecomputedBlocks().apply(built_of(model), wanted)
        images = torch.randn(4, 3, 56, 56)
        torch.manual_seed(1)
        model(images).square().sum().backward()
        found.append([*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()])
        found[-1].append(torch.tensor(saved_bytes(model, images)))
    (*plain, kept), (*recomputed, kept_then) = found
    assert len(plain) == len(recomputed)
    assert all(map(torch.equal, plain, recomputed))
    assert kept_then < 0.8 * kept


def test_recomputed_blocks_with_batch_norm_can_be_compiled() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = create_model("test_resnet", num_classes=3)
        RecomputedBlocks().apply(built_of(model), "blocks")
        for _, block in blocks_of(model) if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        model(torch.randn(4, 3, 56, 56)).square().sum().backward()
        found.append([*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager)


def test_checkpointing_is_rejected_for_models_without_blocks() -> None:
    with pytest.raises(UserError, match=r"TRAIN\.GRAD_CHECKPOINT blocks: Linear has no sequence of equal blocks"):
        chosen(RecomputedBlocks, built_of(nn.Linear(2, 2), TRAIN={"GRAD_CHECKPOINT": "blocks"}))


def test_overflow_in_a_recomputed_block_is_named(tiny: Path) -> None:
    """The replay of a skipped update goes through the blocks as they are, recomputing among them."""
    named = []
    for wanted in ("none", "blocks"):
        ready = build(tiny, **AMP, AMP__DTYPE="fp16", TRAIN__GRAD_CHECKPOINT=wanted)
        with torch.no_grad():
            ready.model.get_parameter("blocks.0.mlp.fc1.bias").fill_(7e4)
        train(ready, 1, windows(ready))
        watch = ready.parts.callback(OverflowWatch)
        assert watch is not None
        named.append([(blame.module, blame.direction, blame.operation) for blame in watch.take()])
    assert named[0]
    assert named[0][0][0] == "blocks.0.mlp.fc1"
    assert named[0] == named[1]
