"""Runs the program in processes of its own, for Python code and notebooks: `load(...).predict` and `train`.

The program's packages (`datasets`, `utils`, ...) have names that other packages have, too. So none is imported here.
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
"""Pillow's modes of images that PNG stores without loss."""
SECONDS_STOPPED = 30
"""A process that is stopped (SIGSTOP) for this time is killed."""


class Guess(NamedTuple):
    """A class that a model predicts for an image."""

    name: str
    label: int
    probability: float


class Prediction(NamedTuple):
    """The classes that a model predicts for one image."""

    image: str
    """Path of the image, or its number, from 0, among the given images."""
    guesses: list[Guess]
    """The most probable class first; with several labels per image, the classes that reach their threshold."""
    error: str
    """Why there are no guesses; '' if there are."""


class Loaded(tuple[nn.Module, Callable[[Any], Tensor]]):
    """The result of `vitamp.load`: a pair of the model and the transform of an image, with the method `predict`."""

    _predictor: _Predictor | None = None

    @property
    def model(self) -> nn.Module:
        return self[0]

    @property
    def transform(self) -> Callable[[Any], Tensor]:
        return self[1]

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes in the order of the outputs; None if the training data had none."""
        origin: Any = self.model.vitamp
        return origin.classes

    def __reduce__(self) -> tuple[Any, ...]:
        return Loaded, (tuple(self),)

    def explain(self, image: Any, label: int | None = None) -> np.ndarray:
        """Show where the model looks: an array of the image's height x width, 1 where the class needs the image most.

        image: an image of Pillow, the path of an image, or an array, as `predict` takes them
        label: number of the class; None: the most probable one

        It is 0 where nothing speaks for the class. It shows what moves the score, not why. The model computes in this
        process, without flags of predict.py.
        """
        from vitamp.explain import explained

        return explained(self.model, self.transform, image, label)

    def predict(self, images: Any, **flags: Any) -> list[Prediction]:
        """Predict the classes of images as predict.py does, with its flags (topk=3, device="cuda").

        images: the path of an image, of a folder, or a glob; an image of Pillow; an array of H x W (x 3) bytes, or, if
            the model is not for photographs, of the stored values; or a list of these

        For a damaged image, the prediction has an `error`; the others are not affected. The first call starts a
        process, which takes seconds; later calls use the same process.
        """
        image_list = images if isinstance(images, (list, tuple)) else [images]
        if not image_list:
            return []
        origin: Any = self.model.vitamp
        words = [str(origin.path), "-weights", origin.weights]
        words += words_of(flags)
        with _starting:  # Threads that call this at the same time share one process.
            predictor = self._predictor
            if predictor is None or not predictor.answers(words):
                predictor = _Predictor(words)
                self._predictor = predictor

        with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
            paths: list[str] = []
            errors: dict[str, str] = {}
            for index, image in enumerate(image_list):
                path_in_folder = Path(folder, f"{index}")
                try:
                    paths.append(_path_of(image, path_in_folder))
                except TypeError as error:
                    error.add_note(f"It is number {index} of the images that were given.")
                    raise
                except (OSError, SyntaxError, ValueError) as error:
                    # Pillow raises these for a damaged image. An empty file takes its place.
                    empty_file = path_in_folder.with_suffix(".png")
                    empty_file.touch()
                    paths.append(str(empty_file))
                    errors[str(empty_file)] = str(error)
            rows = predictor.ask(paths)

        predictions = []
        for row in rows:
            path = row["image"]
            is_in_memory = path.startswith(folder)  # Its file is named by its number.
            name = Path(path).stem if is_in_memory else path
            guesses = [Guess(guess["class"], guess["label"], guess["probability"]) for guess in row.get("guesses", ())]
            predictions.append(Prediction(name, guesses, errors.get(path, row.get("error") or "")))
        return predictions


def _path_of(image: Any, new_file: Path) -> str:
    """Return the path from which the program reads an image; an image in memory is written to a file without loss.

    new_file: path of this file, without its ending
    """
    if isinstance(image, (str, os.PathLike)):
        return os.fspath(image)
    if isinstance(image, Image.Image):
        if image.mode not in IN_PNG:
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        path = f"{new_file}.png"
        image.save(path, exif=image.getexif())
        return path
    array = np.asarray(image)
    is_numeric = array.dtype.kind in "biuf"  # booleans, integers with and without sign, floats
    if not is_numeric or array.ndim < 2:
        raise TypeError(f"{type(image).__name__}: an image is a path, one of Pillow's images, or an array of numbers")
    is_photograph = array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2:] in ((3,), (4,)))
    if is_photograph:
        return _path_of(Image.fromarray(array), new_file)
    path = f"{new_file}.npy"
    np.save(path, array, allow_pickle=False)
    return path


def _environment_of_child() -> dict[str, str]:
    """Return environment variables for a process that ends when this one ends; a training saves first."""
    return {**os.environ, "VITAMP_PARENT_PID": str(os.getpid())}


_starting = threading.Lock()


def _watch(command: list[str], options: dict[str, Any], started: Future[subprocess.Popen[str]]) -> None:
    """Start a process, wait for its end, and kill it if it is stopped (SIGSTOP) for too long.

    This runs in a thread of its own, because Linux ends the process with the thread that started it.

    options: arguments of Popen, with a file for "stderr"
    started: gets the process, or the exception if it cannot be started
    """
    try:
        process = subprocess.Popen(command, **options)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(process)
    seconds_stopped = 0
    last_state = list[str]()
    while process.poll() is None:
        time.sleep(1)
        # A process that continues for a moment between two looks has used processor time, so that its state differs.
        state = _state_and_times(process.pid)
        is_stopped = state[:1] == ["T"] and state == last_state
        seconds_stopped = seconds_stopped + 1 if is_stopped else 0
        last_state = state
        if seconds_stopped == SECONDS_STOPPED:
            stderr = options["stderr"]
            stderr.write(
                f"\nerror: process {process.pid}, which predicts, was stopped (SIGSTOP) for {seconds_stopped} s, so it "
            )
            stderr.write("was killed. The next call starts another.")
            stderr.flush()
            process.kill()


def _state_and_times(pid: int) -> list[str]:
    """Read the state of a process ('T' if it is stopped), and the processor times in user mode and in the kernel.

    The list is empty if the process has ended, or if this is not Linux.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # After the program's name, which is in brackets, proc(5) lists the fields from number 3, the state, on.
    fields = text.rpartition(") ")[2].split()
    return [fields[0], *fields[14 - 3 : 16 - 3]]


