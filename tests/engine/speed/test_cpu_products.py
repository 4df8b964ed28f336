"""CPU_FP32: which library multiplies matrices, and when it is another by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import engine.speed.cpu_products as matmul
from engine.amp.precision import Precision
from engine.speed.cpu_products import CpuProducts, apply_products
from engine.speed.shape import Choice
from tests.engine.small import BF16, CPU, OFF, build, built_of, chosen
from utils.errors import UserError

ZEN_5, ZEN_4, INTEL = ("AuthenticAMD", 26), ("AuthenticAMD", 25), ("GenuineIntel", 6)
LARGE = 8 * 196 * 192


def library(values: int, precision: Any = None, before: str | None = None, wanted: str = "auto") -> Choice:
    """The choice for a model with so many values between its blocks."""
    model: Any = nn.Identity()
    model.patch_embed, model.embed_dim = SimpleNamespace(num_patches=1), values
    built = built_of(model, precision, {"cpu_fp32": before}, CPU_FP32=wanted, DATA={"BATCH_SIZE": 1})
    return chosen(CpuProducts, built)


@pytest.fixture(autouse=True)
def mkl_again() -> Iterator[None]:
    yield
    apply_products("mkl")


def on(monkeypatch: pytest.MonkeyPatch, machine: tuple[str, int], error: float = 1e-6) -> None:
    monkeypatch.setattr(matmul, "processor_kind", lambda: machine)
    monkeypatch.setattr(matmul, "_onednn_error", lambda: error)


@pytest.mark.parametrize(
    ("machine", "error", "fp32", "values", "expected"),
    [
        (ZEN_5, 1e-6, True, LARGE, "onednn"),
        (ZEN_5, 1e-6, True, 1000, "mkl"),
        (ZEN_5, 1e-6, False, LARGE, "mkl"),
        (ZEN_5, 3e-3, True, LARGE, "mkl"),
        (ZEN_4, 1e-6, True, LARGE, "mkl"),
        (INTEL, 1e-6, True, LARGE, "mkl"),
    ],
)
def test_auto_depends_on_the_machine_and_the_sizes(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[str, int], error: float, fp32: bool, values: int, expected: str
) -> None:
    on(monkeypatch, machine, error)
    precision = Precision(OFF if fp32 else BF16, CPU)
    assert library(values, precision).value == expected
    on_gpu = SimpleNamespace(device=torch.device("cuda"), level=precision.level)
    assert library(values, on_gpu).value == "mkl"


def test_resumed_run_keeps_its_library_and_reports_the_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ZEN_4)
    found = library(LARGE, before="onednn")
    assert found.value == "onednn"
    assert "a new run here would use mkl" in found.why
    on(monkeypatch, ZEN_5, error=3e-3)
    assert library(LARGE, before="onednn").value == "mkl", "it cannot compute in fp32 by it"
    assert library(LARGE, before="onednn", wanted="mkl").value == "mkl", "asked for"
    assert library(LARGE, before="amx").value == "mkl", "kernels of an earlier version"


def test_onednn_is_rejected_where_it_computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, INTEL, error=3e-3)
    with pytest.raises(UserError, match=r"CPU_FP32 onednn: .*less exact than fp32.*use mkl"):
        library(LARGE, wanted="onednn")


def test_onednn_error_distinguishes_fp32_from_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this CPU makes of it: the products are made here."""
    product = torch.Tensor.__matmul__

    def error_with(precision: torch.dtype) -> float:
        def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return product(a.to(precision), b.to(precision)).float() if a.dtype is torch.float32 else product(a, b)

        matmul._onednn_error.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__matmul__", multiply)
            found = matmul._onednn_error()
        matmul._onednn_error.cache_clear()
        return found

    exact, rounded = error_with(torch.float64), error_with(torch.bfloat16)
    assert exact < matmul.LARGEST_ERROR < rounded


@pytest.mark.parametrize("library", ["mkl", "onednn"])
def test_requested_library_multiplies(vitamp, tiny: Path, library: str) -> None:
    """oneDNN itself tells what it computes."""
    # Without the units for bf16 that some CPUs have: by them oneDNN would be refused.
    env = {"ONEDNN_VERBOSE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    out = tiny.parent / "run"
    words = (f"CPU_FP32={library}", "TRAIN.MAX_UPDATES=1", "MODEL.EMBED_DIM=64", "MODEL.LINEAR_PATCHES=true")
    done = vitamp("-cfg", tiny, "-output", out, *words, env=env)
    assert done.code == 0, done.text
    products = [line for line in done.out.splitlines() if ",exec,cpu,matmul," in line and "src:f32" in line]
    used = library == "onednn" and torch.backends.cpu.get_cpu_capability() != "AVX2"
    assert bool(products) == used
    assert ("this CPU has no AVX-512, so torch uses MKL" in done.text) == (library == "onednn" and not used)
    assert f"fp32 products by {library} (as asked for" in done.text
    assert json.loads((out / "run.json").read_text())["choices"]["cpu_fp32"] == library


def test_later_run_in_the_process_does_not_inherit_the_library(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ZEN_5)

    def setting() -> str:
        return torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]

    build(tiny, CPU_FP32="onednn")
    assert setting() == "bf16"
    build(tiny)
    assert setting() == "ieee"
