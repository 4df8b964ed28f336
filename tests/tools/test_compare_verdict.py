"""compare.py: metrics read from a run's folder, and the verdict on those of several runs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tools.common.comparison import (
    ByName,
    Judged,
    best_two,
    by_name,
    difference_in_metric,
    judge,
    judged_by,
    times_as_fast,
    times_the_memory,
    troubles,
)
from tools.common.run_metrics import is_finished, metrics_of
from tools.compare.command import notes, sentences, table
from utils.config import Config, to_yaml
from utils.statistics.differences import Difference, of_different_images, student_interval
from vitamp.metrics import AVERAGE, BALANCED, LOSS, PLAIN, TOP1

MODES = ("fp32", "bf16")
ACCURACY = Judged(TOP1, PLAIN)
JUDGED = {"metric": TOP1.name, "weights": PLAIN.name, "compared": ["fp32", "bf16"]}


def run(mode: str, seed: int, **metrics: Any) -> dict[str, Any]:
    usual = {
        "images_per_second": 1000.0,
        "seconds_per_epoch": 1.5,
        "peak_memory_gb": 2.0,
        "updates": 400,
        "skipped": 0,
        "diverged": False,
        "last_acc1": 97.5,
        "best_acc1": 98.0,
        "validation_images": 360,
        "start_up_counted": False,
        "device": "cuda: a GPU",
    }
    return {"mode": mode, "seed": seed, **usual, **metrics}


def runs(**modes: dict[str, list[float]]) -> ByName:
    """`runs(fp32={"last_acc1": [97, 98]}, ...)`: a metric for each seed."""
    return by_name(
        run(mode, seed, **{key: values[seed] for key, values in metrics.items()})
        for mode, metrics in modes.items()
        for seed in range(len(next(iter(metrics.values()))))
    )


def verdict_of(results: ByName, judged: Judged = ACCURACY) -> dict[str, Any]:
    (verdict,) = judge(results, MODES, judged)
    return verdict


def text_of(results: ByName) -> str:
    return verdict_of(results)["text"]


def difference(results: ByName, mode: str = "bf16", base: str = "fp32") -> Difference:
    found = difference_in_metric(results[mode], results[base], 1, ACCURACY)
    assert found is not None
    return found


def test_verdict_of_a_gain() -> None:
    results = runs(
        fp32={"images_per_second": [1000, 1010, 990], "peak_memory_gb": [10] * 3, "last_acc1": [97.7, 97.9, 98.1]},
        bf16={"images_per_second": [1900, 1910, 1890], "peak_memory_gb": [6.2] * 3, "last_acc1": [97.5, 97.8, 98.1]},
    )
    assert text_of(results) == (
        "bf16: 1.9x faster, 38 % less memory, accuracy 97.8 ± 0.3 against 97.9 ± 0.2: difference within noise"
    )


def test_seed_counts_only_in_pairs() -> None:
    """The effect of a seed is the same in both modes, so a seed that one mode lacks would look like a difference."""
    results = runs(fp32={"last_acc1": [90.0, 95.0, 99.0]}, bf16={"last_acc1": [90.0, 95.0]})
    for mode, base in (MODES, MODES[::-1]):
        found = difference(results, mode, base)
        assert (found.value, found.runs) == (0.0, 2)
    assert "accuracy 92.5 ± 3.5 against 92.5 ± 3.5: difference within noise" in text_of(results)


def test_details_bound_the_unseen_loss() -> None:
    results = runs(fp32={"last_acc1": [97.0, 98.0, 97.5]}, bf16={"last_acc1": [97.5, 97.2, 97.6]})
    verdict = verdict_of(results)
    low = verdict["accuracy"]["low"]
    assert "difference within noise" in verdict["text"]
    assert f"a drop in accuracy of up to {-low:.2f} points could be hidden in the noise" in verdict["details"]


def test_one_seed_is_too_few() -> None:
    results = runs(
        fp32={"images_per_second": [1000], "last_acc1": [98.0]}, bf16={"images_per_second": [1900], "last_acc1": [90.0]}
    )
    verdict = verdict_of(results)
    assert "1.9x faster in one run each" in verdict["text"]
    assert "accuracy 90.0 against 98.0: one seed is too few to compare accuracy" in verdict["text"]


def test_interval_of_percentages_ends_where_percentages_do() -> None:
    """Student's interval of two pairs reaches 12.7 standard errors."""
    results = runs(fp32={"last_acc1": [60.0, 40.0]}, bf16={"last_acc1": [40.0, 70.0]})
    found = difference(results)
    assert (found.low, found.high) == (-100.0, 100.0)


