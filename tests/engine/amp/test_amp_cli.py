"""Mixed precision from the command line: what is shown, what is refused, and that every mode trains and is saved."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_vit import batch, small_vit
from torch import Tensor, nn

from engine.amp.low_precision import force_fp32
from engine.amp.print_amp import amp_table
from tests.program import ROOT, Vitamp, metrics, write_meta

# ---- the table of -print_amp


def rows_of(table: str) -> dict[str, list[str]]:
    """Module -> class, parameters, inputs, outputs, operations."""
    lines = [re.split(r"\s{2,}", line) for line in table.splitlines() if not line.startswith("*")]
    assert lines[0] == ["module", "class", "parameters", "inputs", "outputs", "operations"]
    return {line[0]: line[1:] for line in lines[1:]}


def test_print_amp_shows_listed_operators_at_o1(vitamp: Vitamp, tiny: Path) -> None:
    """matmul_v2 is Paddle's word, for a linear layer's product as well."""
    absent, speed = "DATA.DATASET=imagenet2012", "SPEED=-fused,-linear_patches"  # data are not needed
    lists = ("AMP.CUSTOM_WHITE_LIST=layer_norm", "AMP.CUSTOM_BLACK_LIST=[softmax, matmul_v2]")
    for words, *expected in (
        ((), "layer_norm fp32", "softmax bf16", "matmul bf16", "linear bf16"),
        (lists, "layer_norm bf16", "softmax fp32", "matmul fp32", "linear fp32"),
    ):
        done = vitamp("-cfg", tiny, "-print_amp", "-amp", "bf16", *words, speed, absent, code=0)
        above, _, table = done.out.partition("\n\n")
        assert "tiny in bf16 by autocast" in above
        assert ", no loss scaling" in above
        rows = rows_of(table)
        attention = rows["blocks.0.attn"][-1]
        assert rows["norm"][-1] == expected[0]
        assert expected[1] in attention
        assert expected[2] in attention
        assert rows["blocks.0.attn.qkv"][-1] == expected[3]
        assert rows["patch_embed.proj"][-1] == "conv2d bf16", "what is on no list stays"
    page = " ".join((ROOT / "docs" / "amp.md").read_text(encoding="utf-8").split())
    assert "`SPEED=-fused` computes softmax in bf16" in page
    assert "with `AMP.CUSTOM_BLACK_LIST=[softmax]`, CPUs use fp32 too" in page


def table(model: nn.Module, images: Tensor | None = None) -> dict[str, list[str]]:
    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(batch()[0] if images is None else images)

    return rows_of(amp_table(model, forward))


def test_table_of_a_vit_under_autocast() -> None:
    rows = table(small_vit())
    assert rows["(model)"] == ["VisionTransformer", "fp32", "fp32", "bf16", "add fp32"]
    assert rows["patch_embed.proj"] == ["Conv2d", "fp32", "fp32", "bf16", "conv2d bf16"]
    assert rows["blocks.0-1.attn"] == ["Attention", "fp32", "fp32", "bf16", "mul bf16, matmul bf16, softmax bf16"]
    assert rows["blocks.0-1.mlp.fc1"] == ["Linear", "fp32", "fp32", "bf16", "linear bf16"]
    assert rows["norm"] == ["LayerNorm", "fp32", "fp32", "fp32", "layer_norm fp32"]
    assert table(small_vit(fused=True))["blocks.0-1.attn"][-1] == "scaled_dot_product_attention bf16"


def test_table_marks_forced_modules_and_does_not_merge_them() -> None:
    model = small_vit()
    force_fp32(model, ["blocks.1", "head"], "cpu")
    rows = table(model)
    assert rows["blocks.0.mlp.fc1"][-1] == "linear bf16"
    assert rows["blocks.1"][2] == "fp32*"
    assert rows["blocks.1.mlp.fc1"][-1] == "linear fp32"
    assert rows["head"] == ["Linear", "fp32", "fp32*", "fp32", "linear fp32"]


def test_table_merges_equal_rows_that_are_not_adjacent() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) if n % 2 else nn.GELU() for n in range(6)), nn.Identity())
    rows = table(model, torch.rand(2, 4))
    assert rows["0"] == ["GELU", "-", "fp32", "fp32", "gelu fp32"]
    assert rows["1"] == ["Linear", "fp32", "fp32", "bf16", "linear bf16"]
    assert rows["2,4"] == ["GELU", "-", "bf16", "bf16", "gelu bf16"]
    assert rows["3,5"] == ["Linear", "fp32", "bf16", "bf16", "linear bf16"]
    assert "6" not in rows


# ---- runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["AMP.CUSTOM_BLACK_LIST=sofmax"], "AMP.CUSTOM_BLACK_LIST.*'sofmax'.*Did you mean softmax.*Known: .*matmul_v2"),
        (["AMP.FP32_MODULES=blocks.9", "AMP.DTYPE=bf16"], "AMP.FP32_MODULES.*'blocks.9'.*patch_embed.*LayerNorm"),
        (["AMP.LEVEL=O2", "AMP.DTYPE=fp8"], "fp8 .*O1 only, not O2"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_impossible_amp_settings_are_rejected_before_anything_is_written(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-output", run, "AMP.ENABLED=true", *words, code=2)
    assert re.search(said, done.err), done.err
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
    vitamp: Vitamp, tiny: Path, tmp_path: Path, words: list[str], name: str, saved: torch.dtype
) -> None:
    run = tmp_path / "run"
    every = ("-cfg", tiny, "-output", run, *words, *(["AMP.DTYPE=bf16"] if name != "fp8" else []))
    every = (*every, "TRAIN.MODEL_EMA=true", "TRAIN.ACCUM_ITER=2", "TRAIN.WARMUP_EPOCHS=0")
    done = vitamp(*every, "TRAIN.MAX_UPDATES=14", code=0)
    assert f"precision  {name} " in done.out
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert {t.dtype for t in load_file(checkpoint / "model.safetensors").values()} == {saved}
    assert {t.dtype for t in load_file(checkpoint / "ema.safetensors").values()} == {torch.float32}
    vitamp(*every, "-resume", "auto", code=0)
    vitamp(*every, "-output", tmp_path / "whole", code=0)
    kinds = ("train", "epoch")
    ours, theirs = ([line for line in metrics(at) if line["event"] in kinds] for at in (run, tmp_path / "whole"))
    assert ours[-1] == theirs[-1], "stopped in the middle and resumed, it is the run that never stopped"
    assert {line["scale"] for line in ours if line["event"] == "train"} == {1}


def test_uncalled_listed_operators_are_warned_about_once(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    lists = ("AMP.CUSTOM_BLACK_LIST=[softmax,conv3d,matmul_v2]", "AMP.CUSTOM_WHITE_LIST=[swish]")
    words = ("-cfg", tiny, "-amp", "bf16", "TRAIN.MAX_UPDATES=20", "REPORT_FREQ=5", "-output")
    done = vitamp(*words, tmp_path / "a", *lists, code=0)
    assert done.err.count("the model never calls swish, conv3d; listing them has no effect.") == 1, done.text
    assert "never calls" not in vitamp(*words, tmp_path / "b", "AMP.CUSTOM_BLACK_LIST=[softmax]").text


def test_amp_computes_in_fp32_on_a_cpu_without_bf16(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """`-amp` alone says so, asked-for bf16 is emulated, a plain run is not advised to try -amp, and a resume tells."""
    weak = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = tmp_path / "run"
    done = vitamp("-cfg", tiny, "-amp", "-output", run, env=weak)
    assert "-amp computes in fp32 here: this CPU has neither fp16 nor bf16 arithmetic" in done.text
    assert json.loads((run / "run.json").read_text())["choices"]["precision"] == "fp32"
    emulated = vitamp("-cfg", tiny, "-amp", "bf16", "-output", tmp_path / "bf16", "TRAIN.MAX_UPDATES=1", env=weak)
    assert "this CPU has no bf16 arithmetic: expect bf16 to be several times slower" in emulated.text
    plain = vitamp("-cfg", tiny, "-dry_run", env=weak)  # names the bottleneck of a second, too
    assert "compute-bound" in plain.text
    assert "try -amp" not in plain.text
    for meta in run.glob("checkpoints/*/meta.json"):
        saved = json.loads(meta.read_text())
        saved["choices"]["precision"] = "bf16"
        write_meta(meta, saved)
    again = vitamp("-cfg", tiny, "-amp", "-resume", run, "TRAIN.NUM_EPOCHS=3", env=weak)
    assert "changed since: -amp is fp32 here (this CPU has neither fp16 nor bf16 arithmetic" in again.text
    assert "and was bf16" in again.text
