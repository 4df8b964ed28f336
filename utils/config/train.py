"""The settings of the section TRAIN."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from utils.config.fields import TRAINING, Section, excludes, only_with, overridden_by, setting
from utils.config.kinds import (
    AUTO,
    AboveZero,
    Betas,
    Count,
    CountOrAuto,
    Fraction,
    FractionBelowOne,
    FractionOrAuto,
    Fractions,
    Integers,
    Names,
    NonNegative,
    OwnName,
    Positive,
    RateOrAuto,
    SizeSteps,
)
from vitamp.sizes import ImageSize

_MUON = only_with("TRAIN.OPTIMIZER.NAME=*Muon")
_RAND = "TRAIN.RAND_AUGMENT"
_AUTO = "TRAIN.AUTO_AUGMENT"
_TRIVIAL = "TRAIN.AUGMENT=trivial"
_BCE = only_with("TRAIN.LOSS=bce")
_MIXED = only_with("TRAIN.MIXUP_PROB")
_MIXING = only_with("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX", when="TRAIN.MIXUP_PROB!=0")
_STEPS = only_with("TRAIN.LR_SCHEDULER.NAME=multi-step")
_DECAYS = only_with("TRAIN.LR_SCHEDULER.NAME=step|multi-step")
_EMA = only_with("TRAIN.MODEL_EMA")
_ERASED = only_with("TRAIN.RANDOM_ERASE_PROB")
_NOT_STEPS = overridden_by("TRAIN.LR_SCHEDULER.NAME=step|multi-step")
_LABELLED = overridden_by("MODEL.MAE_PRETRAIN", why="images without labels are not mixed or erased")

_MASKED = only_with("MODEL.MAE_PRETRAIN")
Losses = Literal["ce", "bce"]
LOSSES: tuple[str, ...] = get_args(Losses)
_OF_PROGRAM = only_with(f"TRAIN.LOSS={'|'.join(LOSSES)}")


class OptimizerFacts(NamedTuple):
    """The properties of an optimiser. With the defaults, it is one of timm's."""

    torch: str = ""
    """Name of torch's class. Its fused kernel does the whole step at once, and GradScaler passes it its overflow flag
    on the device: no wait."""
    is_ours: bool = False
    """engine/optim/muon.py has it."""
    by_matrix: bool = False
    """It orthogonalises the linear layers of blocks, or divides their updates by their RMS too (timm's AdaMuon)."""
    shards: bool = False
    """Tested with FSDP: sharded tensors give the same updates as whole ones."""
    has_eps: bool = True
    has_own_rate: bool = False
    """TRAIN.BASE_LR auto knows its learning rate."""


_SGD = OptimizerFacts("SGD", shards=True, has_eps=False)
_OTHER_SGD = OptimizerFacts(has_eps=False)
_SHARDS = OptimizerFacts(shards=True)
OPTIMIZERS = {
    "adam": OptimizerFacts("Adam", shards=True, has_own_rate=True),
    "adamw": OptimizerFacts("AdamW", shards=True, has_own_rate=True),
    "sgd": _SGD,
    "momentum": _SGD,
    "nesterov": _SGD,
    "muon": OptimizerFacts(is_ours=True, by_matrix=True),
    "nmuon": OptimizerFacts(is_ours=True, by_matrix=True),
    "adamuon": OptimizerFacts(by_matrix=True),
    "nadamuon": OptimizerFacts(by_matrix=True),
    "nadamw": _SHARDS,
    "lamb": _SHARDS,
    "lars": _SHARDS,
    "adan": _SHARDS,
    "lion": OptimizerFacts(shards=True, has_eps=False),
    **dict.fromkeys(("clion", "lionc", "sgdw", "csgdw", "sgdc", "csgdc", "nesterovw"), _OTHER_SGD),
}
"""Optimisers of which more is known than timm knows, by TRAIN.OPTIMIZER.NAME in lower case"""
_SGD_NAMES = "|".join(name for name, facts in OPTIMIZERS.items() if facts is _SGD)
_NOT_SGD = overridden_by(f"TRAIN.OPTIMIZER.NAME={_SGD_NAMES}")
_NOT_ADAM = overridden_by("TRAIN.OPTIMIZER.NAME=Adam|AdamW")


