"""The kernels without a GPU: carried out by Triton's interpreter, and compiled for GPUs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT


@pytest.mark.parametrize(
    ("file", "which"),
    [
        ("interpreted_gelu.py", "not slow"),
        pytest.param("interpreted_gelu.py", "slow", marks=pytest.mark.slow),
        pytest.param("interpreted_attention.py", "not slow", marks=[pytest.mark.slow, pytest.mark.every_slice]),
    ],
)
def test_kernels_in_tritons_interpreter(file: str, which: str) -> None:
    """In a process of their own, since Triton takes up its interpreter when it is imported."""
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    tests = ROOT / "tests" / "engine" / "speed" / file
    command = [sys.executable, "-m", "pytest", tests, "-q", "-m", which, "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.every_slice
@pytest.mark.parametrize(("capability", "shared"), [(80, 163), (90, 227)])
def test_kernels_compile_for_gpus(
    capability: int, shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shared`: KiB of memory on the chip that a program may have."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.speed.kernels import attention, attention_triton, gelu

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"scale": "fp32", "log_scale": "fp32", "tokens": "i32", "width": "i32", "groups": "i32"}
    types |= dict.fromkeys(("logsumexp", "bias", "db", "sums"), "*fp32")

    def compile_for_gpu(kernel: Any, options: dict[str, Any]) -> None:
        launch = {key: value for key, value in options.items() if key.startswith("num_")}
        sizes = {key: value for key, value in options.items() if key not in launch}
        signature = {name: "constexpr" if name in sizes else types.get(name, "*fp16") for name in kernel.arg_names}
        # As at a launch, where Triton sees that addresses and this width are multiples of 16.
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name == "width"
        }
        source = ASTSource(kernel, signature, sizes, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
        assert built.asm["cubin"]
        assert built.metadata.shared <= shared * 1024

    compile_for_gpu(attention_triton.forward_kernel, attention.forward_options(197, 6, 64))
    compile_for_gpu(attention_triton.backward_kernel, attention.backward_options(197, 6, 64))
    compile_for_gpu(gelu.forward_kernel, gelu.FORWARD.options(1536))
    compile_for_gpu(gelu.backward_kernel, gelu.BACKWARD.options(1536))
    compile_for_gpu(gelu.add_up_kernel, {**gelu.SUMS, "STEPS": 4})
