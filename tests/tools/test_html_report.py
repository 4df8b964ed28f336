"""scripts/report.py: the page of complete and incomplete runs, its first sentences, its verdict; and in a browser."""

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.report import trust
from tests.program import Result, Vitamp, save_image, train_tiny
from tests.tools.browser import View, views_of
from tools.common.calibration_error import Bin
from tools.common.comparison import Judged, by_name
from tools.common.contenders import Contenders
from tools.common.report_page import evaluations
from tools.common.report_page.charts import Chart, Curve, Reliability, Style, charts, styles_of
from tools.common.report_page.page import write_report
from tools.common.report_page.runs import doubts_about, opening_of, read_runs, searched_in_vain, validated
from tools.common.run_metrics import metrics_of
from tools.report.command import main
from utils.errors import UserError
from utils.record.predictions import PREDICTIONS
from vitamp.metrics import BALANCED, PLAIN, TOP1

MISCHIEF = "<script>alert('\"1\"')</script>"
VERDICT = {"bound": "compute", "text": "compute-bound: the CPU waited for data 2 % of the time."}


def make_run(
    folder: Path,
    best: float = 90.0,
    precision: str = "fp16",
    scale: float = 65536.0,
    skips: Sequence[int] = (),
    rate: str = "1e-3",
    seconds: float = 60.0,
    tag: str | None = None,
) -> Path:
    """Four epochs of 20 updates, with a report every 10. Each update in `skips` has one more skipped update."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"DATA: {{DATASET: digits}}\nTRAIN: {{NUM_EPOCHS: 4, BASE_LR: {rate}}}\n")
    about = {
        "command": "python main_single_gpu.py",
        "started": "2026-01-02T03:04:05+0000",
        "device": "cpu: a made-up one",
        "tag": tag,
        "versions": {"torch": "2.15.0"},
        "choices": {"precision": precision, "why": "as asked for", "world_size": 1},
        "samples": {"train": 100, "val": 10},
    }
    (folder / "run.json").write_text(json.dumps(about))
    lines: list[dict[str, Any]] = [{"event": "run", "epoch": 1, "what": "start", "update": 0, "perf": {}}]
    skipped = 0
    for update in range(10, 90, 10):
        epoch = (update - 1) // 20 + 1
        skipped += update in skips
        perf = {"images_per_second": 100.0 + update, "data_wait_percent": 2.0, "peak_memory_gb": 1.5}
        perf["seconds"] = seconds * update / 80
        figures = {"loss": 2 - update / 80, "acc1": update, "acc5": 99, "lr": 1e-3, "grad_norm": None}
        place = {"event": "train", "epoch": epoch, "step": update % 20, "update": update}
        lines.append({**place, **figures, "scale": scale, "skipped": skipped, "perf": perf})
        if update in skips:
            what = {"operation": "linear", "module": "blocks.0.mlp.fc1", "direction": "forward", "scale": scale}
            lines.append({"event": "skip", "epoch": epoch, "update": update, **what, "perf": {}})
        if update % 20 == 0:
            figures = {"loss": 1.0, "acc1": best - 4 + epoch, "acc5": 99.0}
            lines.append({"event": "epoch", "epoch": epoch, "update": update, **figures, "perf": {}})
            lines.append({"event": "val", "epoch": epoch, "update": update, **figures, "perf": {}})
    end = {"event": "run", "epoch": 5, "what": "end", "update": 80, "perf": {"seconds": seconds, "verdict": VERDICT}}
    text = "".join(f"{json.dumps(line)}\n" for line in [*lines, end])
    (folder / "metrics.jsonl").write_text(text)
    return folder


Page = Callable[..., "Seen"]
Report = Callable[..., tuple[str, str]]


class Seen(HTMLParser):
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
    run = make_run(tmp_path / "night", best=97.5, seconds=3725)
    text = page(run).text
    for said in (
        "Its accuracy (top-1) is 97.50 %",
        "top-1 of the best checkpoint 97.50 % (epoch 4)",
        "1:02:05 training time",
        "fp16 precision",
        "finished",
    ):
        assert said in text
    assert "compute-bound: the CPU waited" in text
    with (run / "config.yaml").open("a") as settings:
        settings.write("SAVE_BEST_BY: loss\n")
    assert "top-1 of the best checkpoint 94.50 % (epoch 1)" in page(run).text, "that of the checkpoint that tools take"
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


def test_two_runs_are_compared(page: Page, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", best=80), make_run(tmp_path / "b", best=60, rate="2e-3", precision="fp32")]
    seen = page(*runs, verdict="a is better\nby far")
    under_the_pointer = {"a, validation, epoch 4: 80", "b, validation, epoch 4: 60", "b, best validation, epoch 4"}
    assert under_the_pointer <= set(re.findall(r"<title>(.*?)</title>", seen.html))
    for said in ("TRAIN.BASE_LR 0.001 0.002", "a is better by far", "a (fp16)", "b (fp32)"):
        assert said in seen.text
    assert "TRAIN.NUM_EPOCHS" not in seen.text, "equal settings are not listed"


def test_skipped_updates_are_marked_and_listed(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "skipping", skips=[20, 40])
    [scale] = [chart for chart in charts(read_runs([run]), [Style(0)]) if chart.title == "Loss scale"]
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
    seen = page(run, make_run(tmp_path / os.fsdecode(b"caf\xe9")), verdict=MISCHIEF)
    assert "caf\N{REPLACEMENT CHARACTER}" in seen.text, "not UTF-8"
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
    assert re.search(f"{best:.2f} % top-1 {at} {others} With 95 % intervals", seen.text)
    first = f"Its accuracy \\(top-1\\) is {best:.2f} % on 360 validation images \\(95 % interval {at}\\)"
    assert re.search(f"tiny was trained on 1,437 images of digits to tell 10 classes apart. {first}. Always", seen.text)
    assert re.search(r"class recall training images validation images prevalence precision F1", seen.text)
    assert re.search(r"3 [\d.]+ % \d+ to \d+ 146 37 10.3 % [\d.]+ % [\d.]+ %", seen.text)
    parts = ["Predictions", "Training", "Curves", "Where the time went", "Mixed precision", "Details of the run"]
    assert re.findall("<h2>(.*?)</h2>", seen.html) == ["How far to trust this", *parts]
    wrong = round(360 * (1 - best / 100))
    mistakes = [figure for figure in seen.named("figure") if "title" in figure]
    assert len(mistakes) == min(12, wrong)
    alts = [image["alt"] for image in seen.named("img")]
    assert sum(alt.startswith("map of where the model looks for ") for alt in alts) == len(mistakes)
    assert sum(alt.startswith("mean map of ") for alt in alts) > 1
    guesses = [float(percent) for percent in re.findall(r"predicted \S+ \(([\d.]+)\s%\)", seen.text)]
    assert len(guesses) > 1
    assert guesses == sorted(guesses, reverse=True), "the most confident first"
    in_matrix = [int(a["title"].rpartition(" ")[2]) for a in seen.named("td") if "predicted as" in a.get("title", "")]
    assert sum(in_matrix) == 360


def test_maps_are_left_out_without_time(digits_run: Path, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "SECONDS_OF_MAPS", -1)
    seen = page(digits_run, predictions=True)
    assert seen.named("img")
    assert not [image for image in seen.named("img") if "map of " in image["alt"]]
    assert "Where the model looks" not in seen.text


def test_page_of_a_probe_shows_whole_images(digits_run: Path, page: Page, tmp_path: Path, vitamp: Vitamp) -> None:
    for number in range(40):
        save_image(tmp_path / "data" / f"class_{number % 2}" / f"{number}.jpg", number, (90, 60))
    words = ("-dataset", "imagefolder", "-data_path", tmp_path / "data", "MODEL.NUM_CLASSES=auto", "-output")
    start = ("MODEL.NEW_CLASSIFIER=probe", "TRAIN.NUM_EPOCHS=0", "TRAIN.WARMUP_EPOCHS=0", "-pretrained", digits_run)
    done = vitamp("-cfg", digits_run / "config.yaml", *start, *words, tmp_path / "run", code=0)
    assert "head is replaced by a linear probe (MODEL.NEW_CLASSIFIER)" in done.out
    seen = page(tmp_path / "run", predictions=True)
    assert "A linear classifier of tiny's features was fitted to 36 images from data/ to tell 2 classes" in seen.text
    assert "There are none: no weights were updated, the classifier was fitted in one step." in seen.text
    content = base64.b64decode(seen.named("img")[0]["src"].partition(",")[2])
    width, height = Image.open(io.BytesIO(content)).size  # enlarged, so that a click shows more
    assert 2 * width == 3 * height, "not the square that the model sees"
    assert all(Path(link["href"].removeprefix("file://")).is_file() for link in seen.named("a"))
    photographs = [image for image in seen.named("img") if image["alt"].startswith("Image ")]
    assert len(seen.named("a")) == len(photographs)
    table, config = tmp_path / "all.csv", tmp_path / "run" / "config.yaml"
    table.touch()
    config.write_text(config.read_text().replace("imagefolder", "csv").replace(f"{tmp_path / 'data'}", f"{table}"))
    assert "36 images from all.csv to tell 2 classes apart" in page(tmp_path / "run").text


def test_missing_weights_leave_the_rest_of_the_page(digits_run: Path, page: Page, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(digits_run, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match="is missing"):
        page(copied, predictions=True)
    text = (tmp_path / "page.html").read_text()
    assert "The model could not be evaluated:" in text
    assert "top-1 of the best checkpoint" in text


def test_runs_of_the_same_data_share_its_notes(page: Page, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{number}") for number in range(7)]
    for run in runs:
        of_name = {"series": f"{run.name[-1]} of 9", "namesakes": list(range(int(run.name[-1])))}
        about = {"notes": ["Data: 100 images."], "images": {"validation": 9}, **of_name}
        (run / "data.json").write_text(json.dumps(about))
    seen = page(*runs)
    assert "Perhaps too high 6 of 9. (in run-6; 6 of 7 runs have such images)" in seen.text
    assert seen.text.count("Perhaps too high") == 1, "one doubt of a kind, the largest"
    assert seen.text.count("Data: 100 images.") == 1
    assert "7 runs: run-0, run-1, run-2, run-3, run-4 and 2 more" in seen.text


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
        (["{run}", "-no_predictions", "-part", "test"], "-part test: -no_predictions evaluates no split"),
    ],
)
def test_bad_command_lines_are_refused(
    tmp_path: Path, in_process: Callable[..., Callable[..., Result]], words: list[str], told: str
) -> None:
    run = make_run(tmp_path / "run")
    done = in_process(main)(*(word.replace("{run}", str(run)) for word in words), code=2)
    assert told in done.err
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
    accuracy = next(chart for chart in charts(read_runs([run]), [Style(0)]) if chart.title.startswith("Accuracy"))
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
    legends = {chart.title: chart.legend() for chart in charts(read_runs([run]), [Style(0)])}
    assert [meaning for _, meaning in legends["Loss"]] == ["training, epoch means", "validation", "best validation"]
    assert legends["Learning rate"] == []
    assert legends["Loss scale"] == [("cross", "skipped update")]
    assert "training, epoch means validation best validation" in page(run).text


def test_reliability_diagram_has_accuracy_and_confidence_of_each_bin() -> None:
    diagram = Reliability([Bin(0, 0.0, 0.0), Bin(30, 75.0, 50.0)], 25.0, "More than chance.")
    (bar,) = diagram.bars()
    assert (bar["accuracy"], bar["confidence"]) == (100, 150)
    assert bar["words"] == "30 images: accuracy 50.0 %, confidence 75.0 %"
    assert "75 % confident: 50 % accurate" in diagram.description()


# The first sentences.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", best=90.0)
    about = json.loads((folder / "run.json").read_text())
    changed = about | {"samples": {"train": 100, "val": 400}, "largest_class_percent": 60.0}
    (folder / "run.json").write_text(json.dumps(changed))
    return folder


def said(run: Path) -> str:
    (read,) = read_runs([run])
    found = opening_of(read, validated(read))
    sentence = "".join(found.get(part, "") for part in ("before", "figure", "after"))
    return " ".join([found["learnt"], sentence, *found["remarks"]])


def change(run: Path, name: str, edit: Callable[[str], str]) -> None:
    (run / name).write_text(edit((run / name).read_text()))


def test_run_without_predictions_is_judged_by_its_validation(run: Path) -> None:
    text = said(run)
    assert "on 100 images of digits" in text
    assert "accuracy (top-1) is 90.00 % on 400 validation images (95 % interval 86.67 to 92.57 %). Always" in text
    assert "guessing the largest class gives 60.00 %." in text
    assert "not finished" not in text
    change(run, "config.yaml", lambda _: "{ no end")
    assert said(run).startswith("run was trained on 100 images.")


def test_figure_that_guessing_also_reaches_is_named_so(run: Path) -> None:
    change(run, "run.json", lambda text: text.replace("60.0", "88.0"))
    assert " Always guessing the largest class gives 88.00 %, so the model may be no better than that." in said(run)
    change(run, "run.json", lambda text: text.replace("88.0", "90.0"))
    assert ", which is no better than always guessing the largest class (90.00 %)." in said(run)


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
    def of(found: int, compared: int, training: int = 900, alike: Sequence[int] = ()) -> str:
        about = {"images": {"training": 900, "validation": 400}, "alike": alike}
        about["copies"] = {"found": found, "compared": compared, "training": training}
        (run / "data.json").write_text(json.dumps(about))
        (read,) = read_runs([run])
        doubts = doubts_about(read, validated(read))
        return " ".join([searched_in_vain(read), *(doubt.words() for doubt in doubts)])

    has = "have relatives in training"
    assert f"Up to 5.8 points too high: at least 23 of 400 validation images {has}" in of(23, 400)
    assert "check_data.py -cfg" in of(23, 400)
    assert "No validation image has the bytes of a training image, edited copies were not counted; " in of(0, 400)
    assert "bytes" not in of(0, 9), "most were not compared"
    assert "bytes" not in of(0, 400, 256), "nor most of the training images"
    favoured = "; the choice of the best checkpoint favours one that has memorised them"
    assert favoured in of(23, 400)
    assert favoured not in of(19, 400), "fewer than 5 %"
    assert favoured not in of(9, 400, alike=(200, 400, 10)), "the model may hardly tell them apart"
    assert favoured not in of(9, 400, alike=(40, 400, 2, 30, 20)), "many of those that look alike have two labels"
    assert favoured in of(9, 400, alike=(40, 400, 2, 38, 20)), "few copies have wrong labels"
    assert favoured in of(9, 400, alike=(40, 400, 2, 36, 20)), "a fifth as often as less similar images"


def test_frequent_confusions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of guesses for 8 images of class a, 4 of b, 1 of c."""
    labels = torch.tensor([0] * 8 + [1] * 4 + [2])
    trained: Any = SimpleNamespace(
        names=lambda: [*"abc"],
        name_of=lambda label: "abc"[label],
        chosen=SimpleNamespace(choices={}, meta={}, which=PLAIN, calibration=None),
        config=SimpleNamespace(MODEL=SimpleNamespace(NUM_CLASSES=3), DATA=None, SAVE_BEST_BY="acc1"),
    )
    images: Any = SimpleNamespace(sample_labels=lambda: None, groups=list)
    monkeypatch.setattr(evaluations, "doubts_of", lambda *_: (trust.Result(BALANCED, 50.0), []))
    monkeypatch.setattr(evaluations, "split_of_run", lambda *_: images)
    monkeypatch.setattr(evaluations, "pictured", lambda *_: {})
    monkeypatch.setattr(evaluations, "_mapped", lambda *_: "")

    def remarks(guesses: str) -> list[str]:
        logits = torch.eye(3)[["abc".index(letter) for letter in guesses]]
        monkeypatch.setattr(evaluations, "with_bar", lambda *_: [(logits, labels)])
        return list(evaluations._one_label(trained, images, "validation image", BALANCED)["headline"].remarks)

    assert remarks("aaaaaaaabbbbc") == []
    assert remarks("aaaaaaabbbbbc") == [], "a single image"
    assert remarks("aaaaabbbbbbba") == ["A frequent mistake: a taken for b (3 of 8 images)."]
    rows = evaluations._one_label(trained, images, "validation image", BALANCED)["classes"]
    assert {row["name"]: row["mistaken_for"] for row in rows} == {"a": "b (3)", "b": "", "c": "a (1)"}
    remarks("aaaabbccbbbbc")
    rows = evaluations._one_label(trained, images, "validation image", BALANCED)["classes"]
    assert {row["name"]: row["mistaken_for"] for row in rows} == {"a": "b, c (2 each)", "b": "", "c": ""}
    both = "Frequent mistakes: a taken for b (3 of 8 images); a taken for c (3 of 8 images)."
    assert remarks("aabbbcccbbbbc") == [both]


