"""Export formats: what is written, how it is checked, and how its users run it.

A trained model may compute attention or patches by vitamp's own code, which leaves weights and their names alone. The
weights are loaded into timm's plain model, so that the exported graph needs none of that code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from datasets.registry import crop_of
from engine.checkpoint.folder import raising_os_errors
from engine.checkpoint.restore import load_weights
from engine.inputs.batches import Inputs, input_of
from engine.trained.model import Trained
from models.build import timm_call
from tools.common.output_file import writing
from tools.common.turns import progress_bar
from tools.common.weights import needed_by_tools
from tools.export import CONFIG, HUB_FILES
from tools.export.check import IMAGE, LOGITS, CheckImages, compare, outputs_of, run_onnx
from utils.errors import TrainingError, first_line
from utils.log import log
from vitamp.weights import EXPORTED, MADE_BY, encoded

INPUT, OUTPUT, BATCH = "images", LOGITS, "batch"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TORCH_KEYS = ("pkg.", "namespace")
"""Prefixes of what torch notes at each node, paths of source files on this machine among it"""

FOR_TOOLS = ("choices", "metrics", "thresholds", "own_code")
"""Fields of meta.json that vitamp's own tools need of safetensors, besides the metadata"""


@dataclass
class Export:
    """A model for one file, with the options of the export."""

    trained: Trained
    images: CheckImages
    dtype: str
    with_preprocess: bool
    with_resize: bool
    tolerance: float
    timm_name: str = field(init=False)
    timm_arguments: dict[str, Any] = field(init=False)
    model: nn.Module = field(init=False)
    """timm's plain model with the trained weights, on the CPU"""
    module: nn.Module = field(init=False)
    """What is exported: pixels or normalised images in, fp32 logits out, calibrated if the model is"""

    def __post_init__(self) -> None:
        config = self.trained.config
        self.timm_name, self.timm_arguments = timm_call(
            config.MODEL, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_CHANNELS
        )
        model = timm.create_model(self.timm_name, **self.timm_arguments)
        load_weights(model, self.trained.model.state_dict(), f"{self.trained.chosen.place}")
        self.model = model.eval().requires_grad_(False)
        self.module = _Exported(self).eval()

    @property
    def example(self) -> Tensor:
        """Two input images, because torch would fix the batch size at that of one; one, if the file takes one."""
        first = next(self.images.batches(self.trained, self.with_preprocess))
        return self.images.pixels[:1].contiguous() if self.with_resize else torch.cat([first, first])

    @property
    def input_summary(self) -> str:
        kind, data = "uint8, pixels" if self.with_preprocess else "float32, normalised", self.trained.config.DATA
        size = f"N x {data.IMAGE_CHANNELS} x {data.IMAGE_SIZE} x {data.IMAGE_SIZE}"
        return f"'{INPUT}' {size} ({kind}) to '{OUTPUT}' N x {self.trained.config.MODEL.NUM_CLASSES}, any N"

    def metadata(self, program: bool) -> dict[str, Any]:
        """Metadata of the file, without anything about the machine that wrote it.

        `program`: the file computes outputs, so that they are divided by the temperature; else it holds only weights.
        """
        trained, config, data = self.trained, self.trained.config, self.trained.config.DATA
        crop_mode, crop_pct = crop_of(data)
        chosen = trained.chosen
        about = {
            "made_by": MADE_BY,
            "model": config.MODEL.NAME,
            "checkpoint": chosen.place.name,
            "weights": chosen.which.name,
            "timm_name": self.timm_name,
            "timm_arguments": self.timm_arguments,
            "classes": chosen.classes,
            "num_classes": config.MODEL.NUM_CLASSES,
            "input": "pixels" if self.with_preprocess else "normalised",
            "dtype": self.dtype,
            **input_of(data),
            "crop_mode": crop_mode,
            "crop_pct": crop_pct,
        }
        if (kept := chosen.calibration) is not None and trained.calibrated:
            about["calibration"] = {"temperature": kept.temperature, "images": kept.images, "applied": program}
        return about | outputs_of(trained).metadata | self.images.about


class _Exported(nn.Module):
    """With -with_resize, one image in and its probabilities out."""

    def __init__(self, export: Export) -> None:
        super().__init__()
        trained, self.dtype = export.trained, DTYPES[export.dtype]
        takes_pixels = export.with_preprocess or export.with_resize
        self.inputs = Inputs(trained.config.DATA) if takes_pixels else nn.Identity()
        self.probabilities = trained.task.probabilities if export.with_resize else None
        self.module, self.temperature = export.model.to(self.dtype), trained.temperature

    def forward(self, images: Tensor) -> Tensor:
        logits = self.module(self.inputs(images).to(self.dtype)).float()
        logits = logits * (1 / self.temperature) if self.temperature != 1 else logits
        return logits if self.probabilities is None else self.probabilities(logits)[0]


class Format:
    name: str
    flag = "-out"
    """The flag that names the file"""
    program = False
    """Whether the file computes outputs itself, rather than holding only weights"""

    def write(self, export: Export, file: Path) -> str:
        """Write the file and return a summary of it."""
        raise NotImplementedError

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        """Logits of the written file. Those of weights alone are not calibrated."""
        raise NotImplementedError

    def how_to_load(self, export: Export, out: Path) -> str:
        """Line of Python that loads the file, for the log; '' if it takes more than a line."""
        return ""


