"""-to onnx -int8: weights and inputs of layers in 8 bits, calibrated on training images, by onnxruntime's own tools.

Layers that hurt stay in fp32. A verdict on labelled images says what the file costs in accuracy and gains in speed.
"""

import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import torch
from onnxruntime.quantization import CalibrationMethod, QuantType, create_calibrator
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from torch import Tensor

from datasets.base import TITLES
from engine.trained.model import Trained, split_of_run
from tools.common.turns import progress_bar
from tools.export.formats import INPUT, CheckImages, Export, Onnx, chosen_images, times_as_fast
from utils.errors import TrainingError, UserError, first_line
from utils.log import log
from utils.text import counted, some_of

OPERATORS = ["Conv", "MatMul", "Gemm"]
IMAGES = 256
"""For the ranges of what layers take, and to find those that hurt"""
MOST_ERROR = 0.1
"""Root of the mean square of the logits' errors, as a fraction of their standard deviation. Beyond, layers are kept."""
FASTER = 1.1
BLOCK = re.compile(r"\D*\d+(\.\d+)*|[^.]+")
"""Of a layer's name: layers of one block are kept together"""


class Int8(Onnx):
    """`keep`: beginnings of names of layers to be left in fp32; empty: those that are found to hurt."""

    def __init__(self, images: CheckImages, keep: tuple[str, ...]) -> None:
        self._images = images
        self._keep = keep
        self._gain = ""
        self.kept: set[str] = set()  # layers in fp32

    def write(self, export: Export, file: Path) -> str:
        with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
            exact = Path(folder, "exact.onnx")
            summary = super().write(export, exact)
            try:
                self.kept = self._quantise(export, exact, file)
            except (TrainingError, UserError, OSError):
                raise
            except Exception as error:  # onnxruntime's tools raise many types
                raise TrainingError(f"-int8: onnxruntime cannot quantise the model: {first_line(error)}") from None
            one = itertools.repeat(next(self._batches(export)))
            faster = times_as_fast(self.run(export, exact, one), self.run(export, file, one))
            smaller = exact.stat().st_size / file.stat().st_size
        self._gain = f"{smaller:.1f} times smaller, {faster:.2g} times as fast an image at a time (this CPU, 1 thread)"
        if faster < FASTER:
            self._gain += ": here fp32 serves as well (int8 pays for larger models, on CPUs with VNNI)"
        log.info("int8: calibrated on %s %s", counted(len(self._images.names), "image"), self._images.source)
        if self.kept:
            why = "-keep" if self._keep else "in 8 bits they change the outputs most"
            log.info("int8: left in fp32: %s (%s)", some_of(sorted(self.kept)), why)
        return summary

    def _batches(self, export: Export) -> Iterator[Tensor]:
        return self._images.batches(export.trained, export.with_preprocess)

    def _quantise(self, export: Export, exact: Path, file: Path) -> set[str]:
        """Write `file`, and return the layers that it leaves in fp32."""
        nodes = {node.name for node in onnx.load(str(exact)).graph.node if node.op_type in OPERATORS}
        layers = {node: layer for node, layer in self.layers.items() if node in nodes}
        blocks: dict[str, set[str]] = {}
        for layer in layers.values():
            block = BLOCK.match(layer)[0]  # pyright: ignore[reportOptionalSubscript]
            blocks.setdefault(block, set()).add(layer)
        every = set(layers.values())
        self._check_keep(every, blocks)
        kept = {layer for layer in every if layer.startswith(self._keep)}
        ranges = _ranges(exact, self._batches(export))
        expected = torch.cat(list(self.run(export, exact, self._batches(export))))

        def error_without(kept: set[str]) -> float:
            """Write `file` with these layers in fp32."""
            if kept >= every:
                raise TrainingError("-int8: no layer can be in 8 bits without changing the outputs; use fp32 or fp16.")
            _write(exact, file, ranges, [node for node, layer in layers.items() if layer not in kept])
            found = torch.cat(list(self.run(export, file, self._batches(export))))
            return float((found - expected).square().mean().sqrt() / (expected.std() or 1.0))

        if error_without(kept) <= MOST_ERROR or self._keep:
            return kept
        hurts = {block: error_without(every - blocks[block]) for block in progress_bar(list(blocks), "blocks", "int8")}
        for block in sorted(hurts, key=lambda one: -hurts[one]):
            kept |= blocks[block]
            if error_without(kept) <= MOST_ERROR:
                break
        return kept

    def _check_keep(self, layers: set[str], blocks: Iterable[str]) -> None:
        unknown = []
        for name in self._keep:
            if not any(layer.startswith(name) for layer in layers):
                unknown.append(name)
        if unknown:
            names = some_of(sorted(blocks))
            raise UserError(f"-keep {','.join(unknown)}: no layer's name begins so; they are in {names}.")

    def gain(self, export: Export, file: Path) -> str:
        return self._gain


def calibration_images(trained: Trained) -> CheckImages:
    """Training images of the run, not augmented."""
    try:
        dataset = split_of_run(trained, "train")
    except UserError as error:
        raise UserError(f"-int8 calibrates on the run's training images, which cannot be read: {error}") from None
    return chosen_images(dataset, IMAGES, f"of the run's {TITLES['train']}")


def reader(batches: Iterator[Tensor]) -> Any:
    """As onnxruntime reads inputs: `get_next` returns one, or None after the last."""
    inputs = ({INPUT: batch.numpy()} for batch in batches)
    return SimpleNamespace(get_next=lambda: next(inputs, None))


def _ranges(exact: Path, batches: Iterator[Tensor]) -> Any:
    """The smallest and largest values of what each layer takes and gives."""
    augmented = str(exact.with_name("ranges.onnx"))
    method = CalibrationMethod.MinMax
    calibrator = create_calibrator(str(exact), OPERATORS, augmented, calibrate_method=method)
    calibrator.collect_data(reader(batches))
    return calibrator.compute_data()


def _write(exact: Path, file: Path, ranges: Any, nodes: list[str]) -> None:
    quantizer = QDQQuantizer(
        onnx.load(str(exact)),
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=ranges,
        nodes_to_quantize=nodes,
        nodes_to_exclude=[],
        op_types_to_quantize=OPERATORS,
        extra_options={},
    )
    quantizer.quantize_model()
    about = quantizer.model.model.metadata_props
    notes = [one for one in about if one.key.startswith("onnx.")]  # the quantiser's; all others are JSON
    for one in notes:
        about.remove(one)
    quantizer.model.save_model_to_file(str(file))
