"""Faults put into weights and settings: each is named, and survived or stopped as the settings say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.amp.low_precision import forced_modules
from engine.amp.overflow import Blame, OverflowWatch
from engine.amp.precision import Precision
from engine.measure.meters import Position, TrainMeters
from engine.report.skips import ScaledHealth
from engine.task.one import OneLabel
from tests.engine.small import CPU, build
from tests.program import Result, metrics
from utils.config import AmpConfig
from utils.distributed.world import ALONE

SHORT = ("-amp", "fp16", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=4")


def huge_bias(weights: dict[str, Tensor]) -> None:
    weights["blocks.0.mlp.fc1.bias"].fill_(7e4)


def huge_product(weights: dict[str, Tensor]) -> None:
    """Queries and keys that fp16 holds, and whose products it does not."""
    weights["blocks.0.attn.qkv.weight"][:32] *= 3000


FAULTS = {"bias": huge_bias, "product": huge_product}
NAMED = {"bias": ("linear", "blocks.0.mlp.fc1"), "product": ("matmul", "blocks.0.attn")}


@pytest.fixture
def faulty(tiny: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A file with the tiny model's weights and one fault."""

    def make(fault: str) -> Path:
        weights = {name: tensor.clone() for name, tensor in build(tiny).model.state_dict().items()}
        FAULTS[fault](weights)
        path = tmp_path / f"{fault}.safetensors"
        save_file(weights, path)
        return path

    return make


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_auto_fp32_moves_an_overflowing_module_and_training_continues(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, faulty: Callable[[str], Path], fault: str, level: str
) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *SHORT, f"AMP.LEVEL={level}", "AMP.AUTO_FP32=true", "TRAIN.NUM_EPOCHS=1")
    done = vitamp(*words, "-pretrained", faulty(fault), "TRAIN.MAX_UPDATES=12")
    assert done.code == 0, done.text
    operation, module = NAMED[fault]
    skips = metrics(run, "skip")
    first = skips[0]
    assert (first["operation"], first["module"], first["direction"]) == (operation, module, "forward")
    assert (first["update"], first["scale"], first["dtype"], len(first["samples"])) == (1, 65536, "fp16", 32)
    assert f"update 1 was skipped: {operation} in {module} (forward, " in done.out
    assert f"AMP.AUTO_FP32: {module} overflowed 2 times and computes in fp32 from now on" in done.out
    assert [skip["module"] for skip in skips].count(module) == 2, "in fp32 it overflows no more"
    last = metrics(run, "train")[-1]
    assert last["skipped"] == len(skips) <= 6
    assert last["loss"] < 2.5
    assert last["grad_norm"] > 0

    again = vitamp(*words, "-resume", "auto", "TRAIN.MAX_UPDATES=24")
    assert again.code == 0, again.text
    kept = re.search(r"Modules that AMP.AUTO_FP32 moved to fp32 before the resume: (.*)", again.out)
    assert kept, again.out
    stepped = re.findall(r"AMP.AUTO_FP32: (\S+) overflowed", done.out)
    assert kept[1].split(", ") == stepped
    now = metrics(run, "skip")
    assert now[: len(skips)] == skips
    assert not [skip for skip in now[len(skips) :] if skip["direction"] == "forward"], "it never overflows again"
    assert metrics(run, "train")[-1]["skipped"] <= last["skipped"] + 2, "the scale may still look for its place"


def test_overflowing_module_stops_the_run_with_advice_without_auto_fp32(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, faulty: Callable[[str], Path]
) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *SHORT)
    done = vitamp(*words, "-pretrained", faulty("bias"), "REPORT_FREQ=1000", "TRAIN.NUM_EPOCHS=3")
    assert done.code == 1, done.text
    assert "up to update 100; " in done.err, "however far apart reports are"
    assert "AMP.FP32_MODULES=['blocks.0.mlp.fc1']" in done.err
    assert "AMP.AUTO_FP32=true" in done.err
    assert "bf16" in done.err
    assert "computes in fp32 from now on" not in done.out


