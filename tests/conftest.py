"""Fixtures for all tests: running the program, and small data to run it on."""

import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.program import ROOT, TINY_DIGITS, Result, Vitamp, run_program, save_image, train_tiny
from utils.log import log

pytest_plugins = ["tests.gate"]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell's background job is deaf to Ctrl-C, and so would be every run that is interrupted here.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Imported modules stay: collecting garbage, which takes half a second with them, need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_as_at_first() -> Iterator[None]:
    """Tools that are called in a test, or for several, begin logging anew; the next test finds nothing of it."""
    yield
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.NOTSET)
    log.propagate = True


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What this process logs: `said.text`, `said.messages`."""
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.INFO, "vitamp"):
        yield caplog


@pytest.fixture
def vitamp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vitamp]:
    """`vitamp("-cfg", path, ...)`: run an entry script in a process of its own and give back code and output."""
    streams = tmp_path_factory.mktemp("streams")
    there = {*ROOT.glob("output/*")}

    def call(*args: object, **options: Any) -> Result:
        return run_program(*args, streams=streams, **options)

    yield call
    left = {*ROOT.glob("output/*")} - there
    assert not left, f"a run needs -output, or SAVE={{tmp_path}}, or it leaves {left} in the checkout"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A recipe that trains in a second: digits, and a ViT of a few thousand weights."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_DIGITS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs of a file of tests, with the recipe `tiny.yaml` in it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up ImageNet of 24 + 8 images in PaddleViT's layout: list files, images beside them."""
    root = tmp_path_factory.mktemp("imagenet")
    for part, count in (("train", 24), ("val", 8)):
        lines = []
        for number in range(count):
            name = f"{part}/n{number % 4:08d}/{part}_{number}.JPEG"
            save_image(root / name, seed=number + 1000 * len(part))
            lines.append(f"{name} {number % 4}")
        (root / f"{part}_list.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs on the digits, in bf16 and with a moving average. Not to be changed: tests share it."""
    words = ("TRAIN.MODEL_EMA=true", "SAVE_FREQ=1", "-amp", "bf16")
    return train_tiny(tmp_path_factory.mktemp("digits_run"), *words)


@pytest.fixture(scope="session")
def teacher_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny recipe with another seed than the students. Not to be changed."""
    return train_tiny(tmp_path_factory.mktemp("teacher"), "SEED=7")
