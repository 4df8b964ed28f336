"""The same images in each layout of a data set."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.datasets.shards.tar_files import picture, write_tar

Rows = Sequence[tuple[str, object]]
"""File name and label of each image"""


def lay_out(
    kind: str, root: Path, splits: Mapping[str, Rows], image: Callable[[int], bytes] = picture
) -> dict[str, Any]:
    """Write these splits; one without a name is for data without splits. Returns the settings of DATA that read them.

    `image(k)` is the content of image k of its split.
    """
    for split, rows in splits.items():
        if kind == "shards":
            labels = [(f"{Path(name).stem}.cls", str(label).encode()) for name, label in rows]
            images = [(name, image(k)) for k, (name, _) in enumerate(rows)]
            write_tar(root / split / "0.tar", [member for pair in zip(images, labels, strict=True) for member in pair])
            continue
        lines = []
        for k, (name, label) in enumerate(rows):
            path = Path(split, str(label), name) if kind.startswith("image") else Path("images", split, name)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(image(k))
            lines.append((path, label))
        if kind == "csv":
            table = ["path,target", *(f"{path},{label}" for path, label in lines)]
            (root / f"{split or 'all'}.csv").write_text("\n".join(table) + "\n")
        elif kind == "lists":
            (root / f"{split}_list.txt").write_text("".join(f"{path} {label}\n" for path, label in lines))
    place = root / "all.csv" if kind == "csv" and "" in splits else root
    return {"DATASET": "imagenet2012" if kind == "lists" else kind, "DATA_PATH": str(place)}
