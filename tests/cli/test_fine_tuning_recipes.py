"""Fine-tuning in one line: the classes come from the images, the preprocessing from the weights."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

from datasets.given import open_given
from engine.evaluation.start import PROBE_IS_BEST
from engine.trained.model import load_trained
from tests.datasets.pictures import decoded_by
from tests.predicted import validation_predictions
from tests.program import ROOT, Result, Vitamp, metrics, run_program, save_image
from tests.tools.timm_alone import in_timm_alone
from vitamp.weights import read_header

MEAN, STD = (0.4, 0.45, 0.55), (0.2, 0.21, 0.22)
SIZES: dict[str, Any] = {"depth": 1, "embed_dim": 32, "num_heads": 2}
SMALL = [*(f"MODEL.{key.upper()}={value}" for key, value in SIZES.items()), "-device", "cpu", "-batch_size", 16]
SMALL += ["THREADS=1", "DATA.NUM_WORKERS=1", "SAVE_FREQ=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 200 images in five classes, and weights that timm saved with their description."""
    folder = tmp_path_factory.mktemp("flowers")
    for number in range(200):
        save_image(folder / "flowers" / f"class_{number % 5}" / f"{number}.jpg", seed=number)
    described = {"mean": MEAN, "std": STD, "crop_pct": 0.95, "input_size": (3, 32, 32)}
    described |= {"crop_mode": "squash", "interpolation": "bilinear"}
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", img_size=32, **SIZES, pretrained_cfg_overlay=described)
    save_for_hf(model, str(folder / "weights"), safe_serialization=True)
    return folder


def one_line(place: Path, run: Path) -> list[object]:
    """The command of the recipe's header, with small weights."""
    line = ["-cfg", ROOT / "configs" / "finetune_vit_base.yaml", "-data_path", place / "flowers", "-amp"]
    return [*line, "-pretrained", place / "weights", "-output", run, "-resume", "auto", *SMALL]


@pytest.fixture(scope="module")
def trained(place: Path) -> tuple[Path, Result]:
    done = run_program(*one_line(place, place / "run"), "-epochs", 1, streams=place, code=0)
    return place / "run", done


def test_one_line_trains_with_the_classes_of_the_data_and_the_preprocessing_of_the_weights(
    place: Path, trained: tuple[Path, Result]
) -> None:
    run, done = trained
    data = place / "flowers"
    assert f"DATA.DATASET imagefolder: {data} has class folders without train/ and val/" in done.out
    assert f"MODEL.NUM_CLASSES 5: classes of imagefolder in {data}" in done.out
    assert (
        f"Preprocessing of {place / 'weights' / 'config.json'}: DATA.IMAGE_SIZE 32, DATA.CROP_PCT 0.95, "
        "DATA.CROP_MODE squash, DATA.INTERPOLATION bilinear, DATA.IMAGENET_MEAN [0.4, 0.45, 0.55], "
        "DATA.IMAGENET_STD [0.2, 0.21, 0.22]"
    ) in done.out
    assert "180 training and 20 validation images" in done.out
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["MODEL"]["NUM_CLASSES"], saved["DATA"]["DATASET"], saved["DATA"]["IMAGE_SIZE"]) == (
        5,
        "imagefolder",
        32,
    )
    assert (tuple(saved["DATA"]["IMAGENET_MEAN"]), tuple(saved["DATA"]["IMAGENET_STD"])) == (MEAN, STD)
    meta = json.loads(next(run.glob("checkpoints/step-*/meta.json")).read_text())
    assert meta["input"] == {
        "image_size": 32,
        "channels": 3,
        "crop_pct": 0.95,
        "crop_mode": "squash",
        "interpolation": "bilinear",
        "mean": list(MEAN),
        "std": list(STD),
        "crop": "middle",
        "background": [255, 255, 255],
        "exif_rotate": False,
    }


@pytest.mark.parametrize(("photos", "trained"), [(12, 10), (5, 3)])
def test_few_photos_are_trained_on(vitamp: Vitamp, place: Path, tmp_path: Path, photos: int, trained: int) -> None:
    for number in range(photos):
        save_image(tmp_path / "photos" / f"class_{number % 2}" / f"{number}.jpg", seed=number)
    line = one_line(place, tmp_path / "run")
    line[line.index(place / "flowers")] = tmp_path / "photos"
    done = vitamp(*line, "DATA.GROUP=class_.", code=2)  # of two groups, one is for training
    assert "a probe needs two images or groups; MODEL.NEW_CLASSIFIER=zero needs none" in done.err
    assert "features of these very weights" not in done.out
    done = vitamp(*line, "-epochs", 1, "-batch_size", 32, code=0)
    assert f"{trained} training and 2 validation images" in done.out
    assert f"1 update per epoch, which is of {trained} images" in done.out


