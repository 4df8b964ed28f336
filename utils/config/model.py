"""The settings of the section MODEL."""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from utils.config.fields import TRAINING, Section, excludes, needs, only_with, overridden_by, setting
from utils.config.kinds import (
    AboveZero,
    FractionBelowOne,
    Integers,
    Names,
    Place,
    Positive,
    PositiveOrAuto,
    as_names,
    folded,
)

_LABELS = "it learns without labels"
_MASKED = only_with("MODEL.MAE_PRETRAIN")


class DecoderConfig(Section):
    """The decoder of a masked autoencoder (MODEL.MAE_PRETRAIN)."""

    EMBED_DIM: Positive = setting(512, "Embedding dimension (width).", _MASKED)
    DEPTH: Positive = setting(8, "Number of blocks.", _MASKED)
    NUM_HEADS: Positive = setting(16, "Attention heads.", _MASKED)


LoraTarget = Literal["q", "k", "v", "proj", "fc1", "fc2"]
LORA_TARGETS = get_args(LoraTarget)
_LORA = only_with("MODEL.LORA.RANK")


class LoraConfig(Section):
    """LoRA: small trained adapters beside frozen linear layers; see docs/finetuning.md."""

    RANK: Positive | None = setting(
        None,
        "Rank of the adapters, such as 8; null: no adapters. All other weights but the classifier are frozen.",
        needs(
            *("MODEL.PRETRAINED", "MODEL.RESUME!=auto"),
            when=TRAINING,
            why="adapters change what frozen weights have learned",
            do="name weights with -pretrained, or leave MODEL.LORA out",
        ),
        excludes(
            "MODEL.FREEZE!=batch_norm",
            why="LoRA freezes all weights but the classifier itself",
            do="leave MODEL.FREEZE out",
        ),
        excludes("MODEL.MAE_PRETRAIN", why=f"{_LABELS}, which changes all weights"),
        excludes("DIST.STRATEGY=fsdp", why="what it would shard is frozen here", do="use DIST.STRATEGY ddp"),
        excludes("TRAIN.OPTIMIZER.NAME=*muon", why="it updates matrices of blocks, frozen here", do="use AdamW"),
    )
    ALPHA: AboveZero | None = setting(None, "The adapters' output is multiplied by ALPHA / RANK; null: by 1.", _LORA)
    TARGETS: Annotated[tuple[LoraTarget, ...], BeforeValidator(as_names), Field(min_length=1)] = setting(
        ("q", "v"), "Layers with adapters: q, k, v of attention; proj: its output; fc1, fc2: the MLP.", _LORA
    )

    @property
    def factor(self) -> float:
        """The number by which the product of the adapters' matrices is multiplied."""
        return 1.0 if self.ALPHA is None or self.RANK is None else self.ALPHA / self.RANK


