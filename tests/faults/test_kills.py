"""A run killed anywhere, any way, and started again, is the run that was never killed.

The moments and the ways are drawn from a seed, which is printed: VITAMP_KILL_SEED=N draws the same again.
`pytest -m slow tests/faults/test_kills.py -s` shows the kills.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.faults.killing import Run, drawn_curves, reported, send
from tests.program import metrics, save_image
from tests.waiting import until
from utils.distributed.launch import _first_failure

SEED = int(os.environ.get("VITAMP_KILL_SEED", "0")) or time.time_ns() % 10**6
WINDOW, UPDATES = 8, 120  # 20 epochs of 48 images
WAYS = (
    *("KILL a rank", "KILL the launcher", "KILL a data worker", "KILL all"),
    *("TERM the launcher", "TERM a rank", "INT the launcher", "USR1 the launcher", "USR1 a rank"),
)
TOO_LATE = " (too late: it had ended)"
CODES = {
    "KILL a rank": (137, -9),
    "KILL the launcher": (-9,),
    "KILL all": (-9,),
    "KILL a data worker": (1,),  # or the worker is replaced, and the run goes on
    "INT the launcher": (130,),
}
RECIPE = """\
DATA: {DATASET: imagefolder, IMAGE_SIZE: 16}
MODEL: {NAME: tiny, NUM_CLASSES: 4, PATCH_SIZE: 8, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2, DROPOUT: 0.1, DROPPATH: 0.1}
TRAIN: {NUM_EPOCHS: 20, WARMUP_EPOCHS: 1, BASE_LR: 2e-3, MODEL_EMA: true, RAND_AUGMENT: true, MIXUP_ALPHA: 0.8}
AMP: {ENABLED: true, DTYPE: fp16, INIT_LOSS_SCALING: 4294967296, INCR_EVERY_N_STEPS: 4}
REPORT_FREQ: 2
SAVE_EVERY_UPDATES: 4
KEEP_LAST: 2
THREADS: 1
DEVICE: cpu
"""


@dataclass
class Kill:
    update: int | None
    """It is done once this update is reported; None: while the run starts."""
    delay: float
    way: str
    processes: int
    workers: int
    code: int | None = None
    """None: the run went on."""
    note: str = ""


@dataclass(frozen=True)
class Shape:
    """How a run is spread: processes by the micro-batches that each accumulates."""

    processes: int
    accumulated: int
    strategy: str = "ddp"
    optimizer: str = "AdamW"

    def words(self, workers: int) -> list[object]:
        batch = WINDOW // self.processes // self.accumulated
        spread = f"DATA.NUM_WORKERS={workers}", f"DIST.STRATEGY={self.strategy}"
        flags = "-batch_size", batch, "-accum_iter", self.accumulated, f"TRAIN.OPTIMIZER.NAME={self.optimizer}"
        # Shorter than what is waited for here: a run that hangs is to say itself where.
        return [*flags, "DIST.TIMEOUT=1.0", *spread]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for part, count in (("train", 48), ("val", 12)):
        for number in range(count):
            save_image(root / part / f"class{number % 4}" / f"{number}.jpg", seed=number + len(part), size=(20, 18))
    return root


@pytest.fixture
def begin(start: Callable[..., Run], tiny: Path, images: Path) -> Callable[..., Run]:
    tiny.write_text(RECIPE)

    def call(folder: Path, shape: Shape, workers: int) -> Run:
        words = (f"DATA.DATA_PATH={images}", "-resume", "auto", *shape.words(workers))
        return start(*words, folder=folder, ngpus=shape.processes if shape.processes > 1 else 0)

    return call


def outcome(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All that a run leaves, but for its times and for the lines about its starts and ends."""
    last = max((folder / "checkpoints").glob("step-*"))
    assert last.name == f"step-{UPDATES:09d}"
    kept = {file.name: file.read_bytes() for file in last.glob("*.safetensors")}
    assert {name.partition(".")[0] for name in kept} >= {"model", "ema"}
    state = torch.load(last / "state.pt", weights_only=True)
    curves = {f"curve {name}": points for name, points in drawn_curves(folder).items()}
    return {**kept, **flat(state), **curves}, [line for line in metrics(folder) if line["event"] != "run"]


def flat(value: Any, name: str = "state") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: item for k, v in value.items() for key, item in flat(v, f"{name}.{k}").items()}
    if isinstance(value, list):
        return {key: item for k, v in enumerate(value) for key, item in flat(v, f"{name}.{k}").items()}
    if isinstance(value, torch.Tensor):
        return {name: (value.dtype, tuple(value.shape), value.numpy().tobytes())}
    return {name: value}


