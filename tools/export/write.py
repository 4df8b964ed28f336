"""Export to a file or folder: written and checked in a temporary one, and moved into place only if the check passes."""

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
from tools.export.check import CheckImages, compare
from tools.export.formats import Export, Format
from tools.export.hub_files import CONFIG, HUB_FILES
from tools.export.model import ExportModule, Options, TimmModel, metadata
from utils.errors import TrainingError
from utils.log import log


def write_checked(
    kind: Format, trained: Trained, images: CheckImages, expected: Tensor, options: Options, out: Path
) -> None:
    """Write `out` if its logits agree with `expected`; otherwise raise TrainingError and leave no file."""
    model = TimmModel.of(trained)
    example = images.example(trained, options.with_preprocess)
    module = ExportModule(trained, model.module, options)
    about = metadata(trained, model, options, kind.program) | images.about()
    export = Export(model, module, example, about, trained, options)
    with writing(out, kind.flag):
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            with progress_bar(len(images.pixels), "images", f"{out.name}: exporting") as bar:
                summary = kind.write(export, folder / out.name)
                bar.set_description(f"{out.name}: checking")
                batches = _with_progress(images.batches(trained, options.with_preprocess), bar)
                with torch.no_grad():
                    logits = kind.run(export, folder / out.name, batches)
                    logits = logits if kind.program else logits / trained.temperature
            agreement = compare(trained, images, expected, logits, options.tolerance)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            _move_into_place(folder, out)
        except TrainingError as error:
            raise TrainingError(f"{out} was not written: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    log.info("%s: %.1f MB, %s, %s", out, size / 1e6, options.dtype, summary)
    log.info("  %s", agreement)
    if how := kind.how_to_load(export, out):
        log.info("  %s", how)


def _with_progress(batches: Iterable[Tensor], bar: tqdm) -> Iterator[Tensor]:
    for batch in batches:
        yield batch
        bar.update(len(batch))


def _move_into_place(folder: Path, out: Path) -> None:
    """Move what makes the export valid last: it must not be there before the files that it needs.

    That is the file itself, which may have a data file (weights of an ONNX model beyond 2 GB), or a folder's config.
    """
    source, target, last = folder, out.parent, out.name
    if (folder / out.name).is_dir():
        source, target, last = folder / out.name, out, CONFIG
        target.mkdir(exist_ok=True)
        for old in (target / name for name in HUB_FILES if not (source / name).exists()):
            old.unlink(missing_ok=True)  # of an earlier export
    mask = os.umask(0)
    os.umask(mask)
    for file in sorted(source.iterdir(), key=lambda path: path.name == last):
        file.chmod(0o666 & ~mask)  # safetensors makes its files readable by their owner only
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        file.replace(target / file.name)
