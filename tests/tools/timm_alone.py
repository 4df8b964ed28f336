"""Classifying images by timm alone, in a process that cannot import vitamp, and comparing the logits."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.predicted import Predictions

Tool = Callable[..., str]
"""scripts/export.py, called in this process: exit code and output"""
CONSUMER = """\
import sys

import timm
import torch
from PIL import Image

model_name, colours, out, *paths = sys.argv[1:]
model = timm.create_model(model_name, pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
images = torch.stack([transform(Image.open(path).convert(colours)) for path in paths])
with torch.no_grad():
    torch.save((model(images), model.pretrained_cfg.get("label_names")), out)
ours = [name for name in ("engine", "models", "tools", "utils") if name in sys.modules]
sys.exit(f"imported {ours}" if ours else 0)
"""


def in_timm_alone(model: str, colours: str, paths: list[Path], place: Path) -> tuple[torch.Tensor, list[str] | None]:
    """Logits and class names, from a process that cannot import vitamp."""
    words = [sys.executable, "-I", "-c", CONSUMER, model, colours, str(place / "logits.pt"), *map(str, paths)]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(place / "logits.pt", weights_only=True)


def pictures_of(found: Predictions, place: Path) -> list[Path]:
    paths = [place / f"{row:03d}.png" for row in range(len(found))]
    for row, path in enumerate(paths):
        found.picture(row).save(path)
    return paths


def check_equal(found: Predictions, logits: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(logits, found.logits, rtol=0, atol=tolerance)
    assert torch.equal(logits.argmax(1), found.logits.argmax(1))
    assert len(set(logits.argmax(1).tolist())) > 1, "a model that always says the same proves nothing"
