"""Load pretrained weights into a built model: timm's filters adapt them, then all are loaded or none."""

import argparse
import contextlib
import importlib
import inspect
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import adapt_input_conv, load_state_dict
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from models.build import OWN_SCALE, sizes_in
from models.masked import DECODER, MaskedAutoencoder
from models.parts import classifiers, is_inside, names_in_cfg, pretrained_cfg
from models.sizes import RESIZED, SIZE_WORDS, given_sizes, sizes_of
from models.weights.find import PADDLE, WeightFiles, locate, model_of_run, size_of_run, unreadable
from models.weights.paddle import OF_A_CLASSIFIER, Converted, convert, keys_of_weights, read_pdparams, sizes_of_weights
from utils.config.kinds import one_line
from utils.errors import UserError
from utils.log import log
from vitamp.checkpoints import LORA, seal_of, sha256_of, verified_base
from vitamp.meta import META, Adapters, check_fields, unchecked_meta
from vitamp.pooling import OWN_POOL
from vitamp.sizes import ImageSize, in_pixels, sides
from vitamp.tensors import JoinedShards, Merged, is_adapter

COUNTER = ".num_batches_tracked"
"""End of the name of a batch norm's counter. Older files have none, and torch loads them without."""
MOST_NAMED = 5
"""Tensors of each kind that an error names"""
FRESH = "freshly initialised"
CANNOT_RESIZE = (
    "timm cannot resize the position embedding of this kind of model; use the DATA.IMAGE_SIZE of the weights"
)
"""Reason in an error about weights for another grid of patches"""
GRID_WEIGHTS = "pos_embed|patch_pos|attention_bias"
"""Pattern in the names of weights that depend on the grid of patches"""
NEW_HEAD_WORDS = {"zero": "starts at zeros", "probe": "is replaced by a linear probe"}
"""MODEL.NEW_CLASSIFIER -> words for how a new classifier begins; with other values, it stays freshly initialised"""
REPLACED_HEAD = f"{{}} {FRESH} ({{}} classes in the file, {{}} in the model)"

MISFIT_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that timm's readers raise for weights of another model"""

Weights = dict[str, Tensor]
"""Tensors by name"""


class Loaded(NamedTuple):
    """The result of loading a file of weights."""

    words: str
    """What was loaded, such as '150 of 152 tensors'"""
    changes: list[str]
    """Phrases about what was resized, left out, or stays freshly initialised"""
    is_partly_new: bool
    """Whether parts of the model stay freshly initialised"""


def load_pretrained(
    module: nn.Module, source: str, name: str, new_classifier: bool | str = False, complete: bool = False
) -> str:
    """Load weights from `source` into the model called `name`, and return a sentence for the log about what was loaded.

    `new_classifier`: MODEL.NEW_CLASSIFIER; if it is set, the model keeps its own classifier instead of the file's.
    `complete`: refuse weights that leave a classifier freshly initialised, as evaluation needs.
    """
    new_head_words = f"left as {FRESH}"
    if not complete:
        new_head_words = NEW_HEAD_WORDS.get(str(new_classifier), new_head_words)
    files = locate(source)
    assert files is not None  # downloaded, or an error was raised
    new_heads = classifiers(module) if new_classifier else ()
    has_classifier = not isinstance(module, MaskedAutoencoder)
    if new_classifier and not new_heads and has_classifier:
        raise UserError(
            f"MODEL.NEW_CLASSIFIER: {type(module).__name__}'s classifier is unknown; get_classifier must return it."
        )
    if files.file.suffix == ".npz":
        # timm's reader loads the classifier, too, so the model's own is put back.
        own_heads = {key: value.clone() for key, value in module.state_dict().items() if is_inside(key, new_heads)}
        loaded = _load_npz(module, files.file, name)
        module.load_state_dict(own_heads, strict=False)
        if new_heads:
            loaded.changes.append(f"{', '.join(new_heads)} {new_head_words}")
    else:
        new_parts = {prefix: f"{prefix} {new_head_words} (MODEL.NEW_CLASSIFIER)" for prefix in new_heads}
        loaded = _load_tensors(module, files, name, new_parts)
    phrases = [f"{loaded.words} from {files.file}"] + loaded.changes
    sentence = f"Pretrained weights: {'; '.join(phrases)}"
    has_untrained_classifier = bool(loaded.is_partly_new or new_heads)
    if complete and has_untrained_classifier:
        raise UserError(
            f"{sentence}. -eval trains nothing, so its accuracy would be that of an untrained classifier: "
            "set MODEL.NUM_CLASSES to the number of classes in the file, evaluate on data with these classes, and "
            "leave out MODEL.NEW_CLASSIFIER; or train first, without -eval."
        )
    if new_classifier == "zero":
        _zero_classifiers(module)
    return f"{sentence} ({files.description})" if files.description else sentence


