"""Early ends of a run, reproducibility, and -eval of its weights."""

import json
import re
import shutil
from pathlib import Path

import pytest

from engine.measure.meters import seconds_of
from tests.program import ROOT, Vitamp, last_weights, metrics, save_image
from utils.config import config_of_run
from utils.record.history import History
from utils.statistics.proportions import wilson
from vitamp.checkpoints import folder_name
from vitamp.metrics import TOP5


def test_max_updates_ends_with_validation_and_checkpoint(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    vitamp("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=50", "SAVE_EVERY_UPDATES=50", code=0)
    assert metrics(run, "run")[-1]["update"] == 50
    assert [line["update"] for line in metrics(run, "val")] == [44, 50]
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    assert index["last"] == "step-000000050"
    figures = {line["update"]: line["acc1"] for line in metrics(run, "val")}
    assert figures[50] > figures[44]
    assert index["best"] == "step-000000050"
    meta = json.loads((run / "checkpoints" / "step-000000050" / "meta.json").read_text())
    assert meta["metrics"]["acc1"] == figures[50], "saved before the last validation, and again with its metrics"
    words = ("TRAIN.BASE_LR=0", "TRAIN.WARMUP_START_LR=0", "TRAIN.MAX_UPDATES=50", "SAVE_EVERY_UPDATES=50")
    vitamp("-cfg", tiny, "-output", run.with_name("constant"), *words, code=0)
    again = vitamp("-cfg", tiny, "-output", run.with_name("constant"), *words, "-resume", "auto", code=0)
    assert "This run had already finished" in again.out, "also where the last validation improved nothing"


@pytest.mark.parametrize("processes", [1, 2])
def test_max_time_pauses_and_is_resumed(vitamp: Vitamp, tiny: Path, tmp_path: Path, processes: int) -> None:
    """It counts from the start of the process that starts the others: here, nearly an hour ago."""
    start = f"import runpy, sys\nsys.path[0] = {str(ROOT)!r}\nimport engine.machine.stopping as s\ns.BEGAN -= 3599\n"
    (tmp_path / "early.py").write_text(f"{start}runpy.run_path('{ROOT}/main_multi_gpu.py', run_name='__main__')\n")
    run, words = tmp_path / "run", ("TRAIN.NUM_EPOCHS=1000", "REPORT_FREQ=1")
    limit = ("-max_time", "1:00:00", "-ngpus", processes)
    done = vitamp("-cfg", tiny, "-output", run, *words, *limit, script=str(tmp_path / "early.py"), code=0)
    assert re.match(r"Paused, to be resumed .*; total time (0:59:59|1:00:\d\d);", done.out.splitlines()[-1])
    paused = metrics(run, "run")[-1]
    assert 0 < paused["update"] < 44000
    assert not (run / "curves.png").exists(), "there is no time left for drawing"
    more = f"TRAIN.MAX_UPDATES={paused['update'] + 3}"
    said = vitamp("-cfg", tiny, "-output", run, *words, "-resume", "auto", more, code=0).out
    assert "; time since the resume 0:0" in said
    about = json.loads((run / "run.json").read_text())
    assert "-max_time 1:00:00" in about["begun"]["command"]
    assert "-resume auto" in about["command"]
    assert re.search(r"Train Loss: .*, time: \d\.\d\d since the resume", said), "only a part of the epoch"
    assert said.count("since the resume") == 2, "of this epoch, and at the end"
    assert [line["what"] for line in metrics(run, "run")] == ["start", "paused", "resume", "end"]
    assert metrics(run, "run")[-1]["update"] == paused["update"] + 3


AUTO = ("-epochs", "auto", "-max_time")
GROWING = ("DATA.DATASET=synthetic", "DATA.IMAGE_SIZE=32", "TRAIN.SIZE_SCHEDULE=[[0, 16], [0.5, 32]]")
DROPPING = ("TRAIN.TOKEN_DROP=0.5", "TRAIN.TOKEN_DROP_TAIL=2")
"""A run of one epoch would drop none, and not have grown: what no longer run has"""


def test_auto_trains_as_many_epochs_as_fit(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """The number is found once: the run equals one that is given it, and keeps it when it is killed and resumed."""
    run, words = tmp_path / "run", ("TRAIN.MAX_UPDATES=66", "SAVE_FREQ=1")
    done = vitamp("-cfg", tiny, "-output", run, *AUTO, "0:03:00", *words, code=0)
    assert "TRAIN.WARMUP_EPOCHS 0.5: the recipe's 1 of 2 epochs, in proportion to TRAIN.NUM_EPOCHS auto" in done.out
    found = config_of_run(run)
    epochs = found.TRAIN.NUM_EPOCHS
    assert f"TRAIN.NUM_EPOCHS auto: {epochs}, with a warm-up of {epochs / 2:g}" in done.out
    assert epochs / 2 == found.TRAIN.WARMUP_EPOCHS
    planned = re.search(r"about (\S+) of MAX_TIME 0:03:00", done.out)
    assert planned is not None
    assert 60 < seconds_of(planned[1]) <= 135, "three fourths, since other programs may slow a CPU"
    vitamp("-cfg", tiny, "-output", tmp_path / "given", "-epochs", epochs, *words, code=0)
    assert metrics(run) == metrics(tmp_path / "given")

    shutil.copytree(run, tmp_path / "resumed")
    newest, *_ = sorted((tmp_path / "resumed" / "checkpoints").glob("step-*"), reverse=True)
    shutil.rmtree(newest)
    vitamp("-cfg", tiny, "-output", tmp_path / "resumed", "-resume", "auto", *AUTO, "0:03:00", *words, code=0)
    assert config_of_run(tmp_path / "resumed").TRAIN == found.TRAIN
    assert last_weights(tmp_path / "resumed") == last_weights(run)


def test_auto_counts_what_an_epoch_of_each_size_takes(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = (*AUTO, "0:03:00", "TRAIN.MAX_UPDATES=3", *GROWING, "MODEL.PATCH_SIZE=4")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=0)
    small, large = re.findall(r"auto: .* \((\S+) to (\S+) s per update", done.out)[0]
    assert float(small) < float(large)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-epochs", "auto"), "give the time that the epochs are to fill, -max_time HH:MM:SS"),
        (("TRAIN.NUM_EPOCHS=auto", "TRAIN.WARMUP_EPOCHS=2", "-max_time", "1:00:00"), "WARMUP_EPOCHS 2: with"),
        ((*AUTO, "1:00:00", "TRAIN.LR_SCHEDULER.NAME=multi-step"), "NAME multi-step: decays at fixed epochs"),
        ((*AUTO, "1:00:00", "DATA.CHECK=full"), "CHECK full: NUM_EPOCHS auto cannot plan its time"),
        ((*AUTO, "0:00:01", "MODEL.EMBED_DIM=384", "MODEL.DEPTH=12"), "MAX_TIME 0:00:01 is too short: one epoch takes"),
        (
            (*AUTO, "0:00:01", *GROWING, "MODEL.PATCH_SIZE=4", *DROPPING, "MODEL.DEPTH=12"),
            "would do for one epoch. Faster:",
        ),
        (("-epochs", "auto", "-max_time", "1:00:00", "TRAIN.LAST_EPOCH=1"), "leaves no epoch of TRAIN.NUM_EPOCHS auto"),
    ],
)
def test_auto_says_what_it_lacks(vitamp: Vitamp, tiny: Path, tmp_path: Path, words: tuple, expected: str) -> None:
    assert expected in vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=2).err
    assert not (tmp_path / "run").exists()


