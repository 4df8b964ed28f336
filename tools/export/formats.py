"""Export formats: how each kind of file is written, run and loaded.

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
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from datasets import ImageDataset
from datasets.registry import crop_of
from engine.checkpoint.folder import raising_os_errors
from engine.checkpoint.restore import load_weights
from engine.inputs.batches import Inputs, input_of
from engine.trained.model import Trained
from models.build import timm_call
from tools.common.weights import needed_by_tools
from utils.errors import TrainingError, UserError, first_line
from vitamp.metrics import ONE_LABEL
from vitamp.pooling import pool_by
from vitamp.registry import own_named
from vitamp.sizes import in_pixels
from vitamp.weights import EXPORTED, MADE_BY, encoded

INPUT = "images"
LOGITS = "logits"
IMAGE = "image"
"""Input of a file made with -with_resize, which takes one image of any size"""
PROBABILITIES = "probabilities"
"""Output of such a file"""
BATCH = 32
ANY_NUMBER = "batch"
"""Name of the dimension whose size is free"""
DTYPES = {"int8": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""-dtype -> dtype of the model that is exported; int8 files are made from an fp32 one"""
TORCH_KEYS = ("pkg.", "namespace")
"""Prefixes of the metadata that torch adds to each node; it includes paths of source files on this machine"""
SCOPES = "pkg.torch.onnx.name_scopes"
"""Entry of that metadata with the modules around a node, and the function"""
FOR_TOOLS = ("metrics", "thresholds", "own_code", "samples")
"""Fields of meta.json that vitamp's own tools need of safetensors, besides the metadata"""
TURNS = 7
"""Number of times that each of two programs is timed, alternately"""
SECONDS = 0.1
"""Processor time that each timing takes at least"""


@dataclass(frozen=True)
class CheckImages:
    """Images on which an exported file is compared with the trained model."""

    pixels: Tensor
    """As in a batch, N x C x S x S. With -with_resize: as the ONNX nodes of the file resize the images"""
    names: list[str]
    source: str
    """Where the images are from, for the log: of the run's validation split"""
    dataset: ImageDataset | None = None
    """None if the images are generated noise, or were resized for -with_resize"""
    indices: tuple[int, ...] = ()
    """Index of each image in `dataset`"""
    labels: Tensor | None = None
    """None if the labels are unknown"""
    image_readers: tuple[Callable[[], np.ndarray], ...] = ()
    """With -with_resize: functions that each return an image of any size, H x W x 3. Else empty"""
    prepend: Callable[[Any], None] | None = None
    """With -with_resize: inserts nodes that resize one image before those of an ONNX model"""
    about: dict[str, Any] = field(default_factory=dict)
    """With -with_resize: entries that the file's metadata has besides"""

    @property
    def output(self) -> str:
        """Name of the file's output."""
        return PROBABILITIES if self.image_readers else LOGITS

    def batches(self, trained: Trained, with_preprocess: bool) -> Iterator[Tensor]:
        """Yield the inputs on which the exported file is checked, batch by batch.

        A file made with -with_resize takes one image per call, of any size. For all others, the first batch has one
        image and the next ones have 32, since the file must take any number. `with_preprocess`: whether the file takes
        pixels and normalises them itself.
        """
        if self.image_readers:
            for read_image in self.image_readers:
                yield torch.from_numpy(np.array(read_image()))[None]
            return
        for pixels in self.pixels[:1], *self.pixels[1:].split(BATCH):
            if len(pixels):  # with a single image, the second batch would be empty
                yield (pixels if with_preprocess else trained.inputs(pixels)).contiguous()


def thresholds_of(trained: Trained) -> Tensor | None:
    """Return the probability from which a class is predicted, for each class of a model with several labels per image.

    None for a model with one label per image: the class with the highest output is its answer.
    """
    if trained.task.kind == ONE_LABEL:
        return None
    thresholds, _sentence = trained.thresholds()
    return torch.tensor(thresholds, dtype=torch.float64)


