"""The program in processes of its own, for Python code and notebooks: `load(...).predict` and `train`.

Its packages (`datasets`, `utils`, ...) have names that other packages have too, so nothing of it is imported here.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor, nn

from vitamp.__main__ import EXIT_USAGE, PROGRAM

IN_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of images that PNG keeps"""
SECONDS_STOPPED = 30
"""A process that is stopped (SIGSTOP) for so long is killed."""


class Guess(NamedTuple):
    """One class of an image."""

    name: str
    label: int
    probability: float


class Prediction(NamedTuple):
    """What a model says of one image."""

    image: str
    """Its path, or its number among those that were given"""
    guesses: list[Guess]
    """The most probable class first; with several labels per image those that reach their threshold"""
    error: str
    """Why there are no guesses; else empty"""


class Loaded(tuple[nn.Module, Callable[[Any], Tensor]]):
    """What `vitamp.load` returns: the model and the transform of an image, as a pair, and `predict`."""

    _predictor: _Predictor | None = None

    @property
    def model(self) -> nn.Module:
        return self[0]

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        return self[1]

    @property
    def classes(self) -> list[str] | None:
        """Names in the order of the outputs; None if the training data had none."""
        origin: Any = self.model.vitamp
        return origin.classes

    def __reduce__(self) -> tuple[Any, ...]:
        return Loaded, (tuple(self),)

    def predict(self, images: Any, **flags: Any) -> list[Prediction]:
        """The classes of images, with the numbers of predict.py, whose flags these are (topk=3, device="cuda").

        `images`: the path of an image, a folder, or a glob; an image of Pillow; an array of H x W (x 3) bytes, or of
        the stored values where a run has other images than photographs; or a list of these. A damaged one has an
        `error`, and the others their classes. The first call starts a process, which takes seconds and stays.
        """
        many = images if isinstance(images, (list, tuple)) else [images]
        if not many:
            return []
        origin: Any = self.model.vitamp
        words = [str(origin.path), "-weights", origin.weights]
        words += words_of(flags)
        with _starting:  # threads that ask at once share one process
            predictor = self._predictor
            if predictor is None or not predictor.answers(words):
                predictor = _Predictor(words)
                self._predictor = predictor
        with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
            paths: list[str] = []
            broken: dict[str, str] = {}
            for number, image in enumerate(many):
                free = Path(folder, f"{number}")
                try:
                    paths.append(_path_of(image, free))
                except TypeError as error:
                    error.add_note(f"It is number {number} of the images that were given.")
                    raise
                except (OSError, SyntaxError, ValueError) as error:  # Pillow's of a damaged image, as of a damaged file
                    empty = free.with_suffix(".png")
                    empty.touch()
                    paths.append(str(empty))
                    broken[str(empty)] = str(error)
            rows = predictor.ask(paths)
        predictions = []
        for row in rows:
            image = row["image"]
            name = Path(image).stem if image.startswith(folder) else image
            guesses = [Guess(one["class"], one["label"], one["probability"]) for one in row.get("guesses", ())]
            predictions.append(Prediction(name, guesses, broken.get(image, row.get("error") or "")))
        return predictions


def _path_of(image: Any, free: Path) -> str:
    """Where the program reads an image. One in memory is written to `free`, without loss."""
    if isinstance(image, (str, os.PathLike)):
        return os.fspath(image)
    if isinstance(image, Image.Image):
        if image.mode not in IN_PNG:
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        path = f"{free}.png"
        image.save(path, exif=image.getexif())
        return path
    array = np.asarray(image)
    if array.dtype.kind not in "biuf" or array.ndim < 2:
        raise TypeError(f"{type(image).__name__}: an image is a path, one of Pillow's images, or an array of numbers")
    if array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2:] in ((3,), (4,))):
        return _path_of(Image.fromarray(array), free)
    path = f"{free}.npy"
    np.save(path, array, allow_pickle=False)
    return path


def _as_child() -> dict[str, str]:
    """Environment of a process that ends with this one; training saves before."""
    return {**os.environ, "VITAMP_PARENT_PID": str(os.getpid())}


_starting = threading.Lock()


def _watch(command: list[str], how: dict[str, Any], started: Future[subprocess.Popen[str]]) -> None:
    """A thread: start a process, and wait for its end. Linux ends a process with the thread that started it."""
    try:
        process = subprocess.Popen(command, **how)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(process)
    seconds = 0
    before = list[str]()
    while process.poll() is None:
        time.sleep(1)
        now = _state(process.pid)
        seconds = seconds + 1 if now[:1] == ["T"] and now == before else 0
        before = now
        if seconds == SECONDS_STOPPED:
            said = how["stderr"]
            said.write(f"\nerror: process {process.pid}, which predicts, was stopped (SIGSTOP) for {seconds} s, so it ")
            said.write("was killed. The next call starts another.")
            said.flush()
            process.kill()


