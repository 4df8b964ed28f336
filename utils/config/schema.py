"""All settings: one class per YAML section, one description per key.

`docs/config.md` is generated from them.
"""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from utils.config.data import DataConfig
from utils.config.fields import Section, excludes, needs, only_with, setting
from utils.config.kinds import AboveZero, Count, Names, OwnName, Place, Positive, Time, as_names, is_own_setting
from utils.config.model import ModelConfig
from utils.config.train import TrainConfig
from vitamp.metrics import METRICS, NO_LABELS, ONE_LABEL, TASKS, TaskKind

_ON = only_with("AMP.ENABLED", why="-amp turns AMP on")


class AmpConfig(Section):
    """Mixed precision."""

    ENABLED: bool = setting(False, "Train in mixed precision; set by -amp.")
    DTYPE: Literal["auto", "fp16", "bf16", "fp8"] = setting(
        "auto",
        "auto: bf16 with O3, else fp16 on GPUs and bf16 on CPUs (fp16 if a CPU has fp16 but no bf16; with O1, fp32 if "
        "it has neither, or for depthwise convolutions). fp8 needs torchao.",
        _ON,
        excludes("DIST.STRATEGY=fsdp", at="fp8", why="FSDP with fp8 is not supported", do="use bf16, fp16 or ddp"),
    )
    LEVEL: Literal["O0", "O1", "O2", "NAIVE", "O3"] = setting(
        "O1",
        "O0: fp32. O1: autocast. O2: half-precision weights with fp32 master weights, norms in fp32. NAIVE: as O2, "
        "but only batch norms in fp32. O3: half-precision weights only.",
        _ON,
        excludes("DIST.STRATEGY=fsdp", at="O3", why="FSDP with O3 is not supported", do="use O1, O2 or NAIVE"),
    )
    TF32: bool = setting(False, "Use TF32 for fp32 matrix products and convolutions, on GPUs that have it.")
    INIT_LOSS_SCALING: AboveZero = setting(65536.0, "Initial loss scale.", _ON, le=3e38)
    INCR_EVERY_N_STEPS: Positive = setting(2000, "Updates without overflow before the loss scale grows.", _ON)
    INCR_RATIO: float = setting(2.0, "Factor by which the loss scale grows.", _ON, gt=1)
    DECR_RATIO: float = setting(0.5, "Factor by which the loss scale shrinks after overflows.", _ON, gt=0, lt=1)
    DECR_EVERY_N_NAN_OR_INF: Positive = setting(1, "Consecutive overflows before the loss scale shrinks.", _ON)
    USE_DYNAMIC_LOSS_SCALING: bool = setting(True, "false: the loss scale stays at its initial value.", _ON)
    CUSTOM_WHITE_LIST: Names = setting((), "Operators that run in low precision; see docs/amp.md.", _ON)
    CUSTOM_BLACK_LIST: Names = setting((), "Operators that run in fp32; see docs/amp.md.", _ON)
    FP32_MODULES: Names = setting((), "Modules that run in fp32: globs over their names or classes.", _ON)
    AUTO_FP32: bool = setting(
        False,
        "Switch a module to fp32 at its second overflow; overflows in the backward pass count only at loss scale 1.",
        _ON,
        excludes("DIST.STRATEGY=fsdp", why="updates of FSDP are not replayed", do="set AMP.FP32_MODULES"),
    )


_DECIDING = {"type": "string", "enum": [name for name, metric in METRICS.items() if metric.decides]}
_OWN_METRIC = {"type": "string", "description": "a name that USE registers"}
BestBy = Annotated[OwnName, WithJsonSchema({"anyOf": [_DECIDING, _OWN_METRIC]})]
"""Which of them a run measures depends on its labels: checks.py"""

ATTENTION = ("fused", "flash", "efficient", "cudnn", "packed")
_Kernel = Literal["+fused", "+flash", "+efficient", "+cudnn", "+packed"]
_NoKernel = Literal["-fused", "-flash", "-efficient", "-cudnn", "-packed"]
_Way = Literal["+linear_patches", "+fused_mlp", "+channels_last", "-linear_patches", "-fused_mlp", "-channels_last"]
SpeedWord = Literal["auto", "plain", _Kernel, _NoKernel, _Way, "-rewrite"]