class Export:
    """timm's plain model with the trained weights, ready to be written to one file, and the options of the export."""

    def __init__(self, trained: Trained, images: CheckImages, dtype: str, with_preprocess: bool) -> None:
        """Build timm's plain model with the trained weights, and the module to export.

        `images`: those of the check, of which the first is also the example that is traced. `dtype`: a key of DTYPES.
        `with_preprocess`: whether the file takes pixels and normalises them itself.
        """
        self.trained = trained
        self.images = images
        self.dtype = dtype
        self.with_preprocess = with_preprocess
        self.with_resize = len(images.image_readers) > 0
        model = trained.config.MODEL
        data = trained.config.DATA
        # The call timm.create_model(name, **arguments) that builds the model.
        self.timm_name, self.timm_arguments = timm_call(model, data.IMAGE_SIZE, data.IMAGE_CHANNELS)
        self.model = timm.create_model(self.timm_name, **self.timm_arguments)
        """timm's plain model with the trained weights, on the CPU"""
        if model.POOL is not None:
            pool_by(self.model, model.POOL)
        load_weights(self.model, trained.model.state_dict(), f"{trained.chosen.place}")
        self.model.eval().requires_grad_(False)
        self.module = _Exported(self).eval()
        """The module to export: pixels or normalised images in, fp32 logits out, calibrated if the model is"""

    @property
    def example(self) -> Tensor:
        """Input with which torch traces the model: two images, or one with -with_resize.

        A file made with -with_resize takes one image. All others take any number, but torch would fix the batch size if
        it traced a batch of one.
        """
        if self.with_resize:
            return self.images.pixels[:1].contiguous()
        first = next(self.images.batches(self.trained, self.with_preprocess))
        return torch.cat([first, first])

    def tensors(self) -> dict[str, Tensor]:
        """Copy the weights for safetensors, which refuses tensors that share memory, as those of CoaT do."""
        weights = self.model.state_dict()
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}

    @property
    def input_summary(self) -> str:
        """Shapes and types of the file's input and output, for the log."""
        data = self.trained.config.DATA
        kind = "float32, normalised"
        if self.with_preprocess:
            kind = "uint8, pixels" if data.is_plain else "float32, as stored"
        size = f"N x {data.IMAGE_CHANNELS} x {in_pixels(data.IMAGE_SIZE)}"
        return f"'{INPUT}' {size} ({kind}) to '{LOGITS}' N x {self.trained.config.MODEL.NUM_CLASSES}, any N"

    def metadata(self, program: bool) -> dict[str, Any]:
        """Return the metadata of the file, which has nothing about the machine that wrote it.

        `program`: True for a file that computes outputs and divides them by the temperature of the calibration, False
        for one that holds only weights. The metadata say whether the temperature is applied.
        """
        trained = self.trained
        config = trained.config
        crop_mode, crop_pct = crop_of(config.DATA)
        chosen = trained.chosen
        is_of_timm = own_named("model", self.timm_name) is None  # and not a model of the user's own code
        metadata = {
            "made_by": MADE_BY,
            "model": config.MODEL.NAME,
            "checkpoint": chosen.place.name,
            "weights": chosen.which.name,
            "timm_name": self.timm_name if is_of_timm else None,
            "timm_arguments": self.timm_arguments if is_of_timm else None,
            "classes": chosen.classes,
            "num_classes": config.MODEL.NUM_CLASSES,
            "input": "pixels" if self.with_preprocess else "normalised",
            "dtype": self.dtype,
            **input_of(config.DATA),
            "crop_mode": crop_mode,
            "crop_pct": crop_pct,
        }
        fitted = chosen.calibration
        if fitted is not None and trained.calibrated:
            metadata["calibration"] = {"temperature": fitted.temperature, "images": fitted.images, "applied": program}
        # Without thresholds, the model has one label per image and a softmax, which is what everyone expects.
        thresholds = thresholds_of(trained)
        if thresholds is not None:
            metadata |= {"multi_label": True, "activation": "sigmoid", "class_thresholds": thresholds.tolist()}
        return metadata | self.images.about


