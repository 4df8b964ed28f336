"""scripts/report.py: content of the page, for complete and incomplete runs, and for malicious names."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.tools.made_runs import MISCHIEF, make_run
from tools.common.evaluation import Bin
from tools.common.report_page.charts import (
    Chart,
    Curve,
    Reliability,
    Style,
    charts,
    styles_of,
)
from tools.common.report_page.page import write_report
from tools.common.report_page.runs import read_runs
from tools.report.command import main

Page = Callable[..., "Seen"]


class Seen(HTMLParser):
    """Text and elements of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.words, self.tags = html, [], []
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def named(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    def call(*runs: Path, **options: Any) -> Seen:
        options = {"out": tmp_path / "page.html", "predictions": False, **options}
        return Seen(write_report(runs, **options).read_text(encoding="utf-8"))

    return call


def test_metrics_of_one_run(page: Page, tmp_path: Path) -> None:
    text = page(make_run(tmp_path / "night", best=97.5, seconds=3725)).text
    assert "97.50 % best top-1, epoch 4" in text
    assert "1:02:05 training time" in text
    assert "fp16 precision" in text
    assert "compute-bound: the CPU waited" in text
    assert "finished" in text


def test_time_by_stage_is_that_of_the_last_verdict(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "slow")
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line["event"] == "train":
            line["perf"] |= {"images_per_second": 0.1}
    lines[-1]["perf"]["verdict"] = {"text": "waited for data 44 % of the time", "shares": {"data": 44, "forward": 56}}
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    text = page(run).text
    assert "data 44.0 % forward 56.0 % waited for data 44 % of the time" in text
    assert "0.1 images/s" in text, "not 0"


def test_time_and_speed_of_a_resumed_run(page: Page, tmp_path: Path) -> None:
    """Each start has its own clock, and its first report does not count for the speed."""
    run = make_run(tmp_path / "resumed", seconds=3600)
    metrics = run / "metrics.jsonl"
    begun, *lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    half = next(number for number, line in enumerate(lines) if '"update": 50' in line)
    again = json.dumps({"event": "run", "epoch": 3, "what": "resume", "update": 40, "perf": {"seconds": 0.1}})
    metrics.write_text("".join([begun, *lines[:half], f"{again}\n", *lines[half:]]), encoding="utf-8")
    assert "1:30:00 training time" in page(run).text
    [read] = read_runs([run])
    assert read.history.images_per_second == 150.0, "the median of 120 to 140 and 160 to 180"


def test_two_runs_are_compared(page: Page, tmp_path: Path) -> None:
    runs = make_run(tmp_path / "a", rate="1e-3"), make_run(tmp_path / "b", rate="2e-3", precision="fp32")
    seen = page(*runs, verdict="a is better\nby far")
    assert "TRAIN.BASE_LR 0.001 0.002" in seen.text
    assert "TRAIN.NUM_EPOCHS" not in seen.text, "equal settings are not listed"
    assert "a is better by far" in seen.text
    assert "a (fp16)" in seen.text
    assert "b (fp32)" in seen.text


def test_skipped_updates_are_marked_and_listed(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "skipping", skips=[20, 40])
    [scale] = [chart for chart in charts(read_runs([run])) if chart.title == "Loss scale"]
    assert [point[0] for point in scale.marks[0].points] == [1, 2]
    text = page(run).text
    assert "2 updates were skipped." in text
    assert "20 linear, blocks.0.mlp.fc1, forward" in text


@pytest.mark.parametrize("what", ["cut", "empty", "config", "run.json", "no metrics"])
def test_incomplete_run_is_reported(page: Page, tmp_path: Path, what: str) -> None:
    run = make_run(tmp_path / "cut")
    metrics = run / "metrics.jsonl"
    if what == "cut":
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-2]) + '{"event": "val", "epo')
    elif what == "empty":
        metrics.write_text("")
    elif what == "no metrics":
        metrics.unlink()
    else:
        (run / ("config.yaml" if what == "config" else what)).write_text("{ no end")
    text = page(run, make_run(tmp_path / "whole")).text
    assert {
        "cut": "running, or cut off",
        "config": "Unknown: the config.yaml of at least one run",
        "run.json": "unknown",
    }.get(what, "no metrics yet") in text


