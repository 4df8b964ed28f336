"""One listing per machine: its first rank lists the images, and all of its ranks map the table from a file."""

import mmap
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

LINE = 64
"""Arrays begin at a multiple of so many bytes."""


def listed_once(list_images: Callable[[], Samples], world: World) -> Samples:
    """What `list_images` returns. A collective call."""
    samples = on_every_rank(world, lambda: list_images() if world.local_rank == 0 else None)
    host = socket.gethostname()
    folder = None
    if samples is not None and len(samples) and world.local_size > 1:
        folder = _write(samples)
    offers = all_gather([(host, folder)], world)
    place = next((place for owner, place in offers if owner == host and place), None)
    try:
        samples = _mapped(Path(place)) if place else samples
    except OSError as error:  # on a machine of the same name, for example
        log.warning("%s: the shared list of images cannot be read (%s).", place, error.strerror)
    all_gather([None], world)  # all have opened the files, which may go now
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        return_freed_memory()  # of the list that was written
    return list_images() if samples is None else samples


def _write(samples: Samples) -> str | None:
    """Write its arrays one after another into a file, and all else into another, in a folder that only we may enter."""
    folder = None
    arrays = list[pickle.PickleBuffer]()
    places = list[slice]()
    try:
        folder = tempfile.mkdtemp(prefix="vitamp-images-")
        rest = pickle.dumps(samples, protocol=5, buffer_callback=arrays.append)
        with open(f"{folder}/arrays", "wb") as file:
            for values in map(pickle.PickleBuffer.raw, arrays):
                file.seek(-file.tell() % LINE, 1)
                places.append(slice(file.tell(), file.tell() + values.nbytes))
                file.write(values)
        Path(folder, "rest").write_bytes(pickle.dumps((rest, places)))
    except OSError as error:
        log.warning("Each process keeps a list of images of its own, since no file takes it: %s.", error.strerror)
        shutil.rmtree(folder or "", ignore_errors=True)
        return None
    return folder


def _mapped(folder: Path) -> Samples:
    rest, places = pickle.loads((folder / "rest").read_bytes())  # noqa: S301 - our own machine's first rank wrote it
    with open(folder / "arrays", "rb") as file:
        # Copy on write: torch warns of arrays that nobody may write to.
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return pickle.loads(rest, buffers=[content[place] for place in places])  # noqa: S301 - as above