def test_the_same_line_resumes_without_the_weights(
    vitamp: Vitamp, place: Path, trained: tuple[Path, Result], tmp_path: Path
) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    line = one_line(place, tmp_path / "run")
    line[line.index("-pretrained") + 1] = tmp_path / "no_longer_here"
    done = vitamp(*line, "-epochs", 2, code=0)
    changed = [text.split("changed since: ")[1] for text in done.out.splitlines() if "changed since: " in text]
    assert {text.partition(":")[0] for text in changed} == {"MODEL.PRETRAINED", "TRAIN.NUM_EPOCHS"}
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["MODEL"]["NUM_CLASSES"], saved["DATA"]["CROP_PCT"]) == (5, 0.95)
    assert saved["DATA"]["CROP_MODE"] == "squash"


def test_a_run_without_checkpoints_starts_anew_with_the_preprocessing_of_its_weights(
    vitamp: Vitamp, place: Path, trained: tuple[Path, Result], tmp_path: Path
) -> None:
    weights = shutil.copytree(place / "weights", tmp_path / "weights")
    (weights / "config.json").write_text((weights / "config.json").read_text().replace("0.4,", "0.1,"))
    run = shutil.copytree(trained[0], tmp_path / "run", ignore=shutil.ignore_patterns("step-*", "*.json*"))
    done = vitamp(*one_line(place, run), "-pretrained", weights, "-dry_run", code=0)
    assert "mean 0.1, 0.45, 0.55; std 0.2, 0.21, 0.22" in done.out


def test_the_run_is_evaluated_used_and_exported_with_the_preprocessing_of_the_weights(
    vitamp: Vitamp, place: Path, trained: tuple[Path, Result], tmp_path: Path
) -> None:
    run, image = trained[0], place / "flowers" / "class_0" / "0.jpg"
    evaluated = vitamp("-eval", "-resume", run, "-data_path", place / "flowers", "SAVE=" + str(tmp_path), code=0)
    assert "mean 0.4, 0.45, 0.55; std 0.2, 0.21, 0.22" in evaluated.out
    assert "CROP_PCT 0.95, CROP_MODE squash" in evaluated.out
    used = vitamp(run, image, "-device", "cpu", script="scripts/predict.py", code=0)
    assert "class_" in used.out
    out = tmp_path / "exported.safetensors"
    vitamp(run, "-to", "safetensors", "-out", out, script="scripts/export.py", code=0)
    header = read_header(out)
    assert (header["mean"], header["crop_pct"], header["interpolation"]) == (list(MEAN), 0.95, "bilinear")
    assert (header["crop"], header["crop_mode"]) == ("middle", "squash")


def test_a_recipe_for_another_model_leaves_a_run_its_preprocessing(
    vitamp: Vitamp, place: Path, trained: tuple[Path, Result], tmp_path: Path
) -> None:
    """In resuming and in evaluation."""
    line = ["-cfg", "vit_base_patch16_224", "-model", "mine", "-resume", trained[0], *SMALL, "-image_size", 32]
    line.append("MODEL.NUM_CLASSES=5")
    resumed = vitamp(*line, "-print_config", code=0)
    for value in ("MEAN: [0.4, 0.45, 0.55]", "STD: [0.2, 0.21, 0.22]"):
        assert re.search(rf"IMAGENET_{re.escape(value)} +# run in {trained[0]}\n", resumed.out)
    own = [one if one != "mine" else "vit_base_patch16_224" for one in line]
    assert re.search(r"IMAGENET_MEAN: \[0\.5, 0\.5, 0\.5\] +# configs/_vit_imagenet", vitamp(*own, "-print_config").out)
    words = ("-eval", "-data_path", place / "flowers", f"SAVE={tmp_path}")
    evaluated = vitamp(*line, *words, code=0)
    assert "mean 0.4, 0.45, 0.55; std 0.2, 0.21, 0.22; CROP_PCT 0.95" in evaluated.out


