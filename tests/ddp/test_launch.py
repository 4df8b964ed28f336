"""Many processes: one voice, and the same run as one process. Who may start them: tests/launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import TINY_DIGITS, Result, metrics, run_program

# Mixed precision, dropout, an average: whatever could differ from rank to rank.
WORDS = [
    *("-amp", "bf16", "MODEL.DROPOUT=0.1", "MODEL.DROPPATH=0.1", "MODEL.DEPTH=2"),
    *("TRAIN.MODEL_EMA=true", "TRAIN.NUM_EPOCHS=2", "REPORT_FREQ=1", "-batch_size_eval", "77"),
]


def outcome(run: Path) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """All figures, and the weights at the end."""
    last = max((run / "checkpoints").glob("step-*"))
    return metrics(run), (last / "model.safetensors").read_bytes(), (last / "ema.safetensors").read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "tiny.yaml").write_text(TINY_DIGITS)
    return folder


@pytest.fixture(scope="module")
def two(place: Path) -> tuple[Path, Result]:
    """The run of two processes that the others are held against: started plainly."""
    run, cfg = place / "plain", place / "tiny.yaml"
    done = run_program("-cfg", cfg, "-output", run, "-ngpus", 2, *WORDS, script="main_multi_gpu.py", streams=place)
    assert done.code == 0, done.text
    return run, done


def test_plainly_started(two: tuple[Path, Result]) -> None:
    run, done = two
    assert "32 per device x 2 devices x 1 accumulated = 64; 22 updates per epoch" in done.out
    assert done.out.count("precision  bf16") == 1, "one voice"
    assert done.out.count("Step[0022/0022]") == 2
    assert (run / "log.txt").read_text() == (run / "ranks" / "0.log").read_text()
    assert "32 per device x 2 devices" in (run / "ranks" / "1.log").read_text()


def test_one_process_with_two_micro_batches_gives_the_same_bit_for_bit(two: tuple[Path, Result], place: Path) -> None:
    run = place / "alone"
    done = run_program("-cfg", place / "tiny.yaml", "-output", run, "-accum_iter", 2, *WORDS, streams=place)
    assert done.code == 0, done.text
    assert outcome(run) == outcome(two[0])


def test_windows_that_do_not_come_out_even(vitamp: Callable[..., Result], place: Path) -> None:
    """Ten micro-batches in windows of four leave a last one of two; 101 images are an odd one out for two ranks."""
    data = ("DATA.DATASET=synthetic", "DATA.SYNTHETIC_TRAIN=330", "DATA.SYNTHETIC_VAL=101", "TRAIN.NUM_EPOCHS=1")
    words = ("-cfg", place / "tiny.yaml", *data, "REPORT_FREQ=1", "-batch_size_eval", 16, "TRAIN.GRAD_CLIP=null")
    figures = []
    for name, how in (
        ("uneven1", {"-accum_iter": 4}),
        ("uneven2", {"-accum_iter": 2, "-ngpus": 2}),
    ):
        flags = [word for pair in how.items() for word in pair]
        script = "main_multi_gpu.py" if "-ngpus" in how else "main_single_gpu.py"
        done = vitamp(*words, *flags, "-output", place / name, script=script)
        assert done.code == 0, done.text
        figures.append(metrics(place / name))
    one, many = figures
    assert [line["update"] for line in many if line["event"] == "train"] == [1, 2, 3]
    for ours, theirs in zip(one, many, strict=True):
        numbers = {key: value for key, value in ours.items() if not isinstance(value, str)}
        assert numbers == pytest.approx({key: theirs[key] for key in numbers}, rel=1e-5), (ours, theirs)
    (validated,) = (line for line in many if line["event"] == "val")
    hits = validated["acc1"] * 101 / 100
    assert hits == pytest.approx(round(hits), abs=1e-9), "of 101 images, each once"


def test_without_a_gpu_and_without_ngpus_one_process_and_it_says_so(vitamp: Callable[..., Result], place: Path) -> None:
    run = place / "one"
    done = vitamp(*("-cfg", place / "tiny.yaml", "-output", run, "TRAIN.MAX_UPDATES=1"), script="main_multi_gpu.py")
    assert done.code == 0, done.text
    assert "One process" in done.out
    assert "-ngpus N" in done.out
    assert [path.name for path in (run / "ranks").iterdir()] == ["0.log"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["TRAIN.BASELR=1"], "Did you mean TRAIN.BASE_LR"),
        (["-batch_size", 2000], "1437 images"),
        (["DIST.BACKEND=nccl"], "-backend nccl needs GPUs"),
    ],
)
def test_what_is_wrong_is_said_once(vitamp: Callable[..., Result], place: Path, words: list[object], said: str) -> None:
    run = place / "refused"
    done = vitamp("-cfg", place / "tiny.yaml", "-output", run, "-ngpus", 2, *words, script="main_multi_gpu.py")
    assert done.code == 2, done.text
    assert done.text.count(said) == 1
    assert done.err.count("error:") == 1
    assert "Traceback" not in done.text
    assert not run.exists()
