"""Every tool uses the better of the plain weights and their EMA, and says which."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.program import Vitamp, metrics, train_tiny
from utils.record.history import History
from vitamp.metrics import ONE_LABEL, SETS
from vitamp.weights import choose_weights, read_header

LAST, BEFORE = "step-000000088", "step-000000044"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs, whose EMA hardly moved from the initial weights; one checkpoint within an epoch."""
    slow = ("TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_WARMUP=false", "TRAIN.MODEL_EMA_DECAY=0.9999")
    words = (*slow, "SAVE_FREQ=1", "SAVE_EVERY_UPDATES=22", "KEEP_LAST=0")
    made = train_tiny(tmp_path_factory.mktemp("ema_at_chance"), *words)
    validated = metrics(made, "val")[-1]
    assert validated["acc1"] > 2 * validated["ema_acc1"]
    assert f"Done: best top-1 {validated['acc1']:.2f} %" in (made / "log.txt").read_text()
    return made


def test_every_tool_uses_the_plain_weights_if_the_ema_is_at_chance(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    best = metrics(run, "val")[-1]
    line = f"{LAST} (the run's best), plain weights, top-1 {best['acc1']:.2f} %; EMA: {best['ema_acc1']:.2f} %"
    assert json.loads((run / "checkpoints" / LAST / "meta.json").read_text())["best"] == {
        "kind": "acc1",
        "figure": best["acc1"],
        "update": 88,
        "epoch": 2,
    }
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    page, weights, stripped = (tmp_path / name for name in ("report.html", "x.safetensors", "y.safetensors"))
    for words, script in (
        ((run, "-json", tmp_path / "eval.json"), "evaluate.py"),
        ((run, tmp_path / "x.png"), "predict.py"),
        ((run, "-to", "safetensors", "-out", weights, "-check", 8), "export.py"),
        (("strip", run, "-out", stripped), "checkpoint.py"),
        ((run, "-out", page), "report.py"),
    ):
        done = vitamp(*words, script=f"scripts/{script}", code=0)
        assert script == "report.py" or line in done.text, script
    figures = json.loads((tmp_path / "eval.json").read_text())["figures"]
    assert {which: found["acc1"] for which, found in figures.items()} == {"model": best["acc1"]}
    assert (read_header(weights)["weights"], read_header(stripped)["weights"]) == ("model", "the model's weights")
    assert line in page.read_text().replace("&#39;", "'").replace("&#x27;", "'")
    forced = vitamp(run, "-weights", "ema", "-json", tmp_path / "ema.json", script="scripts/evaluate.py")
    assert f"EMA weights (-weights ema), top-1 {best['ema_acc1']:.2f} %; plain: {best['acc1']:.2f} %" in forced.out


def test_eval_uses_the_best_checkpoint_of_a_run(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    """As evaluate.py does; a checkpoint or epoch that is named is used as named."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "index.json").write_text(json.dumps({"last": LAST, "best": BEFORE}))
    for number, (words, name) in enumerate(
        (
            (("-resume", copy), BEFORE),
            (("-resume", copy / "checkpoints" / LAST), LAST),
            (("-resume", copy, "-last_epoch", 2), LAST),
        )
    ):
        done = vitamp("-eval", *words, "-output", tmp_path / f"{number}", code=0)
        (found,) = metrics(tmp_path / f"{number}", "val")
        assert found == next(line for line in metrics(run, "val") if line["update"] == int(name[5:]))
        ending = f"plain weights, loss {found['loss']:.4f}, acc1 {found['acc1']:.4f}, acc5 {found['acc5']:.4f}"
        ending += f", balanced_acc {found['balanced_acc']:.4f}, macro_f1 {found['macro_f1']:.4f}"
        assert f"Done: {name}, {ending}; EMA: acc1 {found['ema_acc1']:.4f};" in done.out.splitlines()[-1]
        assert (f"Evaluating {BEFORE}, the run's best." in done.out) == (name == BEFORE)
    (copy / "checkpoints" / BEFORE / "model.safetensors").write_bytes(b"damaged")
    done = vitamp("-eval", "-resume", copy, "-output", tmp_path / "damaged")
    assert f"Done: {LAST}, plain weights" in done.out
    assert "The newest undamaged checkpoint is evaluated instead, if there is one." in done.err


def test_pretrained_uses_the_better_weights_of_a_run(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    best = metrics(run, "val")[-1]
    for place, said, prefix in (
        (run, rf"\({LAST}, plain weights", ""),
        (run / "checkpoints" / LAST / "ema.safetensors", "ema.safetensors", "ema_"),
    ):
        words = ("-cfg", run / "config.yaml", "-eval", "-pretrained", place)
        done = vitamp(*words, "-output", tmp_path / f"eval{prefix}", code=0)
        assert re.search(rf"Pretrained weights: .*{said}", done.out)
        (found,) = metrics(tmp_path / f"eval{prefix}", "val")
        assert found["acc1"] == best[f"{prefix}acc1"]


def test_pretrained_takes_pooling_and_layer_scale_of_a_run(vitamp: Vitamp, tmp_path: Path) -> None:
    run = train_tiny(tmp_path, "MODEL.POOL=both", "MODEL.INIT_VALUES=0.5", "TRAIN.WARMUP_EPOCHS=0")
    file = tmp_path / "ema.safetensors"
    vitamp("strip", run, "-out", file, script="scripts/checkpoint.py", code=0)
    evaluated = ("-cfg", tmp_path / "tiny.yaml", f"SAVE={tmp_path / 'evals'}", "-eval")
    for words, script in (
        ((*evaluated, "-pretrained", run), "main_single_gpu.py"),
        ((*evaluated, "-pretrained", file), "main_single_gpu.py"),
        ((file,), "scripts/evaluate.py"),  # a name of weights alone chooses none
    ):
        assert f"{metrics(run, 'val')[-1]['acc1']:.2f} %" in vitamp(*words, script=script, code=0).text
    wrong = vitamp(run, "-to", "hub", "-output", tmp_path / "hub", script="scripts/export.py", code=2).err
    assert "-to hub: timm's model has no MODEL.POOL both; use -to torch or onnx" in wrong
    again = ("-cfg", tmp_path / "tiny.yaml", "-pretrained", run, "-output", tmp_path / "again", "-resume", "auto")
    for updates in (4, 8):  # the resumed run has the pooling of its own checkpoint
        vitamp(*again, f"TRAIN.MAX_UPDATES={updates}", code=0)
    assert "has no effect" not in vitamp("-resume", tmp_path / "again", code=0).text, "what the user has not set"
    wrong = vitamp(*again[:4], "MODEL.POOL=null", "MODEL.INIT_VALUES=null", code=2).err
    assert "null in the recipe. For the model of the run, add MODEL.POOL=both MODEL.INIT_VALUES=0.5 to" in wrong


@pytest.mark.parametrize(
    ("metrics", "by", "words"),
    [
        ({"loss": 1.0, "ema_loss": 2.0, "acc1": 5, "ema_acc1": 9}, "loss", "plain weights, loss 1.0000; EMA: 2.0000"),
        ({"loss": float("nan"), "ema_loss": 2.0}, "loss", "EMA weights, loss 2.0000"),
        ({"acc1": 50.0, "ema_acc1": 50.0}, "acc1", "plain weights, top-1 50.00 %; EMA: 50.00 %"),
        ({"acc1": 5, "loss": 2, "ema_acc1": 5, "ema_loss": 1}, "acc1", "EMA weights, top-1 5.00 %; plain: 5.00 %"),
        ({"acc5": 50.0, "ema_acc5": 51.0}, "acc5", "EMA weights, top-5 51.00 %; plain: 50.00 %"),
        (
            {"acc1": None, "ema_acc1": None},
            "acc1",
            "plain weights (by default: this checkpoint has no validation metrics)",
        ),
    ],
)
def test_save_best_by_decides_which_weights_are_better(metrics: dict[str, Any], by: str, words: str) -> None:
    meta = {"metrics": metrics, "settings": {"SAVE_BEST_BY": by}}
    assert choose_weights(meta, SETS, "auto")[1] == words


def test_few_validation_images_are_named_without_their_metric() -> None:
    meta: dict[str, Any] = {"metrics": {"acc1": 50.0}, "val_images": 2}
    assert choose_weights(meta, SETS[:1], "auto")[1] == "plain weights, validated on only 2 images"
    meta["val_images"] = 200
    assert choose_weights(meta, SETS[:1], "auto")[1] == "plain weights, top-1 50.00 %"


def test_best_top1_is_equal_in_run_report_and_results(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """The best over all validations, of plain weights and EMA; here the EMA is better."""
    run = tmp_path / "run"
    words = ("TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.98", "TRAIN.BASE_LR=0.1", "REPORT_FREQ=11")
    done = vitamp("-cfg", tiny, "-output", run, *words, "TRAIN.LR_SCHEDULER.NAME=step", "TRAIN.NUM_EPOCHS=3", code=0)
    best = max(line[key] for line in metrics(run, "val") for key in ("acc1", "ema_acc1"))
    assert best > max(line["acc1"] for line in metrics(run, "val"))
    assert f"Done: best EMA top-1 {best:.2f} % (epoch" in done.out.splitlines()[-1]
    found = History.of_run(run).best(ONE_LABEL.best)
    assert found is not None
    assert (found.value, found.which.label) == (best, "EMA")
    vitamp(run, "-out", tmp_path / "report.html", script="scripts/report.py", code=0)
    page = (tmp_path / "report.html").read_text()
    assert f"{best:.2f} % (epoch {found.line['epoch']}, EMA)" in page
    assert re.search(rf"step-\d+ \(the run.{{1,6}}s best\), EMA weights, top-1 {best:.2f} %", page)


def test_eval_refuses_an_untrained_classifier(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    file = run / "checkpoints" / LAST / "model.safetensors"
    for more, why in (
        (("-num_classes", 12), "head freshly initialised (10 classes in the file, 12 in the model)"),
        (("MODEL.NEW_CLASSIFIER=true",), "head left as freshly initialised (MODEL.NEW_CLASSIFIER)"),
    ):
        words = ("-cfg", run / "config.yaml", "-eval", "-pretrained", file, "-output", tmp_path / "eval", *more)
        done = vitamp(*words, code=2)
        assert why in done.err
        assert "its accuracy would be that of an untrained classifier" in done.err
        assert not (tmp_path / "eval").exists()
    words = ("-cfg", run / "config.yaml", "-pretrained", file, "-output", tmp_path / "new", "-num_classes", 12)
    vitamp(*words, "-dry_run", code=0)  # training begins with it
