"""A run that was stopped or killed, and resumed, equals an uninterrupted run."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import vitamp as vitamp_package
from tests.program import Result, Vitamp, change_meta, last_weights, metrics, save_image, train_tiny
from utils.config import config_of_run
from utils.errors import UserError
from utils.record.folder_lock import FolderLock
from vitamp.checkpoints import located, write_index

# Everything that has a state or draws random numbers.
ALL_ON = [
    *("-amp", "fp16", "AMP.INIT_LOSS_SCALING=1e7", "AMP.INCR_EVERY_N_STEPS=7", "TRAIN.MODEL_EMA=true"),
    *("MODEL.DROPOUT=0.1", "MODEL.ATTENTION_DROPOUT=0.1", "MODEL.DROPPATH=0.1", "MODEL.DEPTH=2"),
    *("TRAIN.ACCUM_ITER=2", "DATA.SHIFT=0.1", "DATA.ROTATE=5", "TRAIN.NUM_EPOCHS=4", "REPORT_FREQ=1", "SAVE_FREQ=1"),
]
PER_EPOCH = 22


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about training, without validations in the middle of an epoch, where a run stopped."""
    return [
        line
        for line in metrics(run)
        if line["event"] in ("train", "epoch", "skip") or (line["event"] == "val" and line["update"] % PER_EPOCH == 0)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of four epochs."""
    run = train_tiny(tmp_path_factory.mktemp("whole"), *ALL_ON, "KEEP_LAST=0")
    assert metrics(run, "train")[-1]["skipped"] > 0, "the scaler is to be seen at work"
    return run


def equal(run: Path, whole: Path) -> None:
    assert lines(run) == lines(whole)
    assert last_weights(run) == last_weights(whole)


@pytest.mark.parametrize(
    "stop",
    [pytest.param(2 * PER_EPOCH, marks=pytest.mark.slow), PER_EPOCH + 9],
    ids=["between epochs", "within an epoch"],
)
def test_stopped_and_resumed_run_equals_an_uninterrupted_one(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, whole: Path, stop: int
) -> None:
    run = tmp_path / "run"
    vitamp("-cfg", tiny, "-output", run, *ALL_ON, f"TRAIN.MAX_UPDATES={stop}", code=0)
    assert metrics(run, "train")[-1]["update"] == stop
    again = vitamp("-cfg", tiny, "-output", run, *ALL_ON, "-resume", "auto", code=0)
    assert f"changed since: TRAIN.MAX_UPDATES: {stop} -> null" in again.out
    equal(run, whole)
    told = [line["what"] for line in metrics(run, "run")]
    assert told[0] == "start"
    assert told[-2:] == ["resume", "end"]


def newest(run: Path) -> int:
    return max((int(folder.name[5:]) for folder in (run / "checkpoints").glob("step-*")), default=0)


def test_resume_auto_starts_resumes_and_detects_a_finished_run(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("-cfg", tiny, "-output", run, "-resume", "auto", "SAVE_FREQ=1")
    fresh = vitamp(*words, "TRAIN.NUM_EPOCHS=1", code=0)
    assert "no checkpoint yet, starting a new run" in fresh.out
    more = vitamp(*words, "TRAIN.NUM_EPOCHS=2")
    assert "resuming from step-000000044" in more.out
    assert "changed since: TRAIN.NUM_EPOCHS: 1 -> 2" in more.out
    assert "the schedule now spans 2 epochs instead of 1" in more.out
    assert [line["epoch"] for line in metrics(run, "epoch")] == [1, 2]
    for name in ("metrics.jsonl", "config.yaml"):  # as if it was killed before its end, or when it was made longer
        text = (run / name).read_text().replace("NUM_EPOCHS: 2", "NUM_EPOCHS: 3")
        (run / name).write_text("".join(line for line in text.splitlines(True) if '"end"' not in line))
    moved = (run / "checkpoints").rename(tmp_path / "moved")
    assert "a new run would overwrite its metrics" in vitamp(*words, code=2).err
    moved.rename(run / "checkpoints")
    vitamp(*words, "TRAIN.NUM_EPOCHS=2", code=0)
    assert [line["what"] for line in metrics(run, "run")] == ["start", "resume", "resume", "end"]
    assert "NUM_EPOCHS: 2" in (run / "config.yaml").read_text()
    before = metrics(run)
    done = vitamp(*words, "TRAIN.NUM_EPOCHS=2", code=0)
    assert "had already finished: 88 updates" in done.out.splitlines()[-1]
    shutil.rmtree(run / "checkpoints")
    assert "a new run would overwrite its metrics" in vitamp(*words, code=2).err
    assert metrics(run) == before


def test_resume_auto_is_no_folder_of_this_name(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "auto").mkdir()
    with FolderLock() as lock:
        lock.take(tmp_path / "auto")
        vitamp("-cfg", tiny, "-output", "run", "-resume", "auto", "TRAIN.NUM_EPOCHS=1", cwd=tmp_path, code=0)


def test_resume_auto_of_an_unsaved_run_has_its_settings(vitamp: Vitamp, digits_run: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(digits_run / "checkpoints" / "step-000000088", tmp_path / "copied" / "step-000000088")
    shutil.copytree(copied, tmp_path / "run" / "checkpoints" / copied.name)
    for place in (copied, copied / "model.safetensors", tmp_path / "run"):
        shown = vitamp("-resume", place, "-print_config", code=0)
        assert " BASE_LR: 0.002 " in shown.out
    shutil.copy(digits_run / "config.yaml", tmp_path)
    for words in (("-output", tmp_path, "-resume", "auto"), (f"OUTPUT={tmp_path}", "MODEL.RESUME=auto")):
        shown = vitamp(*words, "-print_config", code=0)
        assert f"# {tmp_path}/config.yaml:3\n" in shown.out


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole run, as if stopped after two epochs."""
    run = tmp_path / "stopped"
    shutil.copytree(whole, run)
    for update in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{update * PER_EPOCH:09d}")
    return run


@pytest.mark.parametrize(
    "part",
    [
        "",
        pytest.param("checkpoints/step-000000044", marks=pytest.mark.slow),
        "checkpoints/step-000000044/model.safetensors",
    ],
)
def test_resume_takes_run_checkpoint_or_file(vitamp: Vitamp, stopped: Path, whole: Path, part: str) -> None:
    """Without -cfg, too: the run's saved settings are used, and its folder of now."""
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    done = vitamp("-resume", stopped / part, code=0)
    assert "epoch 3, 44 updates done" in done.out
    equal(stopped, whole)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_resume_into_another_folder(vitamp: Vitamp, stopped: Path, whole: Path) -> None:
    other = stopped.with_name("other")
    vitamp("-resume", stopped, "-output", other, code=0)
    assert last_weights(other) == last_weights(whole)
    first = "checkpoints/step-000000044/meta.json"
    kept, before = (json.loads((run / first).read_text()) for run in (other, stopped))
    assert before["metrics"], "it is validated"
    assert kept["metrics"] == before["metrics"]
    assert config_of_run(other).MODEL.RESUME is None, "as -cfg, the file starts a new run"
    assert not (stopped / "checkpoints" / f"step-{4 * PER_EPOCH:09d}").exists()


def test_last_epoch_chooses_the_checkpoint(vitamp: Vitamp, whole: Path, stopped: Path, tmp_path: Path) -> None:
    """Updates after the chosen checkpoint are repeated in a folder of their own, without their old results."""
    run, words = tmp_path / "run", ("-resume", whole, "-last_epoch", 1, "KEEP_LAST=1", "TRAIN.MAX_UPDATES=44")
    refused = vitamp(*words, code=2)
    assert "later checkpoints, up to step-000000088, which are not overwritten" in refused.err
    done = vitamp(*words, "-output", run, code=0)
    assert "resuming from" in done.out.lower()
    assert "epoch 2, 22 updates done" in done.out
    assert metrics(run, "train")[-1]["update"] == 2 * PER_EPOCH
    assert last_weights(run) == last_weights(stopped)
    lines = done.out.splitlines()
    assert [line for line in lines if "starts anew" in line] == [], "the checkpoint is the best of the one before it"
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    assert index["last"] == "step-000000044"
    kept = {folder.name for folder in (run / "checkpoints").glob("step-*")}
    assert kept == {index["last"], index["best"]}
    auto = ("-resume", "auto", "-output", run, "-last_epoch", 3)
    for place in (("-resume", run, "-last_epoch", 3), ("-eval", *auto)):
        assert "no usable checkpoint of epoch 3" in vitamp(*place, code=2).err
    # With auto, the line may be the one that began the run after this epoch.
    assert "step-000000044, the newest; -last_epoch 3 chooses a checkpoint with -resume" in vitamp(*auto, code=0).out


def test_new_run_with_last_epoch_is_started_not_resumed(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", "-last_epoch", 1, "TRAIN.MAX_UPDATES=46", code=0)
    assert [(line["what"], line["update"]) for line in metrics(tmp_path / "run", "run")] == [("start", 44), ("end", 46)]
    assert "since the resume" not in done.out


def test_changed_samples_are_refused_only_in_the_middle_of_an_epoch(
    vitamp: Vitamp, tiny: Path, imagenet: Path, tmp_path: Path
) -> None:
    place, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(imagenet, place)
    lines = (place / "train_list.txt").read_text().splitlines()
    (place / "train_list.txt").write_text("\n".join(sorted(lines)))
    first, other = tmp_path / "first.txt", tmp_path / "other.txt"
    first.write_text("train/n00000000/train_0.JPEG\n")
    other.write_text("train/n00000000/train_4.JPEG\n")  # without it, the labels are the same
    data = ("-dataset", "imagenet2012", "-data_path", place, "-batch_size", 4)
    words = ("-cfg", tiny, "-output", run, *data, "-resume", "auto", "DATA.DROP_LAST=false", "TRAIN.NUM_EPOCHS=3")

    def go_on(until: int, *more: object, code: int) -> Result:
        return vitamp(*words, "DATA.NUM_WORKERS=0", f"TRAIN.MAX_UPDATES={until}", *more, code=code)

    go_on(4, f"DATA.EXCLUDE={first}", code=0)
    for changed in ((), (f"DATA.EXCLUDE={other}",), (f"DATA.EXCLUDE={first}", "SEED=1")):
        refused = go_on(12, *changed, code=2)
        assert "saved within epoch 1, but the training samples have changed since: 23 " in refused.err
        assert newest(run) == 4
    go_on(6, f"DATA.EXCLUDE={first}", code=0)
    between = go_on(8, code=0)
    assert "changed since: DATA.EXCLUDE" in between.out


@pytest.mark.parametrize("change", ["renamed", "swapped"])
def test_renamed_and_swapped_images_are_refused_in_the_middle_of_an_epoch(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, change: str
) -> None:
    place, run = tmp_path / "data", tmp_path / "run"
    for split, name, number in ((s, n, k) for s in ("train", "val") for n in ("ant", "bee") for k in range(4)):
        save_image(place / split / name / f"{name}-{number}.jpg", seed=number)
    data = ("-dataset", "imagefolder", "-data_path", place, "-batch_size", 2, "DATA.NUM_WORKERS=0")
    words = ("-cfg", tiny, "-output", run, *data, "DATA.IMAGE_CHANNELS=3", "-resume", "auto", "SAVE_FREQ=1")
    vitamp(*words, "TRAIN.MAX_UPDATES=2", code=0)
    moved = place.rename(tmp_path / "moved")
    vitamp(*words, "-data_path", moved, "TRAIN.MAX_UPDATES=3", code=0)  # moving it changes nothing
    shutil.rmtree(run / "checkpoints" / "step-000000003")
    train, swaps = moved / "train", {"ant/ant-0.jpg": "bee/ant-0.jpg", "bee/bee-3.jpg": "ant/bee-3.jpg"}
    for old, new in ({"bee/bee-0.jpg": "bee/bee-9.jpg"} if change == "renamed" else swaps).items():
        (train / old).rename(train / new)
    done = vitamp(*words, "-data_path", moved, "TRAIN.MAX_UPDATES=4", code=2)
    assert "the training samples have changed since: 8 as before, but with other names or labels" in done.err
    assert newest(run) == 2


def test_resume_does_not_depend_on_the_working_directory(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """A relative -output is saved as written, and the run is found again by another path."""
    os.makedirs(tmp_path / "elsewhere")
    words = ("TRAIN.MAX_UPDATES=44",)
    vitamp("-cfg", tiny, "-output", "run", *words, cwd=tmp_path, code=0)
    vitamp("-resume", "../run", "TRAIN.MAX_UPDATES=null", cwd=tmp_path / "elsewhere", code=0)
    assert metrics(tmp_path / "run", "train")[-1]["update"] == 88
    assert list((tmp_path / "elsewhere").iterdir()) == []


FIRST, LAST = "step-000000044", "step-000000088"


@pytest.fixture
def two(digits_run: Path, tmp_path: Path) -> Path:
    """A run whose best checkpoint is its first, not its last."""
    run = tmp_path / "two"
    shutil.copytree(digits_run, run)
    write_index(run / "checkpoints", LAST, FIRST)
    return run


def test_best_and_last_are_names_of_checkpoints_in_every_command(
    vitamp: Vitamp, tiny: Path, two: Path, tmp_path: Path
) -> None:
    new, one = tmp_path / "new", ("TRAIN.MAX_UPDATES=1", "TRAIN.MODEL_EMA=false")
    refused = vitamp("-resume", two / "best", code=2)
    assert f"{two}/checkpoints/{FIRST}: the run has later checkpoints, up to {LAST}" in refused.err
    resumed = vitamp("-resume", two / "best", "-output", new, "TRAIN.MAX_UPDATES=46", "-dry_run", code=0)
    assert f"Resuming from {two}/checkpoints/{FIRST}: " in resumed.text
    vitamp("-cfg", tiny, f"MODEL.PRETRAINED={two}/last", *one, "-output", new, code=0)
    assert f"{two}/checkpoints/{LAST}" == config_of_run(new).MODEL.PRETRAINED
    teacher = ("TRAIN.DISTILLATION_TYPE=soft", "-teacher_model", f"{two}/checkpoints/best")
    assert FIRST in vitamp("-cfg", tiny, *teacher, *one, "-output", tmp_path / "taught", code=0).text
    for script, words, said in (
        ("evaluate", (two / "best",), FIRST),
        ("predict", (two / "last", two / "checkpoints" / "best", "-part", "val"), FIRST),
        ("checkpoint", ("list", two / "last"), LAST),
        ("export", (two / "best", "-to", "safetensors", "-out", tmp_path / "e.safetensors"), FIRST),
        ("report", (two / "last", "-out", tmp_path / "report.html"), "report.html"),
    ):
        assert said in vitamp(*words, script=f"scripts/{script}.py", code=0).text
    assert vars(vitamp_package.load(two / "best").model)["vitamp"].path.name == FIRST


def test_best_that_a_run_has_not_yet_is_refused_and_a_real_folder_wins(two: Path) -> None:
    root = two / "checkpoints"
    write_index(root, LAST, None)
    with pytest.raises(UserError, match=f"{two}/best: this run has no best checkpoint yet"):
        located(two / "best")
    with pytest.raises(FileNotFoundError, match="no best checkpoint yet"):
        vitamp_package.load(two / "best")
    assert located(root / "last") == root / LAST
    (two / "best").mkdir()
    assert located(two / "best") == two / "best"
    nowhere = two.parent / "elsewhere" / "best"
    assert located(nowhere) == nowhere


def test_tools_say_that_the_best_checkpoint_is_the_probe(vitamp: Vitamp, two: Path, tmp_path: Path) -> None:
    root = two / "checkpoints"
    settings = json.loads((root / FIRST / "meta.json").read_text())["settings"]
    change_meta(root / FIRST, update=0, settings={**settings, "MODEL.NEW_CLASSIFIER": "probe"})
    (root / FIRST).rename(root / "step-000000000")
    write_index(root, LAST, "step-000000000")
    said = "step-000000000 (the run's best: the linear probe before the first update), "
    for script, words in (
        ("evaluate", (two,)),
        ("predict", (two, "-part", "val")),
        ("export", (two, "-to", "safetensors", "-out", tmp_path / "e.safetensors")),
    ):
        assert vitamp(*words, script=f"scripts/{script}.py", code=0).text.count(said) == 1
