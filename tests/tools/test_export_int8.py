"""export.py -to onnx -int8: what it costs is what onnxruntime shows, and layers that hurt stay in fp32."""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from engine.task.several import SeveralLabels
from engine.trained.model import load_trained, split_of_run
from tests.predicted import validation_predictions
from tests.program import Result, change_settings
from tests.tools.browser import View, views_of
from tools.export import command, int8
from tools.export.check import compare
from tools.export.formats import CheckImages, times_as_fast
from utils.errors import TrainingError
from utils.statistics.paired import agresti_min

Say = Callable[..., Result]


@pytest.fixture
def say(in_process: Callable[[Any], Say]) -> Say:
    return in_process(command.main)


@pytest.fixture(autouse=True)
def more_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow more: how much a model this small loses in 8 bits depends on the last bits of its training."""
    monkeypatch.setattr(int8, "MOST_ERROR", 0.3)


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
    assert f"{100 * (model == labels).mean():.2f} to {100 * (guesses == labels).mean():.2f} %; " in said
    assert f"checked on {len(labels)} images of the run's validation split: largest difference " in said
    first = int((model != guesses).argmax())
    assert (
        f" {changed} answers changed: {found.name(first)} ({model[first]} to the model, {guesses[first]} to the file), "
        in said
    )
    assert "MatMul" in quantised(file)
    assert "Gemm" in quantised(file)
    smaller = re.search(r"(\d\.\d) times smaller, [\d.]+ times as fast an image at a time", said)
    assert smaller is not None
    assert float(smaller[1]) > 1
    assert "calibrated on 256 images of the run's training split" in said
    training = split_of_run(trained, "train").__getitems__([(0, 0)]).images
    assert torch.equal(int8.calibration_images(trained).pixels[:1], training)
    shown = tmp_path / "model.onnx.changed.html"
    assert f"Look at them: {shown}\n" in said
    lost, won = (model == labels) & (guesses != labels), (model != labels) & (guesses == labels)
    for view in views_of(shown, tmp_path, [View(400, False), View(1200, True)]):
        assert not view.complaints
        assert view.page_width <= view.width
        assert view.text.count("class\tmodel\tfile") == changed
        assert f"{changed}\nanswers changed\n{lost.sum()}\nof them right before\n{won.sum()}\n" in view.text
        chance = 100 * float(found.logits[first].softmax(0).max())
        row = rf"\n{model[first]}( ✓)?\t{chance:.1f}\xa0%\t[^\n]*(\n\d[^\n]*)*\n{found.name(first)}\n"
        assert re.search(row, view.text)


def test_named_layers_stay_in_fp32(say: Say, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every, some = tmp_path / "every.onnx", tmp_path / "some.onnx"
    speeds, timed = [1.0, 3.0], []
    monkeypatch.setattr(int8, "times_as_fast", lambda *both: timed.append([*map(next, both)]) or speeds.pop())
    said = say(digits_run, "-to", "onnx", "-int8", "-with_preprocess", "-out", every).expect(0).text
    assert "3 times as fast an image at a time (this CPU, 1 thread)\n" in said
    pixels = int8.calibration_images(load_trained(digits_run, device="cpu", amp="off")).pixels[:1].numpy()
    answer = onnxruntime.InferenceSession(every).run(None, {"images": pixels})[0]
    assert np.array_equal(np.asarray(answer), timed[0][1])
    said = say(digits_run, "-to", "onnx", "-int8", "-keep", "head,blocks.0.mlp", "-out", some).expect(0).text
    assert "1 times as fast an image at a time (this CPU, 1 thread): here fp32 serves as well" in said
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
    monkeypatch.setattr(int8, "times_as_fast", lambda *_: 1.0)
    monkeypatch.setattr(int8, "MOST_ERROR", 0.0)
    named = say(digits_run, "-to", "onnx", "-int8", "-keep", "blocks", "-out", tmp_path / "named.onnx").expect(0).text
    assert "left in fp32: blocks.0.attn.proj, blocks.0.attn.qkv, blocks.0.mlp.fc1, blocks.0.mlp.fc2 (-keep)" in named
    failed = say(digits_run, "-to", "onnx", "-int8", "-out", tmp_path / "none.onnx").expect(1).text
    assert "no layer can be in 8 bits without changing the outputs" in failed
    monkeypatch.setattr(int8, "QDQQuantizer", lambda *_, **__: int("none"))
    failed = say(digits_run, "-to", "onnx", "-int8", "-out", tmp_path / "none.onnx").expect(1).text
    assert "-int8: onnxruntime cannot quantise the model: invalid literal for int()" in failed
    assert not (tmp_path / "none.onnx").exists()


def test_without_training_images_nothing_is_calibrated(say: Say, digits_run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(digits_run, moved)
    change_settings(moved, {"DATA.DATASET": "imagefolder", "DATA.DATA_PATH": str(tmp_path / "gone")})
    said = say(moved, "-to", "onnx", "-int8", "-out", tmp_path / "model.onnx").expect(2).text
    assert "-int8 calibrates on the run's training images, which cannot be read: DATA.DATA_PATH" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("torch -int8", "-int8: goes with -to onnx alone, in fp32 and without -with_resize"),
        ("onnx -int8 -with_resize", "-int8: goes with -to onnx alone, in fp32 and without -with_resize"),
        ("onnx -int8 -dtype fp16", "-int8: goes with -to onnx alone, in fp32 and without -with_resize"),
        ("onnx -int8 -tolerance 0.1", "-tolerance 0.1: "),
        ("onnx -keep head", "-keep head: works only with -int8"),
    ],
)
def test_int8_goes_with_onnx_alone(say: Say, digits_run: Path, tmp_path: Path, words: str, why: str) -> None:
    assert why in say(digits_run, "-to", *words.split(), "-out", tmp_path / "model.onnx").expect(2).text


def work(steps: int) -> Iterator[int]:
    while True:
        yield sum(range(steps))


def test_speeds_are_compared_in_turns() -> None:
    assert times_as_fast(work(200_000), work(20_000)) == pytest.approx(10, rel=0.5)


def test_several_labels_are_compared_by_their_thresholds() -> None:
    """By the largest output, the second answer would have changed."""
    trained = SimpleNamespace(task=SeveralLabels(2), thresholds=lambda: ([0.5, 0.9], None), name_of=str)
    images = CheckImages(torch.zeros(2, 1, 8, 8), ["a", "b"], "of a test", labels=None)
    export: Any = SimpleNamespace(trained=trained, images=images, dtype="int8")
    expected, found = torch.tensor([[1.0, 3.0], [1.0, 0.9]]), torch.tensor([[1.0, 2.0], [1.0, 1.1]])
    said = compare(export, expected, found, math.inf)
    assert said[0].endswith(" largest difference 3.3e-01 x the largest output, 1 answer changed: a")
    assert said[1:] == ["apply a sigmoid to the logits"]
    with pytest.raises(TrainingError, match=r"b, class 1: nan instead of 0\.9"):
        compare(export, expected, found * torch.tensor([[1.0, 1.0], [1.0, torch.nan]]), math.inf)


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
        _, low, high = agresti_min(first, second)
        missed += not low <= changes * 0.4 <= high
    assert missed <= 65, "at most 5 % and its own noise"