class _Exported(nn.Module):
    """The module that torch traces: preprocessing if it is wanted, the model in its dtype, and the temperature.

    It returns fp32 logits of a batch. With -with_resize, it takes one image and returns its probabilities.
    """

    def __init__(self, export: Export) -> None:
        """Assemble the steps: preprocessing, model, and the conversion of logits to probabilities or None."""
        super().__init__()
        trained = export.trained
        self.dtype = DTYPES[export.dtype]
        takes_pixels = export.with_preprocess or export.with_resize  # and not normalised images
        self.inputs = Inputs(trained.config.DATA) if takes_pixels else nn.Identity()
        self.module = export.model.to(self.dtype)  # `_layer_of` knows this name
        self.temperature = trained.temperature
        self.probabilities = trained.task.probabilities if export.with_resize else None

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch of images; with -with_resize, the probabilities of one image."""
        logits = self.module(self.inputs(images).to(self.dtype)).float()
        if self.temperature != 1:
            logits = logits * (1 / self.temperature)
        return logits if self.probabilities is None else self.probabilities(logits)[0]


class Format:
    """A kind of file that a model can be exported to: how it is written, run and loaded."""

    flag = "-out"
    """The flag that names the file"""

    def check(self, trained: Trained) -> None:
        """Raise UserError for a model that the format cannot hold."""

    def write(self, export: Export, file: Path) -> str:
        """Write the file and return a summary of it."""
        raise NotImplementedError

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the logits that the written file gives for each batch, calibrated if the model is.

        With -with_resize, they are the probabilities of one image. A batch is computed when it is asked for.
        """
        raise NotImplementedError

    def speed(self, export: Export, file: Path) -> str:
        """Say how fast the file is beside the model in torch.

        Returns '' if torch runs the file, or if the file does more than the model.
        """
        return ""

    def how_to_load(self, export: Export, out: Path) -> str:
        """Return the line of Python that loads the file `out`, for the log; '' if it takes more than a line."""
        return ""


class _Program(Format):
    """A format whose file computes outputs by itself, so that its speed can be measured."""

    def speed(self, export: Export, file: Path) -> str:
        """Time the file against the model in torch, one image at a time; return the words for the log.

        '' with -with_resize, because the file then does more than the model.
        """
        if export.with_resize:
            return ""
        trained = export.trained
        # Two endless iterators that compute outputs of the first image: by the model in torch, and by the file.
        model_input = trained.inputs(export.images.pixels[:1])
        outputs_of_torch = map(trained.model, itertools.repeat(model_input))
        file_input = next(export.images.batches(trained, export.with_preprocess))
        outputs_of_file = self.run(export, file, itertools.repeat(file_input))
        ratio = times_as_fast(outputs_of_torch, outputs_of_file)
        return f"{ratio:.2g} times as fast as torch an image at a time (this CPU, 1 thread)"


def times_as_fast(slow: Iterator[object], fast: Iterator[object]) -> float:
    """Measure how many times as fast the program `fast` is as the program `slow`, each with one thread.

    A program is an endless iterator that computes each value when it is asked for it. They are timed alternately, in
    processor time, and the median of the ratios is returned: 2.0 if `fast` takes half the time of `slow`.
    """

    def seconds_per_value(program: Iterator[object]) -> float:
        next(program)  # not timed, since the first value also loads the file
        begin = time.process_time()
        number = 0
        while time.process_time() - begin < SECONDS:
            next(program)
            number += 1
        return (time.process_time() - begin) / number

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ratios = [seconds_per_value(slow) / seconds_per_value(fast) for _ in range(TURNS)]
    torch.set_num_threads(threads)
    return median(ratios)


