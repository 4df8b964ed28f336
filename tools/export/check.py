"""The check of an exported file: the images, what the model computes on them, and how the file's outputs differ.

A file gets its place only if it passes.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datasets import PADDING, ImageDataset, has_labels
from datasets.base import TITLES, dtype_of
from datasets.decoding import endings_of
from datasets.given import open_given
from datasets.sources.files import SkippedFiles, images_below
from engine.trained.model import Trained, name_of, split_of_run
from tools.common.output_file import writing
from tools.common.turns import progress_bar
from tools.export import CONFIG, HUB_FILES, files_beside
from tools.export.formats import BATCH, LOGITS, CheckImages, Export, Format, thresholds_of
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.statistics.differences import CONFIDENCE, LIKE_THESE
from utils.statistics.paired import agresti_min
from utils.text import counted, some_of
from vitamp.files import replacing
from vitamp.metrics import ONE_LABEL

TOLERANCES = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 5e-2, "int8": math.inf}
"""-dtype -> largest allowed difference, as a fraction of the largest output; docs/benchmarks.md has measured ones."""
WORST_SHOWN = 3
"""Changed answers, or largest differences, that the log names"""
NOISE_IMAGES = 16
"""Number of generated images, if no real ones can be read"""


def images_for_check(trained: Trained, folder: Path | None, count: int | None, part: str | None) -> CheckImages:
    """Choose `count` evenly spaced images on which the exported files are checked; all images if `count` is None.

    They are from `folder` (-images) if it is given, else from the split `part` (-part) of the run's data. Without
    either, they are validation images, or generated noise if those cannot be read.
    """
    data = trained.config.DATA
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"-images {folder}: not a folder; name a folder with images.")
        skipped_files = SkippedFiles()
        paths = [str(folder / path) for path in images_below(str(folder), skipped_files, endings=endings_of(data))]
        skipped_files.warn(str(folder))
        if not paths:
            raise UserError(f"-images {folder}: no images are in it; name a folder with images.")
        images = chosen_images(open_given(paths, data), count, f"in {folder}")
        return replace(images, labels=None)  # files in a folder have no labels, only placeholders
    try:
        dataset = split_of_run(trained, part or "val")
    except UserError as error:
        if part is not None:
            raise
        log.warning("The images of the run cannot be read: %s", error)
        log.warning("The export is checked on generated noise. To check it on real images: -images DIR")
        return _noise(data)
    split_title = "data" if part == "all" else TITLES[part or "val"]
    images = chosen_images(dataset, count, f"of the run's {split_title}")
    return images if has_labels(data) else replace(images, labels=None)


def _noise(data: DataConfig) -> CheckImages:
    """Generate images of uniform noise, the same in each export, in the value range of the data."""
    shades = torch.randint(0, 256, (NOISE_IMAGES, *data.shape), generator=torch.Generator().manual_seed(0))
    low, high = data.value_range
    pixels = (low + (high - low) / 255 * shades).to(dtype_of(data))
    names = [f"noise {number}" for number in range(NOISE_IMAGES)]
    return CheckImages(pixels, names, "of generated noise, since the real ones cannot be read")


def chosen_images(dataset: ImageDataset, most: int | None, source: str) -> CheckImages:
    """Read `most` evenly spaced images of a data set (None: all), and leave out those that cannot be read.

    `source`: where they are from, for the log, such as 'in DIR'. UserError if none can be read.
    """
    count = len(dataset) if most is None else min(most, len(dataset))
    chosen = np.linspace(0, len(dataset) - 1, count).round().astype(int).tolist()
    pixels = []
    labels = []
    indices = []
    epoch = 0  # of no effect without augmentation
    for start in range(0, count, BATCH):
        batch = dataset.__getitems__([(epoch, index) for index in chosen[start : start + BATCH]])
        readable = batch.indices != PADDING  # an unreadable image is replaced by padding
        pixels.append(batch.images[readable])
        labels.append(batch.labels[readable])
        indices += batch.indices[readable].tolist()
    broken = dataset.take_broken()
    if broken:
        log.warning("%d images cannot be read and are left out, such as %s", len(broken), broken[0].name)
    if not indices:
        raise UserError(f"none of the {count} images {source} can be read; name other images with -images DIR.")
    names = [name_of(dataset, index) for index in indices]
    return CheckImages(torch.cat(pixels), names, source, dataset, indices=tuple(indices), labels=torch.cat(labels))


def reference_logits(trained: Trained, images: CheckImages) -> Tensor:
    """Compute the trained model's logits, with which those of every exported file are compared."""
    logits = []
    log.info("computing %s by the model, to compare with ...", counted(len(images.pixels), "image"))
    with progress_bar(len(images.pixels), "images", "reference") as bar:
        for batch in images.pixels.split(BATCH):
            logits.append(trained.logits(batch))
            bar.update(len(batch))
    return torch.cat(logits)


