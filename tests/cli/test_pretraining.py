"""MODEL.MAE_PRETRAIN, as a user meets it: learning without labels, then fine-tuning."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import open_dataset
from datasets.recognise import UNLABELLED, recognise
from engine.evaluation.knn import labelled_data
from tests.program import Vitamp, change_settings, last_weights, metrics, train_tiny
from tests.terminal import on_terminal
from utils.config import load_config
from utils.config.data import DataConfig

DECODER = ("MODEL.DECODER.EMBED_DIM=16", "MODEL.DECODER.DEPTH=1", "MODEL.DECODER.NUM_HEADS=2")
PATCHES = "MODEL.PATCH_SIZE=2"
MASKED = ("-mae_pretrain", PATCHES, *DECODER, "TRAIN.NUM_EPOCHS=2", "TRAIN.WARMUP_EPOCHS=0", "DATA.BATCH_SIZE=16")
WHOLE = (*MASKED, "-accum_iter", 2, "TRAIN.MODEL_EMA=true", "SAVE_FREQ=1", "-amp", "bf16")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("whole"), *WHOLE)


def test_log_and_metrics(run: Path) -> None:
    log = (run / "log.txt").read_text()
    assert "MODEL.MAE_PRETRAIN true (-mae_pretrain): defaults without labels: SAVE_BEST_BY explained" in log
    assert "no labels" in log
    assert "always guessing" not in log
    assert "finetune  python" in log
    assert "predict " not in log
    val = metrics(run, "val")
    assert val[-1]["explained"] > val[0]["explained"]
    assert val[-1]["loss"] < val[0]["loss"]
    assert val[-1]["acc1"] is None
    assert "Done: best" in log
    assert "explained variance" in log


def test_settings_of_another_task_are_refused_in_words(vitamp: Vitamp, tiny: Path, run: Path) -> None:
    done = vitamp("-cfg", tiny, "-eval", "-resume", run, code=2)
    assert "a masked autoencoder (MODEL.MAE_PRETRAIN), which has no classifier to evaluate" in done.err
    assert f"evaluate.py {run} -knn`" in done.err
    assert "norm" not in done.err.partition("error:")[2], "no list of tensors"


def test_weights_of_an_earlier_run_without_normalised_pixels_are_fine_tuned_but_not_resumed(
    vitamp: Vitamp, tiny: Path, run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "run")
    change_settings(tmp_path / "run", {"MODEL.NORM_PIX_LOSS": False})
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("  MASK_RATIO:", "  NORM_PIX_LOSS: false\n  MASK_RATIO:"))
    done = vitamp("-resume", tmp_path / "run", "TRAIN.NUM_EPOCHS=3", code=2)
    assert "pixels that are not normalised (MODEL.NORM_PIX_LOSS: false)" in done.err
    assert "its settings that this version does not have: MODEL.NORM_PIX_LOSS" in done.text
    vitamp("-cfg", tiny, PATCHES, "-pretrained", tmp_path / "run", "-output", tmp_path / "fine", "-dry_run", code=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e8"),
        ("-amp", "O2"),
        ("TRAIN.COMPILE=whole",),
        ("TRAIN.GRAD_CHECKPOINT=blocks", "MODEL.DROPPATH=0.1"),
        ("DATA.BATCH_SIZE=auto", "TRAIN.MEMORY_LIMIT=2"),
        ("-ngpus", "2", "DIST.STRATEGY=fsdp"),
    ],
)
def test_other_ways_of_training(vitamp: Vitamp, tiny: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    script = "main_multi_gpu.py" if "-ngpus" in words else "main_single_gpu.py"
    run = ("-cfg", tiny, "-output", tmp_path / "run", "-device", "cpu", *MASKED)
    vitamp(*run, *words, script=script, timeout=600, code=0)  # a first compilation takes minutes
    losses = [line["loss"] for line in metrics(tmp_path / "run", "val")]
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `run`, with the k-NN accuracy on labelled images."""
    return train_tiny(tmp_path_factory.mktemp("watched"), *WHOLE, "TRAIN.KNN=digits")


