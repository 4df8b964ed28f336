"""Parquet files like those on the hub, and reading them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.datasets.shards.tar_files import picture

pa = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")

NOTES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["ant", "bee", "cat"]}}


def write(
    path: Path,
    numbers: range,
    *,
    notes: dict[str, Any] | None = NOTES,
    labels: Any = None,
    columns: tuple[str, str] = ("image", "label"),
    struct: bool = True,
    kind: str = "PNG",
    size: tuple[int, int] = (30, 20),
    row_group: int = 4,
) -> Path:
    """A parquet file like those on the hub: image k has the label k modulo 3."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [picture(k, kind, size) for k in numbers]
    as_struct = pa.array(
        [{"bytes": image, "path": f"{k}.png"} for k, image in zip(numbers, images, strict=True)],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table(
        {
            "id": list(numbers),
            columns[0]: as_struct if struct else pa.array(images, pa.binary()),
            columns[1]: labels if labels is not None else [k % 3 for k in numbers],
        }
    )
    if notes is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": notes}})})
    pq.write_table(table, path, row_group_size=row_group)
    return path