def _zero_classifiers(model: nn.Module) -> None:
    """Set the last layer of each classifier to zeros. Earlier layers stay: with zeros there, nothing would learn.

    A classifier may have several last layers, whose outputs are averaged, as in CrossViT. They are those with as many
    outputs as the last one.
    """
    for head in map(model.get_submodule, classifiers(model)):
        layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        for layer in layers:
            outputs = len(layer.weight)
            outputs_of_last = len(layers[-1].weight)
            if outputs == outputs_of_last:
                for weight in layer.parameters():
                    nn.init.zeros_(weight)


def _load_tensors(module: nn.Module, files: WeightFiles, name: str, new_parts: dict[str, str]) -> Loaded:
    """Load weights by the names of tensors, all or none. UserError lists the tensors that do not fit.

    `new_parts`: parts of the model that keep their initial weights, each with its phrase for the log. If the file lacks
    the decoder of a masked autoencoder, the decoder is added to `new_parts`.
    """
    in_file = _read(files.files)
    target = module.state_dict()

    # Leave out the part of the file that such a model does not have: a masked autoencoder has no classifier, and other
    # models seldom have a decoder.
    is_masking = isinstance(module, MaskedAutoencoder)
    unused = "head" if is_masking else DECODER
    given: Weights = {}
    for key, value in in_file.items():
        is_unused = key.startswith(f"{unused}.") and key not in target
        if not is_unused:
            given[key] = value
    changes: list[str] = []
    if len(given) < len(in_file):
        changes.append(f"{len(in_file) - len(given)} tensors of its {unused} left out")

    # Resize position embeddings, patches and input channels to those of the model.
    shapes_in_file = {key: tuple(value.shape) for key, value in given.items()}
    weights = _adapt_channels(module, _converted_by_timm(module, given, files.file, name))
    for key, value in weights.items():
        shape = tuple(value.shape)
        if shapes_in_file.get(key, shape) != shape:
            changes.append(f"{key} resized from {_shape(shapes_in_file[key])} to {_shape(shape)}")

    # Leave out classifiers that do not fit; the model's stay.
    if is_masking and not any(key.startswith(DECODER) for key in weights):
        new_parts[DECODER] = f"the {DECODER} stays {FRESH}"
    heads = names_in_cfg(module, "classifier") or classifiers(module)
    fresh_tensors, replaced_heads = _replace_classifier(heads, weights, target, files.label_offset, new_parts)

    lines = _mismatches(weights, shapes_in_file, target, fresh_tensors)
    if lines:
        _, *tensor_lines = lines  # after the title 'differ (2):'; titles of further kinds match no pos_embed
        only_positions = all(re.match(r" +\S*pos_embed\S*: ", line) for line in tensor_lines)
        reason = CANNOT_RESIZE if only_positions else ""
        if not heads:
            lines.append(
                f"  {type(module).__name__}'s classifier is unknown; if get_classifier returns it, one with other "
                "classes is new, or with MODEL.NEW_CLASSIFIER any"
            )
        title = f"{_misfit(module, given, files.file, name, reason)}:"
        raise UserError("\n".join([title] + lines))
    module.load_state_dict(weights, strict=False)
    changes += replaced_heads
    changes += new_parts.values()
    is_partly_new = bool(replaced_heads or new_parts)
    return Loaded(f"{len(weights)} of {len(target)} tensors", changes, is_partly_new)