# Several runs.


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs"), "TRAIN.MAX_UPDATES=3")


def copied(run: Path, name: str, top1: float, *changes: str) -> Path:
    """A copy of the run with another result, and 'BEFORE -> AFTER' in its config.yaml."""
    copy = run.with_name(name)
    shutil.copytree(run, copy, dirs_exist_ok=True)
    (copy / PREDICTIONS).unlink(missing_ok=True)  # of the run's own result
    text = (copy / "config.yaml").read_text(encoding="utf-8")
    for before, after in (change.split(" -> ") for change in changes):
        text, changed = re.subn(rf"(?m)^( *){before}$", rf"\g<1>{after}", text)
        assert changed == 1
    (copy / "config.yaml").write_text(text, encoding="utf-8")
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines = [line | ({"acc1": top1} if line["event"] == "val" else {}) for line in lines]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


@pytest.fixture
def report(in_process: Callable[..., Callable[..., Result]], tmp_path: Path) -> Report:
    """What the tool says of some runs, and the page."""

    def call(*runs: Path) -> tuple[str, str]:
        done = in_process(main)(*runs, "-no_predictions", "-out", tmp_path / "report.html", "-overwrite", code=0)
        return done.out, (tmp_path / "report.html").read_text(encoding="utf-8")

    return call


