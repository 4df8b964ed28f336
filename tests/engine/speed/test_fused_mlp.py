"""fused_mlp: where bias and GELU of MLPs become one operator, and where they stay two."""

import copy
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.layers import activations
from timm.layers.mlp import Mlp
from timm.models import create_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook

from engine.speed import fused_mlp
from engine.speed.fused_mlp import FusedMlp, FusedMlps
from tests.engine.small import built_of, chosen
from tests.engine.test_no_host_copies import Listener
from utils.errors import UserError

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def on(device: str = "cuda", level: str = "O1", fp8: bool = False) -> Any:
    """A precision, as far as is asked of it."""
    return SimpleNamespace(device=torch.device(device), level=level, fp8=fp8, choice=SimpleNamespace(dtype=torch.half))


def fused(wanted: str, model: nn.Module, precision: Any, **settings: Any) -> bool:
    return chosen(FusedMlps, built_of(model, precision, SPEED=[wanted], **settings)).value


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which the kernels work."""
    monkeypatch.setattr(fused_mlp, "_why_kernels_fail", lambda _precision: "")


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return create_model("test_vit", num_classes=3)


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("level", ["O1", "O2", "NAIVE", "O3"])
def test_auto_fuses_mlps_on_a_gpu_in_half_precision(vit: nn.Module, level: str) -> None:
    for wanted in ("auto", "+fused_mlp", "-fused_mlp"):
        assert fused(wanted, vit, on(level=level)) is (wanted != "-fused_mlp")


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        ({"device": "cpu"}, {}, "its kernels need an NVIDIA GPU"),
        ({"fp8": True}, {}, "fp8 has its own linear layers"),
        ({}, {"DIST": {"STRATEGY": "fsdp"}}, "not tested with DIST.STRATEGY fsdp"),
        ({}, {"AMP": {"CUSTOM_BLACK_LIST": ["gelu", "softmax"]}}, "AMP's lists would have no effect on gelu inside"),
        (
            {},
            {"AMP": {"CUSTOM_BLACK_LIST": ["addmm", "fc", "mm"]}},
            "AMP's lists would have no effect on addmm, fc, mm inside",
        ),
    ],
)
def test_fused_mlp_true_is_rejected_with_the_reason(
    vit: nn.Module, given: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    assert fused("auto", vit, on(**given), **settings) is False
    with pytest.raises(UserError, match=r"SPEED \+fused_mlp: .*" + words + ".*; leave it out"):
        fused("+fused_mlp", vit, on(**given), **settings)


@pytest.mark.usefixtures("works")
def test_fused_mlp_in_fp32_is_logged_as_without_effect(vit: nn.Module, said: pytest.LogCaptureFixture) -> None:
    assert fused("auto", vit, on(level="O0")) is False
    assert not said.text
    assert fused("+fused_mlp", vit, on(level="O0")) is False
    assert "SPEED +fused_mlp has no effect: AMP is off" in said.text


def test_failing_kernels_prevent_fusing(
    vit: nn.Module, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)

    def no_compiler(_device: torch.device, _dtype: torch.dtype) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    gelu = pytest.importorskip("engine.speed.kernels.gelu")
    monkeypatch.setattr(gelu, "self_test", no_compiler)
    assert fused("auto", vit, on()) is False
    assert "leaves out fused_mlp: its kernels fail here (RuntimeError: Failed to find C compiler.)" in said.text
    with pytest.raises(UserError, match=r"its kernels fail here \(RuntimeError: Failed to find C compiler\.\); leave"):
        fused("+fused_mlp", vit, on())
    monkeypatch.setattr(gelu, "self_test", lambda _device, _dtype: None)
    assert fused("auto", vit, on()) is True
    capability = (7, 5)
    with pytest.raises(UserError, match=r"older than compute capability 8\.0"):
        fused("+fused_mlp", vit, on())


class OwnMlp(Mlp):
    pass


@needs_triton
@pytest.mark.parametrize(
    ("mlp", "fused"),
    [
        (Mlp(8), True),
        (Mlp(8, act_layer=activations.GELU), True),
        (Mlp(8, drop=0.5), True),
        (Mlp(8, act_layer=nn.ReLU), False),
        (Mlp(8, act_layer=lambda: nn.GELU("tanh")), False),  # type: ignore[arg-type]
        (Mlp(8, act_layer=activations.GELUTanh), False),
        (Mlp(8, bias=False), False),
        (Mlp(8, norm_layer=nn.LayerNorm), False),
        (Mlp(8, use_conv=True), False),
        (OwnMlp(8), False),
    ],
)
def test_only_plain_mlps_are_fused(mlp: Mlp, fused: bool) -> None:
    model = nn.Sequential(copy.deepcopy(mlp))
    keys = list(model.state_dict())
    FusedMlps().apply(built_of(model), True)
    assert isinstance(model[0], FusedMlp) is fused
    assert list(model.state_dict()) == keys
    assert "FusedMlp" not in repr(model)


@needs_triton
@pytest.mark.parametrize(
    ("device", "dtype", "fused"), [("cuda", torch.half, True), ("cuda", torch.float, False), ("cpu", torch.half, False)]
)
def test_fused_operator_is_called_on_a_gpu_in_half_precision(device: str, dtype: torch.dtype, fused: bool) -> None:
    """Of tensors without values, which need no GPU."""
    assert called(device, dtype) == {"vitamp::gelu_with_bias" if fused else "aten::gelu"}


@needs_triton
def test_layers_are_called_by_themselves_while_all_modules_have_hooks() -> None:
    """As in the replay of an overflow, which names the layer."""
    with register_module_forward_hook(lambda *_: None):
        assert called("cuda", torch.half) == {"aten::gelu"}


def called(device: str, dtype: torch.dtype) -> set[str]:
    with FakeTensorMode():
        mlp = Mlp(8, 20, device=device, dtype=dtype)
        FusedMlps().apply(built_of(mlp), True)
        x = torch.randn(2, 3, 8, device=device, dtype=dtype)
        with Listener() as listener:
            y = mlp(x)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, dtype, device)
    return listener.names & {"vitamp::gelu_with_bias", "aten::gelu"}
