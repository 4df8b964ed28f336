"""Exported safetensors work in predict.py, evaluate.py and distillation."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from PIL import Image

from tests.program import Result, metrics
from vitamp.weights import read_header


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "x.png"
    Image.new("L", (8, 8)).save(path)
    return path


def rewrite(source: Path, out: Path, header: dict[str, Any] | None) -> Path:
    texts = {"vitamp": json.dumps(header)} if header is not None else None
    safetensors.torch.save_file(safetensors.torch.load_file(source), out, metadata=texts)
    return out


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_predict_and_evaluate_load_an_export(
    vitamp: Callable[..., Result], digits_run: Path, image: Path, tmp_path: Path, dtype: str
) -> None:
    out = tmp_path / "vit.safetensors"
    words = ("-to", "safetensors", "-out", out, "-dtype", dtype, "-weights", "ema", "-check", 8)
    done = vitamp(digits_run, *words, script="scripts/export.py")
    assert done.code == 0, done.text
    assert str(digits_run) not in str(read_header(out)), "no paths of this machine"
    best = metrics(digits_run, "val")[-1]
    found = vitamp(out, "-json", tmp_path / "eval.json", script="scripts/evaluate.py")
    assert found.code == 0, found.text
    assert f"vit.safetensors, EMA weights, top-1 {best['ema_acc1']:.2f} %" in found.out
    acc1 = json.loads((tmp_path / "eval.json").read_text())["figures"]["ema"]["acc1"]
    assert acc1 == pytest.approx(best["ema_acc1"], abs=0 if dtype == "fp32" else 1)
    said = [
        vitamp(path, image, "-weights", "ema", "-format", "jsonl", script="scripts/predict.py")
        for path in (digits_run, out)
    ]
    assert [each.code for each in said] == [0, 0], said[1].text
    if dtype == "fp32":
        assert said[0].out == said[1].out


def test_export_is_a_teacher(vitamp: Callable[..., Result], digits_run: Path, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.safetensors"
    done = vitamp(digits_run, "-to", "safetensors", "-out", out, "-check", 8, script="scripts/export.py")
    assert done.code == 0, done.text
    words = ("TRAIN.DISTILLATION_TYPE=soft", f"TRAIN.TEACHER_MODEL={out}", "-dry_run")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words)
    assert done.code == 0, done.text
    assert f"Teacher {out}: mine.safetensors, plain weights" in done.out


def test_unusable_weights_are_refused_with_working_advice(
    vitamp: Callable[..., Result], digits_run: Path, image: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new.safetensors"
    done = vitamp(digits_run, "-to", "safetensors", "-out", out, "-check", 8, script="scripts/export.py")
    assert done.code == 0, done.text
    header = read_header(out)
    unneeded = {key: header[key] for key in header if key not in ("settings", "choices", "fp32_modules", "metrics")}
    older = rewrite(out, tmp_path / "older.safetensors", unneeded)
    foreign = rewrite(out, tmp_path / "foreign.safetensors", None)
    (tmp_path / "x.onnx").write_bytes(b"x")
    for file, reason in (
        (older, "its header was not written by scripts/checkpoint.py strip or scripts/export.py"),
        (foreign, "its header was not written by scripts/checkpoint.py strip or scripts/export.py"),
        (tmp_path / "x.onnx", "an exported program, not weights for vitamp"),
    ):
        done = vitamp(file, image, script="scripts/predict.py")
        assert done.code == 2
        assert f"{file}: {reason}" in done.err
    done = vitamp(older, image, script="scripts/predict.py")
    (command,) = re.findall(r"python (main_single_gpu\.py -cfg CONFIG\.yaml -eval -pretrained \S+)", done.err)
    words = shlex.split(command.replace("CONFIG.yaml", str(digits_run / "config.yaml")))
    validated = vitamp(*words[1:], "-output", tmp_path / "eval")
    assert validated.code == 0, validated.text
    assert metrics(tmp_path / "eval", "val")[0]["acc1"] == metrics(digits_run, "val")[-1]["acc1"]