class Onnx(_Program):
    """ONNX, written by torch's exporter and run by ONNX Runtime."""

    layers: Mapping[str, str] = {}
    """Of the written file: the layer of the model that each node with weights is from, for files in 8 bits"""

    def write(self, export: Export, file: Path) -> str:
        """Export the model to an ONNX file and return a summary of it; note in `layers` which layer each node is from.

        With -with_resize, nodes that resize one image of any size come before those of the model.
        """
        # The first dimension, the batch, is free. With -with_resize, the model gets one image.
        dynamic_shapes = None if export.with_resize else ({0: ANY_NUMBER},)
        with _torch_exporter_errors("onnx", export):
            program = torch.onnx.export(
                export.module,
                (export.example,),
                input_names=[INPUT],
                output_names=[export.images.output],
                dynamo=True,
                dynamic_shapes=dynamic_shapes,
                verbose=False,
            )
        assert program is not None
        model = program.model
        model.metadata_props.update({key: json.dumps(value) for key, value in export.metadata(program=True).items()})

        # Torch's metadata, which is removed afterwards, says which layers the nodes are from.
        layers: dict[str, str] = {}
        for node in model.graph.all_nodes():
            layer = _layer_of(node)
            if layer:
                layers[str(node.name)] = layer
        self.layers = layers
        _remove_torch_metadata(model.graph)

        summary = export.input_summary
        if export.images.prepend is not None:
            export.images.prepend(model)
            classes = export.trained.config.MODEL.NUM_CLASSES
            summary = f"'{IMAGE}' H x W x 3 (uint8, RGB, any size) to '{export.images.output}' {classes}"
        with raising_os_errors(file):
            program.save(str(file))
        return f"opset {model.opset_imports['']}, {summary}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the outputs of the ONNX file for each batch."""
        # With -with_resize, a batch is one image, and the outputs are its probabilities.
        single = export.with_resize
        arrays = (batch[0].numpy() if single else batch.numpy() for batch in batches)
        for output in run_onnx(str(file), file.name, export.images.output, arrays):
            yield torch.from_numpy(output[None] if single else output)


