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
from tools.export.check import chosen_images
from tools.export.formats import INPUT, CheckImages, Export, Onnx, times_as_fast
from utils.errors import TrainingError, UserError, first_line
from utils.log import log
from utils.text import counted, some_of

OPERATORS = ["Conv", "MatMul", "Gemm"]
"""ONNX operators that are computed in 8 bits"""
IMAGES = 256
"""Images to calibrate on, and to find layers that hurt"""
MOST_ERROR = 0.1
"""Largest error of the logits; beyond it, layers stay in fp32.

The error is the root of the mean square of the differences, as a fraction of the logits' standard deviation.
"""
FASTER = 1.1
"""An int8 file that is fewer times as fast as fp32 is not worth it, and the log says so."""
BLOCK = re.compile(r"\D*\d+(\.\d+)*|[^.]+")
"""Start of a layer's name that names its block, such as blocks.0; a block's layers stay in fp32 together."""


class Int8(Onnx):
    """ONNX whose layers are in 8 bits, but for those that would change the outputs too much.

    `images`: to calibrate on. `keep`: beginnings of the names of layers that stay in fp32; if it is empty, the layers
    that hurt are searched for.
    """

    def __init__(self, images: CheckImages, keep: tuple[str, ...]) -> None:
        self._images = images
        self._kept_prefixes = keep
        self._speed = ""
        self.fp32_layers: set[str] = set()
        """Names of the layers that the written file has in fp32"""

    def write(self, export: Export, file: Path) -> str:
        """Export the model to a temporary fp32 file, quantise that to `file`, and measure size and speed of both.

        Returns the summary of the fp32 file; `speed` returns what was measured.
        """
        with tempfile.TemporaryDirectory(prefix="vitamp-") as folder:
            fp32_file = Path(folder, "exact.onnx")
            summary = super().write(export, fp32_file)
            try:
                self.fp32_layers = self._quantise(export, fp32_file, file)
            except (TrainingError, UserError, OSError):
                raise
            except Exception as error:  # onnxruntime's tools raise many types
                raise TrainingError(f"-int8: onnxruntime cannot quantise the model: {first_line(error)}") from None
            # Two endless iterators that compute the outputs of one image, by either file.
            image = itertools.repeat(next(self._batches(export)))
            faster = times_as_fast(self.run(export, fp32_file, image), self.run(export, file, image))
            smaller = fp32_file.stat().st_size / file.stat().st_size
        self._speed = f"{smaller:.1f} times smaller, {faster:.2g} times as fast an image at a time (this CPU, 1 thread)"
        if faster < FASTER:
            self._speed += ": here fp32 serves as well (int8 pays for larger models, on CPUs with VNNI)"
        log.info("int8: calibrated on %s %s", counted(len(self._images.names), "image"), self._images.source)
        if self.fp32_layers:
            reason = "-keep" if self._kept_prefixes else "in 8 bits they change the outputs most"
            log.info("int8: left in fp32: %s (%s)", some_of(sorted(self.fp32_layers)), reason)
        return summary

    def _batches(self, export: Export) -> Iterator[Tensor]:
        """Yield the model's inputs for the images to calibrate on; the first batch has one image."""
        return self._images.batches(export.trained, export.with_preprocess)

    def _quantise(self, export: Export, fp32_file: Path, file: Path) -> set[str]:
        """Write `file` from the fp32 ONNX file, and return the names of the layers that it leaves in fp32.

        With -keep, these are the layers that it names. Without, all layers are in 8 bits if the error of the logits is
        small enough. Otherwise whole blocks are left in fp32, one more at a time, until it is. The first block is the
        one that causes the largest error if its layers alone are in 8 bits.
        """
        # The nodes that can be in 8 bits, their layers, and the blocks of these layers.
        nodes = {node.name for node in onnx.load(str(fp32_file)).graph.node if node.op_type in OPERATORS}
        layer_of_node = {node: layer for node, layer in self.layers.items() if node in nodes}
        all_layers = set(layer_of_node.values())
        layers_of_block: dict[str, set[str]] = {}
        for layer in layer_of_node.values():
            block = BLOCK.match(layer)[0]  # pyright: ignore[reportOptionalSubscript]
            layers_of_block.setdefault(block, set()).add(layer)

        self._check_keep(all_layers, layers_of_block)
        fp32_layers = {layer for layer in all_layers if layer.startswith(self._kept_prefixes)}  # none without -keep
        ranges = _ranges(fp32_file, self._batches(export))
        expected = torch.cat(list(self.run(export, fp32_file, self._batches(export))))

        def write_and_measure_error(layers_in_fp32: set[str]) -> float:
            """Write `file`, over an earlier one, with these layers in fp32; return its error, as MOST_ERROR says."""
            if layers_in_fp32 >= all_layers:
                raise TrainingError("-int8: no layer can be in 8 bits without changing the outputs; use fp32 or fp16.")
            int8_nodes = [node for node, layer in layer_of_node.items() if layer not in layers_in_fp32]
            _write(fp32_file, file, ranges, int8_nodes)
            outputs = torch.cat(list(self.run(export, file, self._batches(export))))
            return float((outputs - expected).square().mean().sqrt() / (expected.std() or 1.0))

        if write_and_measure_error(fp32_layers) <= MOST_ERROR or self._kept_prefixes:
            return fp32_layers
        # The error of each block: that of a file in which only its layers are in 8 bits.
        error_of_block = {
            block: write_and_measure_error(all_layers - layers_of_block[block])
            for block in progress_bar(list(layers_of_block), "blocks", "int8")
        }
        for block in sorted(error_of_block, key=lambda block: -error_of_block[block]):
            fp32_layers |= layers_of_block[block]
            if write_and_measure_error(fp32_layers) <= MOST_ERROR:
                break
        return fp32_layers

    def _check_keep(self, layers: set[str], blocks: Iterable[str]) -> None:
        """Raise UserError if -keep names a beginning that no layer has."""
        unknown = []
        for prefix in self._kept_prefixes:
            if not any(layer.startswith(prefix) for layer in layers):
                unknown.append(prefix)
        if unknown:
            block_names = some_of(sorted(blocks))
            raise UserError(f"-keep {','.join(unknown)}: no layer's name begins so; they are in {block_names}.")

    def speed(self, export: Export, file: Path) -> str:
        """Return how much smaller and faster the file is than in fp32, which `write` has measured."""
        return self._speed


