"""scripts/evaluate.py: metrics and -knn agree with scikit-learn and validation, on the run's data and on other."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm
from sklearn import metrics as sklearn
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from engine.evaluation import knn
from engine.task.several import scores_of
from engine.trained.model import Trained, load_trained, split_of_run
from tests.cli.test_pretraining import dark_and_light
from tests.predicted import validation_predictions
from tests.program import Result, Vitamp, metrics, run_program
from tools.common.evaluation import OneLabel, table_of
from utils.statistics.classes import balanced_accuracy_interval, macro_f1_interval
from utils.statistics.proportions import Interval, wilson
from utils.statistics.ranking import ranking_intervals
from vitamp.metrics import BALANCED, MACRO_F1, TOP1, TOP5

Say = Callable[..., Result]
CLASSES = 7
SCORES: Any = sklearn.precision_recall_fscore_support  # its type stubs do not know the values it takes


def of_logits(logits: torch.Tensor, labels: torch.Tensor) -> OneLabel:
    """Metrics of a model with these logits, in two batches."""
    trained: Any = SimpleNamespace(config=SimpleNamespace(MODEL=SimpleNamespace(NUM_CLASSES=logits.shape[1])))
    half = len(labels) // 2
    return OneLabel.of(trained, [(logits[:half], labels[:half]), (logits[half:], labels[half:])])


@pytest.fixture(scope="module")
def answers() -> tuple[torch.Tensor, torch.Tensor]:
    """Mostly correct logits; class 5 is never guessed, and class 6 has no images."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES - 1, (333,), generator=generator)
    logits = torch.randn(333, CLASSES, generator=generator)
    logits[torch.arange(333), labels] += 1.5
    logits[:, 5] -= 20
    return logits, labels


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_metrics_agree_with_scikit_learn(answers: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = answers
    found, guess, shares = of_logits(logits, labels), logits.argmax(1), logits.double().softmax(1).numpy()
    assert found.values[TOP1] == pytest.approx(100 * sklearn.accuracy_score(labels, guess))
    among = sklearn.top_k_accuracy_score(labels, shares, k=5, labels=range(CLASSES))
    assert found.values[TOP5] == pytest.approx(100 * among)
    assert found.values[BALANCED] == pytest.approx(100 * sklearn.balanced_accuracy_score(labels, guess), abs=1e-9)
    macro_f1 = 100 * float(sklearn.f1_score(labels, guess, average="macro"))
    assert found.values[MACRO_F1] == pytest.approx(macro_f1, abs=1e-9)
    told = found.as_json()
    assert told["macro_f1"] != told["f1_macro"], "class 6 is predicted and has no images"
    assert "1 class without images is predicted: 0 in macro F1, and not in the other means." in found.remarks()
    present = sorted(set(labels.tolist()))
    for average in ("macro", "weighted"):
        wanted: Any = SCORES(labels, guess, labels=present, average=average, zero_division=0)
        values = [told[f"{name}_{average}"] for name in ("precision", "recall", "f1")]
        assert values == pytest.approx([100 * float(value) for value in wanted[:3]])
    each: Any = SCORES(labels, guess, labels=range(CLASSES), zero_division=0)
    for values, of_class in zip((found.precision, found.recall, found.f1), each, strict=False):
        assert values.tolist() == pytest.approx((100 * of_class).tolist())
    assert found.support.tolist() == each[3].tolist()
    assert told["confusion"] == sklearn.confusion_matrix(labels, guess, labels=range(CLASSES)).tolist()
    assert found.confusion([1, 4]).tolist() == sklearn.confusion_matrix(labels, guess, labels=[1, 4]).tolist()
    assert found.nll == pytest.approx(sklearn.log_loss(labels, shares, labels=range(CLASSES)), rel=1e-6)
    assert found.brier == pytest.approx(((shares - np.eye(CLASSES)[labels.numpy()]) ** 2).sum(1).mean())


def test_calibration_error_and_bins(answers: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = answers
    found = of_logits(logits, labels)
    confidence, guess = (values.numpy() for values in logits.double().softmax(1).max(1))
    right, error = guess == labels.numpy(), 0.0
    for number, one in enumerate(found.bins):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        assert one.images == inside.sum()
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
            assert one.accuracy == pytest.approx(100 * right[inside].mean())
    assert found.ece == pytest.approx(100 * error)
    assert found.ece > 1


def test_certain_model_and_model_with_nan() -> None:
    labels = torch.arange(5)
    certain = of_logits(200 * torch.eye(5), labels)
    assert (certain.values[TOP1], certain.ece, certain.brier) == pytest.approx((100, 0, 0))
    assert certain.bins[-1].images == 5
    broken = of_logits(torch.full((5, 5), torch.nan), labels)
    assert "5 images have NaN or infinite logits." in broken.remarks()
    told = json.dumps(broken.as_json(), allow_nan=False)
    assert json.loads(told)["ece"] is None


@pytest.mark.parametrize(("which", "prefix"), [("model", ""), ("ema", "ema_")])
def test_metrics_are_those_of_validation(say: Say, digits_run: Path, tmp_path: Path, which: str, prefix: str) -> None:
    done = say(digits_run, "-weights", which, "-json", tmp_path / "eval.json", "-ngpus", 2, code=0)
    assert "-ngpus has no effect" in done.text
    validated = metrics(digits_run, "val")[-1]
    told = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert told["classes"] == [str(digit) for digit in range(10)]
    assert told["precision"] == "bf16"
    found = told["figures"][which]
    for name in ("acc1", "acc5", "balanced_acc", "macro_f1"):
        assert found[name] == validated[f"{prefix}{name}"]
    assert found["nll"] == pytest.approx(validated[f"{prefix}loss"], rel=1e-12)
    low, high = found["intervals"]["acc1"]
    assert low < found["acc1"] < high
    assert f"{found['acc1']:.2f} % ({low:.2f} to {high:.2f})" in done.out
    assert found["intervals"].keys() == {"acc1", "acc5", "balanced_acc", "macro_f1"}
    about = json.loads((digits_run / "run.json").read_text())
    assert found["largest_class_percent"] == about["largest_class_percent"]
    assert f"always guessing the largest class: {found['largest_class_percent']:.1f} % top-1" in done.out
    assert sum(map(sum, found["confusion"])) == found["images"] == 360
    assert done.out.count("\n  9 ") == 1, "one line per class"


def test_mirrored_images_are_averaged(say: Say, vitamp: Vitamp, digits_run: Path, tmp_path: Path) -> None:
    """Against the model itself, called by hand; predict.py gives the same classes."""
    done = say(digits_run, "-tta", "flip", "-amp", "off", "-json", tmp_path / "eval.json", code=0)
    assert "-tta flip: mean of the probabilities of each image and its mirror image." in done.out
    trained = load_trained(digits_run, amp="off")
    dataset = split_of_run(trained)
    batch = dataset.__getitems__([(0, index) for index in range(len(dataset))])
    with torch.no_grad():
        views = [trained.model(trained.inputs(images)) for images in (batch.images, batch.images.flip(-1))]
    logits = torch.stack([view.softmax(1) for view in views]).mean(0).log()
    found = json.loads((tmp_path / "eval.json").read_text())["figures"][trained.chosen.which.name]
    assert found["acc1"] == pytest.approx(100 * float((logits.argmax(1) == batch.labels).float().mean()))
    assert found["nll"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, batch.labels)), rel=1e-5)
    say(digits_run, "-amp", "off", "-json", tmp_path / "plain.json", code=0)
    other = json.loads((tmp_path / "plain.json").read_text())["figures"][trained.chosen.which.name]
    assert other["nll"] != found["nll"]
    words = ("-part", "val", "-tta", "flip", "-amp", "off", "-topk", "1", "-format", "csv")
    guessed = vitamp(digits_run, *words, script="scripts/predict.py")
    assert "mean of the probabilities of each image and its mirror image" in guessed.err
    rows = list(csv.DictReader(guessed.out.splitlines()))
    assert [int(row["label"]) for row in rows] == logits.argmax(1).tolist()