def test_bounds_of_a_speed_that_say_nothing_are_left_out() -> None:
    for slowest, bounds in ((1800, "speed 1.31x to 2.61x"), (300, "")):
        results = runs(fp32={"images_per_second": [1000, 1000]}, bf16={"images_per_second": [1900, slowest]})
        details = verdict_of(results)["details"]
        assert details.endswith(bounds)
        assert ("x to " in details) == (slowest > 1000)


def test_speed_of_the_slow_first_updates_is_not_judged() -> None:
    speeds: dict[str, list[float]] = {"fp32": [1000, 1010, 990], "bf16": [1900, 1910, 1890]}
    results = runs(**{mode: {"images_per_second": each} for mode, each in speeds.items()})
    assert "faster" in text_of(results)
    results["bf16"][0]["start_up_counted"] = True
    speed = times_as_fast(results["bf16"], results["fp32"], 1)
    assert speed is not None
    assert speed.runs == 2
    for row in results["fp32"].values():
        row["start_up_counted"] = True
    assert times_as_fast(results["bf16"], results["fp32"], 1) is None
    assert "faster" not in text_of(results)


def test_differences_of_one_image_are_noise() -> None:
    """Three equal differences of one image: a standard deviation of zero is not certainty."""
    image = 100 / 360
    results = runs(fp32={"last_acc1": [97.5] * 3}, bf16={"last_acc1": [97.5 - image] * 3})
    found = difference(results)
    assert not found.seen


def test_speed_up_within_the_variation_of_a_mode_is_noise() -> None:
    """All pairs have a ratio of 1.1, but runs of fp32 alone vary by 1.3."""
    results = runs(fp32={"images_per_second": [1000, 1150, 1300]}, bf16={"images_per_second": [1100.0, 1266.0, 1430.0]})
    speed = times_as_fast(results["bf16"], results["fp32"], 1)
    assert speed is not None
    assert speed.low is not None
    assert speed.low > 1
    assert not speed.seen
    assert "speed within noise (1.10x)" in text_of(results)


def test_small_difference_in_memory_is_ignored() -> None:
    results = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [1.99, 1.99]})
    assert "the same memory" in text_of(results)
    results = runs(fp32={"peak_memory_gb": [2.0, 2.6]}, bf16={"peak_memory_gb": [1.5, 2.1]})
    assert "bf16: speed within noise (1.00x), memory within noise (0.78x)" in text_of(results)
    results = runs(fp32={"peak_memory_gb": [2.0, 2.0]}, bf16={"peak_memory_gb": [2.5, 2.5]})
    for mode, speed, said in (
        ("bf16", 800.0, "difference within noise, speed and memory not compared, because the devices differ"),
        ("fp32", 1000.0, "bf16: 1.25x slower, 25 % more process memory"),
    ):
        for seed, row in results[mode].items():
            row |= {"device": f"cpu: a CPU, {1 + seed} threads", "images_per_second": speed}
        assert said in text_of(results)
    for mode, each in (("fp32", 0.79), ("bf16", 0.85)):
        for row in results[mode].values():
            row["peak_memory_gb"] = each
    assert "process memory within noise (1.08x)" in text_of(results), "it jumps so far by itself"
    for mode in MODES:
        del results[mode][1]
    assert "8 % more process memory in one run each" in text_of(results)


def test_equal_contenders_rarely_differ_in_memory() -> None:
    """With 2 % of noise, in 6 contenders of 2 seeds; a third less is seen all the same."""
    random, names, claims, seen = np.random.default_rng(0), "abcdef", 0, 0
    for _ in range(100):
        memory = 2 * np.exp(random.normal(0, 0.02, (6, 2)))
        results = runs(**{name: {"peak_memory_gb": list(each)} for name, each in zip(names, memory, strict=True)})
        claims += any(verdict["memory"]["seen"] for verdict in judge(results, names, ACCURACY))
        for row in results["b"].values():
            row["peak_memory_gb"] /= 1.5
        found = times_the_memory(results, "b", "a", 5)
        seen += found is not None and found.seen
    assert claims <= 0.07 * 100
    assert seen > 0.95 * 100


