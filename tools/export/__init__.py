"""Exports of a trained model for other programs. This module has names that are needed before torch is imported."""

from pathlib import Path

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"
CURVES = "curves.png"
HUB_FILES = (WEIGHTS, CARD, CURVES, CONFIG)
"""Files that -to hub writes. The last one makes the folder valid, so it is moved there last."""
CHANGED = ".changed.html"
"""Ending of the page of changed answers, after the exported file's name"""


def files_beside(file: Path) -> tuple[Path, ...]:
    """Return the paths of the files that an export may have beside `file`: a file of its weights, and a page.

    The page shows the images that the exported file classifies otherwise than the model. ONNX has a file of weights
    only beyond 2 GB, OpenVINO always.
    """
    page = file.with_name(f"{file.name}{CHANGED}")
    if file.suffix == ".onnx":
        return file.with_name(f"{file.name}.data"), page
    if file.suffix == ".xml":
        return file.with_suffix(".bin"), page
    return (page,)
