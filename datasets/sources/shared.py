"""One listing per machine: its first rank lists the images, and all of its ranks map the table from a file."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from datasets.base import Samples
from datasets.sources.files import FileSamples, PathTable
from utils.distributed.world import World, all_gather, on_every_rank
from utils.log import log
from utils.machine.cpus import return_freed_memory


def listed_once(list_images: Callable[[], Samples], world: World) -> Samples:
    """What `list_images` returns. A collective call."""
    samples = on_every_rank(world, lambda: list_images() if world.local_rank == 0 else None)
    host, folder, about = socket.gethostname(), None, ()
    if isinstance(samples, FileSamples) and len(samples) and world.local_size > 1:
        folder, about = _write(samples), (samples.root, samples.classes, samples.groups)
    offers = all_gather([(host, folder, about)], world)
    place, of = next(((place, of) for owner, place, of in offers if owner == host and place), (None, ()))
    try:
        samples = _mapped(Path(place), *of) if place else samples
    except OSError as error:  # on a machine of the same name, for example
        log.warning("%s: the shared list of images cannot be read (%s).", place, error.strerror)
    all_gather([None], world)  # all have opened the files, which may go now
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        return_freed_memory()  # of the list that was written
    return list_images() if samples is None else samples


def _write(samples: FileSamples) -> str | None:
    folder = None
    try:
        folder = tempfile.mkdtemp(prefix="vitamp-images-")
        np.save(f"{folder}/block.npy", np.frombuffer(samples.paths.block, np.uint8))
        np.save(f"{folder}/ends.npy", samples.paths.ends)
        np.save(f"{folder}/labels.npy", samples.labels)
    except OSError as error:
        log.warning("Each process keeps a list of images of its own, since no file takes it: %s.", error.strerror)
        shutil.rmtree(folder or "", ignore_errors=True)
        return None
    return folder


def _mapped(folder: Path, root: Path | str, classes: list[str] | None, groups: list[str] | None) -> FileSamples:
    # Copy on write: torch warns of arrays that nobody may write to. Plain arrays: slices of memmap are slow.
    block, ends, labels = (np.asarray(np.load(folder / f"{name}.npy", "c")) for name in ("block", "ends", "labels"))
    paths = PathTable(())
    paths.block, paths.ends = block.data, ends
    samples = FileSamples(root, paths, labels, classes)
    samples.groups = groups
    return samples