def test_fixed_scale_that_is_too_large_stops_the_run_with_a_checkpoint(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *SHORT, "AMP.USE_DYNAMIC_LOSS_SCALING=false", "TRAIN.MODEL_EMA=true")
    done = vitamp(*words, "AMP.INIT_LOSS_SCALING=1e20", "REPORT_FREQ=4", "TRAIN.NUM_EPOCHS=3")
    assert done.code == 1, done.text
    assert "Traceback" not in done.text
    assert done.err.count("error:") == 1
    for part in ("100 updates in a row", "update 100;", "1e+20", "set a smaller"):
        assert part in done.err, part
    skips = metrics(run, "skip")
    assert [(skip["update"], skip["module"], skip["direction"]) for skip in skips] == [
        (update, "loss", "backward") for update in (1, 2, 3, 53)
    ], "the first three are replayed, later ones once in 50 updates"
    assert "the loss scale is too large" in done.out
    assert metrics(run, "train")[-1]["skipped"] == 100

    saved = run / "checkpoints" / "step-000000100"
    fresh = build(tiny, TRAIN__MODEL_EMA="true").model.state_dict()
    for name in ("model.safetensors", "ema.safetensors"):
        weights = load_file(saved / name)
        assert all(torch.equal(weights[key], fresh[key]) for key in fresh), "as they were before"
    longer = ("TRAIN.NUM_EPOCHS=3", "TRAIN.MAX_UPDATES=110", "REPORT_FREQ=2")
    again = vitamp(*words, "-resume", "auto", "AMP.INIT_LOSS_SCALING=1024", *longer)
    assert again.code == 0, again.text
    last = metrics(run, "train")[-1]
    assert (last["update"], last["skipped"], last["scale"]) == (110, 100, 1024)
    assert last["grad_norm"] > 0


# ---- who is moved


class Told:
    """Stands in for a reporter."""

    def __init__(self) -> None:
        self.skips: list[tuple[str, int]] = []

    def event(self, _kind: str, _position: Position, _perf: dict[str, Any], **fields: Any) -> None:
        self.skips.append((fields["module"], fields["update"]))


class Found(OverflowWatch):
    """A watch that has found, look by look."""

    def __init__(self, precision: Precision, *looks: list[Blame]) -> None:
        super().__init__(0, precision)
        self.looks = list(looks)

    def take(self) -> list[Blame]:
        return self.looks.pop(0) if self.looks else []


def blame(module: str, update: int = 1, direction: str = "forward", scale: float = 1024.0, **more: Any) -> Blame:
    named = {"operation": "linear", "dtype": "fp16", **more}
    return Blame(
        update=update,
        noticed_at=update,
        module=module,
        direction=direction,
        sample_indices=(1, 2),
        scale=scale,
        **named,
    )


@pytest.fixture
def health(tiny: Path) -> Callable[..., ScaledHealth]:
    def make(*looks: list[Blame], **keys: Any) -> ScaledHealth:
        parts = build(tiny, AMP__ENABLED="true", AMP__DTYPE="fp16").parts
        parts.callbacks = (Found(parts.precision, *looks),)
        settings = AmpConfig(ENABLED=True, DTYPE="fp16", **{"AUTO_FP32": True, **keys})
        return ScaledHealth(settings, parts, ALONE, Told())  # pyright: ignore[reportArgumentType]

    return make


@pytest.mark.parametrize(
    ("blames", "moved"),
    [
        ([blame("head")], []),
        ([blame("head", 1), blame("head", 2)], ["head"]),
        ([blame("head", 1), blame("blocks.0.mlp.fc1", 2)], []),
        # The backward pass overflows at scales that are too large, whoever computes it: cutting them is the remedy.
        ([blame("head", 1, "backward"), blame("head", 2, "backward")], []),
        ([blame("head", 1, "backward", 1.0), blame("head", 2, "backward", 1.0)], ["head"]),
        # The loss, the batch and the model as a whole are no modules of the model.
        ([blame("loss", 1), blame("loss", 2)], []),
        ([blame("batch", 1), blame("batch", 2)], []),
        ([blame("VisionTransformer", 1), blame("VisionTransformer", 2)], []),
        ([blame("", 1, operation=""), blame("", 2, operation="")], []),
    ],
    ids=lambda value: str(len(value)),
)
def test_module_that_overflows_twice_moves_to_fp32(
    health: Callable[..., ScaledHealth], blames: list[Blame], moved: list[str]
) -> None:
    made = health(blames)
    made.report(Position(), together=False)
    assert forced_modules(made.parts.model) == moved
    assert made.reporter.skips == [(one.module, one.update) for one in blames]  # pyright: ignore[reportAttributeAccessIssue]


def test_ranks_log_one_line_per_skipped_update(health: Callable[..., ScaledHealth]) -> None:
    """A rank whose own gradients were fine finds nothing; the other's word is the better one."""
    nothing, named = blame("", 1, operation="", reason="not seen again"), blame("head", 1)
    made = health([nothing, blame("head", 2), named])
    made.report(Position(), together=True)
    assert made.reporter.skips == [("head", 1), ("head", 2)]  # pyright: ignore[reportAttributeAccessIssue]


def test_only_consecutive_skips_end_the_run(health: Callable[..., ScaledHealth]) -> None:
    meters = TrainMeters(CPU, ALONE, OneLabel(10))
    reading = meters.read(torch.tensor(1.0), 0.0)
    for update in range(1, 161):
        meters.close_update(update, torch.tensor(1.0), stepped := update == 60, scaled=True)
        reading = meters.read(torch.tensor(1.0), 0.0)
        assert (health().too_many_skips(reading, update) is not None) is (update == 160), stepped
    assert (reading.skipped, reading.skipped_in_a_row) == (159, 100)
