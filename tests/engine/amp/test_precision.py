"""What -amp means where, and what loss scaling does to an update."""

import re
from typing import Any

import pytest
import timm
import torch
from torch import nn

from engine.amp import precision
from engine.amp.precision import Precision, amp_may_gain, choose, switch_tf32
from tests.engine.small import BF16, CPU, FP16, OFF
from utils.config import AmpConfig

AUTO = AmpConfig(ENABLED=True)
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A GPU of some compute capability, as far as asking for it goes."""

    def of(major: int, minor: int) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, minor))
        return GPU

    return of


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    """A CPU that computes in these types."""

    def of(fp16: bool, bf16: bool) -> torch.device:
        class Answers:
            _is_mkldnn_fp16_supported = staticmethod(lambda: fp16)
            _is_mkldnn_bf16_supported = staticmethod(lambda: bf16)

        monkeypatch.setattr(precision.torch.ops, "mkldnn", Answers, raising=False)
        features = {"architecture": "x86_64", **dict.fromkeys(precision.BF16_FEATURES, False), "avx_ne_convert": bf16}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
        return CPU

    return of


GPUS = {"Volta": (7, 0), "Turing": (7, 5), "Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}


@pytest.mark.parametrize("name", GPUS)
def test_auto_is_fp16_on_gpus_with_tensor_cores(gpu, name: str) -> None:
    choice, capability = choose(AUTO, gpu(*GPUS[name])), GPUS[name]
    assert choice.dtype is torch.float16
    assert name in choice.reason
    assert f"{capability[0]}.{capability[1]}" in choice.reason
    assert choice.warning is None


@pytest.mark.parametrize("capability", [(6, 0), (6, 1), (5, 2)])
def test_gpus_without_a_gain_from_fp16_warn(gpu, capability: tuple[int, int]) -> None:
    assert re.search("no .*speed", str(choose(AUTO, gpu(*capability)).warning))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tf_efficientnet_lite0", torch.float32),
        ("mobilenetv3_small_050", torch.float32),
        ("test_resnet", torch.bfloat16),
        ("test_convnext", torch.bfloat16),
        ("test_vit", torch.bfloat16),
    ],
)
def test_amp_is_fp32_for_depthwise_convolutions_with_batch_norms_on_a_cpu(cpu, name: str, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    choice = choose(AUTO, cpu(False, True), model)
    assert choice.dtype is dtype
    assert amp_may_gain(CPU, model) == (dtype is not torch.float32)
    assert ("depthwise" in Precision(AUTO, CPU, choice).line()) == (dtype is torch.float32)
    assert choose(BF16, CPU, model).dtype is torch.bfloat16, "what was asked for is done"


def test_bf16_warns_on_a_gpu_that_emulates_it(gpu) -> None:
    assert "fp16" in str(choose(BF16, gpu(7, 5)).warning)
    assert choose(BF16, gpu(8, 0)).warning is None
    assert choose(BF16, gpu(7, 5)).dtype is torch.bfloat16, "what was asked for is done"


@pytest.mark.parametrize(
    ("fp16", "bf16", "dtype", "warns"),
    [
        (True, False, torch.float16, False),
        (True, True, torch.bfloat16, False),
        (False, True, torch.bfloat16, False),
        (False, False, torch.float32, True),
    ],
)
def test_auto_on_a_cpu_is_the_dtype_it_supports(cpu, fp16: bool, bf16: bool, dtype: torch.dtype, warns: bool) -> None:
    choice = choose(AUTO, cpu(fp16, bf16))
    assert choice.dtype is dtype
    assert (choice.warning is not None) is warns


def test_what_is_asked_for_is_kept_on_a_cpu_without_it(cpu) -> None:
    without = cpu(False, False)
    for amp in (BF16, AUTO.changed(LEVEL="O2")):
        choice = choose(amp, without)
        assert choice.dtype is torch.bfloat16, "what was asked for is done"
        assert "slower" in str(choice.warning)
    assert not amp_may_gain(without)
    assert amp_may_gain(cpu(False, True))
    assert "many times slower" in str(choose(FP16, cpu(False, True)).warning)
    assert choose(FP16, cpu(True, True)).warning is None


@pytest.mark.parametrize("amp", [OFF, AmpConfig(ENABLED=True, LEVEL="O0"), AmpConfig(DTYPE="fp16")])
def test_amp_off_is_fp32(amp: AmpConfig) -> None:
    assert choose(amp, CPU).dtype is torch.float32
    off = Precision(amp, CPU)
    assert (off.name, off.level, off.scaler.is_enabled()) == ("fp32", "O0", False)
    with off.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize(("amp", "dtype", "scaled"), [(FP16, torch.float16, True), (BF16, torch.bfloat16, False)])
def test_only_fp16_uses_loss_scaling(amp: AmpConfig, dtype: torch.dtype, scaled: bool) -> None:
    chosen = Precision(amp, CPU)
    assert chosen.scaler.is_enabled() is scaled
    assert float(chosen.scale_tensor()) == (65536.0 if scaled else 1.0)
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
    assert ("with loss scaling" if scaled else "no loss scaling") in chosen.line()


def test_tf32_is_switched_everywhere_in_both_directions() -> None:
    """By the names of new and of old; torch raises where the two contradict, or those of cuDNN's parts."""
    backends: Any = torch.backends
    places = (backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn)
    for on, value, former in ((True, "tf32", "high"), (False, "ieee", "highest"), (True, "tf32", "high")):
        Precision(AmpConfig(TF32=on), CPU)
        for _ in range(2):
            assert [place.fp32_precision for place in places] == [value] * len(places)
            assert torch.get_float32_matmul_precision() == former
            assert [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32] == [on, on]
            with backends.cudnn.flags(enabled=True, allow_tf32=on, fp32_precision=value):
                pass  # it notes the flags, and puts them back
    switch_tf32(False)


@pytest.mark.parametrize("on", [True, False])
def test_tf32_settings_allow_compiling_and_exporting(on: bool) -> None:
    """Both note torch's flags, and compiling gives products a value of their own."""
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 2)).eval()
    images = torch.rand(2, 3, 4, 4)
    for last in (not on, on):
        switch_tf32(last)
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(images), model(images))
        torch.export.export(model, (images,))
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if on else "ieee")  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.backends.cuda.matmul.allow_tf32 is on
    switch_tf32(False)
