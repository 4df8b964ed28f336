"""Runs on the GPU, as a user starts them, and what they leave behind.

`VITAMP_GPU_TESTS_ON=cpu python -m pytest tests/gpu` carries most of these tests out on the CPU instead: that shows
mistakes of the tests themselves, and nothing of what a GPU does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gate import GPU_TESTS_ON
from tests.program import Result, metrics

KIND = GPU_TESTS_ON
PLACE = torch.device("cuda", 0) if KIND == "cuda" else torch.device(KIND)
on_a_gpu_alone = pytest.mark.skipif(KIND != "cuda", reason=f"asks what only a GPU has, and this is {KIND}")

AMPERE = (8, 0)
"""The first compute capability with bf16 and with kernels for flash attention; a T4 has 7.5, a V100 7.0."""
NEED_AMPERE = ("bf16", "flash", "cudnn")


def skip_if_missing(*words: object) -> None:
    """Skip a test on a GPU that lacks what is named in these words of a command line, or parameters of a test."""
    text = " ".join(map(str, words)).replace("bfloat16", "bf16")
    needed = [need for need in NEED_AMPERE if need in text]
    if needed and KIND == "cuda" and (capability := torch.cuda.get_device_capability()) < AMPERE:
        pytest.skip(f"this GPU has no {needed[0]}: compute capability {capability[0]}.{capability[1]}, not 8.0")


def needs(count: int) -> pytest.MarkDecorator:
    """Mark a test that needs several GPUs; on a CPU as many processes run it."""
    there = torch.cuda.device_count() if KIND == "cuda" else count
    return pytest.mark.skipif(there < count, reason=f"needs {count} GPUs; this machine has {there}")


SMALL = f"""\
DATA: {{DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, BATCH_SIZE: 32, BATCH_SIZE_EVAL: 360}}
MODEL: {{NAME: small, NUM_CLASSES: 10, PATCH_SIZE: 2, EMBED_DIM: 64, DEPTH: 2, NUM_HEADS: 2}}
TRAIN: {{NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 1e-3, GRAD_CLIP: 1.0}}
REPORT_FREQ: 1
THREADS: 1
DEVICE: {KIND}
"""
"""17 tokens in heads of 32, which every kind of attention takes."""
UPDATES = 44
"""An epoch of it; 29 images are left over."""


@dataclass(frozen=True)
class Run:
    folder: Path
    result: Result

    @property
    def text(self) -> str:
        return self.result.text

    @property
    def about(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.json").read_text(encoding="utf-8"))

    @property
    def choices(self) -> dict[str, Any]:
        return self.about["choices"]

    def of(self, event: str) -> list[dict[str, Any]]:
        return metrics(self.folder, event)

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.of("train")]

    @property
    def perf(self) -> list[dict[str, Any]]:
        """What was told of time and machine, report by report."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line["perf"] for line in lines if line["event"] == "train"]

    @property
    def checkpoint(self) -> Path:
        """The newest."""
        return max((self.folder / "checkpoints").glob("step-*"))

    def weights(self, file: str = "model.safetensors") -> dict[str, Tensor]:
        return load_file(self.checkpoint / file)


Train = Callable[..., Run]
"""`train("name", words, ...)`: the small recipe in a folder of that name; `updates`: how many, at most an epoch."""


def apart(ours: list[float], theirs: list[float]) -> float:
    """The greatest difference of two runs' losses, as a share of the loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def far(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """How far weights of the same names are apart, as a share of their size."""
    assert list(ours) == list(theirs)
    a, b = (torch.cat([tensors[name].double().flatten() for name in tensors]) for tensors in (ours, theirs))
    return float((a - b).norm() / b.norm())