SEED = "SEED: 0 -> SEED: 1"
RATE = "BASE_LR: 0.002 -> BASE_LR: 0.004"


def test_one_seed_each_is_judged_by_the_number_of_images(report: Report, first: Path) -> None:
    low, high = copied(first, "a", 90.0), copied(first, "b", 91.0, RATE)
    said, page = report(low, high)
    words = "BASE_LR=0.004 against BASE_LR=0.002: accuracy after the last epoch 1.00 points higher, with one seed each."
    words += " On 360 images this is "
    assert f"{words}within chance: 95 % interval -3.3 to +5.4 points" in said
    assert words in page
    far = copied(first, "c", 99.0, RATE)
    assert "is more than the choice of images explains" in report(low, far)[0]
    by_classes = copied(first, "d", 80.0, "SAVE_BEST_BY: acc1 -> SAVE_BEST_BY: balanced_acc", RATE)
    said, page = report(low, by_classes)
    assert "accuracy after the last epoch 10.00 points lower" in said
    assert ": balanced accuracy after the last epoch equal, with one seed each." in said
    assert "top-1 of the best checkpoint" in page


def test_three_settings_are_drawn_and_the_best_two_compared_first(report: Report, first: Path) -> None:
    rates = {"a": (0.002, 90.0), "b": (0.004, 94.0), "c": (0.008, 92.0)}
    runs = [
        copied(first, f"{name}-{seed}", top1 + seed, f"SEED: 0 -> SEED: {seed}", f"BASE_LR: 0.002 -> BASE_LR: {rate}")
        for name, (rate, top1) in rates.items()
        for seed in range(1, 4)
    ]
    said, page = report(*runs)
    sentences = re.findall(r"(?m)BASE_LR=(\S+) against BASE_LR=(\S+): .*accuracy", said)
    assert sentences == [("0.004", "0.008"), ("0.004", "0.002"), ("0.008", "0.002")]
    rows = re.findall(r'aria-label="BASE_LR=(\S+): ([\d.]+) ± 1.00">(.*?)</span>', page)
    drawn = [(rate, mean, row.count('class="dot"')) for rate, mean, row in rows]
    assert drawn == [("0.002", "92.00", 3), ("0.004", "96.00", 3), ("0.008", "94.00", 3)]
    assert re.search(r'class="contender hue1 shade0 best"><span class="who">BASE_LR=0.004<', page)
    assert "mean and its 95 % interval over the seeds" in page
    assert "accuracy 96.0 ± 1.0 against 92.0 ± 1.0: 4.00 points higher" in said
    assert "(95 % interval for these images alone, 3 seeds)" in page
    assert "contenders" not in report(runs[0], runs[3])[1].partition("<body>")[2]
    page = report(*runs[::3], copied(first, "d", 99.9, "SEED: 0 -> SEED: 9"))[1]
    assert "95 % interval of one run on 360 images" in page
    assert re.search(r'best"><span class="who">BASE_LR=0.004<', page), "by the seeds that all have"


