"""Kernels in C for CPUs: compiled where a run first needs them, kept for others, and called through ctypes.

They are for CPUs with AMX, whose units multiply matrices of bf16 many times as fast as others multiply fp32.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

from utils.cache import DEFAULT, process_lock
from utils.cpus import first_processor
from utils.errors import UserError
from utils.log import log

SOURCES = Path(__file__).parent
VECTORS = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
BF16 = "avx512_bf16"
TILES = ("amx_tile", "amx_bf16")
"""Features of the CPU, as Linux names them."""
FLAGS = ("-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-mprefer-vector-width=512", "-mfma")
EMULATED = "VITAMP_EMULATED_TILES"
"""Environment variable: 1 computes what tiles would by AVX-512, and slowly. It is for tests on CPUs without AMX."""
COMPILERS = ("cc", "gcc", "clang")
PATIENCE = 300
"""Seconds that a compiler may take, on a machine that is busy."""
_loaded: dict[str, ctypes.CDLL] = {}
_folder = Path(DEFAULT, "kernels")
_workspaces = threading.local()


class NoKernel(RuntimeError):
    """Why there is none here."""


def missing() -> str:
    """What this machine lacks; nothing where the kernels can be had."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return "they are for Linux on CPUs with AMX (Intel Xeon from Sapphire Rapids on)"
    if emulated():
        return "" if _features().issuperset(VECTORS) else f"this CPU has no AVX-512, which {EMULATED} needs"
    if not _features().issuperset((*VECTORS, BF16, *TILES)):
        return "this CPU has no AMX (Intel Xeon has it from Sapphire Rapids on)"
    return ""


def emulated() -> bool:
    """Whether tiles are emulated by AVX-512."""
    return os.environ.get(EMULATED, "") not in ("", "0")


def keep_kernels_in(folder: Path) -> None:
    """Those that are compiled from now on. Who may write there may have code run here."""
    global _folder
    _folder = folder


def load(name: str) -> ctypes.CDLL:
    """The kernels of `name`.c, compiled unless they lie in the folder. Raises NoKernel."""
    if name not in _loaded:
        if why := missing():
            raise NoKernel(why)
        if emulated():
            _warn()
        library = _built(name, _folder.expanduser())
        if not library.prepare():
            raise NoKernel("this system does not let programs use AMX")
        _loaded[name] = library
    return _loaded[name]


@cache
def _warn() -> None:
    log.warning("%s is set: AMX's tiles are emulated, which is right and slow, and is for tests.", EMULATED)


@cache
def _features() -> frozenset[str]:
    return frozenset(first_processor().get("flags", "").split())


def _flags() -> tuple[str, ...]:
    """Of the compiler, for this CPU. Emulated tiles do without the features for AMX, and for bf16 where they are not.

    They are slow either way; with -O1 the compiler is done in a quarter of the time.
    """
    bf16 = (BF16,) if not emulated() or BF16 in _features() else ()
    features = (*VECTORS, *bf16, *(() if emulated() else TILES))
    machine = [f"-m{feature.replace('avx512_', 'avx512').replace('_', '-')}" for feature in features]
    return (*FLAGS, *machine, *(["-O1", "-DEMULATE_TILES"] if emulated() else []))


def _compiler() -> list[str]:
    """With what CC has behind its name."""
    for command in [shlex.split(os.environ["CC"])] if os.environ.get("CC") else [[name] for name in COMPILERS]:
        if command and shutil.which(command[0]):
            return command
    raise NoKernel(f"there is no C compiler here ({', '.join(COMPILERS)}; CC names another)")


def _built(name: str, folder: Path) -> ctypes.CDLL:
    sources = [SOURCES / f"{name}.c", *sorted(SOURCES.glob("*.h"))]
    content = b"".join(source.read_bytes() for source in sources) + repr(_flags()).encode()
    target = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if _is_whole(target) and _loads(target):
        return ctypes.CDLL(str(target))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with process_lock(folder / f"{name}.lock", "compiles kernels for this CPU"):
            if not (_is_whole(target) and _loads(target)):
                log.info("Compiling %s for this CPU, once; kept in %s.", name, folder)
                _build(sources[0], target)
        return ctypes.CDLL(str(target))
    except (OSError, UserError) as error:
        raise NoKernel(f"their library cannot be kept or loaded: {error}") from None


def _loads(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _build(source: Path, target: Path) -> None:
    """torch's own threads serve the library, if its names for them are to be seen; else the compiler's."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        part, made = Path(scratch, "part.o"), Path(scratch, target.name)
        _compile(*_flags(), "-c", str(source), "-o", str(part))
        _compile("-shared", str(part), "-lm", "-o", str(made))
        if not _loads(made):
            _compile("-shared", "-fopenmp", str(part), "-lm", "-o", str(made))
        ended = Path(scratch, "ended.so")  # another file: `made` is loaded by now
        ended.write_bytes(_ended(made.read_bytes()))
        os.replace(ended, target)


def _ended(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def _is_whole(library: Path) -> bool:
    """The system kills a process that loads one which was cut off, as by a full disk: it ends with its own hash."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content == _ended(content[: -hashlib.sha256().digest_size])


def _compile(*words: str) -> None:
    command = [*_compiler(), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise NoKernel(f"{command[0]} took more than {PATIENCE} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        raise NoKernel(f"{command[0]} fails: {lines[0].strip()}")


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def workspace(bytes_: int) -> torch.Tensor:
    """Memory to work in, this thread's own and still in its caches from the last time."""
    kept = getattr(_workspaces, "kept", None)
    if kept is None or len(kept) < bytes_:
        kept = _workspaces.kept = torch.empty(bytes_, dtype=torch.uint8)
    return kept
