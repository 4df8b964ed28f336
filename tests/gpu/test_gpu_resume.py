"""On the GPU, too: with DETERMINISTIC, a run that was killed and gone on with is the run that was never stopped."""

import os
import signal
from pathlib import Path

import pytest

from tests.faults.killing import reported
from tests.gpu.runs import KIND, UPDATES, Run, Train, far
from tests.program import ROOT, Started
from tests.waiting import until

# All that has a state or draws random numbers. Attention by name: two runs might race to two results.
ALL_ON = [
    *("-amp", "fp16" if KIND == "cuda" else "bf16", "AMP.INIT_LOSS_SCALING=1e7", "AMP.INCR_EVERY_N_STEPS=7"),
    *("MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.CUTMIX_ALPHA=1.0"),
    *("TRAIN.MODEL_EMA=true", "TRAIN.ACCUM_ITER=2", "DATA.SHIFT=0.1", "DATA.ROTATE=5", "REPORT_FREQ=2"),
    *("DETERMINISTIC=true", "SPEED=+fused", "TRAIN.NUM_EPOCHS=6", "SAVE_EVERY_UPDATES=20"),
]
LAST = 6 * UPDATES // 2
FILES = ("model.safetensors", "ema.safetensors")


def equal(run: Run, whole: Run) -> None:
    assert run.checkpoint.name == whole.checkpoint.name
    for event in ("train", "epoch", "val"):
        assert run.of(event) == whole.of(event)
    # When a skip is noticed, and so what its replay sees, is up to the GPU.
    ours, theirs = ([(skip["epoch"], skip["update"], skip["scale"]) for skip in one.of("skip")] for one in (run, whole))
    assert ours == theirs
    for name in FILES:
        assert (run.checkpoint / name).read_bytes() == (whole.checkpoint / name).read_bytes(), name


def test_the_same_command_gives_the_same_bits_and_so_does_a_killed_run(
    train: Train, small: Path, tmp_path: Path
) -> None:
    whole = train("whole", *ALL_ON, updates=None)
    assert whole.of("train")[-1]["update"] == LAST
    again = train("again", *ALL_ON, updates=None)
    equal(again, whole)

    folder, streams = tmp_path / "killed", tmp_path / "streams"
    streams.mkdir()
    argv = ["-cfg", str(small), "-output", str(folder), *ALL_ON]
    started = Started(str(ROOT / "main_single_gpu.py"), argv, ROOT, {}, streams)
    until(lambda: not started.running() or reported(folder) >= 60, 120)
    os.kill(started.pid, signal.SIGKILL)
    assert started.end(30).code == -signal.SIGKILL, "killed too late to show anything"
    assert (folder / "checkpoints").exists(), "killed too early to show anything"
    resumed = train("killed", *ALL_ON, "-resume", "auto", updates=None)
    assert [line["what"] for line in resumed.of("run")][-2:] == ["resume", "end"]
    equal(resumed, whole)


def test_stopped_by_the_number_of_updates_and_validated_by_itself(train: Train) -> None:
    """A run goes on with the kind of attention it began with; -eval tells what the run told."""
    run = train("run", "-amp", "bf16", "TRAIN.MODEL_EMA=true", "SAVE_FREQ=1", updates=20)
    began_with = run.choices["attention"]
    run = train("run", "-amp", "bf16", "TRAIN.MODEL_EMA=true", "SAVE_FREQ=1", "-resume", "auto", updates=None)
    assert f"attention {began_with} (as before the resume)" in run.text or KIND == "cpu"
    assert run.choices["attention"] == began_with
    assert [line["update"] for line in run.of("train")] == list(range(1, UPDATES + 1))
    told = run.of("val")[-1]
    shown = train("eval", "-eval", "-resume", run.folder, "-amp", "bf16", updates=None)
    assert shown.of("val")[-1]["loss"] == pytest.approx(told["loss"], rel=1e-4)
    assert shown.of("val")[-1]["ema_loss"] == pytest.approx(told["ema_loss"], rel=1e-4)
    elsewhere = train("on_a_cpu", "-eval", "-resume", run.folder, "-device", "cpu", "-amp", "off", updates=None)
    assert elsewhere.of("val")[-1]["loss"] == pytest.approx(told["loss"], rel=0.02)
    assert elsewhere.of("val")[-1]["ema_loss"] == pytest.approx(told["ema_loss"], rel=0.02)


def test_weights_move_between_the_gpu_and_the_cpu(train: Train) -> None:
    """What was saved from page-locked memory is what a CPU goes on with, and the reverse."""
    words = ("TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.1", "SAVE_FREQ=1", "TRAIN.MODEL_EMA=true")
    whole = train("whole", *words, updates=None)
    for first, then in (([], ["-device", "cpu"]), (["-device", "cpu"], [])):
        name = f"moved{len(first)}"
        train(name, *words, *first, updates=20)
        stepped = train(name, *words, *then, "-resume", "auto", updates=None)
        assert far(stepped.weights(), whole.weights()) < 1e-4
        assert far(stepped.weights("ema.safetensors"), whole.weights("ema.safetensors")) < 1e-4
