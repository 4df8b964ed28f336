"""What the model is told so that it computes faster, or in less memory: the same mathematics, but for the last bits.

Rank 0 decides for all. It is told in the banner and in run.json, saved, and decided alike when a run is gone on with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.amp.precision import Precision
from engine.inputs.normalize import Inputs
from engine.speed.amx import keep_kernels_in, use_linear_layers
from engine.speed.attention import FUSED, Attention, put_attention_in_force, settled_attention
from engine.speed.attention_race import raced_attention
from engine.speed.channels_last import channels_go_last, put_channels_last
from engine.speed.cpu_products import (
    ONEDNN,
    OWN,
    Products,
    choose_half_products,
    choose_products,
    put_products_in_force,
)
from engine.speed.fused_mlp import fuse_mlps, mlps_are_fused
from engine.speed.grad_checkpoint import checkpoint_blocks, which_blocks
from engine.speed.linear_patches import patches_are_linear, use_linear_patches
from engine.speed.residual_dtype import narrow_stream, stream_is_narrow
from utils.cache import DEFAULT
from utils.config import Config
from utils.distributed.world import World, broadcast, on_every_rank


@dataclass(frozen=True)
class Tuning:
    attention: Attention
    products: Products
    """In fp32, on a CPU."""
    half_products: Products
    """In bf16, on a CPU; without a reason where the run does not compute in it."""
    linear_patches: bool
    fused_mlp: bool
    channels_last: bool
    computed_in: str
    """Device and precision: under others, a resumed run decides anew."""
    recomputed: str
    """Which blocks are, in words."""
    narrow: bool

    def choices(self) -> dict[str, Any]:
        """For run.json, and for the checkpoints that a resumed run takes them from."""
        return {
            "attention": self.attention.kind,
            "cpu_fp32": self.products.library,
            "cpu_bf16": self.half_products.library,
            "linear_patches": self.linear_patches,
            "fused_mlp": self.fused_mlp,
            "channels_last": self.channels_last,
            "computed_in": self.computed_in,
        }

    def words(self) -> str:
        """One line for the banner."""
        parts = [f"attention {self.attention.words()}"]
        if self.half_products.reason:
            parts.append(f"bf16 products by {self.half_products.library} ({self.half_products.reason})")
        elif self.computed_in.startswith("cpu"):
            parts.append(f"fp32 products by {self.products.library} ({self.products.reason})")
        parts += ["patches by a matrix product"] * self.linear_patches
        parts += [self._words_of_mlp()] * self.fused_mlp
        parts += ["channels last"] * self.channels_last
        parts += ["residual stream as autocast has it"] * self.narrow
        parts += [f"{self.recomputed} recomputed in the backward pass"] * bool(self.recomputed)
        return "; ".join(parts)

    def kernel_dtype(self) -> torch.dtype | None:
        """The precision that kernels of our own multiply in on a CPU; None where torch does."""
        if self.half_products.library == OWN:
            return torch.bfloat16
        return torch.float32 if self.products.library == OWN else None

    def _words_of_mlp(self) -> str:
        return "MLPs in one piece" if self.kernel_dtype() else "bias and GELU in one kernel"


def tune(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, kept: dict[str, Any]
) -> Tuning:
    """Decide and do it. `kept`: the choices of the run that is gone on with. A collective call."""
    if precision.device.type == "cpu":
        keep_kernels_in(Path(config.DATA.CACHE or DEFAULT, "kernels"))
    tuning = broadcast(on_every_rank(world, lambda: _decide(config, model, inputs, precision, world, kept)), world)
    put_products_in_force(tuning.products.library)
    kernel_dtype = tuning.kernel_dtype()
    if kernel_dtype is not None:
        on_every_rank(world, lambda: use_linear_layers(model, kernel_dtype))
    put_attention_in_force(tuning.attention.kind, model)
    if tuning.linear_patches:
        use_linear_patches(model, kernel_dtype)
    if tuning.fused_mlp:
        fuse_mlps(model, kernel_dtype)
    if tuning.channels_last:
        put_channels_last(model, inputs)
    if tuning.narrow:
        narrow_stream(model, precision)
    checkpoint_blocks(model, config.TRAIN.GRAD_CHECKPOINT)
    return tuning


def _decide(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, kept: dict[str, Any]
) -> Tuning:
    device, fp32, train = precision.device, precision.level == "O0", config.TRAIN
    computed_in = f"{device.type} {precision.name.replace('-', ' ')}"  # as checkpoints have it from the first
    if kept.get("computed_in") != computed_in:
        kept = {}
    listed = (*config.AMP.CUSTOM_WHITE_LIST, *config.AMP.CUSTOM_BLACK_LIST)
    values = _values_handed_on(model, config.DATA.BATCH_SIZE)
    products = choose_products(config.CPU_FP32, device, fp32, values, kept.get("cpu_fp32"))
    dealt_out = config.DIST.STRATEGY == "fsdp"
    had_half = kept.get("cpu_bf16", ONEDNN if kept else None)  # runs from before there was a choice
    half = choose_half_products(config.CPU_BF16, precision, listed, values, had_half, dealt_out)
    library = half.library if half.reason else products.library
    wanted, had = config.MODEL.ATTENTION, kept.get("attention")
    attention = settled_attention(wanted, model, precision, products.library, listed, had)
    if attention is None and wanted == "auto" and config.DETERMINISTIC:
        attention = Attention(FUSED, "torch's choice; no race, whose winner may be another in the next run")
    elif attention is None:
        attention = _raced(config, model, inputs, precision, world, had)
    return Tuning(
        attention=attention,
        products=products,
        half_products=half,
        linear_patches=patches_are_linear(config.MODEL.LINEAR_PATCHES, model, precision, listed, library),
        fused_mlp=mlps_are_fused(config.MODEL.FUSED_MLP, model, precision, listed, dealt_out, library),
        channels_last=channels_go_last(train.CHANNELS_LAST, model, precision, dealt_out),
        computed_in=computed_in,
        recomputed=which_blocks(model, train.GRAD_CHECKPOINT),
        narrow=stream_is_narrow(train.RESIDUAL_DTYPE, model, precision),
    )


def _raced(
    config: Config, model: nn.Module, inputs: Inputs, precision: Precision, world: World, kept: str | None
) -> Attention:
    """On rank 0, whose answer all take. Not while the batch is being looked for: its size is part of the question."""
    wanted, data = config.MODEL.ATTENTION, config.DATA
    if not world.first or not isinstance(data.BATCH_SIZE, int):
        return Attention(FUSED if wanted == "auto" else wanted, "")
    device, listed = precision.device, (*config.AMP.CUSTOM_WHITE_LIST, *config.AMP.CUSTOM_BLACK_LIST)
    random = torch.Generator(device).manual_seed(config.SEED)
    size = (data.BATCH_SIZE, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE)
    images = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=random)
    return raced_attention(wanted, model, inputs(images), precision, listed, kept)


def _values_handed_on(model: nn.Module, batch: int) -> int:
    """What a block of a transformer gives to the next one; 0 for other models, and while the batch is looked for."""
    patches = getattr(getattr(model, "patch_embed", None), "num_patches", 0)
    width = getattr(model, "embed_dim", 0)
    known = all(isinstance(number, int) for number in (patches, width, batch))
    return patches * width * batch if known else 0
