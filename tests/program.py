"""Running the program as a user does, and reading what it left.

`vitamp` forks its processes from a server that has imported torch already (tests/forking.py); runs leave
curves.png blank. `slow_start=True` starts a new Python, to test its start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.forking import ROOT, start_process
from vitamp.meta import META_HASH, hash_of


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def expect(self, code: int) -> Result:
        """Itself; it must have ended with this exit code, and without a traceback."""
        assert self.code == code, f"exit code {self.code}, not {code}:\n{self.text}"
        assert "Traceback" not in self.text, self.text
        return self


class Calls:
    """Pickles to a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


Vitamp = Callable[..., Result]
"""The fixture: `run_program` with a folder for the streams"""


def run_program(
    *args: object,
    script: str = "main_single_gpu.py",
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
    timeout: float = 120,
    slow_start: bool = False,
    code: int | None = None,
    streams: Path,
) -> Result:
    """`code`: it must end with this exit code, and without a traceback."""
    argv, path = [str(arg) for arg in args], str(ROOT / script)
    if slow_start:
        argv = with_all_lines(path, argv)
        done = subprocess.run(
            [sys.executable, path, *argv],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        result = Result(done.returncode, done.stdout, done.stderr)
    else:
        result = Started(path, argv, cwd, env or {}, streams).end(timeout)
    return result if code is None else result.expect(code)


def with_all_lines(path: str, argv: list[str]) -> list[str]:
    """Let a training print all lines, also those that are in log.txt alone, unless the words choose a LOG_STYLE."""
    prints_only = ("-h", "-help", "-version", "-print_config", "-print_amp", "-list_models", "-eval")
    is_training = bool(argv) and Path(path).name.startswith(("main_", "pretended_gpu"))
    if not is_training or any("LOG_STYLE" in word or word in prints_only for word in argv):
        return argv
    return [*argv, "LOG_STYLE=paddlevit"]


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    """Write a changed meta.json with its hash, as another run would have written it."""
    path.write_text(json.dumps({**meta, META_HASH: hash_of(meta)}), encoding="utf-8")


def change_meta(folder: Path, **fields: Any) -> None:
    """Change fields of a checkpoint's meta.json; None removes a field."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8")) | fields
    write_meta(folder / "meta.json", {key: value for key, value in meta.items() if value is not None})


def change_settings(run: Path, values: dict[str, Any], without: str | None = None) -> None:
    """Change the settings that the run's checkpoints keep; `without` makes it one of a version without this setting."""
    for file in run.glob("checkpoints/*/meta.json"):
        meta = json.loads(file.read_text())
        meta["settings"] |= values
        if without is not None:
            meta["settings"].pop(without, None)
        write_meta(file, meta)
    if without is not None:
        config, key = run / "config.yaml", f" {without.rpartition('.')[2]}:"
        config.write_text("".join(line for line in config.read_text().splitlines(True) if key not in line))


def made_meta(update: int, epoch: int = 1, **more: Any) -> dict[str, Any]:
    """The fields that every meta.json has, made up, for epochs of 44 updates."""
    batch = {"per_process": 32, "accumulated": 1, "processes": 1}
    samples = {"number": 1408, "updates": 44, "order": ""}
    about = {"batch": batch, "samples": samples, "settings": {}, "epoch_finished": False}
    return {**about, "epoch": epoch, "update": update, **more}


class Started:
    """A process from the server, in the background."""

    def __init__(self, path: str, argv: list[str], cwd: Path, env: dict[str, str], streams: Path) -> None:
        self._argv, self._out, self._err = with_all_lines(path, argv), streams / "stdout", streams / "stderr"
        files = (str(self._out), str(self._err))
        self._process = start_process(path, self._argv, str(cwd), env, files)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def running(self) -> bool:
        return self._process.exitcode is None

    def end(self, timeout: float) -> Result:
        self._process.join(timeout)
        code, argv = self._process.exitcode, self._argv
        if code is None:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"no end after {timeout} s: {argv}\n{self._out.read_text()}\n{self._err.read_text()}")
        return Result(code, self._out.read_text(), self._err.read_text())


def metrics(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, of one kind or all, without what depends on time or machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {key: value for key, value in line.items() if key != "perf"} for line in lines if event in (None, line["event"])
    ]


def last_weights(run: Path) -> dict[str, bytes]:
    """The files of weights in a run's newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    return {f"{newest.name}/{file.name}": file.read_bytes() for file in newest.glob("*.safetensors")}


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TINY_DIGITS = """\
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, BATCH_SIZE: 32, IMAGENET_MEAN: 0.5, IMAGENET_STD: 0.5}
MODEL: {NAME: tiny, NUM_CLASSES: 10, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 1, BASE_LR: 2e-3, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0}
REPORT_FREQ: 10
THREADS: 1
DEVICE: cpu
"""


def train_tiny(place: Path, *words: object) -> Path:
    """The folder of a whole run of the tiny recipe, made in `place`."""
    (place / "tiny.yaml").write_text(TINY_DIGITS, encoding="utf-8")
    run_program("-cfg", place / "tiny.yaml", "-output", place / "run", *words, streams=place, code=0)
    return place / "run"


def save_image(path: Path, seed: int, size: tuple[int, int] = (40, 36)) -> None:
    """A small JPEG of noise, the same for the same seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, quality=90)
