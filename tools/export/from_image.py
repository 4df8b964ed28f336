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
from tools.export.formats import IMAGE, PROBABILITIES, CheckImages, reference_logits, run_onnx, thresholds_of
from utils.config.data import DataConfig
from utils.errors import TrainingError, UserError
from utils.log import log
from utils.text import counted
from vitamp.sizes import sides

PIXELS = "pixels"
SHAPES = {"portrait": (1.1, 2.03), "landscape": (2.03, 1.1), "tiny": (0.3, 0.2), "exact": (1.0, 1.0)}
"""Width and height of made images, as fractions of the model's"""
RESHAPED = 4
"""Images that are made into these shapes"""
CLEAR = 0.1
"""Distance between probabilities from which on a prediction is clear"""
OPSET = 18
"""The first with antialiasing"""
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
"""PIL's weights"""


def whole_images(trained: Trained, images: CheckImages) -> CheckImages:
    """The same images before validation resizes them, and some of them in other shapes.

    Raises TrainingError if the pixels of the file lead to other predictions than those of validation.
    """
    data = trained.config.DATA
    _check_input(data)
    stored = None if images.dataset is None else images.dataset.single_images()
    sources: list[Callable[[], np.ndarray]] = []
    if stored is None:  # held in memory, or noise: only made images have another size
        bases = [_rgb(row.permute(1, 2, 0).numpy()) for row in images.pixels[:RESHAPED]]
        names = []
        own = images.pixels[:0]
    else:
        sources += [functools.partial(_decoded, data, stored, index) for index in images.indices]
        bases = [source() for source in sources[:RESHAPED]]
        names = list(images.names)
        own = images.pixels
    made = _reshaped(bases, data)
    names += made
    sources += [functools.partial(np.asarray, image) for image in made.values()]
    validated = torch.empty(len(made), *data.shape, dtype=torch.uint8)
    validation = open_given([], data).pixels
    for image, row in zip(made.values(), validated, strict=True):
        validation(image, row)
    resize = resize_model(data).SerializeToString()
    rows = run_onnx(resize, "resizing", PIXELS, (source() for source in sources))
    pixels = torch.cat([torch.from_numpy(row) for row in rows])
    where = f"{images.source} ({len(made)} of them resized to be {', '.join(SHAPES)})"
    found = CheckImages(pixels, names, where)
    differences = _differences(trained, torch.cat([own, validated]), found)
    about = {"input": IMAGE, "output": PROBABILITIES, "differences": differences}
    return replace(found, any_size=tuple(sources), prepend=functools.partial(prepend, data), about=about)


def _reshaped(bases: list[np.ndarray], data: DataConfig) -> dict[str, np.ndarray]:
    """Each image in each of SHAPES, by name."""
    high, wide = sides(data.IMAGE_SIZE)
    made = dict[str, np.ndarray]()
    for number, base in enumerate(bases):
        for name, (of_width, of_height) in SHAPES.items():
            size = (max(1, round(of_width * wide)), max(1, round(of_height * high)))
            image = Image.fromarray(base).resize(size, Image.Resampling.BICUBIC)
            made[f"{name} {number}"] = np.asarray(image)
    return made


def _differences(trained: Trained, own: Tensor, found: CheckImages) -> dict[str, float]:
    """Between the pixels of validation and those by ONNX, and between their probabilities.

    Raises TrainingError if a clear prediction differs.
    """
    wanted = trained.task.probabilities(reference_logits(trained, replace(found, pixels=own)))
    given = trained.task.probabilities(reference_logits(trained, found))
    apart = (own.short() - found.pixels.short()).abs()
    percent = 100 * float((apart > 0).double().mean())
    most = int(apart.max())
    worst = float((wanted - given).abs().max())
    other = clearly_other(thresholds_of(trained), wanted, given)
    if other.any():
        first = found.names[int(torch.nonzero(other)[0])]
        raise TrainingError(
            f"-with_resize: resized by ONNX, {int(other.sum())} of {counted(len(found.names), 'image')} {found.source} "
            f"are clearly predicted otherwise than in validation, such as {first}: pixels differ by up to {most} of "
            f"255, probabilities by up to {worst:.2g}. {ADVICE}"
        )
    log.info(
        "Resized by ONNX, pixels differ from those of validation by at most %d of 255 (%.2f %% of them), probabilities "
        "by at most %.1e.",
        most,
        percent,
        worst,
    )
    return {
        "images": len(found.names),
        "pixels": most,
        "pixels_percent": round(percent, 4),
        "probabilities": worst,
    }