def _read(files: Sequence[Path]) -> Weights:
    """Read the tensors of a file or its shards, without the wrappings of DDP, torch.compile and training scripts.

    Raises UserError if a file is damaged, holds code, or holds no tensors. Adapters are merged into their base weights.
    """
    file = files[0]  # names all shards in messages
    for shard in files:
        seal = seal_of(shard)  # size and hash that a run saved with the file; None for other files
        if isinstance(seal, dict) and sha256_of(shard) != seal.get("sha256"):
            raise UserError(f"Pretrained weights {shard}: damaged, its contents are not what was written.")
    if file.suffix == PADDLE:
        return _read_paddle(file)
    # timm loads the EMA of a checkpoint that has one; `keys_of_weights` logs this. The result is not needed here, and
    # errors are left to the loading below. With mmap, no tensors are read.
    with contextlib.suppress(Exception), torch.serialization.safe_globals([argparse.Namespace]):
        keys_of_weights(torch.load(file, map_location="cpu", weights_only=True, mmap=True), file)
    tensors: Mapping[str, Any]
    try:
        if len(files) == 1:
            tensors = load_state_dict(str(file), weights_only=True)
        else:
            tensors = JoinedShards(list(files))
        weights = dict(tensors)
        weights.pop("n_averaged", None)  # a counter of torch's AveragedModel, the EMA of torchvision's checkpoints
    except Exception as error:  # a damaged pickle can raise anything
        if "weights_only" in str(error):
            raise UserError(
                f"Pretrained weights {file}: the file holds more than tensors, and loading it could run malicious "
                "code. Save the model's state_dict() alone."
            ) from None
        raise UserError(unreadable(file, error)) from None
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        keys = ", ".join(map(str, list(weights)[:MOST_NAMED])) or "nothing"
        raise UserError(f"Pretrained weights {file}: no tensors under model, state_dict or model_ema; it holds {keys}.")
    if any(is_adapter(key) for key in weights):
        return _merged(weights, file)
    return weights


def _read_paddle(file: Path) -> Weights:
    """Read a file of PaddleViT, and return its tensors by timm's names.

    Tensors that timm's model does not have keep their names, so that an error reports them with all other mismatches.
    Only if they are of a classifier, they are left out, because timm's model may lack it.
    """
    arrays = read_pdparams(file)
    converted = convert(arrays, file)
    weights = dict(converted.tensors)
    for name in converted.unused:
        if not name.startswith(OF_A_CLASSIFIER):
            weights[name] = torch.from_numpy(arrays[name].copy())
    return weights


def _merged(weights: Weights, file: Path) -> Weights:
    """Merge the adapters that a run has trained (MODEL.LORA) into its frozen weights, and return all weights.

    UserError if the meta.json beside `file`, which names the frozen weights, is missing or damaged.
    """
    meta = unchecked_meta(file.parent)
    if meta.get(LORA) is None:
        raise UserError(
            f"Pretrained weights {file}: the file holds adapters, and the {META} beside it, which names the frozen "
            "weights they belong to, is missing. Name the run's folder."
        )
    check_fields(Adapters, meta[LORA], file.with_name(META))
    base = verified_base(file.parent, meta)
    log.info("%s: the adapters (MODEL.LORA) are merged into the frozen weights of %s.", file, base)
    return dict(Merged(load_state_dict(str(base)) | weights, meta[LORA]["factor"]))


