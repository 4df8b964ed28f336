"""Which checkpoints a run keeps: the last, the best by a chosen figure, some for ever; and when it saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import Result, metrics
from vitamp.checkpoints import folder_name, read_index


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))


@pytest.mark.parametrize(("by", "better"), [("acc5", max), ("balanced_acc", max), ("loss", min)])
def test_the_best_by_another_figure(
    vitamp: Callable[..., Result], tiny: Path, tmp_path: Path, by: str, better: Callable[..., float]
) -> None:
    given = (f"SAVE_BEST_BY={by}", "TRAIN.NUM_EPOCHS=5", "TRAIN.MODEL_EMA=true", "TRAIN.BASE_LR=0.3", "KEEP_LAST=1")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *given, "TRAIN.GRAD_CLIP=null")
    assert done.code == 0, done.text
    figures = {line["update"]: better(line[by], line[f"ema_{by}"]) for line in metrics(tmp_path / "run", "val")}
    best = better(figures.values())
    index = read_index(tmp_path / "run" / "checkpoints")
    assert index["best"] == folder_name(min(update for update, figure in figures.items() if figure == best))
    assert set(names(tmp_path / "run" / "checkpoints")) == {index["best"], index["last"]}
    words = {
        "acc5": f"top-5 {best:.2f} %",
        "balanced_acc": f"balanced accuracy {best:.2f} %",
        "loss": f"loss {best:.4f}",
    }
    assert words[by] in done.out.splitlines()[-1]


def test_another_figure_on_resuming_begins_anew(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    words = ("-cfg", tiny, "-output", tmp_path / "run")
    assert vitamp(*words, "TRAIN.NUM_EPOCHS=1").code == 0
    done = vitamp(*words, "-resume", "auto", "SAVE_BEST_BY=loss")
    assert done.code == 0, done.text
    assert "SAVE_BEST_BY is now loss: the best so far, top-1" in done.out
    assert "Done: best loss" in done.out


def test_some_epochs_are_kept_for_ever(vitamp: Callable[..., Result], tiny: Path, tmp_path: Path) -> None:
    words = ("TRAIN.NUM_EPOCHS=7", "KEEP_EVERY=2", "KEEP_LAST=1", "SAVE_FREQ=3", "VALIDATE_FREQ=100")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words)
    assert done.code == 0, done.text
    assert names(tmp_path / "run" / "checkpoints") == [folder_name(44 * epoch) for epoch in (2, 4, 6, 7)]
