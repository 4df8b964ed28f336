"""Export to one file: written and checked in a temporary folder, and moved into place only if the check passes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.saved.trained import Trained
from tools.common.output_file import writing
from tools.common.progress import progress_bar
from tools.common.weights import needed_by_tools
from tools.export.check import CheckImages, compare
from tools.export.formats import Export, Format
from tools.export.model import ExportModule, Options, TimmModel, metadata
from utils.errors import TrainingError
from utils.log import log


def write_checked(
    kind: Format, trained: Trained, images: CheckImages, expected: Tensor, options: Options, out: Path
) -> None:
    """Write `out` if its logits agree with `expected`; otherwise raise TrainingError and leave no file."""
    model = TimmModel.of(trained)
    first = next(images.batches(trained, options.with_preprocess))
    example = torch.cat([first, first])
    saved = trained.saved
    tool_metadata = {key: saved.meta[key] for key in ("choices", "metrics") if key in saved.meta}
    tool_metadata |= needed_by_tools(saved)
    module = ExportModule(trained, model.module, options)
    export = Export(model, module, example, metadata(trained, model, options), tool_metadata, options)
    with writing(out, "-out"):
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            with progress_bar(len(images.pixels), "images", f"{out.name}: exporting") as bar:
                summary = kind.write(export, folder / out.name)
                bar.set_description(f"{out.name}: checking")
                batches = _with_progress(images.batches(trained, options.with_preprocess), bar)
                with torch.no_grad():
                    logits = kind.run(export, folder / out.name, batches)
            agreement = compare(trained, images, expected, logits, options.tolerance)
            size = sum(file.stat().st_size for file in folder.iterdir())
            _move_into_place(folder, out)
        except TrainingError as error:
            raise TrainingError(f"{out} was not written: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    log.info("%s: %.1f MB, %s, %s", out, size / 1e6, options.dtype, summary)
    log.info("  %s", agreement)
    if kind.name == "safetensors":
        log.info("  %s", model.create_call(str(out)))


def _with_progress(batches: Iterable[Tensor], bar: tqdm) -> Iterator[Tensor]:
    for batch in batches:
        yield batch
        bar.update(len(batch))


def _move_into_place(folder: Path, out: Path) -> None:
    """Move the file last: its data file (the weights of an ONNX model beyond 2 GB) must be there before it."""
    mask = os.umask(0)
    os.umask(mask)
    for file in sorted(folder.iterdir(), key=lambda path: path.name == out.name):
        file.chmod(0o666 & ~mask)  # safetensors makes its files readable by their owner only
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.replace(out.with_name(file.name))
