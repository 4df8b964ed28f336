"""scripts/export.py: the three kinds of file, each written, and run again as its users would."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.checkpoint.folder import naming_the_fault
from engine.checkpoint.weights_file import EXPORTED
from tools.export.model import DTYPES, Plain, Whole, Wishes
from utils.errors import TrainingError, UserError

INPUT, OUTPUT, BATCH, ABOUT = "images", "logits", "batch", EXPORTED
TRIED_WITH = 2
"""Images in the example: of one, torch would conclude that it is always one."""
OWN_MARKS = "pkg."
"""What torch notes at each node begins so; the places of source files on this machine are among it."""


@dataclass(frozen=True)
class Task:
    """What is to be written."""

    plain: Plain
    whole: Whole
    example: Tensor
    """Two images as the file takes them"""
    about: dict[str, Any]
    needed: dict[str, Any]
    """What vitamp's own tools need besides, to take a file of weights for a trained model"""
    wishes: Wishes


class Format(Protocol):
    """One kind of file."""

    name: str

    def require(self) -> None:
        """UserError where a package is missing."""
        ...

    def write(self, task: Task, file: Path) -> str:
        """Returns what is to be said of the file."""
        ...

    def run(self, task: Task, file: Path, batches: Iterable[Tensor]) -> Tensor:
        """The logits by what is in the file alone."""
        ...


class Onnx:
    name = "onnx"

    def require(self) -> None:
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(f"-to onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")

    def write(self, task: Task, file: Path) -> str:
        with _translating(self.name, task.about["model"]):
            program = torch.onnx.export(
                task.whole,
                (task.example,),
                input_names=[INPUT],
                output_names=[OUTPUT],
                opset_version=task.wishes.opset,
                dynamo=True,
                dynamic_shapes=({0: BATCH},),
                verbose=False,
            )
        assert program is not None
        model = program.model
        model.metadata_props.update({key: json.dumps(value) for key, value in task.about.items()})
        for part in (model.graph, *model.graph.all_nodes(), *_values(model.graph)):
            for key in [key for key in part.metadata_props if key.startswith((OWN_MARKS, "namespace"))]:
                del part.metadata_props[key]
        with naming_the_fault(file):
            program.save(str(file))
        opset = model.opset_imports[""]
        if task.wishes.opset not in (None, opset):
            raise TrainingError(f"-opset {task.wishes.opset}: this model could only be written for opset {opset}.")
        return f"opset {opset}, {_input_words(task)}"

    def run(self, task: Task, file: Path, batches: Iterable[Tensor]) -> Tensor:  # noqa: ARG002
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors only
        try:
            session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            outputs = [session.run([OUTPUT], {INPUT: batch.numpy()})[0] for batch in batches]
        except Exception as error:  # it has a dozen kinds of its own, below nothing else
            raise TrainingError(f"{file.name}: onnxruntime does not run what was written: {_first(error)}") from None
        return torch.cat([torch.from_numpy(output) for output in outputs])


class Torch:
    name = "torch"

    def require(self) -> None:
        """Nothing."""

    def write(self, task: Task, file: Path) -> str:
        batch = torch.export.Dim(BATCH, min=1)
        with _translating("torch.export", task.about["model"]):
            program = torch.export.export(task.whole, (task.example,), dynamic_shapes=({0: batch},))
        for module in program.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)  # places of source files on this machine
        held = io.BytesIO()  # where the disk refuses, what torch writes to it by itself ends the process
        torch.export.save(program, held, extra_files={f"{ABOUT}.json": json.dumps(task.about)})
        file.write_bytes(held.getbuffer())
        return _input_words(task)

    def run(self, task: Task, file: Path, batches: Iterable[Tensor]) -> Tensor:  # noqa: ARG002
        module = torch.export.load(file).module()
        return torch.cat([module(batch) for batch in batches])


class Safetensors:
    name = "safetensors"

    def require(self) -> None:
        """Nothing."""

    def write(self, task: Task, file: Path) -> str:
        import safetensors.torch

        dtype = DTYPES[task.wishes.dtype]
        state = task.plain.module.state_dict()
        tensors = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
        with naming_the_fault(file):
            # One key, since several would come in another order each time.
            header = {ABOUT: json.dumps({**task.about, **task.needed})}
            safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata=header)
        return "weights by timm's names"

    def run(self, task: Task, file: Path, batches: Iterable[Tensor]) -> Tensor:
        import timm

        model: nn.Module = timm.create_model(task.plain.timm_name, **task.plain.arguments, checkpoint_path=str(file))
        model.eval()
        return torch.cat([model(batch) for batch in batches])


FORMATS: dict[str, Format] = {kind.name: kind for kind in (Onnx(), Torch(), Safetensors())}


@contextlib.contextmanager
def _translating(what: str, model: str) -> Iterator[None]:
    """Without torch's remarks to those who work on it; where it gives up, the first line of why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # torch has many kinds of its own, and passes on those of the model
        reason = _first(error.__cause__ or error)
        raise TrainingError(f"-to {what}: torch cannot translate the model {model}: {reason}") from None


def _values(graph: Any) -> Iterator[Any]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _input_words(task: Task) -> str:
    about, kind = task.about, "uint8, pixels" if task.wishes.with_preprocess else "float32, normalised"
    size = f"N x {about['channels']} x {about['image_size']} x {about['image_size']}"
    return f"'{INPUT}' {size} ({kind}) to '{OUTPUT}' N x {about['num_classes']}, any N"