class Onnx(Format):
    name = "onnx"
    program = True

    def write(self, export: Export, file: Path) -> str:
        whole = export.with_resize
        with _torch_exporter(self.name, export):
            program = torch.onnx.export(
                export.module,
                (export.example,),
                input_names=[INPUT],
                output_names=[export.images.output],
                dynamo=True,
                dynamic_shapes=None if whole else ({0: BATCH},),
                verbose=False,
            )
        assert program is not None
        model = program.model
        model.metadata_props.update({key: json.dumps(value) for key, value in export.metadata(True).items()})
        graph = model.graph
        nodes = list(graph.all_nodes())
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in nodes for value in node.outputs)]
        for part in (graph, *nodes, *values):
            for key in [key for key in part.metadata_props if key.startswith(TORCH_KEYS)]:
                del part.metadata_props[key]
        summary = export.input_summary
        if whole:
            from tools.export.from_image import prepend

            prepend(export.trained.config.DATA, model)
            classes = export.trained.config.MODEL.NUM_CLASSES
            summary = f"'{IMAGE}' H x W x 3 (uint8, RGB, any size) to '{export.images.output}' {classes}"
        with raising_os_errors(file):
            program.save(str(file))
        return f"opset {model.opset_imports['']}, {summary}"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        # With -with_resize, a batch is one image, and the outputs are its probabilities.
        whole, output = export.with_resize, export.images.output
        arrays = (batch[0].numpy() if whole else batch.numpy() for batch in batches)
        found = [torch.from_numpy(one) for one in run_onnx(str(file), file.name, output, arrays)]
        return torch.stack(found) if whole else torch.cat(found)


class Torch(Format):
    name = "torch"
    program = True

    def write(self, export: Export, file: Path) -> str:
        batch = torch.export.Dim(BATCH, min=1)
        with _torch_exporter(self.name, export):
            program = torch.export.export(export.module, (export.example,), dynamic_shapes=({0: batch},))
        for module in program.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)  # paths of source files on this machine
        buffer = io.BytesIO()  # if the disk is full, torch's own writer kills the process
        torch.export.save(program, buffer, extra_files={f"{EXPORTED}.json": json.dumps(export.metadata(True))})
        file.write_bytes(buffer.getbuffer())
        return export.input_summary

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        module = torch.export.load(file).module()
        return torch.cat([module(batch) for batch in batches])


class Safetensors(Format):
    name = "safetensors"

    def write(self, export: Export, file: Path) -> str:
        import safetensors.torch

        chosen, tensors = export.trained.chosen, export.model.state_dict()
        of_run = {key: chosen.meta[key] for key in FOR_TOOLS if key in chosen.meta}
        # One key: safetensors writes several in a different order each time.
        header = encoded({EXPORTED: {**export.metadata(False), **of_run, **needed_by_tools(chosen)}})
        with raising_os_errors(file):
            safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata=header)
        return "weights under timm's names"

    def run(self, export: Export, file: Path, batches: Iterable[Tensor]) -> Tensor:
        module = timm.create_model(export.timm_name, **export.timm_arguments, checkpoint_path=str(file)).eval()
        return torch.cat([module(batch) for batch in batches])

    def how_to_load(self, export: Export, out: Path) -> str:
        given = "".join(f"{name}={value!r}, " for name, value in export.timm_arguments.items())
        return f'timm.create_model("{export.timm_name}", {given}checkpoint_path="{out}")'


FORMATS: dict[str, Format] = {format.name: format for format in (Onnx(), Torch(), Safetensors())}


def write_checked(kind: Format, export: Export, expected: Tensor, out: Path) -> None:
    """Write `out` if its logits agree with `expected`; otherwise raise TrainingError and leave no file.

    It is written and checked in a temporary folder, and moved into place only if the check passes.
    """
    trained, images = export.trained, export.images
    with writing(out, kind.flag):
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            with progress_bar(len(images.pixels), "images", f"{out.name}: exporting") as bar:
                summary = kind.write(export, folder / out.name)
                bar.set_description(f"{out.name}: checking")

                def batches() -> Iterator[Tensor]:
                    for batch in images.batches(trained, export.with_preprocess):
                        yield batch
                        bar.update(len(batch))

                with torch.no_grad():
                    logits = kind.run(export, folder / out.name, batches())
                    logits = logits if kind.program else logits / trained.temperature
            agreement = compare(trained, images, expected, logits, export.tolerance)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            _move_into_place(folder, out)
        except TrainingError as error:
            raise TrainingError(f"{out} was not written: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    log.info("%s: %.1f MB, %s, %s", out, size / 1e6, export.dtype, summary)
    log.info("  %s", agreement)
    if how := kind.how_to_load(export, out):
        log.info("  %s", how)


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


@contextlib.contextmanager
def _torch_exporter(what: str, export: Export) -> Iterator[None]:
    """Silence torch's warnings for its developers, and turn a failed export into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # torch raises many types of its own, and those of the model
        model, reason = export.trained.config.MODEL.NAME, first_line(error.__cause__ or error)
        raise TrainingError(f"-to {what}: torch cannot export the model {model}: {reason}") from None
