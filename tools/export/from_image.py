"""-to onnx -with_resize: a file that takes an image of any size, and the images it is checked on.

ONNX nodes before the model's resize and crop the image as validation does, and make it grey for a grey model.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import torch
from PIL import Image
from torch import Tensor

from datasets.base import Samples
from datasets.decoding import Reader
from datasets.given import open_given
from datasets.registry import crop_of
from engine.trained.model import Trained
from tools.export.check import reference_logits
from tools.export.formats import IMAGE, PROBABILITIES, CheckImages, run_onnx, thresholds_of
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.text import counted
from vitamp.sizes import sides

PIXELS = "pixels"
SHAPES = {"portrait": (1.1, 2.03), "landscape": (2.03, 1.1), "tiny": (0.3, 0.2), "exact": (1.0, 1.0)}
"""Shapes that images are resized to for the check: width and height, as fractions of the model's"""
RESHAPED = 4
"""Number of images that are resized to each of these shapes"""
CLEAR = 0.1
"""A prediction is clear if its probability is more than this from the second one, or from the threshold."""
OPSET = 18
"""The first ONNX version whose Resize has antialiasing"""
ADVICE = "Use -with_preprocess, and resize images as docs/export.md shows."
MODES = {"bicubic": ("cubic", ", cubic_coeff_a = -0.5, exclude_outside = 1"), "bilinear": ("linear", "")}
"""DATA.INTERPOLATION -> mode of Resize, and the attributes with which it agrees with PIL"""
SIZES = {
    "center": """
  short = Min (height, width)
  height_by_side = Mul (height, side_high)
  width_by_side = Mul (width, side_high)
  high = Div (height_by_side, short)
  wide = Div (width_by_side, short)""",
    "squash": """
  high = Identity (side_high)
  wide = Identity (side_wide)""",
    "center, not square": """
  sides = Concat <axis = 0> (side_high, side_wide)
  exact_sides = Cast <to = 11> (sides)
  stored = Concat <axis = 0> (height, width)
  exact_stored = Cast <to = 11> (stored)
  ratios = Div (exact_stored, exact_sides)
  ratio = ReduceMin <keepdims = 1> (ratios)
  exact_size = Div (exact_stored, ratio)
  rounded_size = Round (exact_size)
  whole_size = Cast <to = 7> (rounded_size)
  high, wide = Split <axis = 0, num_outputs = 2> (whole_size)""",
}
"""DATA.CROP_MODE -> nodes that compute the size before the crop, as `vitamp.resize.resized_size` does"""
GREY = """
  channel_axis = Constant <value_ints = [1]> ()
  integers = Cast <to = 6> (batch)
  weights = Constant <value = int32[1, 3, 1, 1] {19595, 38470, 7471}> ()
  half_grey = Constant <value = int32[1] {32768}> ()
  shift = Constant <value = int32[1] {65536}> ()
  weighed = Mul (integers, weights)
  total = ReduceSum <keepdims = 1> (weighed, channel_axis)
  rounded = Add (total, half_grey)
  channels = Div (rounded, shift)"""
"""Nodes that turn RGB to grey, with the weights and the rounding of PIL"""


def whole_images(trained: Trained, images: CheckImages) -> CheckImages:
    """Return the images of the check in the sizes that a file made with -with_resize takes, to replace `images`.

    They are the stored images, before validation resizes them; and the first ones resized to further shapes. Their
    pixels are those that the ONNX nodes of the file make of them. How far these differ from the pixels that validation
    makes is logged, and added to the file's metadata. Raises TrainingError if the differences change predictions.
    """
    data = trained.config.DATA
    _check_input(data)
    samples = None if images.dataset is None else images.dataset.single_images()

    # The stored images: names, functions that read them, and pixels by validation, all in the same order. Images that
    # are held in memory, and noise, have the model's size already: there, only the first ones in other shapes are used.
    readers: list[Callable[[], np.ndarray]] = []
    if samples is None:
        first_images = [_as_rgb(pixels.permute(1, 2, 0).numpy()) for pixels in images.pixels[:RESHAPED]]
        names = []
        validated_stored = images.pixels[:0]
    else:
        readers += [functools.partial(_read_whole, data, samples, index) for index in images.indices]
        first_images = [read() for read in readers[:RESHAPED]]
        names = list(images.names)
        validated_stored = images.pixels

    # The first images in other shapes, and their pixels by validation, which writes them into the rows of a tensor.
    reshaped = _resize_to_shapes(first_images, data)
    names += reshaped
    readers += [functools.partial(np.asarray, image) for image in reshaped.values()]
    validated_reshaped = torch.empty(len(reshaped), *data.shape, dtype=torch.uint8)
    write_validated = open_given([], data).pixels
    for image, row in zip(reshaped.values(), validated_reshaped, strict=True):
        write_validated(image, row)

    # The pixels of all these images by ONNX.
    resize = resize_model(data).SerializeToString()
    rows = run_onnx(resize, "resizing", PIXELS, (read() for read in readers))
    pixels = torch.cat([torch.from_numpy(row) for row in rows])
    description = f"{images.source} ({len(reshaped)} of them resized to be {', '.join(SHAPES)})"
    resized = CheckImages(pixels, names, description)
    differences = _differences(trained, torch.cat([validated_stored, validated_reshaped]), resized)
    about = {"input": IMAGE, "output": PROBABILITIES, "differences": differences}
    return replace(resized, image_readers=tuple(readers), prepend=functools.partial(prepend, data), about=about)


