"""Fixtures for tests of several tools."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from tests.datasets.conftest import cache  # noqa: F401 - a fixture for all tests
from tests.program import ROOT, Result, Started, train_tiny
from tests.tools.timm_alone import Tool
from tools.evaluate import command as evaluate
from tools.export import command as export
from utils.own_code import allow


class FromServer:
    """A run's process, forked from a server that has imported torch."""

    def __init__(self, command: list[str], output: IO[bytes], streams: Path) -> None:
        script, *words = command
        self._started, self._output = Started(str(ROOT / script), words, Path.cwd(), {}, streams), output

    def wait(self, timeout: float | None = None) -> int:
        del timeout
        done = self._started.end(120)
        self._output.write(done.text.encode())
        return done.code


class Trainings:
    def __init__(self, streams: Path) -> None:
        self.streams, self.started = streams, list[str]()

    def start(self, command: list[str], output: IO[bytes], gpu: str | None = None) -> FromServer:
        assert gpu is None, "tests train on a CPU"
        self.started.append(Path(command[command.index("-output") + 1]).name)
        return FromServer(command, output, self.streams)


def interrupted(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.fixture
def bf16_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, -amp chooses bf16 whatever the CPU."""
    monkeypatch.setattr("engine.amp.precision.cpu_computes_in_bf16", lambda: True)


@pytest.fixture
def in_process(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[list[str]], int]], Callable[..., Result]]:
    """A tool that is called with its words in this process; `code`: it must end with this exit code."""

    def of(command: Callable[[list[str]], int]) -> Callable[..., Result]:
        def call(*words: object, code: int | None = None) -> Result:
            capsys.readouterr()
            ended = command([str(word) for word in words])
            allow(None, trust=False)  # what -use named is of this command alone
            said = capsys.readouterr()
            result = Result(ended, said.out, said.err)
            return result if code is None else result.expect(code)

        return call

    return of


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainings:
    trainings = Trainings(tmp_path)
    monkeypatch.setattr("tools.compare.runs.start", trainings.start)
    return trainings


@pytest.fixture
def say(in_process: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    return in_process(evaluate.main)


@pytest.fixture
def export_tool(capfd: pytest.CaptureFixture[str]) -> Iterator[Tool]:
    """What export.py says in this process; it must end with `code`."""
    threads = torch.get_num_threads()

    def call(*words: object, code: int = 0) -> str:
        capfd.readouterr()
        ended = export.main([str(word) for word in words])
        said = "".join(capfd.readouterr())
        assert ended == code, said
        return said

    yield call
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def unlabelled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned from 12 images without labels. Not to be changed: tests share it."""
    place = tmp_path_factory.mktemp("unlabelled_run")
    (place / "images").mkdir()
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "images" / f"{number}.png")
    words = ("-mae_pretrain", "MODEL.DECODER.EMBED_DIM=16", "MODEL.DECODER.DEPTH=1", "MODEL.DECODER.NUM_HEADS=2")
    data = ("-dataset", "images", "-data_path", place / "images", "-batch_size", 4)
    return train_tiny(place, *words, *data, "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0")
