"""predictions.safetensors: what a run's last validation predicted for each image, beside metrics.jsonl."""

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
"""Column of hashes of the images' groups, where DATA.GROUP names them"""
PROBE = "probe_guess"
"""Column of a run that began with a linear probe"""


def write_predictions(folder: Path, update: int, table: Mapping[str, np.ndarray]) -> None:
    """`update`: after which the run was validated. `table`: a row per image, with `names` (hashes of them), `labels`.

    Raises OSError.
    """
    rows = {**{name: np.ascontiguousarray(column) for name, column in table.items()}, UPDATE: np.array([update])}
    write_atomically(folder / PREDICTIONS, save({**rows, DIGEST: _digest(rows)}))


def read_predictions(folder: Path, update: int) -> dict[str, np.ndarray] | None:
    """The table; None if it is missing, damaged, or of another update."""
    rows = _read(folder)
    return rows if rows and rows.pop(UPDATE).tolist() == [update] else None


def read_probe(folder: Path, labels: np.ndarray) -> np.ndarray | None:
    """What the linear probe that the run began with predicted; None if unknown, or if the labels changed."""
    rows = _read(folder) or {}
    return rows[PROBE] if PROBE in rows and np.array_equal(rows["labels"], labels) else None


def _read(folder: Path) -> dict[str, np.ndarray] | None:
    try:
        rows = load(read_regular(folder / PREDICTIONS))
    except (OSError, SafetensorError):
        return None
    digest = rows.pop(DIGEST, None)
    return None if digest is None or not np.array_equal(digest, _digest(rows)) else rows


def _digest(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Of all values in the file."""
    digest = hashlib.sha256()
    for name in sorted(rows):
        digest.update(f"{name} {rows[name].dtype} {rows[name].shape} ".encode())
        digest.update(rows[name].tobytes())
    return np.frombuffer(digest.digest(), np.uint8)
