"""The settings of the section MODEL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from utils.config.fields import Section
from utils.config.kinds import AboveZero, FractionBelowOne, Integers, Names, Positive, folded


class ModelConfig(Section):
    """The model and its initial weights. Sizes that are null are those of NAME."""

    TYPE: Annotated[str, BeforeValidator(folded)] = Field(
        default="vit",
        description="Model family, which chooses defaults: vit, deit or swin. Other words need a timm model as NAME.",
    )
    NAME: str = Field(default="vit_base_patch16_224", description="A timm model, or any label if sizes are given.")
    RESUME: str | None = Field(
        default=None, description="Run, checkpoint or file to resume; 'auto': the run in -output."
    )
    PRETRAINED: str | None = Field(
        default=None, description="Weights to start from: .safetensors, .pth, .npz, .pdparams, a run, or a timm model."
    )
    RESUME_EMA: bool | None = Field(
        default=None,
        description=(
            "Weights to take from the run in PRETRAINED or RESUME: true: the EMA, false: the plain weights. "
            "null: with PRETRAINED those that validated better, with RESUME the plain ones."
        ),
    )
    NEW_CLASSIFIER: bool = Field(
        default=False,
        description="PRETRAINED: start with a freshly initialised classifier, even if the number of classes is equal.",
    )
    FREEZE: Names = Field(
        default=(),
        description="Weights that are not trained: backbone (all but the classifier), or globs of weights or modules.",
    )
    NUM_CLASSES: Positive = Field(default=1000, description="Number of classes.")
    DROPOUT: FractionBelowOne = Field(
        default=0.0, description="Dropout after position embedding, projections and MLPs."
    )
    ATTENTION_DROPOUT: FractionBelowOne = Field(default=0.0, description="Dropout of attention weights.")
    DROPPATH: FractionBelowOne = Field(
        default=0.0, description="Stochastic depth rate of the last block; lower in earlier ones."
    )
    PATCH_SIZE: Positive | None = Field(
        default=None, description="Height and width of a patch, in pixels; 16 for ViT-B/16."
    )
    EMBED_DIM: Positive | None = Field(default=None, description="Embedding dimension (width); 768 for ViT-B.")
    NUM_HEADS: Positive | Integers | None = Field(
        default=None, description="Attention heads (Swin: one number per stage)."
    )
    ATTN_HEAD_SIZE: Positive | None = Field(
        default=None, description="Dimension of an attention head; null: EMBED_DIM / NUM_HEADS."
    )
    DEPTH: Positive | None = Field(default=None, description="Number of blocks; 12 for ViT-B.")
    MLP_RATIO: AboveZero | None = Field(
        default=None, description="Hidden width of the MLP relative to EMBED_DIM; 4.0 for ViT-B."
    )
    QKV_BIAS: bool | None = Field(default=None, description="Bias in the query, key and value projection.")
    WINDOW_SIZE: Positive | None = Field(
        default=None, description="Swin: height and width of an attention window, in patches."
    )
    STAGE_DEPTHS: Integers | None = Field(default=None, description="Swin: blocks in each stage.")
    QK_SCALE: AboveZero | None = Field(
        default=None, description="Scale of the attention logits; null: head dimension ** -0.5."
    )
    APE: bool | None = Field(default=None, description="Swin: absolute position embedding.")
    PATCH_NORM: bool | None = Field(default=None, description="Swin: norm after the patch embedding.")
    ATTENTION: Annotated[
        Literal["auto", "fused", "plain", "flash", "efficient", "cudnn", "packed"], BeforeValidator(folded)
    ] = Field(
        default="auto",
        description=(
            "Implementation of attention: fused: torch chooses the kernel; auto: the fastest measured "
            "(docs/performance.md)."
        ),
    )
    LINEAR_PATCHES: Literal["auto"] | bool = Field(
        default="auto",
        description="Patch embedding as a matrix product instead of a convolution; auto: where it is faster.",
    )
    FUSED_MLP: Literal["auto"] | bool = Field(
        default="auto",
        description="Bias and GELU of MLPs in one kernel, forward and backward; auto: where it is faster.",
    )
