"""report.py of several runs: the verdict, or why there is none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import TINY_DIGITS, Result, run_program

Vitamp = Callable[..., Result]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    (place / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    done = run_program("-cfg", place / "tiny.yaml", "-output", place / "a0", "TRAIN.MAX_UPDATES=3", streams=place)
    assert done.code == 0, done.text
    return place / "a0"


def copied(run: Path, name: str, top1: float, *changes: str) -> Path:
    """A copy of the run with another result, and 'BEFORE -> AFTER' in its config.yaml."""
    copy = run.with_name(name)
    shutil.copytree(run, copy, dirs_exist_ok=True)
    text = (copy / "config.yaml").read_text(encoding="utf-8")
    for before, after in (change.split(" -> ") for change in changes):
        text, changed = re.subn(rf"(?m)^( *){before}$", rf"\g<1>{after}", text)
        assert changed == 1
    (copy / "config.yaml").write_text(text, encoding="utf-8")
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines = [line | ({"acc1": top1} if line["event"] == "val" else {}) for line in lines]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def report(vitamp: Vitamp, place: Path, *runs: Path) -> tuple[str, str]:
    """What the tool says, and the page."""
    place.mkdir(exist_ok=True)
    done = vitamp(*runs, "-no_predictions", "-out", place / "report.html", script="scripts/report.py")
    assert done.code == 0, done.text
    return done.out, (place / "report.html").read_text(encoding="utf-8")


SEED = "SEED: 0 -> SEED: 1"
RATE = "BASE_LR: 0.002 -> BASE_LR: 0.004"


def test_one_seed_each_is_judged_by_the_number_of_images(vitamp: Vitamp, first: Path, tmp_path: Path) -> None:
    low, high = copied(first, "a", 90.0), copied(first, "b", 91.0, RATE)
    said, page = report(vitamp, tmp_path, low, high)
    words = "BASE_LR=0.004 against BASE_LR=0.002: accuracy after the last epoch 1.00 points higher, with one seed each."
    words += " On 360 images this is "
    assert f"{words}within chance: 95 % interval -3.3 to +5.4 points" in said
    assert words in page
    far = copied(first, "c", 99.0, RATE)
    assert "is more than the choice of images explains" in report(vitamp, tmp_path / "again", low, far)[0]


def test_several_seeds_get_the_verdict_of_a_comparison(vitamp: Vitamp, first: Path, tmp_path: Path) -> None:
    runs = [
        *(copied(first, f"a{seed}", 90.0 + seed, f"SEED: 0 -> SEED: {seed}") for seed in range(1, 4)),
        *(copied(first, f"b{seed}", 95.1 + seed, RATE, f"SEED: 0 -> SEED: {seed}") for seed in range(1, 4)),
    ]
    said, page = report(vitamp, tmp_path, *runs)
    assert "accuracy 97.1 ± 1.0 against 92.0 ± 1.0: 5.10 points higher" in said
    assert "(95 % interval, 3 seeds)" in page


def test_three_settings_are_drawn_and_the_best_two_compared_first(vitamp: Vitamp, first: Path, tmp_path: Path) -> None:
    rates = {"a": (0.002, 90.0), "b": (0.004, 94.0), "c": (0.008, 92.0)}
    runs = [
        copied(first, f"{name}-{seed}", top1 + seed, f"SEED: 0 -> SEED: {seed}", f"BASE_LR: 0.002 -> BASE_LR: {rate}")
        for name, (rate, top1) in rates.items()
        for seed in range(1, 4)
    ]
    said, page = report(vitamp, tmp_path, *runs)
    sentences = re.findall(r"(?m)BASE_LR=(\S+) against BASE_LR=(\S+): .*accuracy", said)
    assert sentences == [("0.004", "0.008"), ("0.004", "0.002"), ("0.008", "0.002")]
    rows = re.findall(r'aria-label="BASE_LR=(\S+): ([\d.]+) ± 1.00">(.*?)</span>', page)
    assert [(rate, mean, row.count('class="dot"')) for rate, mean, row in rows] == [
        *(("0.002", "92.00", 3), ("0.004", "96.00", 3), ("0.008", "94.00", 3))
    ]
    assert re.search(r'class="contender hue1 shade0 best"><span class="who">BASE_LR=0.004<', page)
    assert "mean and its 95 % interval over the seeds" in page
    assert "contenders" not in report(vitamp, tmp_path / "two", runs[0], runs[3])[1].partition("<body>")[2]
    page = report(vitamp, tmp_path / "one seed each", *runs[::3])[1]
    assert "95 % interval of one run on 360 images" in page


def test_reasons_for_no_verdict(vitamp: Vitamp, first: Path, tmp_path: Path) -> None:
    same = copied(first, "same", 90.0, SEED)
    assert (
        "No verdict: these runs have the same settings but for the seed"
        in report(vitamp, tmp_path / "1", first, same)[0]
    )
    other = copied(first, "other", 90.0, RATE)
    about = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(about | {"samples": {"train": 1437, "val": 130}}))
    said, _ = report(vitamp, tmp_path / "2", first, other)
    assert "No verdict: the runs may validate on different images (their number differs)." in said
    cut = copied(first, "cut", 90.0, RATE)
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:-1]))
    said, page = report(vitamp, tmp_path / "3", first, cut)
    assert "No verdict: fewer than two of these runs are finished." in said
    assert "No verdict" in page