def test_patience_ends_a_run_without_improvement_but_not_its_branch(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """With learning rate 0, nothing improves after the first validation."""
    words = ("TRAIN.BASE_LR=0", "TRAIN.WARMUP_START_LR=0", "TRAIN.PATIENCE=2", "TRAIN.NUM_EPOCHS=9")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *words, code=0)
    assert "TRAIN.PATIENCE" in done.out
    assert [line["epoch"] for line in metrics(tmp_path / "run", "val")] == [1, 2, 3]
    assert metrics(tmp_path / "run", "run")[-1]["what"] == "end"
    assert "This run had already finished" in vitamp("-resume", "auto", "-output", tmp_path / "run", code=0).out
    root, branch = tmp_path / "run" / "checkpoints", tmp_path / "branch" / "checkpoints"
    done = vitamp("-resume", tmp_path / "run", "-output", branch.parent, "TRAIN.MAX_UPDATES=133", code=0)
    assert f"its checkpoint is in another folder ({root}/step-000000044)" in done.err
    assert {folder.name for folder in branch.glob("step-*")} == {"step-000000132", "step-000000133"}, "start and end"
    assert json.loads((branch / "index.json").read_text())["best"] == "step-000000133"
    reasons = ("TRAIN.PATIENCE=1", "TRAIN.NUM_EPOCHS=2", "TRAIN.MAX_UPDATES=88")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "many", *words[:2], *reasons, code=0)
    assert done.out.splitlines()[-2].endswith(" TRAIN.PATIENCE=null TRAIN.NUM_EPOCHS=4 TRAIN.MAX_UPDATES=176")
    done = vitamp("-resume", tmp_path / "many", "TRAIN.NUM_EPOCHS=1", "TRAIN.MAX_UPDATES=5", code=0)
    assert done.out.splitlines()[-2].endswith(" TRAIN.NUM_EPOCHS=4 TRAIN.MAX_UPDATES=176"), "more than what is done"


