"""The settings of the section TRAIN."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from utils.config.fields import Section, without_effect
from utils.config.kinds import (
    AboveZero,
    Count,
    Fraction,
    FractionAboveZero,
    FractionBelowOne,
    Integers,
    NonNegative,
    Pair,
    Positive,
    SizeSteps,
    as_word_or_integer,
    folded,
)


class OptimizerConfig(Section):
    NAME: str = Field(default="AdamW", description="An optimiser of torch or timm: AdamW, SGD, LAMB, Lion, ...")
    EPS: AboveZero | None = Field(
        default=None, description="eps of Adam and its relatives, added to the denominator; null: the optimiser's own."
    )
    BETAS: Pair | None = Field(
        default=None,
        description="betas of Adam and its relatives; null: the optimiser's own.",
    )
    MOMENTUM: FractionBelowOne | None = Field(
        default=None, description="Momentum of SGD and its relatives; null: the optimiser's own, or 0.9 if that is 0."
    )

    def arguments(self) -> dict[str, Any]:
        """EPS and BETAS, if set, as keyword arguments of torch's optimisers."""
        both = {"betas": self.BETAS, "eps": self.EPS}
        return {name: value for name, value in both.items() if value is not None}


class SchedulerConfig(Section):
    NAME: Annotated[Literal["warmupcosine", "cosine", "step", "multi-step"], BeforeValidator(folded)] = Field(
        default="warmupcosine", description="Shape after the warm-up."
    )
    MILESTONES: Integers = Field(
        default=(30, 60, 90),
        description="multi-step: epochs after which the learning rate is multiplied by DECAY_RATE.",
    )
    DECAY_EPOCHS: Positive = Field(default=30, description="step: epochs between two decays.")
    DECAY_RATE: AboveZero = Field(default=0.1, description="step, multi-step: factor of a decay.")


