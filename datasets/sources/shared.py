"""List the images of a data set once per machine: its first rank does, and all of its ranks map the list from a file.

A list of a million images takes minutes to make, and memory in each rank that makes its own.
"""

import mmap
import os
import pickle
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from datasets.base import Samples
from utils.distributed.world import World, all_gather, on_every_rank
from utils.log import log
from utils.machine.cpus import return_freed_memory

ALIGNMENT = 64
"""Arrays in the file begin at a multiple of so many bytes."""


def listed_once(list_images: Callable[[], Samples], world: World) -> Samples:
    """List images by `list_images` once per machine, and return the samples on each rank. A collective call.

    The first rank of a machine lists the images and writes the list to files. All ranks of the machine map the files
    into their memory. A rank that cannot read them calls `list_images` itself.
    """
    samples = on_every_rank(world, lambda: list_images() if world.local_rank == 0 else None)
    host = socket.gethostname()
    written_folder = None
    if samples is not None and len(samples) > 0 and world.local_size > 1:
        written_folder = _write(samples)
    folders_of_hosts = all_gather([(host, written_folder)], world)
    folder = next((folder for owner, folder in folders_of_hosts if owner == host and folder), None)
    try:
        samples = _mapped(Path(folder)) if folder else samples
    except OSError as error:  # on a machine of the same name, for example
        log.warning("%s: the shared list of images cannot be read (%s).", folder, error.strerror)
    all_gather([None], world)  # all ranks have opened the files by now, so they can be removed
    if written_folder:
        shutil.rmtree(written_folder, ignore_errors=True)
        return_freed_memory()  # the first rank's own list was replaced by the mapped one
    return list_images() if samples is None else samples


def _write(samples: Samples) -> str | None:
    """Pickle the samples into a new folder that only this user may enter, and return it; None if it cannot be written.

    The file `arrays` has the arrays one after another, for mapping; `rest` has everything else, and where they begin.
    """
    folder = None
    arrays = list[pickle.PickleBuffer]()
    places = list[slice]()
    try:
        folder = tempfile.mkdtemp(prefix="vitamp-images-")
        # The arrays come out of the pickle: their bytes are handed to `arrays`.
        rest = pickle.dumps(samples, protocol=5, buffer_callback=arrays.append)
        with open(f"{folder}/arrays", "wb") as file:
            for values in map(pickle.PickleBuffer.raw, arrays):
                to_alignment = -file.tell() % ALIGNMENT  # bytes that are missing to the next multiple
                file.seek(to_alignment, os.SEEK_CUR)
                places.append(slice(file.tell(), file.tell() + values.nbytes))
                file.write(values)
        Path(folder, "rest").write_bytes(pickle.dumps((rest, places)))
    except OSError as error:
        log.warning("Each process keeps a list of images of its own, since no file takes it: %s.", error.strerror)
        shutil.rmtree(folder or "", ignore_errors=True)
        return None
    return folder


def _mapped(folder: Path) -> Samples:
    """Load samples that `_write` wrote, with their arrays mapped from the file. Raises OSError."""
    rest, places = pickle.loads((folder / "rest").read_bytes())  # noqa: S301 - our own machine's first rank wrote it
    with open(folder / "arrays", "rb") as file:
        # Copy on write: torch warns of arrays that nobody may write to.
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return pickle.loads(rest, buffers=[content[place] for place in places])  # noqa: S301 - as above
