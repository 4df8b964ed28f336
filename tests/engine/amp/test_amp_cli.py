"""Mixed precision from the command line: what is shown, what is refused, and that every mode trains and is saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.program import Result, metrics, write_meta

Rows = dict[str, list[str]]


def shown(vitamp: Callable[..., Result], tiny: Path, *words: object) -> tuple[str, Rows]:
    """The line above the table of -print_amp, and the table: module -> class, parameters, inputs, outputs, ops."""
    done = vitamp("-cfg", tiny, "-print_amp", *words, "DATA.DATASET=imagenet2012")  # data that are not there
    assert done.code == 0, done.text
    above, _, table = done.out.partition("\n\n")
    lines = [re.split(r"\s{2,}", line) for line in table.splitlines() if not line.startswith("*")]
    assert lines[0] == ["module", "class", "parameters", "inputs", "outputs", "operations"]
    return above, {line[0]: line[1:] for line in lines[1:]}


def test_print_amp_shows_listed_operators_at_o1(vitamp: Callable[..., Result], tiny: Path) -> None:
    """matmul_v2 is Paddle's word, for a linear layer's product as well."""
    above, rows = shown(vitamp, tiny, "-amp", "bf16")
    assert "tiny in bf16 by autocast, no loss scaling" in above
    assert rows["blocks.0.attn.qkv"] == ["Linear", "fp32", "fp32", "bf16", "linear bf16"]
    assert rows["norm"] == ["LayerNorm", "fp32", "fp32", "fp32", "layer_norm fp32"]
    assert "softmax bf16" in rows["blocks.0.attn"][-1]
    assert "matmul bf16" in rows["blocks.0.attn"][-1]

    lists = ("AMP.CUSTOM_WHITE_LIST=layer_norm", "AMP.CUSTOM_BLACK_LIST=[softmax, matmul_v2]")
    _, rows = shown(vitamp, tiny, "-amp", "bf16", *lists)
    assert rows["norm"][-1] == "layer_norm bf16"
    assert "softmax fp32" in rows["blocks.0.attn"][-1]
    assert "matmul fp32" in rows["blocks.0.attn"][-1]
    assert rows["blocks.0.attn.qkv"][-1] == "linear fp32"
    assert rows["patch_embed.proj"][-1] == "conv2d bf16", "what is on no list stays"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["AMP.CUSTOM_BLACK_LIST=sofmax"],
            ["AMP.CUSTOM_BLACK_LIST", "'sofmax'", "Did you mean softmax", "Known: ", "matmul_v2", "layer_norm"],
        ),
        (
            ["AMP.FP32_MODULES=blocks.9", "AMP.DTYPE=bf16"],
            ["AMP.FP32_MODULES", "'blocks.9'", "patch_embed", "LayerNorm"],
        ),
        (["AMP.LEVEL=O2", "AMP.DTYPE=fp8"], ["fp8", "O1 only, not O2"]),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_impossible_amp_settings_are_rejected_before_anything_is_written(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, words: list[str], said: list[str]
) -> None:
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-output", run, "AMP.ENABLED=true", *words)
    assert done.code == 2, done.text
    assert "Traceback" not in done.text
    assert all(part in done.err for part in said), done.err
    assert not run.exists()


@pytest.mark.parametrize(
    ("words", "name", "saved"),
    [
        (["-amp", "O2"], "O2-bf16", torch.float32),
        pytest.param(["-amp", "NAIVE"], "NAIVE-bf16", torch.float32, marks=pytest.mark.slow),
        pytest.param(["-amp", "O3"], "O3-bf16", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(["-amp", "fp8"], "fp8", torch.float32, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_level_trains_validates_saves_and_resumes(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, words: list[str], name: str, saved: torch.dtype
) -> None:
    run = tmp_path / "run"
    every = ("-cfg", tiny, "-output", run, *words, *(["AMP.DTYPE=bf16"] if name != "fp8" else []))
    every = (*every, "TRAIN.MODEL_EMA=true", "TRAIN.ACCUM_ITER=2", "TRAIN.WARMUP_EPOCHS=0")
    done = vitamp(*every, "TRAIN.MAX_UPDATES=14")
    assert done.code == 0, done.text
    assert f"precision  {name} " in done.out
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert {t.dtype for t in load_file(checkpoint / "model.safetensors").values()} == {saved}
    assert {t.dtype for t in load_file(checkpoint / "ema.safetensors").values()} == {torch.float32}
    again = vitamp(*every, "-resume", "auto")
    assert again.code == 0, again.text
    whole = vitamp(*every, "-output", tmp_path / "whole")
    assert whole.code == 0, whole.text
    kinds = ("train", "epoch")
    ours, theirs = ([line for line in metrics(at) if line["event"] in kinds] for at in (run, tmp_path / "whole"))
    assert ours[-1] == theirs[-1], "stopped in the middle and resumed, it is the run that never stopped"
    assert {line["scale"] for line in ours if line["event"] == "train"} == ({32768} if "32768" in words[-1] else {1})


def test_uncalled_listed_operators_are_warned_about_once(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    lists = ("AMP.CUSTOM_BLACK_LIST=[softmax,conv3d,matmul_v2]", "AMP.CUSTOM_WHITE_LIST=[swish]")
    words = ("-cfg", tiny, "-amp", "bf16", "TRAIN.MAX_UPDATES=20", "REPORT_FREQ=5", "-output")
    done = vitamp(*words, tmp_path / "a", *lists)
    assert done.code == 0, done.text
    assert done.err.count("the model never calls swish, conv3d; listing them has no effect.") == 1, done.text
    assert "never calls" not in vitamp(*words, tmp_path / "b", "AMP.CUSTOM_BLACK_LIST=[softmax]").text


def test_amp_computes_in_fp32_on_a_cpu_without_bf16(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    """`-amp` alone says so, asked-for bf16 is emulated, a plain run is not advised to try -amp, and a resume tells."""
    weak = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-amp", "-output", run, env=weak)
    assert "-amp computes in fp32 here: this CPU has neither fp16 nor bf16 arithmetic" in done.text
    assert json.loads((run / "run.json").read_text())["choices"]["precision"] == "fp32"
    emulated = vitamp("-cfg", tiny, "-amp", "bf16", "-output", tmp_path / "bf16", "TRAIN.MAX_UPDATES=1", env=weak)
    assert "this CPU has no bf16 arithmetic: expect bf16 to be several times slower" in emulated.text
    plain = vitamp("-cfg", tiny, "-output", tmp_path / "plain", env=weak)
    assert "compute-bound" in plain.text
    assert "try -amp" not in plain.text
    for meta in run.glob("checkpoints/*/meta.json"):
        saved = json.loads(meta.read_text())
        saved["choices"]["precision"] = "bf16"
        write_meta(meta, saved)
    again = vitamp("-cfg", tiny, "-amp", "-resume", run, "TRAIN.NUM_EPOCHS=3", env=weak)
    assert "changed since: -amp is fp32 here (this CPU has neither fp16 nor bf16 arithmetic" in again.text
    assert "and was bf16" in again.text
