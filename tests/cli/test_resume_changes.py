"""Changed settings between a run and its resume are allowed and logged, or refused; nothing that was saved is lost."""

import json
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cli.test_damaged_fields import GONE, damage_state
from tests.program import Vitamp, last_weights, metrics, save_image, train_tiny

RATE = 2e-3
BASE = ("SAVE_FREQ=1", "KEEP_LAST=0", "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.9")
MORE = "TRAIN.NUM_EPOCHS=4"
AFTER_TWO_OF_FOUR = "epoch 3, 88 updates done; the next update's learning rate is 1.500e-03"
"""A third of the way through the cosine, which begins after one epoch of warm-up."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs. Do not change it."""
    return train_tiny(tmp_path_factory.mktemp("trained"), *BASE)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def saved(run: Path) -> set[str]:
    return {folder.name for folder in (run / "checkpoints").glob("step-*")}


def index(run: Path) -> dict[str, Any]:
    return json.loads((run / "checkpoints" / "index.json").read_text())


def epochs(run: Path, event: str = "epoch") -> list[int]:
    return [line["epoch"] for line in metrics(run, event)]


def drawn(run: Path, name: str) -> list[tuple[int, Any]]:
    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, pytest.approx(event.value)) for event in board.Scalars(name)]


def check_whole(run: Path, before: set[str], last_epoch: int) -> None:
    """Assert that each epoch is there once, earlier checkpoints are kept, updates increase, and the best one exists."""
    assert epochs(run) == epochs(run, "val") == list(range(1, last_epoch + 1))
    updates = [line["update"] for line in metrics(run, "train")]
    assert updates == sorted(set(updates))
    assert before <= saved(run)
    assert index(run)["last"] == max(saved(run)) == f"step-{updates[-1]:09d}"
    assert index(run)["best"] in saved(run)
    assert drawn(run, "train/loss") == [(line["update"], line["loss"]) for line in metrics(run, "train")]


ALLOWED: dict[str, tuple[Iterable[object], str]] = {
    "a larger batch": (["-batch_size", 128], "An epoch has 11 updates now, but had 44 in the checkpoint"),
    "a smaller batch": (["-batch_size", 16], "An epoch has 89 updates now, but had 44 in the checkpoint"),
    "more accumulation": (["-accum_iter", 4], "An epoch has 11 updates now, but had 44 in the checkpoint"),
    "other accumulation, the same global batch": (["-accum_iter", 2, "-batch_size", 16], "changed since"),
    "fp16": (["-amp", "fp16"], "changed since: AMP.ENABLED: false -> true"),
    "another seed": (
        ["SEED=1"],
        "The training samples have changed since the checkpoint: 1437 as before, in another order.",
    ),
    "no EMA": (["TRAIN.MODEL_EMA=false"], "changed since: TRAIN.MODEL_EMA: true -> false"),
    "another rate": (["TRAIN.BASE_LR=1e-3"], "the next update's learning rate is 7.500e-04"),
    "another schedule": (["TRAIN.LR_SCHEDULER.NAME=step"], "the next update's learning rate is 2.000e-03"),
    "dropout": (["MODEL.DROPOUT=0.1"], "changed since: MODEL.DROPOUT"),
    "best by loss": (["SAVE_BEST_BY=loss"], "SAVE_BEST_BY is now loss: the best so far, top-1"),
}
EVERY_DAY = {"a larger batch", "a smaller batch", "fp16", "another seed", "best by loss"}


def cases(named: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in named]


@pytest.mark.parametrize("change", cases(ALLOWED))
def test_resume_with_a_change_is_logged_and_loses_nothing(vitamp: Vitamp, run: Path, change: str) -> None:
    words, logged = ALLOWED[change]
    before, reached = saved(run), metrics(run, "val")[-1]["acc1"]
    done = vitamp("-resume", "auto", "-output", run, MORE, *words, code=0)
    assert logged in done.text
    lines = (run / "log.txt").read_text()
    assert lines.index("Resuming from") < lines.index(logged), "below the settings that explain it"
    if "learning rate is" not in logged:
        assert AFTER_TWO_OF_FOUR in done.out
    check_whole(run, before, last_epoch=4)
    rates = [line["lr"] for line in metrics(run, "train")]
    assert rates[-1] < 0.05 * RATE or "another schedule" in change
    assert metrics(run, "val")[-1]["acc1"] > reached - 5


