"""ONNX nodes that prepare an image of any size as validation does: resize, crop and, for a grey model, grey."""

from __future__ import annotations

import math

import onnx
import onnx.parser
import onnx_ir as ir

from datasets.given import crop_of
from utils.config.data import DataConfig
from utils.errors import UserError

IMAGE, PIXELS = "image", "pixels"
OPSET = 18
"""The first with antialiasing"""
ADVICE = "Use -with_preprocess, and resize images as docs/export.md shows."
MODES = {"bicubic": ("cubic", ", cubic_coeff_a = -0.5, exclude_outside = 1"), "bilinear": ("linear", "")}
"""DATA.INTERPOLATION -> mode of Resize, and the attributes with which it agrees with PIL"""
SIZES = {
    "center": """
  short = Min (height, width)
  height_by_side = Mul (height, side)
  width_by_side = Mul (width, side)
  high = Div (height_by_side, short)
  wide = Div (width_by_side, short)""",
    "squash": """
  high = Identity (side)
  wide = Identity (side)""",
}
"""DATA.CROP_MODE -> nodes that compute the size before the crop, as `crops.resized_size` does"""
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
"""PIL's weights"""


def check_resizable(data: DataConfig) -> None:
    """Raise UserError if the nodes cannot prepare images as the model needs them."""
    mode, _ = crop_of(data)
    if mode not in SIZES:
        raise UserError(f"-with_resize: DATA.CROP_MODE {mode} is not supported, only {' and '.join(SIZES)}. {ADVICE}")


def resize_model(data: DataConfig) -> onnx.ModelProto:
    """A model of these nodes alone: `image`, H x W x 3, to `pixels`, 1 x C x S x S, both uint8."""
    mode, crop_pct = crop_of(data)
    size, side = data.IMAGE_SIZE, math.floor(data.IMAGE_SIZE / crop_pct)
    channels = GREY if data.IMAGE_CHANNELS == 1 else "\n  channels = Identity (batch)"
    # As PIL: first the columns, then the rows, each rounded to whole numbers.
    return onnx.parser.parse_model(f"""
<ir_version: 8, opset_import: ["" : {OPSET}]>
prepare (uint8[H, W, 3] {IMAGE}) => (uint8[1, {data.IMAGE_CHANNELS}, {size}, {size}] {PIXELS})
{{
  size = Constant <value_ints = [{size}]> ()
  side = Constant <value_ints = [{side}]> ()
  half = Constant <value_float = 0.5> ()
  least = Constant <value_float = 0.0> ()
  most = Constant <value_float = 255.0> ()
  batch_axis = Constant <value_ints = [0]> ()
  height = Shape <start = 0, end = 1> ({IMAGE})
  width = Shape <start = 1, end = 2> ({IMAGE}){SIZES[mode]}
  planes = Transpose <perm = [2, 0, 1]> ({IMAGE})
  batch = Unsqueeze (planes, batch_axis){channels}
  floats = Cast <to = 1> (channels)
  outer = Constant <value_ints = [1, {data.IMAGE_CHANNELS}]> ()
  sizes3 = Concat <axis = 0> (outer, height, wide)
  sizes2 = Concat <axis = 0> (outer, high, size){_along(data, 3, "floats", "wide")}{_along(data, 2, "cropped3", "high")}
  {PIXELS} = Cast <to = 2> (cropped2)
}}""")


def _along(data: DataConfig, axis: int, source: str, length: str) -> str:
    """Nodes that resize `source` to this length along an axis, and crop its centre, to `cropped` and the axis."""
    mode, exact = MODES[data.INTERPOLATION]
    # Sizes of all axes: onnxruntime mistakes the attribute `axes` where it moves a Transpose.
    return f"""
  resized{axis} = Resize <antialias = 1, mode = "{mode}"{exact}> ({source}, , , sizes{axis})
  whole{axis} = Round (resized{axis})
  clipped{axis} = Clip (whole{axis}, least, most)
  spare{axis} = Sub ({length}, size)
  spare_float{axis} = Cast <to = 1> (spare{axis})
  halved{axis} = Mul (spare_float{axis}, half)
  start_float{axis} = Round (halved{axis})
  start{axis} = Cast <to = 7> (start_float{axis})
  end{axis} = Add (start{axis}, size)
  axis{axis} = Constant <value_ints = [{axis}]> ()
  cropped{axis} = Slice (clipped{axis}, start{axis}, end{axis}, axis{axis})"""


def prepend(data: DataConfig, model: ir.Model) -> None:
    """Let `model`, which takes pixels of the model's size, take an image of any size."""
    nodes = ir.from_proto(resize_model(data)).graph
    image, made, (taken,) = nodes.inputs[0], nodes.outputs[0], model.graph.inputs
    for node in nodes:
        node.name = f"prepare.{node.name or node.outputs[0].name}"
        for value in node.outputs:
            value.name = f"prepare.{value.name}"
    moved, first = list(nodes), model.graph[0]
    nodes.outputs.clear()
    nodes.inputs.clear()
    nodes.remove(moved)
    model.graph.insert_before(first, moved)
    taken.replace_all_uses_with(made)
    model.graph.inputs[0] = image