@pytest.fixture
def tree(digits_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """Validation images of the run in class folders with these names."""

    def make(names: dict[int, str]) -> Path:
        own = validation_predictions(load_trained(digits_run), workers=0)
        for row, label in enumerate(own.labels.tolist()):
            if label in names:
                path = tmp_path / "tree" / "val" / names[label] / f"{row:03d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                own.picture(row).save(path)
        return tmp_path / "tree"

    return make


OTHER = ("-dataset", "imagefolder")


def test_classes_of_other_data_are_matched_by_name(
    say: Say, digits_run: Path, tree: Callable[..., Path], tmp_path: Path
) -> None:
    """Folders 3, 4 and 8 have labels 0, 1 and 2 in that data set."""
    root = tree({3: "3", 4: "4", 8: "8"})
    done = say(digits_run, *OTHER, "-data_path", root, "-json", tmp_path / "eval.json", code=0)
    found = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))["figures"]["model"]
    own = validation_predictions(load_trained(digits_run), workers=0)
    chosen = torch.isin(own.labels, torch.tensor([3, 4, 8]))
    guess, labels = own.guesses()[chosen, 0], own.labels[chosen]
    assert found["images"] == len(labels)
    assert found["confusion"] == sklearn.confusion_matrix(labels, guess, labels=range(10)).tolist()
    assert found["recall_macro"] == pytest.approx(100 * SCORES(labels, guess, labels=[3, 4, 8], average="macro")[1])
    assert "images of 3 classes" in done.out


