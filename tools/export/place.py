"""scripts/export.py: a file is written and checked in a folder of its own, and only then gets its place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.saved.trained import Trained
from tools.common.progress import progress_bar
from tools.common.weights import needed_by_tools
from tools.export.check import TOLERANCES, CheckImages, compare
from tools.export.formats import Format, Task
from tools.export.model import Plain, Whole, Wishes, about
from utils.errors import TrainingError
from utils.log import log
from utils.output_file import writing


def export_one(
    kind: Format,
    plain: Plain,
    trained: Trained,
    images: CheckImages,
    wanted: Tensor,
    wishes: Wishes,
    out: Path,
    tolerance: float | None,
) -> None:
    """Write `out` once its logits agree with `wanted`; otherwise TrainingError, and no file."""
    one = next(images.batches(trained, wishes.with_preprocess))
    example = torch.cat([one, one])
    saved = trained.saved
    needed = {key: saved.meta[key] for key in ("choices", "metrics") if key in saved.meta} | needed_by_tools(saved)
    whole = Whole(trained, plain.module, wishes)
    task = Task(plain, whole, example, about(trained, plain, wishes), needed, wishes)
    with writing(out, "-out"):
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            with progress_bar(len(images.pixels), "images", f"{out.name}: translating") as bar:
                said = kind.write(task, folder / out.name)
                bar.set_description(f"{out.name}: checking")
                with torch.no_grad():
                    got = kind.run(
                        task, folder / out.name, _counted(images.batches(trained, wishes.with_preprocess), bar)
                    )
            checked = compare(trained, images, wanted, got, tolerance or TOLERANCES[wishes.dtype])
            size = sum(file.stat().st_size for file in folder.iterdir())
            _place(folder, out)
        except TrainingError as error:
            raise TrainingError(f"{out} was not written: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    log.info("%s: %.1f MB, %s, %s", out, size / 1e6, wishes.dtype, said)
    log.info("  %s", checked)
    if kind.name == "safetensors":
        log.info("  %s", plain.call(str(out)))


def _counted(batches: Iterator[Tensor], bar: tqdm) -> Iterator[Tensor]:
    for batch in batches:
        yield batch
        bar.update(len(batch))


def _place(folder: Path, out: Path) -> None:
    """The file itself last: whoever sees it finds what lies beside it, the weights of an ONNX file beyond 2 GB."""
    mask = os.umask(0)
    os.umask(mask)
    for file in sorted(folder.iterdir(), key=lambda path: path.name == out.name):
        file.chmod(0o666 & ~mask)  # safetensors keeps its files to their owner, and these are for others
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.replace(out.with_name(file.name))