class _Predictor:
    """A process of `predict.py -serve`, which is killed when this object is no longer used."""

    def __init__(self, words: list[str]) -> None:
        """Start the process. `words`: its command line besides -serve."""
        self._words = words
        self._folder = os.getcwd()
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, str(PROGRAM / "scripts" / "predict.py"), *words, "-serve"]
        options = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": self._stderr,
            "env": _environment_of_child(),
            "encoding": "utf-8",
            "errors": "surrogateescape",
        }
        started = Future[subprocess.Popen[str]]()
        # The thread that starts the process must live as long as the process: see `_watch`.
        threading.Thread(target=_watch, args=(command, options, started), daemon=True).start()
        self._process = started.result()
        weakref.finalize(self, self._process.kill)

    def answers(self, words: list[str]) -> bool:
        """Whether the process runs, with this command line and in the current folder."""
        return self._words == words and self._folder == os.getcwd() and self._process.poll() is None

    def ask(self, images: list[str]) -> list[dict[str, Any]]:
        """Send the paths of images to the process, and return its answer: one dict per image."""
        stdin: Any = self._process.stdin
        stdout: Any = self._process.stdout
        line = ""
        try:
            with self._lock, contextlib.suppress(BrokenPipeError):  # The process may have ended: there is no line then.
                stdin.write(f"{json.dumps(images)}\n")
                stdin.flush()
                line = stdout.readline()
        except BaseException:  # Otherwise, the answer to this question would be read as that to the next one.
            self._process.kill()
            self._process.wait()
            raise
        if not line:
            self._process.wait()
            self._stderr.seek(0)
            raise _exception_of_failure(self._process.returncode, self._stderr.read())
        answer = json.loads(line)
        is_error = isinstance(answer, dict)
        if is_error:
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
        """The lines of metrics.jsonl; `pandas.DataFrame(run.metrics)` makes a table of them."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def predict(self, images: Any, **flags: Any) -> list[Prediction]:
        """Predict with the run's best weights: see `Loaded.predict`."""
        return self._load(self.folder).predict(images, **flags)

    def report(self) -> Path:
        """Write the run's report, a page for a browser, and return its path."""
        _run("scripts/report.py", [str(self.folder)])
        return self.folder / "report.html"


