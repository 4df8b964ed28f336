"""DATA.BATCH_SIZE auto: the batch found fits, and the search leaves no trace."""

import contextlib
import json
import multiprocessing
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from engine.machine import memory
from engine.machine.device import Run
from engine.machine.memory import GIB
from engine.memory import batch_size
from engine.memory.batch_size import Trial, free_memory, held_memory, largest_that_fits, limited
from engine.memory.global_batch import settle_batch
from tests.engine.small import CPU
from tests.program import Vitamp, last_weights, metrics
from utils.config import Config, load_config
from utils.distributed.world import ALONE, World
from utils.errors import UserError
from utils.machine import cpus
from vitamp.checkpoints import Checkpoint

AUTO = ("-batch_size", "auto")
MemoryOf = Callable[[float], None]


def settings(tiny: Path, **words: object) -> Config:
    given = {key.replace("__", "."): str(value) for key, value in words.items()}
    return load_config(str(tiny), words={"DATA.BATCH_SIZE": "auto", **given}).config


def found(config: Config, checkpoint: Checkpoint | None = None) -> tuple[int, int]:
    settled = settle_batch(Run(config, ALONE, CPU, threads=1), checkpoint).config
    return settled.DATA.BATCH_SIZE, settled.TRAIN.ACCUM_ITER


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> MemoryOf:
    """Pretend that this many MiB are free, beside what the process holds, and that an image takes one of them."""

    def set_to(mib: float) -> None:
        monkeypatch.setattr(batch_size, "free_memory", lambda *_: int(mib * 2**20))
        monkeypatch.setattr(batch_size, "held_memory", lambda _: 0)
        made, batch_of = [0], Trial._batch
        monkeypatch.setattr(Trial, "_batch", lambda trial, size: made.append(size) or batch_of(trial, size))
        monkeypatch.setattr(batch_size, "take_peak", lambda _: made[-1] * 2**20)

    return set_to


