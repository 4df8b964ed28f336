"""What the server of tests/forking.py imports before it forks: what an ordinary run imports, in the same order.

The two stand-ins come first, as in engine/entry.py: torch's compiler and wandb are as late as in a real process.
"""

# ruff: noqa: E402
import sys

from engine.machine.late_compiler import import_compiler_late

sys.modules.setdefault("wandb", None)  # pyright: ignore[reportArgumentType] - as engine/entry.py does
import_compiler_late()

import gc
import importlib
import io
from pathlib import Path
from typing import Any

IMPORTED = (
    *("torch", "torch.optim", "torch.distributed", "torchvision.transforms.v2", "timm", "timm.optim", "timm.scheduler"),
    *("torch.distributed.launcher.api", "torch.nn.parallel", "torch.utils.tensorboard", "matplotlib.pyplot"),
    *("pydantic", "safetensors.torch", "huggingface_hub", "simplejpeg"),
    *("engine.entry", "engine.run", "engine.evaluation.evaluate", "engine.trained.model", "engine.trained.model"),
    *("engine.preflight", "engine.preflight", "engine.speed.packed_attention", "tools.common.command_line"),
    # What settings choose, in many tests.
    *("datasets.recognise", "datasets.shards.hub", "models.weights.fit", "engine.evaluation.data"),
    *("engine.checkpoint.find", "engine.checkpoint.restore"),
    *("engine.inputs.auto", "engine.amp.low_precision", "engine.optim.ema", "engine.memory.dry_run"),
)
for name in IMPORTED:
    importlib.import_module(name)

from matplotlib import pyplot
from PIL import Image

from datasets.sources.digits import read_digits

_subplots = pyplot.subplots
_blank = io.BytesIO()
Image.new("RGB", (1650, 770), "white").save(_blank, "PNG")


class _Blank:
    """A figure, or an axis of one, that takes whatever is plotted."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def savefig(self, file: Any, **_: Any) -> None:
        file.write(_blank.getvalue())


def _plot(rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """Plotting curves.png takes a third of a short run: forked runs leave it blank.

    Tests of what it shows draw it themselves or start a new Python. Pictures of tools are plotted.
    """
    if not Path(sys.argv[0]).name.startswith("main_"):
        return _subplots(rows, columns, **options)
    return _Blank(), [[_Blank() for _ in range(columns)] for _ in range(rows)]


read_digits()  # and keeps them
setattr(pyplot, "subplots", _plot)  # noqa: B010 - a function is replaced
gc.collect()
gc.freeze()  # a collection in a forked process leaves these objects' pages shared