def _resize_to_shapes(images: list[np.ndarray], data: DataConfig) -> dict[str, np.ndarray]:
    """Resize each image to each of SHAPES; return the results by name, such as "portrait 0" of the first image."""
    model_height, model_width = sides(data.IMAGE_SIZE)
    reshaped = dict[str, np.ndarray]()
    for number, pixels in enumerate(images):
        for shape, (width_fraction, height_fraction) in SHAPES.items():
            size = (max(1, round(width_fraction * model_width)), max(1, round(height_fraction * model_height)))
            image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
            reshaped[f"{shape} {number}"] = np.asarray(image)
    return reshaped


def _differences(trained: Trained, validated: Tensor, resized: CheckImages) -> dict[str, float]:
    """Measure and log how far pixels and probabilities of images resized by ONNX differ from those of validation.

    `resized`: the images with their pixels by ONNX. `validated`: the pixels of the same images by validation. Returns
    the differences for the file's metadata. Raises TrainingError if a clear prediction differs.
    """
    # The model's probabilities for both.
    resized_by_validation = replace(resized, pixels=validated)
    expected = trained.task.probabilities(reference_logits(trained, resized_by_validation))
    probabilities = trained.task.probabilities(reference_logits(trained, resized))
    pixel_differences = (validated.short() - resized.pixels.short()).abs()
    percent = 100 * float((pixel_differences > 0).double().mean())
    worst_pixel = int(pixel_differences.max())
    worst_probability = float((expected - probabilities).abs().max())
    differ_clearly = clearly_other(thresholds_of(trained), expected, probabilities)
    if differ_clearly.any():
        first_name = resized.names[int(torch.nonzero(differ_clearly)[0])]
        count = f"{int(differ_clearly.sum())} of {counted(len(resized.names), 'image')}"
        raise TrainingError(
            f"-with_resize: resized by ONNX, {count} {resized.source} are clearly predicted otherwise than in "
            f"validation, such as {first_name}: pixels differ by up to {worst_pixel} of 255, probabilities by up to "
            f"{worst_probability:.2g}. {ADVICE}"
        )
    log.info(
        "Resized by ONNX, pixels differ from those of validation by at most %d of 255 (%.2f %% of them), probabilities "
        "by at most %.1e.",
        worst_pixel,
        percent,
        worst_probability,
    )
    return {
        "images": len(resized.names),
        "pixels": worst_pixel,
        "pixels_percent": round(percent, 4),
        "probabilities": worst_probability,
    }


def _check_input(data: DataConfig) -> None:
    """Raise UserError if the run's images are not 8-bit ones, or are cropped in a way that has no ONNX nodes here."""
    mode, crop_pct = crop_of(data)
    if not data.is_plain:
        reason = "for 8-bit grey and RGB images, and this model takes others"
        raise UserError(f"-with_resize: {reason}; use -with_preprocess.")
    if crop_pct > 1:
        raise UserError(f"-with_resize: DATA.CROP_PCT {crop_pct:g} is not supported, only up to 1. {ADVICE}")
    if mode not in SIZES:  # the modes for which this module has nodes
        raise UserError(f"-with_resize: DATA.CROP_MODE {mode} is not supported, only center and squash. {ADVICE}")


def clearly_other(thresholds: Tensor | None, expected: Tensor, probabilities: Tensor) -> Tensor:
    """Find the images that are predicted otherwise than expected, although that is clear; return a boolean per image.

    `expected`, `probabilities`: of each class, images x classes. With one label per image (`thresholds` None), the
    expected prediction is clear if its highest probability exceeds the second by more than CLEAR. With several labels,
    it is clear for a class whose expected probability is further than CLEAR from the threshold of the class.
    """
    if thresholds is None:
        first, second = expected.topk(2, dim=1).values.unbind(1)
        return (expected.argmax(1) != probabilities.argmax(1)) & (first - second > CLEAR)
    differs = (expected >= thresholds) != (probabilities >= thresholds)
    return (differs & ((expected - thresholds).abs() > CLEAR)).any(1)


def _read_whole(data: DataConfig, samples: Samples, index: int) -> np.ndarray:
    """Read a stored image as RGB in its stored size, upright and without transparency."""
    return _as_rgb(Reader(data).whole(samples.read(index)))


