"""Every precision trains on the GPU, and its losses are those of fp32 as far as its digits go."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import KIND, Run, Train, apart, on_a_gpu_alone
from tests.program import ROOT, Result

# Plain descent: Adam would blow rounding up where gradients are nearly zero.
DESCENT = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.1", "SPEED=+fused")
REST = "DATA.DROP_LAST=false"  # 29 images, whose tokens are no multiple of what the fp8 units take
LEARNS = ("TRAIN.NUM_EPOCHS=6", "TRAIN.BASE_LR=2e-3", "TRAIN.ACCUM_ITER=2", "TRAIN.MODEL_EMA=true", REST)
BF16 = 2.0**-8
"""What it rounds by."""


@on_a_gpu_alone
def test_the_digits_are_learnt_in_what_the_gpu_gains_from(vitamp: Callable[..., Result], tmp_path: Path) -> None:
    """No device is named, and no precision but by -amp."""
    done = vitamp("-cfg", ROOT / "configs" / "vit_digits.yaml", "-amp", "-epochs", 20, "-output", tmp_path / "run")
    assert done.code == 0, done.text
    run = Run(tmp_path / "run", done)
    capability = torch.cuda.get_device_capability()
    assert re.search(r"  device     cuda: .*compute capability {}\.{}".format(*capability), done.out)
    assert re.search(r"  precision  fp16 .*with loss scaling", done.out)
    assert max(line["ema_acc1"] for line in run.of("val")) > 92
    assert run.of("train")[-1]["skipped"] < 20
    assert run.of("train")[-1]["scale"] >= 1024


@pytest.mark.parametrize(
    ("words", "name", "saved"),
    [
        (["-amp", "fp16"], "fp16", torch.float32),
        (["-amp", "bf16"], "bf16", torch.float32),
        (["-amp", "O2"], "O2-fp16", torch.float32),
        (["-amp", "O2", "AMP.DTYPE=bf16"], "O2-bf16", torch.float32),
        (["-amp", "NAIVE"], "NAIVE-fp16", torch.float32),
        (["-amp", "O3"], "O3-bf16", torch.bfloat16),
        (["-amp", "fp8"], "fp8", torch.float32),
        (["-amp", "off", "AMP.TF32=true"], "tf32", torch.float32),
        (["-amp", "off"], "fp32", torch.float32),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_every_level_learns_and_is_saved(train: Train, words: list[str], name: str, saved: torch.dtype) -> None:
    if name == "fp8":
        pytest.importorskip("torchao")
    if KIND == "cpu":
        name, words = _on_a_cpu(name, words)
    run = train("run", *words, *LEARNS, updates=None)
    assert re.search(rf"^  precision  {name}( |,|$)", run.text, re.MULTILINE)
    assert sum(run.losses[-4:]) < 0.8 * sum(run.losses[:4])
    assert {tensor.dtype for tensor in run.weights().values()} == {saved}
    assert {tensor.dtype for tensor in run.weights("ema.safetensors").values()} == {torch.float32}
    scales = {line["scale"] for line in run.of("train")}
    assert min(scales) > 1 if "fp16" in name else scales == {1}


def _on_a_cpu(name: str, words: list[str]) -> tuple[str, list[str]]:
    """There `-amp` is bf16, and nothing is TF32."""
    named = any("=" in word for word in words) or name in ("fp16", "fp32", "fp8")
    return ("fp32" if name == "tf32" else name), words if named else [*words, f"AMP.DTYPE={name.split('-')[-1]}"]


def test_what_half_precision_loses_is_its_digits(train: Train) -> None:
    exact = train("fp32", *DESCENT).losses
    for words, close in ((["-amp", "bf16"], 4 * BF16), (["-amp", "fp16"], BF16)):
        found = train(words[-1], *words, *DESCENT).losses
        assert 0 < apart(found, exact) < close, words


@on_a_gpu_alone
def test_tf32_is_another_arithmetic_and_off_by_itself(train: Train) -> None:
    """10 bits of mantissa, as fp16 has; without asking for it, none of a product's digits are lost."""
    exact, rounded = train("fp32", *DESCENT), train("tf32", *DESCENT, "AMP.TF32=true")
    assert "TF32 off" in exact.text
    assert "tf32" in rounded.text
    assert 1e-6 < apart(rounded.losses, exact.losses) < BF16


def test_fp32_is_that_of_the_cpu(train: Train) -> None:
    """Two libraries sum up in two orders; the weights begin alike, and the images come in the same order."""
    here, there = train("here", *DESCENT), train("there", *DESCENT, "-device", "cpu")
    assert "\n  device     cpu" in there.text
    assert apart(here.losses[:1], there.losses[:1]) < 1e-6
    assert apart(here.losses, there.losses) < 1e-4
    assert here.of("val")[-1]["loss"] == pytest.approx(there.of("val")[-1]["loss"], rel=1e-4)


def test_with_everything_listed_training_is_fp32(train: Train) -> None:
    """bf16 from which every operator and every module was taken away again; forward and backward."""
    exact = train("fp32", *DESCENT)
    modules = train("modules", "-amp", "bf16", *DESCENT, "AMP.FP32_MODULES=[patch_embed, 'blocks.*', norm, head]")
    assert apart(modules.losses, exact.losses) < 1e-5
    black = "AMP.CUSTOM_BLACK_LIST=[linear, matmul, conv2d, softmax, layer_norm, gelu]"
    listed = train("listed", "-amp", "bf16", *DESCENT[:2], black)
    assert "attention plain (so that AMP's lists take effect)" in listed.text
    assert apart(listed.losses, exact.losses) < 1e-5


@pytest.mark.parametrize(
    "words", [("-amp", "off"), ("-amp", "bf16", "AMP.CUSTOM_WHITE_LIST=layer_norm", "-profile", 2)]
)
def test_torchs_own_warnings_are_none_of_a_users_concern(train: Train, words: tuple[object, ...]) -> None:
    """Of kinds of attention that there are not, of threads without CUDA, of kernels put in the place of others."""
    run = train("run", *words)
    assert "Warning" not in run.text, run.text
