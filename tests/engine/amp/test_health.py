"""Faults put into weights and settings: each is named, and survived or stopped as the settings say."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.amp.health import Health
from engine.amp.low_precision import forced_modules
from engine.amp.overflow import Blame, OverflowWatch
from engine.measure.meters import Position, TrainMeters
from engine.task.one import OneLabel
from tests.engine.small import CPU, FP16, build
from tests.program import Vitamp, metrics
from utils.distributed.world import ALONE

Faulty = Callable[[str], Path]
SHORT = ("-amp", "fp16", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=4")


@pytest.fixture
def faulty(tiny: Path, tmp_path: Path) -> Faulty:
    """A file with the tiny model's weights, and one module that overflows in fp16."""

    def make(module: str) -> Path:
        weights = {name: tensor.clone() for name, tensor in build(tiny).model.state_dict().items()}
        if module == "blocks.0.attn":  # queries and keys that fp16 holds, and whose products it does not
            weights[f"{module}.qkv.weight"][:32] *= 3000
        else:
            weights[f"{module}.bias"].fill_(7e4)
        save_file(weights, tmp_path / "faulty.safetensors")
        return tmp_path / "faulty.safetensors"

    return make


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("operation", "module"), [("linear", "blocks.0.mlp.fc1"), ("matmul", "blocks.0.attn")])
def test_auto_fp32_moves_an_overflowing_module_and_training_continues(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, faulty: Faulty, operation: str, module: str, level: str
) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *SHORT, f"AMP.LEVEL={level}", "AMP.AUTO_FP32=true", "TRAIN.NUM_EPOCHS=1")
    done = vitamp(*words, "-pretrained", faulty(module), "TRAIN.MAX_UPDATES=12", code=0)
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

    again = vitamp(*words, "-resume", "auto", "TRAIN.MAX_UPDATES=24", code=0)
    moved = ", ".join(re.findall(r"AMP.AUTO_FP32: (\S+) overflowed", done.out))
    assert f"Modules that AMP.AUTO_FP32 moved to fp32 before the resume: {moved}\n" in again.out
    now = metrics(run, "skip")
    assert now[: len(skips)] == skips
    assert not [skip for skip in now[len(skips) :] if skip["direction"] == "forward"], "it never overflows again"
    assert metrics(run, "train")[-1]["skipped"] <= last["skipped"] + 2, "the scale may still look for its place"


def test_overflowing_module_stops_the_run_with_advice_without_auto_fp32(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, faulty: Faulty
) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *SHORT)
    done = vitamp(*words, "-pretrained", faulty("blocks.0.mlp.fc1"), "REPORT_FREQ=1000", "TRAIN.NUM_EPOCHS=3", code=1)
    assert "up to update 100; " in done.err, "however far apart reports are"
    assert "AMP.FP32_MODULES=['blocks.0.mlp.fc1'], or AMP.AUTO_FP32=true), or use bf16." in done.err
    assert "computes in fp32 from now on" not in done.out


def test_fixed_scale_that_is_too_large_stops_the_run_with_a_checkpoint(
    vitamp: Vitamp, tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, *SHORT, "AMP.USE_DYNAMIC_LOSS_SCALING=false", "TRAIN.MODEL_EMA=true")
    done = vitamp(*words, "AMP.INIT_LOSS_SCALING=1e20", "REPORT_FREQ=4", "TRAIN.NUM_EPOCHS=3", code=1)
    assert done.err.count("error:") == 1
    assert re.search(r"100 updates in a row .* update 100; .* 1e\+20.* set a smaller", done.err), done.err
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
    vitamp(*words, "-resume", "auto", "AMP.INIT_LOSS_SCALING=1024", *longer, code=0)
    last = metrics(run, "train")[-1]
    assert (last["update"], last["skipped"], last["scale"]) == (110, 100, 1024)
    assert last["grad_norm"] > 0


# ---- who is moved


def blame(module: str, update: int = 1, direction: str = "forward", scale: float = 1024.0, **more: Any) -> Blame:
    where: dict[str, Any] = {"module": module, "direction": direction, "operation": "linear", "dtype": "fp16", **more}
    return Blame(update=update, noticed_at=update, sample_indices=(1, 2), scale=scale, **where)


Made = Callable[..., tuple[Health, list[Any]]]


@pytest.fixture
def health(tiny: Path) -> Made:
    """That of a run whose watch found these blames; and a list of what it reports."""

    def make(*found: Blame) -> tuple[Health, list[Any]]:
        parts, told = build(tiny, AMP__ENABLED="true", AMP__DTYPE="fp16").parts, []
        watch = OverflowWatch(0, parts.precision)
        vars(watch)["take"] = lambda: list(found)
        parts.callbacks = (watch,)
        reporter: Any = SimpleNamespace(event=lambda *_, **fields: told.append((fields["module"], fields["update"])))
        return Health(FP16.changed(AUTO_FP32=True), parts, ALONE, reporter), told

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
        # The loss and the model as a whole are no modules of the model.
        ([blame("loss", 1), blame("loss", 2)], []),
        ([blame("VisionTransformer", 1), blame("VisionTransformer", 2)], []),
        ([blame("", 1, operation=""), blame("", 2, operation="")], []),
    ],
    ids=lambda value: str(len(value)),
)
def test_module_that_overflows_twice_moves_to_fp32(health: Made, blames: list[Blame], moved: list[str]) -> None:
    made, told = health(*blames)
    made.parts.meters.restore([0.0] * 4, 99, 99)
    made.report(Position(), together=False)
    assert forced_modules(made.parts.model) == moved
    assert told == [(one.module, one.update) for one in blames]
    assert made.parts.meters.read(torch.tensor(1.0), 0.0).skipped_in_a_row == (0 if moved else 99)


def test_ranks_log_one_line_per_skipped_update(health: Made) -> None:
    """A rank whose own gradients were fine finds nothing; the other's word is the better one."""
    made, told = health(blame("", 1, operation="", reason="not seen again"), blame("head", 2), blame("head", 1))
    made.report(Position(), together=True)
    assert told == [("head", 1), ("head", 2)]


def test_only_consecutive_skips_end_the_run(health: Made) -> None:
    meters, (made, _) = TrainMeters(CPU, ALONE, OneLabel(10)), health()
    reading = meters.read(torch.tensor(1.0), 0.0)
    for update in range(1, 161):
        meters.close_update(update, torch.tensor(1.0), update == 60, scaled=True)
        reading = meters.read(torch.tensor(1.0), 0.0)
        assert (made.too_many_skips(reading, update) is not None) is (update == 160)
    assert (reading.skipped, reading.skipped_in_a_row) == (159, 100)
    assert "AUTO_FP32" not in str(made.too_many_skips(reading, 160)), "it is on"
