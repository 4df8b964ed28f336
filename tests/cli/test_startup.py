"""From the command to the first update: only what this run needs is imported before it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.program import ROOT

LATE = {
    *("tensorboard", "matplotlib", "torchao", "sklearn", "pandas", "pyarrow", "fsspec", "onnx", "scipy", "timm.optim"),
}
MOST_MODULES = 3300
"""3,024 when this was written: torchvision and optimisers import torch's compiler, which brings sympy and FSDP."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a run with `-X importtime` tells before its first update is told, and after."""
    from tests.program import TINY_DIGITS

    place = tmp_path_factory.mktemp("startup")
    (place / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
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


def test_what_the_first_update_does_not_need_comes_later(told: tuple[str, str]) -> None:
    before, after = map(imported, told)
    assert {"torch", "timm", "torchvision"} <= before
    assert not before & LATE
    assert {"tensorboard", "matplotlib"} <= after, "and comes where it is needed"


def test_a_first_update_takes_no_more_modules_than_it_did(told: tuple[str, str]) -> None:
    assert len(imported(told[0])) < MOST_MODULES


def in_python(code: str) -> str:
    """What a fresh Python prints that runs this in the project's folder."""
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


def test_settings_are_judged_without_torch() -> None:
    code = """
import sys
from utils.config import load_config
load_config("configs/vit_digits.yaml", words={"TRAIN.TOKEN_DROP": "0.5"})
import engine.entry
print(sorted(name for name in ("torch", "numpy", "timm") if name in sys.modules))
"""
    assert in_python(code).strip() == "[]"