@pytest.mark.slow
def test_resume_on_two_processes_continues_the_count_of_updates(vitamp: Vitamp, run: Path) -> None:
    before = saved(run)
    words = ("-resume", "auto", "-output", run, MORE, "-batch_size", 32, "-ngpus", 2)
    done = vitamp(*words, "TRAIN.GLOBAL_BATCH=64", script="main_multi_gpu.py", code=0)
    assert "An epoch has 22 updates now, but had 44 in the checkpoint" in done.err
    assert AFTER_TWO_OF_FOUR in done.out
    check_whole(run, before, last_epoch=4)


def test_lengthened_run_has_the_whole_warmup(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = vitamp("-cfg", tiny, "-output", run, "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=2", code=0)
    assert "clipped to 1, so the learning rate rises until the end" in first.out
    done = vitamp("-resume", run, MORE, code=0)
    assert f"the next update's learning rate is {RATE / 2:.3e}" in done.out
    assert "clipped" not in done.out


def test_resumed_run_keeps_its_warmup_with_other_epochs(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """One epoch of two in the recipe."""
    words = ("-cfg", tiny, "-output", tmp_path / "run", "-resume", "auto")
    for epochs, updates in ((4, 1), (4, 2), (8, 3)):
        done = vitamp(*words, "-epochs", epochs, f"TRAIN.MAX_UPDATES={updates}", code=0)
        assert "after 2 epochs of warm-up" in done.out
        assert ("WARMUP_EPOCHS 2: the recipe's 1 of 2 epochs, in proportion to" in done.out) == (updates == 1)


def test_resume_with_fewer_and_with_more_epochs(vitamp: Vitamp, run: Path, tmp_path: Path) -> None:
    finished = vitamp("-resume", run, "-output", tmp_path / "empty", "TRAIN.NUM_EPOCHS=1")
    assert f"its folder is {run}" in finished.out.splitlines()[-1]
    finished = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=1")
    assert "had already finished" in finished.out
    assert "next update" not in finished.out
    done = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=3", code=0)
    assert "the schedule now spans 3 epochs instead of 2: the learning rate may rise" in done.out
    check_whole(run, set(), last_epoch=3)


@pytest.mark.slow
def test_run_made_longer_before_its_decay_equals_a_long_one(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    short, long, longer = tmp_path / "short", tmp_path / "long", tmp_path / "longer"
    words = ("-cfg", tiny, "TRAIN.LR_SCHEDULER.NAME=wsd", "TRAIN.MODEL_EMA=true", "TRAIN.WARMUP_EPOCHS=1")
    done = vitamp(*words, "-output", short, "TRAIN.NUM_EPOCHS=4", "KEEP_EVERY=2", "KEEP_LAST=1", code=0)
    assert "warm-up, then wsd: constant through epoch 3.2, then decaying (1 - sqrt) to 0; weight decay" in done.out
    vitamp(*words, "-output", long, "TRAIN.NUM_EPOCHS=6", code=0)
    checkpoint = short / "checkpoints" / "step-000000088"
    done = vitamp("-resume", checkpoint, "-output", longer, "TRAIN.NUM_EPOCHS=6", code=0)
    assert f"epoch 3, 88 updates done; the next update's learning rate is {RATE:.3e}" in done.out
    assert "the schedule now spans 6 epochs instead of 4" in done.out
    assert last_weights(longer) == last_weights(long)
    rates = [line["lr"] for line in metrics(long, "train")]
    assert rates.count(max(rates)) == 18, "3.8 epochs of five reports, between warm-up and decay"
    assert rates[-1] < max(rates) / 20


def test_max_updates_is_independent_of_the_batch_size(vitamp: Vitamp, run: Path) -> None:
    vitamp("-resume", run, MORE, "-batch_size", 128, "TRAIN.MAX_UPDATES=93", code=0)
    assert metrics(run, "val")[-1]["update"] == 93
    assert index(run)["last"] == "step-000000093"


def test_batch_and_order_cannot_change_in_the_middle_of_an_epoch(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    vitamp("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=5", code=0)
    order = (
        "1437 as before, in another order. They depend on SEED, DATA.SAMPLER, DATA.REPEATED_AUGMENT, DATA.COLUMNS, "
        "DATA.EXCLUDE, DATA.RELABEL, DATA.FOLD, DATA.GROUP, DATA.KEEP_TEST, DATA.VAL_FRACTION, DATA.SPLIT_SEED and the"
    )
    others = ("SEED=1", "DATA.SAMPLER=balanced", "DATA.REPEATED_AUGMENT=3")
    for word, why in (("DATA.BATCH_SIZE=64", ""), *((word, order) for word in others)):
        done = vitamp("-resume", run, "TRAIN.MAX_UPDATES=9", word, code=2)
        assert "saved within" in done.err
        assert why in done.err
        assert saved(run) == {"step-000000005"}


def test_other_fold_is_refused_on_resuming(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """At the end of an epoch, too: the run would be validated on images that it was trained on."""
    words = ("-cfg", tiny, "-output", tmp_path / "run", "DATA.BATCH_SIZE=128")
    first = vitamp(*words, "DATA.FOLD=2/5", "TRAIN.NUM_EPOCHS=1", code=0)
    assert "1,437 training and 360 validation images" in first.out
    assert "validation on fold 2/5" in first.out
    for other, before in (("FOLD=3/5", "FOLD 2/5"), ("FOLD=null", "FOLD 2/5"), ("SPLIT_SEED=1", "SPLIT_SEED 0")):
        done = vitamp(*words, "DATA.FOLD=2/5", f"DATA.{other}", "-resume", "auto", code=2)
        assert f"trained with DATA.{before}; with {other.partition('=')[2]} it would be validated on" in done.err
    done = vitamp("-eval", "-resume", tmp_path / "run", "-output", tmp_path / "eval", code=0)
    assert "validation split: 360 images" in done.out, "the run's own fold"


def test_epoch_that_is_not_saved_lists_those_that_are(vitamp: Vitamp, run: Path) -> None:
    words = "There is a checkpoint of the end of epochs 1, 2: use -last_epoch 2."
    for path, said in (
        (run, "no usable checkpoint of epoch 3 found"),
        (run / "checkpoints" / "step-000000044", "saved in epoch 1, not at the end of epoch 3"),
    ):
        done = vitamp("-resume", path, "-last_epoch", 3, MORE)
        assert (done.code, said in done.err, words in done.err) == (2, True, True), done.text


def test_copies_under_own_names_are_left_alone(vitamp: Vitamp, run: Path) -> None:
    """Names like step-000000044.mine are the user's: not pruned, not resumed from, not moved, not listed."""
    root = run / "checkpoints"
    own = [root / name for name in ("step-000000044.mine", "step-000000044-notes", "step-000000999.bak", "step-7")]
    for folder in own:
        shutil.copytree(root / "step-000000088", folder)
    kept = {path: path.read_bytes() for folder in own for path in folder.rglob("*")}
    listed = vitamp("list", run, script="scripts/checkpoint.py")
    assert "2 checkpoints, " in listed.out, listed.text
    vitamp("-resume", run, "KEEP_LAST=1", "TRAIN.NUM_EPOCHS=3", code=0)
    assert saved(run) - {folder.name for folder in own} == {index(run)["best"], "step-000000132"}
    assert "had already finished: 132 updates" in vitamp("-resume", "auto", "-output", run, "TRAIN.NUM_EPOCHS=3").out
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.parametrize(("samples", "updates"), [(12, 3), (120, 30)], ids=["half the data", "five times the data"])
def test_learning_rate_follows_epochs_if_the_data_set_changed(
    vitamp: Vitamp, tiny: Path, imagenet: Path, tmp_path: Path, samples: int, updates: int
) -> None:
    place, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(imagenet, place)
    data = ("-dataset", "imagenet2012", "-data_path", place, "-batch_size", 4, "DATA.NUM_WORKERS=0")
    words = ("-cfg", tiny, "-output", run, *data, "-resume", "auto", "REPORT_FREQ=1", "SAVE_FREQ=1", "KEEP_LAST=0")
    vitamp(*words, "TRAIN.NUM_EPOCHS=2", code=0)
    lines = (place / "train_list.txt").read_text().splitlines()
    (place / "train_list.txt").write_text("\n".join((lines * 5)[:samples]) + "\n")
    done = vitamp(*words, MORE, code=0)
    assert f"The training samples have changed since the checkpoint: 24 then, {samples} now." in done.err
    assert "epoch 3, 12 updates done; the next update's learning rate is 1.500e-03" in done.out
    check_whole(run, {"step-000000006", "step-000000012"}, last_epoch=4)
    rates = [line["lr"] for line in metrics(run, "train") if line["epoch"] > 2]
    assert len(rates) == 2 * updates
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(1.5e-3)
    assert 0 < rates[-1] < 0.2 * RATE


@pytest.mark.parametrize("by", ["epoch", "folder"])
def test_resume_from_an_earlier_checkpoint_needs_a_folder_of_its_own(vitamp: Vitamp, run: Path, by: str) -> None:
    whole, told = saved(run), metrics(run)
    first = run / "checkpoints" / "step-000000044"
    words = ("-resume", run, "-last_epoch", 1) if by == "epoch" else ("-resume", first)
    refused = vitamp(*words, "TRAIN.NUM_EPOCHS=2", code=2)
    assert f"{first}: the run has later checkpoints, up to step-000000088, which are not overwritten." in refused.err
    command = shlex.split(refused.err.partition("`")[2].partition("`")[0])
    vitamp(*command[2:], "TRAIN.NUM_EPOCHS=2", "SEED=3", code=0)
    assert (saved(run), metrics(run)) == (whole, told)
    branch = Path(f"{run}-from-44")
    assert index(branch)["last"] == "step-000000088"
    assert epochs(branch, "val")[-1] == 2


def test_the_state_of_another_version_is_refused_in_one_line_and_its_weights_are_used(
    vitamp: Vitamp, run: Path, tmp_path: Path
) -> None:
    for name in saved(run):
        damage_state(run, ("version", GONE), name=name)
    about = json.loads((run / "run.json").read_text())
    about["versions"]["vitamp"] = "0.2.0"
    (run / "run.json").write_text(json.dumps(about))
    saved_settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"{saved_settings}LOCAL_NOISE: 3\n")  # a setting that is gone
    last = run / "checkpoints" / "step-000000088"
    for place, words in ((run, (run,)), (run, ("auto", "-output", run)), (last, (last,))):
        refused = vitamp("-resume", *words, "TRAIN.NUM_EPOCHS=3", "TRAIN.WARMUP_EPOCHS=9", code=2)
        assert f"error: {place}: vitamp 0.2.0 wrote its training state" in refused.err
        assert len(refused.text.strip().splitlines()) == 1, refused.text
    (run / "run.json").unlink()
    refused = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=3", code=2)
    assert f"{last}: vitamp of before 0.3 wrote its training state" in refused.err
    vitamp(run, script="scripts/evaluate.py", code=0)
    vitamp("-eval", "-resume", run, "-output", tmp_path / "e", code=0)
    vitamp("verify", run, script="scripts/checkpoint.py", code=0)


def test_resume_at_the_end_of_an_epoch_with_fewer_images(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    """A validation that cannot be read saves the end of its epoch; then images are excluded, twice."""
    for number in range(24):
        save_image(tmp_path / "set" / ("train" if number < 16 else "val") / "ab"[number % 2] / f"{number}.jpg", number)
    (tmp_path / "set" / "val" / "a" / "broken.jpg").write_bytes(b"broken")
    data = ("-dataset", "imagefolder", "-data_path", tmp_path / "set", "DATA.IMAGE_CHANNELS=3", "DATA.NUM_WORKERS=0")
    sizes = ("-num_classes", "auto", "-batch_size", 4, "TRAIN.NUM_EPOCHS=3", "TRAIN.WARMUP_EPOCHS=0")
    run = tmp_path / "run"
    assert "list them in DATA.EXCLUDE" in vitamp("-cfg", tiny, *data, *sizes, "-output", run, code=1).err
    (tmp_path / "exclude.txt").write_text("val/a/broken.jpg\n" + "".join(f"train/a/{n}.jpg\n" for n in (0, 2, 4, 6)))
    vitamp("-resume", run, f"DATA.EXCLUDE={tmp_path / 'exclude.txt'}", code=0, timeout=60)
    assert [(line["epoch"], line["update"]) for line in metrics(run, "val")] == [(1, 4), (2, 7), (3, 10)]
    (tmp_path / "exclude.txt").open("a").write("val/a/16.jpg\n")
    done = vitamp("-resume", run, "TRAIN.NUM_EPOCHS=4", code=0, timeout=60)
    assert "The validation images have changed: the best so far, top-1" in done.out
    assert index(run)["best"] == index(run)["last"]


def test_a_run_that_ends_between_epochs_belongs_to_the_epoch_before(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    vitamp("-cfg", tiny, "-output", run, "TRAIN.MAX_UPDATES=44", "VALIDATE_FREQ=2", "SAVE_FREQ=2", code=0)
    (meta,) = (json.loads(file.read_text()) for file in run.glob("checkpoints/step-*/meta.json"))
    assert (meta["epoch"], meta["epoch_finished"], epochs(run, "val")) == (1, True, [1])
    vitamp("-resume", run, "TRAIN.MAX_UPDATES=null", "VALIDATE_FREQ=1", code=0)
    assert epochs(run) == [1, 2]
