"""The tools around a run, on the GPU."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu.runs import KIND, SMALL, Run, skip_if_missing
from tests.program import Result, run_program


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("trained")
    (place / "small.yaml").write_text(SMALL, encoding="utf-8")
    skip_if_missing("bf16")
    words = ("-amp", "bf16", "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.9", "SAVE_FREQ=1")
    done = run_program("-cfg", place / "small.yaml", "-output", place / "run", *words, streams=place, timeout=240)
    assert done.code == 0, done.text
    return Run(place / "run", done)


def tool(vitamp: Callable[..., Result], name: str, *words: object) -> Result:
    return vitamp(*words, script=f"scripts/{name}.py", timeout=240, code=0)


def test_evaluate(vitamp: Callable[..., Result], trained: Run, tmp_path: Path) -> None:
    tool(vitamp, "evaluate", trained.folder, "-weights", "ema", "-json", tmp_path / "here.json")
    found, told = json.loads((tmp_path / "here.json").read_text())["figures"], trained.of("val")[-1]
    assert found["ema"]["nll"] == pytest.approx(told["ema_loss"], rel=1e-4)
    exactly = ("-weights", "ema", "-device", "cpu", "-amp", "off")
    tool(vitamp, "evaluate", trained.folder, *exactly, "-json", tmp_path / "there.json")
    exact = json.loads((tmp_path / "there.json").read_text())["figures"]["ema"]
    assert exact["nll"] == pytest.approx(found["ema"]["nll"], rel=0.02)


def test_choose_precision(vitamp: Callable[..., Result], small: Path, tmp_path: Path) -> None:
    modes = "tf32,fp16" if KIND == "cuda" else "bf16"
    done = tool(vitamp, "choose_precision", "-cfg", small, "-updates", 12, "-modes", modes, "-output", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "choose_precision.json").read_text())
    assert {mode["name"] for mode in found["modes"]} == set(modes.split(","))
    assert found["recommendation"]["sentence"] in done.text
    assert (KIND == "cuda") == ("TRAIN.COMPILE auto compiles nothing here" in done.text)


def test_export(vitamp: Callable[..., Result], trained: Run, tmp_path: Path) -> None:
    for_onnx = all(map(find_spec, ("onnx", "onnxruntime", "onnxscript")))
    formats = ["torch", "safetensors", *["onnx"] * for_onnx]
    done = tool(vitamp, "export", trained.folder, "-to", ",".join(formats), "-out", tmp_path / "m")
    assert done.text.count("checked on ") == len(formats)
    assert len(list(tmp_path.glob("m.*"))) == len(formats)