def test_knn_accuracy_in_validations_changes_nothing_else(run: Path, watched: Path) -> None:
    assert last_weights(run) == last_weights(watched)
    mine, others = metrics(watched), metrics(run)
    names = {"knn_acc1", "ema_knn_acc1"}
    assert [{name: value for name, value in line.items() if name not in names} for line in mine] == others
    val = metrics(watched, "val")
    assert all(10 < line[name] < 100 for line in val for name in names)
    log = (watched / "log.txt").read_text()
    assert "360 images of digits get the class of the nearest 20 of 1,437 training images; always guessing" in log
    assert re.search(f"Validation Explained variance: .*, k-NN top-1: {val[-1]['ema_knn_acc1']:.4f} \\(EMA\\)", log)


def test_knn_accuracy_is_that_of_evaluate(vitamp: Vitamp, watched: Path, tmp_path: Path) -> None:
    words = ("-knn", 20, "-weights", "ema", "-json", tmp_path / "knn.json")
    last = max((watched / "checkpoints").glob("step-*"))
    vitamp(last, *words, script="scripts/evaluate.py", code=0)
    found = json.loads((tmp_path / "knn.json").read_text())["figures"]
    val = metrics(watched, "val")[-1]
    assert found["ema"]["acc1"] == val["ema_knn_acc1"]
    vitamp("-eval", "-resume", last, "-output", tmp_path / "eval", code=0)
    (line,) = metrics(tmp_path / "eval", "val")
    assert (line["knn_acc1"], line["ema_knn_acc1"]) == (val["knn_acc1"], val["ema_knn_acc1"])