def test_pairs_widen_the_interval_of_one_run_each() -> None:
    """45 pairs of 10 equal contenders, on 1,000 images."""
    alone, of_many = (of_different_images((84.0, 80.0), 1000, pairs) for pairs in (1, 45))
    assert alone[0] > 0 > of_many[0]
    random, claims = np.random.default_rng(0), 0
    for _ in range(300):
        percents = np.sort(random.binomial(1000, 0.8, 10)) / 10
        claims += of_different_images((percents[-1], percents[0]), 1000, 45)[0] > 0
    assert claims <= 0.05 * 300


def test_troubles_are_reported() -> None:
    results = runs(fp32={"skipped": [0, 0]}, bf16={"skipped": [40, 8]})
    results["bf16"][1]["diverged"] = True
    problems = troubles(results, {"bf16": ["exit code 1: the gradients stopped being numbers"]}, MODES)
    assert problems == [
        "bf16: 1 of 3 runs failed: exit code 1: the gradients stopped being numbers",
        "bf16: diverged with seed 1: the loss ended as NaN or well above its start",
        "bf16: with seed 0, 40 of 400 updates were skipped (10 %); docs/amp.md says what to do",
    ]


def test_mode_without_runs_gets_no_verdict() -> None:
    results = runs(fp32={"last_acc1": [97.0, 98.0]})
    assert text_of(results) == "bf16: no verdict, because bf16 and fp32 have no finished run with the same seed or fold"
    unmeasured = runs(fp32={"last_acc1": [0.0]}, bf16={"last_acc1": [0.0]})
    for row in (unmeasured["fp32"][0], unmeasured["bf16"][0]):
        del row["last_acc1"], row["best_acc1"]
        row["start_up_counted"] = True
    assert text_of(unmeasured) == "bf16: no verdict, because bf16 and fp32 have neither a speed nor a metric"
    assert table(unmeasured, MODES, ACCURACY)[1][-2] == "-"
    head, first, second = table(results, MODES, ACCURACY)
    assert first[:2] == ["fp32", "2"]
    assert second[:3] == ["bf16", "0", "-"]
    assert len(head) == len(first) == len(second)


def test_table_and_notes() -> None:
    results = runs(
        fp32={"images_per_second": [1000, 1100], "last_acc1": [97, 98]},
        bf16={"images_per_second": [2000, 2200], "last_acc1": [96, 98]},
    )
    rows = [row for each in results.values() for row in each.values()]
    about = {**JUDGED, "runs": rows, "device": "cpu: a CPU", "seeds": [0, 1], "compared": list(MODES), "data": []}
    about["troubles"] = ["a trouble"]
    assert table(results, MODES, ACCURACY)[2] == [
        *("bf16", "2", "2,100", "1.5", "2.00", "2.00 GB", "97.00 ± 1.41", "98.00 ± 0.00", "0")
    ]
    lines = notes(about)
    assert "noise: the speed of runs of the same mode varied by up to 10 %" in lines
    assert not any(note.startswith("noise") for note in notes({**about, "runs": rows[::2]})), "one run each"
    assert "2 seeds are few: only large differences in accuracy show" in lines
    assert any(note.startswith("memory: peak of the whole process") for note in lines)
    assert not any("slow first updates" in note for note in lines)
    assert sentences({**about, "verdicts": judge(results, MODES, ACCURACY)})[-1] == "a trouble"


def test_another_metric_has_top1_beside_it() -> None:
    results = runs(fp32={"last_balanced_acc": [50.0], "last_acc1": [75.0]}, bf16={"last_balanced_acc": [60.0]})
    head, *rows = table(results, MODES, Judged(BALANCED, PLAIN))
    assert [row[head.index("last top-1 (%)")] for row in rows] == ["75.00", "97.50"]