def test_unknown_classes_are_named(say: Say, digits_run: Path, tree: Callable[..., Path]) -> None:
    """There are eleven, more than the model has."""
    root = tree({label: "seven" if label == 7 else f"{label}" for label in range(10)})
    shutil.copytree(root / "val" / "1", root / "val" / "six")
    done = say(digits_run, *OTHER, "-data_path", root, code=2)
    assert "2 of its 11 classes are unknown to the model: seven, six." in done.err
    assert "The model was trained on 0, 1, 2" in done.err


def test_unreadable_image_ends_the_evaluation(say: Say, digits_run: Path, tree: Callable[..., Path]) -> None:
    root = tree({3: "3", 4: "4"})
    (root / "val" / "3" / "bad.png").write_text("no image")
    done = say(digits_run, *OTHER, "-data_path", root, code=1)
    assert "bad.png (not an image in a known format)" in done.err
    assert "top-5" not in done.out, "no metrics of the other images alone"


def test_bad_command_lines_are_refused(say: Say, digits_run: Path, tmp_path: Path) -> None:
    for words, said in (
        ((), "RUN_OR_CHECKPOINT is missing"),
        ((tmp_path / "none",), "no such file or folder"),
        ((digits_run, "-weights", "best"), "takes auto, model or ema"),
        ((digits_run, "-part", "test"), "the data set digits has no test split"),
        ((digits_run, "-part", "vol"), "takes train, val, test or all. Did you mean val?"),
        ((digits_run, "-json", tmp_path / "x.txt"), "name a file that ends in .json"),
        ((digits_run, "-cfg", "x.yaml"), "-cfg x.yaml: leave this out. The model is evaluated with the settings"),
        ((digits_run, "-pretrained", "x.pth"), "the model is the first argument"),
        ((digits_run, "-dataset", "imagefolder"), "needs DATA.DATA_PATH"),
        ((digits_run, "MODEL.DEPTH=3"), "MODEL.DEPTH: leave this out; the model is the first argument"),
        ((digits_run, "MODEL.POOL=mean"), "MODEL.POOL: leave this out; the model is the first argument"),
        ((digits_run, "DEVICE=mps"), "-device mps: this machine has no mps device"),
        ((digits_run, "-knn", "-part", "train"), "-knn learns from the training images, so it needs others"),
        ((digits_run, "-calibrate", "DATA.PART=train"), "is surer of them than of others"),
        ((digits_run, "-knn", "-calibrate"), "-calibrate: does not go with -knn"),
        ((digits_run, "-pool", "mean"), "-pool mean: chooses the features that -knn and -probe use"),
        ((digits_run, "-knn", "-pool", "patches"), "-pool"),
        ((digits_run, "-out", tmp_path / "out"), "the run that -probe saves; give that too"),
        ((digits_run, "-probe", "-knn"), "-knn: leave it out; -probe shows it too"),
        ((digits_run, "-probe", "-tta", "flip"), "-tta: does not go with -probe"),
        ((digits_run, "-probe", "-part", "train"), "-part train: -probe learns from the training images"),
        ((digits_run, "-probe", "-pool", "patches"), "-pool patches: takes "),
        (("-probe",), "RUN_OR_CHECKPOINT is missing"),
        (("-pretrained", "w.pth"), "RUN_OR_CHECKPOINT is missing"),
        (("-probe", "-cfg", "configs/vit_digits.yaml"), "-probe: MODEL.PRETRAINED is not set; add -pretrained"),
        (("-probe", "-model", "resnet10t", "-pretrained", "w.pth", "-dataset", "digits"), "w.pth"),
        (("-probe", "-pretrained", "w.pth", "-model", "resnet10t", "-weights", "ema"), "of a run, and no run is named"),
        (("-knn", "-pretrained", "w.pth", "-model", "resnet10t", "-use", "no.py"), "no.py"),
    ):
        done = say(*words, code=2)
        assert said in done.err, (words, done.err)


