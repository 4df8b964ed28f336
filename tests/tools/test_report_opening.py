"""First sentences of a report of one run, from its files: what was learnt, how well, and what to doubt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tools.made_runs import make_run
from tools.common.evaluation import OneLabel
from tools.common.report_page import evaluations
from tools.common.report_page.runs import Headline, opening_of, read_runs
from utils.text import wilson
from vitamp.metrics import BALANCED, TOP1


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", best=90.0)
    about = json.loads((folder / "run.json").read_text())
    changed = about | {"samples": {"train": 100, "val": 400}, "largest_class_percent": 60.0}
    (folder / "run.json").write_text(json.dumps(changed))
    return folder


def said(run: Path, headline: Headline | None = None) -> str:
    found = opening_of(read_runs([run])[0], headline)
    sentence = "".join(found.get(part, "") for part in ("before", "figure", "after"))
    return " ".join([found["learnt"], sentence, *found["remarks"]])


def change(run: Path, name: str, edit: Callable[[str], str]) -> None:
    (run / name).write_text(edit((run / name).read_text()))


def test_run_without_predictions_is_judged_by_its_validation(run: Path) -> None:
    text = said(run)
    assert "on 100 images of digits" in text
    assert "accuracy (top-1) is 90.00 % on 400 validation images (95 % interval 86.67 to 92.57 %); always" in text
    assert "guessing the largest class gives 60.00 %." in text
    assert "not finished" not in text
    change(run, "config.yaml", lambda _: "{ no end")
    assert said(run).startswith("run was trained on 100 images.")


def test_figure_that_guessing_also_reaches_is_named_so(run: Path) -> None:
    change(run, "run.json", lambda text: text.replace("60.0", "88.0"))
    assert "; always guessing the largest class gives 88.00 %, so it may be no better than that." in said(run)
    change(run, "run.json", lambda text: text.replace("88.0", "90.0"))
    assert ", which is no better than always guessing the largest class (90.00 %)." in said(run)
    change(run, "run.json", lambda text: text.replace("90.0", "95.0"))
    assert ", which is no better than always guessing the largest class (95.00 %)." in said(run)


def test_a_metric_that_counts_no_images_has_no_interval(run: Path) -> None:
    change(run, "metrics.jsonl", lambda text: text.replace('"acc1"', '"macro_f1"'))
    change(run, "config.yaml", lambda text: f"{text}SAVE_BEST_BY: macro_f1\n")
    assert "Its macro F1 is 90.00 % on 400 validation images." in said(run)


def test_unfinished_run_says_so(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    change(run, "metrics.jsonl", lambda _: "".join(lines[:10]))
    assert "The run has not finished (2 of 4 epochs), so this may still change." in said(run)
    change(run, "metrics.jsonl", lambda _: "".join(lines[:2]))
    assert "The run has not finished (0 of 4 epochs); no validation yet." in said(run)
    change(run, "metrics.jsonl", lambda _: "")
    assert "The run has no metrics yet." in said(run)


def test_copies_of_training_images_are_named(run: Path) -> None:
    for found, compared, words in (
        (23, 400, "23 validation images have a copy in training: expect less on new images."),
        (1, 300, "1 validation image has a copy in training: expect less on new images."),
        (0, 400, "No validation image is a copy of a training image."),
    ):
        data = {"images": {"validation": 400}, "copies": {"found": found, "compared": compared}}
        (run / "data.json").write_text(json.dumps(data))
        assert words in said(run)
    (run / "data.json").write_text(json.dumps({"images": {"validation": 400}, "copies": {"found": 0, "compared": 9}}))
    assert "copy" not in said(run), "most were not compared"


def test_few_images_are_named(run: Path) -> None:
    few = Headline(TOP1, 90.0, wilson(90.0, 10), 10, "test image", None, "", ["A remark."])
    assert "on 10 test images (95 % interval 59.58 to 98.21 %). A remark. 10 test images are few: the interval" in (
        text := said(run, few)
    )
    assert text.endswith("is wide.")
    assert "are few" not in said(run)


def test_confusion_and_classes_that_are_never_recognised_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of guesses for 8 images of class a, 4 of b, 1 of c."""
    labels = torch.tensor([0] * 8 + [1] * 4 + [2])
    trained: Any = SimpleNamespace(
        name_of=lambda label: "abc"[label], config=SimpleNamespace(MODEL=SimpleNamespace(NUM_CLASSES=3))
    )
    images: Any = SimpleNamespace(sample_labels=lambda: None)
    monkeypatch.setattr(evaluations, "split_of_run", lambda *_: images)
    monkeypatch.setattr(evaluations, "_pictured", lambda *_: {})

    def remarks(guesses: str) -> list[str]:
        logits = torch.eye(3)[["abc".index(letter) for letter in guesses]]
        monkeypatch.setattr(evaluations, "with_bar", lambda *_: [(logits, labels, torch.arange(13))])
        headline = evaluations._one_label(trained, images, "validation image", BALANCED)["headline"]
        assert headline.value == OneLabel.of(trained, [(logits, labels)]).values[BALANCED]
        assert headline.guess == pytest.approx(100 / 3)
        return list(headline.remarks)

    assert remarks("aaaaaaaabbbbc") == []
    assert remarks("aaaaaaabbbbbc") == [], "a single image"
    assert remarks("aaaaabbbbbbba") == [
        "Most frequent mistake: a is taken for b (3 of 8 images).",
        "1 class of 3 is never recognised: c.",
    ]
