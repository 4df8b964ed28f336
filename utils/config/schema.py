"""All settings: one class per YAML section, one description per key.

`docs/config.md` and the JSON schema for editors are generated from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from utils.config.amp import AmpConfig
from utils.config.data import DataConfig
from utils.config.fields import Section, setting, with_retired, without_effect
from utils.config.kinds import OWN_NAME, AboveZero, Count, Names, OwnName, Positive, Threads, folded
from utils.config.model import ModelConfig
from utils.config.rules import excludes, needs, only_with
from utils.config.train import TrainConfig
from utils.config.values import parse_text
from utils.record.tasks import METRICS, NO_LABELS, ONE_LABEL, TASKS, TaskKind

_DECIDING = {"type": "string", "enum": [name for name, metric in METRICS.items() if metric.decides]}
BestBy = Annotated[OwnName, WithJsonSchema({"anyOf": [_DECIDING, OWN_NAME]})]
"""Which of them a run measures depends on its labels: checks.py"""


class DistConfig(Section):
    """Processes and how they share the work."""

    STRATEGY: Annotated[Literal["ddp", "fsdp"], BeforeValidator(folded)] = setting(
        "ddp",
        "ddp: each process holds the whole model. fsdp: the weights are sharded over the processes; see docs/fsdp.md.",
        excludes("DEVICE=mps", why="FSDP needs several devices, and MPS is one"),
    )
    HSDP: bool = setting(
        False,
        "Shard the weights within each machine and replicate them across machines; for slow networks.",
        needs("DIST.STRATEGY=fsdp", why="it says how FSDP shards the weights"),
    )
    FSDP_NO_SYNC: bool = setting(
        False,
        "fsdp with ACCUM_ITER above 1: reduce gradients once per update, not per micro-batch. Less traffic, but each "
        "process holds the gradients of the whole model between micro-batches, as in runs of earlier versions.",
    )
    BACKEND: Literal["nccl", "gloo"] | None = setting(
        None, "Communication backend; null: nccl on GPUs, gloo elsewhere."
    )
    TIMEOUT: float = setting(10.0, "Minutes that ranks wait for another rank; then the run ends with an error.", gt=0)
    SYNC_BATCHNORM: bool = setting(
        True,
        "ddp on GPUs: synchronise batch norm statistics over all processes; no effect at AMP.LEVEL O2 and NAIVE.",
    )
    HOST: str | None = setting(None, "Host of rank 0, if ranks are started by hand or the launcher does not give it.")
    PORT: int | None = setting(None, "Port of rank 0.", ge=1, le=65535)
    RANK: Count | None = setting(None, "Rank of this process, if ranks are started by hand.")
    WORLD_SIZE: Positive | None = setting(None, "Number of processes, if ranks are started by hand.")


class Config(Section):
    """All settings of a run."""

    BASE: Names = setting((), "YAML files that this one extends, relative to it; later ones override earlier ones.")
    USE: Names = setting(
        (),
        "Python files of your own (-use), which register losses, models, augmentations, data sets and metrics; see "
        "docs/own_code.md.",
    )
    USE_SETTINGS: Names = setting(
        (),
        "Settings of what the files of USE register, as NAME.SETTING=VALUE.",
        only_with("USE"),
    )
    DATA: DataConfig = Field(default_factory=DataConfig, description="Data.")
    MODEL: ModelConfig = Field(default_factory=ModelConfig, description="Model.")
    TRAIN: TrainConfig = Field(default_factory=TrainConfig, description="Training.")
    AMP: AmpConfig = Field(default_factory=AmpConfig, description="Mixed precision; `AMP: true` is AMP.ENABLED: true.")
    DIST: DistConfig = Field(default_factory=DistConfig, description="Processes.")
    SAVE: str = setting("./output", "Folder in which each run creates its own folder.")
    OUTPUT: str | None = setting(
        None,
        "The run's own folder (-output); null: the resumed run's folder, or a new one in SAVE for a new run or an "
        "evaluation.",
    )
    TAG: str | None = setting(None, "Any text, shown in the banner, run.json and the curves.")
    SAVE_FREQ: Positive = setting(
        10, "Epochs between checkpoints. One is also saved after each new best validation and at the end of the run."
    )
    SAVE_EVERY_UPDATES: Positive | None = setting(None, "Also save a checkpoint every N updates.")
    SAVE_EVERY_MINUTES: AboveZero | None = setting(None, "Also save a checkpoint every N minutes.")
    SAVE_BEST_BY: BestBy = setting(
        ONE_LABEL.best.name,
        "Validation metric that decides which checkpoint is best. "
        + " ".join(f"{kind.words[0].upper()}{kind.words[1:]}: {', '.join(kind.deciding)}." for kind in TASKS)
        + " The first of each is the default.",
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
    REPORT_STAGES: bool = setting(
        False, "Add the time of each stage (data, copy, forward, backward, optimiser) to log lines."
    )
    VALIDATE_FREQ: Positive = setting(1, "Epochs between validations.")
    VALIDATE_EVERY_UPDATES: Positive | None = setting(None, "Also validate every N updates.")
    SEED: int = setting(0, "Seed of all random numbers.")
    DETERMINISTIC: bool = setting(False, "Use deterministic kernels only; an operation without one is an error.")
    EVAL: bool = setting(False, "Validate once and exit.")
    WANDB: str | None = setting(None, "Project of Weights & Biases to log the metrics to; see docs/trackers.md.")
    MLFLOW: str | None = setting(None, "Experiment of MLflow to log the metrics to; see docs/trackers.md.")
    LOG_STYLE: Literal["auto", "paddlevit", "fleet"] = setting(
        "auto",
        "Format of the training log lines. auto: on a terminal a table with one row per epoch and a progress bar, "
        "elsewhere paddlevit.",
    )
    DEVICE: Literal["cpu", "cuda", "mps"] | None = setting(None, "Device to train on; null: the best available.")
    NGPUS: int = setting(-1, "Processes that main_multi_gpu.py starts; -1: one per visible GPU.", ge=-1, le=1024)
    THREADS: Threads | None = setting(
        None,
        "CPU threads per process; null: what SLURM reserves per task; without SLURM, usable cores / ranks on this "
        "machine (a container's CPU quota limits the usable cores).",
    )
    CPU_FP32: Annotated[Literal["auto", "mkl", "onednn"], BeforeValidator(folded)] = with_retired(
        "auto",
        "Library for fp32 matrix products on CPUs; auto: the fastest known.",
        {"amx": "version 0.1.0 of vitamp is the last that has kernels for AMX; results differ in the last bits"},
    )
    MAX_TIME: str | None = setting(
        None, "Time limit (HH:MM:SS): before it is up, the run saves a checkpoint and exits; -resume continues the run."
    )
    PROFILE: Count = setting(0, "Write a torch profiler trace of this many updates.")
    LOCAL_RANK: int = without_effect(0, "A key of PaddleViT.", "each process gets its rank from the launcher")

    @property
    def task(self) -> TaskKind:
        return NO_LABELS if self.MODEL.MAE_PRETRAIN else self.DATA.task

    @property
    def measures_knn(self) -> bool:
        """Whether validations measure how well features separate the classes of labelled images (TRAIN.KNN)."""
        return self.MODEL.MAE_PRETRAIN and self.TRAIN.KNN.named

    @model_validator(mode="before")
    @classmethod
    def _amp_shorthand(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("AMP"), bool | str | None) and "AMP" in data:
            on = parse_text(data["AMP"])
            return {**data, "AMP": {"ENABLED": False if on is None else on}}
        return data
