"""DATA.MULTI_LABEL, as a user meets it: training, metrics, resuming, processes, precisions, refusals."""

import json
from pathlib import Path

import pytest

from tests.label_sets import CLASSES, write_recipe, write_set
from tests.program import Vitamp, metrics, run_program

SHORT = ("TRAIN.MIXUP_ALPHA=0.2", "TRAIN.SMOOTHING=0.02", "MODEL.DROPOUT=0.1", "DATA.BATCH_SIZE=8", "-accum_iter", "2")
LAST = "checkpoints/step-000000030"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("set")
    write_set(root)
    return write_recipe(root)


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    run_program("-cfg", recipe, "-output", place / "run", *SHORT, streams=place, code=0)
    return place / "run"


def test_log_metrics_and_checkpoint(whole: Path) -> None:
    log = (whole / "log.txt").read_text()
    assert ": TRAIN.LOSS bce, SAVE_BEST_BY map" in log
    assert "Avg F1: " in log
    assert "Avg Acc" not in log
    assert "Done: best mAP " in log
    val = metrics(whole, "val")
    of_last = f"Validation mAP: {val[-1]['map']:.4f}, Validation AUROC: {val[-1]['auroc']:.4f}"
    assert f"{of_last}, Validation F1: micro {val[-1]['f1_micro']:.4f}, macro " in log
    assert not {"balanced_acc", "macro_f1"} & val[-1].keys()
    assert {"map", "f1_micro", "f1_macro", "f1_micro_tuned", "f1_macro_tuned", "exact_match"} <= val[-1].keys()
    assert all(line["acc1"] is None and line["acc5"] is None for line in (*val, *metrics(whole, "train")))
    assert val[-1]["loss"] < val[0]["loss"]
    meta = json.loads((whole / LAST / "meta.json").read_text())
    assert meta["classes"] == list(CLASSES)
    assert meta["best"]["kind"] == "map"
    assert meta["best"]["figure"] == max(line["map"] for line in val)
    assert len(meta["thresholds"]["model"]) == len(CLASSES)
    assert all(0 < threshold < 1 for threshold in meta["thresholds"]["model"])


def test_evaluation_repeats_the_metrics_of_the_run(vitamp: Vitamp, whole: Path, tmp_path: Path) -> None:
    vitamp("-eval", "-resume", whole / LAST, "-output", tmp_path / "eval", code=0)
    (line,) = metrics(tmp_path / "eval", "val")
    last = metrics(whole, "val")[-1]
    assert {k: line[k] for k in ("map", "f1_macro_tuned", "loss")} == {
        k: last[k] for k in ("map", "f1_macro_tuned", "loss")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-amp", "bf16"),
        ("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e8"),
        ("-amp", "O2", "TRAIN.MODEL_EMA=true"),
        ("TRAIN.COMPILE=whole",),
        ("TRAIN.COMPILE=blocks", "-amp", "bf16"),
        ("DATA.BATCH_SIZE=auto", "TRAIN.MEMORY_LIMIT=2"),
    ],
)
def test_every_precision_learns(vitamp: Vitamp, recipe: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    vitamp("-cfg", recipe, "-output", run, "TRAIN.CLASS_WEIGHTS=balanced", *words, timeout=300, code=0)
    val = metrics(run, "val")
    assert val[-1]["loss"] < val[0]["loss"]
    if "fp16" in words:
        assert metrics(run, "train")[-1]["skipped"] > 0


@pytest.mark.slow
def test_one_table_is_split_into_folds(vitamp: Vitamp, recipe: Path, tmp_path: Path) -> None:
    words = ("-data_path", recipe.parent / "train.csv", "DATA.FOLD=2/4", "TRAIN.NUM_EPOCHS=1")
    done = vitamp("-cfg", recipe, "-output", tmp_path / "run", *words, "LOG_STYLE=fleet", code=0)
    assert "csv: 120 training and 40 validation images" in done.out
    assert "[Epoch 0, batch 0] loss: " in done.out
    assert ", f1: " in done.out