def test_says_how_many_more_seeds_would_tell() -> None:
    """Checked by trying: with so many seeds of the same mean and spread, 4 of 5 comparisons see the difference."""
    ours, theirs = [97.9, 97.0, 98.1], [97.0, 97.1, 97.0]
    results = runs(fp32={"last_acc1": theirs}, bf16={"last_acc1": ours})
    for row in (*results["fp32"].values(), *results["bf16"].values()):
        row["validation_images"] = None
    verdict = verdict_of(results)
    needed = verdict["accuracy"]["runs_needed"]
    assert f"too few seeds to tell: {needed - 3} more would probably show a difference" in verdict["details"]
    differences = np.array(ours) - np.array(theirs)
    random, spread, mean = np.random.default_rng(0), differences.std(ddof=1), differences.mean()
    tries = [student_interval(list(random.normal(mean, spread, needed)), 1).seen for _ in range(500)]
    assert 0.74 < np.mean(tries) < 0.88
    same = runs(fp32={"last_acc1": theirs}, bf16={"last_acc1": theirs[::-1]})
    verdict = verdict_of(same)
    assert "too few" not in verdict["details"], "no number of seeds shows a difference that is not there"


def test_loss_is_better_when_it_is_lower() -> None:
    results = runs(fp32={"last_loss": [0.5, 0.52, 0.51, 0.49]}, bf16={"last_loss": [0.4, 0.42, 0.405, 0.39]})
    verdict = verdict_of(results, Judged(LOSS, PLAIN))
    assert "loss 0.4037 ± 0.0125 against 0.5050 ± 0.0129: 0.1012 lower" in verdict["text"]
    noisy = runs(fp32={"last_loss": [0.5, 0.6, 0.4]}, bf16={"last_loss": [0.5, 0.5, 0.45]})
    verdict = verdict_of(noisy, Judged(LOSS, PLAIN))
    assert f"a rise in loss of up to {verdict['accuracy']['high']:.4f} could be hidden" in verdict["details"]


def test_average_is_judged_in_runs_that_have_one() -> None:
    results = runs(fp32={"last_acc1": [90.0, 91.0]}, bf16={"last_acc1": [80.0, 81.0], "last_ema_acc1": [95.0, 96.0]})
    assert verdict_of(results, Judged(TOP1, AVERAGE))["accuracy"]["value"] == 5.0
    assert verdict_of(results)["accuracy"]["value"] == -10.0
    kept = ({}, {"MODEL_EMA": True}, {"MODEL_EMA": True, "MODEL_EMA_DECAY": 0.9})
    none, one, other = (Config.model_validate({"TRAIN": each}) for each in kept)
    judged = [judged_by(None, None, pair).weights for pair in ((none, one), (one, other), (one, one))]
    assert judged == [AVERAGE, AVERAGE, PLAIN], "by default"


def test_best_two_are_compared_with_each_other() -> None:
    values = {"a": [90.0, 90.1, 90.2], "b": [95.0, 95.2, 95.3], "c": [93.0, 93.1, 93.3]}
    results = runs(**{name: {"last_acc1": each} for name, each in values.items()})
    verdicts = judge(results, ("a", "b", "c"), ACCURACY)
    assert [(verdict["mode"], verdict["against"]) for verdict in verdicts] == [("b", "a"), ("c", "a"), ("b", "c")]
    assert verdicts[-1]["text"].startswith("b against c: ")
    wide, narrow = (verdict["accuracy"]["high"] - verdict["accuracy"]["low"] for verdict in (verdicts[-1], verdicts[0]))
    quantiles = [stats.t.ppf(1 - 0.05 / comparisons / 2, 2) for comparisons in (3, 2)]
    assert wide / narrow > quantiles[0] / quantiles[1] * 0.5, "any pair could have been the best two"
    assert len(judge(results, ("b", "a", "c"), ACCURACY)) == 2, "the baseline is one of the best two"
    del results["b"][2]
    results["c"][2]["last_acc1"] = 99.9
    assert best_two(results, "abcd", ACCURACY) == ["b", "c"], "by the seeds that all have"


def test_contenders_no_better_than_guessing_are_named() -> None:
    results = runs(fp32={"last_acc1": [34.0, 36.0]}, bf16={"last_acc1": [35.0, 35.0]})
    rows = [{**row, "largest_class_percent": 35.0} for each in results.values() for row in each.values()]
    about = {**JUDGED, "runs": rows, "verdicts": [], "troubles": [], "data": []}
    assert "none is better than always guessing the largest class, which has 35.0 %" in sentences(about)[0]
    rows[0]["last_acc1"] = 37.0
    assert sentences(about) == []


