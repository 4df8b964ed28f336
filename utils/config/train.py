"""The settings of the section TRAIN."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from utils.config.fields import Section, inert
from utils.config.kinds import (
    AboveZero,
    Count,
    Fraction,
    Integers,
    NonNegative,
    Pair,
    Positive,
    Rate,
    Share,
    SizeSteps,
    as_word_or_integer,
    folded,
)


class OptimizerConfig(Section):
    NAME: str = Field(default="AdamW", description="An optimiser of torch or timm: AdamW, SGD, LAMB, Lion, ...")
    EPS: AboveZero | None = Field(
        default=None, description="Added to the denominator of Adam and its relatives; null: the optimiser's own."
    )
    BETAS: Pair | None = Field(
        default=None,
        description="Decay of the two running means of Adam and its relatives; null: the optimiser's own.",
    )
    MOMENTUM: Rate | None = Field(
        default=None, description="Momentum of SGD and its relatives; null: the optimiser's own, or 0.9 if that is 0."
    )

    def arguments(self) -> dict[str, Any]:
        """EPS and BETAS as torch's optimisers take them, without those left to the optimiser."""
        both = {"betas": self.BETAS, "eps": self.EPS}
        return {name: value for name, value in both.items() if value is not None}


class SchedulerConfig(Section):
    NAME: Annotated[Literal["warmupcosine", "cosine", "step", "multi-step"], BeforeValidator(folded)] = Field(
        default="warmupcosine", description="Shape after the warm-up."
    )
    MILESTONES: Integers = Field(default=(30, 60, 90), description="multi-step: epochs after which the rate falls.")
    DECAY_EPOCHS: Positive = Field(default=30, description="step: epochs between two falls.")
    DECAY_RATE: AboveZero = Field(default=0.1, description="step, multi-step: factor of a fall.")


