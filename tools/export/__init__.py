"""Files of a model for other programs. Names here are needed before torch is imported."""

from pathlib import Path

CONFIG, WEIGHTS, CARD, CURVES = "config.json", "model.safetensors", "README.md", "curves.png"
HUB_FILES = (WEIGHTS, CARD, CURVES, CONFIG)
"""Files that -to hub writes, in the order in which they get their names"""


def files_beside(file: Path) -> tuple[Path, ...]:
    """Files that an export may have besides its own: weights of an ONNX model beyond 2 GB, and a page."""
    weights = [file.with_name(f"{file.name}.data")] if file.suffix == ".onnx" else []
    return *weights, page_beside(file)


def page_beside(file: Path) -> Path:
    """The page of images whose answers changed. A folder is for others, so the page is not in it."""
    return file.with_name(f"{file.name}.changed.html")
