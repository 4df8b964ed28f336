"""Export formats: what is written, and how it is checked against the trained model on real images.

A trained model may compute attention or patches by vitamp's own code, which leaves weights and their names alone. The
weights are loaded into timm's plain model, so that the exported graph needs none of that code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import json
import math
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datasets import PADDING, ImageDataset, has_labels
from datasets.base import TITLES, dtype_of
from datasets.decoding import endings_of
from datasets.given import open_given
from datasets.registry import crop_of
from datasets.sources.files import SkippedFiles, images_below
from engine.checkpoint.folder import raising_os_errors
from engine.checkpoint.restore import load_weights
from engine.inputs.batches import Inputs, input_of
from engine.trained.model import Trained, name_of, split_of_run
from models.build import timm_call
from tools.common.output_file import writing
from tools.common.turns import progress_bar
from tools.common.weights import needed_by_tools
from tools.export import CONFIG, HUB_FILES, files_beside
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError, first_line
from utils.log import log
from utils.statistics.differences import CONFIDENCE, LIKE_THESE
from utils.statistics.paired import agresti_min
from utils.text import counted, some_of
from vitamp.files import replacing
from vitamp.metrics import ONE_LABEL
from vitamp.pooling import pool_by
from vitamp.registry import own_named
from vitamp.sizes import in_pixels
from vitamp.weights import EXPORTED, MADE_BY, encoded

TOLERANCES = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 5e-2, "int8": math.inf}
"""Fractions of the largest output; docs/benchmarks.md has measured differences."""
LOGITS = "logits"
PROBABILITIES = "probabilities"
IMAGE = "image"
"""Input of a file that takes one image of any size"""
BATCH = 32
WORST_SHOWN = 3
NOISE_IMAGES = 16
TURNS = 7
"""That two take to be timed"""
SECONDS = 0.1
"""That a turn lasts"""


def thresholds_of(trained: Trained) -> Tensor | None:
    """Of each class, in probabilities of a model with several labels per image; None: the highest output decides."""
    return None if trained.task.kind == ONE_LABEL else torch.tensor(trained.thresholds()[0], dtype=torch.float64)


@dataclass(frozen=True)
class CheckImages:
    pixels: Tensor
    """As in a batch, N x C x S x S. Of images of any size: what the nodes of the file make from them"""
    names: list[str]
    source: str
    """Where they are from, for the log"""
    dataset: ImageDataset | None = None
    """None for noise"""
    indices: tuple[int, ...] = ()
    """Index of each in `dataset`"""
    labels: Tensor | None = None
    """With one label per image, if they are known"""
    any_size: tuple[Callable[[], np.ndarray], ...] = ()
    """With -with_resize: each returns an image of any size, H x W x 3"""
    prepend: Callable[[Any], None] | None = None
    """With -with_resize: puts nodes that resize one image before those of an ONNX model"""
    about: dict[str, Any] = field(default_factory=dict)
    """What the file says of its input besides"""

    @property
    def output(self) -> str:
        """What the file computes of them."""
        return PROBABILITIES if self.any_size else LOGITS

    def batches(self, trained: Trained, with_preprocess: bool) -> Iterator[Tensor]:
        """Inputs of the exported file. The first batch has one image, since the file must take any number."""
        if self.any_size:
            for image in self.any_size:
                yield torch.from_numpy(np.array(image()))[None]
            return
        for part in self.pixels[:1], *self.pixels[1:].split(BATCH):
            if len(part):
                yield (part if with_preprocess else trained.inputs(part)).contiguous()


def images_for_check(trained: Trained, folder: Path | None, count: int | None, part: str | None) -> CheckImages:
    """`count` images, evenly chosen from the folder or `part` of the run's data; for None noise if it has none."""
    data = trained.config.DATA
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"-images {folder}: not a folder; name a folder with images.")
        skipped = SkippedFiles()
        paths = [str(folder / path) for path in images_below(str(folder), skipped, endings=endings_of(data))]
        skipped.warn(str(folder))
        if not paths:
            raise UserError(f"-images {folder}: no images are in it; name a folder with images.")
        return replace(chosen_images(open_given(paths, data), count, f"in {folder}"), labels=None)
    try:
        dataset = split_of_run(trained, part or "val")
    except UserError as error:
        if part is not None:
            raise
        log.warning("The images of the run cannot be read: %s", error)
        log.warning("The export is checked on generated noise. To check it on real images: -images DIR")
        return _noise(data)
    of_run = "data" if part == "all" else TITLES[part or "val"]
    found = chosen_images(dataset, count, f"of the run's {of_run}")
    return found if has_labels(data) else replace(found, labels=None)


