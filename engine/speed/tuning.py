"""Choose faster kernels, memory formats and activation checkpointing; results change in the last bits only.

Rank 0 decides for all ranks. The choices are shown in the banner, saved in run.json and checkpoints, and used again by
a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.amp.precision import Precision
from engine.inputs.normalize import Inputs
from engine.speed.attention import FUSED, PACKED, Attention, apply_attention, attention_by_rule
from engine.speed.attention_race import race_attention
from engine.speed.channels_last import convert_to_channels_last, uses_channels_last
from engine.speed.cpu_products import Products, apply_products, choose_products
from engine.speed.fused_mlp import fuse_mlps, mlps_are_fused
from engine.speed.grad_checkpoint import checkpoint_blocks, describe_recomputed
from engine.speed.linear_patches import patches_are_linear, use_linear_patches
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank
from utils.log import log


@dataclass(frozen=True)
class Tuning:
    attention: Attention
    products: Products
    """Library for fp32 on a CPU."""
    linear_patches: bool
    fused_mlp: bool
    channels_last: bool
    computed_in: str
    """Device and precision; with others, a resumed run decides again."""
    recomputed: str
    """Recomputed blocks, in words."""

    def choices(self) -> dict[str, Any]:
        """Entries for run.json and for checkpoints, from which a resumed run reads them."""
        return {
            "attention": self.attention.kind,
            "cpu_fp32": self.products.library,
            "linear_patches": self.linear_patches,
            "fused_mlp": self.fused_mlp,
            "channels_last": self.channels_last,
            "computed_in": self.computed_in,
        }

    def words(self) -> str:
        """One line for the banner."""
        parts = [f"attention {self.attention.words()}"]
        if self.computed_in.startswith("cpu"):
            parts.append(f"fp32 products by {self.products.library} ({self.products.reason})")
        parts += ["patches by a matrix product"] * self.linear_patches
        parts += ["bias and GELU in one kernel"] * self.fused_mlp
        parts += ["channels last"] * self.channels_last
        parts += [f"{self.recomputed} recomputed in the backward pass"] * bool(self.recomputed)
        return "; ".join(parts)


def tune(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, previous: dict[str, Any]
) -> Tuning:
    """Choose and apply. `previous`: choices of the run that is resumed. A collective call."""
    tuning = broadcast(on_every_rank(world, lambda: _choose(config, model, inputs, precision, world, previous)), world)
    apply_products(tuning.products.library)
    apply_attention(tuning.attention.kind, model)
    if tuning.linear_patches:
        use_linear_patches(model)
    if tuning.fused_mlp:
        fuse_mlps(model)
    if tuning.channels_last:
        convert_to_channels_last(model, inputs)
    checkpoint_blocks(model, config.TRAIN.GRAD_CHECKPOINT)
    return tuning


def _choose(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, previous: dict[str, Any]
) -> Tuning:
    device, fp32, train = precision.device, precision.level == "O0", config.TRAIN
    computed_in = f"{device.type} {precision.name.replace('-', ' ')}"  # with a blank, as in the oldest checkpoints
    if previous.get("computed_in") != computed_in:
        previous = {}
    _note_former_kernels(device, previous)
    listed = (*config.AMP.CUSTOM_WHITE_LIST, *config.AMP.CUSTOM_BLACK_LIST)
    values = _values_between_blocks(model, config.DATA.BATCH_SIZE)
    products = choose_products(config.CPU_FP32, device, fp32, values, previous.get("cpu_fp32"))
    sharded = config.DIST.STRATEGY == "fsdp"
    wanted, previous_attention = config.MODEL.ATTENTION, previous.get("attention")
    attention = attention_by_rule(wanted, model, precision, products.library, listed, previous_attention)
    if attention is None and wanted == "auto" and config.DETERMINISTIC:
        attention = Attention(
            FUSED, "torch's choice; not timed, since timing could choose another kind in the next run"
        )
    elif attention is None:
        attention = _raced(config, model, inputs, precision, world, previous_attention)
    return Tuning(
        attention=attention,
        products=products,
        linear_patches=patches_are_linear(config.MODEL.LINEAR_PATCHES, model, precision, listed),
        fused_mlp=mlps_are_fused(config.MODEL.FUSED_MLP, model, precision, listed, sharded),
        channels_last=uses_channels_last(train.CHANNELS_LAST, model, precision, sharded),
        computed_in=computed_in,
        recomputed=describe_recomputed(model, train.GRAD_CHECKPOINT),
    )


def _note_former_kernels(device: torch.device, previous: dict[str, Any]) -> None:
    """Log that a run of 0.1.0 does not go on bit-equal: that version had kernels of its own for CPUs with AMX."""
    by_amx = "amx" in (previous.get("cpu_fp32"), previous.get("cpu_bf16"))
    if device.type == "cpu" and (by_amx or previous.get("attention") == PACKED):
        log.info(
            "This run used kernels for AMX, which version 0.1.0 of vitamp is the last to have. torch's kernels replace "
            "them: results are no longer equal bit for bit."
        )


def _raced(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, previous: str | None
) -> Attention:
    """Time attention on rank 0, which decides for all; not while the batch size, on which times depend, is unknown."""
    wanted, data = config.MODEL.ATTENTION, config.DATA
    if not world.first or not isinstance(data.BATCH_SIZE, int):
        return Attention(FUSED if wanted == "auto" else wanted, "")
    device, listed = precision.device, (*config.AMP.CUSTOM_WHITE_LIST, *config.AMP.CUSTOM_BLACK_LIST)
    random = torch.Generator(device).manual_seed(config.SEED)
    size = (data.BATCH_SIZE, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
    images = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=random)
    return race_attention(wanted, model, inputs(images), precision, listed, previous)


def _values_between_blocks(model: nn.Module, batch: int) -> int:
    """Number of values between two transformer blocks; 0 for other models, and while the batch size is unknown."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", 0)
    width = getattr(model, "embed_dim", 0)
    known = all(isinstance(number, int) for number in (patches, width, batch))
    return patches * width * batch if known else 0