class DistConfig(Section):
    """Processes and how they share the work."""

    STRATEGY: Literal["ddp", "fsdp"] = setting(
        "ddp",
        "ddp: each process holds the whole model. fsdp: the weights are sharded over the processes; see docs/fsdp.md.",
        excludes("DEVICE=mps", why="FSDP needs several devices, and MPS is one"),
    )
    HSDP: bool = setting(
        False,
        "Shard the weights within each machine and replicate them across machines; for slow networks.",
        needs("DIST.STRATEGY=fsdp", why="it says how FSDP shards the weights"),
    )
    BACKEND: Literal["nccl", "gloo"] | None = setting(None, "Communication; null: nccl on GPUs, gloo elsewhere.")
    SYNC_BATCHNORM: bool = setting(
        False,
        "On several GPUs, batch norms compute their statistics on the images of all processes.",
        excludes("DIST.STRATEGY=fsdp", "AMP.LEVEL=O2|NAIVE", why="it is not supported there", do="use ddp and O1"),
        excludes("AMP.AUTO_FP32", why="its updates are not replayed", do="set AMP.FP32_MODULES"),
    )
    TIMEOUT: float = setting(
        10.0, "Minutes that ranks wait for another rank; then the run ends with an error.", gt=0, le=1e6
    )

    @property
    def group_timeout(self) -> timedelta:
        """Timeout of torch's collectives, for every process group of the run; torch's own default is not used.

        It is a minute more than TIMEOUT, so that the watchdog comes first, which names the rank to blame.
        """
        return timedelta(minutes=self.TIMEOUT + 1)


