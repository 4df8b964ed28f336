"""The settings of the section MODEL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from utils.config.fields import Section
from utils.config.kinds import AboveZero, Integers, Names, Positive, Rate, folded


class ModelConfig(Section):
    """What is trained. Sizes left null are those of NAME."""

    TYPE: Annotated[str, BeforeValidator(folded)] = Field(
        default="vit",
        description="vit, deit or swin: family, and its defaults; any other word needs a timm model as NAME.",
    )
    NAME: str = Field(default="vit_base_patch16_224", description="A timm model, or a label where sizes are given.")
    RESUME: str | None = Field(default=None, description="Run, checkpoint or file to go on from; 'auto' needs -output.")
    PRETRAINED: str | None = Field(
        default=None, description="Weights to start from: .safetensors, .pth, .npz, .pdparams, a run, or a timm name."
    )
    RESUME_EMA: bool | None = Field(
        default=None,
        description="Weights to start from, of the run that PRETRAINED or RESUME names: true the EMA, false the plain "
        "ones. null: with PRETRAINED those that validated better, with RESUME the plain ones.",
    )
    NEW_CLASSIFIER: bool = Field(
        default=False,
        description="PRETRAINED: begin with a fresh classifier, also where the number of classes is ours.",
    )
    FREEZE: Names = Field(
        default=(),
        description="What is not trained: backbone (all but the classifier), or globs over weights and modules.",
    )
    NUM_CLASSES: Positive = Field(default=1000, description="Classes of the classifier.")
    DROPOUT: Rate = Field(default=0.0, description="Dropout after position embedding, projections and MLPs.")
    ATTENTION_DROPOUT: Rate = Field(default=0.0, description="Dropout of attention weights.")
    DROPPATH: Rate = Field(default=0.0, description="Stochastic depth of the last block; earlier ones get less.")
    PATCH_SIZE: Positive | None = Field(default=None, description="Side of a patch; 16 for ViT-B/16.")
    EMBED_DIM: Positive | None = Field(default=None, description="Width; 768 for ViT-B.")
    NUM_HEADS: Positive | Integers | None = Field(
        default=None, description="Attention heads (Swin: one number a stage)."
    )
    ATTN_HEAD_SIZE: Positive | None = Field(default=None, description="Width of a head; null: EMBED_DIM / NUM_HEADS.")
    DEPTH: Positive | None = Field(default=None, description="Number of blocks; 12 for ViT-B.")
    MLP_RATIO: AboveZero | None = Field(default=None, description="Width of the MLP against EMBED_DIM; 4.0 for ViT-B.")
    QKV_BIAS: bool | None = Field(default=None, description="Bias in the query, key and value projection.")
    WINDOW_SIZE: Positive | None = Field(default=None, description="Swin: side of an attention window, in patches.")
    STAGE_DEPTHS: Integers | None = Field(default=None, description="Swin: blocks in each stage.")
    QK_SCALE: AboveZero | None = Field(
        default=None, description="Scale of the attention logits; null: head size ** -0.5."
    )
    APE: bool | None = Field(default=None, description="Swin: absolute position embedding.")
    PATCH_NORM: bool | None = Field(default=None, description="Swin: a norm after the patch embedding.")
    ATTENTION: Annotated[
        Literal["auto", "fused", "plain", "flash", "efficient", "cudnn", "packed"], BeforeValidator(folded)
    ] = Field(
        default="auto",
        description="How attention is computed: fused is torch's choice; auto: the fastest (docs/performance.md).",
    )
    LINEAR_PATCHES: Literal["auto"] | bool = Field(
        default="auto", description="Embed patches by a matrix product instead of a convolution; auto: where it pays."
    )
    FUSED_MLP: Literal["auto"] | bool = Field(
        default="auto",
        description="Bias and GELU of MLPs in one kernel, and their gradients; auto: where it pays.",
    )