def test_contenders_of_a_comparison_are_drawn_as_they_are_given(page: Page, tmp_path: Path, first: Path) -> None:
    """Settings may differ by seed; and of folds, which share images, the intervals are Nadeau and Bengio's."""
    runs = [copied(first, f"d-{n}", 50 + n, f"BASE_LR: 0.002 -> BASE_LR: {n + 1}") for n in range(6)]
    of, out = {run: ("plain", "changed")[n % 2] for n, run in enumerate(runs)}, tmp_path / "page.html"
    widths = []
    for of_folds in (False, True):
        rows = [
            {"mode": of[run], "seed": n // 2, **metrics_of(run)} | ({"fold": f"{n // 2 + 1}/3"} if of_folds else {})
            for n, run in enumerate(runs)
        ]
        page(*runs, contenders=Contenders(by_name(rows), ["plain", "changed"], Judged(TOP1, PLAIN), of))
        text = out.read_text(encoding="utf-8")
        row = r'class="contender (hue\d) shade0[^"]*"><span class="who">(\w+)</span>(.*?)</span>'
        drawn = re.findall(row, text, re.DOTALL)
        assert [(hue, name) for hue, name, _ in drawn] == [("hue0", "plain"), ("hue1", "changed")]
        band = re.search(r'class="band" style="left: [-\d.]+%; width: ([\d.]+)%', drawn[0][2])
        first_dot, *_, last_dot = re.findall(r'class="dot" style="left: ([\d.]+)%', drawn[0][2])
        assert band is not None
        widths.append(float(band[1]) / (float(last_dot) - float(first_dot)))
    assert widths[1] / widths[0] == pytest.approx(((1 / 3 + 1 / 2) / (1 / 3)) ** 0.5, rel=0.01)


def test_runs_are_paired_by_seed_or_not_at_all(report: Report, first: Path) -> None:
    plain = [copied(first, f"e-{seed}", 90.0 + seed, f"SEED: 0 -> SEED: {seed}") for seed in (1, 2)]
    other = copied(first, "f-3", 91.0, "SEED: 0 -> SEED: 3", RATE)
    said = report(*plain, other)[0]
    assert "no verdict, because BASE_LR=0.004 and BASE_LR=0.002 have no finished run with the same seed" in said
    again = copied(first, "again", 95.0, "SEED: 0 -> SEED: 1")
    said = report(plain[0], again, other)[0]
    assert f"No verdict: {plain[0]} and {again} have the same settings, and the same seed." in said
    shutil.rmtree(again / "checkpoints")  # which say the batch
    text = (again / "run.json").read_text()
    (again / "run.json").write_text(text.replace('"world_size": 1', '"world_size": 2'))
    assert "processes=2 against processes=1: accuracy" in report(plain[0], again)[0]


def test_reasons_for_no_verdict(report: Report, first: Path) -> None:
    same = copied(first, "same", 90.0, SEED)
    assert "No verdict: these runs have the same settings but for the seed" in report(first, same)[0]
    other = copied(first, "other", 90.0, RATE)
    about = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(about | {"samples": {"train": 1437, "val": 130}}))
    said, _ = report(first, other)
    assert "No verdict: the runs may validate on different images (their number differs)." in said
    fewer = copied(first, "fewer", 90.0, RATE, "EXCLUDE: null -> EXCLUDE: of_training.txt")
    assert "may validate on" not in report(first, fewer)[0], "the same ones, as their checkpoints say"
    for meta in fewer.glob("checkpoints/*/meta.json"):
        meta.write_text(meta.read_text().replace('"val_data": "', '"val_data": "0'))
    assert "may validate on different images (DATA.EXCLUDE)." in report(first, fewer)[0]
    mae = copied(first, "mae", 90.0, "MAE_PRETRAIN: .+ -> MAE_PRETRAIN: true", "SAVE_BEST_BY: .+ -> SAVE_BEST_BY: loss")
    assert "the metrics of runs with one label per image and without labels differ" in report(first, mae)[0]
    half = copied(mae, "half", 90.0, "MASK_RATIO: 0.75 -> MASK_RATIO: 0.5")
    assert "the runs may validate on different patches (MODEL.MASK_RATIO)" in report(mae, half)[0]
    fold = copied(first, "fold", 90.0, RATE, "FOLD: null -> FOLD: 1/5")
    assert "No verdict: they are on different numbers of folds (DATA.FOLD)" in report(first, fold)[0]
    cut = copied(first, "cut", 90.0, RATE)
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:-1]))
    said, page = report(first, cut)
    assert "No verdict: fewer than two of these runs are finished." in said
    assert "No verdict" in page