def _converted_by_timm(module: nn.Module, weights: Weights, file: Path, name: str) -> Weights:
    """Convert weights by timm's function for this kind of model, which resizes position embeddings and patches.

    It also renames the tensors of other layouts. UserError if the weights do not fit the model.
    """
    convert = _timms_filter(module)
    if convert is None:
        return dict(weights)
    parameters = inspect.signature(convert).parameters
    # DeiT III's first files name their layer scale gamma_1; for other files the option has no effect.
    options = {"adapt_layer_scale": True} if "adapt_layer_scale" in parameters else {}
    # The size of the images of training: a number for squares, else (height, width). timm's function looks it up in
    # this attribute, and would take the patches for a square grid without it.
    trained_size = size_of_run(file)
    if trained_size is not None:
        vars(module)["pretrained_model_args"] = {"img_size": trained_size}
    takes_model = len(parameters) > 1
    try:
        converted = dict(convert(weights, module, **options) if takes_model else convert(weights))
    except MISFIT_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{_misfit(module, weights, file, name)}: {reason}.") from None
    is_same_rectangle = isinstance(trained_size, tuple) and trained_size == _image_size(module)
    if is_same_rectangle:
        # The weights fit as they are. timm may have resized a table that it took for the table of a square: undo that.
        target = module.state_dict()
        for key in converted.keys() & weights:
            if weights[key].shape == target[key].shape:
                converted[key] = weights[key]
    if _is_left_for_other_grid(module, weights, converted, trained_size):
        raise UserError(f"{_misfit(module, weights, file, name, CANNOT_RESIZE)}.")
    return converted


def _timms_filter(module: nn.Module) -> Callable[..., Any] | None:
    """Find timm's function that converts weights for this kind of model; None without one.

    It is in the Python module of the model's class, or of a base class.
    """
    for model_class in type(module).__mro__:
        python_module = importlib.import_module(model_class.__module__)
        for name in ("checkpoint_filter_fn", "_filter_fn"):
            if hasattr(python_module, name):
                return getattr(python_module, name)
    return None


def _is_left_for_other_grid(
    module: nn.Module, weights: Weights, converted: Weights, trained_size: ImageSize | None
) -> bool:
    """Tell whether weights depend on another grid of patches than the model's, and timm left them as they were.

    For most models, timm only compares the numbers of patches: it does not resize weights for 14 x 14 patches to
    7 x 28, which are as many. `converted`: what timm made of `weights`. `trained_size`: size of the images that the
    weights were trained on; None: timm's size for the model.
    """
    model_size = _image_size(module)
    if model_size is None:
        return False
    _, *timms_size = pretrained_cfg(module).get("input_size", (0, *model_size))  # channels, height, width
    trained_high_and_wide = sides(trained_size or tuple(timms_size))
    # Images of equal area have equally many patches.
    has_equal_area = math.prod(trained_high_and_wide) == math.prod(model_size)
    if trained_high_and_wide == model_size or not has_equal_area:
        return False
    if isinstance(module, MlpMixer):  # its layers that mix patches depend on the grid, and timm resizes none of them
        return True
    # Tables of positions have 2 or 3 dimensions. timm returns the same tensor object if it changed nothing.
    tables = [key for key in weights if re.search(GRID_WEIGHTS, key) and weights[key].ndim in (2, 3)]
    return any(weights[key] is converted.get(key) for key in tables)


def _image_size(module: nn.Module) -> tuple[int, int] | None:
    """Return the size of the images that a model with patches is built for; None if any size will do."""
    embedding: Any = getattr(module, "patch_embed", None) or getattr(module, "stem", None)
    return getattr(embedding, "img_size", None)


def _adapt_channels(module: nn.Module, weights: Weights) -> Weights:
    """Adapt the weights of the first convolution to another number of image channels, as timm does.

    Changes `weights`, and returns them. What timm cannot adapt stays as it is.
    """
    for prefix in names_in_cfg(module, "first_conv"):
        key = f"{prefix}.weight"
        target = module.state_dict().get(key)
        given = weights.get(key)
        if target is None or given is None or target.ndim != 4 or given.ndim != 4:
            continue
        channels = target.shape[1]
        given_channels = given.shape[1]
        if channels == given_channels:
            continue
        try:
            weights[key] = adapt_input_conv(channels, given, base_chans=given_channels)
        except (AssertionError, NotImplementedError):
            continue  # `_mismatches` reports it
    return weights


