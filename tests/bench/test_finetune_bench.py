"""bench/finetune_bench.py without training: how it chooses learning rates, divides images, pairs and resumes runs."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import finetune_bench
from bench.finetune_bench import GRID, best_rate, compared, lay_out, next_rate, over_backbones, over_sets
from utils.statistics.differences import of_different_images


def try_rates(top1: Callable[[float], float]) -> dict[float, float]:
    tried = dict[float, float]()
    rate = next_rate(tried, GRID)
    while rate is not None:
        tried[rate] = top1(rate)
        rate = next_rate(tried, GRID)
    return tried


@pytest.mark.parametrize(
    ("peak", "tried"),
    [
        pytest.param(1e-3, GRID, id="inside"),
        pytest.param(4e-3, (*GRID, 8e-3), id="at the upper end"),
        pytest.param(1.6e-2, (*GRID, 8e-3, 1.6e-2, 3.2e-2), id="above"),
        pytest.param(1.25e-4, (6.25e-5, 1.25e-4, *GRID), id="below"),
    ],
)
def test_grid_of_rates_is_extended_until_the_best_is_inside(peak: float, tried: tuple[float, ...]) -> None:
    found = try_rates(lambda rate: 90 - 10 * max(rate / peak, peak / rate))
    assert sorted(found) == pytest.approx(tried)
    assert best_rate(found) == pytest.approx(peak)


def test_equal_rates_need_no_more_of_them_and_the_middle_is_chosen() -> None:
    found = try_rates(lambda rate: 99.0 if rate < 8e-3 else 10.0)
    assert sorted(found) == list(GRID)
    assert best_rate(found) == 1e-3


IMAGES = 200
LABELS = [0] * IMAGES


def row(draw: int, right: int, first: int = 0, **more: Any) -> dict[str, Any]:
    """A run that predicts `right` images right, beginning with image `first`."""
    guesses = ["1"] * IMAGES
    guesses[first : first + right] = ["0"] * right
    return {"draw": draw, "guesses": " ".join(guesses), "lr": 1e-3, "cpu_seconds": 2.0} | more


def test_difference_is_paired_by_image_and_draw() -> None:
    ours = [row(1, 170), row(2, 190)]
    theirs = [row(2, 180), row(1, 168)]
    table = compared(ours, theirs, LABELS)
    assert (table["vitamp"], table["timm"], table["difference"]) == (90.0, 87.0, 3.0)
    # Differences of 1 and 5 points: Student's quantile with one degree of freedom is 12.71, the standard error 2.
    assert table["reach_of_draws"] == pytest.approx(25.41, abs=0.01)
    low, high = of_different_images((90.0, 87.0), IMAGES)
    assert table["reach_of_images"] < (high - low) / 4, "most images are predicted alike"
    assert table["reach_of_images"] < table["reach"]


def test_images_that_differ_widen_the_interval_of_images_alone() -> None:
    agreeing = compared([row(1, 160)], [row(1, 160)], LABELS)
    differing = compared([row(1, 160)], [row(1, 160, first=40)], LABELS)
    assert agreeing["difference"] == differing["difference"] == 0
    # 40 images lost and 40 won of 200: a standard error of sqrt(80) / 200
    assert differing["reach_of_images"] == pytest.approx(1.96 * 80**0.5 / 2, abs=0.3)
    assert 0 < agreeing["reach_of_images"] < differing["reach_of_images"] / 4
    assert agreeing["reach_of_draws"] is agreeing["reach"] is None, "one draw says nothing of others"


def test_interval_of_sets_is_of_their_differences() -> None:
    tables = [{"set": f"set{value}", "difference": value, "reach_of_images": 3.0} for value in (1, 2, 3)]
    found = over_sets(tables)
    # Student's quantile with two degrees of freedom is 4.303, the standard error 1 / sqrt(3).
    assert found == {"sets": 3, "difference": 2.0, "reach_of_sets": 2.48, "reach_of_images": 1.73}
    assert over_sets(tables[:1])["reach_of_sets"] is None
    opposite = [table | {"difference": -table["difference"]} for table in tables]
    assert over_backbones([tables, opposite])["difference"] == 0


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Two sets of files, which are no images; class 10 is rare."""
    for name, number in (("large", 30), ("small", 15)):
        for place in ("pool", "aside"):
            for label, images in (("9", number), ("10", 2)):
                folder = tmp_path / "sets" / name / place / label
                folder.mkdir(parents=True)
                for image in range(images):
                    (folder / f"{image}.jpg").write_text(f"{name} {place} {label} {image}")
    return tmp_path / "sets"