# In a browser, wide and narrow, light and dark.

CLASSES = ("<script>alert(1)<", "'single' & \"double\"", "x" * 60)


def brightness(view: View) -> float:
    return float(np.asarray(Image.open(io.BytesIO(view.picture)).convert("L")).mean())


def test_page_renders_in_a_browser(tmp_path: Path) -> None:
    for label, name in enumerate(CLASSES):
        for part, count in (("train", 4), ("val", 3)):
            for number in range(count):
                save_image(tmp_path / "images" / part / name / f"{number}.jpg", seed=10 * number + label)
    words = ("-dataset", "imagefolder", "-data_path", tmp_path / "images", "DATA.NUM_WORKERS=0", "-batch_size", 4)
    page = write_report([train_tiny(tmp_path, *words, "MODEL.NUM_CLASSES=3", f"TAG={MISCHIEF}")])
    views = [View(width, dark) for width in (1280, 360) for dark in (False, True)]
    for view in views_of(page, tmp_path, views):
        assert not view.complaints
        assert view.requests == [page.resolve().as_uri()], "only the page is loaded"
        assert view.dialogs == 0
        assert view.page_width <= view.width, "the page itself never scrolls sideways"
        for name in (*CLASSES, MISCHIEF):
            assert name in view.text, "names are shown unchanged"
        assert (brightness(view) < 80) == view.dark
        assert (brightness(view) > 180) != view.dark