def _replace_classifier(
    heads: tuple[str, ...], weights: Weights, target: Weights, label_offset: int, new_parts: Collection[str]
) -> tuple[set[str], list[str]]:
    """Remove from `weights` what the model must not load: `new_parts`, and classifiers with other numbers of classes.

    `heads`: names of the model's classifiers. `target`: the model's tensors. `label_offset`: leading classes of the
    file that are skipped, such as a background class. `new_parts`: modules that keep their initial weights. Returns the
    names of the tensors that stay freshly initialised, and a phrase for the log about each classifier among them that
    `new_parts` does not list.
    """
    fresh_tensors = {key for key in target if is_inside(key, new_parts)}
    for key in list(weights):
        if is_inside(key, new_parts):
            del weights[key]
    phrases: list[str] = []
    for prefix in heads:
        head_keys = [key for key in (f"{prefix}.weight", f"{prefix}.bias") if key in target]
        is_in_new_parts = fresh_tensors.issuperset(head_keys)
        if is_in_new_parts:
            continue
        weight_key = head_keys[0]
        weight_in_file = weights.get(weight_key)
        if weight_in_file is None:
            fresh_tensors.update(head_keys)
            phrases.append(f"the file has no {prefix}; the model's {prefix} stays {FRESH}")
            continue
        classes_in_file = weight_in_file.shape[0]
        classes = target[weight_key].shape[0]
        has_leading_classes = label_offset > 0 and classes_in_file == classes + label_offset
        if has_leading_classes:  # skip them: their rows come first
            for key in head_keys:
                if key in weights:
                    weights[key] = weights[key][label_offset:]
        elif classes_in_file != classes:
            for key in head_keys:
                weights.pop(key, None)
            fresh_tensors.update(head_keys)
            phrases.append(REPLACED_HEAD.format(prefix, classes_in_file, classes))
    return fresh_tensors, phrases


def _misfit(module: nn.Module, weights: Weights, file: Path, name: str, reason: str = "") -> str:
    """Begin an error about weights that do not fit the model: 'Pretrained weights FILE do not fit NAME: reason'.

    Without a `reason`, it names the sizes in which model and weights differ. For the weights of a run, it ends with the
    words to add to the command.
    """
    model_sizes = sizes_of(module)
    model_sizes["POOL"] = vars(module).get(OWN_POOL)
    model_sizes["INIT_VALUES"] = vars(module).get(OWN_SCALE)

    # Find the sizes of the weights: from the settings of the run that saved them, or else from their shapes. That fails
    # for other models than ViT and Swin, and for names of another program. Then the sizes are empty.
    run = None
    weights_sizes: dict[str, Any] = {}
    with contextlib.suppress(UserError, LookupError, ValueError):
        run = model_of_run(file)
        if run:
            weights_sizes = sizes_in(run)
        else:
            family = "swin" if any(key.startswith("layers.") for key in weights) else "vit"
            weights_sizes = sizes_of_weights(Converted(family, tensors=weights))

    differing: dict[str, Any] = {}
    for key, value in weights_sizes.items():
        value_of_model = model_sizes.get(key, value)
        is_known = run is not None or value is not None  # None means unknown in shapes, but off in a run's settings
        if key not in RESIZED and is_known and value != value_of_model:
            differing[key] = value
    if not reason:
        phrases = [
            f"{SIZE_WORDS.get(key, key)} {one_line(value)} in the weights, {one_line(model_sizes[key])} in the recipe"
            for key, value in differing.items()
        ]
        reason = "; ".join(phrases) or "they may be of another model, which -model names (-list_models prints timm's)"
    text = f"Pretrained weights {file} do not fit {name}: {reason}"
    if run is None:
        return text

    # What to add to the command for the run's model: sizes, or for a model of another kind its type and name, too.
    settings_to_add = differing
    is_other_kind = model_sizes.keys() != weights_sizes.keys()
    if is_other_kind:
        settings_to_add = {"TYPE": run.TYPE, "NAME": run.NAME} | given_sizes(run)
    words = " ".join(f"MODEL.{key}={shlex.quote(one_line(value))}" for key, value in settings_to_add.items())
    return f"{text}. For the model of the run, add {words} to the command" if words else text


