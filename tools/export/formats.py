"""Export formats: how each file is written, and how its users run it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.checkpoint.folder import raising_os_errors
from engine.saved.trained import Trained
from tools.common.weights import needed_by_tools
from tools.export.check import LOGITS
from tools.export.model import DTYPES, ExportModule, Options, TimmModel
from utils.errors import TrainingError, UserError
from utils.record.chosen import Chosen
from utils.record.weights_file import EXPORTED, encoded

INPUT, OUTPUT, BATCH = "images", LOGITS, "batch"
TORCH_KEYS = ("pkg.", "namespace")
"""Prefixes of what torch notes at each node, paths of source files on this machine among it"""


@dataclass(frozen=True)
class Export:
    """Everything that is written into one file."""

    model: TimmModel
    module: ExportModule
    example: Tensor
    """Two input images, because torch would fix the batch size at that of one; one, if the file takes one"""
    metadata: dict[str, Any]
    trained: Trained
    options: Options

    @property
    def input_summary(self) -> str:
        kind = "uint8, pixels" if self.options.with_preprocess else "float32, normalised"
        about = self.metadata
        size = f"N x {about['channels']} x {about['image_size']} x {about['image_size']}"
        return f"'{INPUT}' {size} ({kind}) to '{OUTPUT}' N x {about['num_classes']}, any N"


class Format(ABC):
    name: str
    flag = "-out"
    """The flag that names the file"""
    program = False
    """Whether the file computes outputs itself, rather than holding only weights"""
    packages: tuple[str, ...] = ()
    """Packages besides vitamp's requirements"""

    def check_packages(self) -> None:
        """Raise UserError if a package is missing."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(f"-to {self.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")

    @abstractmethod
    def write(self, export: Export, file: Path) -> str:
        """Write the file and return a summary of it."""

    @abstractmethod
    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        """Logits of the written file. Those of weights alone are not calibrated."""

    def how_to_load(self, export: Export, out: Path) -> str:
        """Line of Python that loads the file, for the log; '' if it takes more than a line."""
        return ""


class Onnx(Format):
    name = "onnx"
    program = True
    packages = ("onnx", "onnxscript", "onnxruntime")
    output = OUTPUT
    any_number = True
    """Whether it takes any number of images at once"""

    def write(self, export: Export, file: Path) -> str:
        with _torch_exporter(self.name, export.metadata["model"]):
            program = torch.onnx.export(
                export.module,
                (export.example,),
                input_names=[INPUT],
                output_names=[self.output],
                opset_version=export.options.opset,
                dynamo=True,
                dynamic_shapes=({0: BATCH},) if self.any_number else None,
                verbose=False,
            )
        assert program is not None
        model = program.model
        model.metadata_props.update({key: json.dumps(value) for key, value in export.metadata.items()})
        for part in (model.graph, *model.graph.all_nodes(), *_values(model.graph)):
            for key in [key for key in part.metadata_props if key.startswith(TORCH_KEYS)]:
                del part.metadata_props[key]
        self.finish(export, model)
        with raising_os_errors(file):
            program.save(str(file))
        opset = model.opset_imports[""]
        if export.options.opset not in (None, opset):
            raise TrainingError(f"-opset {export.options.opset}: torch can write this model only for opset {opset}.")
        return f"opset {opset}, {self.summary(export)}"

    def finish(self, export: Export, model: Any) -> None:
        """Change the graph before it is saved."""

    def summary(self, export: Export) -> str:
        return export.input_summary

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        outputs = run_onnx(str(file), file.name, INPUT, OUTPUT, (batch.numpy() for batch in batches))
        return torch.cat([torch.from_numpy(output) for output in outputs])


class Torch(Format):
    name = "torch"
    program = True

    def write(self, export: Export, file: Path) -> str:
        batch = torch.export.Dim(BATCH, min=1)
        with _torch_exporter(self.name, export.metadata["model"]):
            program = torch.export.export(export.module, (export.example,), dynamic_shapes=({0: batch},))
        for module in program.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)  # paths of source files on this machine
        buffer = io.BytesIO()  # if the disk is full, torch's own writer kills the process
        torch.export.save(program, buffer, extra_files={f"{EXPORTED}.json": json.dumps(export.metadata)})
        file.write_bytes(buffer.getbuffer())
        return export.input_summary

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        module = torch.export.load(file).module()
        return torch.cat([module(batch) for batch in batches])


class Safetensors(Format):
    name = "safetensors"

    def write(self, export: Export, file: Path) -> str:
        import safetensors.torch

        dtype = DTYPES[export.options.dtype]
        state = export.model.module.state_dict()
        tensors = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
        with raising_os_errors(file):
            # One key: safetensors writes several in a different order each time.
            header = encoded({EXPORTED: {**export.metadata, **_tool_metadata(export.trained.chosen)}})
            safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata=header)
        return "weights under timm's names"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        import timm

        model = export.model
        module: nn.Module = timm.create_model(model.timm_name, **model.arguments, checkpoint_path=str(file))
        module.eval()
        return torch.cat([module(batch) for batch in batches])

    def how_to_load(self, export: Export, out: Path) -> str:
        return export.model.create_call(str(out))


FORMATS: dict[str, Format] = {format.name: format for format in (Onnx(), Torch(), Safetensors())}


def run_onnx(model: str | bytes, name: str, taken: str, given: str, inputs: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Outputs of a model, a file or its bytes, for each input. `name`: of the model, for errors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return [np.asarray(session.run([given], {taken: one})[0]) for one in inputs]
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise TrainingError(f"{name}: onnxruntime cannot run the file: {first_line(error)}") from None


def _tool_metadata(chosen: Chosen) -> dict[str, Any]:
    """What vitamp's own tools need besides the metadata."""
    known = {key: chosen.meta[key] for key in ("choices", "metrics", "thresholds", "own_code") if key in chosen.meta}
    return known | needed_by_tools(chosen)


@contextlib.contextmanager
def _torch_exporter(what: str, model: str) -> Iterator[None]:
    """Silence torch's warnings for its developers, and turn a failed export into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # torch raises many types of its own, and those of the model
        reason = first_line(error.__cause__ or error)
        raise TrainingError(f"-to {what}: torch cannot export the model {model}: {reason}") from None


def _values(graph: Any) -> Iterator[Any]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def first_line(error: BaseException) -> str:
    """First line of an exception's text, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
