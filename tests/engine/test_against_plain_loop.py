"""The update does what a loop written down plainly, with timm's model and torch's AdamW, does."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from datasets import EpochOrder, open_dataset
from tests.program import metrics
from utils.config import load_config
from utils.seeding import seed_all

UPDATES = 50


def plain_losses(cfg: Path, amp: torch.dtype | None) -> list[float]:
    """Fifty updates without anything of the engine's but the order of the samples."""
    torch.set_num_threads(1)
    config = load_config(str(cfg)).config
    data, train = config.DATA, config.TRAIN
    seed_all(config.SEED, "init")
    model = VisionTransformer(img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=16, depth=1, num_heads=2)
    plain = [p for n, p in model.named_parameters() if p.ndim > 1 and n not in ("pos_embed", "cls_token")]
    others = [p for n, p in model.named_parameters() if p.ndim <= 1 or n in ("pos_embed", "cls_token")]
    groups = [{"params": plain, "weight_decay": train.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=train.BASE_LR)
    digits = open_dataset(data, True, 10, config.SEED, torch.device("cpu"))
    order = EpochOrder(len(digits), data.BATCH_SIZE, 1, 0, 1, config.SEED, True)
    warmup, total = order.updates, 2 * order.updates
    losses = []
    for epoch in (1, 2):
        for (share,) in order.windows(epoch):
            done = len(losses)
            if done < warmup:
                rate = 1e-6 + done * (train.BASE_LR - 1e-6) / warmup
            else:
                rate = 0.5 * train.BASE_LR * (1 + math.cos(math.pi * (done - warmup) / (total - warmup)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = digits.__getitems__([(epoch, int(i)) for i in share.indices])
            images = (batch.images.float() / 255 - 0.5) / 0.5
            with torch.autocast("cpu", amp, enabled=amp is not None):
                logits = model(images)
            loss = F.cross_entropy(logits.float(), batch.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == UPDATES:
                return losses
    raise AssertionError("the plain loop ended early")


@pytest.fixture
def ours(vitamp, tiny: Path, tmp_path: Path):
    def run(*flags: object) -> list[float]:
        out = tmp_path / "run"
        vitamp("-cfg", tiny, "-output", out, "REPORT_FREQ=1", f"TRAIN.MAX_UPDATES={UPDATES}", *flags, code=0)
        return [line["loss"] for line in metrics(out, "train")]

    return run


def test_fp32_losses_equal_a_plain_loops(ours, tiny: Path) -> None:
    mine, plain = ours(), plain_losses(tiny, None)
    assert len(mine) == UPDATES
    assert plain[0] - plain[-1] > 0.1, "the loop must learn, or equality says nothing"
    assert max(abs(a - b) for a, b in zip(mine[:5], plain[:5], strict=True)) < 1e-6
    assert max(abs(a - b) for a, b in zip(mine, plain, strict=True)) < 1e-5


def test_amp_losses_equal_a_plain_loops_to_rounding(ours, tiny: Path) -> None:
    mine, plain = ours("-amp", "bf16"), plain_losses(tiny, torch.bfloat16)
    fp32 = plain_losses(tiny, None)
    assert max(abs(a - b) for a, b in zip(mine, plain, strict=True)) < 2e-2
    assert max(abs(a - b) for a, b in zip(mine, fp32, strict=True)) > 1e-5, "autocast did nothing"


def test_fp16_with_loss_scaling_follows_fp32(ours, tiny: Path) -> None:
    mine, fp32 = ours("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1024"), plain_losses(tiny, None)
    assert max(abs(a - b) for a, b in zip(mine, fp32, strict=True)) < 5e-3