def run_onnx(model: str | bytes, name: str, output: str, inputs: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Run an ONNX model that has one input on the CPU, and yield its output for each of `inputs`.

    `model`: the path of a file, or the bytes of one. `name`: of the model, for errors. `output`: name of the output.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        (model_input,) = session.get_inputs()
        for array in inputs:
            yield np.asarray(session.run([output], {model_input.name: array})[0])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise TrainingError(f"{name}: onnxruntime cannot run the file: {first_line(error)}") from None


def _remove_torch_metadata(graph: Any) -> None:
    """Remove the metadata that torch adds to each part of an ONNX graph."""
    parts = [graph, *graph.inputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        parts += [node, *node.outputs]
    for part in parts:
        for key in list(part.metadata_props):
            if key.startswith(TORCH_KEYS):
                del part.metadata_props[key]


def _layer_of(node: Any) -> str:
    """Return the name of the layer whose weights an ONNX node takes, such as blocks.0.mlp.fc1; '' if it takes none."""
    weights = [value.name for value in node.inputs if value is not None and value.is_initializer()]
    if not weights:
        return ""
    first_weight, *_ = weights
    if first_weight.startswith("module."):  # module.blocks.0.mlp.fc1.weight
        layer, _dot, _tensor = first_weight.removeprefix("module.").rpartition(".")
        return layer
    # Weights that were transposed have no name. But the node has the scopes that it was computed in: the modules around
    # it, of which the last is the layer, and then the function, as in ["", "module", ..., "module.head", "linear"].
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    if len(scopes) < 2:
        return ""
    *_, layer, _function = scopes
    return layer.removeprefix("module.")


class OpenVino(Onnx):
    """OpenVINO's own format, made from an ONNX file, whose metadata OpenVINO keeps as rt_info."""

    def write(self, export: Export, file: Path) -> str:
        """Export the model to a temporary ONNX file, and convert that to OpenVINO's two files.

        Returns the summary of the ONNX file without its first part, the opset.
        """
        with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
            onnx_file = Path(folder, "exact.onnx")
            onnx_summary = super().write(export, onnx_file)
            openvino = _openvino()
            try:
                openvino.save_model(openvino.Core().read_model(onnx_file), file, compress_to_fp16=False)
            except Exception as error:  # OpenVINO raises RuntimeError for all
                raise TrainingError(f"-to openvino: OpenVINO cannot write the file: {first_line(error)}") from None
        _opset, _comma, summary = onnx_summary.partition(", ")
        return summary

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the logits of the OpenVINO file for each batch, computed in fp32."""
        # CPUs that can compute in bf16 would do so by default.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        try:
            model = _openvino().compile_model(file, "CPU", settings)
            for batch in batches:
                yield torch.from_numpy(model([batch.numpy()])[LOGITS].copy())
        except RuntimeError as error:
            raise TrainingError(f"{file.name}: OpenVINO cannot run the file: {first_line(error)}") from None


def _openvino() -> Any:
    """Import the package openvino without openvino_telemetry, by which it reports its use to its makers."""
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType]
    return importlib.import_module("openvino")


class Torch(_Program):
    """A torch.export program (.pt2)."""

    def write(self, export: Export, file: Path) -> str:
        """Export the model to a torch.export program, without paths of source files on this machine."""
        any_number = torch.export.Dim(ANY_NUMBER, min=1)  # the first dimension, the batch, is free
        with _torch_exporter_errors("torch", export):
            program = torch.export.export(export.module, (export.example,), dynamic_shapes=({0: any_number},))
        for module in program.graph_module.modules():
            if isinstance(module, torch.fx.GraphModule):
                for node in module.graph.nodes:
                    node.meta.pop("stack_trace", None)  # paths of source files on this machine
        # Written to memory first: if the disk is full, torch's own writer kills the process instead of raising OSError.
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={f"{EXPORTED}.json": json.dumps(export.metadata(program=True))})
        file.write_bytes(buffer.getbuffer())
        return export.input_summary

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Compute the logits of the torch.export program for each batch."""
        return map(torch.export.load(file).module(), batches)


@contextlib.contextmanager
def _torch_exporter_errors(format_name: str, export: Export) -> Iterator[None]:
    """Turn any error of torch's exporter into a TrainingError of one line, and silence its warnings for developers.

    `format_name`: the value of -to, for the error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # torch raises many types of its own, and those of the model
        model = export.trained.config.MODEL.NAME
        reason = first_line(error.__cause__ or error)
        raise TrainingError(f"-to {format_name}: torch cannot export the model {model}: {reason}") from None


class Safetensors(Format):
    """Weights under timm's names, for timm.create_model."""

    name = "safetensors"
    """The format's name in -to"""

    def check(self, trained: Trained) -> None:
        """Raise UserError for a model that timm cannot build: with pooling that it lacks, or of the user's own code."""
        model = trained.config.MODEL
        timm_pool = getattr(trained.model, "global_pool", None)
        # timm's model has the pooling of MODEL.POOL only if that is `class`, which timm calls token.
        has_pool_of_timm = model.POOL is None or (model.POOL == "class" and timm_pool == "token")
        if not has_pool_of_timm:
            raise UserError(f"-to {self.name}: timm's model has no MODEL.POOL {model.POOL}; use -to torch or onnx.")
        if own_named("model", model.NAME):
            reason = f"timm does not have {model.NAME}, a model of your own"
            raise UserError(f"-to {self.name}: {reason}; use -to torch or onnx.")

    def write(self, export: Export, file: Path) -> str:
        """Write the weights, with a header that timm ignores but vitamp's own tools, such as predict.py, read."""
        import safetensors.torch

        chosen = export.trained.chosen
        meta_fields = {key: chosen.meta[key] for key in FOR_TOOLS if key in chosen.meta}
        # All fields are under one key: safetensors writes several keys in a different order each time.
        fields = export.metadata(program=False) | meta_fields | needed_by_tools(chosen)
        header = encoded({EXPORTED: fields})
        with raising_os_errors(file):
            safetensors.torch.save_file(export.tensors(), file, metadata=header)
        return "weights under timm's names"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Compute the logits of timm's model for each batch.

        The temperature is not in the file, so it is applied here.
        """
        module = timm.create_model(export.timm_name, **export.timm_arguments, checkpoint_path=str(file)).eval()
        return (module(batch) / export.trained.temperature for batch in batches)

    def how_to_load(self, export: Export, out: Path) -> str:
        arguments = "".join(f"{name}={value!r}, " for name, value in export.timm_arguments.items())
        return f'timm.create_model("{export.timm_name}", {arguments}checkpoint_path="{out}")'


FORMATS: dict[str, Format] = {"onnx": Onnx(), "openvino": OpenVino(), "torch": Torch(), "safetensors": Safetensors()}
