"""benchmark_data.py: measurements, time limit and verdict; synthetic images are like photographs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.program import Result
from tools.benchmark_data.command import main
from tools.benchmark_data.measure import OURS, TIMM, alternating, verdict
from tools.common.made_images import made_jpeg, make_images
from tools.common.turns import Budget, ratio

SCRIPT = "scripts/benchmark_data.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any], Path]:
    """A complete benchmark, which several tests read."""
    from tests.program import run_program

    root = tmp_path_factory.mktemp("measured")
    words = ["-made", 24, "-images", 16, "-rounds", 2, "-num_workers", "0,1", "-appetite", 5, "-image_size", 64]
    files = ["-json", root / "speed.json"]
    done = run_program(
        *words,
        *files,
        f"DATA.CACHE={root}/cache",
        "TRAIN.RAND_AUGMENT=true",
        script=SCRIPT,
        timeout=400,
        streams=root,
    )
    assert done.code == 0, done.text
    return done, json.loads((root / "speed.json").read_text(encoding="utf-8")), root


@pytest.mark.slow
def test_all_parts_are_measured(measured: tuple[Result, dict[str, Any], Path]) -> None:
    done, results, _ = measured
    for part in ("train", "val"):
        rows = results[part]
        assert list(rows) == [OURS, TIMM]
        for name, row in rows.items():
            assert len(row["rounds"]) == 2
            assert min(row["rounds"]) <= row["images_per_second"] <= max(row["rounds"])
            assert set(row["to"]) == {TIMM} - {name}
            assert name in done.out
    assert list(results["loader"]) == ["0", "1"]
    assert all(row[OURS] > 0 and row["to"]["median"] > 0 for row in results["loader"].values())
    assert not results["cut"]


@pytest.mark.slow
def test_json_file_has_command_machine_and_versions(measured: tuple[Result, dict[str, Any], Path]) -> None:
    _, results, _ = measured
    assert results["command"].startswith("python scripts/benchmark_data.py -made 24")
    assert {"torch", "timm", "pillow", "simplejpeg"} < set(results["versions"])
    assert results["images"]["count"] == 24
    assert results["images"]["jpeg"] == 1
    assert results["images_a_round"] == 16
    assert "core" in results["machine"]


@pytest.mark.slow
def test_verdict_is_printed(measured: tuple[Result, dict[str, Any], Path]) -> None:
    done, results, _ = measured
    assert "The model trains on 5 images/s" in done.out
    assert "loading is not the bottleneck" in done.out
    assert results["verdict"] in done.out


def test_images_of_the_user_are_measured(imagenet: Path, tmp_path: Path, vitamp: Callable[..., Result]) -> None:
    where = ("-data_path", imagenet, f"DATA.CACHE={tmp_path}", "-image_size", 32)
    done = vitamp(
        *where, "-rounds", 1, "-images", 16, "-parts", "train", "-json", "s.json", script=SCRIPT, cwd=tmp_path
    )
    assert done.code == 0, done.text
    results = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert results["images"] | {"kilobytes": 0} == {"count": 24, "kilobytes": 0, "width": 40, "height": 36, "jpeg": 1}
    assert "val" not in results


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-size", "huge"], ["-size huge", "small or large"]),
        (["-rounds", "0"], ["-rounds 0", "from 1"]),
        (["-num_workers", "0,x"], ["-num_workers 0,x", "separated by commas"]),
        (["-parts", "train,vall"], ["'vall'", "Did you mean val"]),
        (["-appetite", "much"], ["-appetite much", "above 0"]),
        (["-budget_min", "-1"], ["-budget_min", "above 0"]),
        (["-json", "speed.txt"], ["-json speed.txt", "speed.json"]),
        (["-made", "5", "-data_path", "here"], ["-made", "here", "one or the other"]),
        (["-dataset", "digits"], ["digits", "are in memory"]),
        (["-dataset", "imagefolder", "-data_path", "/nowhere"], ["/nowhere", "does not exist"]),
    ],
    ids=lambda value: str(value[0]),
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]) -> None:
    assert main(words) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in said), output


def test_contenders_alternate_over_the_same_samples() -> None:
    seen: list[tuple[str, int, list[int]]] = []

    def work(name: str) -> Callable[[int, list[int]], object]:
        return lambda nth, samples: seen.append((name, nth, samples))

    rates = alternating({name: work(name) for name in "ab"}, np.arange(10), rounds=3, images=4, budget=Budget(60))
    assert all(len(rate.wall) == len(rate.cpu) == 3 for rate in rates.values())
    rounds = seen[2:]  # after one warm-up call each
    assert [name for name, _, _ in rounds] == ["a", "b", "b", "a", "a", "b"]
    for name in "ab":
        assert [samples for who, _, samples in rounds if who == name] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_no_round_starts_that_would_exceed_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tools.common.turns.time.monotonic", lambda: now[0])

    def work(nth: int, _: list[int]) -> None:
        now[0] += 10.0 if nth > 1 else 0.0

    budget = Budget(25)
    rates = alternating({"a": work}, np.arange(4), rounds=5, images=2, budget=budget)
    assert len(rates["a"].wall) == 2
    assert now[0] == 20
    assert budget.cut


def test_ratios_are_taken_within_rounds() -> None:
    results = ratio([20.0, 10.0, 40.0], [10.0, 5.0, 10.0])
    assert results is not None
    assert (results.median, results.least, results.most) == (2, 2, 4)
    assert ratio([], []) is None


@pytest.mark.parametrize(
    ("appetite", "said"),
    [
        (100, ["not the bottleneck", "1 workers are enough"]),
        (700, ["not the bottleneck", "2 workers are enough"]),
        (1600, ["is the bottleneck", "50 % of its time", "About 5 cores", "after packing"]),
    ],
)
def test_verdict_names_the_bottleneck(appetite: float, said: list[str]) -> None:
    results = {
        "loader": {"1": {OURS: 400.0, TIMM: 200.0}, "2": {OURS: 800.0, TIMM: 400.0}},
        "train": {OURS: {"images_per_second": 400.0}},
    }
    text = verdict(results, appetite)
    assert all(word in text for word in said), text


@pytest.mark.slow
def test_made_images_are_deterministic_and_like_photographs(tmp_path: Path) -> None:
    root = make_images(tmp_path, 24, processes=2)
    files = sorted((root / "train").rglob("*.jpg"))
    assert len(files) == 24
    assert {file.name: file.read_bytes() for file in files}["000007.jpg"] == made_jpeg("small", 0, 7)
    sizes = [file.stat().st_size for file in files]
    assert 70_000 < np.mean(sizes) < 130_000
    with Image.open(io.BytesIO(files[0].read_bytes())) as image:
        assert image.mode == "RGB"
        assert image.layer[1][1:3] == (1, 1)  # type: ignore[attr-defined] - colour at half the resolution of light
        assert image.layer[0][1:3] == (2, 2)  # type: ignore[attr-defined]
    assert len({file.read_bytes() for file in files}) == 24
    files[3].unlink()
    kept = files[4].stat().st_mtime_ns
    assert make_images(tmp_path, 24, processes=1) == root
    assert files[3].exists()
    assert files[4].stat().st_mtime_ns == kept
