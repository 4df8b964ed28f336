"""Kernels of attention on a GPU: the race, each kind by name, and validation in fp32 where half precision trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.speed.attention_kinds import KINDS
from tests.gpu.runs import Train, apart, on_a_gpu_alone

pytestmark = on_a_gpu_alone

DESCENT = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.1")


def test_the_race_is_told_and_kept(train: Train) -> None:
    run = train("run", "-amp")
    kind = run.choices["attention"]
    assert kind in KINDS["cuda"]
    (told,) = [line for line in run.result.out.splitlines() if line.startswith("  computing ")]
    assert f"attention {kind} (" in told
    assert "raced against" in told or f"x {'fused'} in a race of" in told
    assert run.choices["computed_in"] == "cuda fp16"
    meta = json.loads((run.checkpoint / "meta.json").read_text(encoding="utf-8"))
    assert meta["choices"]["attention"] == kind


def _speed(kind: str) -> str:
    return "SPEED=-fused" if kind == "plain" else f"SPEED=+{kind}"


@pytest.mark.parametrize("kind", KINDS["cuda"])
def test_each_kind_is_the_same_mathematics(train: Train, kind: str) -> None:
    expected = train("fp32", "-amp", "off", "SPEED=-fused", *DESCENT)
    run = train(kind, "-amp", "bf16", _speed(kind), *DESCENT)
    assert f"attention {kind} (as asked for)" in run.text
    assert 0 < apart(run.losses, expected.losses) < 2.0**-6
    assert run.of("val")[-1]["loss"] == pytest.approx(expected.of("val")[-1]["loss"], rel=2.0**-6)


@pytest.mark.parametrize("kind", ["flash", "cudnn", "packed"])
def test_what_knows_no_fp32_validates_in_it_all_the_same(train: Train, kind: str) -> None:
    run = train("run", "-amp", "fp16", _speed(kind))
    plain = train("eval", "-eval", "-resume", run.folder, "-amp", "off", "SPEED=-fused", updates=None)
    assert run.of("val")[-1]["loss"] == pytest.approx(plain.of("val")[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("kind", ["flash", "cudnn", "packed"])
def test_in_fp32_they_are_refused_by_name(train: Train, tmp_path: Path, kind: str) -> None:
    refused = train("run", _speed(kind), code=2)
    assert f"SPEED +{kind} does not support this GPU, model and precision (fp32); use " in refused.text
    assert not (tmp_path / "run").exists()