def dark_and_light(root: Path) -> list[Path]:
    """40 images of noise in two class folders."""
    paths = []
    for number in range(40):
        paths.append(root / ("dark" if number % 2 else "light") / f"{number}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 40, (8, 8)) + 200 * (number % 2 == 0)
        Image.fromarray(pixels.astype(np.uint8)).save(paths[-1])
    return paths


def test_knn_accuracy_of_a_folder_decides(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """Class folders alone are split, as everywhere. The best checkpoint, report and terminal table follow."""
    dark_and_light(tmp_path / "flowers")
    labelled = (f"TRAIN.KNN={tmp_path / 'flowers'}", "DATA.VAL_FRACTION=0.25")
    words = (*labelled, "SAVE_BEST_BY=knn_acc1", "TRAIN.NUM_EPOCHS=1", "-num_workers", 0)
    shown = on_terminal("-cfg", tiny, *MASKED, *words, "-output", tmp_path / "run", columns=120)
    text = "\n".join(shown.lines)
    assert "explained variance %" in text
    assert "k-NN top-1 %" in text
    assert "-pretrained" in text.partition("\n  finetune ")[2].splitlines()[0]
    (val,) = metrics(tmp_path / "run", "val")
    assert val["knn_acc1"] == 100
    assert labelled_data(load_config(f"{tmp_path}/run/config.yaml").config).CROP == "none", "as the digits are seen"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "10 images of imagefolder in" in log
    assert "Done: best k-NN top-1 100.00 %" in log
    vitamp(tmp_path / "run", script="scripts/report.py", code=0)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "k-NN accuracy, top-1 (%)" in page
    done = vitamp("-cfg", tiny, *MASKED, *labelled, "DATA.VAL_FRACTION=0.6", "-output", tmp_path / "other", code=2)
    assert "TRAIN.KNN 20: imagefolder in" in done.text
    assert "has only 16 training images" in done.text
    done = vitamp("-cfg", tiny, *MASKED, "TRAIN.KNN=nowhere", "-output", tmp_path / "other", code=2)
    assert "TRAIN.KNN nowhere: no such folder, file or data set" in done.text
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("apart", [False, True])
def test_knn_leaves_out_excluded_images(vitamp: Vitamp, tiny: Path, tmp_path: Path, apart: bool) -> None:
    """Whether the labelled images are those that are learned from, or other ones; on resuming too."""
    places = [tmp_path / name for name in ("learned", "judged")[: 1 + apart]]
    images = [dark_and_light(place) for place in places][-1]
    broken = [images[number] for number in (3, 8, 12, 25)]
    for path in broken:
        path.write_bytes(b"no image")
    (tmp_path / "exclude.txt").write_text("".join(f"{path}\n" for path in broken))
    data = ("-dataset", "images", "-data_path", places[0], f"DATA.EXCLUDE={tmp_path / 'exclude.txt'}")
    knn = (f"TRAIN.KNN={places[-1]}", "SAVE_BEST_BY=knn_acc1", "DATA.VAL_FRACTION=0.25", "-num_workers", 0)
    vitamp("-cfg", tiny, *MASKED, *data, *knn, "TRAIN.NUM_EPOCHS=1", "-output", tmp_path / "run", code=0)
    spelt = f"imagefolder={places[-1]}"
    done = vitamp("-resume", tmp_path / "run", "TRAIN.NUM_EPOCHS=2", f"TRAIN.KNN={spelt}", code=0)
    assert f"TRAIN.KNN is now {spelt}: the best so far, k-NN top-1 100.00 % (epoch 1), is" in done.text
    assert "match no image" not in done.text
    assert [line["knn_acc1"] for line in metrics(tmp_path / "run", "val")] == [100, 100]
    tested = vitamp(tmp_path / "run", "-knn", "-part", "test", script="scripts/evaluate.py", code=2)
    assert f"-part) test: {places[-1]} has no test split" in tested.err


def test_fine_tuning_takes_the_encoder(vitamp: Vitamp, tiny: Path, run: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", tiny, PATCHES, "-pretrained", run, "-output", tmp_path / "run", "TRAIN.NUM_EPOCHS=1", code=0)
    assert "tensors of its decoder left out; the file has no head" in done.text
    assert "Open in the settings" not in done.text
    mean = ("average", run, "-last", 2, "-out", tmp_path / "mean.safetensors")
    assert "; fine-tune it with -pretrained " in vitamp(*mean, script="scripts/checkpoint.py", code=0).text
    words = ("-cfg", tiny, *MASKED, "-pretrained", run, "-image_size", 12)  # as a masked autoencoder, at another size
    done = vitamp(*words, "MODEL.NUM_HEADS=4", "-dry_run", code=0)
    assert "pos_embed resized from " in done.text
    assert re.search(r"line: MODEL.NUM_HEADS 4 is used; \S+ was trained with 2, and computes something else", done.text)
    # Weights of a classifier, such as timm's, begin a masked autoencoder too, with a recipe that fine-tunes.
    words = ("-cfg", tiny, *MASKED, "-pretrained", tmp_path / "run", "MODEL.NEW_CLASSIFIER=probe")
    assert "tensors of its head left out; the decoder stays freshly" in vitamp(*words, "-dry_run", code=0).text


def test_fine_tuning_takes_the_sizes_that_the_recipe_leaves_open(
    vitamp: Vitamp, tiny: Path, run: Path, tmp_path: Path
) -> None:
    """Of a recipe without sizes, or with null for them; where the recipe has its own, the error's words lead on."""
    unset = ("MODEL.NAME=vit_tiny_patch16_224", "MODEL.PATCH_SIZE=auto", "MODEL.DEPTH=null", "MODEL.NUM_HEADS=null")
    words = ("-cfg", tiny, *unset, "-pretrained", run, "-output", tmp_path / "run", "-resume", "auto")
    wrong = vitamp(*words, "MODEL.EMBED_DIM=96", code=2).err
    advice = re.search(
        r"width 16 in the weights, 96 in the recipe\. For the model of the run, add (.*) to the c", wrong
    )
    assert advice
    done = vitamp(*words, "MODEL.EMBED_DIM=96", *advice[1].split(), "TRAIN.NUM_EPOCHS=1", code=0)
    assert re.search(
        r"Open in the settings, so as in \S+: MODEL.DEPTH 1, MODEL.NUM_HEADS 2, MODEL.PATCH_SIZE 2\n", done.text
    )
    assert (
        "patch 2, width 16, depth 1, heads 2"
        in vitamp(*words, "MODEL.EMBED_DIM=null", "TRAIN.NUM_EPOCHS=2", code=0).text
    )
    for tool, *more in (("evaluate",), ("predict", "-part", "val")):
        vitamp(tmp_path / "run", *more, script=f"scripts/{tool}.py", code=0)


def test_images_without_classes(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images" / "deep"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(40):
        where = folder if number % 2 else folder.parent
        Image.fromarray(generator.integers(0, 255, (8, 8), dtype=np.uint8)).save(where / f"{number}.png")
    words = ("-cfg", tiny, "-data_path", tmp_path / "images", "DATA.DATASET=images", "DATA.VAL_FRACTION=0.2")
    done = vitamp(*words, *MASKED, "-output", tmp_path / "run", "-num_workers", "0", code=0)
    assert "Data: 32 training, 8 validation images." in done.text
    assert recognise(str(tmp_path / "images"), needs_labels=False) == ("images", UNLABELLED)
    assert "images: 32 training and 8 validation images of 8 x 8 x 1, no labels" in done.text
    vitamp(tmp_path / "run", script="scripts/report.py", code=0)
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("hidden, predicted, original") == 8
    assert "was trained on 32 images from images/, without labels." in page
    assert "Its explained variance of hidden patches is <b>" in page
    assert "explained variance of the best checkpoint" in page


def test_what_has_no_meaning_without_labels_is_refused(vitamp: Vitamp, tiny: Path, run: Path) -> None:
    for words, message in (
        (("TRAIN.CLASS_WEIGHTS=balanced",), "TRAIN.CLASS_WEIGHTS"),
        (("SAVE_BEST_BY=acc1",), "acc1 is not measured without labels"),
        (("TRAIN.TOKEN_DROP=0.5",), "it leaves out patches itself"),
    ):
        done = vitamp("-cfg", tiny, *MASKED, *words, code=2)
        assert message in done.text
    for tool in (
        ("scripts/predict.py", "-part", "val"),
        ("scripts/evaluate.py",),
        ("scripts/export.py", "-to", "onnx", "-out", "unwritten.onnx"),
    ):
        done = vitamp(run, *tool[1:], script=tool[0], code=2)
        assert "this model learned without labels and has no classes yet" in done.text


def test_a_folder_val_is_for_validation_and_all_other_images_for_training(tmp_path: Path) -> None:
    for name in ("1.png", "train/x/2.png", "more/3.png", "val/4.png", "val/y/5.png", "test/6.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(tmp_path / name)
    data = DataConfig(DATASET="images", DATA_PATH=str(tmp_path))
    names = {}
    for train in (True, False):
        samples = open_dataset(data, train, 1, 0, torch.device("cpu")).single_images()
        assert samples is not None
        names[train] = [Path(samples.name(index)).name for index in range(len(samples))]
    assert sorted(names[True]) == ["1.png", "2.png", "3.png"]
    assert sorted(names[False]) == ["4.png", "5.png"]


def test_paddlevits_files_have_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mae.yaml"
    path.write_text(
        "MODEL: {TYPE: MAE, NAME: vit_base_patch16_224, MAE_PRETRAIN: True, TRANS: {MASK_RATIO: 0.6,\n"
        "  ENCODER: {DEPTH: 12}, DECODER: {DEPTH: 2}}}\nTRAIN: {NORMALIZE_TARGET: True}\n",
        encoding="utf-8",
    )
    config = load_config(str(path)).config
    assert (config.TRAIN.BASE_LR, config.TRAIN.LINEAR_SCALED_LR, config.TRAIN.OPTIMIZER.BETAS) == (
        1.5e-4,
        256,
        (0.9, 0.95),
    )
    assert config.DATA.IMAGENET_MEAN == (0.485, 0.456, 0.406)
    assert (config.MODEL.MASK_RATIO, config.MODEL.DECODER.DEPTH) == (0.6, 2)