def _noise(data: DataConfig) -> CheckImages:
    shades = torch.randint(0, 256, (NOISE_IMAGES, *data.shape), generator=torch.Generator().manual_seed(0))
    low, high = data.value_range
    pixels = (low + (high - low) / 255 * shades).to(dtype_of(data))
    names = [f"noise {number}" for number in range(NOISE_IMAGES)]
    return CheckImages(pixels, names, "of generated noise, since the real ones cannot be read")


def chosen_images(dataset: ImageDataset, most: int | None, source: str) -> CheckImages:
    """Readable ones of `most` evenly chosen images."""
    count = len(dataset) if most is None else min(most, len(dataset))
    chosen = np.linspace(0, len(dataset) - 1, count).round().astype(int).tolist()
    parts = []
    labels = []
    indices = []
    for first in range(0, count, BATCH):
        batch = dataset.__getitems__([(0, index) for index in chosen[first : first + BATCH]])
        readable = batch.indices != PADDING
        parts.append(batch.images[readable])
        labels.append(batch.labels[readable])
        indices += batch.indices[readable].tolist()
    broken = dataset.take_broken()
    if broken:
        log.warning("%d images cannot be read and are left out, such as %s", len(broken), broken[0].name)
    if not indices:
        raise UserError(f"none of the {count} images {source} can be read; name other images with -images DIR.")
    names = [name_of(dataset, index) for index in indices]
    return CheckImages(torch.cat(parts), names, source, dataset, indices=tuple(indices), labels=torch.cat(labels))


def reference_logits(trained: Trained, images: CheckImages) -> Tensor:
    """Logits of the trained model, with which those of every exported file are compared."""
    logits = []
    log.info("computing %s by the model, to compare with ...", counted(len(images.pixels), "image"))
    with progress_bar(len(images.pixels), "images", "reference") as bar:
        for part in images.pixels.split(BATCH):
            logits.append(trained.logits(part))
            bar.update(len(part))
    return torch.cat(logits)


