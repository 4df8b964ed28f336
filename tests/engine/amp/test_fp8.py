"""fp8: which layers take it, what it is, and where it is refused."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.amp import low_precision
from engine.amp.precision import check_amp
from tests.engine.amp.modes import MODES, PLAIN_STEPS, amp, change
from tests.engine.small import build, windows
from utils.config import AmpConfig, TrainConfig
from utils.errors import UserError
from utils.log import log


def linears(model: nn.Module) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def test_fp8_converts_suitable_layers_and_logs_the_others(tiny: Path, said: pytest.LogCaptureFixture) -> None:
    words = {**MODES["fp8"], "MODEL__EMBED_DIM": 16, "MODEL__MLP_RATIO": 1.5}
    ready = build(tiny, **words)
    fitting = dict.fromkeys(["blocks.0.attn.qkv", "blocks.0.attn.proj"], "Float8Linear")
    others = dict.fromkeys(["blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head"], "Linear")
    assert linears(ready.model) == {**fitting, **others}
    (warning,) = [r.getMessage() for r in said.records if (r.name, r.levelno) == (log.name, logging.WARNING)]
    assert "EMULATED" in warning
    assert "8.9" in warning
    (left,) = [r.getMessage() for r in said.records if "left in bf16" in r.getMessage()]
    assert left.endswith(": blocks.0.mlp.fc1, blocks.0.mlp.fc2, head")
    qkv: Any = ready.model.get_submodule("blocks.0.attn.qkv")
    assert qkv.config.emulate
    assert list(ready.model.state_dict()) == list(build(tiny).model.state_dict())


def test_fp8_is_coarser_than_bf16_and_close_to_it(tiny: Path) -> None:
    """Coarser than bf16, and close to it all the same."""
    changes = {}
    for name, words in (("fp32", {}), ("bf16", MODES["O1 bf16"]), ("fp8", MODES["fp8"])):
        ready = build(tiny, **words, **PLAIN_STEPS)
        changes[name] = change(ready, next(windows(ready)))
    exact = changes["fp32"]
    error = {name: ((stepped - exact).norm() / exact.norm()).item() for name, stepped in changes.items()}
    assert 3 * error["bf16"] < error["fp8"] < 0.3


def test_fp8_supports_any_number_of_tokens_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated products take all sizes; those of a GPU, of which torch knows the rules, only multiples of 16."""
    monkeypatch.setattr(low_precision, "hardware_has_fp8", lambda _: True)
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(32, 64, bias=False, device="cuda", dtype=torch.bfloat16))
        low_precision.convert_to_fp8(model, torch.device("cuda"), None, [])
        images = torch.empty(8, 197, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        node: Any = model(images).grad_fn
        while "matmul_with_hp" not in type(node).__name__:
            node = node.next_functions[0][0]
        # The node alone: torch's engine would start a thread for a GPU that is not there.
        _, of_weight, *_ = node.apply(torch.empty(8, 197, 64, device="cuda", dtype=torch.bfloat16))
        assert of_weight.shape == (32, 64)


def test_fp32_modules_are_not_converted_to_fp8(tiny: Path) -> None:
    ready = build(tiny, **MODES["fp8"], AMP__FP32_MODULES="blocks.0.mlp")
    kinds = linears(ready.model)
    assert kinds["blocks.0.mlp.fc1"] == kinds["blocks.0.mlp.fc2"] == "Linear"
    assert kinds["blocks.0.attn.qkv"] == "Float8Linear"


def test_fp8_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.float8"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"fp8 needs torchao.*pip install torchao"):
        check_amp(amp(DTYPE="fp8"), TrainConfig())
    check_amp(amp(DTYPE="bf16"), TrainConfig())
    check_amp(AmpConfig(DTYPE="fp8"), TrainConfig())  # AMP is off