class Config(Section):
    """All settings of a run."""

    BASE: Names = setting((), "YAML files that this one extends, relative to it; later ones override earlier ones.")
    USE: Names = setting(
        (),
        "Python files of your own (-use), which register losses, models, augmentations, data sets and metrics; and "
        "their settings as NAME.SETTING=VALUE, also words of the command line. See docs/own_code.md.",
    )
    DATA: DataConfig = Field(default_factory=DataConfig, description="Data.")
    MODEL: ModelConfig = Field(default_factory=ModelConfig, description="Model.")
    TRAIN: TrainConfig = Field(default_factory=TrainConfig, description="Training.")
    AMP: AmpConfig = Field(default_factory=AmpConfig, description="Mixed precision; `AMP: true` is AMP.ENABLED: true.")
    DIST: DistConfig = Field(default_factory=DistConfig, description="Processes.")
    SAVE: Place = setting("./output", "Folder in which each run creates its own folder.", decides="nothing")
    OUTPUT: Place | None = setting(
        None, "The run's folder (-output); null: the resumed run's, or a new one in SAVE.", decides="one start"
    )
    TAG: Annotated[str, Field(max_length=1000)] | None = setting(
        None, "Any text, shown in the banner, run.json and the curves.", decides="nothing"
    )
    SAVE_FREQ: Positive = setting(10, "Epochs between checkpoints, besides those of best validations and the end.")
    SAVE_EVERY_UPDATES: Positive | None = setting(None, "Also save a checkpoint every N updates.")
    SAVE_BEST_BY: BestBy = setting(
        ONE_LABEL.best.name,
        "Validation metric that decides which checkpoint is best, and of equal values the loss; "
        "the default is the first one. "
        + " ".join(f"{kind.words[0].upper()}{kind.words[1:]}: {', '.join(kind.deciding)}." for kind in TASKS),
    )
    VALIDATE_METRICS: Names = setting(
        (),
        "Metrics of your own (USE) that each validation computes too.",
        needs("USE", why="your files register them"),
        excludes("MODEL.MAE_PRETRAIN", why="there are no labels"),
    )
    KEEP_LAST: Count = setting(3, "Number of latest checkpoints kept besides the best one; 0: all are kept.")
    KEEP_EVERY: Positive | None = setting(None, "Keep the checkpoint of every Nth epoch permanently.")
    REPORT_FREQ: Positive = setting(20, "Updates between log lines.")
    REPORT_STAGES: bool = setting(False, "Add the times of data, copy, forward, backward, optimiser to log lines.")
    VALIDATE_FREQ: Positive = setting(
        1, "Epochs between validations; more than NUM_EPOCHS: only the end validates, not the probe at the start."
    )
    VALIDATE_EVERY_UPDATES: Positive | None = setting(None, "Also validate every N updates.")
    SEED: int = setting(0, "Seed of all random numbers.")
    DETERMINISTIC: bool = setting(False, "Use deterministic kernels only; an operation without one is an error.")
    EVAL: bool = setting(False, "Validate once and exit.", decides="one start")
    WANDB: str | None = setting(None, "Project of Weights & Biases to log the metrics to; see docs/trackers.md.")
    MLFLOW: str | None = setting(None, "Experiment of MLflow to log the metrics to; see docs/trackers.md.")
    LOG_STYLE: Literal["auto", "table", "paddlevit", "fleet"] = setting(
        "auto",
        "Training log lines. table: one row per epoch, in a file or pipe, too; auto: on a terminal the table and a "
        "progress bar, elsewhere paddlevit, but few lines before the first epoch.",
    )
    DEVICE: Literal["cpu", "cuda", "mps"] | None = setting(None, "Device to train on; null: the best available.")
    NGPUS: int = setting(
        -1, "Processes that main_multi_gpu.py starts; -1: one per visible GPU.", decides="one start", ge=-1, le=1024
    )
    THREADS: int | None = setting(
        None,
        "CPU threads per process; null: OMP_NUM_THREADS, else what SLURM reserves per task, else usable cores / ranks "
        "on this machine.",
        ge=1,
        le=4096,
    )
    SPEED: Annotated[tuple[SpeedWord, ...], BeforeValidator(as_names), Field(min_length=1)] = setting(
        ("auto",),
        "How layers compute; results differ in the last bits only. auto: as measured to be fastest; plain: as the "
        "model is written. +NAME forces and -NAME leaves out: kernels of attention (fused: torch's choice; flash, "
        "efficient, cudnn, packed), linear_patches (patches by a matrix product), fused_mlp (bias and GELU in one "
        "kernel), channels_last; -rewrite: compiled ViTs as they are written; see docs/performance.md.",
    )
    MAX_TIME: Time | None = setting(
        None, "HH:MM:SS, before which the run saves and exits; -resume continues it.", decides="one start"
    )
    PROFILE: Count = setting(0, "Write a torch profiler trace of this many updates.", decides="one start")

    @property
    def own_files(self) -> tuple[str, ...]:
        """The Python files in USE."""
        return tuple(word for word in self.USE if not is_own_setting(word))

    @property
    def own_settings(self) -> tuple[str, ...]:
        """The settings in USE, as NAME.SETTING=VALUE, of what the Python files register."""
        return tuple(word for word in self.USE if is_own_setting(word))

    def wants(self, name: str) -> bool | None:
        """Whether SPEED forces a way of computing (True) or leaves it out (False); None if the program chooses."""
        if f"+{name}" in self.SPEED:
            return True
        if f"-{name}" in self.SPEED or "plain" in self.SPEED:
            return False
        return None

    @property
    def attention(self) -> str:
        """The kernel of attention that SPEED forces; plain if it leaves `fused` out; else auto."""
        for kernel in ATTENTION:
            if self.wants(kernel):
                return kernel
        return "plain" if self.wants("fused") is False else "auto"

    @property
    def trackers(self) -> dict[str, str]:
        """Setting of each tracker that the run uses -> its project there."""
        projects = {"WANDB": self.WANDB, "MLFLOW": self.MLFLOW}
        return {key: project for key, project in projects.items() if project is not None}

    @property
    def task(self) -> TaskKind:
        return NO_LABELS if self.MODEL.MAE_PRETRAIN else self.DATA.task

    @property
    def freezes_backbone(self) -> bool:
        """Whether only a classifier is trained, on one device or by DDP."""
        is_frozen = "backbone" in self.MODEL.FREEZE and not self.MODEL.MAE_PRETRAIN and not self.EVAL
        return is_frozen and self.TRAIN.DISTILLATION_TYPE is None and self.DIST.STRATEGY == "ddp"

    @property
    def trains_on_features(self) -> bool:
        """Whether a frozen backbone sees the same images in each epoch, so that its features are computed once.

        Without any epoch, there is nothing that could differ between epochs.
        """
        data = self.DATA
        train = self.TRAIN
        moves_pixels = data.CROP != "none" or data.FLIP or data.VERTICAL_FLIP or data.has_affine
        changes_images = moves_pixels or train.single_image_keys or train.mixes or train.RANDOM_ERASE_PROB
        changes_features = train.TOKEN_DROP or train.SIZE_SCHEDULE or self.MODEL.DROPOUT
        is_same_each_epoch = not changes_images and not changes_features
        return self.freezes_backbone and (train.NUM_EPOCHS == 0 or is_same_each_epoch)

    @property
    def measures_knn(self) -> bool:
        """Whether validations measure how well features separate the classes of labelled images (TRAIN.KNN)."""
        return self.MODEL.MAE_PRETRAIN and self.TRAIN.KNN is not None