def trained(cfg: str, flags: dict[str, Any], load: Callable[[Path], Loaded]) -> Run:
    """Train in a process of its own, and return the run, as `vitamp.train` does.

    cfg: a YAML file, or the name of a recipe
    flags: name of a flag -> value; "ngpus" must be among them
    load: `vitamp.load`, which loads the run's best model later
    """
    script = "main_single_gpu.py" if flags["ngpus"] is None else "main_multi_gpu.py"
    with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
        # The program writes the path of the run's folder into the file that this environment variable names.
        run_folder_file = Path(folder, "run")
        _run(script, ["-cfg", cfg, *words_of(flags)], VITAMP_FOLDER_FILE=str(run_folder_file))
        if not run_folder_file.exists():
            raise ValueError("this command trained nothing, so there is no run; use the command line for it")
        run_folder = Path(os.fsdecode(run_folder_file.read_bytes()).removesuffix("\n"))
        return Run(run_folder.absolute(), load)


def found(data: str, flags: dict[str, Any], load: Callable[[Path], Loaded]) -> Run:
    """Run auto.py in a process of its own, and return its final run, as `vitamp.auto` does.

    flags: name of a flag -> value; "output" must be among them
    load: `vitamp.load`, which loads the run's best model later
    """
    _run("scripts/auto.py", [data, *words_of(flags)])
    record = json.loads(Path(flags["output"], "auto.json").read_text(encoding="utf-8"))
    return Run(Path(record["run"]), load)


def words_of(flags: dict[str, Any]) -> Iterator[str]:
    """Yield the words of a command line for keyword arguments: name -> value of a flag or setting.

    A flag becomes `-name value`, or `-name` alone if it is True, and nothing if it is None or False, but for `amp`,
    which False switches off. A setting becomes KEY=VALUE.
    """
    for name, value in flags.items():
        is_setting = not name.islower()
        if is_setting:
            text = json.dumps(value) if isinstance(value, (list, tuple, bool)) else value
            yield f"{name}={text}"
        elif value is True:
            yield f"-{name}"
        elif name == "amp" and value is False:
            yield "-amp"
            yield "off"
        elif value is not None and value is not False:
            yield f"-{name}"
            yield ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _run(script: str, words: list[str], **env: str) -> None:
    """Run a script of the program, print its output as it comes, and raise an exception if it fails.

    In a terminal or a notebook, the script gets a terminal of its own, so that it draws a progress bar.

    words: the words of its command line
    env: environment variables besides those of this process
    """
    if sys.stdout.isatty() or "ipykernel" in sys.modules:
        read_end, write_end = os.openpty()
        # A new terminal has no size, and no progress bar is drawn in it.
        columns, lines = shutil.get_terminal_size((100, 24))
        termios.tcsetwinsize(write_end, (lines, columns))
    else:
        read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM / script), *words],
        stdin=subprocess.DEVNULL,
        stdout=write_end,
        stderr=write_end,
        env=_environment_of_child() | env,
        # Otherwise, the terminal would send Ctrl-C to the script, too, and the script would get it twice.
        start_new_session=True,
    )
    os.close(write_end)
    last_output = ""  # for the exception
    interrupted = False
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while True:
            try:
                data = os.read(read_end, 1 << 16)
                text = decoder.decode(data).replace("\r\n", "\n")
                last_output = last_output[-100_000:] + text
                # An error in printing is no reason to lose the training.
                with contextlib.suppress(OSError, UnicodeError):
                    sys.stdout.write(text)
                    sys.stdout.flush()
                is_end_of_pipe = len(data) == 0
                if is_end_of_pipe:
                    break
            except KeyboardInterrupt:  # The training saves, prints how to resume, and ends, which is still read.
                interrupted = True
                process.send_signal(signal.SIGINT)
            except OSError:  # the end of a terminal
                break
        exit_code = process.wait()
    except BaseException:
        process.kill()
        raise
    finally:
        os.close(read_end)
    if interrupted:
        raise KeyboardInterrupt
    if exit_code != 0:
        raise _exception_of_failure(exit_code, last_output)


def _exception_of_failure(exit_code: int, output: str) -> Exception:
    """Make the exception for a process that failed: a ValueError for a wrong flag or setting, else a RuntimeError.

    Its text is the output from the first line that begins with `error: ` on; without one, the signal that ended the
    process, or else the end of the output.
    """
    _, mark, message = f"\n{output}".partition("\nerror: ")
    has_error_line = mark != ""
    if exit_code < 0 and not has_error_line:
        message = f"the process was ended by signal {-exit_code}"
    message = (message or output[-1000:]).strip() or f"the process ended with code {exit_code}"
    return ValueError(message) if exit_code == EXIT_USAGE else RuntimeError(message)