@pytest.mark.slow
def test_timm_alone_squeezes_images_as_the_run_does(
    vitamp: Vitamp, place: Path, trained: tuple[Path, Result], tmp_path: Path
) -> None:
    hub = tmp_path / "hub"
    vitamp(trained[0], "-to", "hub", "-output", hub, "-check", 4, script="scripts/export.py", code=0)
    card = (hub / "README.md").read_text()
    assert "resized without keeping the aspect ratio, then the centre cropped to 32 x 32" in card
    paths = [place / "flowers" / f"class_{number}" / f"{number}.jpg" for number in range(5)]
    logits, _ = in_timm_alone(f"local-dir:{hub}", "RGB", paths, tmp_path)
    model = load_trained(trained[0], device="cpu", amp="off")
    for mode, agrees in (("squash", True), ("center", False)):
        data = model.config.DATA.changed(CROP_MODE=mode)
        with decoded_by("pil"):
            found = validation_predictions(model, open_given([str(path) for path in paths], data), workers=0)
        # timm resizes the whole image, vitamp only what remains of it; this rounds a few pixels differently.
        assert torch.allclose(found.logits, logits, rtol=0, atol=1e-2) is agrees, mode


# Classifiers of a frozen backbone.


def acc1_of(vitamp: Vitamp, place: Path, run: Path, *words: object) -> float:
    vitamp(run, *words, "-json", place / "found.json", "-overwrite", script="scripts/evaluate.py", code=0)
    found = json.loads((place / "found.json").read_text())
    return (found["probes"]["pooled"] if "probes" in found else found["figures"]["model"])["acc1"]


@pytest.mark.slow
def test_training_from_a_probe_is_never_worse_and_zeros_guess_nothing(
    vitamp: Vitamp, tiny: Path, digits_run: Path, tmp_path: Path
) -> None:
    cache = f"DATA.CACHE={tmp_path / 'cache'}"
    acc1 = acc1_of(vitamp, tmp_path, digits_run, "-probe", "-pool", "pooled", "-weights", "model", "-amp", "off", cache)
    words = ("-cfg", tiny, "-pretrained", digits_run, cache, "TRAIN.BASE_LR=1", "TRAIN.GRAD_CLIP=null", "-output")
    short = ("TRAIN.WARMUP_EPOCHS=0", "TRAIN.NUM_EPOCHS=1")
    done = vitamp(*words, tmp_path / "run", "MODEL.NEW_CLASSIFIER=probe", *short, code=0)
    assert done.text.count("Not better than the linear probe that training began with (top-1)") == 1
    first, last = metrics(tmp_path / "run", "val")
    assert (first["update"], first["acc1"]) == (0, acc1)
    assert last["acc1"] < acc1
    assert acc1_of(vitamp, tmp_path, tmp_path / "run") == acc1

    done = vitamp(*words, tmp_path / "last", "MODEL.NEW_CLASSIFIER=probe", *short, "VALIDATE_FREQ=2", code=0)
    assert "The linear probe is not validated, since VALIDATE_FREQ is more than TRAIN.NUM_EPOCHS." in done.text
    (only,) = metrics(tmp_path / "last", "val")
    assert acc1_of(vitamp, tmp_path, tmp_path / "last") == only["acc1"] < acc1, "nothing but its end was validated"

    vitamp(*words, tmp_path / "zero", "MODEL.NEW_CLASSIFIER=zero", "TRAIN.NUM_EPOCHS=0", code=0)
    logits = load_trained(tmp_path / "zero").logits(torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8))
    assert torch.equal(logits, torch.zeros(4, 10))


def page_of(run: Path) -> str:
    return html.unescape((run / "report.html").read_text()).replace("\N{NO-BREAK SPACE}", " ")