def _check_input(data: DataConfig) -> None:
    mode, crop_pct = crop_of(data)
    if not data.is_plain:
        what = "for 8-bit grey and RGB images, and this model takes others"
        raise UserError(f"-with_resize: {what}; use -with_preprocess.")
    if crop_pct > 1:
        raise UserError(f"-with_resize: DATA.CROP_PCT {crop_pct:g} is not supported, only up to 1. {ADVICE}")
    if mode not in SIZES:
        raise UserError(f"-with_resize: DATA.CROP_MODE {mode} is not supported, only center and squash. {ADVICE}")


def clearly_other(thresholds: Tensor | None, expected: Tensor, found: Tensor) -> Tensor:
    """Rows of probabilities whose prediction differs, although that is clear."""
    if thresholds is None:
        first, second = expected.topk(2, dim=1).values.unbind(1)
        return (expected.argmax(1) != found.argmax(1)) & (first - second > CLEAR)
    other = (expected >= thresholds) != (found >= thresholds)
    return (other & ((expected - thresholds).abs() > CLEAR)).any(1)


def _decoded(data: DataConfig, samples: Samples, index: int) -> np.ndarray:
    """A stored image, upright and without transparency."""
    return _rgb(Reader(data).whole(samples.read(index)))


def _rgb(pixels: np.ndarray) -> np.ndarray:
    return pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels


def prepend(data: DataConfig, model: ir.Model) -> None:
    """Let `model`, which takes pixels of the model's size, take an image of any size."""
    nodes = ir.from_proto(resize_model(data)).graph
    image = nodes.inputs[0]
    made = nodes.outputs[0]
    (taken,) = model.graph.inputs
    for node in nodes:
        name = node.name or node.outputs[0].name
        node.name = f"prepare.{name}"
        for value in node.outputs:
            value.name = f"prepare.{value.name}"
    moved = list(nodes)
    first = model.graph[0]
    nodes.outputs.clear()
    nodes.inputs.clear()
    nodes.remove(moved)
    model.graph.insert_before(first, moved)
    taken.replace_all_uses_with(made)
    model.graph.inputs[0] = image


def resize_model(data: DataConfig) -> onnx.ModelProto:
    """A model of these nodes alone: `image`, H x W x 3, to `pixels`, 1 x C x H x W of the model, both uint8."""
    mode, crop_pct = crop_of(data)
    size = sides(data.IMAGE_SIZE)
    high, wide = (math.floor(side / crop_pct) for side in size)
    if mode == "center" and high != wide:
        mode = "center, not square"
    channels = GREY if data.IMAGE_CHANNELS == 1 else "\n  channels = Identity (batch)"
    # As PIL: first the columns, then the rows, each rounded to whole numbers.
    return onnx.parser.parse_model(f"""
<ir_version: 8, opset_import: ["" : {OPSET}]>
prepare (uint8[H, W, 3] {IMAGE}) => (uint8[1, {data.IMAGE_CHANNELS}, {size[0]}, {size[1]}] {PIXELS})
{{
  size2 = Constant <value_ints = [{size[0]}]> ()
  size3 = Constant <value_ints = [{size[1]}]> ()
  side_high = Constant <value_ints = [{high}]> ()
  side_wide = Constant <value_ints = [{wide}]> ()
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
  sizes2 = Concat <axis = 0> (outer, high, size3)
{_along(data, 3, "floats", "wide")}{_along(data, 2, "cropped3", "high")}
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
  spare{axis} = Sub ({length}, size{axis})
  spare_float{axis} = Cast <to = 1> (spare{axis})
  halved{axis} = Mul (spare_float{axis}, half)
  start_float{axis} = Round (halved{axis})
  start{axis} = Cast <to = 7> (start_float{axis})
  end{axis} = Add (start{axis}, size{axis})
  axis{axis} = Constant <value_ints = [{axis}]> ()
  cropped{axis} = Slice (clipped{axis}, start{axis}, end{axis}, axis{axis})"""
