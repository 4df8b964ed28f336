"""What the server of tests/forking.py imports before it forks: what an ordinary run imports, in the same order.

The two stand-ins come first, as in engine/entry.py: torch's compiler and wandb are as late as in a real process.
"""

# ruff: noqa: E402
from engine.machine.late_compiler import import_compiler_late
from engine.report.late_wandb import import_wandb_late

import_wandb_late()
import_compiler_late()

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

IMPORTED = (
    *("torch", "torch.optim", "torch.distributed", "torchvision.transforms.v2", "timm", "timm.optim", "timm.scheduler"),
    *("torch.distributed.launcher.api", "torch.nn.parallel", "torch.utils.tensorboard", "matplotlib.pyplot"),
    *("pydantic", "safetensors.torch", "huggingface_hub"),
    *("engine.entry", "engine.run", "engine.run_evaluation", "engine.saved.trained", "engine.saved.predictions"),
    "tools.common.command_line",
)
for name in IMPORTED:
    importlib.import_module(name)

from matplotlib.figure import Figure

_render = Figure.draw


def _draw(figure: Figure, renderer: Any) -> None:
    """Rendering curves.png takes half of a short run: forked runs plot it, and leave its pixels blank.

    Tests of what it shows draw it themselves or start a new Python. Pictures of tools are rendered.
    """
    if not Path(sys.argv[0]).name.startswith("main_"):
        _render(figure, renderer)


setattr(Figure, "draw", _draw)  # noqa: B010 - a method is replaced
gc.collect()
gc.freeze()  # a collection in a forked process leaves these objects' pages shared
