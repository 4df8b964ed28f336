"""Mixed precision from the command line: what is shown, what is refused, and that every mode trains and is saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.program import Result, metrics

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


def test_print_amp_shows_fp32_modules_and_lists_at_o2(vitamp: Callable[..., Result], tiny: Path) -> None:
    above, rows = shown(vitamp, tiny, "-amp", "O2", "AMP.DTYPE=bf16")
    assert "O2-bf16 copy of fp32 master weights, norms in fp32" in above
    assert rows["blocks.0.attn.qkv"][1] == "bf16"
    assert rows["blocks.0.norm1"][1] == "fp32"
    words = ("AMP.FP32_MODULES=blocks.0.mlp", "AMP.CUSTOM_BLACK_LIST=softmax", "AMP.CUSTOM_WHITE_LIST=gelu")
    _, rows = shown(vitamp, tiny, "-amp", "O2", "AMP.DTYPE=bf16", *words)
    assert rows["blocks.0.mlp"][1:3] == ["fp32", "bf16*"]
    assert rows["blocks.0.mlp.fc1"][-1] == "linear fp32"
    assert "softmax fp32" in rows["blocks.0.attn"][-1]
    assert rows["blocks.0.attn.qkv"][1:] == ["bf16", *rows["blocks.0.attn.qkv"][2:]]


@pytest.mark.parametrize(
    ("words", "parameters", "norm"),
    [(["-amp", "off"], "fp32", "fp32"), (["-amp", "NAIVE"], "bf16", "bf16"), (["-amp", "O3"], "bf16", "bf16")],
)
def test_print_amp_shows_other_levels(
    vitamp: Callable[..., Result], tiny: Path, words: list[str], parameters: str, norm: str
) -> None:
    _, rows = shown(vitamp, tiny, *words, "AMP.DTYPE=bf16")
    assert rows["(model)"][1] == parameters
    assert rows["norm"][1] == norm
    assert rows["head"][-1] == f"linear {parameters}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["AMP.CUSTOM_BLACK_LIST=sofmax"],
            ["AMP.CUSTOM_BLACK_LIST", "'sofmax'", "Did you mean softmax", "Known: ", "matmul_v2", "layer_norm"],
        ),
        (["AMP.FP32_MODULES=blocks.9"], ["AMP.FP32_MODULES", "'blocks.9'", "patch_embed", "LayerNorm"]),
        (["AMP.LEVEL=O2", "AMP.DTYPE=fp8"], ["fp8", "O1 only, not O2"]),
        (["AMP.STOP_AFTER_SKIPS=0"], ["AMP.STOP_AFTER_SKIPS", "0"]),
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
        (["-amp", "bf16", "AMP.LOSS_SCALING=true", "AMP.INIT_LOSS_SCALING=32768"], "bf16", torch.float32),
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


def test_log_warns_of_emulated_fp8_and_of_o3(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    fp8 = vitamp("-cfg", tiny, "-output", tmp_path / "fp8", "-amp", "fp8", "TRAIN.MAX_UPDATES=1")
    assert "warning: fp8 is EMULATED" in fp8.err
    assert "left in bf16 (the classifier, or sizes not multiples of 16): head" in fp8.out
    o3 = vitamp("-cfg", tiny, "-output", tmp_path / "o3", "-amp", "O3", "-dry_run")
    assert "warning: AMP.LEVEL O3 keeps no fp32 master weights" in o3.err
    o1 = vitamp("-cfg", tiny, "-output", tmp_path / "o1", "-amp", "bf16", "-dry_run")
    assert "multiples of 8" not in o1.text, "a CPU has no tensor cores"


def test_uncalled_listed_operators_are_warned_about_once(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    lists = ("AMP.CUSTOM_BLACK_LIST=[softmax,conv3d,matmul_v2]", "AMP.CUSTOM_WHITE_LIST=[swish]")
    words = ("-cfg", tiny, "-amp", "bf16", "TRAIN.MAX_UPDATES=20", "REPORT_FREQ=5", "-output")
    done = vitamp(*words, tmp_path / "a", *lists)
    assert done.code == 0, done.text
    assert done.err.count("the model never calls swish, conv3d; listing them has no effect.") == 1, done.text
    assert vitamp(*words, tmp_path / "b", "AMP.CUSTOM_BLACK_LIST=[softmax]").err == ""


def test_log_says_that_lists_have_no_effect_without_amp(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    words = ("AMP.CUSTOM_BLACK_LIST=[softmax]", "TRAIN.MAX_UPDATES=1", "-output", tmp_path / "run")
    done = vitamp("-cfg", tiny, "-amp", "off", *words)
    assert done.text.count("AMP.CUSTOM_BLACK_LIST has no effect: AMP.ENABLED is false") == 1, done.text
    assert "never calls" not in done.text
