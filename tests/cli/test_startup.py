"""Start-up imports only what the first update needs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT, run_program

LATE = {
    *("tensorboard", "matplotlib", "torchao", "sklearn", "pandas", "pyarrow", "fsspec", "onnx", "scipy", "sympy"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "timm.optim"),
}
MOST_MODULES = 2400
"""2,090 when this was written; 3,300 with what comes later now."""


@pytest.fixture(scope="module")
def told(place: Path) -> tuple[str, str]:
    """The output of a run with `-X importtime`, before and after the log line of its first update."""
    words = ["-cfg", place / "tiny.yaml", "-output", place / "run", "REPORT_FREQ=1", "TRAIN.MAX_UPDATES=1"]
    command = [sys.executable, "-u", "-X", "importtime", ROOT / "main_single_gpu.py", *words]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    before, first, after = done.stdout.partition("Step[0001/")
    assert first
    return before, after


def imported(text: str) -> set[str]:
    return set(re.findall(r"^import time:.*\|\s+(\S+)$", text, re.MULTILINE))


def test_packages_not_needed_for_the_first_update_are_imported_later(told: tuple[str, str]) -> None:
    before, after = map(imported, told)
    assert {"torch", "timm", "torchvision"} <= before
    assert not before & LATE
    assert len(before) < MOST_MODULES
    assert not [name for name in before | after if name.startswith("utils.own")]
    assert {"tensorboard", "matplotlib"} <= after, "and comes where it is needed"


def in_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_settings_and_models_are_checked_without_torch() -> None:
    code = """
import sys
from pathlib import Path
from typing import Any
from utils.config import load_config
load_config("configs/vit_digits.yaml", words={"TRAIN.TOKEN_DROP": "0.5"})
import engine.entry
from tools.evaluate.command import main as evaluate
from tools.export.command import main as export
print(evaluate(["nowhere"]), export(["nowhere", "-to", "torch", "-out", "m.pt2"]))
print(sorted(name for name in ("torch", "numpy", "timm") if name in sys.modules))
from tools.compare.command import main as compare
print(compare(["-modes", "bf16"]), compare(["SEED=3"]), compare(["-cfg", "nowhere"]), "torch" in sys.modules)
"""
    assert in_python(code).splitlines() == ["2 2", "[]", "2 2 2 False"]


LATE_COMPILER = """
from engine.machine.late_compiler import compiler_is_imported, import_compiler_late
import_compiler_late()
import torch, torchvision, timm
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
weight.sum().backward()
optimizer.step()
optimizer.zero_grad()

@torch.compiler.disable
def left_alone(x):
    return x + torch.compiler.is_compiling()

assert left_alone(torch.ones(2)).tolist() == [1, 1]
assert not compiler_is_imported()

@torch.compile(backend="eager")
def doubled(x):
    return left_alone(x * 2) + torch.compiler.is_compiling()

assert doubled(torch.ones(2)).tolist() == [3, 3], "compiled but for what is to be left alone"
assert compiler_is_imported()
import torch._dynamo.utils
assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
try:
    torch.compile(doubled, backend="eager", fullgraph=True)(torch.ones(3))
except torch._dynamo.exc.Unsupported:
    print("a graph break, as ever")
weight.sum().backward()
optimizer.step()
"""


@pytest.mark.slow  # imports torch's compiler; that it comes late is tested beside
def test_compiler_is_imported_when_something_is_compiled() -> None:
    assert in_python(LATE_COMPILER).strip() == "a graph break, as ever"


def test_what_is_written_to_closed_streams_is_discarded() -> None:
    words = [sys.executable, str(ROOT / "main_single_gpu.py"), "-list_models", "vit_tiny*"]
    for closed, code in ((">&-", 0), ("<&- >&- 2>&-", 0), ("-nosuch 2>&-", 2)):
        done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], cwd=ROOT, capture_output=True, check=False)
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False), closed


def test_closed_standard_input_is_empty(digits_run: Path) -> None:
    words = [sys.executable, str(ROOT / "scripts" / "predict.py"), str(digits_run), "-serve"]
    done = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *words], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr


def test_names_that_the_output_cannot_encode_are_escaped(digits_run: Path, tmp_path: Path) -> None:
    words = (digits_run, "-to", "safetensors", "-out", tmp_path / "ö.safetensors")
    how: Any = {"env": {"PYTHONIOENCODING": "ascii"}, "slow_start": True, "streams": tmp_path}
    assert r"\xf6.safetensors: " in run_program(*words, script="scripts/export.py", code=0, **how).out


def test_an_unknown_model_is_named_before_weights_are_looked_for(tmp_path: Path) -> None:
    words = ("-dataset", "digits", "-model", "vit_smal_patch16_224", "-pretrained", "vit_tiny_patch16_224")
    done = run_program(*words, env={"HF_HUB_OFFLINE": "1"}, streams=tmp_path, code=2)
    assert "'vit_smal_patch16_224' is not a timm model" in done.err
    assert "Did you mean vit_small_patch16_224?" in done.err
