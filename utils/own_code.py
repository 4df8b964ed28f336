"""The user's own files (-use): executing them, their lines in an error, and their copies in a run's folder."""

import hashlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pydantic import BaseModel

from utils.errors import TrainingError, UserError, nearest
from vitamp.files import read_regular, write_atomically
from vitamp.registry import KINDS, model, names_of, registered

FOLDER = "own_code"
FIELD = "own_code"
"""In run.json and meta.json"""


class Noted(BaseModel):
    """One file, as run.json and meta.json record it."""

    file: str
    """Its name when it was given; a run's copy has another"""
    sha256: str
    registers: dict[str, str] = {}
    """Name -> kind"""

    @property
    def copy_name(self) -> str:
        """A name for each version, so that older checkpoints still have theirs."""
        return f"{Path(self.file).stem}-{self.sha256[:8]}.py"

    def words(self) -> str:
        return f"{self.file} ({', '.join(f'{kind} {name}' for name, kind in self.registers.items())})"


executed_own_files: dict[str, tuple[Noted, bytes]] = {}
"""Path of a file of the user's own code -> its entry for run.json, and its content."""

OWN_ERRORS = (Exception, SystemExit)
"""What the user's own code may raise: `sys.exit(0)` in it must not end a run as if it were done."""


class OwnCodeError(TrainingError):
    """An exception in the user's own code during training.

    A loading process hands it over as the text of its whole traceback, which ends with our words.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2])


def read(path: Path) -> tuple[bytes, str]:
    """Read a file of the user's own code; return its bytes and their SHA-256."""
    try:
        source = read_regular(path)
    except OSError as error:
        raise UserError(f"-use {path}: cannot be read ({error.strerror}).") from None
    return source, hashlib.sha256(source).hexdigest()


def noted_files() -> list[dict[str, Any]]:
    """What run.json and meta.json record."""
    return [noted.model_dump() for noted, _ in executed_own_files.values()]


def execute(path: Path, known_as: str = "") -> None:
    """Execute a file of the user's own code once in this process; a file of equal content is not executed again.

    A UserError, with file and line, if it fails or registers nothing.

    known_as: the file's name in run.json, if `path` is a copy of it; '': the name of `path`
    """
    name = str(path)
    source, sha256 = read(path)
    if sha256 in {noted.sha256 for noted, _ in executed_own_files.values()}:
        return
    import timm

    # The file must not end a run by os._exit, which would look as if the run were done.
    os._exit = partial(_refuse_exit_by_own_code, os.getpid())
    registered_before = set(registered)
    timm_models_before = set(timm.list_models())
    module = ModuleType(f"own_code_{len(executed_own_files)}_{path.stem}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # where pydantic, dataclasses and timm look up types
    noted = Noted(file=known_as or path.name, sha256=sha256)
    executed_own_files[name] = noted, source
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Overwriting .* in registry")  # a name that timm has already
            exec(compile(source, name, "exec"), vars(module))  # exactly what was hashed
        # Models that the file registers by timm's own @register_model
        for new_model in sorted(set(timm.list_models()) - timm_models_before):
            model(timm.model_entrypoint(new_model))
    except SyntaxError as error:
        # Python gives neither file nor line if the file contains NUL bytes.
        place = error.filename or name
        line = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"{place}{line}: {error.msg}") from None
    except (*OWN_ERRORS, KeyboardInterrupt) as error:
        # In a tool, Python's own handler turns Ctrl-C into a KeyboardInterrupt, which ends the tool. In a run, another
        # handler is set, so that only the file itself can have raised one: an error like any other.
        is_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if isinstance(error, KeyboardInterrupt) and is_ctrl_c:
            raise
        raise UserError(own_lines(error) or f"-use {path}: {error}") from None
    noted.registers = {new: registered[new].kind for new in registered if new not in registered_before}
    if not noted.registers:
        raise UserError(
            f"-use {path}: the file registers nothing. Put @loss, @model, @augmentation, @dataset or @metric above a "
            "function or a class (from vitamp import loss), or timm's @register_model; see docs/own_code.md."
        )


_exit_at_once = os._exit


def _refuse_exit_by_own_code(owner: int, status: int) -> NoReturn:
    """Replace os._exit: raise an error if the user's own code calls it, and exit at once if other code does.

    Otherwise, own code could end a run without a message, and by exit code 0 as if the run were done.

    owner: the process that executed the file; processes that it forks may exit
    status: the exit code
    """
    is_owner = os.getpid() == owner
    if is_owner and any(frame.filename in executed_own_files for frame in traceback.extract_stack()):
        raise RuntimeError(f"os._exit({status}) before the run has ended; to end it, raise an exception")
    _exit_at_once(status)


def own_lines(error: BaseException) -> str:
    """Describe an error, with the lines of the user's own files (-use) that lead to it; '' if none do."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in executed_own_files]
    if not frames:
        return ""
    last = frames[-1]
    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    lines = [f"{last.filename}, line {last.lineno}: {what}"]
    lines += [f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
    return "\n".join(lines)


def noted_of(values: object, where: Path) -> list[Noted]:
    """Validate the field about own code in run.json or meta.json; a UserError if it is damaged.

    values: the field; empty entries result if it is no list
    where: the file, for the error
    """
    try:
        return [Noted.model_validate(value) for value in (values if isinstance(values, list) else [])]
    except ValueError:
        raise UserError(f"{where}: the field {FIELD!r} is damaged. Name your files with -use.") from None


def keep_own_code(run: Path) -> dict[str, Any]:
    """Copy the files that were executed into the run's folder. Returns the field for run.json."""
    (run / FOLDER).mkdir(exist_ok=True)
    for noted, source in executed_own_files.values():
        write_atomically(run / FOLDER / noted.copy_name, source)
    return {FIELD: noted_files()}


def copy_of(run: Path | None, noted: Noted) -> Path:
    """The run's copy of a file. UserError if it is missing or was changed."""
    path = None if run is None else run / FOLDER / noted.copy_name
    if path is None or not path.is_file():
        raise UserError(f"There is no copy of {noted.file}, sha256 {noted.sha256}. Name the file itself: -use FILE.")
    if read(path)[1] != noted.sha256:
        raise UserError(
            f"{path}: the copy was changed (its sha256 is not {noted.sha256}). Name your own file: -use FILE."
        )
    return path


@dataclass
class Allowed:
    files: tuple[Path, ...] = ()
    """The user's own files (-use)"""
    trust: bool = False
    """-trust: the copies in the run's folder too"""


allowed = Allowed()


def allow(use: str | None, trust: bool) -> None:
    """Take over the flags -use and -trust."""
    allowed.files = tuple(Path(os.path.expanduser(name.strip())) for name in (use or "").split(",") if name.strip())
    allowed.trust = trust


def check_name(kind: str, name: str, built_in: Sequence[str] = ()) -> None:
    """Raise UserError unless something of this kind, built in or registered, has this name."""
    known = list(built_in) + list(names_of(kind))
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UserError(
            f"{KINDS[kind].setting} {name}: there is no {kind} of this name.{nearest(name, known)} "
            f"Known: {listed}. One of your own needs its file: -use FILE."
        )