def test_malicious_names_are_escaped(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / 'a "quoted" <img src=x onerror=alert(1)>', tag=MISCHIEF)
    seen = page(run, make_run(tmp_path / "other"), verdict=MISCHIEF)
    assert not seen.named("script")
    assert not seen.named("img")
    assert seen.text.count(MISCHIEF) >= 2, "shown unchanged"
    assert not [a for _, a in seen.tags if any(name.startswith("on") for name in a)]
    policy = next(a for a in seen.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    allowed = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert policy["content"] == allowed


def test_predictions_agree_with_validation(digits_run: Path, page: Page) -> None:
    seen = page(digits_run, predictions=True)
    lines = [json.loads(line) for line in (digits_run / "metrics.jsonl").read_text().splitlines()]
    best = max(line[key] for line in lines if line["event"] == "val" for key in ("acc1", "ema_acc1"))
    at = r"[\d.]+ to [\d.]+ %"
    others = rf"[\d.]+ % top-5 {at} [\d.]+ % balanced accuracy {at} [\d.]+ % macro F1 {at}"
    after = "With 95 % intervals, on 360 validation images. Always guessing the largest class: "
    assert re.search(f"{best:.2f} % top-1 {at} {others} {after}", seen.text)
    first = f"Its accuracy \\(top-1\\) is {best:.2f} % on 360 validation images \\(95 % interval {at}\\)"
    assert re.search(f"tiny was trained on 1,437 images of digits to tell 10 classes apart. {first}; always", seen.text)
    assert re.search(r"class training images validation images prevalence recall precision F1", seen.text)
    assert re.search(r"3 146 37 10.3 % [\d.]+ % [\d.]+ % [\d.]+ %", seen.text)
    parts = ["Predictions", "Curves", "Where the time went", "Mixed precision", "Details of the run"]
    assert re.findall("<h2>(.*?)</h2>", seen.html) == parts
    wrong = round(360 * (1 - best / 100))
    assert len(seen.named("figure")) == min(12, wrong)
    guesses = [float(percent) for percent in re.findall(r"predicted \S+ \(([\d.]+)\s%\)", seen.text)]
    assert len(guesses) > 1
    assert guesses == sorted(guesses, reverse=True), "the most confident first"
    in_matrix = [int(a["title"].rpartition(" ")[2]) for a in seen.named("td") if "predicted as" in a.get("title", "")]
    assert sum(in_matrix) == 360


def test_names_that_are_not_utf8_are_shown_with_replacements(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / os.fsdecode(b"caf\xe9"))
    assert "caf\N{REPLACEMENT CHARACTER}" in page(run, make_run(tmp_path / "other")).text


def test_missing_weights_leave_the_rest_of_the_page(digits_run: Path, page: Page, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(digits_run, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    text = page(copied, predictions=True).text
    assert "The model could not be evaluated:" in text
    assert "best top-1" in text


def test_default_place_of_the_page(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "runs" / "one"), make_run(tmp_path / "runs" / "deep" / "two")
    assert write_report([one], predictions=False) == one / "report.html"
    assert write_report([one, two, one], predictions=False) == tmp_path / "runs" / "report.html"
    assert "2 runs: one, two" in (tmp_path / "runs" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "nowhere: no run there"),
        (["{run}", "-out", "page"], "-out page: name a file that ends in .html"),
        ([], "-h lists all arguments"),
    ],
)
def test_bad_command_lines_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    run = make_run(tmp_path / "run")
    assert main([word.replace("{run}", str(run)) for word in words]) == 2
    assert told in capfd.readouterr().err
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("points", [[(1.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, -3e-9), (9.0, 5e9)], []])
def test_any_curve_can_be_drawn(points: list[tuple[float, float]]) -> None:
    for logarithmic in (False, True):
        chart = Chart("any", [Curve(points, "curve", Style(0))], logarithmic=logarithmic)
        texts = [text for _, text in [*chart.x_ticks(), *chart.y_ticks()]]
        assert len(texts) > 1
        assert all(0 <= y <= 260 for _, path in chart.lines() for y in map(float, re.findall(r",(-?[\d.]+)", path)))


def test_charts_show_epoch_means_best_validation_and_resumes(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "whole", best=80.0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "run", "epoch": 3, "what": "resume", "update": 50, "perf": {}}) + "\n")
    accuracy = next(chart for chart in charts(read_runs([run])) if chart.title.startswith("Accuracy"))
    assert accuracy.x_name == "epoch"
    assert [curve.points for curve in accuracy.curves[:2]] == [[(1, 77), (2, 78), (3, 79), (4, 80)]] * 2
    assert accuracy.marks[0].points == [(4, 80)]
    assert accuracy.resumed == [2.5]
    assert [symbol for symbol, *_ in accuracy.symbols()] == ["diamond"]
    assert "epoch" in page(run).text


def test_seeds_share_the_hue_of_their_precision_and_differ_in_shade(page: Page, tmp_path: Path) -> None:
    made = [make_run(tmp_path / f"{kind}-{seed}", precision=kind) for kind in ("fp32", "bf16") for seed in (0, 1)]
    assert styles_of(read_runs(made)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert styles_of(read_runs(made[:2])) == [(0, 0), (1, 0)]
    made += [make_run(tmp_path / f"fast-{seed}", precision="bf16", rate="5e-3") for seed in (0, 1)]
    assert styles_of(read_runs(made[2:])) == [(0, 0), (0, 1), (1, 0), (1, 1)], "or that of other settings"
    marks = [mark["class"] for mark in page(*made).named("rect") if mark["class"].startswith("mark")]
    assert {"mark hue0 shade1", "mark hue1 shade1"} <= set(marks), "the second seed has square markers"


def test_legend_names_only_what_a_chart_shows(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "night", skips=[20])
    legends = {chart.title: chart.legend() for chart in charts(read_runs([run]))}
    assert [meaning for _, meaning in legends["Loss"]] == ["training, epoch means", "validation", "best validation"]
    assert legends["Learning rate"] == []
    assert legends["Loss scale"] == [("cross", "skipped update")]
    assert "training, epoch means validation best validation" in page(run).text


def test_points_say_their_values_under_the_pointer(page: Page, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", best=80), make_run(tmp_path / "b", best=60)]
    titles = re.findall(r"<title>(.*?)</title>", page(*runs).html)
    assert {"a, validation, epoch 4: 80", "b, validation, epoch 4: 60", "b, best validation, epoch 4"} <= set(titles)


def test_reliability_diagram_has_accuracy_and_confidence_of_each_bin() -> None:
    diagram = Reliability([Bin(0, 0.0, 0.0), Bin(30, 75.0, 50.0)], 25.0)
    [bar] = diagram.bars()
    assert (bar["accuracy"], bar["confidence"], bar["words"]) == (
        *(100, 150, "30 images: accuracy 50.0 %, confidence 75.0 %"),
    )
    assert "75 % confident: 50 % accurate" in diagram.description()