class MuonConfig(Section):
    """Muon, NMuon, AdaMuon, NAdaMuon update the linear layers of blocks; AdamW (NAdaMuon: NAdamW) updates the rest."""

    EVERY_MATRIX: bool = setting(
        False, "Update patch embedding, classifier and convolutions too; for small models (docs/methods.md).", _MUON
    )


DEFAULT_MOMENTUM = 0.9
"""Where neither the settings nor the optimiser have one, as with torch's SGD. It is timm's default too."""


class OptimizerConfig(Section):
    NAME: str = setting("AdamW", "An optimiser of torch or timm: AdamW, SGD, LAMB, Lion, Muon, ...")
    EPS: AboveZero | None = setting(None, "eps of Adam and its relatives; null: the optimiser's default.", _NOT_SGD)
    BETAS: Betas | None = setting(None, "betas of Adam and its relatives; null: the optimiser's default.", _NOT_SGD)
    MOMENTUM: FractionBelowOne | None = setting(
        None, "Momentum; null: the optimiser's default, or 0.9 if that is 0.", _NOT_ADAM
    )
    MUON: MuonConfig = Field(default_factory=MuonConfig, description="Muon and its relatives.")

    @property
    def facts(self) -> OptimizerFacts:
        return OPTIMIZERS.get(self.NAME.casefold(), OptimizerFacts())

    def arguments(self) -> dict[str, Any]:
        """EPS and BETAS, if set, as keyword arguments of torch's optimisers."""
        arguments = {"betas": self.BETAS, "eps": self.EPS}
        return {name: value for name, value in arguments.items() if value is not None}


WSD_DECAY = 0.2
"""Fraction of the run, at its end, in which wsd's learning rate decays to END_LR"""


class SchedulerConfig(Section):
    NAME: Literal["warmupcosine", "cosine", "step", "multi-step", "wsd"] = setting(
        "warmupcosine", "Schedule after the warm-up; wsd: constant, with a decay in the last fifth of the run."
    )
    MILESTONES: Integers = setting((30, 60, 90), "Epochs after which the rate is multiplied by DECAY_RATE.", _STEPS)
    DECAY_EPOCHS: Positive = setting(30, "Epochs between two decays.", only_with("TRAIN.LR_SCHEDULER.NAME=step"))
    DECAY_RATE: AboveZero = setting(0.1, "Factor by which each decay multiplies the learning rate.", _DECAYS)