def write_checked(kind: Format, export: Export, expected: Tensor, out: Path, tolerance: float) -> tuple[Tensor, str]:
    """Write `out` in a format, check its outputs against `expected`, and log size, differences and speed.

    The file is written and checked in a temporary folder, and moved into place only if the check passes: no file is
    left whose outputs differ by more than `tolerance`. Returns the file's outputs, and a text on what the file costs in
    accuracy and gains in speed; '' if nothing is to be said.
    """
    with writing(out, kind.flag):
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        unfinished = folder / out.name
        try:
            log.info("%s: exporting, which may take a minute ...", out.name)
            summary = kind.write(export, unfinished)
            log.info("%s: checking it, and how fast it is ...", out.name)
            with torch.no_grad():
                outputs = _run_on_check_images(kind, export, unfinished)
                difference, *cost_and_gain = compare(export, expected, outputs, tolerance)
                speed = kind.speed(export, unfinished)
            if speed:
                cost_and_gain.append(speed)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            _move_into_place(folder, out)
        except TrainingError as error:
            raise TrainingError(f"{out} was not written: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    log.info("%s: %.1f MB, %s, %s", out, size / 1e6, export.dtype, summary)
    log.info("  %s", "; ".join([difference] + cost_and_gain))
    python_line = kind.how_to_load(export, out)
    if python_line:
        log.info("  %s", python_line)
    return outputs, "; ".join(cost_and_gain)


def _run_on_check_images(kind: Format, export: Export, file: Path) -> Tensor:
    """Compute the outputs of the written file on the images of the check, with a progress bar.

    `kind`: the file's format.
    """
    images = export.images
    with progress_bar(len(images.pixels), "images", f"{file.name}: checking") as bar:

        def batches_with_progress() -> Iterator[Tensor]:
            for batch in images.batches(export.trained, export.with_preprocess):
                yield batch
                bar.update(len(batch))  # when the format asks for the next batch, it has computed this one

        return torch.cat(list(kind.run(export, file, batches_with_progress())))


def _move_into_place(folder: Path, out: Path) -> None:
    """Move a finished export from its temporary folder to `out`, and remove files of an earlier export there.

    The file that makes the export valid is moved last, because the files that it needs must be there before: the
    exported file after the weights beside it, the config of a folder after its other files.
    """
    # A file, which may have another beside it.
    source = folder
    target = out.parent
    last_name = out.name
    earlier_files = set(files_beside(out))
    # The format hub writes a folder.
    if (folder / out.name).is_dir():
        source = folder / out.name
        target = out
        last_name = CONFIG
        target.mkdir(exist_ok=True)
        earlier_files |= {target / name for name in HUB_FILES}

    # False sorts before True, so the last name is the last.
    new_files = sorted(source.iterdir(), key=lambda path: path.name == last_name)
    for file in new_files:
        with replacing(target / file.name) as unfinished:
            file.replace(unfinished)
    for leftover in earlier_files - {target / file.name for file in new_files}:
        leftover.unlink(missing_ok=True)


def compare(export: Export, expected: Tensor, outputs: Tensor, tolerance: float) -> list[str]:
    """Compare the file's outputs with the model's (`expected`), and return phrases about them for the log.

    The first phrase says how far they differ and which answers changed. A second one may follow: that the logits need a
    sigmoid, or what a lower precision costs in accuracy. Raises TrainingError if a difference is larger than
    `tolerance`, a fraction of the largest output.
    """
    images = export.images
    largest_output = float(expected.abs().max()) or 1.0  # all outputs may be 0
    errors = (outputs - expected).abs() / largest_output
    worst = float(errors.max())
    if not worst <= tolerance:  # also if it is NaN
        raise TrainingError(_describe_largest_differences(export, expected, outputs, errors, tolerance))
    allowed = "" if tolerance == math.inf else f" ({tolerance:g} allowed)"
    difference = (
        f"checked on {counted(len(outputs), 'image')} {images.source}: largest difference {worst:.1e} x the largest "
        f"output{allowed}, {_changed_answers(export, expected, outputs)}"
    )
    has_several_labels = thresholds_of(export.trained) is not None
    if has_several_labels:
        needs_sigmoid = images.output == LOGITS
        return [difference, "apply a sigmoid to the logits"] if needs_sigmoid else [difference]
    if images.labels is None or export.dtype == "fp32":  # fp32 costs nothing
        return [difference]
    model_correct = expected.argmax(1) == images.labels
    file_correct = outputs.argmax(1) == images.labels
    return [difference, _cost(export, model_correct, file_correct)]


def answers(export: Export, outputs: Tensor) -> Tensor:
    """Return which classes are predicted for each image, as booleans (images x classes).

    With one label per image, that is the class with the highest output; with several, those whose probability reaches
    their threshold.
    """
    thresholds = thresholds_of(export.trained)
    if thresholds is None:  # one label per image
        return F.one_hot(outputs.argmax(1), outputs.shape[1]) > 0
    outputs = outputs.double()
    probabilities = outputs.sigmoid() if export.images.output == LOGITS else outputs
    return probabilities >= thresholds


def _changed_answers(export: Export, expected: Tensor, outputs: Tensor) -> str:
    """Say how many images the file classifies otherwise than the model, and name the first of them."""
    trained = export.trained
    differ = (answers(export, expected) != answers(export, outputs)).any(1)
    changed = []
    for row in torch.nonzero(differ)[:, 0].tolist():
        description = export.images.names[row]
        if trained.task.kind == ONE_LABEL:
            to_model = trained.name_of(int(expected[row].argmax()))
            to_file = trained.name_of(int(outputs[row].argmax()))
            description += f" ({to_model} to the model, {to_file} to the file)"
        changed.append(description)
    if not changed:
        return "no answer changed"
    return f"{counted(len(changed), 'answer')} changed: {some_of(changed, WORST_SHOWN)}"


def _cost(export: Export, model_correct: Tensor, file_correct: Tensor) -> str:
    """Say how many percentage points of top-1 the file costs or gains, with the confidence interval.

    `model_correct`, `file_correct`: whether each image is classified correctly by the model and by the file.
    """
    # Images of one group (DATA.GROUP) count as fewer independent images, which makes the interval wider.
    images = export.images
    dataset_groups = images.dataset.groups() if images.dataset is not None else []
    groups = [dataset_groups[index] for index in images.indices] if dataset_groups else []
    estimate = agresti_min(model_correct.numpy(), file_correct.numpy(), groups=groups)
    cost, low, high = (100 * fraction for fraction in estimate)
    verb = "costs"
    points = cost
    if cost < 0:  # a negative cost is a gain, and so are the ends of its interval
        verb = "gains"
        points = -cost
        low, high = -high, -low
    interval = f"{100 * CONFIDENCE:.0f} % interval {low:.1f} to {high:.1f}, for {LIKE_THESE}"
    before = 100 * model_correct.numpy().mean()
    after = 100 * file_correct.numpy().mean()
    return f"{export.dtype} {verb} {points:.1f} points of top-1 ({interval}): {before:.2f} to {after:.2f} %"


def _describe_largest_differences(
    export: Export, expected: Tensor, outputs: Tensor, errors: Tensor, tolerance: float
) -> str:
    """Write the error message for outputs that differ too much, with a list of the largest differences.

    `errors`: how far each output differs from the expected one, as a fraction of the largest output.
    """
    trained = export.trained
    images = export.images
    # NaN counts as the largest difference.
    order = errors.nan_to_num(nan=torch.inf, posinf=torch.inf).flatten().argsort(descending=True)
    lines = []
    for flat_index in order[:WORST_SHOWN].tolist():
        row, label = divmod(flat_index, errors.shape[1])
        lines.append(
            f"  {images.names[row]}, class {trained.name_of(label)}: {float(outputs[row, label]):.6g} instead of "
            f"{float(expected[row, label]):.6g}"
        )
    return (
        f"the outputs differ from the model's by up to {float(errors.max()):.2g} times the largest output on "
        f"{len(outputs)} images {images.source}, but only {tolerance:g} is allowed (-tolerance). Largest differences:\n"
    ) + "\n".join(lines)