def _state(pid: int) -> list[str]:
    """Of a process on Linux: T if it is stopped, and the processor time that it has used. Elsewhere empty."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
    except OSError:
        return []
    return [fields[0], *fields[11:13]]


class _Predictor:
    """A process of `predict.py -serve`, which ends with this object."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._folder = os.getcwd()
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, str(PROGRAM / "scripts" / "predict.py"), *words, "-serve"]
        how = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._errors,
            "env": _as_child(),
            "encoding": "utf-8",
            "errors": "surrogateescape",
        }
        started = Future[subprocess.Popen[str]]()
        threading.Thread(target=_watch, args=(command, how, started), daemon=True).start()
        self._process = started.result()
        weakref.finalize(self, self._process.kill)

    def answers(self, words: list[str]) -> bool:
        return self._words == words and self._folder == os.getcwd() and self._process.poll() is None

    def ask(self, images: list[str]) -> list[dict[str, Any]]:
        stdin: Any = self._process.stdin
        stdout: Any = self._process.stdout
        line = ""
        try:
            with self._lock, contextlib.suppress(BrokenPipeError):
                stdin.write(f"{json.dumps(images)}\n")
                stdin.flush()
                line = stdout.readline()
        except BaseException:  # its answer would be taken for that of the next question
            self._process.kill()
            self._process.wait()
            raise
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise _failed(self._process.returncode, self._errors.read())
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise ValueError(answer["error"])
        return answer


class Run:
    """A run that `vitamp.train` trained: its folder, its curves, and its best model."""

    def __init__(self, folder: Path, load: Callable[[Path], Loaded]) -> None:
        self.folder = folder
        self._load = cache(load)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: `pandas.DataFrame(run.metrics)` is a table of them."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def predict(self, images: Any, **flags: Any) -> list[Prediction]:
        """See `Loaded.predict`."""
        return self._load(self.folder).predict(images, **flags)

    def report(self) -> Path:
        """Write the run's report, a page for a browser."""
        _run("scripts/report.py", [str(self.folder)])
        return self.folder / "report.html"


def trained(cfg: str, flags: dict[str, Any], load: Callable[[Path], Loaded]) -> Run:
    """See `vitamp.train`."""
    script = "main_single_gpu.py" if flags["ngpus"] is None else "main_multi_gpu.py"
    with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
        place = Path(folder, "run")
        _run(script, ["-cfg", cfg, *words_of(flags)], VITAMP_FOLDER_FILE=str(place))
        if not place.exists():
            raise ValueError("this command trained nothing, so there is no run; use the command line for it")
        return Run(Path(os.fsdecode(place.read_bytes()).removesuffix("\n")).absolute(), load)


def words_of(flags: dict[str, Any]) -> Iterator[str]:
    """As they are typed: `-name value`, `-name` alone for True, KEY=VALUE for a setting; nothing for None and False."""
    for name, value in flags.items():
        if not name.islower():
            text = json.dumps(value) if isinstance(value, (list, tuple, bool)) else value
            yield f"{name}={text}"
        elif value is True:
            yield f"-{name}"
        elif value is not None and value is not False:
            yield f"-{name}"
            yield ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _run(script: str, words: list[str], **env: str) -> None:
    """Run a script of the program, with its output here as it comes, and raise an exception if it fails.

    In a terminal or a notebook it has a terminal of its own, so it draws a progress bar.
    """
    if sys.stdout.isatty() or "ipykernel" in sys.modules:
        ours, its = os.openpty()
        columns, lines = shutil.get_terminal_size((100, 24))  # a new terminal has none, and no bar is drawn in it
        termios.tcsetwinsize(its, (lines, columns))
    else:
        ours, its = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM / script), *words],
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=its,
        env={**_as_child(), **env},
        start_new_session=True,  # an interrupt reaches it from here alone, once
    )
    os.close(its)
    shown = ""
    interrupted = False
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while True:
            try:
                data = os.read(ours, 1 << 16)
                text = decoder.decode(data).replace("\r\n", "\n")
                shown = shown[-100_000:] + text
                with contextlib.suppress(OSError, UnicodeError):  # no reason to lose the training
                    sys.stdout.write(text)
                    sys.stdout.flush()
            except KeyboardInterrupt:  # it saves, says how to resume, and ends
                interrupted = True
                process.send_signal(signal.SIGINT)
                continue
            except OSError:  # how the end of a terminal is read
                break
            if not data:
                break
        code = process.wait()
    except BaseException:
        process.kill()
        raise
    finally:
        os.close(ours)
    if interrupted:
        raise KeyboardInterrupt
    if code:
        raise _failed(code, shown)


def _failed(code: int, text: str) -> Exception:
    """An exception with the program's own words."""
    _, found, words = f"\n{text}".partition("\nerror: ")
    if code < 0 and not found:
        words = f"the process was ended by signal {-code}"
    words = (words or text[-1000:]).strip() or f"the process ended with code {code}"
    return ValueError(words) if code == EXIT_USAGE else RuntimeError(words)
