"""The verdict for other images: its error rate, what each image adds to a metric, and the runs' predictions."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.program import Result
from tools.common.comparison import Judged
from tools.common.per_image import per_image, values_of_images
from tools.compare.command import main
from utils.record.history import History
from utils.record.predictions import PREDICTIONS, read_predictions
from utils.statistics.crossed import assumed_noise, crossed_interval, noise_of
from utils.statistics.differences import LIKE_THESE, THESE_ALONE, student_interval
from vitamp.metrics import AUROC, BALANCED, MACRO_F1, MAP, PLAIN, TOP1

Call = Callable[..., Result]


def of_runs(*contenders: np.ndarray) -> np.ndarray:
    """Contenders x seeds: their metric."""
    return np.stack([each.mean(1) for each in contenders])


@pytest.mark.parametrize(("seeds", "alike"), [(2, 1), (3, 1), (10, 1), (3, 5)])
def test_equal_contenders_that_differ_by_image_are_rarely_told_apart(seeds: int, alike: int) -> None:
    """As with frozen features: seeds hardly differ, so Student's t over seeds takes the choice of images for truth.

    `alike`: images of one group (DATA.GROUP).
    """
    random, claims, before = np.random.default_rng(seeds), 0, 0
    for _ in range(300):
        base = random.normal(2.2, 3, 200 // alike)
        noise = (random.logistic(size=(seeds, 200)) * 0.1 for _ in range(2))
        own = (np.repeat(base + random.normal(0, 1, len(base)), alike) for _ in range(2))
        ours, theirs = (100.0 * (each < logits) for each, logits in zip(noise, own, strict=True))
        values, groups = (ours - theirs).mean(1), np.arange(200) // alike
        claims += crossed_interval(float(values.mean()), ours, theirs, of_runs(ours, theirs), groups).seen
        before += student_interval(values.tolist(), 1, 100 / 200).seen
    assert claims <= 0.07 * 300
    assert before > 2 * claims


def test_seeds_of_all_contenders_say_how_far_runs_shift() -> None:
    """Of three seeds and ten contenders, some pair agrees by chance: by pairs alone, 16 % claimed a difference."""
    random, claims = np.random.default_rng(0), 0
    for _ in range(150):
        base = random.normal(2.2, 3, 1000)
        logits = base + random.normal(0, 0.5, (10, 1, 1000)) + random.normal(0, 0.3, (10, 3, 1))
        hits = 100.0 * (random.logistic(size=logits.shape) * 0.5 < logits)
        pairs = [(each, hits[0]) for each in hits[1:]]
        claims += any(
            crossed_interval(float((a - b).mean()), a, b, of_runs(*hits), comparisons=9).seen for a, b in pairs
        )
    assert claims <= 0.06 * 150


def test_a_true_difference_is_seen() -> None:
    random, seen = np.random.default_rng(0), 0
    for _ in range(100):
        base = random.normal(2.2, 3, 1000)
        ours, theirs = (100.0 * (random.logistic(size=(3, 1000)) < base + more) for more in (0.6, 0.0))
        found = crossed_interval(float((ours - theirs).mean()), ours, theirs, of_runs(ours, theirs))
        seen += found.seen
        assert found.holds_for == LIKE_THESE
    assert seen > 80


def test_few_images_that_differ_are_no_certainty() -> None:
    """4 images that only one of the two has right: an exact test of McNemar says 12 %."""
    theirs = np.full((1, 200), 100.0)
    ours = theirs.copy()
    ours[:, :4] = 0
    assert not crossed_interval(-2.0, ours, theirs, of_runs(ours, theirs)).seen
    for seeds in (1, 3):
        same = np.full((seeds, 200), 100.0)
        found = crossed_interval(0.0, same, same, of_runs(same, same))
        assert found.low == pytest.approx(-1.4, abs=0.03), "as large as of two images that differ"
        assert found.high == pytest.approx(1.4, abs=0.03)


@pytest.mark.parametrize(("images", "drop", "seeds"), [(20, 0.05, 1), (100, 0.01, 1), (100, 0.01, 3), (200, 0.005, 10)])
def test_a_drop_that_no_image_shows_is_not_ruled_out(images: int, drop: float, seeds: int) -> None:
    """All seeds lose the same images; of 20, in 36 of 100 draws none."""
    random, missed = np.random.default_rng(0), 0
    theirs = np.full((seeds, images), 100.0)
    for _ in range(300):
        ours = theirs * (random.random(images) >= drop)
        found = crossed_interval(float((ours - theirs).mean()), ours, theirs, of_runs(ours, theirs))
        assert found.low is not None
        assert found.high is not None
        missed += not found.low <= -100 * drop <= found.high
    assert missed <= 0.07 * 300


def test_made_up_images_are_as_large_as_those_that_make_the_noise() -> None:
    """Not as in one run, where seeds differ much; but as rare images that count for much, as in balanced accuracy."""
    random = np.random.default_rng(0)
    base = random.normal(2, 3, 200)
    ours, theirs = (100.0 * (random.logistic(size=(10, 200)) * 3 < base) for _ in range(2))
    rare = np.where(np.arange(200) < 4, 1000.0, 1.0) * np.resize([1, -1], 200) * np.ones((2, 1))
    for one, other, least, most in ((ours, theirs, 1, 1.08), (rare, 0 * rare, 1.4, 1.6)):
        own = (one - other).mean(0).var(ddof=1) / 200
        assert least < noise_of(one, other, of_runs(one, other)).by_image / own < most


def test_more_seeds_or_else_more_images_are_named() -> None:
    random = np.random.default_rng(0)
    base = random.normal(2.2, 3, 300)
    noise = (random.logistic(size=(3, 300)) * 0.05 for _ in range(2))
    ours, theirs = (100.0 * (each < base + random.normal(0, 1, 300)) for each in noise)
    found = crossed_interval(1.5, ours, theirs, of_runs(ours, theirs))
    assert not found.seen
    assert found.runs_needed is None, "quiet seeds: more of them tell nothing about other images"
    assert found.images_needed is not None
    measured = noise_of(ours, theirs, of_runs(ours, theirs))
    assert measured.planned(3, found.images_needed).half_width(0.975, 0.8) < abs(found.value)
    assert assumed_noise(3, 1000).half_width(0.975, 0.8) > assumed_noise(10, 4000).half_width(0.975, 0.8)


def test_values_of_images_vary_as_the_metric_does() -> None:
    """Their standard error, against the spread of the metric over samples drawn anew."""
    random = np.random.default_rng(0)
    for metric in (TOP1, BALANCED, MACRO_F1, MAP, AUROC):
        values, errors = [], []
        for _ in range(300):
            labels = random.choice(3, 300, p=[0.6, 0.3, 0.1])
            guesses = np.where(random.random(300) < 0.7, labels, random.integers(0, 3, 300))
            columns = {"guess": guesses}
            if metric in (MAP, AUROC):
                labels = (random.random((300, 3)) < 0.2).astype(np.int64)
                columns = {"logits": labels + random.normal(0, 1, (300, 3))}
            of_images = values_of_images(metric, labels, columns)
            assert of_images is not None
            values.append(of_images.mean())
            errors.append(of_images.std(ddof=1) / np.sqrt(300))
        assert np.mean(errors) == pytest.approx(np.std(values), rel=0.12), metric.name


@pytest.mark.parametrize("positives", [(2,), (4,), (2, 2, 2), (1, 100, 100)])
def test_auroc_of_too_few_positives_is_not_compared(positives: tuple[int, ...]) -> None:
    """One run each of equal models claimed a difference in 14 % with 2 positives, in 50 % with one."""
    random = np.random.default_rng(0)

    def of_images(*numbers: int) -> np.ndarray | None:
        truth = np.stack([np.arange(300) < number for number in numbers], axis=1)
        return values_of_images(AUROC, truth.astype(int), {"logits": random.normal(size=truth.shape)})

    assert of_images(*positives) is None
    assert of_images(*(300 - number for number in positives)) is None, "nor of as few negatives"
    assert of_images(5) is not None
    assert of_images(2, 2, 2, 2) is not None
    assert of_images(*positives, 0) is None, "a class without positives does not count"


def test_metrics_of_different_images_are_not_compared(
    tiny: Path, tmp_path: Path, in_process: Callable[..., Call]
) -> None:
    words = ("-cfg", tiny, "-dataset", "synthetic", "TRAIN.MAX_UPDATES=4", "REPORT_FREQ=2", "-seeds", "2")
    for varied, is_compared in (("SYNTHETIC_VAL=64,96", False), ("SYNTHETIC_TRAIN=640,960", True)):
        out = tmp_path / varied
        said = in_process(main)(*words, "-vary", f"DATA.{varied}", "-output", out, code=0).out
        assert ("accuracy not compared, because the validation images differ" in said) is not is_compared
        (verdict,) = json.loads((out / "compare.json").read_text())["verdicts"]
        assert (verdict["accuracy"] is not None) is is_compared


@pytest.mark.usefixtures("bf16_cpu")
def test_compare_speaks_of_images_like_these(tiny: Path, tmp_path: Path, in_process: Callable[..., Call]) -> None:
    out = tmp_path / "out"

    def compare(*words: object, code: int = 0) -> Result:
        small = ("TRAIN.MAX_UPDATES=4", "REPORT_FREQ=2", "-vary", "lr=1e-3,1e-5", "-output", out)
        return in_process(main)("-cfg", tiny, *small, *words, code=code)

    said = compare("-seeds", "2").text
    assert "With 2 seeds and 360 validation images, a difference in accuracy of" in said
    assert "assumed: runs of two settings disagree on 20 % of the images" in said
    assert "95 % interval for images like these, 2 seeds" in said

    run = out / "lr-1e-3-0"
    last = History.of_run(run).of("val")[-1]
    found = per_image(run, TOP1, PLAIN)
    assert found is not None
    assert found.values.mean() == pytest.approx(last["acc1"])

    def holds_for() -> str:
        return json.loads((out / "compare.json").read_text())["verdicts"][0]["accuracy"]["holds_for"]

    assert holds_for() == LIKE_THESE
    assert "measured on the finished runs" in compare("-seeds", "3").text
    said = compare("-seeds", "3", "-these_images").text
    assert "95 % interval for these images alone, 3 seeds" in said
    assert holds_for() == THESE_ALONE
    assert "leave one of the two out" in compare("-folds", "3", "-these_images", code=2).err

    content = bytearray((run / PREDICTIONS).read_bytes())
    content[-1] ^= 1
    (run / PREDICTIONS).write_bytes(content)
    assert read_predictions(run, last["update"]) is None, "damaged"
    compare("-seeds", "3")
    assert holds_for() == THESE_ALONE, "as of a run of an earlier version"
    assert Judged(TOP1, PLAIN).words == "accuracy"