# 95 % intervals hold the true value about that often.


REPEATS = 400
Drawn = tuple[np.ndarray, np.ndarray]


def drawn_classes(generator: np.random.Generator, sizes: list[int], recalls: list[float]) -> Drawn:
    """Labels, about as many of each class, and guesses: right with the class's recall, else any other class."""
    labels = generator.choice(len(sizes), sum(sizes), p=np.array(sizes) / sum(sizes))
    other = (labels + generator.integers(1, len(sizes), len(labels))) % len(sizes)
    return labels, np.where(generator.random(len(labels)) < np.array(recalls)[labels], labels, other)


def true_values(sizes: list[int], recalls: list[float]) -> tuple[float, float]:
    """Balanced accuracy and macro F1 of infinitely many images of these proportions."""
    classes, shares = len(sizes), np.array(sizes, dtype=float)
    right = shares * recalls
    guessed = right + ((shares - right).sum() - (shares - right)) / (classes - 1)
    return 100 * float(np.mean(recalls)), 100 * float((2 * right / (shares + guessed)).mean())


@pytest.mark.parametrize(
    ("sizes", "recalls"),
    [
        ([90, 10], [0.9, 0.9]),
        ([4850, 150], [0.96, 0.8]),
        ([30, 20, 15, 10, 8], [0.7] * 5),
        ([200, 50, 20, 10, 5], [0.95, 0.8, 0.6, 0.5, 0.3]),
        ([5] * 100, [0.6] * 100),
        ([20] * 10, [0.97] * 10),
    ],
)
def test_class_metrics_are_covered(sizes: list[int], recalls: list[float]) -> None:
    """In random samples, where the number of images of a class is chance too."""
    generator, classes = np.random.default_rng(0), len(sizes)
    truths = true_values(sizes, recalls)
    held, few = np.zeros(2), 0
    for _ in range(REPEATS):
        drawn = drawn_classes(generator, sizes, recalls)
        for number, interval in enumerate((balanced_accuracy_interval, macro_f1_interval)):
            found = interval(*drawn, classes)
            held[number] += found is None or found.low <= truths[number] <= found.high
            few += found is None
    assert few <= 0.05 * REPEATS
    assert (held / REPEATS >= 0.91).all(), held / REPEATS
    assert (held / REPEATS < 1).all(), "so wide that they say nothing"


