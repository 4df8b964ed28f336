"""Reads and writes predictions.safetensors: the predictions of a run's last validation for each image."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vitamp.files import read_regular, write_atomically

PREDICTIONS = "predictions.safetensors"
UPDATE = "update"
DIGEST = "sha256"
GROUPS = "groups"
"""Column with a hash of each image's group, if images are in groups (DATA.GROUP)."""
PROBE = "probe_guess"
"""Column with the predictions of the linear probe that a run began with."""


def write_predictions(folder: Path, update: int, table: Mapping[str, np.ndarray]) -> None:
    """Write the predictions of a validation into a run's folder; raises OSError.

    update: the update after which the run was validated
    table: column -> array with one row per image; among the columns are `names` (hashes of the names) and `labels`
    """
    arrays = {name: np.ascontiguousarray(column) for name, column in table.items()}
    arrays[UPDATE] = np.array([update])
    digest = _digest(arrays)
    write_atomically(folder / PREDICTIONS, save(arrays | {DIGEST: digest}))


def read_predictions(folder: Path, update: int) -> dict[str, np.ndarray] | None:
    """Read the predictions after an update: column -> array; None if missing, damaged, or of another update."""
    table = _read(folder)
    if not table or table.pop(UPDATE).tolist() != [update]:
        return None
    return table


def read_probe(folder: Path, labels: np.ndarray) -> np.ndarray | None:
    """Read the predictions of the linear probe that the run began with; None if unknown, or if the labels changed."""
    table = _read(folder) or {}
    if PROBE not in table or not np.array_equal(table["labels"], labels):
        return None
    return table[PROBE]


def _read(folder: Path) -> dict[str, np.ndarray] | None:
    """Read the file without its digest: column -> array; None if it is missing or damaged."""
    try:
        table = load(read_regular(folder / PREDICTIONS))
    except (OSError, SafetensorError):
        return None
    digest = table.pop(DIGEST, None)
    if digest is None or not np.array_equal(digest, _digest(table)):
        return None
    return table


def _digest(table: Mapping[str, np.ndarray]) -> np.ndarray:
    """SHA-256 of all columns, as an array of bytes."""
    digest = hashlib.sha256()
    for name in sorted(table):
        digest.update(f"{name} {table[name].dtype} {table[name].shape} ".encode())
        digest.update(table[name].tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