def test_a_probe_that_augmentation_misleads_is_divided(
    vitamp: Vitamp, tiny: Path, digits_run: Path, tmp_path: Path
) -> None:
    """It begins less sure of the same classes."""
    words = ("-cfg", tiny, "-pretrained", digits_run, f"DATA.CACHE={tmp_path}", "MODEL.NEW_CLASSIFIER=probe")
    first: dict[str, dict[str, Any]] = {}
    for degrees, epochs, divided in ((180, 0, False), (180, 1, True), (0, 1, False)):
        run = tmp_path / f"{degrees}-{epochs}"
        last = (f"DATA.ROTATE={degrees}", f"TRAIN.NUM_EPOCHS={epochs}", "TRAIN.WARMUP_EPOCHS=0", "-output", run)
        done = vitamp(*words, *last, code=0)
        assert ("Augmented training images have loss" in done.text) is divided
        first[run.name], *others = metrics(run, "val")
        improved = any(one["acc1"] > first[run.name]["acc1"] for one in others)
        gain = re.search(
            r"At the last validation, right on .* than the linear probe that training began with \(95 % interval.*\.",
            done.text,
        )
        assert (gain is not None) is (epochs > 0), "also where the probe is the best"
        assert ("(before the first epoch); total time" in done.text) is not improved
        assert (PROBE_IS_BEST in done.text) is (not improved and epochs > 0)
        if epochs:
            vitamp(run, script="scripts/report.py", code=0)
            assert gain is not None
            page = page_of(run)
            assert gain[0] in page
            assert (PROBE_IS_BEST in page) is not improved
    assert len({one["acc1"] for one in first.values()}) == 1
    assert first["180-1"]["loss"] > first["180-0"]["loss"] == first["0-1"]["loss"]

    run = tmp_path / "0-1"
    done = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=3", code=0)
    gain = re.search(
        r"At the last validation, right on .* than the linear probe that training began with \(95 % interval.*\.",
        done.text,
    )
    assert gain is not None, "a resumed run keeps what the probe predicted"
    vitamp(run, script="scripts/report.py", code=0)
    assert gain[0] in page_of(run)


def test_a_probe_before_trained_batch_norms_is_warned_of(vitamp: Vitamp, place: Path, tmp_path: Path) -> None:
    torch.save(timm.create_model("lcnet_035").state_dict(), tmp_path / "weights.pth")
    words = ["-cfg", ROOT / "configs" / "finetune.yaml", "-model", "lcnet_035", "-pretrained", tmp_path / "weights.pth"]
    words += ["-data_path", place / "flowers", "DATA.IMAGE_SIZE=32", "-epochs", 1, "-batch_size", 64, "-device", "cpu"]
    words += ["THREADS=1", "DATA.NUM_WORKERS=0", "TRAIN.WARMUP_EPOCHS=0", "-output"]
    warning = "the batch norms are trained, so training sees other features than the probe was fitted to"
    frozen = vitamp(*words, tmp_path / "frozen", code=0).text
    assert warning not in frozen
    assert "TRAIN.BASE_LR auto: 0.0003, for models with batch norm" in frozen
    assert "LAYER_DECAY: null" in (tmp_path / "frozen" / "config.yaml").read_text()
    assert warning in vitamp(*words, tmp_path / "trained", "MODEL.FREEZE=null", code=0).text


def test_the_rate_of_finetune_is_measured(vitamp: Vitamp, place: Path, tmp_path: Path) -> None:
    """Weights that an update changes more get a smaller rate, which is as if it were given."""
    small_weights = tmp_path / "small.safetensors"
    state = load_file(place / "weights" / "model.safetensors")
    save_file({name: 0.1 * weight if weight.ndim == 2 else weight for name, weight in state.items()}, small_weights)
    words = ["-cfg", ROOT / "configs" / "finetune.yaml", "-data_path", place / "flowers", "DATA.IMAGE_SIZE=32"]
    words += ["-epochs", 1, "-batch_size", 90, *SMALL, "DATA.NUM_WORKERS=0", "DATA.CHECK=off", "-output"]

    decay_of_run: dict[str, float | None] = {}

    def rate(name: str, *more: object) -> float:
        said = vitamp(*words, tmp_path / name, *more, code=0).text
        train = yaml.safe_load((tmp_path / name / "config.yaml").read_text())["TRAIN"]
        decay_of_run[name] = train["LAYER_DECAY"]
        assert ("TRAIN.LAYER_DECAY auto: none, since TRAIN.BASE_LR is given." in said) == (name == "without")
        if "-lr" not in more:
            assert f"TRAIN.BASE_LR auto: {train['BASE_LR']:g}, " in said
        return train["BASE_LR"]

    plain = rate("plain", "-pretrained", place / "weights")
    assert 1e-4 < plain < 1e-2
    assert rate("given", "-pretrained", place / "weights", "-lr", plain, "TRAIN.LAYER_DECAY=0.75") == plain
    assert metrics(tmp_path / "given", "train") == metrics(tmp_path / "plain", "train")
    assert rate("scaled", "-pretrained", place / "weights", "TRAIN.LINEAR_SCALED_LR=4096") == plain
    assert metrics(tmp_path / "scaled", "train") == metrics(tmp_path / "plain", "train")
    assert rate("small", "-pretrained", small_weights) < plain / 3
    assert rate("layers", "-pretrained", place / "weights", "TRAIN.LAYER_DECAY=null") < plain
    rate("without", "-pretrained", place / "weights", "-lr", plain)
    decays = {"plain": 0.75, "given": 0.75, "scaled": 0.75, "small": 0.75, "layers": None, "without": None}
    assert decay_of_run == decays, "layers have rates of their own only if the rate is measured"
    assert rate("head", "-pretrained", place / "weights", "MODEL.FREEZE=backbone") == 1e-4
    sgd = vitamp(*words, tmp_path / "sgd", "-pretrained", place / "weights", "TRAIN.OPTIMIZER.NAME=SGD", code=2)
    assert "TRAIN.BASE_LR auto is for AdamW and Adam; give a number for sgd" in sgd.text


