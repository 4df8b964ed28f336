"""Every setting vitamp has: one class a YAML section, one line of description a key.

`docs/config.md` and the JSON schema for editors are made from this file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from utils.config.amp import AmpConfig
from utils.config.data import DataConfig
from utils.config.fields import Section, inert, revive
from utils.config.kinds import AboveZero, Count, Names, Positive, folded
from utils.config.model import ModelConfig
from utils.config.train import TrainConfig


class DistConfig(Section):
    """The process group."""

    STRATEGY: Annotated[Literal["ddp", "fsdp"], BeforeValidator(folded)] = Field(
        default="ddp",
        description="ddp: each process holds the whole model. fsdp: the weights are dealt out; see docs/fsdp.md.",
    )
    HSDP: bool = Field(
        default=False, description="fsdp: deal out within a machine, and keep a copy on each; for slow networks."
    )
    BACKEND: Literal["nccl", "gloo"] | None = Field(default=None, description="null: nccl on GPUs, gloo elsewhere.")
    TIMEOUT: float = Field(
        default=10.0, gt=0, description="Minutes after which a rank that the others wait for ends the run."
    )
    STATIC_GRAPH: bool = Field(
        default=False, description="ddp: promise it that all updates compute alike; only without accumulation."
    )
    BF16_GRADIENTS: bool = Field(
        default=False, description="ddp: send gradients in bf16: half the traffic, and fewer digits of each."
    )
    SYNC_BATCHNORM: bool = Field(
        default=True, description="ddp on GPUs: batch norm takes its statistics from the images of all processes."
    )
    HOST: str | None = Field(default=None, description="Machine of rank 0, by hand or where a launcher tells no other.")
    PORT: int | None = Field(default=None, ge=1, le=65535, description="The port it listens at.")
    RANK: Count | None = Field(default=None, description="This process's rank, when ranks are started by hand.")
    WORLD_SIZE: Positive | None = Field(default=None, description="Number of processes, when started by hand.")


class Config(Section):
    """The whole of a run's settings."""

    BASE: Names = Field(default=(), description="YAML files this one builds on, relative to it; later ones win.")
    DATA: DataConfig = Field(default_factory=DataConfig, description="Data.")
    MODEL: ModelConfig = Field(default_factory=ModelConfig, description="Model.")
    TRAIN: TrainConfig = Field(default_factory=TrainConfig, description="Training.")
    AMP: AmpConfig = Field(default_factory=AmpConfig, description="Mixed precision; `AMP: true` is AMP.ENABLED: true.")
    DIST: DistConfig = Field(default_factory=DistConfig, description="Processes.")
    SAVE: str = Field(default="./output", description="Folder in which each run makes one of its own.")
    OUTPUT: str | None = Field(default=None, description="The run's own folder (-output); null: made in SAVE.")
    TAG: str | None = Field(default=None, description="A word of yours, shown in the banner, run.json and the curves.")
    SAVE_FREQ: Positive = Field(default=10, description="Epochs between checkpoints.")
    SAVE_EVERY_UPDATES: Positive | None = Field(default=None, description="Updates between checkpoints, besides.")
    SAVE_EVERY_MINUTES: AboveZero | None = Field(default=None, description="Minutes between checkpoints, besides.")
    SAVE_BEST_BY: Literal["acc1", "acc5", "loss"] = Field(
        default="acc1", description="Validation figure that decides which checkpoint is the best."
    )
    SAVE_IN_BACKGROUND: bool = Field(
        default=True, description="Write checkpoints while training goes on, from a copy in host memory."
    )
    KEEP_LAST: Count = Field(default=3, description="Checkpoints kept beside the best one; 0: all.")
    KEEP_EVERY: Positive | None = Field(default=None, description="Epochs whose checkpoint is kept for ever: each Nth.")
    REPORT_FREQ: Positive = Field(default=20, description="Updates between log lines.")
    REPORT_STAGES: bool = Field(
        default=False, description="Say in log lines where the time goes: data, copy, forward, backward, optimiser."
    )
    VALIDATE_FREQ: Positive = Field(default=1, description="Epochs between validations.")
    VALIDATE_EVERY_UPDATES: Positive | None = Field(default=None, description="Updates between validations, besides.")
    SEED: int = Field(default=0, description="All random numbers follow from it.")
    DETERMINISTIC: bool = Field(
        default=False, description="Only deterministic kernels; an operation without one is an error."
    )
    EVAL: bool = Field(default=False, description="Validate once and end.")
    WANDB: str | None = Field(
        default=None, description="Project of Weights & Biases that gets the figures, too; see docs/wandb.md."
    )
    LOG_STYLE: Literal["paddlevit", "fleet"] = Field(default="paddlevit", description="Form of the training log lines.")
    DEVICE: Literal["cpu", "cuda", "mps"] | None = Field(default=None, description="null: the best there is.")
    NGPUS: int = Field(default=-1, ge=-1, description="Processes main_multi_gpu.py starts; -1: one a visible GPU.")
    THREADS: Positive | None = Field(
        default=None, description="CPU threads per process; null: the cores, or a container's CPU quota, shared out."
    )
    CPU_FP32: Annotated[Literal["auto", "mkl", "onednn", "amx"], BeforeValidator(folded)] = Field(
        default="auto", description="What multiplies fp32 matrices on a CPU; auto: what is known to be the fastest."
    )
    CPU_BF16: Annotated[Literal["auto", "onednn", "amx"], BeforeValidator(folded)] = Field(
        default="auto", description="The same for matrices in bf16, which AMP computes with."
    )
    MAX_TIME: str | None = Field(
        default=None, description="HH:MM:SS after which the run saves and ends, to be resumed."
    )
    PROFILE: Count = Field(default=0, description="Write a torch profiler trace of this many updates.")
    LOCAL_RANK: int = inert(0, "PaddleViT's.", "the launcher tells each process its rank; the value is not used")

    @model_validator(mode="before")
    @classmethod
    def _amp_shorthand(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("AMP"), bool | str | None) and "AMP" in data:
            on = revive(data["AMP"])
            return {**data, "AMP": {"ENABLED": False if on is None else on}}
        return data