# Folds


def folds(count: int, **modes: list[float]) -> ByName:
    return by_name(
        run(mode, 0, fold=f"{number}/{count}", last_acc1=value, validation_images=None)
        for mode, values in modes.items()
        for number, value in enumerate(values, start=1)
    )


def test_interval_is_that_of_pairs_and_for_folds_nadeau_and_bengios() -> None:
    ours, theirs = [88.0, 92.1, 94.9, 97.0, 93.0], [90.0, 94.0, 97.0, 99.0, 95.2]
    of_folds = folds(5, fp32=theirs, bf16=ours)
    of_seeds = runs(fp32={"last_acc1": theirs}, bf16={"last_acc1": ours})
    for row in (*of_seeds["fp32"].values(), *of_seeds["bf16"].values()):
        row["validation_images"] = None  # without the grain of the validation set
    expected: Any = stats.ttest_rel(ours, theirs)
    found = difference(of_seeds)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.seen
    found = difference(of_folds)
    spread = (np.array(ours) - np.array(theirs)).std(ddof=1)
    reach = stats.t.ppf(0.975, 4) * spread * np.sqrt(1 / 5 + 1 / 4)
    assert (found.low, found.high) == pytest.approx((found.value - reach, found.value + reach))
    assert "(95 % interval for images like these, 5 folds)" in verdict_of(of_folds)["details"]
    of_folds = folds(5, fp32=[90.0, 91.0, 92.0, 93.0, 94.0], bf16=[90.4, 92.2, 93.7, 95.2, 97.0])
    assert not difference(of_folds).seen
    assert "more would" not in verdict_of(of_folds)["details"], "folds cannot be added"


def test_folds_are_named_in_troubles_and_notes() -> None:
    results = folds(5, fp32=[97.0, 98.0], bf16=[97.0, 98.0])
    results["bf16"][2] |= {"diverged": True, "skipped": 40}
    assert troubles(results, {}, MODES) == [
        "bf16: diverged with fold 2: the loss ended as NaN or well above its start",
        "bf16: with fold 2, 40 of 400 updates were skipped (10 %); docs/amp.md says what to do",
    ]
    rows = [row for each in results.values() for row in each.values()]
    lines = notes({**JUDGED, "runs": rows, "device": "cuda: a GPU", "seeds": [0], "folds": 3})
    assert "accuracy: after the last epoch, mean ± standard deviation over the folds" in lines
    assert "3 folds are few: only large differences in accuracy show" in lines
    verdict = verdict_of(folds(5, fp32=[97.0], bf16=[98.0]))
    assert "one fold is too few to compare accuracy" in verdict["text"]


@pytest.mark.slow
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_false_claims_between_equal_contenders_are_rare(names: str) -> None:
    """The same distribution under several names, 5 seeds: at most 6 % of comparisons claim any difference."""
    random, claims = np.random.default_rng(1), 0
    for _ in range(1000):
        results = runs(**{name: {"last_acc1": list(random.normal(90, 2, 5))} for name in names})
        claims += any(verdict["accuracy"]["seen"] for verdict in judge(results, names, ACCURACY))
    assert 0.03 <= claims / 1000 <= 0.06


# A run's folder


def line(event: str, update: int, epoch: int = 1, perf: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"event": event, "epoch": epoch, "update": update, **fields, "perf": perf or {}}


