"""The bottleneck of a run: the rule, with made-up times, and the log lines for a slow and a fast data source."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.measure.stages import EventStages
from engine.measure.throughput import (
    BACKWARD,
    COPY,
    DATA,
    FORWARD,
    OPTIMISER,
    OTHER,
    Bottleneck,
    Setting,
    StageTimes,
    Tally,
    Throughput,
    find_bottleneck,
)
from engine.trainer import Trainer
from tests.datasets.shards.serving import ByteRanges, serving
from tests.datasets.shards.tar_files import write_set
from tests.engine.small import CPU
from tests.program import Vitamp
from utils.distributed.world import ALONE

ON_A_GPU = Setting("cuda", amp=True, compiled=True, workers=8, cores=16)
NAP = 0.25
AT_ONCE = """
from engine import trainer
from vitamp import loss

trainer.MIN_SECONDS = 0.0

@loss
def unused(logits, targets): ...
"""
"""Own code for a run that reports the bottleneck of a second"""


def tally(waited: float = 0.0, *, updates: int = 100, **stages: Any) -> Tally:
    """A run of 100 seconds, at 820 images per second. Stages are percent; the rest is the backward pass."""
    if not stages:
        return Tally(updates, 82_000, 100.0, waited)
    rest = 100 - sum(stages.values())
    names = (DATA, COPY, FORWARD, BACKWARD, OPTIMISER, OTHER)
    times = StageTimes(updates, dict.fromkeys(names, 0.0) | {BACKWARD: rest} | stages)
    return Tally(updates, 82_000, 100.0, waited, times)


def bottleneck(found: Tally, setting: Setting = ON_A_GPU, waited: list[float] | None = None) -> Bottleneck:
    made = find_bottleneck(found, setting, waited or [found.waited_percent])
    assert made is not None
    return made


def test_gpu_that_waits_for_data_is_input_bound() -> None:
    made = bottleneck(tally(waited=41.0))
    assert made.bound == "input"
    assert made.text.startswith(
        "input-bound: the GPU waited for data 41 % of the time. The loader delivers 820 images/s; "
        "the model could train on 1,390."
    )
    assert "-num_workers, now 8" in made.text
    assert "docs/performance.md" in made.text
    assert made.could_take == pytest.approx(1389.8, abs=0.1)


@pytest.mark.parametrize(
    ("stages", "bound", "percent"),
    [
        ({"data": 41.0}, "input", 41),
        ({"data": 15.0}, "input", 15),
        ({"data": 14.9}, "compute", 85.1),
        ({"copy": 10.0}, "copy", 10),
        ({"copy": 9.9}, "compute", 90.1),
        ({"optimiser": 25.0}, "optimiser", 25),
        ({"optimiser": 24.9}, "compute", 75.1),
        ({"other": 20.0}, "loop", 20),
        ({"other": 19.9}, "compute", 80.1),
        ({"forward": 30.0}, "compute", 100),
        ({"data": 16.0, "optimiser": 30.0}, "optimiser", 30),  # the one that takes most
        ({"data": 24.0, "optimiser": 24.0}, "input", 24),  # below its own threshold the optimiser does not count
    ],
)
def test_thresholds(stages: dict[str, Any], bound: str, percent: float) -> None:
    made = bottleneck(tally(**stages))
    assert (made.bound, made.percent) == (bound, pytest.approx(percent))
    assert made.text.startswith(f"{bound}-bound: ")
    if bound in ("copy", "optimiser", "loop"):
        assert f" {percent} % " in made.text
        assert {"copy": "the GPU waited", "optimiser": "fewer steps", "loop": "REPORT_FREQ"}[bound] in made.text
        assert made.text.endswith("; see docs/performance.md.")


def test_device_time_takes_precedence_over_host_time() -> None:
    """A host that runs ahead waits for data while the GPU still works."""
    assert bottleneck(tally(waited=60.0, data=2.0)).bound == "compute"
    assert bottleneck(tally(waited=60.0)).bound == "input"


@pytest.mark.parametrize(
    ("device", "amp", "compiled", "advice"),
    [
        ("cuda", False, False, "-amp (scripts/choose_precision.py measures the gain) and TRAIN.COMPILE=whole"),
        ("cuda", True, False, "To speed up, try TRAIN.COMPILE=whole (or blocks);"),
        ("cpu", False, False, "To speed up, try -amp (scripts/choose_precision.py measures the gain);"),
        ("cuda", False, True, "To speed up, try -amp"),
        ("cuda", True, True, "Only a smaller model, smaller images or more devices"),
    ],
)
def test_advice_for_a_compute_bound_run(device: str, amp: bool, compiled: bool, advice: str) -> None:
    setting = Setting(device, amp, compiled, workers=8, cores=16)
    made = bottleneck(tally(waited=2.0), setting)
    who = "CPU" if device == "cpu" else "GPU"
    assert made.text.startswith(f"compute-bound: the {who} waited for data 2 % of the time.")
    assert advice in made.text
    assert made.percent == pytest.approx(98)
    in_stages = bottleneck(tally(data=2.0, forward=30.0), setting)
    shared = bottleneck(tally(waited=2.0), replace(setting, threads=2))
    assert ("THREADS=1 (faster for a small model" in shared.text) == (device == "cpu")
    assert "forward pass took 30 % and the backward pass 68 %" in in_stages.text


def test_other_programs_that_use_the_cores_are_named() -> None:
    """Of a process that may use two cores, over 100 seconds."""
    on_a_cpu, alone = Setting("cpu", amp=True, compiled=True, workers=0, cores=2), "Only a smaller model"
    made = bottleneck(replace(tally(waited=2.0), others=90.0), on_a_cpu)
    assert "Other programs used 0.9 of the 2 cores: without them, training is faster; see docs" in made.text
    assert alone not in made.text
    for few in ({"others": 19.0}, {"others": 90.0, "idle": 41.0}, {"others": 0.0}):
        assert alone in bottleneck(replace(tally(waited=2.0), **few), on_a_cpu).text
    made = bottleneck(replace(tally(waited=2.0), others=90.0), replace(on_a_cpu, threads=2))
    assert "training is faster. To speed up, try THREADS=1" in made.text


def test_work_of_other_programs_is_counted() -> None:
    own, end = Throughput(CPU), time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        while own.tally.others < 0.2 and time.monotonic() < end:
            time.sleep(0.1)
            own.read(0.0)
        other.kill()
    assert own.tally.others >= 0.2


@pytest.mark.parametrize(
    ("loading", "said", "not_said"),
    [
        ({"workers": None}, ("a larger DATA.BATCH_SIZE",), ("-num_workers", "pack_images")),
        ({"workers": 0}, ("-num_workers, now 0: the training process loads the images itself",), ()),
        ({"workers": 2}, ("-num_workers, now 2", "scripts/pack_images.py)"), ()),
        ({"workers": 4}, ("packed images",), ("-num_workers",)),
        ({"workers": 4, "several": True}, ("4 cores: only more cores",), ("pack", "-num_workers")),
        ({"workers": 2, "stored": "tar files"}, ("-num_workers", "pack_images.py -raw"), ("packed images",)),
        ({"workers": 4, "stored": "tar files"}, ("pack_images.py -raw",), ("-num_workers", "packed images")),
        ({"workers": 2, "stored": "pixels"}, ("-num_workers",), ("pack_images",)),
        ({"workers": 4, "stored": "pixels"}, ("more cores",), ("-num_workers", "pack_images")),
        ({"workers": 4, "stored": "pixels", "remote": True}, ("-num_workers",), ("pack_images",)),
    ],
)
def test_advice_on_loading_names_only_what_helps(
    loading: dict[str, Any], said: tuple[str, ...], not_said: tuple[str, ...]
) -> None:
    text = bottleneck(tally(waited=41.0), Setting("cuda", True, True, cores=4, **loading)).text
    assert all(part.lower() in text.lower() for part in said), text
    assert not any(part.lower() in text.lower() for part in not_said), text


def test_bottleneck_is_that_of_the_slowest_rank() -> None:
    """The other ranks wait in the all-reduce, which is measured as computing."""
    made = bottleneck(tally(waited=1.0), waited=[1.0, 2.0, 41.0, 0.5])
    assert made.bound == "input"
    assert "the GPU of rank 2 waited for data 41 %" in made.text


def test_no_bottleneck_after_too_few_updates() -> None:
    assert find_bottleneck(tally(waited=41.0, updates=9), ON_A_GPU, [41.0]) is None
    assert find_bottleneck(tally(waited=41.0, updates=10), ON_A_GPU, [41.0]) is not None
    assert find_bottleneck(Tally(), ON_A_GPU, [0.0]) is None


@pytest.mark.parametrize(("seconds", "is_reported"), [(0.5, False), (4.9, False), (5.1, True)])
def test_training_reports_no_bottleneck_of_a_few_seconds(seconds: float, is_reported: bool) -> None:
    throughput = SimpleNamespace(tally=Tally(updates=50, images=800, seconds=seconds, waited=seconds / 2))
    trainer: Any = SimpleNamespace(throughput=throughput, world=ALONE, _setting=ON_A_GPU)
    assert (Trainer._bottleneck(trainer) is not None) == is_reported


def test_tally_leaves_out_set_up_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.measure import throughput

    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    stages = EventStages()
    made = Throughput(CPU, stages)

    def updates(number: int, seconds: float) -> None:
        for _ in range(number):
            stages.begin()
            now[0] += seconds
            stages.mark(FORWARD)
            made.count(64)

    updates(10, 5.0)
    made.read(waited=30.0)
    assert (made.tally.updates, made.tally.seconds) == (10, 50.0), "all there is"
    updates(5, 1.0)
    made.read(waited=0.0)
    assert (made.tally.updates, made.tally.seconds) == (15, 55.0), "too few without the first"
    updates(15, 1.0)
    made.read(waited=2.0)
    now[0] += 1000
    made.restart()
    updates(20, 1.0)
    made.read(waited=1.0)
    assert (made.tally.updates, made.tally.images, made.tally.seconds, made.tally.waited) == (40, 2560, 40.0, 3.0)
    assert made.tally.stages.seconds[FORWARD] == 40.0
    assert made.tally.stages.total == 40.0


@pytest.fixture
def slow_source(tmp_path: Path) -> Iterator[str]:
    """The address of shards of 48 images, of which each answer takes its time."""
    pytest.importorskip("aiohttp", reason="reading over http needs aiohttp")
    write_set(tmp_path / "set", [48])
    with serving(partial(ByteRanges, directory=str(tmp_path), nap=NAP)) as place:
        yield f"{place}/set/"


def test_slow_data_source_is_reported_as_input_bound(
    vitamp: Vitamp, tiny: Path, tmp_path: Path, slow_source: str
) -> None:
    (tmp_path / "at_once.py").write_text(AT_ONCE)
    at_once = ("-use", tmp_path / "at_once.py")
    data = ("-dataset", "shards", "-data_path", slow_source, "-batch_size", 4, "-num_workers", 0, *at_once)
    words = ("DATA.IMAGE_SIZE=16", "DATA.IMAGE_CHANNELS=3", "MODEL.NUM_CLASSES=3", f"DATA.CACHE={tmp_path / 'cache'}")
    done = vitamp("-cfg", tiny, "-output", tmp_path / "run", *data, *words, "TRAIN.NUM_EPOCHS=1", code=0)
    (sentence,) = re.findall("Where the time went: (.*)", done.out)
    assert sentence.startswith("input-bound: the CPU waited for data ")
    assert "the training process loads the images itself" in sentence
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    verdicts = {line.get("what", line["event"]): line["perf"].get("verdict") for line in lines}
    assert verdicts["epoch"]["bound"] == "input"
    assert verdicts["epoch"]["percent"] >= 15
    assert verdicts["epoch"] == verdicts["end"]
    assert verdicts["end"]["text"] == sentence
