"""Build and load the C kernels for CPUs with AMX: compiled by the first run that needs them, cached, used by ctypes."""

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
"""CPU features by Linux's names."""
FLAGS = ("-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-mprefer-vector-width=512", "-mfma")
EMULATED = "VITAMP_EMULATED_TILES"
"""Environment variable: 1 emulates AMX's tiles by AVX-512, slowly, for tests on CPUs without AMX."""
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT = 300
"""Seconds, enough for a busy machine."""
_loaded: dict[str, ctypes.CDLL] = {}
_folder = Path(DEFAULT, "kernels")
_workspaces = threading.local()


class NoKernel(RuntimeError):
    """Raised with the reason why the kernels cannot be used here."""


def why_unavailable() -> str:
    """Why this machine cannot use the kernels; empty if it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return "the kernels need Linux and a CPU with AMX (Intel Xeon from Sapphire Rapids on)"
    if emulated():
        return "" if _cpu_features().issuperset(VECTORS) else f"this CPU has no AVX-512, which {EMULATED} needs"
    if not _cpu_features().issuperset((*VECTORS, BF16, *TILES)):
        return "this CPU has no AMX (Intel Xeon has it from Sapphire Rapids on)"
    return ""


def emulated() -> bool:
    """Whether AVX-512 emulates AMX's tiles."""
    return os.environ.get(EMULATED, "") not in ("", "0")


def set_kernel_folder(folder: Path) -> None:
    """Set the cache folder of compiled kernels. Whoever can write to it can run code in this process."""
    global _folder
    _folder = folder


def load(name: str) -> ctypes.CDLL:
    """Load the kernels of `name`.c, and compile them if they are not in the cache. Raises NoKernel."""
    if name not in _loaded:
        if why := why_unavailable():
            raise NoKernel(why)
        if emulated():
            _warn_of_emulation()
        library = _built(name, _folder.expanduser())
        if not library.prepare():
            raise NoKernel("this system does not let programs use AMX")
        _loaded[name] = library
    return _loaded[name]


@cache
def _warn_of_emulation() -> None:
    log.warning("%s is set: AMX's tiles are emulated, for tests; results are correct, but computed slowly.", EMULATED)


@cache
def _cpu_features() -> frozenset[str]:
    return frozenset(first_processor().get("flags", "").split())


def _flags() -> tuple[str, ...]:
    """Compiler flags for this CPU. Emulation does not need AMX, nor bf16 if the CPU lacks it.

    Emulation is slow in any case, and -O1 compiles in a quarter of the time.
    """
    bf16 = (BF16,) if not emulated() or BF16 in _cpu_features() else ()
    features = (*VECTORS, *bf16, *(() if emulated() else TILES))
    machine = [f"-m{feature.replace('avx512_', 'avx512').replace('_', '-')}" for feature in features]
    return (*FLAGS, *machine, *(["-O1", "-DEMULATE_TILES"] if emulated() else []))


def _compiler() -> list[str]:
    """Command of the C compiler: $CC with its arguments, or the first one installed."""
    for command in [shlex.split(os.environ["CC"])] if os.environ.get("CC") else [[name] for name in COMPILERS]:
        if command and shutil.which(command[0]):
            return command
    if named := os.environ.get("CC"):
        raise NoKernel(f"there is no C compiler {named}, which the variable CC names; unset CC, or name another")
    raise NoKernel(f"there is no C compiler ({', '.join(COMPILERS)}; the variable CC can name another)")


def _built(name: str, folder: Path) -> ctypes.CDLL:
    sources = [SOURCES / f"{name}.c", *sorted(SOURCES.glob("*.h"))]
    content = b"".join(source.read_bytes() for source in sources) + repr(_flags()).encode()
    target = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if _is_complete(target) and _loads(target):
        return ctypes.CDLL(str(target))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with process_lock(folder / f"{name}.lock", "compiles kernels for this CPU"):
            if not (_is_complete(target) and _loads(target)):
                log.info("Compiling %s for this CPU, once; cached in %s.", name, folder)
                _build(sources[0], target)
        return ctypes.CDLL(str(target))
    except (OSError, UserError) as error:
        raise NoKernel(f"the compiled library cannot be stored or loaded: {error}") from None


def _loads(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def _build(source: Path, target: Path) -> None:
    """Compile and link. The library uses torch's OpenMP threads if their symbols are visible, else the compiler's."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        compiled, linked = Path(scratch, "part.o"), Path(scratch, target.name)
        _compile(*_flags(), "-c", str(source), "-o", str(compiled))
        _compile("-shared", str(compiled), "-lm", "-o", str(linked))
        if not _loads(linked):
            _compile("-shared", "-fopenmp", str(compiled), "-lm", "-o", str(linked))
        hashed = Path(scratch, "hashed.so")  # another file: `linked` is loaded by now
        hashed.write_bytes(_with_hash(linked.read_bytes()))
        os.replace(hashed, target)


def _with_hash(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def _is_complete(library: Path) -> bool:
    """Whether a library ends with its own hash. Loading one that a full disk cut off would kill the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content == _with_hash(content[: -hashlib.sha256().digest_size])


def _compile(*words: str) -> None:
    command = [*_compiler(), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise NoKernel(f"{command[0]} took more than {COMPILE_TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
        raise NoKernel(f"{command[0]} failed: {lines[0].strip()}")


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def workspace(bytes_: int) -> torch.Tensor:
    """Scratch memory of this thread, reused because it is still in the CPU's caches."""
    memory = getattr(_workspaces, "memory", None)
    if memory is None or len(memory) < bytes_:
        memory = _workspaces.memory = torch.empty(bytes_, dtype=torch.uint8)
    return memory
