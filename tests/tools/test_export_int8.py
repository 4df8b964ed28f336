"""export.py -to onnx -int8: what it costs is what onnxruntime shows, and layers that hurt stay in fp32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from engine.trained.model import load_trained
from tests.predicted import validation_predictions
from tests.program import Result
from tools.export import command, int8

Say = Callable[..., Result]


@pytest.fixture
def say(in_process: Callable[[Any], Say]) -> Say:
    return in_process(command.main)


def quantised(file: Path) -> list[str]:
    """Operators whose input is of 8 bits."""
    graph = onnx.load(str(file)).graph
    made = {output: node.op_type for node in graph.node for output in node.output}
    layers = [node for node in graph.node if node.op_type in int8.OPERATORS]
    return [node.op_type for node in layers if made.get(node.input[0]) == "DequantizeLinear"]


def test_the_verdict_is_what_onnxruntime_shows(say: Say, digits_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    said = say(digits_run, "-to", "onnx", "-int8", "-out", file).expect(0).text
    trained = load_trained(digits_run, device="cpu", amp="off")
    found = validation_predictions(trained)
    session = onnxruntime.InferenceSession(str(file))
    pixels = found.dataset.__getitems__([(0, index) for index in found.indices.tolist()]).images
    guesses = np.asarray(session.run(["logits"], {"images": trained.inputs(pixels).numpy()})[0]).argmax(1)
    model, labels = found.logits.argmax(1).numpy(), found.labels.numpy()
    changed = int((model != guesses).sum())
    cost = 100 * ((model == labels).mean() - (guesses == labels).mean())
    assert f"int8 {'gains' if cost < 0 else 'costs'} {abs(cost):.1f} points of top-1 (95 % interval " in said
    about = {one.key: json.loads(one.value) for one in onnx.load(str(file)).metadata_props}
    assert about["dtype"] == "int8"
    assert re.search(rf"{changed} answers? of {len(labels)} changed on images of the run's validation split", said)
    assert "MatMul" in quantised(file)
    assert "Gemm" in quantised(file)
    assert re.search(r"\d\.\d times smaller, [\d.]+ times as fast an image at a time", said)
    assert "calibrated on 256 images of the run's training split" in said


def test_named_layers_stay_in_fp32(say: Say, digits_run: Path, tmp_path: Path) -> None:
    every, some = tmp_path / "every.onnx", tmp_path / "some.onnx"
    say(digits_run, "-to", "onnx", "-int8", "-out", every).expect(0)
    said = say(digits_run, "-to", "onnx", "-int8", "-keep", "head,blocks.0.mlp", "-out", some).expect(0).text
    assert "left in fp32: blocks.0.mlp.fc1, blocks.0.mlp.fc2, head (-keep)" in said
    assert len(quantised(every)) - len(quantised(some)) == 3
    assert "Gemm" not in quantised(some)
    refused = say(digits_run, "-to", "onnx", "-int8", "-keep", "bloks", "-out", tmp_path / "x.onnx").expect(2).text
    assert "-keep bloks: no layer's name begins so; they are in blocks.0, " in refused


def test_layers_that_hurt_stay_in_fp32(
    say: Say, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block's weights are so rough in the file that its int8 version is wrong."""
    write = int8._write

    def rough(exact: Path, file: Path, ranges: Any, nodes: list[str]) -> None:
        write(exact, file, ranges, nodes)
        model = onnx.load(str(file))
        if any(node.op_type == "Gemm" and node.name in nodes for node in model.graph.node):
            for one in model.graph.initializer:
                if one.name.endswith("head.weight_quantized"):
                    one.raw_data = bytes(len(one.raw_data))
            onnx.save(model, str(file))

    monkeypatch.setattr(int8, "_write", rough)
    said = say(digits_run, "-to", "onnx", "-int8", "-out", tmp_path / "model.onnx").expect(0).text
    assert "left in fp32: head (in 8 bits they change the outputs most)" in said
    monkeypatch.setattr(int8, "MOST_ERROR", 0.0)
    failed = say(digits_run, "-to", "onnx", "-int8", "-out", tmp_path / "none.onnx").expect(1).text
    assert "no layer can be in 8 bits without changing the outputs" in failed
    assert not (tmp_path / "none.onnx").exists()


@pytest.mark.parametrize(
    "words", [("-to", "torch"), ("-to", "onnx", "-with_resize"), ("-to", "onnx", "-dtype", "fp16")]
)
def test_int8_goes_with_onnx_alone(say: Say, digits_run: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    said = say(digits_run, *words, "-int8", "-out", tmp_path / "model.onnx").expect(2).text
    assert "-int8: goes with -to onnx alone, in fp32 and without -with_resize" in said


@pytest.mark.parametrize(("count", "changes"), [(200, 0.02), (200, 0.1), (2000, 0.01)])
def test_the_interval_covers_the_true_cost(count: int, changes: float) -> None:
    draw, missed = np.random.default_rng(0), 0
    for _ in range(1000):
        drawn = draw.random(count)
        first = np.ones(count, bool)
        lost = drawn < changes * 0.7  # right to wrong
        won = (drawn >= changes * 0.7) & (drawn < changes)
        first[won] = False
        second = first ^ lost ^ won
        _, low, high = int8.paired_interval(first, second)
        missed += not low <= changes * 0.4 <= high
    assert missed <= 65, "at most 5 % and its own noise"
