"""The cache of torch's compiler: in a folder of the user's own, without files that a killed run left incomplete."""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from engine.machine.device import processor
from utils.cache import cache_folder
from utils.config.data import DataConfig
from utils.errors import UserError
from utils.log import log

CACHE = "TORCHINDUCTOR_CACHE_DIR"
LIBRARIES = ("*/*.so", "*/*.o")
ELF = b"\x7fELF\x02\x01"
"""First bytes of a 64-bit little-endian ELF file."""
ELF_HEADER = 64


def prepare_compiler_cache(data: DataConfig) -> None:
    """Set the folder in which torch's compiler caches, and remove incomplete libraries from it.

    torch takes any library that exists for finished, so one that a killed run left would make every later run fail.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Importing the compiler may have set the variable to torch's default.
    if os.environ.get(CACHE, default_cache_dir()) == default_cache_dir():
        # A folder of the user's own, because code in it is executed; and one per kind of processor.
        kind = re.sub(r"\W+", "-", f"{processor()} {torch.backends.cpu.get_cpu_capability()}")
        os.environ[CACHE] = str(cache_folder(data, f"compiled/{kind}"))
    folder = Path(os.environ[CACHE])
    libraries = [library for pattern in LIBRARIES for library in folder.glob(pattern)]
    removed = [library for library in libraries if not _is_complete(library) and _remove(library, folder / "locks")]
    if removed:
        log.warning(
            "Removed %d files that a killed run left incomplete in %s, such as %s; they are compiled again.",
            *(len(removed), folder, removed[0].name),
        )


def _remove(library: Path, locks: Path) -> bool:
    """Remove an incomplete library, unless another process is writing it now: then it holds torch's lock of it."""
    try:
        locks.mkdir(exist_ok=True)
        with FileLock(locks / f"{library.name.partition('.')[0]}.lock", timeout=0):
            if _is_complete(library):
                return False
            library.unlink()
            return True
    except Timeout:
        return False
    except OSError as error:
        raise UserError(f"{library} is incomplete and cannot be removed: {error.strerror}. Remove it.") from None


def _is_complete(library: Path) -> bool:
    """Whether an ELF file has its table of sections, which linkers write last. A file that is gone needs no removal."""
    try:
        with library.open("rb") as file:
            header, size = file.read(ELF_HEADER), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return True
    if sys.platform != "linux":
        return size > 0
    if len(header) < ELF_HEADER or not header.startswith(ELF):
        return False
    (table,), (entry, entries) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return table + entry * entries <= size