ON_IMAGES = f"""\
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from utils.config import Config
Config.trains_on_features = property(lambda config: False)
runpy.run_path({str(ROOT / "main_single_gpu.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_frozen_backbone_trains_on_kept_features_as_on_images(
    vitamp: Vitamp, tiny: Path, digits_run: Path, tmp_path: Path
) -> None:
    words = ("-cfg", tiny, "-pretrained", digits_run, "MODEL.FREEZE=backbone", "MODEL.NEW_CLASSIFIER=true")
    words += ("DATA.CROP=none", "DATA.FLIP=0", f"DATA.CACHE={tmp_path / 'cache'}", "-batch_size", 16)
    words += ("REPORT_FREQ=1", "SAVE_FREQ=1", "-output")
    alone = ("-accum_iter", 2, "DIST.STRATEGY=fsdp", "DIST.HSDP=true")
    new = "images; no features of these very weights and images are kept yet"

    def losses(name: str) -> list[float]:
        of_epochs = [line["loss"] for line in metrics(tmp_path / name, "val") if line["update"] in (45, 90)]
        return [*(line["loss"] for line in metrics(tmp_path / name, "train")), *of_epochs]

    (tmp_path / "on_images.py").write_text(ON_IMAGES)
    vitamp(*words, tmp_path / "images", *alone, script=str(tmp_path / "on_images.py"), code=0)
    assert vitamp(*words, tmp_path / "features", *alone, code=0).out.count(new) == 2
    assert losses("features") == pytest.approx(losses("images"), rel=1e-5)
    assert "STRATEGY: fsdp" in (tmp_path / "features" / "config.yaml").read_text(), "for several processes"
    for limit in (("TRAIN.MAX_UPDATES=20",), ("TRAIN.MAX_UPDATES=60",), ()):
        done = vitamp(*words, tmp_path / "resumed", "-resume", "auto", *alone, *limit, code=0)
        assert done.out.count("images; features are kept in") == 2
        assert "cannot be compared" not in done.text
    assert losses("resumed") == losses("features")
    ema = ("-cfg", tiny, "-output", tmp_path / "ema", "TRAIN.MODEL_EMA=true", "-resume", "auto")
    vitamp(*ema, "TRAIN.MAX_UPDATES=10", code=0)
    done = vitamp(*ema, *words[4:5], "DATA.CROP=none", "DATA.FLIP=0", "TRAIN.MAX_UPDATES=12", code=0)
    assert "are not kept: the EMA has another backbone" in done.out
    two = ("-ngpus", 2, f"DATA.CACHE={tmp_path / 'two'}")
    assert vitamp(*words, tmp_path / "two_ranks", *two, script="main_multi_gpu.py", code=0).out.count(new) == 2
    assert losses("two_ranks") == pytest.approx(losses("features"), rel=1e-5)

    done = vitamp(*words, tmp_path / "shifted", "DATA.SHIFT=0.1", "TRAIN.MAX_UPDATES=1", code=0)
    text = "MODEL.FREEZE backbone: it is computed in each of 2 epochs, because the images change at random. scripts/"
    assert (done.out.count(text), done.out.count("kept")) == (1, 0)
    done = vitamp(*words[:-1], "-dry_run", code=0)
    assert (done.out.count(text), done.out.count("-dry_run keeps no features")) == (0, 1)
