"""-gpus 0,1 limits which GPUs a run sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.machine.device import has_driver
from tests.program import Result
from utils.cli import parse
from utils.errors import UserError
from utils.machine.gpus import ASKED, VISIBLE, check_asked_gpus, limit_visible_gpus


@pytest.fixture(autouse=True)
def around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VISIBLE, ASKED):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def shown(*words: str, program: str = "main_multi_gpu.py") -> str:
    before = os.environ.get(VISIBLE)
    command = parse(["-gpus", *words], program)
    assert os.environ.get(VISIBLE) == before, "reading a command line changes nothing"
    limit_visible_gpus(command, one_process=program == "main_single_gpu.py")
    return os.environ[VISIBLE]


def test_gpus_makes_these_gpus_visible() -> None:
    assert shown("2,0") == "2,0"
    assert shown("2,0") == "2,0", "as in the ranks that this process starts"


def test_gpus_accepts_an_equal_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    assert shown("0, 1", "-ngpus", "2") == "0,1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0,x"], "takes the indices of GPUs"),
        (["0,,1"], "takes the indices of GPUs"),
        (["1,1"], "each once"),
        (["0,1", "-device", "cpu"], "-gpus 0,1 with -device cpu"),
        (["0,1", "DEVICE=cpu"], "-gpus 0,1 with -device cpu"),
        (["0,1", "-ngpus", "4"], "-gpus 0,1 -ngpus 4: -gpus starts one process per GPU"),
    ],
)
def test_gpus_refuses_conflicting_flags(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        shown(*words)
    assert VISIBLE not in os.environ


def test_gpus_refuses_a_different_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "3")
    with pytest.raises(UserError, match=r"-gpus 0,1: CUDA_VISIBLE_DEVICES is '3' in the environment"):
        shown("0,1")


def test_main_single_gpu_takes_one_index() -> None:
    assert shown("1", program="main_single_gpu.py") == "1"
    os.environ.pop(VISIBLE)
    with pytest.raises(UserError, match=r"this program uses one GPU; give one index"):
        shown("0,1", program="main_single_gpu.py")


@pytest.mark.parametrize(("visible", "said"), [(0, "no GPU"), (1, "only 1 of them")])
def test_gpus_refuses_missing_gpus(visible: int, said: str) -> None:
    check_asked_gpus(visible, any_here=True)
    shown("0,1")
    with pytest.raises(UserError, match=rf"-gpus 0,1: torch sees {said} on this machine"):
        check_asked_gpus(visible, any_here=True)
    check_asked_gpus(2, any_here=True)


@pytest.mark.skipif(has_driver(), reason="there are GPUs")
@pytest.mark.parametrize("script", ["main_single_gpu.py", "main_multi_gpu.py", "scripts/choose_precision.py"])
def test_gpus_on_a_machine_without_gpus_is_refused(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, script: str
) -> None:
    output = [] if script.startswith("scripts") else ["-output", tmp_path / "run"]
    done = vitamp("-cfg", tiny, "-gpus", "0", *output, script=script)
    assert (done.code, "Traceback" in done.text) == (2, False), done.text
    assert "-gpus 0: this machine has no GPU; leave -gpus out to use the CPU." in done.err
    assert not (tmp_path / "run").exists()
