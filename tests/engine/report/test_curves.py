"""curves.png: can be drawn for any run, is never half written, and does not slow training down."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from engine.report import curves
from engine.report.curves import MOST_POINTS, Curves, draw_curves, title_of
from utils.config import Config
from vitamp.metrics import LOSS, TOP1, Metric

Drawn = dict[str, dict[str, list[tuple[float, float]]]]


def line(update: int, **fields: Any) -> dict[str, Any]:
    figures = {"loss": 1.0, "acc1": 50.0, "lr": 1e-3, "grad_norm": 1.0, "scale": 65536.0, "skipped": 0}
    perf = {"images_per_second": 100.0, "data_wait_percent": 7.0}
    return {"event": "train", "epoch": 1, "step": update, "update": update, **figures, **fields, "perf": perf}


def write(folder: Path, *lines: dict[str, Any]) -> None:
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    (folder / "metrics.jsonl").write_text(text + '{"event": "train", "upd')  # being written just now


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Drawn]:
    """Draw, and return the content of the picture: axis -> curve -> points."""
    found: Drawn = {}
    save = Figure.savefig

    def look(figure: Figure, *args: Any, **words: Any) -> None:
        found["title"] = {figure.get_suptitle(): []}
        for axes in figure.axes:
            assert isinstance(axes, Axes)
            found[axes.get_ylabel()] = {
                str(one.get_label()): [(float(x), float(y)) for x, y in one.get_xydata().tolist()]  # pyright: ignore
                for one in axes.lines
            }
        save(figure, *args, **words)

    monkeypatch.setattr(Figure, "savefig", look)

    def call(title: str = "title", by: Metric = TOP1) -> Drawn:
        found.clear()
        assert draw_curves(tmp_path, title, by) == tmp_path / "curves.png"
        with Image.open(tmp_path / "curves.png") as picture:
            picture.load()  # to its last byte
        assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]
        return found

    return call


def test_curves_show_training_and_validation(drawn: Callable[..., Drawn], tmp_path: Path) -> None:
    val = {"event": "val", "epoch": 1, "update": 20, "loss": 0.5, "acc1": 80.0, "ema_acc1": 90.0, "perf": {}}
    val |= {f"{which}own{n}": 80.0 + n for which in ("", "ema_") for n in range(5)}
    write(tmp_path, line(10, loss=2.0), line(15, loss=None), line(20), val)
    found = drawn("digits, AMP fp16, best top-1 80 %")
    assert found["title"] == {"digits, AMP fp16, best top-1 80 %": []}
    assert found["loss"] == {"training": [(10, 2.0), (20, 1.0)], "validation": [(20, 0.5)]}
    assert found["top-1 accuracy (%)"]["validation of the EMA"] == [(20, 90.0)]
    assert found["top-1 accuracy (%)"]["validation, EMA own4"] == [(20, 84.0)]
    assert found["images/s"] == {"images/s": [(10, 100), (15, 100), (20, 100)]}


def test_the_best_validation_is_that_of_the_deciding_metric(drawn: Callable[..., Drawn], tmp_path: Path) -> None:
    figures = ((10, 0.5, 80.0), (20, 0.4, 79.0))  # the lowest loss is not of the highest accuracy
    vals = [
        {"event": "val", "epoch": 1, "update": n, "loss": loss, "acc1": top, "perf": {}} for n, loss, top in figures
    ]
    write(tmp_path, line(10), line(20), *vals)
    assert drawn()["loss"]["best validation"] == [(10, 0.5)]
    assert drawn("title", LOSS)["loss"]["best validation"] == [(20, 0.4)]
    assert drawn("title", LOSS)["top-1 accuracy (%)"]["best validation"] == [(20, 79.0)]


def test_curves_show_epoch_means_and_validations_over_epochs(drawn: Callable[..., Drawn], tmp_path: Path) -> None:
    def ended(epoch: int, loss: float, acc1: float) -> list[dict[str, Any]]:
        at = {"epoch": epoch, "update": 20 * epoch, "perf": {}}
        ema = {"ema_loss": loss / 4, "ema_acc1": acc1 + 1.0}
        return [
            {"event": "epoch", **at, "loss": loss, "acc1": acc1},
            {"event": "val", **at, "loss": loss / 2, "acc1": acc1 + 2.0, **(ema if epoch < 2 else {"ema_acc1": 99.0})},
        ]

    resumed = {"event": "run", "epoch": 2, "what": "resume", "update": 30, "perf": {}}
    write(tmp_path, line(10), line(20), *ended(1, 2.0, 50.0), resumed, line(40, loss=0.1), *ended(2, 1.0, 60.0))
    found = drawn()
    assert found["top-1 accuracy (%)"]["training, means of epochs"] == [(1, 50), (2, 60)]
    assert found["top-1 accuracy (%)"]["validation"] == [(1, 52), (2, 62)]
    assert found["top-1 accuracy (%)"]["validation of the EMA"] == [(1, 51), (2, 99)]
    assert found["top-1 accuracy (%)"]["best validation"] == [(2, 99)]
    assert {x for x, _ in found["loss"]["resumed"]} == {1.5}
    assert found["loss"]["training, means of epochs"] == [(1, 2), (2, 1)], "means of epochs, no single updates"
    assert [x for x, _ in found["learning rate"]["learning rate"]] == [0.5, 1, 2]


@pytest.mark.parametrize(
    ("amp", "tag", "said"),
    [(True, None, "tiny on digits, AMP bf16"), (False, "night", "night: tiny on digits, bf16, no AMP")],
)
def test_title_names_model_data_and_precision(amp: bool, tag: str | None, said: str) -> None:
    config = Config(TAG=tag, MODEL={"NAME": "tiny"}, DATA={"DATASET": "digits"})  # pyright: ignore[reportArgumentType]
    assert title_of(config, "bf16", amp) == said


def test_skipped_updates_are_marked(drawn: Callable[..., Drawn], tmp_path: Path) -> None:
    skipped = (0, 1, 1, 3)
    resumed = {"event": "run", "epoch": 1, "what": "resume", "update": 0, "perf": {}}
    for before, first in ((0, []), (7, [resumed])):  # of the run that it branched off from
        lines = [line(10 * n + 10, skipped=before + k, scale=2.0 ** (16 - n)) for n, k in enumerate(skipped)]
        write(tmp_path, *first, *lines)
        assert drawn()["loss scale"]["updates skipped"] == [(20, 2.0**15), (40, 2.0**13)]


@pytest.mark.parametrize("scale", [1.0, None])
def test_data_wait_is_drawn_without_loss_scaling(
    drawn: Callable[..., Drawn], tmp_path: Path, scale: float | None
) -> None:
    write(tmp_path, line(10, scale=scale), line(20, scale=scale))
    found = drawn()
    assert "loss scale" not in found
    assert found["time (%)"] == {"waiting for data": [(10, 7.0), (20, 7.0)]}


def test_long_curves_are_thinned_and_keep_the_last_point(drawn: Callable[..., Drawn], tmp_path: Path) -> None:
    count = 3 * MOST_POINTS + 7
    write(tmp_path, *(line(n) for n in range(1, count + 1)))
    shown = drawn()["loss"]["training"]
    assert len(shown) <= MOST_POINTS + 1
    assert (shown[0][0], shown[-1][0]) == (1, count)


def test_curves_with_one_point_and_with_none(drawn: Callable[..., Drawn], tmp_path: Path) -> None:
    assert draw_curves(tmp_path, "") is None
    write(tmp_path)
    assert draw_curves(tmp_path, "") is None
    write(tmp_path, line(1))
    assert drawn()["loss"]["training"] == [(1, 1.0)]


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_drawing_keeps_the_old_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, trouble: BaseException
) -> None:
    write(tmp_path, line(1))
    draw_curves(tmp_path, "")
    before = (tmp_path / "curves.png").read_bytes()

    def fail(*_paths: object) -> None:
        raise trouble

    monkeypatch.setattr(os, "replace", fail)
    if isinstance(trouble, OSError):
        for _ in range(2):
            Curves(tmp_path, "acc1").draw("", force=True)
        (warning,) = said.messages
        assert "curves.png cannot be drawn (OSError: [Errno 28] No space left on device" in warning
    else:
        with pytest.raises(KeyboardInterrupt):
            draw_curves(tmp_path, "")
    assert (tmp_path / "curves.png").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_short_epochs_are_not_all_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = 0.0, []

    def drawing(*_: object) -> None:
        nonlocal now
        made.append(now)
        now += 0.6

    monkeypatch.setattr(curves, "perf_counter", lambda: now)
    monkeypatch.setattr(curves, "draw_curves", drawing)
    kept = Curves(tmp_path, "acc1")
    for _ in range(100):
        now += 1.0
        kept.draw("")
    assert made[0] >= 0.5 / 0.03, "the first one, too"
    assert 4 <= len(made) <= 6, "0.6 s each in 100 s: 3 %"
    before = len(made)
    now += 1.0
    kept.draw("", force=True)
    assert len(made) == before + 1, "the last one always"
    now += 3600
    kept.draw("")
    assert len(made) == before + 2, "a long epoch has its own"