def _as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Repeat the channel of a grey image three times; return others as they are."""
    return pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels


def prepend(data: DataConfig, model: ir.Model) -> None:
    """Insert nodes that resize an image before those of `model`, so that it takes an image of any size.

    Without them, it takes pixels in the size that the model was trained on. Names of the new nodes begin with
    "prepare.".
    """
    resize_graph = ir.from_proto(resize_model(data)).graph
    (image,) = resize_graph.inputs  # the values at the ends of both graphs
    (pixels,) = resize_graph.outputs
    (model_input,) = model.graph.inputs
    for node in resize_graph:
        name = node.name or node.outputs[0].name
        node.name = f"prepare.{name}"
        for value in node.outputs:
            value.name = f"prepare.{value.name}"
    nodes = list(resize_graph)
    first_of_model = model.graph[0]
    # A node is in one graph at a time, so the nodes are taken out of theirs first.
    resize_graph.outputs.clear()
    resize_graph.inputs.clear()
    resize_graph.remove(nodes)
    model.graph.insert_before(first_of_model, nodes)
    # The model's nodes now take the resized pixels, and the graph takes the image.
    model_input.replace_all_uses_with(pixels)
    model.graph.inputs[0] = image


def resize_model(data: DataConfig) -> onnx.ModelProto:
    """Make an ONNX model of only the nodes that resize, crop, and turn to grey for a grey model.

    It takes `image`, H x W x 3, and returns `pixels`, 1 x C x the model's height x its width, both uint8.
    """
    mode, crop_pct = crop_of(data)
    model_height, model_width = sides(data.IMAGE_SIZE)
    # Sides that the image is resized to before its centre is cropped. To crop from its short side, it is resized so
    # that this side has the length, and the other one is longer.
    side_high = math.floor(model_height / crop_pct)
    side_wide = math.floor(model_width / crop_pct)
    if mode == "center" and side_high != side_wide:
        mode = "center, not square"

    # Parts of the text of the model. The nodes of SIZES compute the values `high` and `wide`, the size of the image
    # after resizing, from its `height` and `width`; those of `nodes_for_channels` compute `channels` from `batch`.
    nodes_for_size = SIZES[mode]
    nodes_for_channels = GREY if data.IMAGE_CHANNELS == 1 else "\n  channels = Identity (batch)"
    # As in PIL, first the columns are resized, then the rows, and each result is rounded to whole numbers. Axis 3 is
    # the width, axis 2 the height; the nodes for an axis make the value `cropped3` or `cropped2`.
    nodes_for_columns = _resize_axis(data, 3, source="floats", length="wide")
    nodes_for_rows = _resize_axis(data, 2, source="cropped3", length="high")
    return onnx.parser.parse_model(f"""
<ir_version: 8, opset_import: ["" : {OPSET}]>
prepare (uint8[H, W, 3] {IMAGE}) => (uint8[1, {data.IMAGE_CHANNELS}, {model_height}, {model_width}] {PIXELS})
{{
  size2 = Constant <value_ints = [{model_height}]> ()
  size3 = Constant <value_ints = [{model_width}]> ()
  side_high = Constant <value_ints = [{side_high}]> ()
  side_wide = Constant <value_ints = [{side_wide}]> ()
  half = Constant <value_float = 0.5> ()
  least = Constant <value_float = 0.0> ()
  most = Constant <value_float = 255.0> ()
  batch_axis = Constant <value_ints = [0]> ()
  height = Shape <start = 0, end = 1> ({IMAGE})
  width = Shape <start = 1, end = 2> ({IMAGE}){nodes_for_size}
  planes = Transpose <perm = [2, 0, 1]> ({IMAGE})
  batch = Unsqueeze (planes, batch_axis){nodes_for_channels}
  floats = Cast <to = 1> (channels)
  outer = Constant <value_ints = [1, {data.IMAGE_CHANNELS}]> ()
  sizes3 = Concat <axis = 0> (outer, height, wide)
  sizes2 = Concat <axis = 0> (outer, high, size3)
{nodes_for_columns}{nodes_for_rows}
  {PIXELS} = Cast <to = 2> (cropped2)
}}""")


def _resize_axis(data: DataConfig, axis: int, source: str, length: str) -> str:
    """Write ONNX nodes, as text, that resize along one axis and crop the centre; the result is `cropped` and the axis.

    `source`, `length`: names of ONNX values: what is resized, and its length along the axis before the crop. The nodes
    also use values that `resize_model` defines: the sizes of all axes (`sizes2` or `sizes3`), the length after the crop
    (`size2` or `size3`), the range of pixels (`least`, `most`), and 0.5 (`half`).
    """
    mode, attributes = MODES[data.INTERPOLATION]
    # Resize takes sizes of all axes: onnxruntime mistakes the attribute `axes` where it moves a Transpose.
    return f"""
  resized{axis} = Resize <antialias = 1, mode = "{mode}"{attributes}> ({source}, , , sizes{axis})
  whole{axis} = Round (resized{axis})
  clipped{axis} = Clip (whole{axis}, least, most)
  spare{axis} = Sub ({length}, size{axis})
  spare_float{axis} = Cast <to = 1> (spare{axis})
  halved{axis} = Mul (spare_float{axis}, half)
  start_float{axis} = Round (halved{axis})
  start{axis} = Cast <to = 7> (start_float{axis})
  end{axis} = Add (start{axis}, size{axis})
  axis{axis} = Constant <value_ints = [{axis}]> ()
  cropped{axis} = Slice (clipped{axis}, start{axis}, end{axis}, axis{axis})"""