class TrainConfig(Section):
    """Length of the training, optimiser, schedule, regularisation and augmentation."""

    LAST_EPOCH: Count = setting(
        0, "Start after this epoch of the schedule; with -resume, from its checkpoint.", decides="one start"
    )
    NUM_EPOCHS: CountOrAuto = setting(
        300,
        "Number of epochs; 0: the start is validated and saved; auto: as many as fit into MAX_TIME, of which "
        "WARMUP_EPOCHS then is a fraction.",
    )
    WARMUP_EPOCHS: NonNegative = setting(
        32, "Epochs of linear warm-up, clipped to NUM_EPOCHS; -epochs scales them.", le=1e6
    )
    COOLDOWN_EPOCHS: Count = setting(
        0,
        "Epochs at END_LR, the last ones of NUM_EPOCHS.",
        _NOT_STEPS,
        only_with("TRAIN.END_LR", why="at a rate of 0 nothing is learned"),
    )
    WARMUP_START_LR: NonNegative = setting(1e-6, "Learning rate of the first update of the warm-up.")
    BASE_LR: RateOrAuto = setting(
        3e-3,
        "Learning rate after the warm-up. auto measures one to fine-tune with (docs/finetuning.md).",
    )
    END_LR: NonNegative = setting(0.0, "Learning rate at the end.", _NOT_STEPS)
    LINEAR_SCALED_LR: AboveZero | bool | None = setting(None, "Multiply these rates by global batch / N (true: 512).")
    LAYER_DECAY: FractionOrAuto | None = setting(
        None,
        "A layer's learning rate as a fraction of the next one's. auto: with BASE_LR auto 0.75, unless there is batch "
        "norm or LORA.",
    )
    WEIGHT_DECAY: NonNegative = setting(0.3, "Weight decay: decoupled in AdamW and Lion, not in SGD and Adam.")
    WEIGHT_DECAY_ALL: bool = setting(False, "Also decay biases, norms, position and class embeddings.")
    GRAD_CLIP: AboveZero | None = setting(None, "Largest norm of the unscaled gradient; null: no clipping.")
    ACCUM_ITER: Positive = setting(1, "Gradient accumulation: micro-batches per update and process.")
    GLOBAL_BATCH: Positive | None = setting(
        None, "Images per update, from which ACCUM_ITER follows; null: BATCH_SIZE x processes x ACCUM_ITER."
    )
    MEMORY_LIMIT: AboveZero | None = setting(None, "BATCH_SIZE auto, -dry_run: GiB per process; null: the free memory.")
    COMPILE: Literal["auto", "none", "blocks", "whole"] = setting(
        "auto", "torch.compile of each block, or of all from images to loss (whole); auto: in long runs on GPUs."
    )
    GRAD_CHECKPOINT: Literal["none", "blocks"] | Positive = setting(
        "none", "Recompute activations in the backward pass: of all blocks, or of the first of every N."
    )
    OPTIMIZER: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimiser.")
    LR_SCHEDULER: SchedulerConfig = Field(default_factory=SchedulerConfig, description="The schedule.")
    LOSS: Losses | OwnName = setting(
        "ce",
        "Loss for the labels. ce: cross-entropy. bce: binary cross-entropy, each class by itself, as in DeiT III; the "
        "default with DATA.MULTI_LABEL. Or a loss of your own, by its name in a file of USE.",
        excludes("DATA.MULTI_LABEL", at="ce", why="cross-entropy has one class per image", do="leave TRAIN.LOSS out"),
        overridden_by("MODEL.MAE_PRETRAIN", why="it learns the pixels of hidden patches"),
    )
    BCE_TARGET_THRESH: FractionBelowOne | None = setting(
        None, "Targets above it become 1, others 0 (0: both labels of a mixed image count); null: soft targets.", _BCE
    )
    SMOOTHING: FractionBelowOne = setting(0.0, "Label smoothing.", _LABELLED, _OF_PROGRAM)
    CLASS_WEIGHTS: str | None = setting(
        None,
        "Class weights in the loss; in bce of positives. balanced: inverse to class sizes.",
        _OF_PROGRAM,
        excludes("TRAIN.DISTILLATION_TYPE", when=TRAINING, why="its loss has none", do="use DATA.SAMPLER=balanced"),
    )
    MODEL_EMA: bool = setting(False, "Keep an exponential moving average of the weights, and validate it too.")
    MODEL_EMA_DECAY: FractionBelowOne = setting(0.99996, "Decay of the EMA per update.", _EMA)
    MODEL_EMA_WARMUP: bool = setting(True, "Let the decay grow from 0.1 to MODEL_EMA_DECAY, for short runs.", _EMA)
    MODEL_EMA_FORCE_CPU: bool = setting(
        False, "Keep the EMA in host memory, slower.", _EMA, excludes("DIST.STRATEGY=fsdp", why="FSDP shards the EMA")
    )
    MAX_UPDATES: Positive | None = setting(None, "End the run after this many updates.")
    PATIENCE: Positive | None = setting(None, "End the run after this many validations without a better SAVE_BEST_BY.")
    COLOR_JITTER: NonNegative = setting(0.0, "Strength of colour jitter.", overridden_by(_RAND, _AUTO, _TRIVIAL))
    AUTO_AUGMENT: bool = setting(False, "AutoAugment.", overridden_by(_RAND))
    RAND_AUGMENT: bool = setting(False, "RandAugment.")
    RAND_AUGMENT_LAYERS: Positive = setting(2, "RandAugment: operations per sample.", only_with(_RAND))
    RAND_AUGMENT_MAGNITUDE: float = setting(9, "RandAugment: magnitude.", only_with(_RAND), ge=0, le=10)
    AUGMENT: Names = setting(
        (),
        "More augmentations of single images: trivial (TrivialAugment, wide) or three (ThreeAugment of DeiT III: "
        "greyscale, solarise or blur), then your own, by their names in the files of USE, in this order.",
        excludes(_RAND, _AUTO, at="trivial|three", why="they were never meant to be combined", do="choose one of them"),
    )
    MIXUP_ALPHA: NonNegative = setting(0.0, "Mixup: alpha of its Beta distribution; 0: off.", _LABELLED, _MIXED)
    MIXUP_PROB: Fraction = setting(1.0, "Probability of mixup or CutMix.", _MIXING)
    MIXUP_SWITCH_PROB: Fraction = setting(0.5, "Probability of CutMix instead of mixup, if both are on.", _MIXING)
    MIXUP_MODE: Literal["batch", "pair", "elem"] = setting("batch", "Drawn per batch, pair or sample.", _MIXING)
    CUTMIX_ALPHA: NonNegative = setting(
        0.0, "CutMix: alpha of its Beta distribution; 0: off.", _LABELLED, _MIXED, overridden_by("TRAIN.CUTMIX_MINMAX")
    )
    CUTMIX_MINMAX: Fractions | None = setting(
        None, "CutMix: smallest and largest side of the box as fractions.", _LABELLED, _MIXED
    )
    RANDOM_ERASE_PROB: Fraction = setting(0.0, "Probability of random erasing; 0: off.", _LABELLED)
    RANDOM_ERASE_MODE: Literal["const", "rand", "pixel"] = setting(
        "pixel", "Fill with zeros, one colour or noise.", _ERASED
    )
    RANDOM_ERASE_COUNT: Positive = setting(1, "Largest number of boxes.", _ERASED)
    RANDOM_ERASE_SPLIT: bool = setting(False, "Skip the first half of each micro-batch.", _ERASED)
    TOKEN_DROP: FractionBelowOne = setting(0.0, "Fraction of the patch tokens dropped at random in training.")
    TOKEN_DROP_TAIL: Count = setting(0, "Number of epochs without TOKEN_DROP, at the end.")
    SIZE_SCHEDULE: SizeSteps = setting(
        (),
        "Growing training images, as [start, size]: [[0, 160], [0.75, 224]] means 160 pixels first, and 224 "
        "(IMAGE_SIZE) in the last quarter. A start below 1 is a fraction of NUM_EPOCHS, any other a number of epochs.",
    )
    KNN: str | None = setting(
        None,
        "Labelled images on which each validation measures how well the nearest 20 training images vote: as for "
        "DATA.DATA_PATH, the name of a data set, or NAME=FOLDER; see docs/pretraining.md.",
        _MASKED,
    )
    DISTILLATION_TYPE: Literal["hard", "soft"] | None = setting(
        None,
        "Distillation: learn the teacher's top class (hard) or its probabilities (soft); null: off.",
        excludes("DATA.MULTI_LABEL", when=TRAINING, why="its loss is a softmax cross-entropy over the classes"),
    )
    DISTILLATION_ALPHA: Fraction = setting(0.5, "Weight of the teacher's loss.", only_with("TRAIN.DISTILLATION_TYPE"))
    DISTILLATION_TAU: AboveZero = setting(
        1.0, "Temperature of the logits.", only_with("TRAIN.DISTILLATION_TYPE=soft"), le=1e6
    )
    TEACHER_MODEL: str | None = setting(
        None,
        "Teacher for distillation: a timm model, a run or checkpoint, or NAME=FILE (timm's name and the file of its "
        "weights). null: with MODEL.TYPE deit, levit, pit or xcit, PaddleViT's teacher (docs/distillation.md).",
    )

    def with_auto_epochs(self, epochs: int) -> TrainConfig:
        """Return these settings with a number of epochs in place of NUM_EPOCHS auto; unchanged if it is not auto.

        With auto, the warm-up is a fraction of the run. It becomes a number of epochs, too.
        """
        if self.NUM_EPOCHS != AUTO:
            return self
        warmup = round(self.WARMUP_EPOCHS * epochs, 6)
        return self.changed(NUM_EPOCHS=epochs, WARMUP_EPOCHS=warmup)

    def size_in(self, epoch: int, full_size: ImageSize) -> ImageSize:
        """Return the size of training images in an epoch, by SIZE_SCHEDULE.

        The schedule [[0, 160], [0.75, 224]] trains with 160 pixels, and with 224 in the last quarter of the epochs. A
        start of 1 or more is a number of epochs.

        epoch: number of the epoch, from 1
        full_size: DATA.IMAGE_SIZE, which is the result without a SIZE_SCHEDULE, and in the last epoch
        """
        if epoch >= self.NUM_EPOCHS:
            return full_size
        done_epochs = epoch - 1
        begun_sizes = [size for start, size in self.SIZE_SCHEDULE if done_epochs >= self.epochs_before(start)]
        return begun_sizes[-1] if begun_sizes else full_size

    def drops_tokens_in(self, epoch: int) -> bool:
        return self.TOKEN_DROP > 0 and epoch <= self.NUM_EPOCHS - self.TOKEN_DROP_TAIL

    def epochs_before(self, start: float) -> float:
        """A start in SIZE_SCHEDULE as a number of epochs; below 1 it is a fraction of NUM_EPOCHS."""
        return round(start * self.NUM_EPOCHS, 6) if start < 1 else start

    @property
    def epochs_of_schedule(self) -> int:
        """NUM_EPOCHS without COOLDOWN_EPOCHS, which a schedule in steps does not have."""
        if "step" in self.LR_SCHEDULER.NAME:
            return self.NUM_EPOCHS
        return self.NUM_EPOCHS - self.COOLDOWN_EPOCHS

    @property
    def epochs_before_decay(self) -> float:
        """Schedule wsd: epochs before the learning rate decays. A long warm-up makes the decay shorter."""
        length = self.epochs_of_schedule
        return max(min(self.WARMUP_EPOCHS, length), round(length * (1 - WSD_DECAY), 6))

    @property
    def scale_reference(self) -> float | None:
        """The global batch that the learning rates are meant for (LINEAR_SCALED_LR); None: they are not scaled."""
        reference = 512.0 if self.LINEAR_SCALED_LR is True else self.LINEAR_SCALED_LR
        return reference or None

    @property
    def single_image_keys(self) -> list[str]:
        """The enabled settings that augment single images."""
        keys = ("RAND_AUGMENT", "AUTO_AUGMENT", "COLOR_JITTER", "AUGMENT")
        return [f"TRAIN.{key}" for key in keys if getattr(self, key)]

    @property
    def own_loss(self) -> bool:
        """Whether LOSS names one of the user's own."""
        return self.LOSS not in LOSSES

    @property
    def mixes(self) -> bool:
        return self.MIXUP_ALPHA > 0 or self.CUTMIX_ALPHA > 0 or self.CUTMIX_MINMAX is not None