def calibration_images(trained: Trained) -> CheckImages:
    """Choose training images of the run to calibrate on, and read them without augmentation."""
    try:
        dataset = split_of_run(trained, "train")
    except UserError as error:
        raise UserError(f"-int8 calibrates on the run's training images, which cannot be read: {error}") from None
    return chosen_images(dataset, IMAGES, f"of the run's {TITLES['train']}")


def reader(batches: Iterator[Tensor]) -> Any:
    """Wrap batches as onnxruntime's tools read them: `get_next` returns the next input, or None after the last."""
    inputs = ({INPUT: batch.numpy()} for batch in batches)
    return SimpleNamespace(get_next=lambda: next(inputs, None))


def _ranges(fp32_file: Path, batches: Iterator[Tensor]) -> Any:
    """Measure the smallest and largest values of each layer's inputs and outputs on these batches."""
    augmented = str(fp32_file.with_name("ranges.onnx"))
    method = CalibrationMethod.MinMax
    calibrator = create_calibrator(str(fp32_file), OPERATORS, augmented, calibrate_method=method)
    calibrator.collect_data(reader(batches))
    return calibrator.compute_data()


def _write(fp32_file: Path, file: Path, ranges: Any, nodes: list[str]) -> None:
    """Write `file` from the fp32 ONNX file with these nodes in 8 bits, without the quantiser's entries in the metadata.

    `ranges`: from `_ranges`, the smallest and largest values of each input and output of a layer.
    """
    quantizer = QDQQuantizer(
        onnx.load(str(fp32_file)),
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
    metadata = quantizer.model.model.metadata_props
    # The entries of the fp32 file, which `Export.metadata` made, do not begin so.
    quantiser_entries = [entry for entry in metadata if entry.key.startswith("onnx.")]
    for entry in quantiser_entries:
        metadata.remove(entry)
    quantizer.model.save_model_to_file(str(file))