class ModelConfig(Section):
    """The model and its initial weights. Sizes that are null are taken from the timm model NAME."""

    TYPE: Annotated[str, BeforeValidator(folded)] = setting(
        "vit",
        "Model family, chooses defaults: vit, deit, swin, one of docs/migrating.md; others: NAME is a timm model.",
    )
    NAME: str = setting(
        "vit_base_patch16_224",
        "A timm model; or any name, with EMBED_DIM, DEPTH or another size and TYPE vit, deit or swin.",
    )
    RESUME: Place | None = setting(
        None,
        "Run or checkpoint (or a file in one) to resume; 'auto': the run in -output.",
        needs("OUTPUT", at="auto", why="auto looks in the run's own folder", do="name it with -output"),
        decides="one start",
    )
    PRETRAINED: str | None = setting(
        None,
        "Weights to start from: .safetensors, .pth, .npz, .pdparams, a run, or a timm model.",
        overridden_by("MODEL.RESUME!=auto", why="the run's own weights are loaded"),
    )
    NEW_CLASSIFIER: Annotated[bool | Literal["zero", "probe"], BeforeValidator(folded)] = setting(
        False,
        "A new classifier, even for as many classes: true: timm's start; zero: of zeros; probe: a linear classifier, "
        "fitted to the features of the training images.",
        needs(
            *("MODEL.PRETRAINED", "MODEL.RESUME!=auto"),
            at="probe",
            when=TRAINING,
            why="it is fitted to what pretrained weights see",
            do="name weights with -pretrained",
        ),
        only_with("MODEL.PRETRAINED", why="without weights to start from, every classifier is new", at="true|zero"),
        overridden_by("MODEL.MAE_PRETRAIN", why=f"{_LABELS} and has no classifier"),
    )
    POOL: Literal["class", "mean", "both", "blocks"] | None = setting(
        None,
        "ViT: what the classifier sees: class (token), mean (of the patches), both, or blocks (class tokens of the "
        "last 4 blocks, and that mean); null: as timm's model. Unset, with -pretrained: the run's.",
        excludes("MODEL.MAE_PRETRAIN", why=f"{_LABELS} and has no classifier"),
        excludes("TRAIN.DISTILLATION_TYPE", why="a distilled model has two classifiers", when=TRAINING),
        decides="weights",
    )
    FREEZE: Names = setting(
        (), "Weights not to train: backbone (all but the classifier), batch_norm, or globs of names."
    )
    LORA: LoraConfig = Field(default_factory=LoraConfig, description="Adapters of frozen linear layers.")
    MAE_PRETRAIN: bool = setting(
        False,
        "Masked autoencoder: without labels, the model predicts the pixels of hidden patches; see docs/pretraining.md.",
        excludes("DATA.MULTI_LABEL", why=_LABELS),
        excludes("TRAIN.DISTILLATION_TYPE", when=TRAINING, why="the teacher predicts classes"),
        excludes("TRAIN.CLASS_WEIGHTS", when=TRAINING, why=_LABELS),
        excludes("TRAIN.TOKEN_DROP", "TRAIN.SIZE_SCHEDULE", when=TRAINING, why="it leaves out patches itself"),
    )
    MASK_RATIO: float = setting(
        0.75, "Fraction of the patches that are hidden.", _MASKED, decides="patches", gt=0, lt=1
    )
    DECODER: DecoderConfig = Field(default_factory=DecoderConfig, description="The decoder of a masked autoencoder.")
    NUM_CLASSES: PositiveOrAuto = setting(1000, "Number of classes; auto: as many as the data set has.")
    DROPOUT: FractionBelowOne = setting(0.0, "Dropout after position embedding and projections, and in MLPs.")
    ATTENTION_DROPOUT: FractionBelowOne = setting(0.0, "Dropout of attention weights.")
    DROPPATH: FractionBelowOne = setting(0.0, "Stochastic depth rate of the last block; usually lower in earlier ones.")
    INIT_VALUES: AboveZero | None = setting(
        None,
        "Initial layer scale (CaiT, ...; adds it to ViTs); null: timm's. Unset, with -pretrained: the run's.",
        decides="weights",
        le=1e6,
    )
    PATCH_SIZE: PositiveOrAuto | None = setting(
        None,
        "Side of a patch in pixels; 16 for ViT-B/16; auto: 4 to 8, for about 8 patches a row.",
        decides="weights|patches",
    )
    EMBED_DIM: Positive | None = setting(None, "Embedding dimension (width); 768 for ViT-B.", decides="weights")
    NUM_HEADS: Positive | Integers | None = setting(
        None, "Attention heads (Swin: one number per stage).", decides="weights"
    )
    DEPTH: Positive | None = setting(None, "Number of blocks; 12 for ViT-B.", decides="weights")
    MLP_RATIO: AboveZero | None = setting(
        None, "Hidden width of the MLP relative to EMBED_DIM; 4.0 for ViT-B.", decides="weights", le=1000
    )
    QKV_BIAS: bool | None = setting(None, "Bias in the query, key and value projection.", decides="weights")
    WINDOW_SIZE: Positive | None = setting(
        None, "Swin: height and width of an attention window, in patches.", decides="weights"
    )
    STAGE_DEPTHS: Integers | None = setting(None, "Swin: blocks in each stage.", decides="weights")

    @property
    def starts_at_probe(self) -> bool:
        """Whether the new classifier of pretrained weights is fitted to features before training."""
        return self.NEW_CLASSIFIER == "probe" and self.PRETRAINED is not None and not self.MAE_PRETRAIN
