"""-dry_run makes ordinary updates and a validation, keeps nothing, and reports memory and time."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from datasets import TrainLoader
from engine.machine.device import Run
from engine.measure.meters import Position
from engine.memory import dry_run
from engine.memory.dry_run import Cost
from engine.task.one import Means
from tests.engine.small import CPU, build
from tests.program import Vitamp
from utils.config import load_config
from utils.distributed.world import ALONE


def test_dry_run_of_two_processes_leaves_no_files(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    place = tmp_path / "empty"
    place.mkdir()
    more = ("-ngpus", 2, "-num_workers", 1, "-dry_run", "TRAIN.MODEL_EMA=true")
    done = vitamp("-cfg", tiny, *more, script="main_multi_gpu.py", cwd=place, code=0)
    assert len(re.findall(r"^Epoch\[001/002\], Step\[0020/0022\], Lr: ", done.out, re.MULTILINE)) == 1
    assert done.out.count("----- Epoch[001/002], Validation Loss: ") == 2, "the model and its EMA"
    assert re.search(r"memory     [\d.]+ [GM]iB of [\d.]+ GiB at the peak, for each process", done.out)
    assert re.search(r"44 updates to go \(2.0 epochs\): about 0:\d\d:\d\d, until 20", done.out)
    assert "Where the time went: " in done.out
    assert done.err == "", "no library warns, in no rank and no loading process"
    assert list(place.iterdir()) == []
    assert done.out.endswith("Dry run: updates, validation and data loading work; nothing was kept or written.\n")


def test_dry_run_of_a_nan_ends_with_a_warning(vitamp: Vitamp, tiny: Path) -> None:
    done = vitamp("-cfg", tiny, "-dry_run", "TRAIN.BASE_LR=1e30", "TRAIN.WARMUP_START_LR=1e30", code=0)
    assert "Dry run: the loss or its gradient is NaN or infinite" in done.err
    assert "updates, validation and data loading work" not in done.out


@pytest.mark.parametrize("threads", [1, 2])
def test_dry_run_of_several_threads_also_tries_one(vitamp: Vitamp, tiny: Path, tmp_path: Path, threads: int) -> None:
    done = vitamp("-cfg", tiny, "-dry_run", "-threads", threads, cwd=tmp_path, code=0)
    times = re.findall(r"^  (time|THREADS=1) +[\d.e-]+ s per update, .* until 20", done.out, re.MULTILINE)
    assert times == ["time", "THREADS=1"][:threads]
    assert done.out.count("----- Epoch[001/002], Validation Loss: ") == threads, "the validation is timed too"
    assert done.out.count("The time per update is estimated from 20 updates.") == threads
    assert done.err == ""


def test_dry_run_ends_with_the_update_in_which_its_time_is_up(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dry_run, "MOST_SECONDS_IN_ALL", 0.0)
    monkeypatch.setattr(dry_run, "LEAST_SECONDS", 0.0)
    ready = build(tiny)
    dry_run.try_out(Run(load_config(str(tiny)).config, ALONE, CPU, threads=2), ready, 88)
    assert "per update is estimated from 1 update: the time of a dry run is up." in said.text
    assert "Validation Loss" not in said.text, "it is estimated from one batch"
    assert "THREADS=1" not in said.text
    assert "88 updates to go" in said.text


def test_dry_run_refuses_a_batch_that_would_not_fit(vitamp: Vitamp, tiny: Path) -> None:
    """It is estimated from small ones; on a CPU, the system would kill the program."""
    data = ("-dataset", "synthetic", "-image_size", 64, "DATA.SYNTHETIC_TRAIN=20000000", "-batch_size", 10_000_000)
    small = ("-batch_size", 1000, "TRAIN.MEMORY_LIMIT=0.2")
    done = vitamp("-cfg", tiny, *data, *small, "-dry_run", code=2)
    assert re.search(r"BATCH_SIZE 1000: .* about [\d.]+ [GM]iB per process, and 188.4 MiB can be had", done.err)
    done = vitamp("-cfg", tiny, *data, "-dry_run", code=2)
    figures = r"BATCH_SIZE 10000000: an update would take about ([\d.]+) GiB per process, and ([\d.]+) GiB can be had"
    ((needed, usable),) = re.findall(figures, done.err)
    ((size, accumulated),) = re.findall(r"DATA.BATCH_SIZE=(\d+) TRAIN.ACCUM_ITER=(\d+): the same images", done.err)
    assert int(size) * int(accumulated) == 10_000_000
    assert float(needed) / int(accumulated) <= float(usable), "the first way out must fit by the same estimate"


def test_dry_run_of_an_evaluation_says_whether_weights_were_loaded(
    vitamp: Vitamp, digits_run: Path, tiny: Path, tmp_path: Path
) -> None:
    ending = "nothing was validated or written."
    for more, said in (
        (("-cfg", tiny), "no weights were loaded"),
        (("-cfg", tiny, "-pretrained", digits_run), "the weights match the model"),
        (("-resume", digits_run), "the weights match the model"),
    ):
        done = vitamp("-eval", "-dry_run", "-output", tmp_path / "run", *more, code=0)
        assert f"Dry run: {said}; {ending}" in done.out


def test_dry_run_says_the_time_left_and_warns_of_little_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(str(tiny), words={"VALIDATE_FREQ": "2", "TRAIN.NUM_EPOCHS": "10"}).config
    loader = SimpleNamespace(order=SimpleNamespace(updates=100))
    ready: Any = SimpleNamespace(precision=SimpleNamespace(device=CPU), train_loader=loader, position=Position())
    monkeypatch.setattr(dry_run, "total_memory", lambda _: 1000)
    costs = "\n".join(dry_run._costs(config, ready, {"time": Cost(2.0, 100.0), "THREADS=1": Cost(0.5, 25.0)}, 1000))
    assert "nearly all memory; to save some: DATA.BATCH_SIZE=16 TRAIN.ACCUM_ITER=2: " in costs
    assert "2 s per update, about 0:01:40 per validation" in costs
    assert "1,000 updates to go (10.0 epochs): about 0:41:40" in costs, "1,000 updates of 2 s, 5 validations of 100 s"
    assert re.search(r"THREADS=1  0\.5 s per update, .* about 0:10:25, until", costs)
    more = config.changed(VALIDATE_EVERY_UPDATES=300)
    assert "about 0:46:40" in "\n".join(dry_run._costs(more, ready, {"time": Cost(2.0, 100.0)}, 1000)), (
        "3 more validations"
    )
    costs = "\n".join(dry_run._costs(config, ready, {"time": Cost(2.0, 100.0)}, 1000, batch_is_auto=True))
    assert "DATA.BATCH_SIZE=auto" not in costs
    monkeypatch.setattr(dry_run, "total_memory", lambda _: 2**60)
    costs = "\n".join(dry_run._costs(config, ready, {"time": Cost(2.0, 100.0)}, 0))
    assert "nearly" not in costs
    assert "0 updates to go (0.0 epochs): about 0:00:00" in costs
    alike = {"MODEL.FREEZE": "backbone", "DATA.CROP": "none", "DATA.FLIP": "0", "MODEL.DROPOUT": "0"}
    frozen = load_config(str(tiny), words=alike).config
    costs = "\n".join(dry_run._costs(frozen, ready, {"time": Cost(2.0, 100.0)}, 1000))
    assert "features are kept" in costs
    assert "100 updates to go (1.0 epochs): about 0:05:00" in costs, "one pass and one validation"
    config = load_config(str(tiny), words={"TRAIN.NUM_EPOCHS": "10", "TRAIN.SIZE_SCHEDULE": "[[0,4],[0.5,8]]"}).config
    costs = "\n".join(dry_run._costs(config, ready, {"time": Cost(2.0, 100.0)}, 1000))
    assert "later epochs take more memory" in costs
    assert "about 1:40:00, until" in costs, "500 updates of 2 s, 500 of four times as many pixels, 10 validations"
    ready.position = Position(epoch=5, step=50, update=450)
    costs = "\n".join(dry_run._costs(config, ready, {"time": Cost(2.0, 100.0)}, 550))
    assert "about 1:18:20, until" in costs, "50 updates of 2 s, 500 of four times as many pixels, 6 validations"
    ready.position = Position(epoch=6, step=0, update=500)
    costs = "\n".join(dry_run._costs(config, ready, {"time": Cost(2.0, 100.0)}, 500))
    assert "about 0:25:00, until" in costs, "500 updates of 2 s, 5 validations"
    assert "later epochs" not in costs


@pytest.mark.parametrize(
    ("model", "size", "smaller"),
    [
        ("resnet18", "224", "160 computes about 2.0 times"),
        ("resnet18", "96,192", "64,128 computes about 2.2 times"),
        ("resnet18", "24", None),
        ("swin_tiny_patch4_window7_224", "224", "160 computes about 2.0 times"),
        ("vit_tiny_patch16_224", "224", "160 computes about 2.0 times"),
        ("mixer_s16_224", "224", None),
    ],
)
def test_dry_run_of_a_long_run_names_a_smaller_image_size(model: str, size: str, smaller: str | None) -> None:
    words = {"MODEL.NAME": model, "DATA.IMAGE_SIZE": f"[{size}]" if "," in size else size, "TRAIN.NUM_EPOCHS": "10"}
    words["MODEL.PRETRAINED"] = "weights.pth"
    config, loader = load_config(words=words).config, SimpleNamespace(order=SimpleNamespace(updates=100))
    ready: Any = SimpleNamespace(precision=SimpleNamespace(device=CPU), train_loader=loader, position=Position())
    costs = "\n".join(dry_run._costs(config, ready, {"time": Cost(3.6, 1.0)}, 1000))
    assert (f"-image_size {smaller}" in costs) if smaller else ("-image_size" not in costs)
    short = {"time": Cost(3.6, 1.0), "THREADS=1": Cost(3.5, 1.0)}
    assert "-image_size" not in "\n".join(dry_run._costs(config, ready, short, 1000)), "less than an hour"


@pytest.mark.parametrize(("batch", "updates"), [(32, 44), (359, 4), (700, 2), (1400, 1)])
def test_auto_counts_the_wait_that_every_epoch_begins_with(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, batch: int, updates: int
) -> None:
    """It takes 1.5 s, and each update 0.1 s. The first wait and the first validation also start processes."""
    times, waited, waits, validations = [0.0], [0.0], iter([9.0] + [1.5] * 9), iter([0.2, 0.03])

    def train_update(_parts: object, first: bool, _update: int) -> None:
        waited.append(next(waits) if first else 0.0)
        times.append(0.1 + waited[-1])

    clock = dict.fromkeys(("monotonic", "perf_counter"), lambda: sum(times))
    monkeypatch.setattr(dry_run, "time", SimpleNamespace(**clock))
    monkeypatch.setattr(dry_run.stopping, "BEGAN", 0.0)
    monkeypatch.setattr(dry_run, "train_update", train_update)
    monkeypatch.setattr(dry_run, "validate", lambda *_: times.append(next(validations)) or Means(0.2, 12.5, 50.0))
    monkeypatch.setattr(TrainLoader, "epoch", lambda _, _epoch, start=0: [True] + [False] * (updates - start - 1))
    monkeypatch.setattr(TrainLoader, "take_wait", lambda _: sum(waited.pop() for _ in list(waited)))
    given = {"TRAIN.NUM_EPOCHS": "auto", "TRAIN.WARMUP_EPOCHS": "0.5", "MAX_TIME": "0:01:00"}
    config = load_config(str(tiny), words={**given, "DATA.BATCH_SIZE": str(batch)}).config
    run = dry_run.settle_epochs(Run(config, ALONE, CPU, threads=1))
    assert f" ({0.1 + 1.5 / updates:.3g} s per update, 0.03 s per validation)" in said.text
    assert run.compiling == ("none", "auto: as in the trial that found TRAIN.NUM_EPOCHS")