@pytest.mark.parametrize("most", [1, 5, 8, 100, 1024])
@pytest.mark.parametrize("room", [0, 1, 3, 7, 8, 15, 16, 99, 100, 517, 1023, 5000])
def test_search_finds_the_largest_batch(most: int, room: int) -> None:
    tried: list[int] = []
    answer = largest_that_fits(lambda size: tried.append(size) or size <= room, most, lambda: False)
    largest = min(room, most)
    assert answer == (largest if largest < 8 or largest == most else largest // 8 * 8)
    assert len(tried) == len(set(tried)) <= 15
    assert max(tried) <= most


@pytest.mark.parametrize(("mib", "size"), [(8.7, 8), (44, 40), (100, 88), (5, 4)])
def test_found_batch_is_the_largest_that_fits(tiny: Path, memory_of: MemoryOf, mib: float, size: int) -> None:
    memory_of(mib)
    assert found(settings(tiny)) == (size, 1), "8 % stay free"


def batches_in_a_process(config_file: str, mib: tuple[int, ...], words: dict[str, object]) -> list[int]:
    """The batch found with each of these limits, beyond what the process holds."""
    torch.set_num_threads(1)
    limits = [(held_memory(CPU) + each * 2**20) / (1 - batch_size.MARGIN) / GIB for each in mib]
    return [found(settings(Path(config_file), TRAIN__MEMORY_LIMIT=limit, **words))[0] for limit in limits]


def test_process_memory_limits_the_batch_on_a_cpu(tiny: Path) -> None:
    """By what the process really holds: an image of 256 tokens takes some MiB.

    In a new process: this one may have memory to spare from earlier tests, which holds more images than the limit says.
    """
    large = {"DATA__IMAGE_SIZE": 32, "DATA__DATASET": "synthetic", "DATA__SYNTHETIC_TRAIN": 100_000}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sizes = pool.apply(batches_in_a_process, (str(tiny), (40, 100), large))
    assert 0 < sizes[0] < sizes[1] < 1000, sizes


def test_batch_that_would_take_too_much_is_not_tried(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill the process."""
    trial = Trial(settings(tiny), None, ALONE, CPU, limit=100)
    trial.peaks |= {8: 30, 16: 50}
    monkeypatch.setattr(Trial, "_try", lambda *_: pytest.fail("tried"))
    assert not trial.fits(40), "110 expected"
    monkeypatch.setattr(Trial, "_try", lambda *_: True)
    monkeypatch.setattr(batch_size, "take_peak", lambda _: 90)
    assert trial.fits(32)
    monkeypatch.setattr(batch_size, "take_peak", lambda _: 101)
    assert not trial.fits(24)


def test_small_data_sets_and_cpus_limit_the_search(tiny: Path, memory_of: MemoryOf) -> None:
    memory_of(1000)
    assert found(settings(tiny)) == (176, 1), "8 updates an epoch of 1,437 images"
    assert found(settings(tiny, TRAIN__GLOBAL_BATCH=1200)) == (600, 2), "of which a CPU is not to try all"
    assert Trial(settings(tiny), None, World(0, 2, 0, 2), CPU, 2**60).most()[0] == 88
    for tail, dropped in ((0, 0.5), (1, 0.0)):  # the tokens of the last epoch
        settled = settings(tiny, TRAIN__TOKEN_DROP=0.5, TRAIN__TOKEN_DROP_TAIL=tail)
        parts = Trial(settled, None, ALONE, CPU, 2**60)._parts
        assert parts is not None
        assert parts.figures()["token_drop"].value == dropped
    mixed = settings(tiny, TRAIN__MIXUP_ALPHA=0.8)
    assert Trial(mixed, None, World(0, 100, 0, 100), CPU, 2**60).most()[0] == 2, "mixing takes two"


def test_batch_divides_the_global_batch(tiny: Path, memory_of: MemoryOf, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(1000)
    monkeypatch.setattr(batch_size, "all_gather", lambda items, _: [*items, 24])
    assert found(settings(tiny, TRAIN__GLOBAL_BATCH=401)) == (1, 401), "a prime number"
    assert found(settings(tiny, TRAIN__GLOBAL_BATCH=408)) == (24, 17)


def test_search_stops_early_on_a_slow_cpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "SECONDS_PER_TRIAL_ON_CPU", 0.0)
    assert found(settings(tiny)) == (8, 1)


def test_too_little_memory_for_one_image_is_refused(
    tiny: Path, memory_of: MemoryOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(1)
    with pytest.raises(UserError, match=r"not even a batch of 1 fits into 1\.0 MiB\. Try TRAIN\.GRAD"):
        found(settings(tiny))
    monkeypatch.setattr(Trial, "fits", lambda _, batch: batch == 1)  # none to mix it with
    with pytest.raises(UserError, match=r"not even a batch of 2 .* Try a smaller MODEL"):
        found(settings(tiny, TRAIN__MIXUP_ALPHA=0.8, TRAIN__GRAD_CHECKPOINT="blocks", AMP__ENABLED=True))


def test_unknown_memory_asks_for_memory_limit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "free_memory", lambda *_: None)
    with pytest.raises(UserError, match=r"TRAIN\.MEMORY_LIMIT"):
        found(settings(tiny))
    assert found(settings(tiny, TRAIN__MEMORY_LIMIT=64))[0] >= 32


def test_one_image_at_a_time_is_not_mixed(tiny: Path, memory_of: MemoryOf) -> None:
    memory_of(100)
    with pytest.raises(UserError, match=r"1 is the largest divisor of 401 .* mixup and CutMix mix images of a batch"):
        found(settings(tiny, TRAIN__GLOBAL_BATCH=401, TRAIN__MIXUP_ALPHA=0.8))


def test_global_batch_sets_the_accumulation(tiny: Path) -> None:
    def settled(size: str) -> Run:
        config = load_config(str(tiny), words={"TRAIN.GLOBAL_BATCH": size, "TRAIN.ACCUM_ITER": "7"}).config
        return settle_batch(Run(config, ALONE, CPU, threads=1), None)

    for size, accumulated in (("96", 3), ("32", 1)):
        run = settled(size)
        found = run.config.DATA.BATCH_SIZE, run.config.TRAIN.ACCUM_ITER, run.auto_batch_size
        assert found == (32, accumulated, False)
    with pytest.raises(UserError, match=r"100 is not a multiple of the 32 images .* Use 96 or 128"):
        settled("100")


def test_resume_with_auto_keeps_the_global_batch(tiny: Path) -> None:
    """The saved run began on one process, and was resumed on two."""
    batch = {"per_process": 96, "accumulated": 2, "processes": 2, "asked": 4}
    saved = Checkpoint(tiny, {"batch": batch, "choices": {"batch_size": 96}})
    for given in (1, 2, 4):
        assert found(settings(tiny, TRAIN__ACCUM_ITER=given), saved) == (96, 4)


def test_auto_batch_equals_the_same_number_and_is_kept_on_resume(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    words = ["TRAIN.MODEL_EMA=true", "MODEL.DROPOUT=0.1", "TRAIN.MAX_UPDATES=12", "SAVE_EVERY_UPDATES=8"]
    auto = tmp_path / "auto"
    done = vitamp("-cfg", tiny, *AUTO, *words, "-output", auto, code=0)
    size = json.loads((auto / "run.json").read_text())["choices"]["batch_size"]
    assert size % 8 == 0
    assert re.search(
        rf"DATA.BATCH_SIZE auto: {size} fits \(.* GiB; with more, an epoch of 1,437 images would have fewer than 8 "
        rf"updates\); {size} x 1 process x 1 accumulated = {size} images per update\.",
        done.out,
    )
    data = yaml.safe_load((auto / "config.yaml").read_text())["DATA"]
    assert (data["BATCH_SIZE"], data["BATCH_SIZE_EVAL"]) == (size, None), "validation follows"

    named = tmp_path / "named"
    vitamp("-cfg", tiny, "-batch_size", size, *words, "-output", named, code=0)
    assert metrics(auto) == metrics(named)
    assert last_weights(auto) == last_weights(named)

    # The same command again, as a cluster gives it to a run it had stopped: on a machine that has more room now.
    for path in sorted((auto / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    (auto / "checkpoints" / "index.json").unlink()
    target = f"TRAIN.GLOBAL_BATCH={size - 8}"  # which that size does not divide
    assert "which this run found" not in vitamp("-cfg", tiny, *AUTO, target, "-resume", auto, "-dry_run", code=0).out
    again = vitamp("-cfg", tiny, *AUTO, *words, "-output", auto, "-resume", "auto", code=0)
    assert f"DATA.BATCH_SIZE auto: {size}, which this run found when it began." in again.out
    assert last_weights(auto) == last_weights(named)
    meta = json.loads((auto / "checkpoints" / "step-000000012" / "meta.json").read_text())
    assert (meta["batch"]["per_process"], meta["choices"]["batch_size"]) == (size, size)


@pytest.mark.slow  # two runs
def test_resume_on_other_processes_keeps_the_global_batch(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    vitamp("-cfg", tiny, "-batch_size", 96, "TRAIN.MAX_UPDATES=3", "-output", run, code=0)
    done = vitamp("-resume", run, *AUTO, "TRAIN.MAX_UPDATES=5", "DATA.BATCH_SIZE_EVAL=null", code=0)
    (told,) = [line for line in done.out.splitlines() if line.startswith("DATA.BATCH_SIZE auto")]
    assert told.endswith("= 96 images per update.")


def test_evaluation_reports_the_fitting_batch(vitamp: Vitamp, tiny: Path, tmp_path: Path) -> None:
    done = vitamp("-cfg", tiny, *AUTO, "-eval", "-output", tmp_path / "eval", code=0)
    assert json.loads((tmp_path / "eval" / "run.json").read_text())["choices"]["batch_size"] == 360
    assert "DATA.BATCH_SIZE auto: 360 fits (" in done.out, "all images of the split"


def test_tools_and_fsdp_refuse_auto_batch(vitamp: Vitamp, tiny: Path) -> None:
    done = vitamp("-cfg", tiny, *AUTO, script="scripts/choose_precision.py")
    assert (done.code, done.err.count("auto does not work in this tool")) == (2, 1), done.text
    with pytest.raises(UserError, match=r"auto is not possible with DIST\.STRATEGY fsdp"):
        settings(tiny, DIST__STRATEGY="fsdp")


def test_container_limit_counts_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "jobs" / "mine"
    own.mkdir(parents=True)
    for folder, most in ((own, "max"), (own.parent, str(3 * GIB))):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{2 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    groups, meminfo = tmp_path / "cgroup", tmp_path / "meminfo"
    groups.write_text("5:cpu:/x\n0::/jobs/mine\n")
    meminfo.write_text("MemTotal:  33554432 kB\nMemAvailable:  16777216 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(cpus, "MOUNTED", tmp_path)
    monkeypatch.setattr(cpus, "OWN", groups)
    assert free_memory(CPU, 1) == 2 * GIB, "3 GiB, of which 2 are in use, 1 by files that can be read again"
    assert free_memory(CPU, 2) == GIB
    groups.write_text("")
    assert free_memory(CPU, 1) == 16 * GIB
    meminfo.unlink()
    assert free_memory(CPU, 1) is None


def test_gpu_limit_is_set_and_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions, device = [], torch.device("cuda", 0)
    total = SimpleNamespace(total_memory=16 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, _: fractions.append(fraction))
    with contextlib.suppress(RuntimeError), limited(device, 4 * GIB):
        raise RuntimeError("in the middle of it")
    assert fractions == [0.25, 1.0]