def test_draw_0_never_sees_images_set_aside_and_each_draw_has_all_classes(sets: Path, tmp_path: Path) -> None:
    for draw in range(5):
        folder = tmp_path / f"draw{draw}"
        labels = lay_out(sets / "large", draw, 8, folder)
        train = sorted((folder / "train").rglob("*.jpg"))
        val = sorted((folder / "val").rglob("*.jpg"))
        assert {image.parent.name for image in train} == {"9", "10"}
        assert len(train) == 8
        assert [("10", "9").index(image.parent.name) for image in val] == labels
        assert all(" pool " in image.read_text() for image in train)
        expected = " aside " if draw else " pool "
        assert all(expected in image.read_text() for image in val)
        assert {image.read_text() for image in train}.isdisjoint(image.read_text() for image in val)
        assert (folder / "classes.txt").read_text().split() == ["10", "9"]


def test_bench_resumes_and_loses_no_run(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = list[dict[str, Any]]()
    ends_after = 4

    def train(asked: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
        if len(trained) == ends_after:
            raise KeyboardInterrupt
        trained.append(task)
        aside = asked.sets / task["set"] / "aside"
        guesses = " ".join("1" for _ in aside.rglob("*.jpg"))
        acc1 = 50 if task["line"] == "vitamp" else 80 - 1000 * abs(task["lr"] - 2e-3)
        if task["line"] == "bce" and task["set"] == "small":
            acc1 += 1
        return task | {"acc1": acc1, "guesses": guesses, "cpu_seconds": 9.0}

    found = tmp_path / "bench.json"
    command = ["bench", str(sets), "-timm", "timm", "-json", str(found), "-lines", "plain", "-images", "17"]
    monkeypatch.setattr(finetune_bench, "train", train)
    monkeypatch.setattr(sys, "argv", [*command, "-draws", "1"])
    with pytest.raises(KeyboardInterrupt):
        finetune_bench.main()
    assert len(json.loads(found.read_text())["runs"]) == ends_after

    ends_after = 100
    finetune_bench.main()
    # Of each set a run of vitamp, one of timm, and the five rates of draw 0
    assert len(trained) == 14
    monkeypatch.setattr(sys, "argv", [*command, "20", "-draws", "2"])
    finetune_bench.main()
    # The second draw of both sets, and 20 images, which only the large set has
    assert len(trained) == 14 + 4 + 9
    assert len({json.dumps(task) for task in trained}) == len(trained)
    evaluated = [task["lr"] for task in trained if task["draw"] and task["line"] == "plain"]
    assert set(evaluated) == {2e-3}

    held = json.loads(found.read_text())
    assert held["cpu_hours"] == round(27 * 9 / 3600, 2)
    names = [[one["set"] for one in table["sets"]] for table in held["tables"]]
    assert names == [["large", "small"]] * 2 + [["large"]] * 2
    assert held["tables"][0]["sets"][0]["draws"] == 2

    monkeypatch.setattr(sys, "argv", [*command, "-lines", "plain", "bce", "-draws", "1"])
    finetune_bench.main()
    tables = json.loads(found.read_text())["tables"]
    lines = [(table["images"], table["line"]) for table in tables]
    assert lines == [(17, "plain"), (17, "bce"), (17, "best in draw 0"), (20, "plain"), (20, "best in draw 0")]
    assert [one["line"] for one in tables[2]["sets"]] == ["plain", "bce"]