def drawn(number: int, ways: Sequence[str], shapes: Sequence[Shape], draw: random.Random) -> list[Kill]:
    """Kills from the first updates to the last ones, and now and then before the first update of a start."""
    moments = sorted(draw.randint(2, UPDATES * 7 // 10) for _ in range(number))
    chosen = (list(ways) * (number // len(ways) + 1))[:number]
    draw.shuffle(chosen)
    kills = []
    for update, way in zip(moments, chosen, strict=True):
        starting = draw.random() < 0.1 and "worker" not in way
        delay = draw.uniform(0, 4 if starting else 0.1)
        workers = draw.choice((1, 2, 3) if "worker" in way else (0, 1, 2, 3))
        kills.append(Kill(None if starting else update, delay, way, draw.choice(shapes).processes, workers))
    return kills


def kill(run: Run, way: str, draw: random.Random) -> None:
    how, _, whom = way.partition(" ")
    number = getattr(signal, f"SIG{how}")
    if whom == "all":
        run.kill_all()
        return
    among = {"a rank": run.ranks, "a data worker": run.loaders, "the launcher": list}[whom]()
    send(draw.choice(among) if among else run.process.pid, number)


def disturb(run: Run, planned: Kill, draw: random.Random) -> None:
    """Wait for the moment, do it, and see that the run ends as it should and leaves nothing behind."""
    before = reported(run.folder)
    if planned.update is not None:
        goal = max(planned.update, before + 1)
        until(lambda: run.process.poll() is not None or reported(run.folder) >= goal, 120)
        planned.update = goal
    time.sleep(planned.delay)
    if run.process.poll() is not None:
        run.end(5).expect(0)
        planned.code, planned.note = 0, TOO_LATE
        return
    kill(run, planned.way, draw)
    if "worker" in planned.way:  # it may be replaced; then the run is to be stopped some other way
        far = min(reported(run.folder) + 8, UPDATES)
        until(lambda: run.process.poll() is not None or reported(run.folder) >= far, 90)
        if run.process.poll() is None:
            run.kill_all()
            run.end(30)
            planned.note = " (the worker was replaced; then KILL all)"
            return
    done = run.end(90)
    planned.code = done.code
    if planned.update is not None:
        assert done.code in CODES.get(planned.way, (143,)), done.text
    # Python ends by Ctrl-C itself, with its traceback, until the program's own modules are imported (0.3 s).
    unheard = planned.update is None and done.code == -signal.SIGINT
    assert "Traceback" not in done.text or "worker" in planned.way or unheard or done.code == 137, done.text
    run.nothing_is_left(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shapes", "ways", "number"),
    [
        pytest.param([Shape(2, 2)], random.Random(SEED).sample(WAYS, 1), 1, marks=pytest.mark.every_slice),
        ([Shape(2, 2)], WAYS, 20),
        ([Shape(2, 2, optimizer="Muon")], WAYS, 20),
        ([Shape(2, 1), Shape(1, 2)], WAYS, 10),
        ([Shape(2, 2, "fsdp")], WAYS, 10),
    ],
    ids=["a sample, for every day", "AdamW", "Muon", "moved between two processes and one", "fsdp"],
)
def test_killed_anywhere_it_is_the_run_that_was_never_killed(
    begin: Callable[..., Run], tmp_path: Path, shapes: Sequence[Shape], ways: Sequence[str], number: int
) -> None:
    draw = random.Random(SEED)
    begin(tmp_path / "undisturbed", shapes[0], 2).end(180).expect(0)
    wanted, told = outcome(tmp_path / "undisturbed")
    assert wanted["state.meters.skipped"] > 0, "the scaler had something to do"
    kills = drawn(number, ways, shapes, draw)
    print(f"\nkills drawn from VITAMP_KILL_SEED={SEED}")
    by_processes = {shape.processes: shape for shape in shapes}
    for planned in kills:
        disturb(begin(tmp_path / "killed", by_processes[planned.processes], planned.workers), planned, draw)
        print(planned)
    begin(tmp_path / "killed", draw.choice(shapes), draw.choice((0, 2))).end(180).expect(0)
    assert sum(planned.note == TOO_LATE for planned in kills) <= number // 4, "most kills met a run at work"
    found, told_again = outcome(tmp_path / "killed")
    assert told_again == told
    assert [name for name in wanted if found.get(name) != wanted[name]] == []


@pytest.mark.parametrize(("codes", "seconds", "wins"), [((1, -9), 0, 1), ((1, -9), 30, 0), ((1, -15), 0, 0)])
def test_killed_rank_is_the_first_failure_among_those_of_one_second(
    codes: tuple[int, int], seconds: int, wins: int
) -> None:
    """The other rank may exit before torch looks. torch itself ends ranks by SIGTERM, and kills them after 30 s."""
    failures = {rank: ProcessFailure(rank, 4711 + rank, code, error_file="") for rank, code in enumerate(codes)}
    failures[1].timestamp = failures[0].timestamp + seconds
    assert _first_failure(ChildFailedError("main", failures))[0] == wins