def _mismatches(
    weights: Weights, shapes_in_file: dict[str, tuple[int, ...]], target: Weights, fresh: set[str]
) -> list[str]:
    """List the tensors that differ in shape, are missing, or are unknown to the model, as lines of an error.

    `shapes_in_file`: the shapes before anything was resized. `target`: the model's tensors. `fresh`: tensors that may
    be missing, because they stay freshly initialised.
    """
    differing = []
    missing = []
    for key, tensor in target.items():
        if key not in weights:
            may_be_missing = key in fresh or key.endswith(COUNTER)  # older files have no counters of batch norms
            if not may_be_missing:
                missing.append(key)
        elif weights[key].shape != tensor.shape:
            shape_in_file = shapes_in_file.get(key, tuple(weights[key].shape))
            differing.append(f"{key}: {_shape(shape_in_file)} in the file, {_shape(tuple(tensor.shape))} in the model")
    unknown = [key for key in weights if key not in target]
    lines: list[str] = []
    for title, tensors in (("differ", differing), ("missing in the file", missing), ("unknown to the model", unknown)):
        if tensors:
            lines.append(f"  {title} ({len(tensors)}):")
            lines += [f"    {line}" for line in tensors[:MOST_NAMED]]
            if len(tensors) > MOST_NAMED:
                lines.append(f"    ... and {len(tensors) - MOST_NAMED} more")
    return lines


def _load_npz(module: Any, file: Path, name: str) -> Loaded:
    """Load Google's ViT weights (AugReg and earlier) with timm's reader. UserError if they do not fit."""
    if not hasattr(module, "load_pretrained"):
        raise UserError(f"Pretrained weights {file}: .npz files are for ViTs; {name} is a {type(module).__name__}.")

    # Read the names and two shapes, by which the changes are described.
    position_shape = None
    head_shape = None
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = archive.files
            for key in names:
                if key.endswith("pos_embedding"):
                    position_shape = archive[key].shape
                elif key.endswith("head/bias"):
                    head_shape = archive[key].shape
    except Exception as error:  # numpy and zlib have errors of many types
        raise UserError(unreadable(file, error)) from None
    matches = [re.search(r"encoderblock_(\d+)/", key) for key in names]
    blocks = {int(match[1]) for match in matches if match}
    if blocks and len(blocks) != len(module.blocks):  # timm's reader would ignore surplus blocks silently
        raise UserError(
            f"Pretrained weights {file} do not fit {name}: {len(blocks)} blocks in the file, "
            f"{len(module.blocks)} in the model (MODEL.DEPTH)."
        )

    # Describe what timm's reader will change.
    changes: list[str] = []
    embedding = getattr(module, "pos_embed", None)
    model_shape = tuple(embedding.shape) if isinstance(embedding, Tensor) else None
    if position_shape and model_shape and position_shape != model_shape:
        changes.append(f"pos_embed resized from {_shape(position_shape)} to {_shape(model_shape)}")
    has_new_head = True
    if head_shape is None:
        changes.append(f"the file has no head; the model's head stays {FRESH}")
    elif head_shape[-1] != module.num_classes:
        changes.append(REPLACED_HEAD.format("head", head_shape[-1], module.num_classes))
    else:
        has_new_head = False

    # Load. The patches of such files form a square. timm's reader resizes the position embedding if the model has
    # another number of patches; a rectangle of equally many is resized here.
    try:
        module.load_pretrained(str(file))
        grid = module.patch_embed.grid_size
        if position_shape and position_shape == model_shape and grid[0] != grid[1]:
            prefix_tokens = position_shape[1] - math.prod(grid)
            module.pos_embed.data = resample_abs_pos_embed(
                module.pos_embed.data, list(grid), num_prefix_tokens=prefix_tokens
            )
            changes.append(f"pos_embed resized to {in_pixels(grid)} patches")
    except MISFIT_ERRORS as error:
        raise UserError(f"Pretrained weights {file} do not fit {name}: {error}.") from None
    return Loaded(f"{len(names)} arrays", changes, is_partly_new=has_new_head)


def _shape(shape: tuple[int, ...]) -> str:
    """Write a shape as 768x3x16x16; 'scalar' without dimensions."""
    return "x".join(map(str, shape)) or "scalar"