def test_of_equal_validations_the_lowest_loss_is_best(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """A resumed run decides the same, and TRAIN.PATIENCE counts it as no better. Top-5 of these classes is 100 %."""
    for number in range(36):
        save_image(tmp_path / "data" / "abc"[number % 3] / f"{number}.png", seed=number, size=(8, 8))
    words = ("-dataset", "imagefolder", "-data_path", tmp_path / "data", "SAVE_BEST_BY=acc5", "DATA.NUM_WORKERS=0")
    words += ("-batch_size", 8, "-lr", 3e-2, "-epochs", 6, "SAVE_FREQ=1", "KEEP_LAST=0")
    whole, resumed, patient = (tmp_path / name for name in ("whole", "resumed", "patient"))
    done = vitamp("-cfg", tiny, "-output", whole, *words, code=0)
    validations = metrics(whole, "val")
    assert {line["acc5"] for line in validations} == {100}
    lowest = min(validations, key=lambda line: line["loss"])
    assert validations[0]["loss"] > lowest["loss"] < validations[-1]["loss"], "the loss falls and rises again"

    def best_of(run: Path) -> str:
        return json.loads((run / "checkpoints" / "index.json").read_text())["best"]

    assert best_of(whole) == folder_name(lowest["update"])
    assert f"Done: best top-5 100.00 % (epoch {lowest['epoch']})" in done.out
    found = History.of_run(whole).best(TOP5)
    assert found is not None
    assert found.line["update"] == lowest["update"]

    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / folder_name(validations[-1]["update"]))
    vitamp("-resume", "auto", "-output", resumed, code=0)
    assert metrics(resumed, "val") == validations
    assert best_of(resumed) == best_of(whole)

    done = vitamp("-cfg", tiny, "-output", patient, *words, "TRAIN.PATIENCE=2", code=0)
    assert "no better top-5 in 2 validations (TRAIN.PATIENCE)" in done.out
    assert [line["epoch"] for line in metrics(patient, "val")] == [1, 2, 3]


def test_equal_commands_give_equal_results(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ("-amp", "bf16", "TRAIN.NUM_EPOCHS=1", "MODEL.DROPOUT=0.1")
    for name, more in (("a", ()), ("b", ()), ("c", ("DETERMINISTIC=true",)), ("d", ("SEED=1",))):
        vitamp("-cfg", tiny, "-output", tmp_path / name, *words, *more, code=0)
    a, b, c, d = (metrics(tmp_path / name) for name in "abcd")
    assert a == b == c != d
    a, b, c, d = (last_weights(tmp_path / name) for name in "abcd")
    assert a == b == c != d


def test_eval_reproduces_the_metrics_of_training(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    vitamp("-cfg", tiny, "-output", run, "TRAIN.MODEL_EMA=true", "TRAIN.NUM_EPOCHS=1", "MODEL.POOL=mean", code=0)
    (validated,) = metrics(run, "val")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    evaluated = tmp_path / "by_resume"
    vitamp("-cfg", tiny, "-eval", "-resume", run, "-output", evaluated, code=0)
    assert metrics(evaluated, "val") == [validated]
    assert not (evaluated / "checkpoints").exists()
    done = vitamp("-cfg", tiny, "-eval", "-resume", run, "DATA.IMAGENET_MEAN=0.4", "-dry_run", code=0)
    assert "DATA.IMAGENET_MEAN: the run was trained with [0.5], but it is [0.4] now." in done.text

    evaluated = tmp_path / "by_pretrained"
    file = run / "checkpoints" / "step-000000044" / "model.safetensors"
    done = vitamp("-cfg", tiny, "-eval", "-pretrained", file, "-output", evaluated, "TRAIN.NUM_EPOCHS=auto", code=0)
    (figures,) = metrics(evaluated, "val")
    assert {key: figures[key] for key in ("loss", "acc1", "acc5")} == {
        key: validated[key] for key in ("loss", "acc1", "acc5")
    }
    assert f"acc1 {validated['acc1']:.4f}" in done.out.splitlines()[-1]
    interval = wilson(validated["acc1"], 360).words()
    guessing = json.loads((evaluated / "run.json").read_text())["largest_class_percent"]
    said = f"Top-1 {validated['acc1']:.2f} % on 360 images: 95 % interval {interval}"
    assert f"{said}; always guessing the largest class: {guessing:.1f} % top-1." in done.out
    assert "----- Validation Loss: " in done.out
    assert "Epoch[" not in done.out, "these weights are of no known epoch"
    began, ended = ((evaluated / name).stat().st_mtime for name in ("run.json", "metrics.jsonl"))
    assert float(re.findall(r"time: ([\d.]+)", done.out)[0]) < ended - began + 0.02, "without the start"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_eval_does_not_write_to_the_evaluated_run(vitamp: Vitamp, digits_run: Path, tmp_path: Path) -> None:
    """Without -cfg, the run's own settings are used, with its folder as OUTPUT; metrics must not be written there."""
    run = shutil.copytree(digits_run, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for number, place in enumerate((["-resume", run], ["-resume", "auto", "-output", run]), start=1):
        vitamp("-eval", *place, f"SAVE={tmp_path / 'evals'}", code=0)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        made = sorted((tmp_path / "evals").iterdir())
        assert len(made) == number
        assert metrics(made[-1], "val") == metrics(run, "val")[-1:], "the last is the best"


def test_eval_of_a_run_without_checkpoint_is_refused(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    for line in (("-eval",), ("-eval", "-dry_run")):
        done = vitamp("-cfg", tiny, *line, "-resume", "auto", "-output", empty)
        assert (done.code, done.err.count("\n")) == (2, 1), done.text
        assert f"-eval -resume auto: no checkpoint in {empty}. Name a run's folder with -output" in done.err
    assert not empty.exists()