class TrainConfig(Section):
    """How long, how fast, with what."""

    LAST_EPOCH: Count = Field(default=0, description="Epochs counted as done; with -resume, the checkpoint's epoch.")
    NUM_EPOCHS: Positive = Field(default=300, description="Epochs to train.")
    WARMUP_EPOCHS: NonNegative = Field(default=32, description="Epochs of linear warm-up, clipped to NUM_EPOCHS.")
    WARMUP_START_LR: NonNegative = Field(default=1e-6, description="Learning rate at the first update of the warm-up.")
    BASE_LR: NonNegative = Field(default=3e-3, description="Learning rate after the warm-up.")
    END_LR: NonNegative = Field(default=0.0, description="Learning rate the cosine ends at.")
    LINEAR_SCALED_LR: AboveZero | bool | None = Field(
        default=None, description="Scale the three rates by global batch / this number (true: 512)."
    )
    LAYER_DECAY: Share | None = Field(
        default=None, description="Each layer's learning rate is this much of the next one's; null: all have the same."
    )
    HEAD_LR: AboveZero = Field(default=1.0, description="Factor of the classifier's learning rate.")
    WEIGHT_DECAY: NonNegative = Field(
        default=0.3, description="Weight decay: apart from the gradient in AdamW and Lion, added to it in SGD and Adam."
    )
    WEIGHT_DECAY_ALL: bool = Field(default=False, description="Decay biases, norms, position and class embedding too.")
    GRAD_CLIP: AboveZero | None = Field(
        default=None, description="Greatest norm of the unscaled gradient; null: no clipping."
    )
    ACCUM_ITER: Positive = Field(default=1, description="Micro-batches per update and process.")
    GLOBAL_BATCH: Positive | None = Field(
        default=None, description="Images per update over all processes; ACCUM_ITER then follows. null: what comes out."
    )
    MEMORY_LIMIT: AboveZero | None = Field(
        default=None, description="DATA.BATCH_SIZE auto: GiB that a process may take; null: what its device has free."
    )
    OOM: Annotated[Literal["stop", "split"], BeforeValidator(folded)] = inert(
        "stop",
        "Retired. Out of memory ends the run, and the error names what helps.",
        "an update that does not fit is not split; DATA.BATCH_SIZE=auto finds a batch that fits",
    )
    COMPILE: Annotated[Literal["auto", "none", "blocks", "whole"], BeforeValidator(folded)] = Field(
        default="auto",
        description="torch.compile of each block, or of all from bytes to loss; auto: on a GPU, where it pays.",
    )
    COMPILE_MODE: Annotated[Literal["default", "reduce-overhead", "max-autotune"], BeforeValidator(folded)] = Field(
        default="default", description="COMPILE: reduce-overhead adds CUDA graphs; max-autotune also tries kernels out."
    )
    GRAD_CHECKPOINT: Annotated[Literal["none", "blocks"] | Positive, BeforeValidator(as_word_or_integer)] = Field(
        default="none",
        description="Recompute blocks in the backward pass instead of keeping what they computed: all, or each Nth.",
    )
    RESIDUAL_DTYPE: Annotated[Literal["fp32", "autocast"], BeforeValidator(folded)] = Field(
        default="fp32", description="O1: the precision in which a block hands its result to the next one."
    )
    CHANNELS_LAST: Literal["auto"] | bool = Field(
        default="auto", description="Keep the channels of a pixel together, for models of convolutions; auto: on GPUs."
    )
    OPTIMIZER: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimiser.")
    LR_SCHEDULER: SchedulerConfig = Field(default_factory=SchedulerConfig, description="The schedule.")
    SMOOTHING: Rate = Field(default=0.0, description="Label smoothing.")
    MODEL_EMA: bool = Field(
        default=False, description="Keep a moving average of the weights and validate it beside them."
    )
    MODEL_EMA_DECAY: Rate = Field(default=0.99996, description="Decay of the average per update.")
    MODEL_EMA_WARMUP: bool = Field(
        default=True, description="Let the decay grow from 0.1, so that short runs gain too."
    )
    MODEL_EMA_FORCE_CPU: bool = Field(
        default=False, description="Keep the average in host memory: slower, but spares the device."
    )
    MAX_UPDATES: Positive | None = Field(default=None, description="End after this many updates.")
    PATIENCE: Positive | None = Field(
        default=None, description="End after this many validations without a better figure."
    )
    COLOR_JITTER: NonNegative = Field(
        default=0.0, description="Strength of colour jitter; beside a policy, it only acts with THREE_AUGMENT."
    )
    AUTO_AUGMENT: bool = Field(default=False, description="AutoAugment; RAND_AUGMENT goes before it.")
    RAND_AUGMENT: bool = Field(default=False, description="RandAugment.")
    RAND_AUGMENT_LAYERS: Positive = Field(default=2, description="RandAugment: operations a sample.")
    RAND_AUGMENT_MAGNITUDE: float = Field(default=9, ge=0, le=10, description="RandAugment: strength.")
    TRIVIAL_AUGMENT: bool = Field(default=False, description="TrivialAugment (wide): one operation of any strength.")
    THREE_AUGMENT: bool = Field(default=False, description="DeiT III: one of grey, solarised and blurred.")
    MIXUP_ALPHA: NonNegative = Field(default=0.0, description="Mixup: both parameters of its Beta; 0: off.")
    MIXUP_PROB: Fraction = Field(default=1.0, description="Probability that mixup or cutmix acts on a batch.")
    MIXUP_SWITCH_PROB: Fraction = Field(default=0.5, description="Probability of cutmix where both are on.")
    MIXUP_MODE: Literal["batch", "pair", "elem"] = Field(
        default="batch", description="One draw a batch, a pair or a sample."
    )
    CUTMIX_ALPHA: NonNegative = Field(default=0.0, description="CutMix: both parameters of its Beta; 0: off.")
    CUTMIX_MINMAX: Pair | None = Field(
        default=None, description="CutMix by the least and greatest side of its box, as shares; replaces CUTMIX_ALPHA."
    )
    RANDOM_ERASE_PROB: Fraction = Field(default=0.0, description="Probability of random erasing; 0: off.")
    RANDOM_ERASE_MODE: Literal["const", "rand", "pixel"] = Field(
        default="pixel", description="Random erasing: what is put in."
    )
    RANDOM_ERASE_COUNT: Positive = Field(default=1, description="Random erasing: greatest number of boxes.")
    RANDOM_ERASE_SPLIT: bool = Field(
        default=False, description="Random erasing: leave the first half of a micro-batch alone."
    )
    TOKEN_DROP: Rate = Field(
        default=0.0, description="Share of the patch tokens left out in training, others for each sample; 0: none."
    )
    TOKEN_DROP_TAIL: Count = Field(default=0, description="Epochs at the end in which TOKEN_DROP leaves none out.")
    SIZE_SCHEDULE: SizeSteps = Field(
        default=(),
        description=(
            "Training images grow: [[0, 160], [0.75, 224]] is 160 at first, IMAGE_SIZE for the last quarter. A start "
            "of 1 or more counts epochs."
        ),
    )
    DISTILLATION_TYPE: Annotated[Literal["hard", "soft"] | None, BeforeValidator(folded)] = Field(
        default=None, description="Distillation: learn the teacher's first guess, or all its probabilities; null: off."
    )
    DISTILLATION_ALPHA: Fraction = Field(default=0.5, description="Distillation: weight of the teacher.")
    DISTILLATION_TAU: AboveZero = Field(default=1.0, description="Distillation: temperature of the soft kind.")
    TEACHER_MODEL: str | None = Field(
        default=None, description="Distillation: the teacher, a timm name, a run or checkpoint, or NAME=FILE."
    )

    def size_in(self, epoch: int, full: int) -> int:
        """The side of training images in an epoch, where they are `full` in the end."""
        begun = [size for start, size in self.SIZE_SCHEDULE if epoch - 1 >= self.epochs_before(start)]
        return begun[-1] if begun else full

    def epochs_before(self, start: float) -> float:
        """A start in SIZE_SCHEDULE, in epochs: below 1 it is a share of them all."""
        return round(start * self.NUM_EPOCHS, 6) if start < 1 else start

    @property
    def scale_reference(self) -> float | None:
        """The global batch that LINEAR_SCALED_LR says the rates are meant for; None: they are taken as they are."""
        reference = 512.0 if self.LINEAR_SCALED_LR is True else self.LINEAR_SCALED_LR
        return reference or None

    @property
    def single_image_keys(self) -> list[str]:
        """Names of the settings that are on and change one image at a time."""
        keys = ("RAND_AUGMENT", "AUTO_AUGMENT", "TRIVIAL_AUGMENT", "THREE_AUGMENT", "COLOR_JITTER")
        return [f"TRAIN.{key}" for key in keys if getattr(self, key)]

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with one another."""
        return self.MIXUP_ALPHA > 0 or self.CUTMIX_ALPHA > 0 or self.CUTMIX_MINMAX is not None
