"""Files of a model for other programs. Names here are needed before torch is imported."""

from pathlib import Path

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"
CURVES = "curves.png"
HUB_FILES = (WEIGHTS, CARD, CURVES, CONFIG)
"""Files that -to hub writes, in the order in which they get their names"""
CHANGED = ".changed.html"
"""What the name of an export's page of changed images ends in"""


def files_beside(file: Path) -> tuple[Path, ...]:
    """Files that an export may have besides its own: weights (of ONNX beyond 2 GB; of OpenVINO), and the page."""
    page = file.with_name(f"{file.name}{CHANGED}")
    if file.suffix == ".onnx":
        return file.with_name(f"{file.name}.data"), page
    if file.suffix == ".xml":
        return file.with_suffix(".bin"), page
    return (page,)