def test_without_a_mistake_the_smallest_class_decides_how_wide_intervals_are() -> None:
    """Of 5 images that are all right, one in seven may be wrong, and so one in fourteen of the mean of two classes."""
    labels = np.repeat([0, 1], [200, 5])
    for interval in (balanced_accuracy_interval, macro_f1_interval):
        found = interval(labels, labels, 2)
        assert found is not None
        assert 75 < found.low < 92, interval
        assert found.high == 100
    truth = np.arange(200)[:, None] < [5, 100]
    of_map, of_area = ranking_intervals(truth.astype(float), truth)
    assert of_map is not None
    assert of_area is not None
    assert 90 < of_area.low < 96


def drawn_scores(generator: np.random.Generator, positives: int, images: int, classes: int, area: float) -> Drawn:
    truth = generator.random((images, classes)) < positives / images
    return generator.standard_normal(truth.shape) + np.sqrt(2) * norm.ppf(area) * truth, truth


@pytest.mark.parametrize(("positives", "images", "classes"), [(30, 60, 1), (20, 500, 1), (60, 200, 2), (30, 300, 8)])
@pytest.mark.parametrize("area", [0.75, 0.9])
def test_ranking_metrics_are_covered(positives: int, images: int, classes: int, area: float) -> None:
    generator = np.random.default_rng(0)
    many = drawn_scores(generator, 200_000 * positives // images, 200_000, 1, area)
    true_map = 100 * scores_of(*many).map
    held = np.zeros(2)
    for _ in range(REPEATS):
        of_map, of_area = ranking_intervals(*drawn_scores(generator, positives, images, classes, area))
        assert of_map is not None
        assert of_area is not None
        held += of_map.low <= true_map <= of_map.high, of_area.low <= 100 * area <= of_area.high
    assert (held / REPEATS >= 0.90).all(), held / REPEATS


def test_too_few_images_per_class_are_named() -> None:
    """One or two images of each class: macro F1 is lower than of many images, by more than an interval could say."""
    labels, guesses = map(torch.from_numpy, drawn_classes(np.random.default_rng(0), [2] * 100, [0.6] * 100))
    found = of_logits(F.one_hot(guesses, 100).double(), labels)
    assert found.as_json()["intervals"]["macro_f1"] is None
    said = "\n".join(table_of(found, "model"))
    assert "No interval of macro F1: too few images per class." in said
    assert f"{found.values[MACRO_F1]:.2f} % (" not in said
    letters = np.repeat(np.arange(26), 2)
    assert macro_f1_interval(letters, np.zeros(52, dtype=int), 26) is None, "it would be 0 to 70 %"
    of_map, of_area = ranking_intervals(*drawn_scores(np.random.default_rng(0), 2, 200, 40, 0.8))
    assert of_map is None
    assert of_area is not None


def test_top_5_of_five_classes_is_in_no_table() -> None:
    labels = torch.arange(30) % 5
    for classes in (5, 6):
        found = of_logits(F.one_hot(labels, classes).double(), labels)
        assert ("top-5" in found.cells()) is (classes == 6)
        assert found.as_json()["acc5"] == 100


@pytest.mark.parametrize("interval", [balanced_accuracy_interval, macro_f1_interval])
def test_all_right_is_not_certain(interval: Callable[[np.ndarray, np.ndarray, int], Interval | None]) -> None:
    """A bootstrap would say 100 to 100 %."""
    labels = np.repeat(np.arange(3), 12)
    assert interval(labels, labels, 3) == pytest.approx(wilson(100, 36))
    of_wrong = interval(np.repeat([0, 1], 5), np.repeat([1, 0], 5), 2)
    assert of_wrong is not None
    assert of_wrong.high > 20
    of_ten = np.repeat(np.arange(10), 15)
    one_wrong = interval(of_ten, np.r_[1, of_ten[1:]], 10)
    assert one_wrong is not None
    assert one_wrong.low > 92, "not as if every class had errors: top-1 has 96.3"
    rare = np.repeat([0, 1], [197, 3])
    assert interval(rare, rare, 2) is None, "three images of a class say too little of it"
    assert interval(np.repeat([0, 1], [196, 4]), np.repeat([0, 1], [196, 4]), 2) is not None


def test_ranking_without_error_and_without_classes() -> None:
    truth = np.arange(20)[:, None] < 5
    of_map, of_area = ranking_intervals(-np.arange(20.0)[:, None], truth)
    assert of_map is not None
    assert of_area is not None
    assert of_area.high == of_map.high == 100
    assert 50 < of_map.low < 95
    of_every_image = np.ones((20, 1), dtype=bool)
    assert ranking_intervals(np.zeros((20, 1)), of_every_image) == (None, None)
    scores, more = np.random.default_rng(0).normal(size=(200, 2)) + np.eye(200, 2), np.ones((200, 1), dtype=bool)
    known = np.random.default_rng(1).random((200, 2)) < 0.3
    (alone, area), (both, same_area) = (
        ranking_intervals(*given) for given in ((scores, known), (np.c_[scores, scores[:, :1]], np.c_[known, more]))
    )
    assert alone is not None
    assert both is not None
    assert same_area == area, "AUROC leaves the class out"
    assert (both.low, both.high) == pytest.approx(((2 * alone.low + 100) / 3, (2 * alone.high + 100) / 3), abs=2)
    assert ranking_intervals(np.full((20, 1), np.nan), truth) == (None, None)


# -knn and linear probes.


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of images that any features separate."""
    folder = tmp_path_factory.mktemp("flowers")
    dark_and_light(folder)
    return folder


PROBE = ("-cfg", "configs/linear_probe_vit_base.yaml", "MODEL.NAME=tiny", "MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=16")
PROBE += ("MODEL.DEPTH=1", "MODEL.NUM_HEADS=2")


def _scikit_learn(bank: np.ndarray, labels: np.ndarray, count: int) -> KNeighborsClassifier:
    """Its distance is 1 - similarity."""
    weights: Any = lambda distance: np.exp((1 - distance) / knn.TEMPERATURE)  # noqa: E731
    return KNeighborsClassifier(count, metric="cosine", weights=weights).fit(bank, labels)


def test_guesses_agree_with_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batches in which the training images come, and the chunks in which they are compared."""
    monkeypatch.setattr(knn, "AT_ONCE", 33)
    draw = np.random.default_rng(0)
    bank, labels = draw.normal(size=(500, 24)), draw.integers(0, 7, 500)
    bank[np.arange(500), labels] += 2
    images = draw.normal(size=(100, 24))
    images[np.arange(100), np.arange(100) % 7] += 2
    for count in (1, 5, 40):
        rows = [torch.from_numpy(one) for one in (images, np.arange(100) % 7, np.arange(100))]
        others = [torch.from_numpy(one).split(64) for one in (bank, labels, labels)]
        found, truth = knn.classify([tuple(rows)], zip(*others, strict=True), count)  # pyright: ignore[reportArgumentType]
        assert torch.equal(truth, rows[1])
        assert (found.numpy() == _scikit_learn(bank, labels, count).predict(images)).all()
        assert 0.3 < (found.numpy() == np.arange(100) % 7).mean() < 1


def _seen(trained: Trained, part: str, pool: str) -> tuple[np.ndarray, np.ndarray]:
    dataset = split_of_run(trained, part)
    batch = dataset.__getitems__([(0, index) for index in range(len(dataset))])
    return trained.features(batch.images, pool).numpy(), batch.labels.numpy()  # pyright: ignore[reportArgumentType]


def test_accuracy_of_a_run(say: Say, digits_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "knn.json"
    words = ("-pool", "mean", "-weights", "ema", "-amp", "off", "-batch_size", "auto")
    done = say(digits_run, "-knn", 15, *words, "-json", out, code=0)
    found = json.loads(out.read_text())
    assert (found["knn"], found["pool"], found["bank_images"]) == (15, "mean", 1437)
    assert found["data"] == "digits, validation split"
    trained = load_trained(digits_run, "ema", amp="off")
    images, truth = _seen(trained, "val", "mean")
    right = (_scikit_learn(*_seen(trained, "train", "mean"), 15).predict(images) == truth).mean()
    figures = found["figures"]["ema"]
    assert figures["acc1"] == pytest.approx(100 * right, abs=0.3)  # one image: its similarities are in fp32
    assert figures["intervals"]["acc1"] == pytest.approx(wilson(figures["acc1"], 360))
    assert f"{figures['acc1']:.2f} % (" in done.text


def test_a_model_without_labels_on_other_images(say: Say, unlabelled_run: Path, flowers: Path, tmp_path: Path) -> None:
    done = say(unlabelled_run, "-knn", code=2)
    assert "has no labels. Name images with labels, as in -dataset imagefolder -data_path DIR" in done.err
    words = ("-data_path", flowers, "DATA.VAL_FRACTION=0.25")  # class folders, which the run would read without labels
    done = say(unlabelled_run, "-knn", *words, "-json", tmp_path / "knn.json", code=0)
    found = json.loads((tmp_path / "knn.json").read_text())
    assert (found["knn"], found["bank_images"], found["figures"]["model"]["images"]) == (20, 30, 10)
    assert found["figures"]["model"]["acc1"] == 100
    done = say(unlabelled_run, "-knn", 31, *words, code=2)
    assert "has only 30 training images" in done.err


@pytest.mark.slow
def test_a_linear_probe_converges_to_scikit_learns(digits_run: Path, tmp_path: Path) -> None:
    """The same minimum as LogisticRegression on the encoder's features: cross-entropy with an L2 penalty of weights."""
    decay, images = 0.01, 1437
    data = ("-dataset", "digits", "-image_size", 8, "DATA.IMAGE_CHANNELS=1", "-batch_size", images)
    descent = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.OPTIMIZER.MOMENTUM=0.9", "TRAIN.BASE_LR=0.5", "TRAIN.WARMUP_EPOCHS=0")
    plain = ("MODEL.NEW_CLASSIFIER=true", f"TRAIN.WEIGHT_DECAY={decay}", "TRAIN.GRAD_CLIP=null")
    rare = ("TRAIN.NUM_EPOCHS=1000", "VALIDATE_FREQ=1000", "SAVE_FREQ=1000", "DEVICE=cpu", "THREADS=1")
    words = (*PROBE, "-pretrained", digits_run, *data, *descent, *plain, *rare, "-output", tmp_path / "run")
    run_program(*words, streams=tmp_path, timeout=600, code=0)

    trained = load_trained(tmp_path / "run", amp="off")
    (bank, labels), (features, truth) = (_seen(trained, part, "pooled") for part in ("train", "val"))
    theirs = LogisticRegression(C=1 / (images * decay), tol=1e-10, max_iter=10_000).fit(bank.astype(np.float64), labels)
    head: Any = trained.model.get_submodule("head")
    ours = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()

    def objective(weights: np.ndarray, bias: np.ndarray) -> float:
        logits = torch.from_numpy(bank.astype(np.float64) @ weights.T + bias)
        return float(F.cross_entropy(logits, torch.from_numpy(labels)) + decay / 2 * (weights**2).sum())

    assert objective(*ours) == pytest.approx(objective(theirs.coef_, theirs.intercept_), rel=1e-6)
    (val,) = (line for line in metrics(tmp_path / "run", "val") if line["epoch"] == 1000)
    assert val["acc1"] == pytest.approx(100 * theirs.score(features, truth), abs=1e-9)
    assert 60 < val["acc1"] < 100