def train(update: int, rate: float, loss: float | None = 1.0, memory: float = 2.0, epoch: int = 1) -> dict[str, Any]:
    perf = {"images_per_second": rate, "peak_memory_gb": memory}
    return line("train", update, epoch, perf, loss=loss, skipped=update // 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Config.model_validate({"DATA": {"BATCH_SIZE": 50}, "TRAIN": {"ACCUM_ITER": 2}})
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    about = {
        "choices": {"precision": "bf16", "world_size": 4},
        "samples": {"train": 4000, "val": 360},
        "device": "cpu: one",
        "versions": {},
        "started": "2026-01-02T03:04:05",
    }
    (tmp_path / "run.json").write_text(json.dumps(about), encoding="utf-8")
    return tmp_path


def write(folder: Path, *lines: dict[str, Any], rest: str = "") -> None:
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + rest
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_speed_excludes_the_first_report_after_each_start_if_there_are_others(folder: Path) -> None:
    write(
        folder,
        line("run", 0, what="start"),
        train(5, 1.0),
        train(10, 800.0, memory=2.5),
        line("epoch", 10, perf={"seconds": 90.0}),
        line("val", 10, loss=0.5, acc1=90.0, ema_acc1=97.0),
        line("run", 10, perf={"seconds": 100.0}, what="paused"),
        line("run", 10, what="resume"),
        train(15, 2.0, epoch=2),
        train(20, 1000.0, epoch=2),
        train(25, 1200.0, loss=0.5, epoch=2),
        line("epoch", 25, 2, perf={"seconds": 95.0}),
        line("epoch", 35, 3, perf={"seconds": 5.0}),
        line("val", 35, 3, loss=0.4, acc1=95.0, ema_acc1=96.0),
        line("run", 35, 3, perf={"seconds": 50.0}, what="end"),
    )
    results = metrics_of(folder)
    assert results["images_per_second"] == 1000.0
    assert results["seconds_per_update"] == pytest.approx(50 * 2 * 4 / 1000)
    (folder / "checkpoints" / "step-35").mkdir(parents=True)
    (folder / "checkpoints" / "index.json").write_text('{"last": "step-35"}')
    batch = {"per_process": 50, "accumulated": 3, "processes": 1}  # as the run went on
    (folder / "checkpoints" / "step-35" / "meta.json").write_text(json.dumps({"batch": batch}))
    assert metrics_of(folder)["seconds_per_update"] == pytest.approx(50 * 3 / 1000)
    assert results["seconds_per_epoch"] == 5.0
    assert not results["start_up_counted"]
    assert results["peak_memory_gb"] == 2.5
    assert (results["last_acc1"], results["best_acc1"], results["last_loss"]) == (95.0, 97.0, 0.4)
    assert (results["updates"], results["skipped"], results["starts"], results["seconds"]) == (35, 2, 2, 150.0)
    assert (results["precision"], results["validation_images"]) == ("bf16", 360)
    assert not results["diverged"]
    write(folder, line("run", 0, what="start"), train(5, 10.0), line("run", 5, perf={"seconds": 1.0}, what="end"))
    results = metrics_of(folder)
    assert (results["images_per_second"], results["start_up_counted"]) == (10.0, True)
    assert (results["seconds_per_epoch"], results["last_acc1"]) == (None, None)


@pytest.mark.parametrize(
    ("losses", "top1", "diverged"),
    [
        *(((2.3, 2.31, 2.29), (), False), ((0.5, 1.5, 0.5, 1.5, 1.4), (), False)),
        ((2.3, 4.0, 6.0, 9.0), (), True),
        *(((2.3, 2.2, 2.1, 2.0, 1.9, 1.8, 1.7, 6.9), (), True), ((2.3, None), (90.0, 95.0), True)),
        ((0.764, 0.83, 0.896, 0.92, 1.139, 0.834, 0.625), (60.0, 58.0), False),  # noise of single batches
        *(((0.75, 1.0, 1.1, 1.5, 1.4, 1.5), (60.0, 62.0), False), ((0.75, 1.0, 1.1, 2, 3, 4), (60.0, 30.0), True)),
        ((2.3, 4.0, 6.0, 9.0), (40.0, 40.0), True),  # as good as guessing
    ],
)
def test_divergence(folder: Path, losses: tuple[float | None, ...], top1: tuple[float, ...], diverged: bool) -> None:
    about = json.loads((folder / "run.json").read_text()) | {"largest_class_percent": 40.0}
    (folder / "run.json").write_text(json.dumps(about))
    write(folder, *(train(nth, 10.0, loss) for nth, loss in enumerate(losses)), *(line("val", 0, acc1=x) for x in top1))
    assert metrics_of(folder)["diverged"] is diverged


def test_is_finished(folder: Path) -> None:
    write(folder, line("run", 0, what="start"), line("epoch", 10), train(15, 1.0, epoch=2), rest='{"event": "tra')
    assert not is_finished(folder)
    write(folder, line("run", 40, 5, what="end"))
    assert is_finished(folder)