def run_onnx(model: str | bytes, name: str, output: str, inputs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Outputs of a model with one input, a file or its bytes, for each input. `name`: of the model, for errors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        (taken,) = session.get_inputs()
        for one in inputs:
            yield np.asarray(session.run([output], {taken.name: one})[0])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise TrainingError(f"{name}: onnxruntime cannot run the file: {first_line(error)}") from None


def answers(export: Export, outputs: Tensor) -> Tensor:
    """Whether the answer of each image has each class, N x C."""
    limits = thresholds_of(export.trained)
    if limits is None:
        return F.one_hot(outputs.argmax(1), outputs.shape[1]) > 0
    outputs = outputs.double()
    return (outputs.sigmoid() if export.images.output == LOGITS else outputs) >= limits


def compare(export: Export, expected: Tensor, found: Tensor, tolerance: float) -> list[str]:
    """Which answers changed, and in a lower precision what that costs; TrainingError beyond the tolerance."""
    images = export.images
    errors = (found - expected).abs() / (float(expected.abs().max()) or 1.0)
    worst = float(errors.max())
    if not worst <= tolerance:  # or NaN
        raise TrainingError(_worst_of(export, expected, found, errors, tolerance))
    allowed = "" if tolerance == math.inf else f" ({tolerance:g} allowed)"
    words = (
        f"checked on {counted(len(found), 'image')} {images.source}: largest difference {worst:.1e} x the largest "
        f"output{allowed}, {_changed_answers(export, expected, found)}"
    )
    if thresholds_of(export.trained) is not None:
        return [words, "apply a sigmoid to the logits"] if images.output == LOGITS else [words]
    if images.labels is None or export.dtype == "fp32":
        return [words]
    return [words, _cost(export, expected.argmax(1) == images.labels, found.argmax(1) == images.labels)]


def _changed_answers(export: Export, expected: Tensor, found: Tensor) -> str:
    trained = export.trained
    differ = (answers(export, expected) != answers(export, found)).any(1)
    shown = []
    for row in torch.nonzero(differ)[:, 0].tolist():
        name = export.images.names[row]
        if trained.task.kind == ONE_LABEL:
            to_model = trained.name_of(int(expected[row].argmax()))
            to_file = trained.name_of(int(found[row].argmax()))
            name += f" ({to_model} to the model, {to_file} to the file)"
        shown.append(name)
    if not shown:
        return "no answer changed"
    return f"{counted(len(shown), 'answer')} changed: {some_of(shown, WORST_SHOWN)}"


def _cost(export: Export, model: Tensor, file: Tensor) -> str:
    """In points of top-1. `model`, `file`: whether each is right about each image."""
    images = export.images
    every = images.dataset.groups() if images.dataset is not None else []
    groups = [every[index] for index in images.indices] if every else []
    cost, low, high = (100 * value for value in agresti_min(model.numpy(), file.numpy(), groups=groups))
    what = "costs"
    if cost < 0:
        what = "gains"
        cost = -cost
        low, high = -high, -low
    interval = f"{100 * CONFIDENCE:.0f} % interval {low:.1f} to {high:.1f}, for {LIKE_THESE}"
    before = 100 * model.numpy().mean()
    after = 100 * file.numpy().mean()
    return f"{export.dtype} {what} {cost:.1f} points of top-1 ({interval}): {before:.2f} to {after:.2f} %"


def _worst_of(export: Export, expected: Tensor, found: Tensor, errors: Tensor, tolerance: float) -> str:
    """The error for outputs that differ too much."""
    trained = export.trained
    images = export.images
    # NaN counts as the largest difference.
    order = errors.nan_to_num(nan=torch.inf, posinf=torch.inf).flatten().argsort(descending=True)
    lines = []
    for place in order[:WORST_SHOWN].tolist():
        row, label = divmod(place, errors.shape[1])
        lines.append(
            f"  {images.names[row]}, class {trained.name_of(label)}: {float(found[row, label]):.6g} instead of "
            f"{float(expected[row, label]):.6g}"
        )
    return (
        f"the outputs differ from the model's by up to {float(errors.max()):.2g} times the largest output on "
        f"{len(found)} images {images.source}, but only {tolerance:g} is allowed (-tolerance). Largest differences:\n"
    ) + "\n".join(lines)


def times_as_fast(first: Iterator[object], second: Iterator[object]) -> float:
    """How many times as fast the second computes its next value as the first, in turns, with one thread."""

    def seconds(each: Iterator[object]) -> float:
        next(each)  # the first loads the file
        begin = time.process_time()
        number = 0
        while time.process_time() - begin < SECONDS:
            next(each)
            number += 1
        return (time.process_time() - begin) / number

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ratios = [seconds(first) / seconds(second) for _ in range(TURNS)]
    torch.set_num_threads(threads)
    return median(ratios)


INPUT = "images"
ANY_NUMBER = "batch"
DTYPES = {"int8": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TORCH_KEYS = ("pkg.", "namespace")
"""Prefixes of what torch notes at each node, paths of source files on this machine among it"""
SCOPES = "pkg.torch.onnx.name_scopes"
"""Of them: the modules around a node, and the function"""

FOR_TOOLS = ("metrics", "thresholds", "own_code", "samples")
"""Fields of meta.json that vitamp's own tools need of safetensors, besides the metadata"""


class Export:
    """A model for one file, with the options of the export."""

    def __init__(self, trained: Trained, images: CheckImages, dtype: str, with_preprocess: bool) -> None:
        self.trained = trained
        self.images = images
        self.dtype = dtype
        self.with_preprocess = with_preprocess
        self.with_resize = bool(images.any_size)
        model = trained.config.MODEL
        data = trained.config.DATA
        self.timm_name, self.timm_arguments = timm_call(model, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
        self.model = timm.create_model(self.timm_name, **self.timm_arguments)
        """timm's plain model with the trained weights, on the CPU"""
        if model.POOL is not None:
            pool_by(self.model, model.POOL)
        load_weights(self.model, trained.model.state_dict(), f"{trained.chosen.place}")
        self.model.eval().requires_grad_(False)
        self.module = _Exported(self).eval()
        """What is exported: pixels or normalised images in, fp32 logits out, calibrated if the model is"""

    @property
    def example(self) -> Tensor:
        """Two input images, because torch would fix the batch size at that of one; one, if the file takes one."""
        first = next(self.images.batches(self.trained, self.with_preprocess))
        return self.images.pixels[:1].contiguous() if self.with_resize else torch.cat([first, first])

    def tensors(self) -> dict[str, Tensor]:
        """Weights for safetensors, which refuses tensors that share memory, as those of CoaT do."""
        found = self.model.state_dict()
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}

    @property
    def input_summary(self) -> str:
        data = self.trained.config.DATA
        pixels = "uint8, pixels" if data.is_plain else "float32, as stored"
        kind = pixels if self.with_preprocess else "float32, normalised"
        size = f"N x {data.IMAGE_CHANNELS} x {in_pixels(data.IMAGE_SIZE)}"
        return f"'{INPUT}' {size} ({kind}) to '{LOGITS}' N x {self.trained.config.MODEL.NUM_CLASSES}, any N"

    def metadata(self, program: bool) -> dict[str, Any]:
        """Metadata of the file, without anything about the machine that wrote it.

        `program`: the file computes outputs, so that they are divided by the temperature; else it holds only weights.
        """
        trained = self.trained
        config = trained.config
        crop_mode, crop_pct = crop_of(config.DATA)
        chosen = trained.chosen
        by_timm = own_named("model", self.timm_name) is None
        about = {
            "made_by": MADE_BY,
            "model": config.MODEL.NAME,
            "checkpoint": chosen.place.name,
            "weights": chosen.which.name,
            "timm_name": self.timm_name if by_timm else None,
            "timm_arguments": self.timm_arguments if by_timm else None,
            "classes": chosen.classes,
            "num_classes": config.MODEL.NUM_CLASSES,
            "input": "pixels" if self.with_preprocess else "normalised",
            "dtype": self.dtype,
            **input_of(config.DATA),
            "crop_mode": crop_mode,
            "crop_pct": crop_pct,
        }
        kept = chosen.calibration
        if kept is not None and trained.calibrated:
            about["calibration"] = {"temperature": kept.temperature, "images": kept.images, "applied": program}
        thresholds = thresholds_of(trained)
        if thresholds is not None:  # else a softmax, which is what everyone expects
            about |= {"multi_label": True, "activation": "sigmoid", "class_thresholds": thresholds.tolist()}
        return about | self.images.about


class _Exported(nn.Module):
    """With -with_resize, one image in and its probabilities out."""

    def __init__(self, export: Export) -> None:
        super().__init__()
        trained = export.trained
        self.dtype = DTYPES[export.dtype]
        self.inputs = Inputs(trained.config.DATA) if export.with_preprocess or export.with_resize else nn.Identity()
        self.probabilities = trained.task.probabilities if export.with_resize else None
        self.module = export.model.to(self.dtype)
        self.temperature = trained.temperature

    def forward(self, images: Tensor) -> Tensor:
        logits = self.module(self.inputs(images).to(self.dtype)).float()
        if self.temperature != 1:
            logits = logits * (1 / self.temperature)
        return logits if self.probabilities is None else self.probabilities(logits)[0]


class Format:
    flag = "-out"
    """The flag that names the file"""

    def check(self, trained: Trained) -> None:
        """Raise UserError for a model that the format cannot hold."""

    def write(self, export: Export, file: Path) -> str:
        """Write the file and return a summary of it."""
        raise NotImplementedError

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Logits of the written file for each batch, calibrated if the model is."""
        raise NotImplementedError

    def gain(self, export: Export, file: Path) -> str:
        """How fast the file is beside the model in torch; '' if torch runs it, or if it does more than the model."""
        return ""

    def how_to_load(self, export: Export, out: Path) -> str:
        """Line of Python that loads the file, for the log; '' if it takes more than a line."""
        return ""


class _Program(Format):
    def gain(self, export: Export, file: Path) -> str:
        if export.with_resize:
            return ""
        trained = export.trained
        model = map(trained.model, itertools.repeat(trained.inputs(export.images.pixels[:1])))
        batch = next(export.images.batches(trained, export.with_preprocess))
        faster = times_as_fast(model, self.run(export, file, itertools.repeat(batch)))
        return f"{faster:.2g} times as fast as torch an image at a time (this CPU, 1 thread)"


class Onnx(_Program):
    layers: Mapping[str, str] = {}
    """Of the written file: the layer of the model that each node with weights is from"""

    def write(self, export: Export, file: Path) -> str:
        with _torch_exporter("onnx", export):
            program = torch.onnx.export(
                export.module,
                (export.example,),
                input_names=[INPUT],
                output_names=[export.images.output],
                dynamo=True,
                dynamic_shapes=None if export.with_resize else ({0: ANY_NUMBER},),
                verbose=False,
            )
        assert program is not None
        model = program.model
        model.metadata_props.update({key: json.dumps(value) for key, value in export.metadata(True).items()})
        layers: dict[str, str] = {}
        for node in model.graph.all_nodes():
            layer = _layer_of(node)
            if layer:
                layers[str(node.name)] = layer
        self.layers = layers
        _forget_notes(model.graph)
        summary = export.input_summary
        if export.images.prepend is not None:
            export.images.prepend(model)
            classes = export.trained.config.MODEL.NUM_CLASSES
            summary = f"'{IMAGE}' H x W x 3 (uint8, RGB, any size) to '{export.images.output}' {classes}"
        with raising_os_errors(file):
            program.save(str(file))
        return f"opset {model.opset_imports['']}, {summary}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        # With -with_resize, a batch is one image, and the outputs are its probabilities.
        whole = export.with_resize
        arrays = (batch[0].numpy() if whole else batch.numpy() for batch in batches)
        for one in run_onnx(str(file), file.name, export.images.output, arrays):
            yield torch.from_numpy(one[None] if whole else one)


def _forget_notes(graph: Any) -> None:
    """Remove what torch notes at each part of an ONNX graph."""
    parts = [graph, *graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        parts += [node, *node.outputs]
    for part in parts:
        for key in list(part.metadata_props):
            if key.startswith(TORCH_KEYS):
                del part.metadata_props[key]


def _layer_of(node: Any) -> str:
    """The layer whose weights a node takes; empty if it takes none."""
    weights = [value.name for value in node.inputs if value is not None and value.is_initializer()]
    if not weights:
        return ""
    if weights[0].startswith("module."):
        return weights[0].removeprefix("module.").rpartition(".")[0]
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))  # weights that were transposed have no name
    return scopes[-2].removeprefix("module.") if len(scopes) > 1 else ""


class OpenVino(Onnx):
    """Made from an ONNX file, whose metadata OpenVINO keeps as rt_info."""

    def write(self, export: Export, file: Path) -> str:
        with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
            exact = Path(folder, "exact.onnx")
            summary = super().write(export, exact)
            openvino = _openvino()
            try:
                openvino.save_model(openvino.Core().read_model(exact), file, compress_to_fp16=False)
            except Exception as error:  # OpenVINO raises RuntimeError for all
                raise TrainingError(f"-to openvino: OpenVINO cannot write the file: {first_line(error)}") from None
        return summary.partition(", ")[2]

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        # The CPUs that compute in bf16 would do so by themselves.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        try:
            model = _openvino().compile_model(file, "CPU", settings)
            for batch in batches:
                yield torch.from_numpy(model([batch.numpy()])[LOGITS].copy())
        except RuntimeError as error:
            raise TrainingError(f"{file.name}: OpenVINO cannot run the file: {first_line(error)}") from None


def _openvino() -> Any:
    """The package, without the one by which it reports its use to its makers."""
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]
    return importlib.import_module("openvino")


class Torch(_Program):
    def write(self, export: Export, file: Path) -> str:
        batch = torch.export.Dim(ANY_NUMBER, min=1)
        with _torch_exporter("torch", export):
            program = torch.export.export(export.module, (export.example,), dynamic_shapes=({0: batch},))
        for module in program.graph_module.modules():
            if isinstance(module, torch.fx.GraphModule):
                for node in module.graph.nodes:
                    node.meta.pop("stack_trace", None)  # paths of source files on this machine
        buffer = io.BytesIO()  # if the disk is full, torch's own writer kills the process
        torch.export.save(program, buffer, extra_files={f"{EXPORTED}.json": json.dumps(export.metadata(True))})
        file.write_bytes(buffer.getbuffer())
        return export.input_summary

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        return map(torch.export.load(file).module(), batches)


class Safetensors(Format):
    name = "safetensors"

    def check(self, trained: Trained) -> None:
        model = trained.config.MODEL
        own = getattr(trained.model, "global_pool", None)
        if model.POOL is not None and (model.POOL, own) != ("class", "token"):  # these two are the same
            raise UserError(f"-to {self.name}: timm's model has no MODEL.POOL {model.POOL}; use -to torch or onnx.")
        if own_named("model", model.NAME):
            what = f"timm does not have {model.NAME}, a model of your own"
            raise UserError(f"-to {self.name}: {what}; use -to torch or onnx.")

    def write(self, export: Export, file: Path) -> str:
        import safetensors.torch

        chosen = export.trained.chosen
        of_run = {key: chosen.meta[key] for key in FOR_TOOLS if key in chosen.meta}
        # One key: safetensors writes several in a different order each time.
        header = encoded({EXPORTED: export.metadata(False) | of_run | needed_by_tools(chosen)})
        with raising_os_errors(file):
            safetensors.torch.save_file(export.tensors(), file, metadata=header)
        return "weights under timm's names"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        module = timm.create_model(export.timm_name, **export.timm_arguments, checkpoint_path=str(file)).eval()
        return (module(batch) / export.trained.temperature for batch in batches)

    def how_to_load(self, export: Export, out: Path) -> str:
        given = "".join(f"{name}={value!r}, " for name, value in export.timm_arguments.items())
        return f'timm.create_model("{export.timm_name}", {given}checkpoint_path="{out}")'


FORMATS: dict[str, Format] = {"onnx": Onnx(), "openvino": OpenVino(), "torch": Torch(), "safetensors": Safetensors()}


def write_checked(kind: Format, export: Export, expected: Tensor, out: Path, tolerance: float) -> tuple[Tensor, str]:
    """Write `out` and return its logits, and what it costs and gains; leave no file if they are not as `expected`.

    It is written and checked in a temporary folder, and moved into place only if the check passes.
    """
    with writing(out, kind.flag):
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        unfinished = folder / out.name
        try:
            log.info("%s: exporting, which may take a minute ...", out.name)
            summary = kind.write(export, unfinished)
            log.info("%s: checking it, and how fast it is ...", out.name)
            with torch.no_grad():
                logits = _logits_of(kind, export, unfinished)
                words = compare(export, expected, logits, tolerance)
                gain = kind.gain(export, unfinished)
            if gain:
                words.append(gain)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            _move_into_place(folder, out)
        except TrainingError as error:
            raise TrainingError(f"{out} was not written: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    log.info("%s: %.1f MB, %s, %s", out, size / 1e6, export.dtype, summary)
    log.info("  %s", "; ".join(words))
    how = kind.how_to_load(export, out)
    if how:
        log.info("  %s", how)
    return logits, "; ".join(words[1:])


def _logits_of(kind: Format, export: Export, file: Path) -> Tensor:
    """Of the written file, on the images of the check."""
    images = export.images
    with progress_bar(len(images.pixels), "images", f"{file.name}: checking") as bar:

        def batches() -> Iterator[Tensor]:
            for batch in images.batches(export.trained, export.with_preprocess):
                yield batch
                bar.update(len(batch))

        return torch.cat(list(kind.run(export, file, batches())))


def _move_into_place(folder: Path, out: Path) -> None:
    """Move what makes the export valid last: it must not be there before the files that it needs.

    That is the file itself, which may have a second one (`files_beside`), or a folder's config. What an earlier export
    had besides is removed.
    """
    source = folder
    target = out.parent
    last = out.name
    earlier = set(files_beside(out))
    if (folder / out.name).is_dir():
        source = folder / out.name
        target = out
        last = CONFIG
        target.mkdir(exist_ok=True)
        earlier |= {target / name for name in HUB_FILES}
    moved = sorted(source.iterdir(), key=lambda path: path.name == last)
    for file in moved:
        with replacing(target / file.name) as unfinished:
            file.replace(unfinished)
    for old in earlier - {target / file.name for file in moved}:
        old.unlink(missing_ok=True)


@contextlib.contextmanager
def _torch_exporter(what: str, export: Export) -> Iterator[None]:
    """Silence torch's warnings for its developers, and turn a failed export into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # torch raises many types of its own, and those of the model
        model = export.trained.config.MODEL.NAME
        reason = first_line(error.__cause__ or error)
        raise TrainingError(f"-to {what}: torch cannot export the model {model}: {reason}") from None