class TrainConfig(Section):
    """Length of the training, optimiser, schedule, regularisation and augmentation."""

    LAST_EPOCH: Count = Field(
        default=0, description="Epochs that count as done; with -resume, the epoch of the checkpoint."
    )
    NUM_EPOCHS: Positive = Field(default=300, description="Number of epochs.")
    WARMUP_EPOCHS: NonNegative = Field(default=32, description="Epochs of linear warm-up, clipped to NUM_EPOCHS.")
    WARMUP_START_LR: NonNegative = Field(default=1e-6, description="Learning rate of the first update of the warm-up.")
    BASE_LR: NonNegative = Field(default=3e-3, description="Learning rate after the warm-up.")
    END_LR: NonNegative = Field(default=0.0, description="Learning rate at the end of the cosine.")
    LINEAR_SCALED_LR: AboveZero | bool | None = Field(
        default=None, description="Multiply the three learning rates by global batch / this number (true: 512)."
    )
    LAYER_DECAY: FractionAboveZero | None = Field(
        default=None,
        description=(
            "Layer-wise decay: each layer's learning rate is this fraction of the next layer's; null: all are equal."
        ),
    )
    HEAD_LR: AboveZero = Field(default=1.0, description="Factor of the classifier's learning rate.")
    WEIGHT_DECAY: NonNegative = Field(
        default=0.3, description="Weight decay: decoupled in AdamW and Lion, added to the gradient in SGD and Adam."
    )
    WEIGHT_DECAY_ALL: bool = Field(default=False, description="Also decay biases, norms, position and class embedding.")
    GRAD_CLIP: AboveZero | None = Field(
        default=None, description="Largest norm of the unscaled gradient; null: no clipping."
    )
    ACCUM_ITER: Positive = Field(default=1, description="Gradient accumulation: micro-batches per update and process.")
    GLOBAL_BATCH: Positive | None = Field(
        default=None,
        description=(
            "Images per update over all processes, from which ACCUM_ITER follows; null: BATCH_SIZE x "
            "processes x ACCUM_ITER."
        ),
    )
    MEMORY_LIMIT: AboveZero | None = Field(
        default=None, description="DATA.BATCH_SIZE auto: GiB that a process may use; null: the device's free memory."
    )
    OOM: Annotated[Literal["stop", "split"], BeforeValidator(folded)] = without_effect(
        "stop",
        "No longer supported. Out of memory ends the run; the error says what helps.",
        "an update that does not fit into memory is not split; DATA.BATCH_SIZE=auto finds a batch that fits",
    )
    COMPILE: Annotated[Literal["auto", "none", "blocks", "whole"], BeforeValidator(folded)] = Field(
        default="auto",
        description=(
            "torch.compile of each block, or of everything from images to loss (whole); auto: on GPUs, if "
            "the run is long enough to gain."
        ),
    )
    COMPILE_MODE: Annotated[Literal["default", "reduce-overhead", "max-autotune"], BeforeValidator(folded)] = Field(
        default="default",
        description="torch.compile's mode: reduce-overhead adds CUDA graphs; max-autotune also benchmarks kernels.",
    )
    GRAD_CHECKPOINT: Annotated[Literal["none", "blocks"] | Positive, BeforeValidator(as_word_or_integer)] = Field(
        default="none",
        description="Gradient checkpointing: recompute activations in the backward pass, in all blocks or in each Nth.",
    )
    RESIDUAL_DTYPE: Annotated[Literal["fp32", "autocast"], BeforeValidator(folded)] = Field(
        default="fp32", description="O1: dtype of the residual stream between blocks."
    )
    CHANNELS_LAST: Literal["auto"] | bool = Field(
        default="auto", description="Memory format channels_last, for convolutional models; auto: on GPUs."
    )
    OPTIMIZER: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimiser.")
    LR_SCHEDULER: SchedulerConfig = Field(default_factory=SchedulerConfig, description="The schedule.")
    SMOOTHING: FractionBelowOne = Field(default=0.0, description="Label smoothing.")
    MODEL_EMA: bool = Field(
        default=False, description="Keep an exponential moving average of the weights, and validate it too."
    )
    MODEL_EMA_DECAY: FractionBelowOne = Field(default=0.99996, description="Decay of the EMA per update.")
    MODEL_EMA_WARMUP: bool = Field(
        default=True, description="Let the EMA's decay grow from 0.1, so that short runs gain too."
    )
    MODEL_EMA_FORCE_CPU: bool = Field(
        default=False, description="Keep the EMA in host memory: slower, but saves device memory."
    )
    MAX_UPDATES: Positive | None = Field(default=None, description="End the run after so many updates.")
    PATIENCE: Positive | None = Field(
        default=None, description="End the run after so many validations without improvement."
    )
    COLOR_JITTER: NonNegative = Field(
        default=0.0,
        description=(
            "Strength of colour jitter; of the augmentation policies, it can only be combined with THREE_AUGMENT."
        ),
    )
    AUTO_AUGMENT: bool = Field(default=False, description="AutoAugment; RAND_AUGMENT overrides it.")
    RAND_AUGMENT: bool = Field(default=False, description="RandAugment.")
    RAND_AUGMENT_LAYERS: Positive = Field(default=2, description="RandAugment: operations per sample.")
    RAND_AUGMENT_MAGNITUDE: float = Field(default=9, ge=0, le=10, description="RandAugment: magnitude.")
    TRIVIAL_AUGMENT: bool = Field(default=False, description="TrivialAugment (wide): one operation of random strength.")
    THREE_AUGMENT: bool = Field(
        default=False, description="ThreeAugment of DeiT III: one of greyscale, solarise and blur."
    )
    MIXUP_ALPHA: NonNegative = Field(default=0.0, description="Mixup: alpha of its Beta distribution; 0: off.")
    MIXUP_PROB: Fraction = Field(default=1.0, description="Probability that mixup or CutMix is applied to a batch.")
    MIXUP_SWITCH_PROB: Fraction = Field(default=0.5, description="Probability of CutMix if both are on.")
    MIXUP_MODE: Literal["batch", "pair", "elem"] = Field(
        default="batch", description="Mixup and CutMix: one draw per batch, per pair or per sample."
    )
    CUTMIX_ALPHA: NonNegative = Field(default=0.0, description="CutMix: alpha of its Beta distribution; 0: off.")
    CUTMIX_MINMAX: Pair | None = Field(
        default=None,
        description="CutMix: smallest and largest side of the box, as fractions of the image; replaces CUTMIX_ALPHA.",
    )
    RANDOM_ERASE_PROB: Fraction = Field(default=0.0, description="Probability of random erasing; 0: off.")
    RANDOM_ERASE_MODE: Literal["const", "rand", "pixel"] = Field(
        default="pixel",
        description="Random erasing: fill with zeros (const), one random colour (rand), or random pixels (pixel).",
    )
    RANDOM_ERASE_COUNT: Positive = Field(default=1, description="Random erasing: largest number of boxes.")
    RANDOM_ERASE_SPLIT: bool = Field(
        default=False, description="Random erasing: skip the first half of each micro-batch."
    )
    TOKEN_DROP: FractionBelowOne = Field(
        default=0.0, description="Fraction of the patch tokens dropped in training, at random for each sample; 0: none."
    )
    TOKEN_DROP_TAIL: Count = Field(default=0, description="Epochs at the end without TOKEN_DROP.")
    SIZE_SCHEDULE: SizeSteps = Field(
        default=(),
        description=(
            "Growing training images: [[0, 160], [0.75, 224]] means 160 pixels first, IMAGE_SIZE in the last "
            "quarter. A start of 1 or more is a number of epochs."
        ),
    )
    DISTILLATION_TYPE: Annotated[Literal["hard", "soft"] | None, BeforeValidator(folded)] = Field(
        default=None,
        description="Distillation: learn the teacher's top class (hard) or its probabilities (soft); null: off.",
    )
    DISTILLATION_ALPHA: Fraction = Field(default=0.5, description="Distillation: weight of the teacher's loss.")
    DISTILLATION_TAU: AboveZero = Field(default=1.0, description="Distillation: temperature of soft.")
    TEACHER_MODEL: str | None = Field(
        default=None, description="Distillation: the teacher: a timm model, a run or checkpoint, or NAME=FILE."
    )

    def size_in(self, epoch: int, full: int) -> int:
        """The size of training images in an epoch; `full` without a schedule."""
        sizes = [size for start, size in self.SIZE_SCHEDULE if epoch - 1 >= self.epochs_before(start)]
        return sizes[-1] if sizes else full

    def epochs_before(self, start: float) -> float:
        """A start in SIZE_SCHEDULE as a number of epochs; below 1 it is a fraction of NUM_EPOCHS."""
        return round(start * self.NUM_EPOCHS, 6) if start < 1 else start

    @property
    def scale_reference(self) -> float | None:
        """The global batch that the learning rates are meant for (LINEAR_SCALED_LR); None: they are not scaled."""
        reference = 512.0 if self.LINEAR_SCALED_LR is True else self.LINEAR_SCALED_LR
        return reference or None

    @property
    def single_image_keys(self) -> list[str]:
        """The enabled settings that augment single images."""
        keys = ("RAND_AUGMENT", "AUTO_AUGMENT", "TRIVIAL_AUGMENT", "THREE_AUGMENT", "COLOR_JITTER")
        return [f"TRAIN.{key}" for key in keys if getattr(self, key)]

    @property
    def mixes(self) -> bool:
        """Whether mixup or CutMix is on."""
        return self.MIXUP_ALPHA > 0 or self.CUTMIX_ALPHA > 0 or self.CUTMIX_MINMAX is not None
